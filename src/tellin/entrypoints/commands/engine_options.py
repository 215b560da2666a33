"""Every engine argument as an option of its own, as vLLM's commands have them.

``--max-num-seqs 64`` means ``--set max_num_seqs=64``. Help lists only what a command documents
itself, and ``--set``; a name that a command has already keeps its meaning there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add what ``parser``, which is otherwise complete and has ``--set``, lacks."""
    from dataclasses import fields

    from tellin.config import ENGINE_ARGS_WITHOUT_EFFECT, EngineArgs

    for item in fields(EngineArgs):
        if item.name != "model":  # each command has its own place for it
            _add(parser, item.name, item.type == "bool", _SetArgument)
    for name in sorted(ENGINE_ARGS_WITHOUT_EFFECT):
        _add(parser, name, name not in _WITH_VALUES, _NoEffect)


_WITH_VALUES = frozenset({"mamba_block_size", "mamba_cache_mode", "max_seq_len_to_capture"})


def _add(
    parser: argparse.ArgumentParser, name: str, is_switch: bool, action: type[argparse.Action]
) -> None:
    spelled = name.replace("_", "-")
    forms: dict[str, bool | None] = {f"--{spelled}": True if is_switch else None}
    if is_switch:
        forms[f"--no-{spelled}"] = False
    for option, value in forms.items():
        try:
            parser.add_argument(
                option,
                action=action,
                dest=name,
                nargs=0 if is_switch else None,
                const=value,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )
        except argparse.ArgumentError:  # the command has an option of this name
            continue


class _SetArgument(argparse.Action):
    """Write the assignment that ``--set`` takes."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        value = str(self.const).lower() if self.nargs == 0 else values
        namespace.set = [*namespace.set, f"{self.dest}={value}"]


class _NoEffect(argparse.Action):
    """Say that there is nothing to do."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        print(f"note: {option_string} has no effect here", file=sys.stderr)
