"""Prompts as embeddings, up to the core: forms, and what is refused (INP-16, INP-24)."""

from __future__ import annotations

import base64
import io
import json
import struct
from typing import Any

import numpy as np
import pytest

from tellin.config import EngineArgs, SpeculativeConfig
from tellin.core.block_hash import BlockHasher
from tellin.core.engine_core import check_embeds
from tellin.core.request import Request
from tellin.engine.arg_checks import check_prompt_embeds
from tellin.engine.input_processor import InputProcessor
from tellin.engine.prompt_embeds import prompt_rows, read_base64
from tellin.engine.prompts import TokenizeParams
from tellin.engine.renderer import Renderer
from tellin.exceptions import (
    ContextLengthError,
    InvalidParameterError,
    InvalidTypeError,
    UnsupportedFeatureError,
)
from tellin.protocol import EngineCoreRequest
from tellin.sampling_params import SamplingParams
from tests.engine.fakes import make_config

HIDDEN = 8
CONFIG = make_config(enable_prompt_embeds=True)
MODEL = CONFIG.model_config
ROWS = np.random.default_rng(0).standard_normal((5, HIDDEN)).astype(np.float32)


class Tensor:
    """As much of a torch tensor as is looked at."""

    def __init__(self, values: Any, dtype: str) -> None:
        self.values, self.dtype = values, f"torch.{dtype}"

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        if self.values is None:
            raise NotImplementedError("no data")
        return self

    def float(self) -> Tensor:
        return Tensor(self.values, "float32")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.values


def gate() -> InputProcessor:
    return InputProcessor(CONFIG, Renderer(CONFIG, None))


def process(prompt: Any, **params: Any) -> EngineCoreRequest:
    sampling = SamplingParams(max_tokens=2, detokenize=False, **params)
    return gate().process_inputs("r", prompt, sampling, ["generate"])


@pytest.mark.parametrize(
    "given",
    [
        ROWS,
        ROWS[None],
        np.asfortranarray(ROWS),
        ROWS.astype(np.float64),
        ROWS.astype(">f4"),
        Tensor(ROWS, "float32"),
        Tensor(ROWS, "bfloat16"),
    ],
)
def test_forms_of_the_same_rows(given: Any) -> None:
    rows = prompt_rows(given, MODEL)
    assert rows.tobytes() == ROWS.tobytes()
    assert rows.dtype == np.float32
    assert rows.flags.c_contiguous
    assert not rows.flags.writeable
    assert prompt_rows(rows, MODEL) is rows  # the second gate copies nothing


