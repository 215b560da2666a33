"""Claims S1..S75 that are not tested beside the code they are about, and a check that all are."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tellin.engine import llm_engine
from tellin.engine.llm_engine import LLMEngine
from tellin.engine.prompts import RenderedPrompt
from tellin.protocol import CacheStats
from tellin.sampling_params import SamplingParams
from tests.engine.fakes import EngineMaker, run, text_ids

TESTS = Path(__file__).resolve().parents[1]
ABC = [text_ids("a"), text_ids("b"), text_ids("c")]


def test_every_claim_has_a_test() -> None:
    """S1..S75: each is in the name of a test."""
    claims: set[int] = set()
    for path in TESTS.rglob("test_*.py"):
        for name in re.findall(r"def (test_\w+)", path.read_text()):
            claims.update(int(number) for number in re.findall(r"_s(\d{2})(?=_)", name))
    assert set(range(1, 76)) - claims == set()


# ---------------------------------------------------------------------- the shell's shape


def engine_methods() -> dict[str, ast.FunctionDef]:
    tree = ast.parse(Path(inspect.getfile(llm_engine)).read_text())
    (class_,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "LLMEngine")
    return {n.name: n for n in class_.body if isinstance(n, ast.FunctionDef)}


PASS_THROUGH = [
    "is_sleeping",
    "reset_prefix_cache",
    "reset_encoder_cache",
    "add_lora",
    "remove_lora",
    "list_loras",
    "pin_lora",
    "collective_rpc",
    "apply_model",
    "get_num_unfinished_requests",
    "get_tokenizer",
]


@pytest.mark.parametrize("name", PASS_THROUGH)
def test_s14_s15_pass_throughs_are_one_statement_with_one_call(name: str) -> None:
    """After the docstring: one statement, whose only call beside a type's is the one passed on."""
    body = [
        statement
        for statement in engine_methods()[name].body
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    ]
    assert len(body) == 1
    calls = [node for node in ast.walk(body[0]) if isinstance(node, ast.Call)]
    coercions = {"bool", "list", "set", "tuple"}
    passed_on = [call for call in calls if ast.unparse(call.func) not in coercions]
    assert len(passed_on) == 1
    assert ast.unparse(passed_on[0].func).startswith("self.")


def test_s14_s75_the_shell_is_under_500_lines_of_short_methods() -> None:
    """S75: adding, stepping, throttle, sleep, data parallelism, end; nothing of a model's."""
    source = Path(inspect.getfile(llm_engine)).read_text()
    assert len(source.splitlines()) < 500
    for name, method in engine_methods().items():
        assert method.end_lineno is not None
        assert method.end_lineno - method.lineno < 75, name
    imported = {
        node.module or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
    }
    layers = ("tellin.core", "tellin.executor", "tellin.worker", "tellin.models", "tellin.kernels")
    assert not [module for module in imported if module.startswith(layers)]


def test_s18_no_method_asks_which_client_it_has() -> None:
    """No look at the client's type or attributes beside the protocol's, but in one helper."""
    allowed = {
        "ready",
        "add_request",
        "abort_requests",
        "get_output",
        "call_utility",
        "dp_engines_running",
        "shutdown",
    }
    for name, method in engine_methods().items():
        for node in ast.walk(method):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.engine_core":
                assert node.attr in allowed, f"{name} uses {node.attr}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "type"):
                assert "engine_core" not in ast.unparse(node), name
            if isinstance(node, ast.If):
                assert "engine_core" not in ast.unparse(node.test), name


def test_s35_documents_its_purpose() -> None:
    text = f"{llm_engine.__doc__} {LLMEngine.__doc__}"
    assert "synchronous shell" in text
    assert "first generation" in text
    assert "AsyncLLM" in text, "says what new code uses"


# ---------------------------------------------------------------------- fan-out


