"""Parameters of a request: how to sample, how to pool, how to search with beams.

Constructors accept what vLLM's accept, check every value and name the parameter and the value when
they refuse. They know no model: checks that need a vocabulary or a context length are made at
admission, by `tellin.engine.input_processor`. Validation runs again when an object is decoded from
the wire, so it must be idempotent.
"""

from __future__ import annotations

import copy
import enum
import logging
import math
import numbers
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tellin.beam_search_params import BeamSearchParams
from tellin.checks import check_bool, check_float, check_int, check_int_list, check_str_list
from tellin.exceptions import InvalidParameterError, InvalidTypeError
from tellin.hinting import HintingMeta, unknown_parameter
from tellin.nested_params import RepetitionDetectionParams, StructuredOutputsParams

__all__ = [
    "BeamSearchParams",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "SamplingType",
    "StructuredOutputsParams",
]

logger = logging.getLogger(__name__)

GREEDY_EPS = 1e-5
"""Temperatures below this are greedy."""
MIN_TEMPERATURE = 1e-2
"""Smaller non-zero temperatures are raised to this: dividing by less overflows float32 softmax."""
MIN_REPETITION_PENALTY = 1e-6
"""Dividing by much less overflows float32 logits."""
MAX_N = 16384
MAX_INT = 2**63 - 1
"""Largest integer that can be sent to a core in another process."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 100.0


class RequestOutputKind(enum.IntEnum):
    """What each streamed output holds."""

    CUMULATIVE = 0
    """Everything generated so far."""
    DELTA = 1
    """Only what is new since the previous output."""
    FINAL_ONLY = 2
    """Nothing until the request has finished, then everything."""


class SamplingType(enum.IntEnum):
    """How tokens are drawn."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class _SamplingMeta(HintingMeta):
    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
            if "best_of" in kwargs:
                n = args[0] if args else kwargs.get("n", 1)
                _check_best_of(kwargs.pop("best_of"), n)
            return super().__call__(*args, **kwargs)


def _check_best_of(best_of: Any, n: Any) -> None:
    if best_of not in (None, n):
        raise InvalidParameterError(
            f"best_of must equal n ({n}), got {best_of!r}: every completion is returned",
            parameter="best_of",
            value=best_of,
        )