def test_rows_are_the_engines_own() -> None:
    """Who changes the array afterwards does not change what the prefix cache knows it as."""
    mine = ROWS.copy()
    view = mine.view()
    view.flags.writeable = False
    requests = [process({"prompt_embeds": given}) for given in (mine, view)]
    mine[:] = 0
    for request in requests:
        assert request.prompt_token_ids is None
        assert request.prompt_embeds.tobytes() == ROWS.tobytes()


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (ROWS[0], InvalidParameterError, r"\[num_tokens, 8\].* got \[8\]"),
        (ROWS[:, :4], InvalidParameterError, r"got \[5, 4\]"),
        (np.stack([ROWS, ROWS]), InvalidParameterError, r"got \[2, 5, 8\]"),
        (ROWS[:0], InvalidParameterError, "no rows"),
        (np.zeros((65, HIDDEN), np.float32), ContextLengthError, "65 rows.* 64"),
        (np.zeros((64, HIDDEN), np.float32), ContextLengthError, "no room"),
        (np.where(ROWS > 1, np.nan, ROWS), InvalidParameterError, "NaN.* row"),
        (np.where(np.arange(5)[:, None] == 3, np.inf, ROWS), InvalidParameterError, "row 3"),
        (np.full((1, HIDDEN), 1e300), InvalidParameterError, "too large"),
        (np.zeros((5, HIDDEN), np.int32), InvalidTypeError, "int32"),
        (np.zeros((5, HIDDEN), object), InvalidTypeError, "object"),
        (ROWS.tolist(), InvalidTypeError, "list"),
        (Tensor(None, "float32"), InvalidTypeError, "cannot be read: no data"),
        ("abc", InvalidTypeError, "str"),
        (5, InvalidTypeError, "int"),
    ],
)
def test_inp24_what_is_refused(given: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        process({"prompt_embeds": given})


@pytest.mark.parametrize(
    "extra",
    [
        {"prompt_token_ids": [1] * 5},
        {"multi_modal_data": {"image": b"x"}},
        {"token_type_ids": [0] * 5},
    ],
)
def test_inp16_nothing_else_says_what_the_prompt_is(extra: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError, match="cannot be given together"):
        process({"prompt_embeds": ROWS, **extra})


def test_off_is_off_whatever_comes() -> None:
    config = make_config()
    with pytest.raises(UnsupportedFeatureError, match="enable_prompt_embeds=True"):
        Renderer(config, None).render_cmpl([{"prompt_embeds": ROWS}])
    with pytest.raises(UnsupportedFeatureError, match="enable_prompt_embeds=True"):
        check_embeds(process({"prompt_embeds": ROWS}), config.model_config)


def test_start_refuses_what_rows_cannot_do() -> None:
    check_prompt_embeds(False, make_config(runner_type="pooling").model_config, None)
    check_prompt_embeds(True, MODEL, SpeculativeConfig("ngram", 2))
    with pytest.raises(UnsupportedFeatureError, match="pools"):
        check_prompt_embeds(True, make_config(runner_type="pooling").model_config, None)
    with pytest.raises(UnsupportedFeatureError, match="draft_model"):
        check_prompt_embeds(True, MODEL, SpeculativeConfig("draft_model", 2))
    with pytest.raises(UnsupportedFeatureError, match="by token id"):
        check_prompt_embeds(True, MODEL, None, looks_up_inputs=True)
    assert EngineArgs(model="x", enable_prompt_embeds=True).enable_prompt_embeds


def test_prompt_logprobs_are_of_tokens() -> None:
    with pytest.raises(UnsupportedFeatureError, match="prompt_logprobs"):
        process({"prompt_embeds": ROWS}, prompt_logprobs=1)


def test_truncation_keeps_rows_of_one_side() -> None:
    renderer = Renderer(CONFIG, None)
    for side, kept in (("left", ROWS[-3:]), ("right", ROWS[:3])):
        options = TokenizeParams(truncate_prompt_tokens=3, truncation_side=side)
        rendered = renderer.render_cmpl([{"prompt_embeds": ROWS, "prompt": "text"}], options)[0]
        assert rendered["prompt_embeds"].tobytes() == kept.tobytes()
        assert rendered["prompt_token_ids"] == [0, 0, 0]
        assert (rendered["num_truncated_tokens"], rendered["prompt"]) == (2, "text")
        request = process(rendered)
        assert request.prompt_embeds is rendered["prompt_embeds"]


def test_a_rendered_prompt_by_hand_passes_the_same_gate() -> None:
    with pytest.raises(InvalidTypeError, match="only then"):
        process({"type": "token", "prompt_token_ids": [1], "prompt_embeds": ROWS})
    with pytest.raises(InvalidTypeError, match="only then"):
        process({"type": "embeds", "prompt_token_ids": [1]})
    with pytest.raises(InvalidParameterError, match="num_tokens, 8"):
        process({"type": "embeds", "prompt_token_ids": [], "prompt_embeds": ROWS[:, :2]})


# ---------------------------------------------------------------------- core


def request_of(rows: Any, outputs: int = 0, **fields: Any) -> Request:
    params = SamplingParams(max_tokens=9)
    request = Request("r", [0] * len(rows), params, None, max_model_len=99, **fields)
    request.append_output_token_ids([7] * outputs)
    return request


def hashes(rows: Any, outputs: int = 0) -> list[bytes]:
    hasher, request = BlockHasher(4), request_of(rows, outputs, prompt_embeds=rows)
    hasher.extend(request)
    return [*request.block_hashes, hasher.tail_hash(request)]


def test_blocks_are_known_by_their_rows() -> None:
    """2.4.3: each by its own slice, so that a common beginning is shared; none past the prompt."""
    rows = np.tile(ROWS, (3, 1))[:10]
    first = hashes(rows)
    assert len(first) == 3
    other = rows.copy()
    other[9, 3] += 1
    assert hashes(other)[:2] == first[:2]
    assert hashes(other)[2] != first[2]
    other[4, 0] += 1
    assert hashes(other)[0] == first[0]
    assert hashes(other)[1] != first[1]
    plain = request_of(rows)
    BlockHasher(4).extend(plain)
    assert plain.block_hashes[0] != first[0]
    request = request_of(rows, 8, prompt_embeds=rows)
    assert BlockHasher(4).extra_keys(request, 12) == b""


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prompt_embeds": [[0.0]]}, "an array"),
        ({"prompt_embeds": ROWS.astype(np.float64)}, "format"),
        ({"prompt_embeds": ROWS[:, ::2]}, r"\(5, 4\)"),
        ({"prompt_embeds": ROWS.T}, "C order"),
        ({"prompt_token_ids": [0] * 5}, "whole prompt"),
    ],
)
def test_the_core_looks_too(changes: dict[str, Any], match: str) -> None:
    request = process({"prompt_embeds": ROWS})
    for name, value in changes.items():
        setattr(request, name, value)
    with pytest.raises(InvalidParameterError, match=match):
        check_embeds(request, MODEL)


