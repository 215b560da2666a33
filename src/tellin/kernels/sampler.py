"""Typed facade of the native sampler.

Owns the translation of `SamplingParams` into the sampler's slots and the arrays of one call. It
knows neither requests nor the scheduler: a caller names slots, rows of logits and how much of each
slot's history counts. A row's result depends on nothing but its logits, its slot's parameters and
that history (csrc/include/tellin/sampler.h has the order of operations).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tellin.kernels import _C
from tellin.sampling_params import GREEDY_EPS, SamplingParams

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")

_NO_LOGPROBS = -1
_ALL_LOGPROBS = -2


class Stage(enum.IntFlag):
    """Parts of the pipeline, for callers that run code of their own between them."""

    MASKS = 1
    """Reject NaN and +infinity; grammar mask, allowed ids, bad words, min tokens, logit bias."""
    PENALTIES = 2
    SCALE = 4
    """Divide by the temperature and apply min-p in place."""
    FINISH = 8
    """Temperature, min-p, top-k, top-p, draw, log-probabilities."""
    SCALED = 16
    """No part: says that SCALE was run, so FINISH omits temperature and min-p."""


ALL_STAGES = Stage.MASKS | Stage.PENALTIES | Stage.FINISH


class RowStatus(enum.IntEnum):
    """What became of a row."""

    OK = 0
    NOT_FINITE = 1
    NOTHING_LEFT = 2


@dataclass
class SampleRows:
    """The rows of one call; all int32 ``[num_rows]`` unless said otherwise.

    ``history`` is ``[num_slots, capacity]``: ids of each slot, prompt first. Row i continues the
    first ``history_lens[i]`` of them, of which ``prompt_lens[i]`` are prompt. ``bitmask`` is
    ``[*, words]`` with ``bitmask_rows[i]`` naming a row of it, or -1. ``raw`` (float32
    ``[*, vocab]``) replaces the logits as the source of raw log-probabilities for rows with
    ``raw_rows[i] >= 0``: for callers that have changed the logits themselves. ``maxima`` (float32
    ``[*, blocks]``, a row per row of logits) are those of `NativeBackend.block_maxima`, for callers
    that have not: the rows need not be read for them again.
    """

    slots: Int32Array
    logits_rows: Int32Array
    history_lens: Int32Array
    prompt_lens: Int32Array
    history: Int32Array
    bitmask: Int32Array | None = None
    bitmask_rows: Int32Array | None = None
    raw: Float32Array | None = None
    raw_rows: Int32Array | None = None
    maxima: Float32Array | None = None


@dataclass
class SampleResult:
    """Outcome of one call.

    ``tokens`` and ``status`` (a `RowStatus`) are ``[num_rows]``. If ``logprob_ids`` is not None it
    and ``logprobs`` are ``[num_rows, columns]``: the sampled id, then the slot's best ids (or the
    ids it asked for); only the columns the slot asked for are filled. ``ranks[i]`` counts the
    entries that are at least as large as the sampled one.
    """

    tokens: Int32Array
    status: Int32Array
    logprob_ids: Int32Array | None = None
    logprobs: Float32Array | None = None
    ranks: Int32Array | None = None


class Sampler:
    """Samples rows of logits by the parameters of their slots.

    Args:
        num_ids: ids that exist; columns of the logits beyond are never read, sampled or reported.
        logprobs_mode: one of `LOGPROBS_MODES`.
        isa: instruction set variant; None = the best one. All give the same bits.
    """

    def __init__(
        self, num_ids: int, logprobs_mode: str = "raw_logprobs", isa: str | None = None
    ) -> None:
        self._native = _C.Sampler(num_ids, LOGPROBS_MODES.index(logprobs_mode), isa)
        self.num_ids = num_ids
        self.team: _C.ThreadTeam | None = None
        """Threads to share the rows among; None = the caller's alone. The result is the same."""

    @property
    def isa(self) -> str:
        """Instruction set variant in use."""
        return self._native.isa

    def set_slot(self, slot: int, params: SamplingParams, rng_key: int) -> None:
        """Set the parameters of a slot; replaces what it held."""
        greedy = params.temperature < GREEDY_EPS
        if params.logprobs is None:
            num_logprobs = _NO_LOGPROBS
        else:
            num_logprobs = _ALL_LOGPROBS if params.logprobs == -1 else params.logprobs
        bias = params.logit_bias or {}
        self._native.set_slot(
            slot,
            temperature=0.0 if greedy else params.temperature,
            top_p=params.top_p,
            # More than there are is all of them; the native field has 32 bits.
            top_k=min(max(params.top_k, 0), self.num_ids),
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            rng_key=rng_key % 2**64,
            min_tokens=params.min_tokens,
            num_logprobs=num_logprobs,
            allowed_ids=params.allowed_token_ids,
            stop_ids=stop_ids(params) if params.min_tokens > 0 else [],
            bias_ids=list(bias.keys()),
            bias_values=list(bias.values()),
            bad_words=params.bad_words_token_ids or [],
            logprob_ids=params.logprob_token_ids or [],
        )

    def num_logprob_columns(self, slot: int) -> int:
        """Columns of the log-probability table that a slot fills (sampled id included) or 0."""
        return self._native.num_logprob_columns(slot)

    def sample(
        self,
        logits: Float32Array,
        rows: SampleRows,
        *,
        num_logprob_columns: int = 0,
        stages: Stage = ALL_STAGES,
        status: Int32Array | None = None,
    ) -> SampleResult:
        """Run stages of the pipeline; overwrites the rows of ``logits`` it works on.

        Args:
            logits: ``[*, vocab_size]`` float32.
            rows: what to sample.
            num_logprob_columns: width of the table: the largest any of the slots asks for.
            stages: parts to run.
            status: status of an earlier stage; rows that failed there are skipped.
        """
        num_rows = len(rows.slots)
        result = SampleResult(
            np.zeros(num_rows, np.int32),
            np.zeros(num_rows, np.int32) if status is None else status,
        )
        if num_logprob_columns > 0:
            shape = (num_rows, num_logprob_columns)
            result.logprob_ids = np.empty(shape, np.int32)
            result.logprobs = np.empty(shape, np.float32)
            result.ranks = np.empty(num_rows, np.int32)
        self._native.sample(
            logits,
            rows.slots,
            rows.logits_rows,
            rows.history_lens,
            rows.prompt_lens,
            rows.history,
            result.tokens,
            result.status,
            int(stages),
            rows.bitmask,
            rows.bitmask_rows,
            rows.raw,
            rows.raw_rows,
            result.logprob_ids,
            result.logprobs,
            result.ranks,
            self.team,
            rows.maxima,
        )
        return result

    def sample_into(self, logits: Float32Array, rows: SampleRows, result: SampleResult) -> None:
        """`sample` without log-probabilities, into arrays of the caller; ``status`` is all 0."""
        self._native.sample(
            logits,
            rows.slots,
            rows.logits_rows,
            rows.history_lens,
            rows.prompt_lens,
            rows.history,
            result.tokens,
            result.status,
            int(ALL_STAGES),
            team=self.team,
            maxima=rows.maxima,
        )

    def prompt_logprobs(
        self,
        logits: Float32Array,
        ids: Int32Array,
        num_logprobs: int,
        maxima: Float32Array | None = None,
    ) -> SampleResult:
        """Log-probabilities (or logits, by the mode) of given ids and of the best ones.

        No parameters apply: the processed modes report the same as the raw ones.

        Args:
            logits: ``[n, vocab_size]`` float32; only read.
            ids: ``[n]`` the id that follows each row.
            num_logprobs: best ids beside it; -1 = all.
            maxima: ``[n, blocks]`` as in `SampleRows`, if they are known.
        """
        num_rows = len(ids)
        best = self.num_ids if num_logprobs == -1 else min(num_logprobs, self.num_ids)
        shape = (num_rows, best + 1)
        ranks, status = np.empty(num_rows, np.int32), np.empty(num_rows, np.int32)
        out_ids, values = np.empty(shape, np.int32), np.empty(shape, np.float32)
        self._native.prompt_logprobs(
            logits, ids, best, out_ids, values, ranks, status, self.team, maxima
        )
        return SampleResult(ids, status, out_ids, values, ranks)


def stop_ids(params: SamplingParams) -> list[int]:
    """All ids that would end the request: forbidden while it is below ``min_tokens``."""
    ids = set(params.all_stop_token_ids)
    if params.eos_token_id is not None and not params.ignore_eos:
        ids.add(params.eos_token_id)
    return sorted(ids)


def random_words(key: int, index: int, purpose: int) -> list[int]:
    """Four 32-bit words of Philox4x32-10 under ``key`` for the counter (index, purpose, 0, 0)."""
    return _C.philox4x32(key, index, purpose)
