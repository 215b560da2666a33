"""Log-probabilities of prompts, collected chunk by chunk.

A prompt of P ids has P - 1 entries: entry i describes id i + 1 given the ids up to i. Chunks fill
them in order; the finished table is handed out once, with the step that samples the first token. A
preempted prompt starts again at position 0 and overwrites what it had: the values are equal. In the
processed modes an entry is what the sampler would make of its position if the prompt ended there;
users' logits processors have no part in it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tellin.kernels.sampler import RowStatus, Sampler, SampleResult, SampleRows
from tellin.sampling_params import SamplingParams
from tellin.step_protocol import LogprobsLists

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

_MAX_TABLE_BYTES = 32 << 20
"""Whole distributions that are held at a time."""


class ProcessedRows:
    """Processed distributions of one request's prompt positions.

    Args:
        num_ids: ids that exist.
        logprobs_mode: ``processed_logprobs`` or ``processed_logits``.
        params: the request's.
    """

    def __init__(self, num_ids: int, logprobs_mode: str, params: SamplingParams) -> None:
        self._sampler = Sampler(num_ids, logprobs_mode)
        whole = params.clone()
        whole.logprobs, whole.logprob_token_ids = -1, None
        self._sampler.set_slot(0, whole, 0)
        self._num_columns = num_ids + 1
        self._max_rows = max(1, _MAX_TABLE_BYTES // (8 * self._num_columns))

    def prompt_logprobs(self, logits: Float32Array, ids: Int32Array, best: int) -> SampleResult:
        """Like `Sampler.prompt_logprobs`.

        Args:
            logits: ``[n, vocab_size]``; only read.
            ids: the prompt up to the id that follows the last row.
            best: best ids beside the one that follows; -1 = all.
        """
        count, width = len(logits), self._num_columns if best == -1 else best + 1
        next_ids = ids[len(ids) - count :]
        result = SampleResult(
            next_ids,
            np.zeros(count, np.int32),
            np.empty((count, width), np.int32),
            np.empty((count, width), np.float32),
            np.empty(count, np.int32),
        )
        for start in range(0, count, self._max_rows):
            self._fill(result, logits, ids, start, min(start + self._max_rows, count))
        return result

    def _fill(
        self, result: SampleResult, logits: Float32Array, ids: Int32Array, start: int, end: int
    ) -> None:
        """Sample these rows for the sake of their whole distributions, best id first."""
        count = end - start
        first = len(ids) - len(logits)
        lens: Int32Array = np.arange(first + start, first + end, dtype=np.int32)
        rows = SampleRows(
            np.zeros(count, np.int32),
            np.arange(count, dtype=np.int32),
            lens,
            lens,
            np.ascontiguousarray(ids[None]),
        )
        whole = self._sampler.sample(
            logits[start:end].copy(), rows, num_logprob_columns=self._num_columns
        )
        assert whole.logprob_ids is not None
        assert whole.logprobs is not None
        assert result.logprob_ids is not None
        assert result.logprobs is not None
        assert result.ranks is not None
        result.status[start:end] = whole.status
        best_ids, best = whole.logprob_ids[:, 1:], whole.logprobs[:, 1:]
        at = (best_ids == result.tokens[start:end, None]).argmax(axis=1)
        value = best[np.arange(count), at]
        width = result.logprob_ids.shape[1] - 1
        result.logprob_ids[start:end, 0] = result.tokens[start:end]
        result.logprobs[start:end, 0] = value
        result.logprob_ids[start:end, 1:] = best_ids[:, :width]
        result.logprobs[start:end, 1:] = best[:, :width]
        result.ranks[start:end] = (best >= value[:, None]).sum(axis=1)


class PromptLogprobs:
    """The table of one request; ``processed`` gives its entries in the processed modes."""

    def __init__(
        self, num_prompt_tokens: int, num_logprobs: int, processed: ProcessedRows | None = None
    ) -> None:
        self.num_logprobs = num_logprobs
        self._processed = processed
        self.num_entries = num_prompt_tokens - 1
        self.num_filled = 0
        self._ids: npt.NDArray[np.int32] | None = None
        self._values: npt.NDArray[np.float32] | None = None
        self._ranks: npt.NDArray[np.int32] | None = None

    def num_rows(self, start: int, num_tokens: int) -> int:
        """Entries that a chunk ``[start, start + num_tokens)`` of the prompt gives."""
        return max(min(num_tokens, self.num_entries - start), 0)

    def fill(
        self,
        sampler: Sampler,
        logits: npt.NDArray[np.float32],
        start: int,
        ids: npt.NDArray[np.int32],
        maxima: npt.NDArray[np.float32] | None = None,
    ) -> str | None:
        """Fill entries ``[start, start + len(logits))`` from the rows of ``logits``.

        ``ids`` is the prompt up to the id that the last of these entries describes, ``maxima`` the
        rows' block maxima if they are known.

        Returns:
            Why it cannot be done, or None.
        """
        if start > self.num_filled:
            return (
                f"prompt_logprobs: positions {self.num_filled} to {start} of the prompt were not "
                "computed in this request; do not let it read the prefix cache"
            )
        if self._processed is None:
            result = sampler.prompt_logprobs(logits, ids[start + 1 :], self.num_logprobs, maxima)
        else:
            result = self._processed.prompt_logprobs(logits, ids, self.num_logprobs)
        if result.status.any():
            bad = int(np.flatnonzero(result.status)[0])
            if result.status[bad] == RowStatus.NOT_FINITE:
                return f"the model gave NaN or infinite logits at position {start + bad}"
            return f"no token is allowed at position {start + bad} of the prompt"
        assert result.logprob_ids is not None
        assert result.logprobs is not None
        assert result.ranks is not None
        if self._ids is None or self._values is None or self._ranks is None:
            shape = (self.num_entries, result.logprob_ids.shape[1])
            self._ids = np.empty(shape, np.int32)
            self._values = np.empty(shape, np.float32)
            self._ranks = np.empty(self.num_entries, np.int32)
        end = start + len(logits)
        self._ids[start:end] = result.logprob_ids
        self._values[start:end] = result.logprobs
        self._ranks[start:end] = result.ranks
        self.num_filled = max(self.num_filled, end)
        return None

    def finish(self) -> LogprobsLists:
        """The whole table."""
        if self._ids is None or self._values is None or self._ranks is None:
            return LogprobsLists([], [], [])
        return LogprobsLists(self._ids.tolist(), self._values.tolist(), self._ranks.tolist())
