"""The admission gate: whatever a request can be refused for is found here, before the core sees it.

`LLM`, `LLMEngine`, `AsyncLLM` and the server all pass through `InputProcessor.process_inputs`. It
works on copies: a caller's parameters are never changed. What it returns is complete, so the core
never has to ask the shell anything.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tellin.checks import check_float, check_int
from tellin.config import EngineConfig
from tellin.engine.control_checks import check_lora_request, check_trace_headers
from tellin.engine.core_requests import prompt_of
from tellin.engine.mm_inputs import holds_images
from tellin.engine.param_checks import (
    check_contradictions,
    check_pooling_params,
    check_prompt,
    check_room,
    check_sampling_params,
)
from tellin.engine.prompt_embeds import prompt_rows
from tellin.engine.prompts import (
    COMPLETION_TOKENIZE_PARAMS,
    POOLING_TOKENIZE_PARAMS,
    MultiModalItems,
    RenderedPrompt,
    check_rendered,
    is_rendered,
    note_token_types,
)
from tellin.engine.renderer import Renderer
from tellin.exceptions import (
    ContextLengthError,
    InvalidParameterError,
    InvalidTypeError,
    UnsupportedFeatureError,
)
from tellin.protocol import EngineCoreReady, EngineCoreRequest, LoRARequest, MultiModalFeature
from tellin.sampling_params import PoolingParams, SamplingParams

logger = logging.getLogger("tellin.engine")

DEFAULT_POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify")
"""Task of a request that names none: the first of these that the model supports."""


class InputProcessor:
    """Turns prompts and parameters into checked requests."""

    def __init__(self, config: EngineConfig, renderer: Renderer) -> None:
        self.config = config
        self.renderer = renderer
        self._ready: EngineCoreReady | None = None
        self._warned: set[str] = set()

    def update_config(self, config: EngineConfig, ready: EngineCoreReady | None) -> None:
        """The core has settled lengths and sizes: check against those from now on."""
        self.config = config
        self.renderer.config = config
        self._ready = ready

    # ------------------------------------------------------------------ the gate

    def process_inputs(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        supported_tasks: Sequence[str],
        *,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        reasoning_ended: bool | None = None,
    ) -> EngineCoreRequest:
        """Check a request completely.

        Args:
            prompt: a rendered prompt, or a raw one (which is then rendered here).
            arrival_time: wall clock seconds; default: when rendering began.
            reasoning_ended: whether the prompt has ended the thoughts that a grammar waits for;
                default: the core looks for the marks' ids.

        Returns:
            The request for the core, without internal id: see `assign_request_id`.

        Raises:
            RequestError: what is wrong, and what to do. Nothing has changed anywhere.
        """
        if not isinstance(request_id, str):
            raise InvalidTypeError(
                f"request_id must be a string, got {type(request_id).__name__}",
                parameter="request_id",
                value=request_id,
            )
        final_params = self._check_params(params, supported_tasks)
        self._check_lora(lora_request)
        priority = check_int("priority", priority, -(2**63), 2**63 - 1)
        headers = check_trace_headers(trace_headers)
        if arrival_time is not None:
            arrival_time = check_float("arrival_time", arrival_time, 0, math.inf)
        self._check_rank(data_parallel_rank)
        if reasoning_ended is not None and not isinstance(reasoning_ended, bool):
            raise InvalidTypeError(
                "reasoning_ended must be True, False or None, got "
                f"{type(reasoning_ended).__name__}",
                parameter="reasoning_ended",
                value=reasoning_ended,
            )
        pools = isinstance(final_params, PoolingParams)
        rendered = self.render(prompt, tokenization_kwargs, pools)
        embeds = self._prompt_embeds(rendered, final_params)
        token_ids = rendered["prompt_token_ids"]
        if isinstance(final_params, PoolingParams):
            note_token_types(final_params, rendered)
        elif rendered.get("token_type_ids"):
            raise InvalidParameterError(
                "token_type_ids are for models that pool; leave them out",
                parameter="token_type_ids",
            )
        model = self.config.model_config
        check_prompt(token_ids, model.vocab_size, model.max_model_len)
        if isinstance(final_params, SamplingParams):
            self._finalise(final_params, len(token_ids))
            check_room(len(token_ids), final_params, self.config, self._ready)
        if arrival_time is None:
            arrival_time = rendered.get("arrival_time") or time.time()
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids if embeds is None else None,
            mm_features=self._mm_features(rendered.get("mm_items")),
            sampling_params=final_params if isinstance(final_params, SamplingParams) else None,
            pooling_params=final_params if isinstance(final_params, PoolingParams) else None,
            arrival_time=arrival_time,
            lora_request=lora_request,
            cache_salt=rendered.get("cache_salt"),
            data_parallel_rank=data_parallel_rank,
            priority=priority,
            trace_headers=headers,
            reasoning_ended=reasoning_ended,
            prompt_embeds=embeds,
        )

    def adopt_core_request(
        self, request_id: str, request: EngineCoreRequest, supported_tasks: Sequence[str]
    ) -> EngineCoreRequest:
        """Put a request that somebody else built through the same gate, in place. Deprecated.

        Its own id wins over ``request_id``. One that was added before is returned as it is:
        `assign_request_id` refuses it.

        Raises:
            RequestError: as `process_inputs`.
        """
        self._warn_once(
            "core request",
            "passing an EngineCoreRequest to add_request is deprecated: pass the output of "
            "renderer.render_cmpl() or renderer.render_chat()",
        )
        if request.request_id != request_id:
            self._warn_once(
                "id mismatch",
                f"request_id {request_id!r} differs from that of the EngineCoreRequest, "
                f"{request.request_id!r}, which is used",
            )
        if request.external_req_id is not None:
            return request
        checked = self.process_inputs(
            request.request_id,
            prompt_of(request),
            request.params,
            supported_tasks,
            arrival_time=request.arrival_time,
            lora_request=request.lora_request,
            trace_headers=request.trace_headers,
            priority=request.priority,
            data_parallel_rank=request.data_parallel_rank,
            reasoning_ended=request.reasoning_ended,
        )
        checked.mm_features = request.mm_features  # the core checks them
        checked.abort_immediately = request.abort_immediately
        for name in request.__struct_fields__:  # in place: the caller's object counts as used
            setattr(request, name, getattr(checked, name))
        return request

    def render(
        self,
        prompt: Any,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        pools: bool = False,
    ) -> RenderedPrompt:
        """The rendered form of a prompt. Raw prompts are accepted, with one warning per engine."""
        if is_rendered(prompt):
            if tokenization_kwargs:
                raise InvalidParameterError(
                    "tokenization_kwargs have no effect on a prompt that is already rendered; "
                    "give them to render_cmpl or render_chat",
                    parameter="tokenization_kwargs",
                )
            return check_rendered(prompt)
        self._warn_once(
            "raw prompt",
            "raw prompts are deprecated here: render them first, with renderer.render_cmpl() or "
            "renderer.render_chat()",
        )
        params = POOLING_TOKENIZE_PARAMS if pools else COMPLETION_TOKENIZE_PARAMS
        params = params.with_options(tokenization_kwargs)
        return self.renderer.render_cmpl([prompt], params)[0]

    async def render_async(
        self,
        prompt: Any,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        pools: bool = False,
    ) -> RenderedPrompt:
        """`render`; in a thread where pictures would hold up the event loop."""
        mm = self.renderer.mm_processor
        if mm is None or not holds_images(prompt):
            return self.render(prompt, tokenization_kwargs, pools)
        return await mm.run(self.render, prompt, tokenization_kwargs, pools)

    def assign_request_id(self, request: EngineCoreRequest) -> None:
        """Keep the caller's id as external id; make the internal one unique.

        Raises:
            InvalidParameterError: the request has an external id already (it was added before).
        """
        if request.external_req_id is not None:
            raise InvalidParameterError(
                "external_req_id is set by the engine; use request_id, and do not add the same "
                "request object twice",
                parameter="external_req_id",
                value=request.external_req_id,
            )
        request.external_req_id = request.request_id
        request.request_id = f"{request.request_id}-{secrets.token_hex(4)}"

    # ------------------------------------------------------------------ parts

    def _prompt_embeds(
        self, rendered: RenderedPrompt, params: SamplingParams | PoolingParams
    ) -> Any:
        """The rows of a prompt of embeddings, checked, with zeros for its ids; None for others."""
        given = rendered.get("prompt_embeds")
        if given is None:
            return None
        if isinstance(params, SamplingParams) and params.prompt_logprobs is not None:
            raise UnsupportedFeatureError(
                "prompt_logprobs are probabilities of the prompt's tokens, and prompt_embeds are "
                "none; leave prompt_logprobs out"
            )
        rows = prompt_rows(given, self.config.model_config)
        rendered["prompt_token_ids"] = [0] * len(rows)
        return rows

    def _mm_features(
        self, mm_items: Mapping[str, MultiModalItems] | None
    ) -> list[MultiModalFeature] | None:
        """One feature per item, in order of appearance across modalities."""
        if not mm_items:
            return None
        features = []
        for modality, items in mm_items.items():
            none: list[None] = [None] * len(items["data"])
            runs = items.get("embed_runs") or none
            grids, shapes = items.get("grids") or none, items.get("shapes") or none
            for data, item_hash, (offset, length), *rest in zip(
                items["data"],
                items["hashes"],
                items["placeholders"],
                runs,
                grids,
                shapes,
                strict=True,
            ):
                if not isinstance(item_hash, str):
                    raise InvalidTypeError(
                        f"hashes of multimodal items must be strings, got {item_hash!r}: "
                        "the multimodal processor is broken",
                        parameter="mm_items",
                        value=item_hash,
                    )
                feature = MultiModalFeature(
                    modality, item_hash, offset, length, data, item_hash, *rest
                )
                self._check_size(feature)
                features.append(feature)
        return sorted(features, key=lambda feature: feature.offset)

    def _check_size(self, feature: MultiModalFeature) -> None:
        """Refuse an item that the encoder's cache cannot hold."""
        config = self.config.multimodal_config
        if config is not None and feature.num_embeds > config.encoder_cache_size:
            raise ContextLengthError(
                f"an item of modality {feature.modality!r} takes {feature.num_embeds} embeddings, "
                f"but the encoder's cache holds {config.encoder_cache_size}; use a smaller one, or "
                "raise max_num_batched_tokens"
            )

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning("%s", message)

    def _check_params(
        self, params: SamplingParams | PoolingParams, supported_tasks: Sequence[str]
    ) -> SamplingParams | PoolingParams:
        """A checked clone."""
        if isinstance(params, SamplingParams):
            if "generate" not in supported_tasks:
                raise UnsupportedFeatureError(
                    "this model cannot generate text; it supports "
                    f"{', '.join(supported_tasks) or 'no task'}"
                )
            sampling = params.checked_clone()
            has_tokenizer = self.renderer.tokenizer is not None
            check_sampling_params(sampling, self.config, has_tokenizer=has_tokenizer)
            return sampling
        if not isinstance(params, PoolingParams):
            raise InvalidTypeError(
                f"params must be SamplingParams or PoolingParams, got {type(params).__name__}",
                parameter="params",
                value=params,
            )
        pooling = params.clone()
        pooling.__post_init__()  # it may have been changed since it was made
        tasks = [task for task in supported_tasks if task != "generate"]
        if not tasks:
            raise UnsupportedFeatureError(
                "this engine cannot pool (embed, classify): it was started to generate text; start "
                "one with runner='pooling' or 'both' for embeddings"
            )
        if pooling.task is None:
            pooling.task = next((t for t in DEFAULT_POOLING_TASKS if t in tasks), tasks[0])
        check_pooling_params(pooling, tasks, self.config.model_config)
        return pooling

    def _check_lora(self, lora_request: LoRARequest | None) -> None:
        if lora_request is None:
            return
        check_lora_request(lora_request)
        if self.config.lora_config is None:
            raise UnsupportedFeatureError(
                f"LoRA adapter {lora_request.lora_name!r} was requested, but LoRA is disabled; "
                "start the engine with enable_lora=True"
            )
        if self.renderer.tokenizer is not None:
            self._warn_once(
                "lora tokenizer", "tokenizers of LoRA adapters are not used; the base model's is"
            )

    def _check_rank(self, rank: int | None) -> None:
        size = self.config.parallel_config.data_parallel_size
        if rank is not None and not 0 <= check_int("data_parallel_rank", rank) < size:
            raise InvalidParameterError(
                f"data_parallel_rank must be in [0, {size}), got {rank}",
                parameter="data_parallel_rank",
                value=rank,
            )

    def _finalise(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Fill in what depends on the model, on a clone."""
        if params.max_tokens is None:
            # At least 1, so that a full context is refused for what it is (`check_room`).
            room = self.config.model_config.max_model_len - num_prompt_tokens
            params.max_tokens = max(1, room)
        eos_token_ids = self.config.model_config.eos_token_ids
        params.all_stop_token_ids = {*params.all_stop_token_ids, *eos_token_ids}
        if not params.ignore_eos and eos_token_ids:
            params.eos_token_id = eos_token_ids[0]
            others = [i for i in eos_token_ids[1:] if i not in (params.stop_token_ids or ())]
            params.stop_token_ids = [*(params.stop_token_ids or ()), *others]
        if params.bad_words:
            params.bad_words_token_ids = self._bad_words_token_ids(params.bad_words)
        check_contradictions(params)

    def _bad_words_token_ids(self, bad_words: Sequence[str]) -> list[list[int]]:
        """Every distinct tokenisation of each word, at the start of a text and after a space."""
        tokenizer = self.renderer.get_tokenizer()
        tokenizer_size = self.config.model_config.tokenizer_size
        sequences: dict[tuple[int, ...], None] = {}
        for word in bad_words:
            for text in (word, f" {word.lstrip()}"):
                ids = tuple(tokenizer.encode(text, add_special_tokens=False))
                if not ids or max(ids) >= tokenizer_size:
                    raise InvalidParameterError(
                        f"bad word {word!r} cannot be expressed in tokens of this model",
                        parameter="bad_words",
                        value=word,
                    )
                sequences[ids] = None
        return [list(ids) for ids in sequences]
