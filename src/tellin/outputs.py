"""What a request returns.

Outputs are snapshots: nothing in one changes after it was handed out. Names follow vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, overload

import msgspec

from tellin.exceptions import InvalidParameterError, TellinError
from tellin.metrics import RequestStateStats
from tellin.protocol import LoRARequest

RequestMetrics: TypeAlias = RequestStateStats


class Logprob(msgspec.Struct, gc=False):
    """Log-probability of one token at one position.

    ``rank`` counts from 1 over the whole vocabulary; None when it was not computed.
    ``decoded_token`` is readable text (never a raw vocabulary piece); None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition: TypeAlias = dict[int, Logprob]


class FlatLogprobs(MutableSequence[LogprobsOnePosition]):
    """Logprobs of many positions in a few flat lists: cheap to build, keep and collect.

    Reads like a list of ``{token id: Logprob}``; a position without values (the first of a prompt)
    reads as an empty dict. It grows at the end only: other changes raise `TypeError`.
    """

    __slots__ = ("decoded_tokens", "end_indices", "logprobs", "ranks", "start_indices", "token_ids")

    def __init__(self) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []

    def append(self, value: LogprobsOnePosition | None) -> None:
        """Add one position."""
        items = value or {}
        self.append_fast(
            list(items),
            [item.logprob for item in items.values()],
            [item.rank for item in items.values()],
            [item.decoded_token for item in items.values()],
        )

    def append_fast(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Add one position given as parallel lists."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.decoded_tokens.extend(decoded_tokens)
        self.end_indices.append(len(self.token_ids))

    def extend(self, values: Iterable[LogprobsOnePosition | None]) -> None:
        """Add several positions."""
        for value in list(values):
            self.append(value)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> LogprobsOnePosition | FlatLogprobs:
        if isinstance(index, slice):
            part = FlatLogprobs()
            for position in range(len(self))[index]:
                span = slice(self.start_indices[position], self.end_indices[position])
                part.append_fast(
                    self.token_ids[span],
                    self.logprobs[span],
                    self.ranks[span],
                    self.decoded_tokens[span],
                )
            return part
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in range(self.start_indices[index], self.end_indices[index])
        }

    def __iter__(self) -> Iterator[LogprobsOnePosition]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlatLogprobs) and all(
            getattr(self, name) == getattr(other, name) for name in self.__slots__
        )

    __hash__ = None  # type: ignore[assignment]  # mutable, compared by value

    def __repr__(self) -> str:
        return f"FlatLogprobs(num_positions={len(self)}, num_entries={len(self.token_ids)})"

    def _read_only(self) -> NoReturn:
        raise TypeError("FlatLogprobs only grows at the end: use append or extend")

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        self._read_only()

    def __delitem__(self, index: Any) -> NoReturn:
        self._read_only()

    def insert(self, index: int, value: LogprobsOnePosition | None) -> NoReturn:
        self._read_only()


SampleLogprobs: TypeAlias = list[LogprobsOnePosition] | FlatLogprobs
"""One entry per generated token; the sampled token comes first."""
PromptLogprobs: TypeAlias = list[LogprobsOnePosition | None] | FlatLogprobs
"""One entry per prompt token; the first is None (an empty dict in a `FlatLogprobs`)."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    ``token_ids`` holds the token that ended it, if one did; ``text`` does not, unless asked for
    with ``include_stop_str_in_output``.
    """

    index: int
    """Which of the ``n`` completions."""
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    """stop, length, abort, error or repetition; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for the tokenizer's end of sequence."""
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """State of a request: final, or streamed (``SamplingParams.output_kind`` says what it holds).

    ``error`` says why the request failed or was refused; such an output is finished. ``text`` is a
    shorthand for the first completion's text.
    """

    request_id: str
    """The id that the caller gave."""
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    lora_request: LoRARequest | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache."""
    kv_transfer_params: dict[str, Any] | None = None
    error: TellinError | None = None
    num_truncated_prompt_tokens: int = 0
    """Prompt tokens cut off because ``truncate_prompt_tokens`` asked for it."""
    trace_headers: dict[str, str] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text if self.outputs else ""

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Merge a later output of the same request into this one.

        Args:
            aggregate: outputs are deltas, to be joined; otherwise the later one replaces.
        """
        self.finished |= next_output.finished
        self.kv_transfer_params = next_output.kv_transfer_params
        self.metrics = next_output.metrics
        self.error = next_output.error or self.error
        if next_output.num_cached_tokens is not None:
            self.num_cached_tokens = next_output.num_cached_tokens
        if not aggregate or (not self.prompt_logprobs and next_output.prompt_logprobs):
            self.prompt_logprobs = next_output.prompt_logprobs
        for later in next_output.outputs:
            for position, earlier in enumerate(self.outputs):
                if earlier.index == later.index:
                    if aggregate:
                        _append_delta(earlier, later)
                    else:
                        self.outputs[position] = later
                    break
            else:
                self.outputs.append(later)


