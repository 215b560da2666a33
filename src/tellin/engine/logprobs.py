"""Logprobs of one request: collects what the core sends, adds the text of each token.

Text comes from the token table, one token at a time. A token that ends in the middle of a character
has the complete part of its text only; the token that completes the character gets the whole of it,
so the texts of the sampled tokens, joined, are the text of the output.
"""

from __future__ import annotations

from tellin.engine.token_table import TokenTable
from tellin.outputs import FlatLogprobs, Logprob, PromptLogprobs, SampleLogprobs
from tellin.sampling_params import SamplingParams
from tellin.step_protocol import LogprobsLists


class LogprobsProcessor:
    """Sample and prompt logprobs of one request."""

    def __init__(self, params: SamplingParams, table: TokenTable | None) -> None:
        """``table`` is None when no text is wanted: then ``decoded_token`` is None."""
        self._table = table
        self._pending = b""  # incomplete character after the last sampled token
        self._ranks_known = params.logprob_token_ids is None
        wants_samples = params.num_logprobs is not None
        self.logprobs: SampleLogprobs | None = None
        self.cumulative_logprob: float | None = None
        if wants_samples:
            self.logprobs = FlatLogprobs() if params.flat_logprobs else []
            self.cumulative_logprob = 0.0
        self._prompt_logprobs: PromptLogprobs | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = FlatLogprobs() if params.flat_logprobs else []
            self._prompt_logprobs.append(None)

    def update_sample(self, lists: LogprobsLists, num_positions: int) -> None:
        """Take the first ``num_positions`` positions; later ones were cut off by a stop string."""
        if self.logprobs is None or self.cumulative_logprob is None:
            return
        for position in range(num_positions):
            self.cumulative_logprob += lists.logprobs[position][0]
            self._pending = self._append(self.logprobs, lists, position, self._pending)

    def update_prompt(self, lists: LogprobsLists) -> None:
        """Take all positions of the prompt but the first."""
        if self._prompt_logprobs is None:
            return
        pending = b""
        for position in range(len(lists)):
            pending = self._append(self._prompt_logprobs, lists, position, pending)

    def pop_prompt_logprobs(self) -> PromptLogprobs | None:
        """All prompt logprobs, leaving an empty list; None if they were not asked for."""
        result = self._prompt_logprobs
        if result is not None:
            self._prompt_logprobs = type(result)()
        return result

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """All prompt logprobs so far (a copy)."""
        return None if self._prompt_logprobs is None else self._prompt_logprobs[:]

    def _append(
        self,
        target: SampleLogprobs | PromptLogprobs,
        lists: LogprobsLists,
        position: int,
        pending: bytes,
    ) -> bytes:
        """Add one position; returns the incomplete character after its first token."""
        token_ids = lists.logprob_token_ids[position]
        values = lists.logprobs[position]
        ranks: list[int | None] = [lists.sampled_token_ranks[position]]
        others = len(token_ids) - 1
        ranks.extend(range(1, others + 1) if self._ranks_known else [None] * others)
        texts: list[str | None]
        if self._table is None:
            texts = [None] * len(token_ids)
        else:
            texts = [self._table.decoded_token(token_id, pending) for token_id in token_ids]
            pending = self._table.pending_after(token_ids[0], pending)
        if isinstance(target, FlatLogprobs):
            target.append_fast(token_ids, values, ranks, texts)
        else:
            # The sampled token stays first; if it is among the most likely ones too, the later
            # entry, with the same value, replaces it.
            target.append(
                {
                    token_id: Logprob(value, rank, text)
                    for token_id, value, rank, text in zip(
                        token_ids, values, ranks, texts, strict=True
                    )
                }
            )
        return pending
