"""Log-probabilities of prompts, collected chunk by chunk.

A prompt of P ids has P - 1 entries: entry i describes id i + 1 given the ids up to i. Chunks fill
them in order; the finished table is handed out once, with the step that samples the first token. A
preempted prompt starts again at position 0 and overwrites what it had: the values are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tellin.kernels.sampler import RowStatus, Sampler
from tellin.step_protocol import LogprobsLists
from tellin.worker.input_batch import RequestState


class PromptLogprobs:
    """The table of one request."""

    def __init__(self, num_prompt_tokens: int, num_logprobs: int) -> None:
        self.num_logprobs = num_logprobs
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
        next_ids: npt.NDArray[np.int32],
    ) -> str | None:
        """Fill entries ``[start, start + len(next_ids))`` from the rows of ``logits``.

        Returns:
            Why it cannot be done, or None.
        """
        if start > self.num_filled:
            return (
                f"prompt_logprobs: positions {self.num_filled} to {start} of the prompt were not "
                "computed in this request; do not let it read the prefix cache"
            )
        result = sampler.prompt_logprobs(logits, next_ids, self.num_logprobs)
        if result.status.any():
            bad = int(np.flatnonzero(result.status)[0])
            what = "NaN or infinite" if result.status[bad] == RowStatus.NOT_FINITE else "all -inf"
            return f"the model gave {what} logits at position {start + bad} of the prompt"
        assert result.logprob_ids is not None
        assert result.logprobs is not None
        assert result.ranks is not None
        if self._ids is None or self._values is None or self._ranks is None:
            shape = (self.num_entries, result.logprob_ids.shape[1])
            self._ids = np.empty(shape, np.int32)
            self._values = np.empty(shape, np.float32)
            self._ranks = np.empty(self.num_entries, np.int32)
        end = start + len(next_ids)
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


@dataclass
class PromptRows:
    """Entries of a table that a pass gives: from ``start`` on, one per row in ``token_rows``."""

    table: PromptLogprobs
    state: RequestState
    start: int
    token_rows: npt.NDArray[np.int32]
