"""``tellin plan``: the listing of a model's plan. Reads headers only, no weights."""

from __future__ import annotations

import argparse

from tellin.entrypoints.commands.common import download_progress

DESCRIPTION = """\
Print the operations that a model was compiled to, with their weights and costs; those of its image
encoder, if it has one, come after them. Layers like an earlier one are folded into a line."""

EXAMPLES = """\
examples:
  tellin plan smollm2
  tellin plan --full ./model.gguf | less
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("model", help="a .gguf file, a model folder, or a name")
    parser.add_argument("--full", action="store_true", help="print every layer")
    parser.add_argument("--unfused", action="store_true", help="as recorded, before the passes")


def run(args: argparse.Namespace) -> int:
    """Print the listing."""
    from tellin.loading import open_model, open_vision, resolve_model
    from tellin.models import build_plan
    from tellin.models.plan.listing import format_plan
    from tellin.models.vision import build_vision_plans
    from tellin.settings import Settings

    path = resolve_model(
        args.model, Settings.from_environ(), download=True, progress=download_progress()
    )
    with open_model(path) as source:
        print(format_plan(build_plan(source, fuse=not args.unfused), full=args.full))
    vision = open_vision(path)
    if vision is not None:
        for plan in build_vision_plans(vision, fuse=not args.unfused):
            print(f"\n{format_plan(plan, full=args.full)}")
        vision.close()
    return 0
