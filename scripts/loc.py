"""Count lines of code per layer: ``python scripts/loc.py [--files N]``.

Counts lines that hold code: blank lines, comments and docstrings are left out (Python by its own
tokenizer, C++ by stripping comments). Only files that git tracks or would track count.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = (
    "entrypoints",
    "engine",
    "core",
    "executor",
    "worker",
    "models",
    "loading",
    "kernels",
)
ORDER = (
    *LAYERS,
    "leaves",
    "csrc/core",
    "csrc/kernels",
    "csrc/bindings",
    "csrc/include",
    "csrc",
    "tests",
    "benchmarks",
    "examples",
    "scripts",
)


def layer_of(path: Path) -> str | None:
    """Layer of a repository path, None for a file that is not counted."""
    parts = path.parts
    if path.suffix not in {".py", ".pyi", ".cpp", ".h"}:
        return None
    if parts[:2] == ("src", "tellin"):
        return parts[2] if parts[2] in LAYERS else "leaves"
    if parts[0] == "csrc":
        return f"csrc/{parts[1]}" if len(parts) > 2 else "csrc"
    return parts[0] if parts[0] in ORDER else None


def python_lines(text: str) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    tree = ast.parse(text)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:
            # A string that stands alone is documentation: of the module, class, function or field.
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return sum(
        1
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#") and number not in docstrings
    )


def cpp_lines(text: str) -> int:
    """Lines left after comments are removed."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return sum(1 for line in text.splitlines() if re.sub(r"//.*", "", line).strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=0, help="also list the N longest files")
    args = parser.parse_args()
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\n")
    code: dict[str, int] = defaultdict(int)
    files: dict[str, int] = defaultdict(int)
    longest: list[tuple[int, str]] = []
    for name in filter(None, listed):
        path = Path(name)
        layer = layer_of(path)
        if layer is None or not (ROOT / path).is_file():
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        code[layer] += python_lines(text) if path.suffix.startswith(".py") else cpp_lines(text)
        files[layer] += 1
        longest.append((text.count("\n"), name))
    print(f"{'layer':<16}{'files':>7}{'code lines':>12}")
    for layer in ORDER:
        if files[layer]:
            print(f"{layer:<16}{files[layer]:>7}{code[layer]:>12}")
    print(f"{'total':<16}{sum(files.values()):>7}{sum(code.values()):>12}")
    for lines, name in sorted(longest, reverse=True)[: args.files]:
        print(f"{lines:>6}  {name}")


if __name__ == "__main__":
    main()
