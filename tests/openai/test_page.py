"""The page's routes, their headers, and what the engine tells those who watch."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import resources
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tellin.entrypoints.openai.page import view as view_module
from tellin.entrypoints.openai.page.routes import SECURITY_HEADERS, page_paths
from tellin.entrypoints.openai.page.view import EngineEvent, EngineView, StepMonitor, encode_runs
from tellin.exceptions import EngineDeadError
from tellin.metrics import IterationStats
from tellin.protocol import CacheStats, EngineCoreReady, EngineCoreSnapshot, SchedulerStats
from tests.openai.conftest import ENDLESS_TOKENS, SLOW, Serve, Server

STATIC = resources.files("tellin.entrypoints.openai.page") / "static"
SOURCES = sorted(item.name for item in STATIC.iterdir())
MAX_PAGE_BYTES = 200_000


def first_event(http: httpx.Client, path: str, **headers: str) -> dict[str, Any]:
    with http.stream("GET", path, headers=headers) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: "):
                return dict(json.loads(line[6:]))
    raise AssertionError("no event")


# ---------------------------------------------------------------------- files


def test_page_is_served_with_strict_headers(server: Server) -> None:
    assert {"/", "/page/app.js", "/page/base.css"} < page_paths()
    for path in sorted(page_paths()):
        answer = server.http.get(path)
        assert answer.status_code == 200
        for name, value in SECURITY_HEADERS.items():
            assert answer.headers[name] == value
        kinds = {"": "text/html", "js": "text/javascript", "css": "text/css"}
        assert answer.headers["content-type"].startswith(kinds[path.rpartition(".")[2].lstrip("/")])
        assert len(answer.content) > 100
    policy = SECURITY_HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy  # nothing of another origin


def test_files_are_revalidated_not_sent_again(server: Server) -> None:
    first = server.http.get("/page/app.js")
    again = server.http.get("/page/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert server.http.head("/").status_code == 200


@pytest.mark.parametrize(
    "path", ["/page/", "/page/../routes.py", "/page/%2e%2e/routes.py", "/page/x"]
)
def test_no_other_file_is_reached(server: Server, path: str) -> None:
    answer = server.http.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_page_is_small_and_needs_nothing_from_elsewhere() -> None:
    """Works offline: no file names another host, but for the namespace of SVG."""
    texts = {name: (STATIC / name).read_text(encoding="utf-8") for name in SOURCES}
    assert sum(map(len, texts.values())) < MAX_PAGE_BYTES
    for name, text in texts.items():
        hosts = set(re.findall(r"https?://([\w.-]+)", text)) - {"www.w3.org"}
        assert not hosts, (name, hosts)
        for target in re.findall(r'(?:from|import|src=|href=)\s*"(\.?/[^"]+)"', text):
            assert target.replace("./", "/page/", 1) in page_paths(), (name, target)


def test_no_way_from_text_to_markup() -> None:
    """No sink that parses HTML or runs text; the policy would stop them as well."""
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
    for name in SOURCES:
        text = (STATIC / name).read_text(encoding="utf-8")
        assert not re.search(sinks, text), name
    index = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*src=)", index)  # the policy allows none inline
    assert not re.search(r"\son\w+=|\sstyle=", index)


class _Outline(HTMLParser):
    """Collects what a check of accessibility needs."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("for", "aria-labelledby", "aria-describedby", "aria-controls"):
                self.references += (value or "").split()


def test_document_has_landmarks_and_no_broken_reference() -> None:
    outline = _Outline()
    outline.feed((STATIC / "index.html").read_text(encoding="utf-8"))
    assert len(outline.ids) == len(set(outline.ids))
    built_by_scripts = {"engine-title"}
    assert set(outline.references) - built_by_scripts <= set(outline.ids)
    assert {"header", "nav", "main", "aside"} <= set(outline.tags)
    assert outline.tags.count("h1") == 1


# ---------------------------------------------------------------------- the engine's state


