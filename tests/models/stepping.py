"""Steps for a backend without a scheduler: requests as token lists, blocks handed out in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from tellin.kernels.batch import StepBatch


@dataclass
class Stepper:
    """Keeps each request's length and block table, and turns work lists into steps.

    ``backend`` has ``num_blocks`` cache blocks, of which block 0 is never used.
    """

    backend: Any
    num_blocks: int = 64
    lengths: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)
    next_block: int = 1
    slots: dict[str, int] = field(default_factory=dict)
    """Of recurrent states: requests get them in order unless a test gives them."""
    adapters: dict[str, int] = field(default_factory=dict)
    """Slots of requests that have an adapter."""

    def __post_init__(self) -> None:
        self.backend.init_kv_cache(self.num_blocks)
        if self.backend.plan.state_layers:
            self.backend.init_state_cache(self.num_blocks)

    def step(
        self, work: Sequence[tuple[str, Sequence[int]]], saves: Sequence[tuple[int, int, int]] = ()
    ) -> list[np.ndarray]:
        """Append tokens to requests; logits of every new token, one array per item of ``work``.

        ``saves``: states to be saved, see `StepBatch.state_saves`.
        """
        size = self.backend.block_size
        tokens: list[int] = []
        positions: list[int] = []
        starts = [0]
        for name, ids in work:
            begin = self.lengths.get(name, 0)
            tokens += ids
            positions += range(begin, begin + len(ids))
            starts.append(len(tokens))
            self.lengths[name] = begin + len(ids)
            table = self.blocks.setdefault(name, [])
            while len(table) * size < self.lengths[name]:
                table.append(self.next_block)
                self.next_block += 1
        names = [name for name, _ in work]
        width = max(len(self.blocks[name]) for name in names)
        table = np.zeros((len(work), width), dtype=np.int32)
        for r, name in enumerate(names):
            table[r, : len(self.blocks[name])] = self.blocks[name]
        batch = StepBatch(
            token_ids=np.array(tokens, dtype=np.int32),
            positions=np.array(positions, dtype=np.int32),
            query_start_loc=np.array(starts, dtype=np.int32),
            seq_lens=np.array([self.lengths[name] for name in names], dtype=np.int32),
            block_table=table,
            logits_indices=np.arange(len(tokens), dtype=np.int32),
            state_slots=self._state_slots(names),
            adapter_slots=self._adapter_slots(names),
            state_saves=np.array(saves, dtype=np.int32) if saves else None,
        )
        logits = np.array(self.backend.forward(batch))
        return [logits[a:b] for a, b in pairwise(starts)]

    def _adapter_slots(self, names: Sequence[str]) -> np.ndarray | None:
        if not self.adapters:
            return None
        return np.array([self.adapters.get(name, -1) for name in names], dtype=np.int32)

    def _state_slots(self, names: Sequence[str]) -> np.ndarray | None:
        if not self.backend.plan.state_layers:
            return None
        for name in names:
            self.slots.setdefault(name, len(self.slots))
        return np.array([self.slots[name] for name in names], dtype=np.int32)


def logits_of(backend: Any, token_ids: Sequence[int]) -> np.ndarray:
    """Logits ``[num_tokens, vocab_size]`` of one prompt in one step."""
    return Stepper(backend).step([("only", [int(i) for i in token_ids])])[0]
