"""Print what extras of pyproject.toml require: ``python scripts/requirements.py test lint``.

``pip install --editable .[test]`` would build the extension once more to get at the same list.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="+", help="names of extras")
    args = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    unknown = [name for name in args.extras if name not in extras]
    if unknown:
        print(f"no such extra: {', '.join(unknown)}; known: {', '.join(extras)}", file=sys.stderr)
        return 2
    for name in args.extras:
        # The shell splits the output at white space: "pkg >=1" would be two words.
        print("\n".join(requirement.replace(" ", "") for requirement in extras[name]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