def test_state_of_an_idle_engine(server: Server) -> None:
    state = server.http.get("/engine/state").json()
    core = state["core"]
    assert (core["num_running"], core["num_waiting"], core["requests"]) == (0, 0, [])
    blocks = core["blocks"]
    runs = re.findall(r"(\d+)([fcus])", blocks["states"])
    assert "".join(n + letter for n, letter in runs) == blocks["states"]
    counts = dict.fromkeys("fcus", 0)
    for number, letter in runs:
        counts[letter] += int(number)
    named = (blocks["num_free"], blocks["num_cached"], blocks["num_used"], blocks["num_shared"])
    assert tuple(counts.values()) == named
    assert sum(named) == 1023
    assert blocks["num_used"] == blocks["num_shared"] == 0
    assert state["has_statistics"] is True
    about = state["about"]
    assert (about["model"], about["architecture"], about["max_model_len"]) == (
        "tiny",
        "llama",
        2048,
    )
    assert about["num_threads"] == 1
    assert about["isa"]


def test_events_show_a_request_and_hold_no_text(server: Server) -> None:
    secret = "a very secret sentence"
    body = {"prompt": secret, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with server.http.stream("GET", "/engine/events?interval=0.1") as events:
        lines = (line for line in events.iter_lines() if line.startswith("data: "))
        next(lines)
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            tokens = answer.iter_lines()
            next(tokens)
            texts = [next(lines)]
            while not json.loads(texts[-1][6:])["steps"]:
                texts.append(next(lines))
            for _ in tokens:
                pass
        while json.loads(texts[-1][6:])["core"]["num_running"]:
            texts.append(next(lines))
        texts.append(next(lines))
    seen = [json.loads(text[6:]) for text in texts]
    assert secret not in "".join(texts)
    steps = [step for event in seen for step in event["steps"]]
    numbers = [step[0] for step in steps]
    assert numbers == sorted(set(numbers))  # each once, in order
    assert sum(step[7] for step in steps) <= 1500
    assert all(step[2] >= step[3] >= 0 for step in steps)
    assert all(step[4] >= 0 and step[5] >= 0 for step in steps)
    totals = seen[-1]["totals"]
    assert totals["num_generation_tokens"] >= 1500
    assert seen[-1]["core"]["blocks"]["num_used"] == 0


def test_running_request_is_listed(serve: Serve) -> None:
    body = {"prompt": "x" * 40, "max_tokens": ENDLESS_TOKENS, "ignore_eos": True, "stream": True}
    with serve(*SLOW) as server, server.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()  # kept: a generator that is dropped closes the request
        next(lines)
        event = first_event(server.http, "/engine/events")
        (request,) = event["core"]["requests"]
        assert request["state"] == "decode"
        assert request["max_tokens"] == ENDLESS_TOKENS
        assert request["num_output_tokens"] > 0
        assert request["num_blocks"] >= 2
        used = event["core"]["blocks"]["num_used"]
        assert used + event["core"]["blocks"]["num_shared"] >= 2


@pytest.mark.parametrize("interval", ["0", "0.01", "nan", "x", "1e9"])
def test_intervals_out_of_range_are_refused(server: Server, interval: str) -> None:
    answer = server.http.get("/engine/events", params={"interval": interval})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "interval"


def test_watchers_do_not_hold_up_the_end_of_the_server(serve: Serve) -> None:
    """SIGTERM ends a server within its drain although somebody watches it."""
    with serve("--drain-timeout", "300") as server:
        with server.http.stream("GET", "/engine/events") as events:
            lines = events.iter_lines()
            next(lines)
            server.process.terminate()
            for _ in lines:
                pass
        assert server.process.wait(60) == 0


# ---------------------------------------------------------------------- keys and switches


@pytest.fixture(scope="module")
def locked(serve: Serve) -> Iterator[Server]:
    with serve("--api-key", "secret") as running:
        yield running


def test_files_need_no_key_but_the_state_does(locked: Server) -> None:
    for path in page_paths():
        assert locked.http.get(path).status_code == 200
    for path in ("/engine/state", "/engine/events"):
        refused = locked.http.get(path)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
    key = {"Authorization": "Bearer secret"}
    assert locked.http.get("/engine/state", headers=key).status_code == 200
    assert first_event(locked.http, "/engine/events", **key)["core"]["num_running"] == 0


def test_no_page(serve: Serve) -> None:
    with serve("--no-page") as server:
        for path in ("/", "/page/app.js", "/engine/state", "/engine/events"):
            assert server.http.get(path).status_code == 404
        assert server.http.get("/health").status_code == 200
        assert any("page     off" in line for line in server.log)


def test_without_statistics_the_state_is_there(serve: Serve) -> None:
    with serve("--set", "disable_log_stats=true") as server:
        server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
        state = server.http.get("/engine/state").json()
    assert state["has_statistics"] is False
    assert state["steps"] == []
    assert state["core"]["step"] > 0


# ---------------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("states", "runs"),
    [(b"", ""), (b"\0", "1f"), (b"\0\0\2\2\2\3\1", "2f3u1s1c"), (b"\n" * 0 + b"\1" * 100, "100c")],
)
def test_runs(states: bytes, runs: str) -> None:
    assert encode_runs(states) == runs


