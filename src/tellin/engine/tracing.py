"""OpenTelemetry spans, one per sequence, when an endpoint is configured.

Needs the ``otel`` extra. Trace headers of a request (W3C ``traceparent``) make its span a child of
the caller's. Works with and without statistics; without them the span has no latencies.
"""

from __future__ import annotations

import importlib
import threading
import time
from typing import Any

from tellin.config import EngineConfig
from tellin.engine.output_processor import FinishedListener
from tellin.engine.request_state import RequestState
from tellin.exceptions import UnsupportedFeatureError
from tellin.metrics import FinishedRequestStats
from tellin.protocol import FinishReason

INSTRUMENTING_NAME = "tellin.llm_engine"
SPAN_NAME = "llm_request"
CLOSE_TIMEOUT_S = 3.0


def make_tracer(config: EngineConfig) -> FinishedListener | None:
    """The tracer that the configuration asks for, if it does.

    Raises:
        UnsupportedFeatureError: OpenTelemetry is not installed.
    """
    endpoint = config.observability_config.otlp_traces_endpoint
    return None if endpoint is None else RequestTracer(_open_provider(endpoint))


def _open_provider(endpoint: str) -> Any:
    try:
        exporter = importlib.import_module(
            "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
            if not endpoint.rstrip("/").endswith("/v1/traces")
            else "opentelemetry.exporter.otlp.proto.http.trace_exporter"
        )
        resources = importlib.import_module("opentelemetry.sdk.resources")
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
    except ModuleNotFoundError as exc:
        raise UnsupportedFeatureError(
            f"otlp_traces_endpoint needs OpenTelemetry ({exc.name} is missing): "
            "pip install 'tellin[otel]'"
        ) from None
    provider = sdk.TracerProvider(resource=resources.Resource({"service.name": "tellin"}))
    provider.add_span_processor(
        export.BatchSpanProcessor(exporter.OTLPSpanExporter(endpoint=endpoint))
    )
    return provider


class RequestTracer:
    """Makes a span when a sequence has ended."""

    def __init__(self, provider: Any) -> None:
        """``provider``: an OpenTelemetry tracer provider; the tracer closes it."""
        self._provider = provider
        self._tracer = provider.get_tracer(INSTRUMENTING_NAME)

    def close(self) -> None:
        """Send what is left and end the exporter's thread; gives up on a collector that is slow."""
        thread = threading.Thread(target=self._provider.shutdown, name="tellin-otel", daemon=True)
        thread.start()
        thread.join(CLOSE_TIMEOUT_S)

    def __call__(
        self,
        state: RequestState,
        finished: FinishedRequestStats | None,
        finish_reason: FinishReason,
    ) -> None:
        trace = importlib.import_module("opentelemetry.trace")
        context = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        parent = context.TraceContextTextMapPropagator().extract(state.trace_headers or {})
        span = self._tracer.start_span(
            SPAN_NAME,
            context=parent,
            kind=trace.SpanKind.SERVER,
            start_time=int(state.arrival_time * 1e9),
        )
        span.set_attributes(span_attributes(state, finished, finish_reason))
        span.end(end_time=time.time_ns())


def span_attributes(
    state: RequestState, finished: FinishedRequestStats | None, finish_reason: FinishReason
) -> dict[str, str | int | float]:
    """Attributes in the names of the OpenTelemetry conventions for generative AI."""
    attributes: dict[str, str | int | float] = {
        "gen_ai.request.id": state.external_req_id,
        "gen_ai.response.finish_reason": str(finish_reason),
        "gen_ai.usage.prompt_tokens": state.num_prompt_tokens,
    }
    if state.detokenizer is not None:
        attributes["gen_ai.usage.completion_tokens"] = state.detokenizer.num_output_tokens
    params = state.sampling_params
    if params is not None:
        for name in ("top_p", "max_tokens", "temperature"):
            value = getattr(params, name)
            if value:
                attributes[f"gen_ai.request.{name}"] = value
        attributes["gen_ai.request.n"] = 1 if state.parent is None else state.parent.n
    if finished is not None and state.stats is not None:
        attributes["gen_ai.latency.time_to_first_token"] = state.stats.first_token_latency
        attributes["gen_ai.latency.e2e"] = finished.e2e_latency
        attributes["gen_ai.latency.time_in_queue"] = finished.queued_time
        attributes["gen_ai.latency.time_in_model_prefill"] = finished.prefill_time
        attributes["gen_ai.latency.time_in_model_decode"] = finished.decode_time
        attributes["gen_ai.latency.time_in_model_inference"] = finished.inference_time
    return attributes
