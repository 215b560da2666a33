"""``/classify``: what a classifier makes of texts, in the shape of vLLM's server."""

from __future__ import annotations

import time

from tellin.engine.prompts import TokenizeParams
from tellin.entrypoints.openai.completions import prompts_of
from tellin.entrypoints.openai.errors import bad_request
from tellin.entrypoints.openai.pooling_jobs import MAX_INPUTS, run_pooling
from tellin.entrypoints.openai.replies import Classification, ClassificationList, Usage
from tellin.entrypoints.openai.requests import ClassificationRequest
from tellin.entrypoints.openai.serving import ServingContext, names_of, new_id
from tellin.outputs import ClassificationOutput
from tellin.sampling_params import PoolingParams


class ClassificationService:
    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def classify(self, request: ClassificationRequest) -> ClassificationList:
        """Probabilities of the model's labels for each input, and the likeliest label.

        Raises:
            ApiError, TellinError: the model is no classifier, or an input is not acceptable.
        """
        context = self.context
        context.check_model(request.model)
        context.check_accepts()
        tasks = await context.engine.get_supported_tasks()
        if "classify" not in tasks:
            raise bad_request(
                f"the model {context.model_name!r} is no classifier; it supports: "
                f"{', '.join(tasks)}",
                "model",
                "unsupported_model",
            )
        inputs = prompts_of(request.input)
        if len(inputs) > MAX_INPUTS:
            raise bad_request(f"input has {len(inputs)} items; at most {MAX_INPUTS}", "input")
        params = PoolingParams(task="classify", use_activation=request.use_activation)
        tok_params = TokenizeParams(request.add_special_tokens, pools=True).with_options(
            {"truncate_prompt_tokens": request.truncate_prompt_tokens}
        )
        rendered = await context.engine.renderer.render_cmpl_async(inputs, tok_params)
        lora_request = context.adapters.get(request.model)
        is_single = len(inputs) == 1 and inputs[0] is request.input
        names = ["input"] if is_single else names_of("input", inputs, len(inputs))
        outputs = await run_pooling(context, rendered, names, params, lora_request)
        data = []
        for index, output in enumerate(outputs):
            probs = ClassificationOutput.from_base(output.outputs).probs
            likeliest = max(range(len(probs)), key=probs.__getitem__)
            data.append(Classification(index, self._label(likeliest), probs, len(probs)))
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        return ClassificationList(
            new_id("classify"),
            int(time.time()),
            context.shown_name(request.model),
            data,
            Usage(num_tokens, 0, num_tokens),
        )

    def _label(self, index: int) -> str:
        pooler = self.context.engine.model_config.pooler_config
        labels = () if pooler is None else pooler.labels
        return labels[index] if labels else f"LABEL_{index}"
