"""One span per sequence, child of the caller's; OpenTelemetry is needed only when configured."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from tellin.config import ObservabilityConfig
from tellin.engine import tracing
from tellin.exceptions import UnsupportedFeatureError
from tellin.sampling_params import SamplingParams
from tests.engine.fakes import EngineMaker, make_config, run, text_ids


class FakeTracer:
    """Stands for an OpenTelemetry tracer; spans are the attributes they were given."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []

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
    monkeypatch.setattr(tracing, "_open_tracer", lambda endpoint: fake)
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


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(tracing.importlib, "import_module", missing)
    config = make_config(observability_config=ObservabilityConfig(otlp_traces_endpoint="http://x"))
    with pytest.raises(UnsupportedFeatureError, match="tellin\\[otel\\]"):
        tracing.make_tracer(config)
    assert tracing.make_tracer(make_config()) is None
