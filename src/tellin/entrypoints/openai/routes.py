"""Paths of the API. No logic: read, call a service, answer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from tellin.entrypoints.openai import requests as bodies
from tellin.entrypoints.openai.chat import ChatService
from tellin.entrypoints.openai.classification import ClassificationService
from tellin.entrypoints.openai.completions import CompletionService
from tellin.entrypoints.openai.embeddings import EmbeddingService
from tellin.entrypoints.openai.http import EventStream, body_reader, json_reply, until_disconnect
from tellin.entrypoints.openai.messages import MessagesService
from tellin.entrypoints.openai.messages_request import CountTokensRequest, MessagesRequest
from tellin.entrypoints.openai.responses import ResponsesService
from tellin.entrypoints.openai.responses_request import ResponsesRequest
from tellin.entrypoints.openai.scores import ScoreService
from tellin.entrypoints.openai.serving import ServingContext
from tellin.entrypoints.openai.status import StatusService
from tellin.entrypoints.openai.tokenization import TokenizationService


def documented(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI part that describes a body, which `body_reader` reads."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


DOCUMENTED_BODIES: tuple[type[BaseModel], ...] = (
    bodies.ChatCompletionRequest,
    bodies.CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    bodies.EmbeddingRequest,
    bodies.ClassificationRequest,
    bodies.ScoreRequest,
    bodies.RerankRequest,
    bodies.TokenizeRequest,
    bodies.DetokenizeRequest,
    bodies.LoadAdapterRequest,
    bodies.UnloadAdapterRequest,
)


def api_routes(context: ServingContext) -> APIRouter:
    """Routes that run the model."""
    router = APIRouter()
    chat = ChatService(context)
    completions = CompletionService(context)
    responses = ResponsesService(context)
    messages = MessagesService(context)
    embeddings = EmbeddingService(context)
    classification = ClassificationService(context)
    scores = ScoreService(context)
    tokenization = TokenizationService(context)
    timeout_s = context.config.body_timeout_s

    read_chat = body_reader(bodies.ChatCompletionRequest, timeout_s)
    read_completion = body_reader(bodies.CompletionRequest, timeout_s)
    read_response = body_reader(ResponsesRequest, timeout_s)
    read_message = body_reader(MessagesRequest, timeout_s)
    read_count = body_reader(CountTokensRequest, timeout_s)
    read_embedding = body_reader(bodies.EmbeddingRequest, timeout_s)
    read_classification = body_reader(bodies.ClassificationRequest, timeout_s)
    read_score = body_reader(bodies.ScoreRequest, timeout_s)
    read_rerank = body_reader(bodies.RerankRequest, timeout_s)
    read_tokenize = body_reader(bodies.TokenizeRequest, timeout_s)
    read_detokenize = body_reader(bodies.DetokenizeRequest, timeout_s)

    async def answer(request: Request, prepared: Any, stream: bool | None) -> Response:
        if stream:
            return EventStream(prepared.events(), prepared.shortcut)
        return _reply(await until_disconnect(request, prepared.complete()))

    @router.post("/v1/chat/completions", openapi_extra=documented(bodies.ChatCompletionRequest))
    async def create_chat_completion(request: Request) -> Response:
        body = await read_chat(request)
        return await answer(request, await chat.prepare(body), body.stream)

    @router.post("/v1/completions", openapi_extra=documented(bodies.CompletionRequest))
    async def create_completion(request: Request) -> Response:
        body = await read_completion(request)
        return await answer(request, await completions.prepare(body), body.stream)

    @router.post("/v1/responses", openapi_extra=documented(ResponsesRequest))
    async def create_response(request: Request) -> Response:
        body = await read_response(request)
        return await answer(request, await responses.prepare(body), body.stream)

    @router.post("/v1/messages", openapi_extra=documented(MessagesRequest))
    async def create_message(request: Request) -> Response:
        body = await read_message(request)
        return await answer(request, await messages.prepare(body), body.stream)

    @router.post("/v1/messages/count_tokens", openapi_extra=documented(CountTokensRequest))
    async def count_tokens(request: Request) -> Response:
        body = await read_count(request)
        return json_reply(await messages.count_tokens(body))

    @router.post("/v1/embeddings", openapi_extra=documented(bodies.EmbeddingRequest))
    async def create_embeddings(request: Request) -> Response:
        body = await read_embedding(request)
        return _reply(await until_disconnect(request, embeddings.embed(body)))

    @router.post("/classify", openapi_extra=documented(bodies.ClassificationRequest))
    @router.post("/v1/classify", openapi_extra=documented(bodies.ClassificationRequest))
    async def create_classification(request: Request) -> Response:
        body = await read_classification(request)
        return _reply(await until_disconnect(request, classification.classify(body)))

    @router.post("/score", openapi_extra=documented(bodies.ScoreRequest))
    @router.post("/v1/score", openapi_extra=documented(bodies.ScoreRequest))
    async def create_scores(request: Request) -> Response:
        body = await read_score(request)
        return _reply(await until_disconnect(request, scores.score(body)))

    @router.post("/rerank", openapi_extra=documented(bodies.RerankRequest))
    @router.post("/v1/rerank", openapi_extra=documented(bodies.RerankRequest))
    @router.post("/v2/rerank", openapi_extra=documented(bodies.RerankRequest))
    async def create_ranking(request: Request) -> Response:
        body = await read_rerank(request)
        return _reply(await until_disconnect(request, scores.rerank(body)))

    @router.post("/tokenize", openapi_extra=documented(bodies.TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body = await read_tokenize(request)
        return json_reply(await tokenization.tokenize(body))

    @router.post("/detokenize", openapi_extra=documented(bodies.DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = await read_detokenize(request)
        return json_reply(await tokenization.detokenize(body))

    return router


def status_routes(context: ServingContext) -> APIRouter:
    """Routes that tell how things are."""
    router = APIRouter()
    status = StatusService(context)

    @router.get("/v1/models")
    async def list_models() -> Response:
        return json_reply(status.models())

    @router.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        return json_reply(status.model(name))

    @router.get("/health")
    async def health() -> Response:
        await status.check_health()
        return json_reply({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        await status.check_ready()
        return json_reply({"status": "ready"})

    @router.get("/version")
    async def version() -> Response:
        return json_reply({"version": status.version()})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(status.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def admin_routes(context: ServingContext) -> APIRouter:
    """Routes that change the engine; each one needs the admin key."""
    router = APIRouter()
    status = StatusService(context)
    engine = context.engine

    @router.post("/sleep")
    async def sleep(level: int = 1, mode: str = "abort") -> Response:
        await status.sleep(level, mode)
        return json_reply({"is_sleeping": True})

    @router.post("/wake_up")
    async def wake_up() -> Response:
        await status.change(engine.wake_up())
        return json_reply({"is_sleeping": await engine.is_sleeping()})

    @router.get("/is_sleeping")
    async def is_sleeping() -> Response:
        return json_reply({"is_sleeping": await engine.is_sleeping()})

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: bool = False) -> Response:
        return json_reply({"reset": await engine.reset_prefix_cache(reset_running_requests)})

    @router.post("/start_profile")
    async def start_profile() -> Response:
        await status.change(engine.start_profile())
        return json_reply({"is_profiling": True})

    @router.post("/stop_profile")
    async def stop_profile() -> Response:
        await status.change(engine.stop_profile())
        return json_reply({"is_profiling": False})

    timeout_s = context.config.body_timeout_s
    read_load = body_reader(bodies.LoadAdapterRequest, timeout_s)
    read_unload = body_reader(bodies.UnloadAdapterRequest, timeout_s)

    @router.post("/v1/load_lora_adapter", openapi_extra=documented(bodies.LoadAdapterRequest))
    async def load_lora_adapter(request: Request) -> Response:
        body = await read_load(request)
        call = context.adapters.load(body.lora_name, body.lora_path, body.load_inplace)
        adapter = await status.change(call)
        return json_reply({"lora_name": adapter.lora_name, "lora_int_id": adapter.lora_int_id})

    @router.post("/v1/unload_lora_adapter", openapi_extra=documented(bodies.UnloadAdapterRequest))
    async def unload_lora_adapter(request: Request) -> Response:
        body = await read_unload(request)
        await status.change(context.adapters.unload(body.lora_name, body.lora_int_id))
        return json_reply({"lora_name": body.lora_name, "unloaded": True})

    return router


def _reply(result: Any) -> Response:
    return result if isinstance(result, Response) else json_reply(result)
