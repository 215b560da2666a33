"""Parameters: what is accepted, what is refused, how it is said. SMP-*, P11, P27, P52, P53."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from tellin.exceptions import (
    InvalidParameterError,
    InvalidTypeError,
    RequestError,
    TellinError,
)
from tellin.outputs import EmbeddingOutput
from tellin.sampling_params import (
    BeamSearchParams,
    PoolingParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
    StructuredOutputsParams,
)

FLOATS = {
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (1e-6, 100),
    "temperature": (0, 2),
    "top_p": (0.01, 1),
    "min_p": (0, 1),
}


def rejected(name: str, **values: Any) -> InvalidParameterError:
    with pytest.raises(ValueError) as info:
        SamplingParams(**values)
    error = info.value
    assert isinstance(error, InvalidParameterError)
    assert isinstance(error, RequestError)
    assert isinstance(error, TellinError)
    assert error.parameter == name
    assert name in str(error)
    return error


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, "0.5", True, None, [1.0]])
def test_p52_every_float_is_checked_for_everything(name: str, value: Any) -> None:
    if name == "repetition_penalty" and value == 1e308:
        return  # finite and positive: allowed
    error = rejected(name, **{name: value})
    if not isinstance(value, float):
        assert isinstance(error, TypeError)


@pytest.mark.parametrize("name", FLOATS)
def test_float_bounds(name: str) -> None:
    low, high = FLOATS[name]
    for value in (low, high, np.float32(high), np.int64(1)):
        result = getattr(SamplingParams(**{name: value}), name)
        assert type(result) is float
    if name != "repetition_penalty":
        rejected(name, **{name: np.nextafter(high, 10)})
    if name == "top_p":
        rejected(name, top_p=0)
    elif name == "repetition_penalty":
        rejected(name, repetition_penalty=0.0)
        rejected(name, repetition_penalty=9e-7)  # float32 logits would overflow
    else:
        rejected(name, **{name: np.nextafter(low, -10)})


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("n", [0, -1, 16385, 1.5, "2", True, None]),
        ("top_k", [-2, 1.5, "1", True, None]),
        ("max_tokens", [0, -1, 1.5, "16", True]),
        ("min_tokens", [-1, 0.5, True, None]),
        ("seed", [1.5, "1", True, 2**64, -(2**63) - 1]),
        ("logprobs", [-2, 1.5, "1"]),
        ("prompt_logprobs", [-2, 1.5, "1"]),
        ("thinking_token_budget", [-2, 1.5, True]),
        ("stop", ["", ["a", ""], [1], 1, {"a": 1}, b"x"]),
        ("bad_words", ["", [""], [1]]),
        ("stop_token_ids", ["12", [1.5], [True], [-1], 5]),
        ("allowed_token_ids", [[], ["1"], 3]),
        ("logprob_token_ids", [[], list(range(129)), ["1"]]),
        ("ignore_eos", [1, "true", None]),
        ("detokenize", [0]),
        ("output_kind", [3, "x", None]),
        ("logit_bias", [[1], {"abc": 1.0}, {1.5: 1.0}, {1: math.nan}, {1: "x"}, {1: True}]),
        ("extra_args", [[1]]),
        ("logits_processors", [[1]]),
        ("structured_outputs", ["{}", {"nope": 1}]),
    ],
)
def test_smp2_refusals_name_parameter(name: str, bad: list[Any]) -> None:
    for value in bad:
        with pytest.raises(InvalidParameterError) as info:
            SamplingParams(**{name: value})
        assert name in str(info.value), value


def test_smp2_wrong_types_are_type_errors_too() -> None:
    with pytest.raises(TypeError):
        SamplingParams(top_k=1.5)  # type: ignore[arg-type]


def test_p11_unknown_parameters_are_refused_by_name() -> None:
    for make in (SamplingParams, SamplingParams.from_optional):
        with pytest.raises(TypeError, match=r"no parameter 'frobnicate'$"):
            make(frobnicate=1)  # type: ignore[call-arg]
        with pytest.raises(InvalidParameterError, match="did you mean temperature") as caught:
            make(temprature=None)  # type: ignore[call-arg]
        assert caught.value.parameter == "temprature"
    with pytest.raises(TypeError, match="no parameter 'guided_decoding': write structured_outputs"):
        SamplingParams(guided_decoding=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="PoolingParams has no parameter 'dimension'; did you mean"):
        PoolingParams(dimension=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(*range(60))


def test_best_of_says_no_more_than_n() -> None:
    assert SamplingParams(best_of=1) == SamplingParams()  # type: ignore[call-arg]
    assert SamplingParams(n=3, best_of=3).n == 3  # type: ignore[call-arg]
    assert SamplingParams(3, best_of=3).n == 3  # type: ignore[call-arg]
    assert SamplingParams(best_of=None) == SamplingParams()  # type: ignore[call-arg]
    assert SamplingParams.from_optional(best_of=1, n=None) == SamplingParams()
    with pytest.raises(InvalidParameterError, match=r"best_of must equal n \(1\), got 2") as caught:
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    assert caught.value.parameter == "best_of"


def test_top_k_off_and_on() -> None:
    """P52: -1 and 0 mean off, 1 is greedy-like and allowed."""
    assert [SamplingParams(top_k=k).top_k for k in (-1, 0, 1)] == [-1, 0, 1]


def test_positional_order_is_vllms() -> None:
    params = SamplingParams(2, 0.1, 0.2, 1.1, 0.9, 0.8, 5, 0.05, 7, "x", [3], True, 9, 1, 2, 3)
    assert (params.n, params.presence_penalty, params.frequency_penalty) == (2, 0.1, 0.2)
    assert (params.repetition_penalty, params.temperature, params.top_p) == (1.1, 0.9, 0.8)
    assert (params.top_k, params.min_p, params.seed) == (5, 0.05, 7)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (["x"], [3], True)
    assert (params.max_tokens, params.min_tokens) == (9, 1)
    assert (params.logprobs, params.prompt_logprobs) == (2, 3)


def test_smp1_normalisation() -> None:
    params = SamplingParams(stop=("a", "b"), bad_words="x", seed=-1, thinking_token_budget=-1)
    assert params.stop == ["a", "b"]
    assert params.bad_words == ["x"]
    assert params.seed is None
    assert params.thinking_token_budget is None
    assert SamplingParams().stop == []
    assert SamplingParams().stop_token_ids == []
    assert SamplingParams(logprobs=True).logprobs == 1
    assert SamplingParams(logprobs=False).logprobs is None
    assert SamplingParams(stop_token_ids=[3, 4]).all_stop_token_ids == {3, 4}
    assert SamplingParams(stop_token_ids=(np.int32(3),)).stop_token_ids == [3]


def test_smp3_greedy() -> None:
    params = SamplingParams(temperature=0, top_p=0.5, top_k=7, min_p=0.3)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    error = rejected("n", temperature=0.0, n=2)
    assert "2" in str(error)


def test_smp4_sampling_type() -> None:
    assert SamplingParams(temperature=0, seed=1).sampling_type == SamplingType.GREEDY
    assert SamplingParams(seed=1).sampling_type == SamplingType.RANDOM_SEED
    assert SamplingParams().sampling_type == SamplingType.RANDOM


def test_smp5_num_logprobs() -> None:
    assert SamplingParams().num_logprobs is None
    assert SamplingParams(logprobs=0).num_logprobs == 0
    assert SamplingParams(logprobs=-1).num_logprobs == -1
    assert SamplingParams(logprob_token_ids=[5, 6]).num_logprobs == 2
    assert SamplingParams(logprobs=2, logprob_token_ids=[5, 6]).num_logprobs == 2
    rejected("logprobs", logprobs=1, logprob_token_ids=[5, 6])


def test_smp8_only_zero_is_greedy(caplog: pytest.LogCaptureFixture) -> None:
    """The floor comes first: 1e-6 samples at 0.01, and says so."""
    caplog.set_level(logging.WARNING, "tellin")
    params = SamplingParams(temperature=1e-6)
    assert params.temperature == 0.01
    assert params.sampling_type == SamplingType.RANDOM
    assert "0.01" in caplog.text


def test_min_tokens_within_max_tokens() -> None:
    error = rejected("min_tokens", min_tokens=5, max_tokens=4)
    assert "4" in str(error)
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500


def test_stop_needs_detokenize() -> None:
    assert "stop_token_ids" in str(rejected("stop", stop="x", detokenize=False))


def test_p27_logit_bias_keys_and_clamp() -> None:
    bias = SamplingParams(
        logit_bias={"5": 1e9, 6: -math.inf, np.int64(7): np.float32(1)}
    ).logit_bias
    assert bias == {5: 100.0, 6: -100.0, 7: 1.0}
    assert all(type(key) is int and type(value) is float for key, value in bias.items())


def test_prefix_cache_default_follows_prompt_logprobs() -> None:
    assert SamplingParams().skip_reading_prefix_cache is False
    assert SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache is True
    explicit = SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=False)
    assert explicit.skip_reading_prefix_cache is False


def test_smp6_from_optional_takes_every_field() -> None:
    defaults = SamplingParams()
    nones = dict.fromkeys(SamplingParams.__struct_fields__)
    del nones["max_tokens"]
    assert SamplingParams.from_optional(**nones) == defaults
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    given = {"flat_logprobs": True, "logprob_token_ids": [1], "skip_reading_prefix_cache": True}
    params = SamplingParams.from_optional(**given)
    assert all(getattr(params, name) == value for name, value in given.items())
    with pytest.raises(InvalidParameterError, match="abc"):
        SamplingParams.from_optional(logit_bias={"abc": 1.0, "5": 2.0})


MUTABLE_FIELDS: dict[str, Any] = {
    "stop": ["a"],
    "stop_token_ids": [1],
    "all_stop_token_ids": {1},
    "logprob_token_ids": [1],
    "logit_bias": {1: 1.0},
    "allowed_token_ids": [1],
    "bad_words": ["a"],
    "bad_words_token_ids": [[1]],
    "extra_args": {"a": 1},
    "structured_outputs": {"regex": "a"},
    "repetition_detection": {"max_pattern_size": 1, "min_count": 2},
}


def test_smp7_clone_is_independent() -> None:
    def processor(*args: Any) -> None: ...

    params = SamplingParams(
        stop=["a"],
        logit_bias={1: 2.0},
        extra_args={"deep": [1]},
        logits_processors=[processor],
        structured_outputs=StructuredOutputsParams(json={"type": "object"}),
    )
    clone = params.clone()
    assert clone == params
    assert isinstance(clone.stop, list)
    clone.stop.append("b")
    assert clone.logit_bias is not None
    clone.logit_bias[2] = 1.0
    assert clone.extra_args is not None
    clone.extra_args["deep"].append(2)
    clone.all_stop_token_ids.add(9)
    assert isinstance(clone.structured_outputs.json, dict)  # type: ignore[union-attr]
    clone.structured_outputs.json["type"] = "array"  # type: ignore[union-attr, index]
    assert (params.stop, params.logit_bias, params.extra_args) == (["a"], {1: 2.0}, {"deep": [1]})
    assert params.all_stop_token_ids == set()
    assert params.structured_outputs.json == {"type": "object"}  # type: ignore[union-attr]
    assert clone.logits_processors is not None
    assert clone.logits_processors[0] is processor
    for name, value in MUTABLE_FIELDS.items():
        params = SamplingParams(**{name: value})
        clone = params.clone()
        assert getattr(clone, name) == getattr(params, name)
        assert getattr(clone, name) is not getattr(params, name), name
    shallow = SamplingParams(stop=["a"], skip_clone=True)
    assert shallow.clone().stop is shallow.stop
    assert copy.deepcopy(params) == params


def test_wire_round_trip_is_idempotent() -> None:
    """Validation runs again on decode (WIRE-4) and changes nothing; defaults are left out."""
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0, stop="x", logit_bias={3: 1.0}, prompt_logprobs=1),
        SamplingParams(seed=2**64 - 1, max_tokens=None, output_kind=RequestOutputKind.DELTA),
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+")),
    ):
        data = msgspec.msgpack.encode(params)
        assert msgspec.msgpack.decode(data, type=SamplingParams) == params
    assert set(msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams(top_k=3)))) <= {
        *("top_k", "stop", "stop_token_ids", "bad_words", "skip_reading_prefix_cache")
    }


def test_structured_outputs_exactly_one() -> None:
    assert StructuredOutputsParams(regex="").kind == "regex"
    assert StructuredOutputsParams(choice=["a", "b"]).kind == "choice"
    for bad in (
        {},
        {"regex": "a", "choice": ["b"]},
        {"choice": []},
        {"choice": "abc"},
        {"json": "  "},
        {"json": 5},
        {"json_object": False},
        {"grammar": ""},
        {"regex": 1},
    ):
        with pytest.raises(InvalidParameterError, match="structured_outputs"):
            StructuredOutputsParams(**bad)  # type: ignore[arg-type]
    params = SamplingParams(structured_outputs={"choice": ["a"]})  # type: ignore[arg-type]
    assert params.structured_outputs == StructuredOutputsParams(choice=["a"])


def test_repetition_detection_params() -> None:
    RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=1, min_count=2)
    for bad in (
        {"max_pattern_size": 1, "min_pattern_size": 2, "min_count": 2},
        {"max_pattern_size": 3, "min_count": 1},
        {"max_pattern_size": -1},
    ):
        with pytest.raises(InvalidParameterError, match="repetition_detection"):
            RepetitionDetectionParams(**bad)


def test_beam_and_pooling_params() -> None:
    with pytest.raises(InvalidParameterError, match="beam_width"):
        BeamSearchParams(beam_width=0, max_tokens=1)
    with pytest.raises(TypeError):
        BeamSearchParams(beam_width=2)  # type: ignore[call-arg]
    with pytest.raises(InvalidParameterError, match="output_kind"):
        PoolingParams(output_kind=RequestOutputKind.DELTA)
    with pytest.raises(InvalidParameterError, match="dimensions"):
        PoolingParams(dimensions=0)


def test_structured_outputs_of_a_wrong_type_say_what_is_expected() -> None:
    for kind, bad, expected in (
        ("json", SamplingParams, "a JSON schema.*model_json_schema.*got <class"),
        ("regex", 5, "a string, got 5"),
        ("json_object", "yes", "a bool, got 'yes'"),
    ):
        with pytest.raises(
            InvalidTypeError, match=rf"structured_outputs\.{kind} must be {expected}"
        ):
            SamplingParams(structured_outputs=StructuredOutputsParams(**{kind: bad}))


def test_an_embedding_prints_its_size_only() -> None:
    assert repr(EmbeddingOutput([0.5] * 384)) == "EmbeddingOutput(hidden_size=384)"
