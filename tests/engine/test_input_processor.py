"""The admission gate: rules INP-*, claims S3 and S19..S24, reports P15, P25..P28, P30, P44, P53."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

from tellin.config import LoRAConfig, ParallelConfig
from tellin.engine.input_processor import InputProcessor
from tellin.engine.prompts import RenderedPrompt, TokenizeParams
from tellin.engine.renderer import ChatParams, Renderer
from tellin.exceptions import (
    ContextLengthError,
    InvalidParameterError,
    InvalidTypeError,
    RequestError,
    UnsupportedFeatureError,
)
from tellin.protocol import EngineCoreReady, EngineCoreRequest, LoRARequest
from tellin.sampling_params import PoolingParams, SamplingParams, StructuredOutputsParams
from tests.engine.fakes import make_config, text_ids
from tests.engine.tokenizers_for_tests import get

VOCAB_SIZE = make_config().model_config.vocab_size
TOKENIZER_SIZE = make_config().model_config.tokenizer_size


def gate(tokenizer: str = "byte_level", **config: Any) -> InputProcessor:
    model_tokenizer = get(tokenizer)
    made = make_config(model_tokenizer, **config)
    loaded = None if made.model_config.skip_tokenizer_init else model_tokenizer
    return InputProcessor(made, Renderer(made, loaded))


def process(
    processor: InputProcessor,
    prompt: Any = "the sea",
    params: Any = None,
    tasks: tuple[str, ...] = ("generate",),
    **kwargs: Any,
) -> EngineCoreRequest:
    return processor.process_inputs("id", prompt, params or SamplingParams(), tasks, **kwargs)


# ---------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    "prompt",
    [
        "the sea",
        text_ids("the sea"),
        tuple(text_ids("the sea")),
        {"prompt": "the sea"},
        {"prompt_token_ids": text_ids("the sea")},
        {"prompt_token_ids": text_ids("the sea"), "prompt": "the sea", "cache_salt": None},
    ],
)
def test_s03_s21_prompt_forms(prompt: Any) -> None:
    """Text, ids and dicts end in the same request; raw = rendered."""
    processor = gate()
    request = process(processor, prompt, arrival_time=12.5)
    assert request.prompt_token_ids == text_ids("the sea")
    assert request.arrival_time == 12.5
    assert request.request_id == "id"
    assert request.external_req_id is None
    assert request.pooling_params is None
    assert request.mm_features is None
    (rendered,) = processor.renderer.render_cmpl([prompt])
    assert process(processor, rendered).prompt_token_ids == request.prompt_token_ids
    assert process(processor, rendered).arrival_time == rendered["arrival_time"]


def test_s21_raw_prompts_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tellin")
    processor = gate()
    for _ in range(3):
        process(processor, "the sea")
    assert [record.message for record in caplog.records if "deprecated" in record.message] == [
        "raw prompts are deprecated here: render them first, with renderer.render_cmpl() or "
        "renderer.render_chat()"
    ]


@pytest.mark.parametrize(
    "prompt",
    [
        5,
        None,
        b"bytes",
        ["text"],
        [1, "2"],
        [1, 2.0],
        [1, True],
        {"text": "the sea"},
        {"prompt": 5},
        {"prompt": "x", "cache_salt": 5},
        {"prompt_token_ids": "12"},
        {"prompt_token_ids": [1, None]},
    ],
)
def test_inp20_22_wrong_forms_are_type_errors(prompt: Any) -> None:
    """INP-20..22, and the wart: every element of a list is checked."""
    with pytest.raises(TypeError):
        process(gate(), prompt)


@pytest.mark.parametrize(
    "key",
    [
        "mm_processor_kwargs",
        "encoder_prompt",
        "decoder_prompt",
    ],
)
def test_inp23_24_unsupported_kinds_say_so(key: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=key):
        process(gate(), {"prompt": "x", key: [1]})


def test_inp23_images_are_not_for_text_models() -> None:
    for extra in ({"multi_modal_data": {"image": b"x"}}, {"multi_modal_uuids": {"image": "name"}}):
        with pytest.raises(UnsupportedFeatureError, match="no image encoder"):
            process(gate(), {"prompt": "x", **extra})
    with pytest.raises(TypeError, match="must be a dict"):
        process(gate(), {"prompt": "x", "multi_modal_data": [1]})


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {"prompt_token_ids": []}])
def test_p26_inp9_empty_prompts(prompt: Any) -> None:
    with pytest.raises(ValueError, match="empty"):
        process(gate(), prompt)


def test_p26_empty_text_with_bos_is_one_token() -> None:
    request = process(gate("byte_level_bos"), "")
    assert request.prompt_token_ids == [get("byte_level_bos").bos_token_id]


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**40])
@pytest.mark.parametrize("skip_tokenizer_init", [False, True])
def test_inp13_32_ids_outside_the_vocabulary(token_id: int, skip_tokenizer_init: bool) -> None:
    processor = gate(skip_tokenizer_init=skip_tokenizer_init)
    with pytest.raises(InvalidParameterError) as info:
        process(processor, [1, token_id, 2])
    assert str(token_id) in str(info.value)
    assert str(VOCAB_SIZE) in str(info.value)


def test_p46_ids_of_padded_rows_are_accepted_back() -> None:
    process(gate(), [TOKENIZER_SIZE, VOCAB_SIZE - 1])


@pytest.mark.parametrize(("length", "message"), [(64, "no room"), (65, "65"), (1000, "1000")])
def test_p15_inp10_inp11_too_long(length: int, message: str) -> None:
    with pytest.raises(ContextLengthError, match=message) as info:
        process(gate(), [1] * length)
    assert "64" in str(info.value)
    assert str(length) in str(info.value)


def test_p15_one_below_the_limit_works() -> None:
    request = process(gate(), [1] * 63, SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert request.sampling_params is not None
    assert request.sampling_params.max_tokens == 1


def test_p15_pooling_may_fill_the_context() -> None:
    process(gate(), [1] * 64, PoolingParams(), ("embed",))
    with pytest.raises(ContextLengthError):
        process(gate(), [1] * 65, PoolingParams(), ("embed",))


def test_inp26_absurd_texts_are_refused_before_tokenising() -> None:
    processor = gate()
    tokenizer = processor.renderer.tokenizer

    class Guard:
        def __getattr__(self, name: str) -> Any:
            assert name != "encode", "tokenised"
            return getattr(tokenizer, name)

    processor.renderer.tokenizer = Guard()  # type: ignore[assignment]
    with pytest.raises(ContextLengthError, match="2000000 characters"):
        process(processor, "x" * 2_000_000)


def test_p21_more_kv_than_the_pool_has() -> None:
    processor = gate(max_model_len=256)
    ready = EngineCoreReady("t", 256, num_kv_blocks=5, block_size=16, dtype="float32")
    processor.update_config(processor.config, ready)
    process(processor, [1] * 32, SamplingParams(max_tokens=32))
    with pytest.raises(ContextLengthError, match="64") as info:
        process(processor, [1] * 33, SamplingParams(max_tokens=32))
    assert "65" in str(info.value)


# ---------------------------------------------------------------------- truncation, tokenisation


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"truncate_prompt_tokens": 3}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [0, 1, 2]),
        ({"truncate_prompt_tokens": 30}, list(range(10))),
        ({"truncate_prompt_tokens": -1}, list(range(10))),
    ],
)
def test_p16_truncation_only_on_request_and_visible(
    options: dict[str, Any], expected: list[int]
) -> None:
    processor = gate()
    (rendered,) = processor.renderer.render_cmpl(
        [list(range(10))], TokenizeParams().with_options(options)
    )
    assert rendered["prompt_token_ids"] == expected
    assert rendered["num_truncated_tokens"] == 10 - len(expected)
    assert (
        process(processor, list(range(10)), tokenization_kwargs=options).prompt_token_ids
        == expected
    )


def test_p16_truncating_to_fit() -> None:
    request = process(gate(), [1] * 1000, tokenization_kwargs={"truncate_prompt_tokens": -1})
    assert len(request.prompt_token_ids or ()) == 63


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 64}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": "3"}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"add_special_tokens": 1}, "add_special_tokens"),
        ({"max_length": 5}, "max_length"),
    ],
)
def test_inp27_bad_tokenization_options(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidParameterError) as info:
        process(gate(), "the sea", tokenization_kwargs=options)
    assert info.value.parameter == name


def test_p44_one_bos_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A prompt that starts with BOS gets no second one; chat and a templated string are equal."""
    caplog.set_level(logging.WARNING, "tellin")
    processor = gate("byte_level_bos")
    bos = get("byte_level_bos").bos_token_id
    messages = [{"role": "user", "content": "the sea"}]
    _, (chat,) = processor.renderer.render_chat([messages])
    assert not caplog.records
    (completion,) = processor.renderer.render_cmpl([chat["prompt"]])
    assert chat["prompt_token_ids"] == completion["prompt_token_ids"]
    assert chat["prompt_token_ids"].count(bos) == 1  # type: ignore[arg-type]
    assert sum("<s>" in record.message for record in caplog.records) == 1
    (plain,) = processor.renderer.render_cmpl(["the sea"])
    assert plain["prompt_token_ids"][0] == bos
    without = {"add_special_tokens": False}
    assert process(processor, "the sea", tokenization_kwargs=without).prompt_token_ids == text_ids(
        "the sea"
    )