# ---------------------------------------------------------------------- files


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def npy_header(shape: str = "(5, 8)", descr: str = "'<f4'", more: str = "") -> bytes:
    """A file whose header says what it likes, with the values of `ROWS`."""
    head = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}{more}".encode()
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(head)) + head + ROWS.tobytes()


def safetensors(array: Any, kind: str = "F32", **changes: Any) -> bytes:
    entry = {"dtype": kind, "shape": list(array.shape), "data_offsets": [0, array.nbytes]}
    head = json.dumps({"__metadata__": {}, "embeds": entry | changes}).encode()
    return struct.pack("<Q", len(head)) + head + array.tobytes()


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_files_are_read() -> None:
    upper = (ROWS.view(np.uint32) >> 16).astype(np.uint16)
    rounded = (upper.astype(np.uint32) << 16).view(np.float32)
    for data, expected in (
        (npy(ROWS), ROWS),
        (npy(np.asfortranarray(ROWS)), ROWS),
        (npy(ROWS.astype(">f4")), ROWS),
        (npy_header(more=", }  \n"), ROWS),
        (npy(ROWS.astype(np.float16)), ROWS.astype(np.float16)),
        (safetensors(ROWS), ROWS),
        (safetensors(upper, "BF16"), rounded),
    ):
        assert np.array_equal(read_base64(b64(data)), expected)
    assert prompt_rows(read_base64(b64(npy(ROWS))), MODEL).tobytes() == ROWS.tobytes()


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (b"PK\x03\x04 archive", UnsupportedFeatureError, "torch.save"),
        (b"\x80\x02 pickle", UnsupportedFeatureError, "torch.save"),
        (npy(np.array([{}], object)), InvalidTypeError, "Python objects"),
        (npy(ROWS)[:-1], InvalidParameterError, "bytes of values"),
        (npy(ROWS)[:20], InvalidParameterError, "broken .npy"),
        (b"\x93NUMPY\x09\x00", InvalidParameterError, "broken .npy"),
        (
            npy(ROWS).replace(b"(5, 8)", b"(1<<40,)"),
            InvalidParameterError,
            "broken .npy",
        ),
        (safetensors(ROWS, shape=[1 << 40, 8]), InvalidParameterError, "bytes of values"),
        (safetensors(ROWS, data_offsets=[-4, 100]), InvalidParameterError, "not where"),
        (safetensors(ROWS, data_offsets=[0, 1 << 50]), InvalidParameterError, "not where"),
        (safetensors(ROWS, "I8"), InvalidParameterError, "dtype is I8"),
        (struct.pack("<Q", 1 << 60) + b"{}" * 9, InvalidParameterError, "header"),
        (b"hello, world", InvalidParameterError, "must be a base64"),
        (b"", InvalidParameterError, "must be a base64"),
    ],
)
def test_files_that_are_not_opened(data: bytes, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        read_base64(b64(data))


@pytest.mark.parametrize(
    "data",
    [
        *(
            npy_header(shape, more="}")
            for shape in ("(True, 40)", "(40.0,)", "(1,) * 40", "[[40]]")
        ),
        npy_header("(" + "1, " * 70 + "40)", more="}"),
        npy_header(f"(0, {1 << 70})", more="}"),
        npy_header("-" * 5000 + "40", more="}"),
        npy_header("(" * 3000, more="}"),
        npy_header(more=""),
        npy_header(more=", []: 1}"),
        npy_header(more=", b'x': 1}"),
        npy_header(more=", 'x': '''"),
        npy_header("(40,)", "'V0'", "}"),
        npy_header("(40,)", "('<f4', (1,))", "}"),
        npy_header("(40,)", "'(1, '", "}"),
        npy_header("(40,)", "{'names': ['a'], 'formats': ['O']}", "}"),
        npy(ROWS).replace(b"\x01\x00", b"\x04\x00", 1),
        safetensors(ROWS, shape=[float("inf"), 8]),
        safetensors(ROWS, shape=[5.0, 8]),
        safetensors(ROWS, shape="58"),
        safetensors(ROWS, shape=[1] * 100 + [40]),
        safetensors(ROWS, data_offsets=[0.0, 160.0]),
        safetensors(ROWS, data_offsets=[False, 160]),
    ],
)
def test_whatever_a_file_says_the_answer_is_an_invalid_request(data: bytes) -> None:
    """NumPy's reader leaks SyntaxError, TokenError, TypeError and RecursionError for some."""
    with pytest.raises(InvalidParameterError, match="prompt_embeds: "):
        read_base64(b64(data))


def test_text_that_is_no_base64() -> None:
    for text in ("abc", "ä", "a b c d", "===="):
        with pytest.raises(InvalidParameterError, match="base64"):
            read_base64(text)
