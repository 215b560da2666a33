"""Embedding, classification and scoring with an `LLM` whose model is made for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tellin.engine.pairs import pair_of
from tellin.engine.prompts import POOLING_TOKENIZE_PARAMS, RenderedPrompt, prompts_to_list
from tellin.entrypoints.engine_controls import EngineControls
from tellin.entrypoints.offline_runner import (
    LoRAPerPrompt,
    OnError,
    Params,
    RunOptions,
    one_per_prompt,
)
from tellin.entrypoints.progress import UseTqdm
from tellin.entrypoints.scoring import PAIR_TASK, SCORING_TASK, cosine, why_no_scores
from tellin.exceptions import InvalidParameterError, UnsupportedFeatureError
from tellin.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from tellin.sampling_params import PoolingParams

NO_POOLING = "none: it was started to generate text, not with runner='pooling' or 'both'"
TASK_METHODS = {"embed": "embed()", "classify": "classify()", "score": "score()"}


class PoolingCalls(EngineControls):
    """Base of `LLM`: calls for pooling models."""

    def encode(
        self,
        prompts: Any,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = False,
        lora_request: LoRAPerPrompt = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
    ) -> list[PoolingRequestOutput]:
        """Pool hidden states; the raw result per prompt.

        Args:
            pooling_task: embed, classify, token_embed or token_classify.
            on_error: as in `LLM.generate`.

        Raises:
            UnsupportedFeatureError: the model cannot do the task.
        """
        if pooling_task is None:
            raise InvalidParameterError(
                "encode() needs pooling_task (embed, classify, token_embed or token_classify); "
                f"or use {', '.join(TASK_METHODS.values())}",
                parameter="pooling_task",
            )
        self._check_pools(pooling_task)
        renderer = self.llm_engine.renderer
        tok_params = POOLING_TOKENIZE_PARAMS.with_options(tokenization_kwargs)
        return self._pool(
            prompts_to_list(prompts),
            lambda prompt: renderer.render_cmpl([prompt], tok_params)[0],
            pooling_params,
            pooling_task,
            RunOptions(lora_request, None, use_tqdm, on_error),
        )

    def _pool(
        self,
        items: Sequence[Any],
        render: Callable[[Any], RenderedPrompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        task: str,
        options: RunOptions,
    ) -> list[PoolingRequestOutput]:
        given = PoolingParams() if pooling_params is None else pooling_params
        params: list[Params] = [
            _with_task(item, task) for item in one_per_prompt("pooling_params", given, len(items))
        ]
        return self._runner.run(items, render, params, options)

    def embed(self, prompts: Any, **options: Any) -> list[EmbeddingRequestOutput]:
        """One vector per prompt, of L2 norm 1 unless switched off. Options: as `encode`."""
        outputs = self.encode(prompts, pooling_task="embed", **options)
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    def classify(self, prompts: Any, **options: Any) -> list[ClassificationRequestOutput]:
        """Probabilities of the model's classes per prompt. Options: as `encode`.

        What makes them of logits is the model's: see ``pooler_config.score_activation``.
        """
        outputs = self.encode(prompts, pooling_task="classify", **options)
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    def score(self, data_1: Any, data_2: Any, **options: Any) -> list[ScoringRequestOutput]:
        """Similarity of pairs of texts: 1:1, 1:N (the first is repeated) or N:N.

        A cross-encoder reads both texts at once; of a model that embeds it is the cosine of two
        embeddings. Options: as `encode`.
        """
        first, second = prompts_to_list(data_1), prompts_to_list(data_2)
        if not first or not second or len(first) not in (1, len(second)):
            raise InvalidParameterError(
                f"score() pairs 1 with N or N with N texts, got {len(first)} and {len(second)}",
                parameter="data_1",
                value=len(first),
            )
        tasks = self.supported_tasks
        if PAIR_TASK in tasks:
            return self._score_pairs(first, second, **options)
        if SCORING_TASK not in tasks:
            hint = "start one with runner='pooling' or 'both'"
            raise UnsupportedFeatureError(f"this model cannot score: {why_no_scores(tasks, hint)}")
        outputs = self.encode([*first, *second], pooling_task=SCORING_TASK, **options)
        queries, documents = outputs[: len(first)], outputs[len(first) :]
        if len(queries) == 1:
            queries = queries * len(documents)
        return [
            ScoringRequestOutput(
                request_id=f"{query.request_id}_{document.request_id}",
                outputs=ScoringOutput(cosine(query.outputs.data, document.outputs.data)),
                prompt_token_ids=[*query.prompt_token_ids, *document.prompt_token_ids],
                finished=True,
                num_cached_tokens=(query.num_cached_tokens or 0)
                + (document.num_cached_tokens or 0),
                error=query.error or document.error,
            )
            for query, document in zip(queries, documents, strict=True)
        ]

    def _score_pairs(
        self,
        first: Sequence[Any],
        second: Sequence[Any],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = False,
        lora_request: LoRAPerPrompt = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
    ) -> list[ScoringRequestOutput]:
        renderer = self.llm_engine.renderer
        tok_params = POOLING_TOKENIZE_PARAMS.with_options(tokenization_kwargs)
        queries = list(first) * (len(second) if len(first) == 1 else 1)
        outputs = self._pool(
            list(zip(queries, second, strict=True)),
            lambda pair: renderer.render_pairs([pair_of(*pair)], tok_params)[0],
            pooling_params,
            PAIR_TASK,
            RunOptions(lora_request, None, use_tqdm, on_error),
        )
        return [ScoringRequestOutput.from_base(output) for output in outputs]

    def _check_pools(self, task: str) -> None:
        tasks = [name for name in self.supported_tasks if name != "generate"]
        if task not in tasks:
            raise UnsupportedFeatureError(
                f"this model cannot do the pooling task {task!r}; it supports "
                f"{', '.join(tasks) or NO_POOLING}"
            )


def _with_task(params: Any, task: str) -> PoolingParams:
    if not isinstance(params, PoolingParams):
        raise InvalidParameterError(
            f"pooling_params must be PoolingParams, got {type(params).__name__}",
            parameter="pooling_params",
            value=params,
        )
    if params.task not in (None, task):
        raise InvalidParameterError(
            f"pooling_params ask for task {params.task!r}, but the call is for {task!r}",
            parameter="task",
            value=params.task,
        )
    clone = params.clone()
    clone.task = task
    return clone
