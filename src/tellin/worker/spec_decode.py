"""Drafters: who guesses the next ids of a request.

A drafter proposes after a step has been sampled; the scheduler decides how many of the proposed ids
are worth verifying, and the next step samples every position from the model's own distribution. So
a drafter can change how fast ids come and nothing else. It reads the batch and never changes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tellin.exceptions import InvalidParameterError
from tellin.kernels.batch import StepBatch
from tellin.kernels.drafting import SuffixDrafter, propose_ngram
from tellin.worker.input_batch import InputBatch, RequestState

if TYPE_CHECKING:
    from tellin.config import EngineConfig
    from tellin.worker.backends import Backend

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class Drafter(ABC):
    """Proposes ids for requests that have just been sampled."""

    needs_hidden = False
    """Whether `follow` and then `propose`, be it of nothing, must be called after every pass."""

    def __init__(self, batch: InputBatch, max_model_len: int) -> None:
        self.batch = batch
        self.max_model_len = max_model_len

    def limits(self, slots: Int32Array, num_drafts: Int32Array) -> Int32Array:
        """``[n]`` most ids that each slot can still take, of ``num_drafts`` that are wanted."""
        room = self.max_model_len - self.batch.num_tokens[slots]
        return np.maximum(np.minimum(room, num_drafts), 0).astype(np.int32)

    def follow(self, slots: Int32Array, step: StepBatch, hidden: Float32Array) -> None:
        """The target has run ``step``, whose requests have these slots; see `needs_hidden`."""
        return

    @abstractmethod
    def propose(self, slots: Int32Array, num_drafts: Int32Array) -> list[list[int]]:
        """Up to ``num_drafts[i]`` ids for each of these slots; a list may be empty."""

    def finish(self, state: RequestState) -> None:
        """A request is about to be forgotten; its slot still holds its ids."""
        return

    def kv_bytes_per_block(self) -> int:
        """Bytes this drafter needs per KV block of the target."""
        return 0

    def init_kv_cache(self, num_blocks: int) -> None:
        """Make a pool of as many blocks as the target's."""
        return

    def copy_kv_blocks(self, src_dst_pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, as the target does."""
        return

    def free_kv_cache(self) -> None:
        """Give the pool's memory back."""
        return

    def release(self) -> None:
        """Give all memory back."""
        return

    def reopen(self, target: Backend) -> None:
        """Undo `release`, pool excepted; the target's backend is a new one."""
        return


class NgramDrafter(Drafter):
    """Prompt lookup: what followed when the text last (or first) went like this (5.3)."""

    def __init__(
        self,
        batch: InputBatch,
        max_model_len: int,
        min_n: int,
        max_n: int,
        most_recent: bool = False,
    ) -> None:
        super().__init__(batch, max_model_len)
        if not 1 <= min_n <= max_n:
            raise InvalidParameterError(
                "speculative_config needs 1 <= prompt_lookup_min <= prompt_lookup_max, got "
                f"{min_n} and {max_n}",
                parameter="prompt_lookup_min",
                value=min_n,
            )
        self._min_n, self._max_n, self._most_recent = min_n, max_n, most_recent

    def propose(self, slots: Int32Array, num_drafts: Int32Array) -> list[list[int]]:
        batch = self.batch
        return propose_ngram(
            batch.token_ids,
            slots,
            batch.num_tokens[slots],
            self.limits(slots, num_drafts),
            min_n=self._min_n,
            max_n=self._max_n,
            most_recent=self._most_recent,
        )


class SuffixTreeDrafter(Drafter):
    """Suffix decoding: the request's own ids, and the outputs of requests that finished (5.4)."""

    def __init__(self, batch: InputBatch, max_model_len: int, suffixes: SuffixDrafter) -> None:
        super().__init__(batch, max_model_len)
        self._suffixes = suffixes

    def propose(self, slots: Int32Array, num_drafts: Int32Array) -> list[list[int]]:
        batch = self.batch
        limits = self.limits(slots, num_drafts)
        return self._suffixes.propose(batch.token_ids, slots, batch.num_tokens[slots], limits)

    def finish(self, state: RequestState) -> None:
        batch, slot = self.batch, state.slot
        start, end = int(batch.num_prompt_tokens[slot]), int(batch.num_tokens[slot])
        self._suffixes.add_finished(batch.token_ids[slot, start:end])


def make_drafter(config: EngineConfig, batch: InputBatch, target: Backend) -> Drafter | None:
    """Drafter for ``config.speculative_config``; None if there is none.

    Raises:
        InvalidParameterError: unknown method, or values that contradict each other.
    """
    spec = config.speculative_config
    if spec is None:
        return None
    max_len = config.scheduler_config.max_model_len
    if spec.method == "ngram":
        return NgramDrafter(
            batch,
            max_len,
            spec.prompt_lookup_min,
            spec.prompt_lookup_max,
            spec.prompt_lookup_policy == "most_recent",
        )
    if spec.method == "suffix":
        suffixes = SuffixDrafter(
            spec.suffix_decoding_max_tree_depth,
            spec.suffix_decoding_max_cached_requests,
            spec.suffix_decoding_max_spec_factor,
            spec.suffix_decoding_min_token_prob,
        )
        return SuffixTreeDrafter(batch, max_len, suffixes)
    if spec.method == "draft_model":
        from tellin.worker.draft_model import make_draft_model

        return make_draft_model(config, batch)
    if spec.method == "mtp":
        from tellin.worker.mtp import make_predictor

        return make_predictor(config, batch, target)
    raise InvalidParameterError(
        f"speculative_config.method must be ngram, suffix, draft_model or mtp, got {spec.method!r}",
        parameter="speculative_config",
        value=spec.method,
    )