# ---------------------------------------------------------------------- chat


@pytest.mark.parametrize(
    "messages",
    [[], None, "hi", ["hi"], [{"content": "no role"}], [{"role": 1, "content": "x"}]],
)
def test_p26_malformed_conversations(messages: Any) -> None:
    with pytest.raises(RequestError, match="message"):
        gate().renderer.render_chat([messages])


def test_chat_contents() -> None:
    renderer = gate().renderer
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "sea"}]
    for content, expected in ((parts, "the\nsea"), (None, ""), ("x", "x")):
        seen, (prompt,) = renderer.render_chat([[{"role": "user", "content": content}]])
        assert seen[0][0]["content"] == expected
        assert f"user\n{expected}<|im_end|>" in str(prompt["prompt"])
    message = {"role": "user", "content": parts}
    seen, _ = renderer.render_chat([[message]], ChatParams(content_format="openai"))
    assert seen[0][0]["content"] == parts
    assert message["content"] is parts, "the caller's message is not changed"
    part = {"type": "image_url", "image_url": {"url": "data:,x"}}
    with pytest.raises(UnsupportedFeatureError, match="image_url"):
        renderer.render_chat([[{"role": "user", "content": [part]}]])


def test_chat_generation_prompt_and_continuation() -> None:
    renderer = gate().renderer
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "the s"}]
    _, (prompt,) = renderer.render_chat([messages])
    assert str(prompt["prompt"]).endswith("<|im_start|>assistant\n")
    _, (prompt,) = renderer.render_chat([messages], ChatParams(add_generation_prompt=False))
    assert str(prompt["prompt"]).endswith("<|im_end|>")
    going_on = ChatParams(add_generation_prompt=False, continue_final_message=True)
    _, (prompt,) = renderer.render_chat([messages], going_on)
    assert str(prompt["prompt"]).endswith("the s")
    with pytest.raises(InvalidParameterError, match="add_generation_prompt"):
        renderer.render_chat([messages], ChatParams(continue_final_message=True))


