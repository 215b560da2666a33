"""Runs the texts of one call through a pooling model.

All are in the engine together, so that they share steps; what one of them fails with is the answer,
and the others are aborted.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from tellin.engine.prompts import RenderedPrompt
from tellin.entrypoints.openai.errors import about
from tellin.entrypoints.openai.serving import ServingContext
from tellin.exceptions import RequestError
from tellin.outputs import PoolingRequestOutput
from tellin.protocol import LoRARequest
from tellin.sampling_params import PoolingParams

MAX_INPUTS = 2048
"""Texts of one call."""
MAX_IN_FLIGHT = 64
"""Texts of one call that are in the engine at a time: more would only fill its queue."""


async def run_pooling(
    context: ServingContext,
    prompts: Sequence[RenderedPrompt],
    names: Sequence[str],
    params: PoolingParams,
    lora_request: LoRARequest | None,
) -> list[PoolingRequestOutput]:
    """One result per prompt, in order.

    Args:
        names: what the request calls each prompt, for errors: ``documents[17]``.

    Raises:
        ApiError, TellinError: one of them failed.
    """
    seats = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def seated(prompt: RenderedPrompt, name: str) -> PoolingRequestOutput:
        async with seats:
            try:
                return await _run(context, prompt, params, lora_request)
            except RequestError as error:
                raise about(error, name) from error

    tasks = [
        asyncio.ensure_future(seated(prompt, name))
        for prompt, name in zip(prompts, names, strict=True)
    ]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(
    context: ServingContext,
    prompt: RenderedPrompt,
    params: PoolingParams,
    lora_request: LoRARequest | None,
) -> PoolingRequestOutput:
    last = None
    async for output in context.engine.encode(
        prompt,
        params,
        uuid.uuid4().hex,
        timeout_s=context.config.request_timeout_s,
        lora_request=lora_request,
    ):
        last = output
    if last is None:
        raise RuntimeError("the engine returned no result")
    if last.error is not None:
        raise last.error
    return last