class SamplingParams(msgspec.Struct, metaclass=_SamplingMeta, omit_defaults=True):
    """How to sample one request. Fields and defaults follow vLLM's.

    Raises (at construction):
        InvalidTypeError: a value has the wrong type; also a `TypeError`.
        InvalidParameterError: a value is out of range; ``parameter`` and ``value`` say which; also
            a `ValueError`.
        InvalidTypeError: unknown parameter; the message has the nearest known one. ``best_of`` is
            accepted where it equals ``n``.
    """

    n: int = 1
    """Completions per prompt."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that already is in the output; [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output; [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; >= 1e-6."""
    temperature: float = 1.0
    """[0, 2]; 0 = greedy. Values in (0, 0.01) are raised to 0.01 with a warning."""
    top_p: float = 1.0
    """Keep the most likely tokens with this total probability; (0, 1]."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 and -1 = all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one's probability; [0, 1]."""
    seed: int | None = None
    """Makes sampling reproducible; None and -1 = random."""
    stop: str | list[str] | None = None
    """Texts that end the output. After construction always a list."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the output. After construction always a list."""
    ignore_eos: bool = False
    """Go on after the model's own end-of-sequence tokens."""
    max_tokens: int | None = 16
    """Most tokens to generate; None = up to the context limit."""
    min_tokens: int = 0
    """No end before this many tokens."""
    logprobs: int | None = None
    """Return this many most likely tokens per position besides the sampled one; -1 = all."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    logprob_token_ids: list[int] | None = None
    """Return the log-probabilities of exactly these ids instead of the most likely ones."""
    flat_logprobs: bool = False
    """Return logprobs in a `FlatLogprobs` container."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """Matters only to decoders that put spaces between words (WordPiece)."""
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_clone: bool = False
    """`clone` becomes shallow: promise not to change this object while a request uses it."""
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids; values are clamped to [-100, 100]."""
    allowed_token_ids: list[int] | None = None
    """Sample from these ids only."""
    bad_words: list[str] | None = None
    """Texts never to be generated. After construction always a list."""
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    """None = True exactly if prompt logprobs are wanted."""
    logits_processors: list[Callable[..., Any]] | None = None
    stop_outside: tuple[str, str] | None = None
    """Texts around a part at the beginning in which ``stop`` does not count, such as
    ``("<think>", "</think>")``; with an empty first text the output begins inside."""
    # Filled in by the input processor, on a clone:
    eos_token_id: int | None = None
    all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    bad_words_token_ids: list[list[int]] | None = None

    def __post_init__(self) -> None:
        self._check_scalars()
        self._normalise_lists()
        self._check_logprobs()
        self._check_lengths()
        self._check_objects()
        if self.temperature < GREEDY_EPS:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n > 1:
                raise InvalidParameterError(
                    f"n must be 1 with greedy sampling (temperature 0), got {self.n}; "
                    "all completions would be equal",
                    parameter="n",
                    value=self.n,
                )
        self.all_stop_token_ids = set(self.all_stop_token_ids).union(self.stop_token_ids or ())
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None
        check_bool("skip_reading_prefix_cache", self.skip_reading_prefix_cache)

    def _check_scalars(self) -> None:
        self.n = check_int("n", self.n, 1, MAX_N)
        self.presence_penalty = check_float("presence_penalty", self.presence_penalty, -2, 2)
        self.frequency_penalty = check_float("frequency_penalty", self.frequency_penalty, -2, 2)
        self.repetition_penalty = check_float(
            "repetition_penalty",
            self.repetition_penalty,
            MIN_REPETITION_PENALTY,
            math.inf,
        )
        self.temperature = check_float("temperature", self.temperature, 0, 2)
        if 0 < self.temperature < MIN_TEMPERATURE:
            logger.warning(
                "temperature %g is too small to sample with and was raised to %g; use 0 for greedy",
                self.temperature,
                MIN_TEMPERATURE,
            )
            self.temperature = MIN_TEMPERATURE
        self.top_p = check_float("top_p", self.top_p, 0, 1, open_low=True)
        self.top_k = check_int("top_k", self.top_k, -1, MAX_INT)
        self.min_p = check_float("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            # 64 bits are what the generator's key holds.
            seed = check_int("seed", self.seed, -(2**63), 2**64 - 1)
            self.seed = None if seed == -1 else seed
        for name in (
            "ignore_eos",
            "flat_logprobs",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
            "skip_clone",
        ):
            check_bool(name, getattr(self, name))

    def _normalise_lists(self) -> None:
        self.stop = check_str_list("stop", self.stop)
        self.stop_token_ids = check_int_list("stop_token_ids", self.stop_token_ids)
        self.bad_words = check_str_list("bad_words", self.bad_words)
        if self.stop and not self.detokenize:
            raise InvalidParameterError(
                "stop strings need detokenize=True; use stop_token_ids instead",
                parameter="stop",
                value=self.stop,
            )
        for name in ("stop_token_ids", "bad_words_token_ids"):
            ids = getattr(self, name) or []
            if any(isinstance(i, int) and i < 0 for i in ids):
                raise InvalidParameterError(
                    f"{name} must not be negative, got {ids}", parameter=name, value=ids
                )
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = check_int_list("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise InvalidParameterError(
                    "allowed_token_ids must not be empty: nothing could be sampled",
                    parameter="allowed_token_ids",
                    value=[],
                )
        if self.logit_bias is not None:
            self.logit_bias = _check_logit_bias(self.logit_bias)

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if isinstance(value, bool):
                value = 1 if value else None
            if value is not None:
                value = check_int(name, value, -1, MAX_INT)
            setattr(self, name, value)
        if self.logprob_token_ids is not None:
            ids = check_int_list("logprob_token_ids", self.logprob_token_ids)
            if not 0 < len(ids) <= MAX_LOGPROB_TOKEN_IDS:
                raise InvalidParameterError(
                    f"logprob_token_ids must hold 1 to {MAX_LOGPROB_TOKEN_IDS} ids, got {len(ids)}",
                    parameter="logprob_token_ids",
                    value=ids,
                )
            if self.logprobs is not None and self.logprobs != len(ids):
                raise InvalidParameterError(
                    f"logprobs ({self.logprobs}) must equal the number of logprob_token_ids "
                    f"({len(ids)}) when both are given; leave logprobs out",
                    parameter="logprobs",
                    value=self.logprobs,
                )
            self.logprob_token_ids = ids

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            self.max_tokens = check_int("max_tokens", self.max_tokens, 1, MAX_INT)
        self.min_tokens = check_int("min_tokens", self.min_tokens, 0, MAX_INT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError(
                f"min_tokens must not exceed max_tokens ({self.max_tokens}), got {self.min_tokens}",
                parameter="min_tokens",
                value=self.min_tokens,
            )
        if self.thinking_token_budget is not None:
            budget = check_int("thinking_token_budget", self.thinking_token_budget, -1, MAX_INT)
            self.thinking_token_budget = None if budget == -1 else budget

    def _check_objects(self) -> None:
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            raise InvalidParameterError(
                f"output_kind must be CUMULATIVE (0), DELTA (1) or FINAL_ONLY (2), "
                f"got {self.output_kind!r}",
                parameter="output_kind",
                value=self.output_kind,
            ) from None
        for name, expected in (
            ("structured_outputs", StructuredOutputsParams),
            ("repetition_detection", RepetitionDetectionParams),
        ):
            value = getattr(self, name)
            if isinstance(value, dict):
                try:
                    setattr(self, name, expected(**value))
                except TypeError as exc:
                    raise InvalidTypeError(f"{name}: {exc}", parameter=name, value=value) from None
            elif value is not None and not isinstance(value, expected):
                raise InvalidTypeError(
                    f"{name} must be {expected.__name__} or a dict, got {type(value).__name__}",
                    parameter=name,
                    value=value,
                )
        if self.stop_outside is not None:
            around = self.stop_outside
            is_pair = isinstance(around, list | tuple) and len(around) == 2
            if not is_pair or not all(isinstance(text, str) for text in around) or not around[1]:
                raise InvalidParameterError(
                    f"stop_outside must be two texts, the second not empty, got {around!r}",
                    parameter="stop_outside",
                    value=around,
                )
            self.stop_outside = (around[0], around[1])
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise InvalidTypeError(
                f"extra_args must be a dict, got {type(self.extra_args).__name__}",
                parameter="extra_args",
                value=self.extra_args,
            )
        if not isinstance(self.logits_processors, list | tuple | None):
            raise InvalidTypeError(
                f"logits_processors must be a list, got {type(self.logits_processors).__name__}",
                parameter="logits_processors",
                value=self.logits_processors,
            )
        for processor in self.logits_processors or ():
            if not callable(processor):
                raise InvalidTypeError(
                    f"logits_processors must be callables, got {processor!r}",
                    parameter="logits_processors",
                    value=processor,
                )

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Like the constructor, but None means the default, for every parameter.

        Raises:
            InvalidParameterError, InvalidTypeError: as the constructor.
        """
        unknown = sorted(set(values) - {*cls.__struct_fields__, "best_of"})
        if unknown:
            raise unknown_parameter(cls.__name__, unknown[0], cls.__struct_fields__)
        # A field whose default is None takes None either way, so dropping is right for all.
        given = {name: value for name, value in values.items() if value is not None}
        if "max_tokens" in values:
            given["max_tokens"] = values["max_tokens"]
        return cls(**given)

    @property
    def sampling_type(self) -> SamplingType:
        """Greedy, seeded or random."""
        if self.temperature < GREEDY_EPS:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def num_logprobs(self) -> int | None:
        """Entries wanted per position besides the sampled token; None = no logprobs, -1 = all."""
        if self.logprobs is None and self.logprob_token_ids is not None:
            return len(self.logprob_token_ids)
        return self.logprobs

    def checked_clone(self) -> SamplingParams:
        """As `clone`, of parameters that may have been changed since they were made.

        Raises: as making them.
        """
        other = copy.copy(self)
        other.__post_init__()
        for name in ("structured_outputs", "repetition_detection"):
            value = copy.copy(getattr(other, name))
            if value is not None:
                value.__post_init__()
                setattr(other, name, value)
        return other.clone()

    def clone(self) -> SamplingParams:
        """An independent copy (shallow with ``skip_clone``). Callables are shared, never copied."""
        other = copy.copy(self)
        if self.skip_clone:
            return other
        for name in (
            "stop",
            "stop_token_ids",
            "logprob_token_ids",
            "logit_bias",
            "allowed_token_ids",
            "bad_words",
            "logits_processors",
            "all_stop_token_ids",
            "repetition_detection",
        ):
            value = getattr(self, name)
            if value is not None:
                setattr(other, name, copy.copy(value))
        for name in ("structured_outputs", "extra_args", "bad_words_token_ids"):
            value = getattr(self, name)
            if value is not None:
                setattr(other, name, copy.deepcopy(value))
        return other


def _check_logit_bias(bias: Any) -> dict[int, float]:
    """Integer keys (or their decimal text), clamped finite values."""
    name = "logit_bias"
    if not isinstance(bias, Mapping):
        raise InvalidTypeError(
            f"{name} must map token ids to numbers, got {type(bias).__name__}",
            parameter=name,
            value=bias,
        )
    keys: list[int] = []
    bad_keys = []
    for key in bias:
        try:
            if isinstance(key, bool):
                raise ValueError
            keys.append(int(key) if isinstance(key, str) else operator.index(key))
        except (TypeError, ValueError):
            bad_keys.append(key)
    if bad_keys:
        raise InvalidParameterError(
            f"{name} keys must be token ids, got {bad_keys}", parameter=name, value=bad_keys
        )
    result = {}
    for key, value in zip(keys, bias.values(), strict=True):
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise InvalidTypeError(
                f"{name}[{key}] must be a number, got {value!r}", parameter=name, value=value
            )
        number = float(value)
        if math.isnan(number):
            raise InvalidParameterError(
                f"{name}[{key}] must not be NaN", parameter=name, value=number
            )
        result[key] = min(max(number, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS)
    return result


class PoolingParams(msgspec.Struct, metaclass=HintingMeta, omit_defaults=True):
    """How to pool one request."""

    task: str | None = None
    """embed, classify, token_embed, token_classify; None = the model's own."""
    use_activation: bool | None = None
    """Normalise an embedding, or apply softmax or sigmoid to class scores; None = yes."""
    dimensions: int | None = None
    """Length of the embedding, for models trained to be cut."""
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    def __post_init__(self) -> None:
        if self.output_kind != RequestOutputKind.FINAL_ONLY:
            raise InvalidParameterError(
                f"output_kind of pooling must be FINAL_ONLY, got {self.output_kind!r}",
                parameter="output_kind",
                value=self.output_kind,
            )
        if self.dimensions is not None:
            self.dimensions = check_int("dimensions", self.dimensions, 1)
        if self.use_activation is not None:
            check_bool("use_activation", self.use_activation)

    def clone(self) -> PoolingParams:
        """An independent copy."""
        return copy.deepcopy(self)