def _append_delta(earlier: CompletionOutput, later: CompletionOutput) -> None:
    earlier.text += later.text
    earlier.token_ids = earlier.token_ids + later.token_ids
    if later.logprobs:
        if earlier.logprobs is None:
            earlier.logprobs = later.logprobs
        else:
            joined: Any = earlier.logprobs[:]
            joined.extend(later.logprobs)
            earlier.logprobs = joined
    earlier.cumulative_logprob = later.cumulative_logprob
    earlier.finish_reason = later.finish_reason
    earlier.stop_reason = later.stop_reason


@dataclass(slots=True)
class PoolingOutput:
    """Raw result of pooling: a float list, or one per token."""

    data: Any


@dataclass(slots=True)
class PoolingRequestOutput:
    """Result of a pooling request."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int | None = None
    metrics: RequestStateStats | None = None
    error: TellinError | None = None
    finish_reason: str | None = None
    num_truncated_prompt_tokens: int = 0
    trace_headers: dict[str, str] | None = None


def _vector(base: PoolingOutput, what: str) -> list[float]:
    data = base.data
    values = data.tolist() if hasattr(data, "tolist") else list(data)
    if values and isinstance(values[0], list | tuple):
        raise InvalidParameterError(
            f"{what} needs one vector per prompt, but the model returned one per token",
            parameter="pooling_task",
        )
    return [float(value) for value in values]


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)

    @classmethod
    def from_base(cls, base: PoolingOutput) -> EmbeddingOutput:
        return cls(_vector(base, "an embedding"))


@dataclass(slots=True)
class ClassificationOutput:
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)

    @classmethod
    def from_base(cls, base: PoolingOutput) -> ClassificationOutput:
        return cls(_vector(base, "a classification"))


@dataclass(slots=True)
class ScoringOutput:
    score: float

    @classmethod
    def from_base(cls, base: PoolingOutput) -> ScoringOutput:
        values = _vector(base, "a score")
        if len(values) != 1:
            raise InvalidParameterError(
                f"a score is one number, but the model returned {len(values)}",
                parameter="pooling_task",
            )
        return cls(values[0])


@dataclass(slots=True)
class EmbeddingRequestOutput(PoolingRequestOutput):
    """``outputs`` is an `EmbeddingOutput`."""

    outputs: EmbeddingOutput  # type: ignore[assignment]

    @classmethod
    def from_base(cls, base: PoolingRequestOutput) -> EmbeddingRequestOutput:
        return cls(**_base_fields(base, EmbeddingOutput.from_base(base.outputs)))


@dataclass(slots=True)
class ClassificationRequestOutput(PoolingRequestOutput):
    """``outputs`` is a `ClassificationOutput`."""

    outputs: ClassificationOutput  # type: ignore[assignment]

    @classmethod
    def from_base(cls, base: PoolingRequestOutput) -> ClassificationRequestOutput:
        return cls(**_base_fields(base, ClassificationOutput.from_base(base.outputs)))


@dataclass(slots=True)
class ScoringRequestOutput(PoolingRequestOutput):
    """``outputs`` is a `ScoringOutput`."""

    outputs: ScoringOutput  # type: ignore[assignment]

    @classmethod
    def from_base(cls, base: PoolingRequestOutput) -> ScoringRequestOutput:
        return cls(**_base_fields(base, ScoringOutput.from_base(base.outputs)))


def _base_fields(base: PoolingRequestOutput, outputs: Any) -> dict[str, Any]:
    fields = {name: getattr(base, name) for name in PoolingRequestOutput.__dataclass_fields__}
    return fields | {"outputs": outputs}


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam. ``tokens`` starts with the prompt; ``text`` is the output alone."""

    tokens: list[int]
    logprobs: list[LogprobsOnePosition] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]