@pytest.mark.parametrize("n", [1, 2, 5])
def test_s31_s56_s57_one_registration_and_one_send_per_child(
    make_engine: EngineMaker, n: int
) -> None:
    """The last send is the request itself; n - 1 copies are made, none for n = 1."""
    engine = make_engine(ABC)
    order: list[tuple[str, str]] = []
    objects: list[Any] = []
    copies: list[Any] = []
    made: list[Any] = []
    patch = make_engine.monkeypatch
    original_register = engine.output_processor.add_request
    original_send = engine.engine_core.add_request
    original_copy = llm_engine.copy
    original_assign = engine.input_processor.assign_request_id

    def register(request: Any, *args: Any, **kwargs: Any) -> Any:
        order.append(("register", request.request_id))
        return original_register(request, *args, **kwargs)

    def send(request: Any) -> None:
        order.append(("send", request.request_id))
        objects.append(request)
        original_send(request)

    def copy(request: Any) -> Any:
        copies.append(request)
        return original_copy(request)

    def assign(request: Any) -> None:
        made.append(request)
        original_assign(request)

    patch.setattr(engine.output_processor, "add_request", register)
    patch.setattr(engine.engine_core, "add_request", send)
    patch.setattr(engine.input_processor, "assign_request_id", assign)
    patch.setattr(llm_engine, "copy", copy)
    handle = engine.add_request("x", "abc", SamplingParams(n=n))
    ids = [str(handle)] if n == 1 else [f"{i}_{handle}" for i in range(n)]
    assert order == [(step, request_id) for request_id in ids for step in ("register", "send")]
    assert len(copies) == n - 1
    assert all(copied is made[0] for copied in copies)
    assert objects[-1] is made[0]
    assert not any(sent is made[0] for sent in objects[:-1])
    assert len({id(sent) for sent in objects}) == n
    # shallow: what the children share is shared
    assert all(sent.prompt_token_ids is made[0].prompt_token_ids for sent in objects)


def test_s58_s59_children_get_ids_and_params_of_the_parent(make_engine: EngineMaker) -> None:
    engine = make_engine(ABC)
    handle = engine.add_request("x", "abc", SamplingParams(n=3, seed=7, temperature=0.5))
    (parent,) = engine.output_processor.parent_requests.values()
    assert parent.request_id == handle, "the parent's id is the request's internal id"
    for i, sent in enumerate(make_engine.client.requests):
        assert sent.request_id == f"{i}_{handle}"
        params = sent.sampling_params
        assert params is not None
        assert (params.n, params.seed, params.temperature) == (1, 7 + i, 0.5)


# ---------------------------------------------------------------------- the image cache


class ImageCache:
    """A processor cache: an item that was sent before is sent as a reference (no data)."""

    def __init__(self) -> None:
        self.known: set[str] = set()

    def render(self, hash_: str, data: str) -> RenderedPrompt:
        item = None if hash_ in self.known else data
        self.known.add(hash_)
        items = {"image": {"data": [item], "hashes": [hash_], "placeholders": [(0, 1)]}}
        return RenderedPrompt(type="multimodal", prompt_token_ids=[1, 2], mm_items=items)  # type: ignore[typeddict-item]

    def clear(self) -> None:
        self.known.clear()

    def take_stats(self) -> CacheStats | None:
        return None


@pytest.mark.parametrize(("level", "sent_again"), [(0, False), (1, True), (2, True)])
def test_s71_s72_after_sleep_an_image_is_sent_with_its_data(
    make_engine: EngineMaker, level: int, sent_again: bool
) -> None:
    """The cache of the sender is cleared with the receiver's: no reference to what is gone."""
    engine = make_engine(ABC)
    cache = ImageCache()
    engine.renderer.mm_processor = cache  # type: ignore[assignment]

    def send(request_id: str) -> Any:
        engine.add_request(request_id, cache.render("h", "pixels"), SamplingParams())
        run(engine)
        (feature,) = make_engine.client.requests[-1].mm_features or []
        return feature.data

    assert send("first") == "pixels"
    assert send("second") is None
    engine.sleep(level)
    engine.wake_up()
    assert send("third") == ("pixels" if sent_again else None)


# ---------------------------------------------------------------------- data parallelism


class LateGroup:
    """Another rank that works for a number of rounds."""

    rank, size = 0, 2
    calls: ClassVar[list[int]] = []

    def __init__(self, num_rounds: int) -> None:
        self.left = num_rounds

    def all_reduce_max(self, value: int) -> int:
        self.calls.append(value)
        self.left -= 1
        return max(value, int(self.left >= 0))

    def close(self) -> None: ...


def test_s65_s66_s67_an_idle_rank_runs_dummy_batches_only(make_engine: EngineMaker) -> None:
    engine = make_engine(ABC)
    engine.dp_group = LateGroup(num_rounds=4)
    assert run(engine) == []
    assert make_engine.client.names().count("execute_dummy_batch") == 4
    assert "get_output" not in make_engine.client.names()
    assert LateGroup.calls == [0] * 5, "one collective per round and the one that ends the loop"


def test_s65_s67_a_rank_that_ends_early_goes_on_with_dummies(make_engine: EngineMaker) -> None:
    LateGroup.calls.clear()
    engine = make_engine(ABC)
    engine.add_request("x", "abc", SamplingParams())
    engine.dp_group = LateGroup(num_rounds=5)
    outputs = run(engine)
    assert outputs[-1].finished
    assert LateGroup.calls == [1, 1, 1, 0, 0, 0]
    assert make_engine.client.names().count("execute_dummy_batch") == 2
