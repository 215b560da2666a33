"""``/score`` and ``/rerank``: how similar texts are, for cross-encoders and models that embed.

What `LLM.score` computes, in the shapes of vLLM's server, which for ``/rerank`` are those of Jina
and Cohere. The clients of both read them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from tellin.engine.prompts import TokenizeParams
from tellin.entrypoints.openai.errors import bad_request
from tellin.entrypoints.openai.pooling_jobs import MAX_INPUTS, run_pooling
from tellin.entrypoints.openai.replies import (
    RankedDocument,
    Ranking,
    RankUsage,
    RerankedDocument,
    Score,
    ScoreList,
    Usage,
)
from tellin.entrypoints.openai.requests import RerankRequest, ScoreRequest
from tellin.entrypoints.openai.serving import ServingContext, names_of, new_id
from tellin.entrypoints.scoring import PAIR_TASK, SCORING_TASK, cosine, why_no_scores
from tellin.sampling_params import PoolingParams


class ScoreService:
    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def score(self, request: ScoreRequest) -> ScoreList:
        """Scores of pairs: 1:1, 1:N (the first is repeated) or N:N.

        Raises:
            ApiError, TellinError: the model cannot score, or a text is not acceptable.
        """
        first, second = _as_list(request.text_1), _as_list(request.text_2)
        if len(first) not in (1, len(second)):
            raise bad_request(
                f"text_1 and text_2 must pair 1 with N or N with N texts, got {len(first)} and "
                f"{len(second)}",
                "text_1",
            )
        scores, num_tokens = await self._scores(
            request,
            first,
            second,
            names_of("text_1", request.text_1, len(first)),
            names_of("text_2", request.text_2, len(second)),
        )
        data = [Score(index, score) for index, score in enumerate(scores)]
        return ScoreList(
            new_id("score"),
            int(time.time()),
            self.context.shown_name(request.model),
            data,
            Usage(num_tokens, 0, num_tokens),
        )

    async def rerank(self, request: RerankRequest) -> Ranking:
        """Documents by their score, best first; equal ones in their order.

        Raises:
            ApiError, TellinError: as `score`.
        """
        texts = [d if isinstance(d, str) else d.text for d in request.documents]
        scores, num_tokens = await self._scores(
            request, [request.query], texts, ["query"], names_of("documents", texts, len(texts))
        )
        order = sorted(range(len(texts)), key=lambda index: -scores[index])
        results = []
        for index in order[: request.top_n or None]:
            result = RerankedDocument(index, scores[index])
            if request.return_documents:
                result.document = RankedDocument(texts[index])
            results.append(result)
        usage = RankUsage(num_tokens, num_tokens)
        model_name = self.context.shown_name(request.model)
        return Ranking(new_id("rerank"), model_name, usage, results)

    async def _scores(
        self,
        request: ScoreRequest | RerankRequest,
        queries: list[str],
        documents: list[str],
        query_names: Sequence[str],
        document_names: Sequence[str],
    ) -> tuple[list[float], int]:
        """Scores of all documents, and the number of tokens that were read."""
        context = self.context
        context.check_model(request.model)
        context.check_accepts()
        tasks = await context.engine.get_supported_tasks()
        if PAIR_TASK not in tasks and SCORING_TASK not in tasks:
            why = why_no_scores(tasks, "a server started with --set runner=both does both")
            raise bad_request(
                f"the model {context.model_name!r} cannot score: {why}",
                "model",
                "unsupported_model",
            )
        if len(documents) > MAX_INPUTS:
            name = document_names[0].partition("[")[0]
            raise bad_request(f"{name} has {len(documents)} items; at most {MAX_INPUTS}", name)
        tok_params = TokenizeParams(request.add_special_tokens, pools=True).with_options(
            {"truncate_prompt_tokens": request.truncate_prompt_tokens}
        )
        lora_request = context.adapters.get(request.model)
        if PAIR_TASK in tasks:
            # In a thread, as the arithmetic below: a query is tokenised with each document.
            pairs = list(zip(queries * (len(documents) // len(queries)), documents, strict=True))
            rendered = await asyncio.to_thread(
                context.engine.renderer.render_pairs, pairs, tok_params
            )
            params = PoolingParams(task=PAIR_TASK)
            outputs = await run_pooling(context, rendered, document_names, params, lora_request)
            num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
            return [float(output.outputs.data[0]) for output in outputs], num_tokens
        rendered = await context.engine.renderer.render_cmpl_async(
            [*queries, *documents], tok_params
        )
        names = [*query_names, *document_names]
        params = PoolingParams(task=SCORING_TASK)
        outputs = await run_pooling(context, rendered, names, params, lora_request)
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        data = [output.outputs.data for output in outputs]
        first, second = data[: len(queries)], data[len(queries) :]
        if len(first) == 1:
            first = first * len(second)
        # In a thread: a thousand long vectors must not hold up the streams of others.
        scores = await asyncio.to_thread(
            lambda: [cosine(one, other) for one, other in zip(first, second, strict=True)]
        )
        return scores, num_tokens


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
