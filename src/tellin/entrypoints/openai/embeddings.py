"""``/v1/embeddings``: vectors of texts, for models made for it.

All inputs of a call are in the engine together, so that they share steps; what one of them fails
with is the answer, and the others are aborted.
"""

from __future__ import annotations

import asyncio
import base64
import struct
import uuid

from tellin.engine.prompts import RenderedPrompt, TokenizeParams
from tellin.entrypoints.openai.completions import prompts_of
from tellin.entrypoints.openai.errors import bad_request
from tellin.entrypoints.openai.replies import Embedding, EmbeddingList, Usage
from tellin.entrypoints.openai.requests import EmbeddingRequest
from tellin.entrypoints.openai.serving import ServingContext
from tellin.outputs import EmbeddingOutput, PoolingRequestOutput
from tellin.protocol import LoRARequest
from tellin.sampling_params import PoolingParams

MAX_INPUTS = 2048
MAX_IN_FLIGHT = 64
"""Inputs of one call that are in the engine at a time: more would only fill its queue."""


class EmbeddingService:
    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def embed(self, request: EmbeddingRequest) -> EmbeddingList:
        """One vector per input, in order.

        Raises:
            ApiError, TellinError: the model cannot embed, or an input is not acceptable.
        """
        context = self.context
        context.check_model(request.model)
        context.check_accepts()
        tasks = await context.engine.get_supported_tasks()
        if "embed" not in tasks:
            raise bad_request(
                f"the model {context.model_name!r} does not make embeddings; it supports: "
                f"{', '.join(tasks)} (a server started with --set runner=both does both)",
                "model",
                "unsupported_model",
            )
        inputs = prompts_of(request.input)
        if len(inputs) > MAX_INPUTS:
            raise bad_request(f"input has {len(inputs)} items; at most {MAX_INPUTS}", "input")
        params = PoolingParams(task="embed", dimensions=request.dimensions)
        tok_params = TokenizeParams(request.add_special_tokens, pools=True).with_options(
            {"truncate_prompt_tokens": request.truncate_prompt_tokens}
        )
        rendered = await context.engine.renderer.render_cmpl_async(inputs, tok_params)
        data, num_tokens = [], 0
        lora_request = context.adapters.get(request.model)
        model_name = context.shown_name(request.model)
        for index, output in enumerate(await self._run_all(rendered, params, lora_request)):
            vector = EmbeddingOutput.from_base(output.outputs).embedding
            num_tokens += len(output.prompt_token_ids)
            data.append(Embedding(index, _encode(vector, request.encoding_format)))
        return EmbeddingList(model_name, data, Usage(num_tokens, 0, num_tokens))

    async def _run_all(
        self,
        prompts: list[RenderedPrompt],
        params: PoolingParams,
        lora_request: LoRARequest | None,
    ) -> list[PoolingRequestOutput]:
        seats = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def seated(prompt: RenderedPrompt) -> PoolingRequestOutput:
            async with seats:
                return await self._run(prompt, params, lora_request)

        tasks = [asyncio.ensure_future(seated(prompt)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self, prompt: RenderedPrompt, params: PoolingParams, lora_request: LoRARequest | None
    ) -> PoolingRequestOutput:
        context = self.context
        last = None
        timeout_s = context.config.request_timeout_s
        async for output in context.engine.encode(
            prompt, params, uuid.uuid4().hex, timeout_s=timeout_s, lora_request=lora_request
        ):
            last = output
        if last is None:
            raise RuntimeError("the engine returned no embedding")
        if last.error is not None:
            raise last.error
        return last


def _encode(vector: list[float], encoding_format: str) -> list[float] | str:
    """As it is, or as base64 of little-endian float32."""
    if encoding_format == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