def step_stats(number: int) -> SchedulerStats:
    return SchedulerStats(
        step_counter=number,
        num_scheduled_tokens=10,
        num_prefill_tokens=8,
        num_running_reqs=2,
        prefix_cache_stats=CacheStats(requests=1, queries=20, hits=5),
    )


class FakeEngine:
    """Answers after a while, or not at all, and counts how often it was asked."""

    logger_manager = None
    engine_core = SimpleNamespace(ready=EngineCoreReady("1", 64, 5, 16, "float32"))
    model_config = SimpleNamespace(architecture="fake", max_model_len=64)
    config = SimpleNamespace(multimodal_config=None)

    def __init__(self, delay_s: float = 0.0, error: Exception | None = None) -> None:
        self.delay_s = delay_s
        self.error = error
        self.num_asked = 0

    async def get_snapshot(self) -> EngineCoreSnapshot:
        self.num_asked += 1
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        return EngineCoreSnapshot(1.0, 7, 0, 0, 0, 0, False, 16, b"\0\2\2\1")


def make_view(engine: FakeEngine) -> EngineView:
    context = SimpleNamespace(engine=engine, is_draining=False, model_name="fake")
    return EngineView(context)  # type: ignore[arg-type]


def test_however_many_watch_the_core_is_asked_once() -> None:
    async def watch() -> list[EngineEvent]:
        view = make_view(engine)
        return [event for _, event in await asyncio.gather(*(view.look(0, 60) for _ in range(50)))]

    engine = FakeEngine()
    events = asyncio.run(watch())
    assert engine.num_asked == 1
    assert all(event.core is not None and event.core.step == 7 for event in events)


def test_a_core_in_a_long_step_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "PATIENCE_S", 0.01)
    _, event = asyncio.run(make_view(FakeEngine(delay_s=3600)).look())
    assert event.core is None
    assert event.has_statistics is False


def test_a_dead_engine_ends_the_stream_with_its_reason() -> None:
    async def read() -> list[bytes]:
        view = make_view(FakeEngine(error=EngineDeadError("out of luck")))
        return [data async for data in view.events(0.1)]

    (data,) = asyncio.run(read())
    assert b"out of luck" in data
    assert b'"error"' in data


def test_steps_are_noted_only_while_somebody_watches() -> None:
    monitor = StepMonitor()
    iteration = IterationStats(0.0, num_generation_tokens=2, time_to_first_tokens_iter=[0.5])
    monitor.record(step_stats(1), iteration)
    assert monitor.since(0) == (0, [], [])
    monitor.watch()
    monitor.record(step_stats(2), iteration)
    monitor.record(step_stats(3), None)
    position, steps, first = monitor.since(0)
    assert [step.number for step in steps] == [2, 3]
    assert (steps[0].num_prefill_tokens, steps[0].num_decode_tokens) == (8, 2)
    assert first == [0.5]
    monitor.record(step_stats(4), None)
    assert [step.number for step in monitor.since(position)[1]] == [4]
    assert monitor.since(monitor.since(0)[0])[1:] == ([], [])
    assert monitor.totals.prefix_cache_queries == 80
    assert monitor.totals.prefix_cache_hits == 20
    assert monitor.totals.num_generation_tokens == 4
