"""Embedding, classification and scoring with an `LLM` whose model is made for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tellin.engine.prompts import POOLING_TOKENIZE_PARAMS, prompts_to_list
from tellin.entrypoints.engine_controls import EngineControls
from tellin.entrypoints.offline_runner import (
    LoRAPerPrompt,
    OnError,
    Params,
    RunOptions,
    one_per_prompt,
)
from tellin.entrypoints.progress import UseTqdm
from tellin.entrypoints.scoring import SCORING_TASK, cosine
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
        items = prompts_to_list(prompts)
        given = PoolingParams() if pooling_params is None else pooling_params
        params: list[Params] = [
            _with_task(item, pooling_task)
            for item in one_per_prompt("pooling_params", given, len(items))
        ]
        tok_params = POOLING_TOKENIZE_PARAMS.with_options(tokenization_kwargs)
        renderer = self.llm_engine.renderer
        return self._runner.run(
            items,
            lambda prompt: renderer.render_cmpl([prompt], tok_params)[0],
            params,
            RunOptions(lora_request, None, use_tqdm, on_error),
        )

    def embed(self, prompts: Any, **options: Any) -> list[EmbeddingRequestOutput]:
        """One vector per prompt, of L2 norm 1 unless switched off. Options: as `encode`."""
        outputs = self.encode(prompts, pooling_task="embed", **options)
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    def classify(self, prompts: Any, **options: Any) -> list[ClassificationRequestOutput]:
        """Class probabilities per prompt. Options: as `encode`."""
        outputs = self.encode(prompts, pooling_task="classify", **options)
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    def score(self, data_1: Any, data_2: Any, **options: Any) -> list[ScoringRequestOutput]:
        """Similarity of pairs of texts: 1:1, 1:N (the first is repeated) or N:N.

        The cosine of two embeddings. Options: as `encode`.
        """
        first, second = prompts_to_list(data_1), prompts_to_list(data_2)
        if not first or not second or len(first) not in (1, len(second)):
            raise InvalidParameterError(
                f"score() pairs 1 with N or N with N texts, got {len(first)} and {len(second)}",
                parameter="data_1",
                value=len(first),
            )
        tasks = self.supported_tasks
        if SCORING_TASK not in tasks:
            raise UnsupportedFeatureError(
                f"score() needs a model that embeds; this one supports {', '.join(tasks)}"
                + ("; start one with runner='pooling' or 'both'" if "generate" in tasks else "")
            )
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
