"""What is wrong is said at once, by name and value: arguments of engines, calls and chats (P52).

No raw `TypeError` of some inner function, and nothing that shows only when a request runs.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.synthetic import SIZES, write_llama
from tellin.config import EngineArgs
from tellin.engine.arg_utils import create_engine_config
from tellin.engine.control_checks import check_call, check_request_ids
from tellin.engine.prompts import check_rendered, parse_prompt, prompts_to_list
from tellin.engine.renderer import ChatParams
from tellin.entrypoints.llm import LLM
from tellin.exceptions import (
    InvalidParameterError,
    InvalidTypeError,
    ModelLoadError,
    RequestError,
)
from tellin.sampling_params import (
    BeamSearchParams,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from tests.models.tiny_hybrids import write_tiny_hybrid

BAD = (InvalidTypeError, InvalidParameterError)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", SIZES["tiny"], "q8_0")


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Any:
    with LLM(tiny_model, max_model_len=128, num_kv_blocks=32, num_threads=1) as llm:
        yield llm


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("tokenizer", 5, "string or a path, got 5"),
        ("model", 5, "string or a path, got 5"),
        ("chat_template", 5, "must be a string, got 5"),
        ("chat_template", "{{", "not valid Jinja"),
        ("override_generation_config", 5, "must be a dict, got 5"),
        ("override_generation_config", {"bogus": 1}, "unknown key 'bogus'"),
        ("override_generation_config", {5: 1}, "unknown key 5"),
        ("override_generation_config", {"eos_token_id": 1}, "unknown key 'eos_token_id'"),
        ("override_generation_config", {"temperature": "x"}, "temperature must be a number"),
        ("override_generation_config", {"top_p": 7}, "got 7"),
        ("override_generation_config", {"max_new_tokens": -5}, "got -5"),
        ("logits_processors", 5, "must be a list of classes"),
        ("logits_processors", ["no.such:Thing"], "cannot be imported"),
        ("logits_processors", [5], "not a subclass"),
        ("max_model_len", 1, "at least 2"),
        ("skip_tokenizer_init", "x", "true or false, got 'x'"),
        ("enable_prefix_caching", "no", "true or false, got 'no'"),
        ("disable_log_stats", 1, "true or false, got 1"),
        ("served_model_name", 5, "must be a string, got 5"),
        ("otlp_traces_endpoint", 5, "must be a string, got 5"),
        ("kv_events_endpoint", 5, "must be a string, got 5"),
        ("metrics_prefix", 5, "must be a string, got 5"),
        ("metrics_prefix", "a b", "got 'a b'"),
        ("kv_cache_metrics_sample", "x", "must be a number, got 'x'"),
    ],
)
def test_engine_arguments(name: str, value: Any, says: str, tiny_model: Path) -> None:
    args = EngineArgs(**({"model": str(tiny_model)} | {name: value}))
    with pytest.raises(BAD, match=says):
        create_engine_config(args)


@pytest.mark.parametrize(
    ("method", "args", "says"),
    [
        ("sleep", ("1", "abort"), "level must be an integer, got '1'"),
        ("sleep", (None, "abort"), "level must be an integer, got None"),
        ("sleep", (True, "abort"), "level must be an integer, got True"),
        ("sleep", (3, "abort"), "level must be 0, 1 or 2, got 3"),
        ("wake_up", (5,), "tags must be .* got 5"),
        ("wake_up", ([5],), "tags must contain strings only, got 5"),
        ("reset_prefix_cache", ("x", False), "true or false, got 'x'"),
        ("profile", (True, 5), "prefix must be a string, got 5"),
        ("add_lora", (5,), "must be a LoRARequest, got int"),
        ("remove_lora", ("x",), "lora_id must be an integer, got 'x'"),
        ("pin_lora", (0,), "lora_id must be in .*got 0"),
        ("collective_rpc", (5, None, (), None), "got 5"),
        ("collective_rpc", ("f", "x", (), None), "timeout must be a number, got 'x'"),
        ("collective_rpc", ("f", None, 5, None), "args must be a tuple of arguments, got 5"),
        ("collective_rpc", ("f", None, (), 5), "kwargs must be a dict .*got 5"),
        ("collective_rpc", ("apply_model", None, (5,), None), "needs a callable"),
    ],
)
def test_control_calls(method: str, args: tuple[Any, ...], says: str) -> None:
    with pytest.raises(BAD, match=says):
        check_call(method, args)


def test_all_clients_check_control_calls(llm: LLM) -> None:
    for level in ("1", None, True):
        with pytest.raises(InvalidTypeError, match="level"):
            llm.sleep(level)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="tags"):
        llm.wake_up(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="callable"):
        llm.apply_model(5)  # type: ignore[arg-type]
    assert not llm.is_sleeping()
    assert check_call("wake_up", (None,)) == (None,)
    assert check_call("is_sleeping", ()) == ()


@pytest.mark.parametrize("ids", [5, None, [5], [[]], {"a": 1}, b"x"])
def test_request_ids(ids: Any, llm: LLM) -> None:
    with pytest.raises(InvalidTypeError, match="request_ids"):
        check_request_ids(ids)
    with pytest.raises(InvalidTypeError, match="request_ids"):
        llm.llm_engine.abort_request(ids)


@pytest.mark.parametrize("name", ["stop", "bad_words", "stop_token_ids", "allowed_token_ids"])
def test_arrays_without_dimensions_are_no_lists(name: str) -> None:
    with pytest.raises(InvalidTypeError, match=f"{name} must be"):
        SamplingParams(**{name: np.array(5)})


@pytest.mark.parametrize(
    "name", ["top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"]
)
def test_integers_that_no_message_can_hold(name: str) -> None:
    with pytest.raises(InvalidParameterError, match=name):
        SamplingParams(**{name: 2**70})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({"prompt": "x", "bogus": 1}, "unknown key 'bogus'"),
        ({"prompt": "x", 5: 1}, "unknown key 5"),
        ({"type": "bogus", "prompt": "x"}, "unknown key 'type'"),
        ({"prompt_token_ids": np.array(5)}, "must be a list of integers"),
        ({"prompt_token_ids": [np.array([3, 4])]}, r"prompt_token_ids\[0\] must be an integer"),
        (np.array(5), "a prompt must be"),
        ([np.array(3.0)], "must be an integer"),
        (["a", "b"], "one prompt is wanted, .* got a list of str"),
        ([[1, 2], [3]], "one prompt is wanted, .* got a list of list"),
    ],
)
def test_raw_prompts(prompt: Any, says: str) -> None:
    with pytest.raises(BAD, match=says):
        parse_prompt(prompt)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt_token_ids": None}, "must be a list of integers"),
        ({"prompt_token_ids": [3.5]}, r"prompt_token_ids\[0\] must be an integer"),
        ({"prompt_token_ids": ["3"]}, r"prompt_token_ids\[0\] must be an integer"),
        ({"prompt_token_ids": [3], "arrival_time": "x"}, "arrival_time must be a number"),
        ({"prompt_token_ids": [3], "cache_salt": 5}, "cache_salt must be a string, got 5"),
        ({"prompt_token_ids": [3], "prompt": 5}, "prompt must be a string, got 5"),
        ({"prompt_token_ids": [3], "mm_items": 5}, "mm_items must be a dict"),
        ({"prompt_token_ids": [3], "bogus": 5}, "unknown key 'bogus'"),
    ],
)
def test_rendered_prompts_written_by_hand(fields: dict[str, Any], says: str, llm: LLM) -> None:
    with pytest.raises(BAD, match=says):
        check_rendered({"type": "token", **fields})
    with pytest.raises(BAD, match=says):
        llm.generate({"type": "token", **fields})


@pytest.mark.parametrize("prompts", ["ab", {"prompt": "ab"}])
def test_one_prompt_is_not_a_list_of_its_parts(prompts: Any, llm: LLM) -> None:
    with pytest.raises(InvalidTypeError, match=r"prompts must be a list of prompts.*\[prompt\]"):
        llm.llm_engine.renderer.render_cmpl(prompts)


def test_a_list_of_arrays_is_a_list_of_bad_prompts() -> None:
    assert len(prompts_to_list([np.array([3, 4]), "x"])) == 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"chat_template": 5}, "chat_template must be a string, got 5"),
        ({"chat_template": ""}, "must not be empty"),
        ({"chat_template": "no/such"}, "no Jinja text"),
        ({"chat_template": "{{"}, "not valid Jinja"),
        ({"chat_template": "{{ 'x' * 10**10 }}"}, "too large"),
        ({"chat_template_content_format": 5}, "content_format must be"),
        ({"add_generation_prompt": "x"}, "true or false, got 'x'"),
        ({"continue_final_message": 5}, "true or false, got 5"),
        ({"tools": 5}, "tools must be a list"),
        ({"tools": [5]}, "tools must be a list"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs must be a dict"),
        ({"chat_template_kwargs": {5: 1}}, "strings as keys"),
        ({"chat_template_kwargs": {"messages": 1}}, "'messages'"),
        ({"chat_template_kwargs": {"tools": 1}}, "'tools'"),
        ({"tokenization_kwargs": 5}, "tokenization_kwargs must be a dict"),
    ],
)
def test_chats(fields: dict[str, Any], says: str, llm: LLM) -> None:
    chat = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match=says):
        llm.chat(chat, SamplingParams(max_tokens=1), **fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 10**9),
        ("n", None),
        ("top_p", -5.0),  # the sampler would read beyond its arrays
        ("top_k", -7),
        ("temperature", float("nan")),
        ("max_tokens", -1),
        ("stop", 5),
        ("logit_bias", {1: float("nan")}),
        ("logits_processors", 5),
        ("structured_outputs", StructuredOutputsParams(regex="a")),
        ("repetition_detection", RepetitionDetectionParams(2, 1, 2)),
    ],
)
def test_parameters_that_were_changed_are_checked_anew(name: str, value: Any, llm: LLM) -> None:
    """They are plain objects: what is set later must not reach the core unseen."""
    params = SamplingParams(max_tokens=3)
    if isinstance(value, StructuredOutputsParams):
        value.regex = None
    elif isinstance(value, RepetitionDetectionParams):
        value.min_count = "x"  # type: ignore[assignment]
    setattr(params, name, value)
    with pytest.raises(BAD, match=name):
        llm.generate([[5, 6]], params, use_tqdm=False)
    assert len(llm.generate([[5, 6]], SamplingParams(max_tokens=3), use_tqdm=False)) == 1


@pytest.mark.parametrize(
    ("name", "value"), [("disable_any_whitespace", "x"), ("whitespace_pattern", 5)]
)
def test_options_of_constraints(name: str, value: Any) -> None:
    with pytest.raises(BAD, match=f"structured_outputs.{name}"):
        StructuredOutputsParams(regex="a", **{name: value})


def test_requests(llm: LLM) -> None:
    engine, params = llm.llm_engine, SamplingParams(max_tokens=1)
    for name, value, says in (
        ("arrival_time", "x", "arrival_time must be a number"),
        ("arrival_time", float("nan"), "arrival_time"),
        ("trace_headers", 5, "trace_headers must be a dict"),
        ("trace_headers", {"a": 1}, "trace_headers.*must be a string, got 1"),
        ("tokenization_kwargs", 5, "tokenization_kwargs must be a dict"),
        ("priority", 2**70, "priority must be"),
    ):
        with pytest.raises(BAD, match=says):
            engine.add_request("r", "hello", params, **{name: value})
        assert not engine.has_unfinished_requests()


def test_calls_of_llm(llm: LLM) -> None:
    with pytest.raises(InvalidTypeError, match="sampling_params must be SamplingParams, got int"):
        llm.stream("x", 5)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="chat_params must be ChatParams, got int"):
        llm.stream([{"role": "user", "content": "x"}], chat_params=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="output_type"):
        llm.wait_for_completion(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="params must be BeamSearchParams, got int"):
        llm.beam_search("x", 5)  # type: ignore[arg-type]
    beams = BeamSearchParams(beam_width=2, max_tokens=2)
    with pytest.raises(InvalidTypeError, match="concurrency_limit"):
        llm.beam_search("x", beams, concurrency_limit="x")  # type: ignore[arg-type]


def test_tools_choose_among_the_models_templates() -> None:
    """The renderer names a template only if the user gave one."""
    from tests.engine.fakes import make_config
    from tests.engine.tokenizers_for_tests import get

    class TwoTemplates:
        chat_templates = {"default": "D", "tool_use": "T"}  # noqa: RUF012
        wanted: Any = "not asked"
        bos_token_id = None

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return get("byte_level").encode(text, add_special_tokens)

        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            self.wanted = options["chat_template"]
            return "x"

    from tellin.engine.renderer import Renderer

    chat = [[{"role": "user", "content": "x"}]]
    for own, given, expected in (
        (None, None, None),
        ("{{ own }}", None, "{{ own }}"),
        ("{{ own }}", "{{ given }}", "{{ given }}"),
    ):
        tokenizer = TwoTemplates()
        config = make_config(chat_template=own)
        renderer = Renderer(config, tokenizer)  # type: ignore[arg-type]
        renderer.render_chat(chat, ChatParams(chat_template=given))
        assert tokenizer.wanted == expected


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -1}, r"key 'temperature' is -1, .*temperature must be"),
        ({"top_p": "x"}, r"key 'top_p' is 'x'"),
        ({"max_new_tokens": [[1]]}, r"key 'max_new_tokens' is \[\[1\]\]"),
        ({"repetition_penalty": math.inf}, "key 'repetition_penalty' is inf"),
    ],
)
def test_the_models_own_generation_defaults_are_tried(
    tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    """P50: else each request that leaves the parameter out would be refused for it."""
    folder = write_tiny_hybrid(tmp_path, "lfm2")
    (folder / "generation_config.json").write_text(json.dumps(values))
    args: dict[str, Any] = {"model": str(folder), "max_model_len": 64}
    with pytest.raises(ModelLoadError, match=rf"generation_config\.json: {words}"):
        create_engine_config(EngineArgs(**args))
    create_engine_config(EngineArgs(**args, generation_config="none"))
    override = {next(iter(values)): 1}
    create_engine_config(EngineArgs(**args, override_generation_config=override))
