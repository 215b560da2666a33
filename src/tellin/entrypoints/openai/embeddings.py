"""``/v1/embeddings``: vectors of texts, for models made for it."""

from __future__ import annotations

import base64
import struct

from tellin.engine.prompts import TokenizeParams
from tellin.entrypoints.openai.completions import prompts_of
from tellin.entrypoints.openai.errors import bad_request
from tellin.entrypoints.openai.pooling_jobs import MAX_INPUTS, run_pooling
from tellin.entrypoints.openai.replies import Embedding, EmbeddingList, Usage
from tellin.entrypoints.openai.requests import EmbeddingRequest
from tellin.entrypoints.openai.serving import ServingContext, names_of
from tellin.outputs import EmbeddingOutput
from tellin.sampling_params import PoolingParams


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
            hint = " (a server started with --set runner=both does both)"
            raise bad_request(
                f"the model {context.model_name!r} does not make embeddings; it supports: "
                f"{', '.join(tasks)}{hint if 'generate' in tasks else ''}",
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
        is_single = len(inputs) == 1 and inputs[0] is request.input
        names = ["input"] if is_single else names_of("input", inputs, len(inputs))
        outputs = await run_pooling(context, rendered, names, params, lora_request)
        for index, output in enumerate(outputs):
            vector = EmbeddingOutput.from_base(output.outputs).embedding
            num_tokens += len(output.prompt_token_ids)
            data.append(Embedding(index, _encode(vector, request.encoding_format)))
        return EmbeddingList(model_name, data, Usage(num_tokens, 0, num_tokens))


def _encode(vector: list[float], encoding_format: str) -> list[float] | str:
    """As it is, or as base64 of little-endian float32."""
    if encoding_format == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
