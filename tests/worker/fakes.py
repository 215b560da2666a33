"""A backend without a model, a scheduler without policy, a processor: what worker tests drive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tellin.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from tellin.kernels.batch import StepBatch
from tellin.logits_processor import BatchUpdate, LogitsProcessor
from tellin.sampling_params import SamplingParams
from tellin.settings import Settings
from tellin.step_protocol import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)

Floats = npt.NDArray[np.float32]


def make_config(
    vocab_size: int = 64,
    tokenizer_size: int | None = None,
    block_size: int = 16,
    speculative: SpeculativeConfig | None = None,
    **model: Any,
) -> EngineConfig:
    """A configuration for a model that does not exist."""
    return EngineConfig(
        ModelConfig(
            model="fake",
            path=Path("fake"),
            architecture="fake",
            max_model_len=4096,
            vocab_size=vocab_size,
            tokenizer_size=vocab_size if tokenizer_size is None else tokenizer_size,
            hidden_size=8,
            num_hidden_layers=1,
            **model,
        ),
        CacheConfig(block_size=block_size),
        SchedulerConfig(max_model_len=4096),
        ParallelConfig(),
        Settings(home=Path("fake")),
        speculative_config=speculative,
    )


class FakeBackend:
    """Logits that depend on every id of the request up to the position, through a fake cache.

    The cache holds, per slot, a running hash of the ids so far: a wrong block table, position or
    order changes the logits. ``patch`` may change logits: it gets the id sequence hash and the row.
    """

    def __init__(self, vocab_size: int, block_size: int = 16, num_blocks: int = 4096) -> None:
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.info: dict[str, Any] = {"backend": "fake"}
        self.steps: list[StepBatch] = []
        self.closed = False
        self.init_kv_cache(num_blocks)
        self.patch: Any = None

    def kv_bytes_per_block(self) -> int:
        return 1024

    def state_bytes_per_slot(self) -> int:
        return 0

    def init_kv_cache(self, num_blocks: int) -> None:
        self.cache: npt.NDArray[np.uint64] | None = np.zeros(
            num_blocks * self.block_size, np.uint64
        )

    def copy_kv_blocks(self, src_dst_pairs: Sequence[tuple[int, int]]) -> None:
        assert self.cache is not None
        size = self.block_size
        for source, target in src_dst_pairs:
            self.cache[target * size : (target + 1) * size] = self.cache[
                source * size : (source + 1) * size
            ]

    def free_kv_cache(self) -> None:
        self.cache = None

    def close(self) -> None:
        self.closed = True

    def forward(self, batch: StepBatch) -> Floats:
        assert self.cache is not None
        self.steps.append(batch)
        hashes = np.zeros(len(batch.token_ids), np.uint64)
        for r in range(len(batch.seq_lens)):
            begin, end = int(batch.query_start_loc[r]), int(batch.query_start_loc[r + 1])
            assert batch.seq_lens[r] == batch.positions[end - 1] + 1
            for t in range(begin, end):
                position = int(batch.positions[t])
                before = 0 if position == 0 else int(self.cache[self._slot(batch, r, position - 1)])
                value = (before * 6364136223846793005 + int(batch.token_ids[t]) + 1) % 2**64
                self.cache[self._slot(batch, r, position)] = value
                hashes[t] = value
        return np.stack(
            [np.zeros((0, self.vocab_size), np.float32)]
            if len(batch.logits_indices) == 0
            else [self.logits(int(hashes[i])) for i in batch.logits_indices]
        ).reshape(-1, self.vocab_size)

    def logits(self, state: int) -> Floats:
        """Logits after the ids that hash to ``state``."""
        row = np.random.default_rng(state).normal(size=self.vocab_size) * 3
        row = row.astype(np.float32)
        return row if self.patch is None else self.patch(state, row)

    def _slot(self, batch: StepBatch, row: int, position: int) -> int:
        block = int(batch.block_table[row, position // self.block_size])
        assert block > 0, "the null block was written"
        return block * self.block_size + position % self.block_size


class Driver:
    """Drives a runner as a scheduler would, request by request, with explicit chunks."""

    def __init__(self, runner: Any, block_size: int = 16) -> None:
        self.runner = runner
        self.block_size = block_size
        self.next_block = 1
        self.known: dict[str, list[int]] = {}
        self.prompt: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self.new: dict[str, NewRequestData] = {}
        self.resumed: set[str] = set()
        self.finished: set[str] = set()
        self.drafts: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.last: ModelRunnerOutput | None = None

    def add(
        self,
        req_id: str,
        prompt: list[int],
        params: SamplingParams | None = None,
        rng_key: int = 1,
    ) -> None:
        self.known[req_id] = list(prompt)
        self.prompt[req_id] = len(prompt)
        self.computed[req_id] = 0
        self.blocks[req_id] = []
        self.outputs[req_id] = []
        self.new[req_id] = NewRequestData(
            req_id,
            list(prompt),
            len(prompt),
            params or SamplingParams(temperature=0),
            None,
            [],
            0,
            rng_key,
        )

    def finish(self, req_id: str) -> None:
        self.finished.add(req_id)
        for table in (self.known, self.prompt, self.computed, self.blocks, self.drafts):
            table.pop(req_id, None)

    def preempt(self, req_id: str) -> None:
        self.computed[req_id] = 0
        self.blocks[req_id] = []
        self.drafts.pop(req_id, None)
        self.resumed.add(req_id)

    def step(self, counts: dict[str, int] | None = None, grammar: Any = None) -> ModelRunnerOutput:
        """Schedule ``counts`` tokens (None = all known, with drafts) and apply the result."""
        scheduled = self.schedule(counts)
        self.runner.execute_model(scheduled)
        output = self.runner.sample_tokens(grammar)
        self.apply(scheduled, output)
        return output

    def schedule(self, counts: dict[str, int] | None = None) -> SchedulerOutput:
        if counts is None:
            counts = {
                r: len(ids) + len(self.drafts.get(r, ())) - self.computed[r]
                for r, ids in self.known.items()
            }
        new, cached, spec = [], [], {}
        for req_id, count in counts.items():
            drafts = self.drafts.pop(req_id, [])
            end = self.computed[req_id] + count
            if drafts:
                spec[req_id] = drafts
            blocks = []
            while (len(self.blocks[req_id]) + len(blocks)) * self.block_size < end:
                blocks.append(self.next_block)
                self.next_block += 1
            self.blocks[req_id] += blocks
            if req_id in self.new:
                data = self.new.pop(req_id)
                data.block_ids = list(self.blocks[req_id])
                new.append(data)
                continue
            resumed = req_id in self.resumed
            self.resumed.discard(req_id)
            cached.append(
                CachedRequestData(
                    req_id,
                    blocks,
                    self.computed[req_id],
                    len(self.known[req_id]) - self.prompt[req_id],
                    resumed,
                    list(self.known[req_id]) if resumed else None,
                )
            )
        finished, self.finished = self.finished, set()
        return SchedulerOutput(new, cached, counts, sum(counts.values()), spec, finished, set())

    def apply(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        assert set(output.req_ids) == set(scheduled.num_scheduled_tokens)
        for req_id, ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
            drafts = len(scheduled.scheduled_spec_decode_tokens.get(req_id, ()))
            self.computed[req_id] += scheduled.num_scheduled_tokens[req_id]
            if ids:
                self.computed[req_id] -= drafts + 1 - len(ids)
            self.known[req_id] += ids
            self.outputs[req_id] += ids
        self.last = output

    def run(self, num_tokens: int) -> dict[str, list[int]]:
        """Step all requests until each has ``num_tokens`` outputs."""
        while any(len(self.outputs[r]) < num_tokens for r in self.known):
            self.step()
        return self.outputs


class Forcing(LogitsProcessor):
    """Forces ``extra_args["force"]`` for requests that ask for it; watches the diffs."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rows: dict[int, tuple[int, list[int], list[int]]] = {}
        self.seen: list[tuple[list[int], list[int]]] = []

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if (sampling_params.extra_args or {}).get("force", 0) < 0:
            raise ValueError("force must not be negative")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self.rows.pop(index, None)
            force = (params.extra_args or {}).get("force")
            if force is not None:
                assert prompt is not None
                self.rows[index] = (force, prompt, output)
        for source, target, _ in batch_update.moved:
            self.rows.pop(target, None)
            if source in self.rows:
                self.rows[target] = self.rows.pop(source)

    def apply(self, logits: np.ndarray) -> np.ndarray:
        for index, (force, prompt, output) in self.rows.items():
            logits[index] = -np.inf
            logits[index, (force + len(output)) % logits.shape[1]] = 0
            self.seen.append((prompt, list(output)))
        return logits
