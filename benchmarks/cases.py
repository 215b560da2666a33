"""What is measured: a case says it in numbers that every driver understands.

Cases travel to the drivers as JSON, so they hold plain values. A driver answers one measurement
with
``seconds`` and ``tokens``; everything else (turns, medians, ratios) is the parent's business.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

PROMPT_LEN = 16
"""Prompt tokens of each stream of a batched case: prompts are random and share no prefix."""


@dataclass(frozen=True)
class Case:
    """One row of the table.

    kind: ``prefill`` (one prompt of ``num_tokens``), ``decode`` (one stream, ``steps`` tokens after
    ``context`` tokens) or ``batched`` (``streams`` streams, ``steps`` tokens each).
    ``neighbour``: another process keeps one core busy meanwhile.
    """

    kind: str
    num_tokens: int = 0
    context: int = 0
    streams: int = 1
    steps: int = 0
    neighbour: bool = False

    @property
    def name(self) -> str:
        if self.kind == "prefill":
            return f"prefill {self.num_tokens}"
        if self.kind == "batched":
            return f"decode {self.streams} streams"
        return f"decode at {self.context}" + (" beside a busy process" if self.neighbour else "")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


FULL = (
    *(Case("prefill", num_tokens=n) for n in (128, 512, 2048)),
    *(Case("decode", context=n, steps=48) for n in (0, 1024, 4096)),
    *(Case("batched", streams=n, steps=16) for n in (4, 16, 64)),
    Case("decode", context=0, steps=48, neighbour=True),
)
QUICK = (
    *(Case("prefill", num_tokens=n) for n in (128, 512)),
    *(Case("decode", context=n, steps=24) for n in (0, 1024)),
    *(Case("batched", streams=n, steps=8) for n in (4, 16, 64)),
)
