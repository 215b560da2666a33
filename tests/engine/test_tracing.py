"""One span per sequence, child of the caller's; OpenTelemetry is needed only when configured."""

from __future__ import annotations

import importlib
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tellin.config import ObservabilityConfig
from tellin.engine import tracing
from tellin.exceptions import OutOfMemoryError, UnsupportedFeatureError
from tellin.sampling_params import SamplingParams
from tests.engine.fakes import EngineMaker, FakeClient, make_config, run, text_ids


class FakeTracer:
    """Stands for an OpenTelemetry tracer; spans are the attributes they were given."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.num_shutdowns = 0

    def shutdown(self) -> None:
        self.num_shutdowns += 1

    def start_span(self, name: str, **options: Any) -> Any:
        span: dict[str, Any] = {"name": name, **options}
        self.spans.append(span)
        return SimpleNamespace(
            set_attributes=span.update, end=lambda end_time: span.update(end_time=end_time)
        )


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> FakeTracer:
    modules = {
        "opentelemetry.trace": SimpleNamespace(SpanKind=SimpleNamespace(SERVER="server")),
        "opentelemetry.trace.propagation.tracecontext": SimpleNamespace(
            TraceContextTextMapPropagator=lambda: SimpleNamespace(extract=dict)
        ),
    }
    original = importlib.import_module
    monkeypatch.setattr(
        tracing.importlib, "import_module", lambda name: modules.get(name) or original(name)
    )
    fake = FakeTracer()
    provider = SimpleNamespace(get_tracer=lambda name: fake, shutdown=fake.shutdown)
    monkeypatch.setattr(tracing, "_open_provider", lambda endpoint: provider)
    return fake


@pytest.mark.parametrize("log_stats", [False, True])
def test_out11_spans(make_engine: EngineMaker, tracer: FakeTracer, log_stats: bool) -> None:
    """Without statistics too (wart): then the latencies are missing, nothing else."""
    config = make_config(observability_config=ObservabilityConfig(otlp_traces_endpoint="http://x"))
    engine = make_engine([text_ids("a"), text_ids("b")], config=config, log_stats=log_stats)
    headers = {"traceparent": "00-1-2-01"}
    params = SamplingParams(temperature=0.5, max_tokens=2)
    engine.add_request("x", "abc", params, trace_headers=headers, arrival_time=12.5)
    engine.add_request("y", "abc", SamplingParams(n=2))
    engine.step()
    engine.abort_request("y")
    run(engine)
    by_id = {span["gen_ai.request.id"]: span for span in tracer.spans}
    assert len(tracer.spans) == 3
    span = by_id["x"]
    assert (span["name"], span["kind"], span["context"]) == ("llm_request", "server", headers)
    assert span["start_time"] == 12_500_000_000
    assert span["end_time"] > span["start_time"]
    assert span["gen_ai.usage.prompt_tokens"] == len(text_ids("abc"))
    assert span["gen_ai.usage.completion_tokens"] == 2
    assert (span["gen_ai.request.temperature"], span["gen_ai.request.max_tokens"]) == (0.5, 2)
    assert span["gen_ai.response.finish_reason"] == "length"
    assert by_id["y"]["gen_ai.response.finish_reason"] == "abort"
    assert by_id["y"]["gen_ai.request.n"] == 2
    latencies = {name for name in span if name.startswith("gen_ai.latency.")}
    assert len(latencies) == (6 if log_stats else 0)
    engine.shutdown()
    engine.shutdown()
    assert tracer.num_shutdowns == 1, "what is left was exported, once"


TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_spans_through_the_real_sdk(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenTelemetry's own exporter gets them: child of the caller's span, or a root."""
    sdk = importlib.import_module("opentelemetry.sdk.trace")
    export = importlib.import_module("opentelemetry.sdk.trace.export")
    memory = importlib.import_module("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(export.BatchSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_open_provider", lambda endpoint: provider)
    config = make_config(observability_config=ObservabilityConfig(otlp_traces_endpoint="http://x"))
    before = set(threading.enumerate())
    with make_engine([text_ids("a"), text_ids("b")], config=config, log_stats=True) as engine:
        headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
        engine.add_request("child", "abc", SamplingParams(), trace_headers=headers)
        engine.add_request("root", "abc", SamplingParams(), trace_headers={"traceparent": "junk"})
        outputs = run(engine)
    assert set(threading.enumerate()) <= before, "the exporter's thread has ended"
    assert {o.request_id: o.trace_headers for o in outputs}["child"] == headers
    spans = {span.attributes["gen_ai.request.id"]: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"child", "root"}
    child, root = spans["child"], spans["root"]
    assert f"{child.context.trace_id:032x}" == TRACE_ID
    assert f"{child.parent.span_id:016x}" == SPAN_ID
    assert root.parent is None
    for span in spans.values():
        assert span.name == "llm_request"
        assert span.kind.name == "SERVER"
        assert span.start_time < span.end_time
        assert span.attributes["gen_ai.usage.completion_tokens"] == 2
        assert span.attributes["gen_ai.response.finish_reason"] == "length"


def test_a_collector_that_hangs_does_not_hang_the_shutdown(
    tracer: FakeTracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT_S", 0.05)
    release = threading.Event()
    monkeypatch.setattr(tracer, "shutdown", lambda: release.wait(300))
    provider = SimpleNamespace(get_tracer=lambda name: tracer, shutdown=tracer.shutdown)
    started = time.monotonic()
    tracing.RequestTracer(provider).close()
    assert time.monotonic() - started < 120
    release.set()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(tracing.importlib, "import_module", missing)
    config = make_config(observability_config=ObservabilityConfig(otlp_traces_endpoint="http://x"))
    with pytest.raises(UnsupportedFeatureError, match="tellin\\[otel\\]"):
        tracing.make_tracer(config)
    assert tracing.make_tracer(make_config()) is None


def test_eng2_a_core_that_cannot_start_ends_the_exporter(
    make_engine: EngineMaker, tracer: FakeTracer
) -> None:
    """ENG-2: what was started before the core does not stay behind either."""

    class Client(FakeClient):
        def __init__(self, *args: Any) -> None:
            raise OutOfMemoryError("no room")

    config = make_config(observability_config=ObservabilityConfig(otlp_traces_endpoint="http://x"))
    with pytest.raises(OutOfMemoryError, match="no room"):
        make_engine(config=config, client_class=Client)
    assert tracer.num_shutdowns == 1
