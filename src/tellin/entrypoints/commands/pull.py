"""``tellin pull``: fetch a model into the model store."""

from __future__ import annotations

import argparse

from tellin.entrypoints.commands.common import download_progress

DESCRIPTION = """\
Fetch a model into the model store (TELLIN_HOME), checked against its SHA-256. Does nothing if it is
there. An interrupted download leaves nothing behind."""

EXAMPLES = """\
examples:
  tellin pull smollm2
  tellin pull org/model-GGUF:Q4_K_M      (needs the extra 'hf')
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("name", nargs="+", help="names from 'tellin models', or hub repositories")


def run(args: argparse.Namespace) -> int:
    """Fetch each model and print where it is."""
    from tellin.loading import pull
    from tellin.settings import Settings

    settings = Settings.from_environ()
    for name in args.name:
        print(pull(name, settings, download_progress()), flush=True)
    return 0