def test_chat_template_of_engine_and_of_request() -> None:
    renderer = gate(chat_template="E:{{ messages[0].content }}").renderer
    conversation = [[{"role": "user", "content": "x"}]]
    assert renderer.render_chat(conversation)[1][0]["prompt"] == "E:x"
    chat = ChatParams(chat_template="R:{{ messages[0].content }}{{ extra }}")
    assert renderer.render_chat(conversation, chat)[1][0]["prompt"] == "R:x"
    chat = ChatParams(chat_template="R:{{ extra }}", chat_template_kwargs={"extra": "!"})
    assert renderer.render_chat(conversation, chat)[1][0]["prompt"] == "R:!"


def test_only_the_engines_own_template_runs_in_the_event_loop() -> None:
    """A template that comes with a request is a program of unknown length."""
    renderer = gate(chat_template="E:{{ messages[0].content }}").renderer
    threads: list[threading.Thread] = []
    render = renderer.render_chat

    def note_thread(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return render(*args)

    renderer.render_chat = note_thread  # type: ignore[method-assign]
    conversations = [[{"role": "user", "content": "hi"}]]
    asyncio.run(renderer.render_chat_async(conversations))
    own = ChatParams(chat_template="R:{{ messages[0].content }}")
    asyncio.run(renderer.render_chat_async(conversations, own))
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


# ---------------------------------------------------------------------- parameters


def test_inp1_params_type() -> None:
    with pytest.raises(TypeError, match="dict"):
        gate().process_inputs("id", "x", {"n": 1}, ("generate",))  # type: ignore[arg-type]


def test_inp2_3_4_tasks() -> None:
    with pytest.raises(UnsupportedFeatureError, match="cannot generate"):
        process(gate(), tasks=("embed",))
    with pytest.raises(UnsupportedFeatureError, match="cannot pool"):
        process(gate(), params=PoolingParams())
    with pytest.raises(UnsupportedFeatureError, match=r"classify.*embed"):
        process(gate(), params=PoolingParams(task="classify"), tasks=("embed",))


def test_inp30_default_pooling_task() -> None:
    params = PoolingParams()
    request = process(gate(), params=params, tasks=("token_embed", "embed"))
    assert request.pooling_params is not None
    assert request.pooling_params.task == "embed"
    assert params.task is None, "the caller's object is not changed"
    with pytest.raises(InvalidParameterError, match="dimensions"):
        process(gate(), params=PoolingParams(dimensions=4), tasks=("classify",))


def test_inp5_thinking_budget_is_refused_not_ignored() -> None:
    params = SamplingParams(thinking_token_budget=5)
    with pytest.raises(UnsupportedFeatureError, match="thinking_token_budget"):
        process(gate(), params=params)


def test_a_grammar_needs_an_end() -> None:
    """Without one the core's masks have another width, and the step fails for everybody in it."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes"]))
    with pytest.raises(UnsupportedFeatureError, match="token that ends a text"):
        process(gate(eos_token_ids=()), params=params)
    assert process(gate(), params=params).sampling_params is not None


def test_s24_inp7_lora() -> None:
    lora = LoRARequest("cats", 1, "/a")
    with pytest.raises(ValueError, match=r"cats.*disabled"):
        process(gate(), lora_request=lora)
    assert process(gate(lora_config=LoRAConfig()), lora_request=lora).lora_request == lora


@pytest.mark.parametrize("rank", [-1, 2])
def test_inp8_rank(rank: int) -> None:
    processor = gate(parallel_config=ParallelConfig(data_parallel_size=2))
    assert process(processor, data_parallel_rank=1).data_parallel_rank == 1
    with pytest.raises(InvalidParameterError, match=r"\[0, 2\)"):
        process(processor, data_parallel_rank=rank)


@pytest.mark.parametrize("ended", [None, True, False])
def test_what_the_caller_knows_of_the_thoughts_reaches_the_core(ended: bool | None) -> None:
    assert process(gate(), reasoning_ended=ended).reasoning_ended is ended


def test_whether_thoughts_have_ended_is_a_truth_value() -> None:
    with pytest.raises(InvalidTypeError, match="reasoning_ended must be True, False or None"):
        process(gate(), reasoning_ended=1)


def test_s22_s23_priority_and_trace_headers_are_copied() -> None:
    headers = {"traceparent": "00-1"}
    request = process(gate(), priority=-3, trace_headers=headers)
    assert request.priority == -3
    assert request.trace_headers == headers
    assert request.trace_headers is not headers
    with pytest.raises(InvalidParameterError, match="priority"):
        process(gate(), priority=1.5)


@pytest.mark.parametrize(
    ("params", "offending"),
    [
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, VOCAB_SIZE),
        ({"logit_bias": {-1: 1.0}}, -1),
        ({"stop_token_ids": [VOCAB_SIZE]}, VOCAB_SIZE),
        ({"logprob_token_ids": [VOCAB_SIZE]}, VOCAB_SIZE),
        ({"allowed_token_ids": [TOKENIZER_SIZE]}, TOKENIZER_SIZE),
        ({"allowed_token_ids": [-1]}, -1),
    ],
)
def test_p27_ids_in_parameters(params: dict[str, Any], offending: int) -> None:
    with pytest.raises(ValueError) as info:
        process(gate(), params=SamplingParams(**params))
    name = next(iter(params))
    assert name in str(info.value)
    assert str(offending) in str(info.value)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_max_logprobs(name: str) -> None:
    process(gate(), params=SamplingParams(**{name: 20}))
    for value in (21, -1):
        with pytest.raises(InvalidParameterError, match="20"):
            process(gate(), params=SamplingParams(**{name: value}))
    process(gate(max_logprobs=-1), params=SamplingParams(**{name: -1}))


def test_inp45_max_tokens_none_is_the_room() -> None:
    request = process(gate(), [1] * 10, SamplingParams(max_tokens=None))
    assert request.sampling_params is not None
    assert request.sampling_params.max_tokens == 54
    larger = process(gate(), [1] * 10, SamplingParams(max_tokens=500))
    assert larger.sampling_params is not None
    assert larger.sampling_params.max_tokens == 500


def test_min_tokens_must_fit() -> None:
    params = SamplingParams(max_tokens=None, min_tokens=55)
    with pytest.raises(InvalidParameterError, match=r"min_tokens=55.*54"):
        process(gate(), [1] * 10, params)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_p53_inp46_end_of_sequence_ids(ignore_eos: bool) -> None:
    """ignore_eos switches off all of the model's ids, but not the user's; all are masked before
    min_tokens."""
    params = SamplingParams(ignore_eos=ignore_eos, stop_token_ids=[9])
    request = process(gate(eos_token_ids=(5, 6, 7)), params=params)
    final = request.sampling_params
    assert final is not None
    assert final.all_stop_token_ids == {5, 6, 7, 9}
    assert final.eos_token_id == (None if ignore_eos else 5)
    assert final.stop_token_ids == ([9] if ignore_eos else [9, 6, 7])
    assert params.stop_token_ids == [9], "the caller's object is not changed"


def test_inp47_bad_words_beyond_the_tokenizers_range_are_refused() -> None:
    """A tokenizer of another model may know more ids than this model has."""
    largest = max(text_ids("the") + text_ids(" the"))
    process(gate(tokenizer_size=largest + 1), params=SamplingParams(bad_words=["the"]))
    with pytest.raises(InvalidParameterError, match="bad word 'the' cannot be expressed in tokens"):
        process(gate(tokenizer_size=largest), params=SamplingParams(bad_words=["the"]))


def test_inp47_bad_words_in_all_tokenisations() -> None:
    request = process(gate(), params=SamplingParams(bad_words=["the", "zz"]))
    assert request.sampling_params is not None
    assert request.sampling_params.bad_words_token_ids == [
        text_ids("the"),
        text_ids(" the"),
        text_ids("zz"),
        text_ids(" zz"),
    ]


def test_p30_contradictions_are_refused() -> None:
    the, sea = text_ids("the")[0], text_ids(" sea")[0]
    with pytest.raises(InvalidParameterError, match="bad_words"):
        process(gate(), params=SamplingParams(allowed_token_ids=[the], bad_words=["the"]))
    process(gate(), params=SamplingParams(allowed_token_ids=[the, sea], bad_words=["the"]))
    eos = get("byte_level").eos_token_id
    assert eos is not None
    with pytest.raises(InvalidParameterError, match="min_tokens"):
        process(gate(), params=SamplingParams(allowed_token_ids=[eos], min_tokens=1))
    process(gate(), params=SamplingParams(allowed_token_ids=[eos]))


@pytest.mark.parametrize(
    "params",
    [
        {"stop": "x"},
        {"bad_words": ["x"]},
        {"structured_outputs": StructuredOutputsParams(choice=["a"])},
    ],
)
def test_no_tokenizer_no_text_features(params: dict[str, Any]) -> None:
    processor = gate(skip_tokenizer_init=True)
    with pytest.raises(UnsupportedFeatureError, match=next(iter(params))):
        process(processor, [1, 2], SamplingParams(**params))
    with pytest.raises(UnsupportedFeatureError, match="skip_tokenizer_init"):
        process(processor, "text")


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "("},
        {"json": '{"type": "not-a-type"}'},
        {"json": {"properties": {"a": "nonsense"}}},
        {"json": {"$ref": "#"}},
        {"grammar": "not a grammar ]["},
    ],
)
def test_p36_broken_constraints_are_refused_at_admission(constraint: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))
    with pytest.raises(ValueError, match="structured_outputs"):
        process(gate(), params=params)


def test_sound_constraints_are_accepted() -> None:
    params = StructuredOutputsParams(json={"type": "object"})
    request = process(gate(), params=SamplingParams(structured_outputs=params))
    assert request.sampling_params is not None
    assert request.sampling_params.structured_outputs == params


def test_validation_does_not_change_the_callers_params() -> None:
    params = SamplingParams(
        max_tokens=None, bad_words=["the"], logit_bias={3: 1.0}, stop_token_ids=[4]
    )
    before = repr(params)
    process(gate(), params=params)
    assert repr(params) == before


# ---------------------------------------------------------------------- ids, multimodal


def test_inp50_inp15_id_assignment() -> None:
    processor = gate()
    request = process(processor)
    processor.assign_request_id(request)
    assert request.external_req_id == "id"
    suffix = request.request_id.removeprefix("id-")
    assert len(suffix) == 8
    assert int(suffix, 16) >= 0
    with pytest.raises(InvalidParameterError, match="external_req_id"):
        processor.assign_request_id(request)


def test_s20_inp55_multimodal_features_are_sorted_by_offset() -> None:
    rendered = RenderedPrompt(
        type="multimodal",
        prompt_token_ids=[1] * 20,
        mm_items={
            "image": {
                "data": ["i0", "i1"],
                "hashes": ["h0", "h1"],
                "placeholders": [(8, 2), (1, 3)],
            },
            "sound": {"data": [None], "hashes": ["h2"], "placeholders": [(5, 1)]},
        },
    )
    features = process(gate(), rendered).mm_features
    assert features is not None
    assert [(f.modality, f.offset, f.length, f.identifier, f.data) for f in features] == [
        ("image", 1, 3, "h1", "i1"),
        ("sound", 5, 1, "h2", None),
        ("image", 8, 2, "h0", "i0"),
    ]
    rendered["mm_items"]["image"]["hashes"] = ["h0", 5]  # type: ignore[list-item]
    with pytest.raises(ValueError, match="processor"):
        process(gate(), rendered)
