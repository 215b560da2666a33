"""``tellin models``: what is in the model store, and what could be."""

from __future__ import annotations

import argparse
import json

DESCRIPTION = "List the models that are known by name, and those that were pulled."

EXAMPLES = """\
examples:
  tellin models
  tellin models --json | jq -r '.[] | select(.is_pulled).path'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print a JSON array")


def run(args: argparse.Namespace) -> int:
    """Print the list."""
    from tellin.loading import list_models
    from tellin.settings import Settings

    models = list_models(Settings.from_environ())
    if args.json:
        records = [
            {
                "name": model.name,
                "description": model.description,
                "license": model.license,
                "is_pulled": model.is_pulled,
                "path": str(model.path),
                "num_bytes": model.num_bytes,
            }
            for model in models
        ]
        print(json.dumps(records, indent=2, ensure_ascii=False))
        return 0
    width = max((len(model.name) for model in models), default=0)
    for model in models:
        state = "pulled" if model.is_pulled else "-"
        size = f"{model.num_bytes / 1e6:.0f} MB"
        print(f"{model.name:{width}}  {state:6}  {size:>8}  {model.description}")
    return 0
