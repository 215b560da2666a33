"""Images in prompts, as the engine's arguments want them: part of `tellin.engine.arg_utils`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tellin.checks import check_float, check_int
from tellin.config import (
    EngineArgs,
    EngineConfig,
    ModelConfig,
    MultiModalConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from tellin.engine.mm_inputs import MODALITIES
from tellin.engine.mm_processor import MultiModalProcessor
from tellin.exceptions import InvalidParameterError, InvalidTypeError, UnsupportedFeatureError

DEFAULT_LIMIT = 999
MAX_CACHE_GB = 1 << 20


def multimodal_config(
    args: EngineArgs,
    model: ModelConfig,
    scheduler: SchedulerConfig,
    speculation: SpeculativeConfig | None,
) -> MultiModalConfig | None:
    """None where prompts are text only: the model sees no images, or none are wanted.

    Raises:
        InvalidTypeError, InvalidParameterError, UnsupportedFeatureError: naming the argument.
    """
    limits = _limits(args.limit_mm_per_prompt)
    cache_gb = check_float("mm_processor_cache_gb", args.mm_processor_cache_gb, 0, MAX_CACHE_GB)
    folder = _media_folder(args.allowed_local_media_path)
    mmproj = _file("mmproj", args.mmproj)
    options = _options(args.mm_processor_kwargs)
    if limits["image"] == 0 or model.runner_type == "pooling":
        return None
    from tellin.loading import load_image_processor

    processor = load_image_processor(model.path, mmproj, options)
    if processor is None:
        return None
    if speculation is not None and speculation.method == "draft_model":
        raise UnsupportedFeatureError(
            "speculative_config.method='draft_model' does not go with images, which the draft "
            "model cannot see; use 'ngram' or 'suffix', or set limit_mm_per_prompt={'image': 0}"
        )
    stay_whole = processor.rows_see_each_other and scheduler.enable_chunked_prefill
    if stay_whole and args.max_num_batched_tokens is not None:
        _check_whole_parts(processor.tokens_per_tile, scheduler, speculation)
    most = processor.max_tokens_per_image
    return MultiModalConfig(
        limit_per_prompt=limits,
        max_tokens_per_item=most,
        encoder_cache_size=max(scheduler.max_num_batched_tokens, most),
        processor_cache_gb=cache_gb,
        allowed_local_media_path=folder,
        mmproj=mmproj,
        max_rows_per_step=processor.tokens_per_tile if scheduler.enable_chunked_prefill else None,
        processor_kwargs=options,
        rows_see_each_other=processor.rows_see_each_other,
    )


def with_room_for_parts(
    scheduler: SchedulerConfig,
    multimodal: MultiModalConfig | None,
    speculation: SpeculativeConfig | None,
) -> SchedulerConfig:
    """A budget of tokens that nobody named, raised to what an image that stays whole needs."""
    if multimodal is None or not multimodal.rows_see_each_other:
        return scheduler
    num_rows = multimodal.max_rows_per_step or 0
    least = num_rows + _most_that_decode(scheduler, speculation)
    budget = max(scheduler.max_num_batched_tokens, least)
    return dataclasses.replace(scheduler, max_num_batched_tokens=budget)


def _most_that_decode(scheduler: SchedulerConfig, speculation: SpeculativeConfig | None) -> int:
    """Tokens of a step that the requests beside one may need."""
    num_drafts = 0 if speculation is None else speculation.num_speculative_tokens
    return (scheduler.max_num_seqs - 1) * (1 + num_drafts)


def _check_whole_parts(
    num_rows: int, scheduler: SchedulerConfig, speculation: SpeculativeConfig | None
) -> None:
    """Refuse a budget that would let an image wait for as long as others decode."""
    num_others = _most_that_decode(scheduler, speculation)
    budget = scheduler.max_num_batched_tokens
    if budget < num_rows + num_others:
        raise InvalidParameterError(
            f"max_num_batched_tokens={budget} is too few for images of this model: a step computes "
            f"all {num_rows} tokens of one, beside {num_others} that others decode "
            f"(max_num_seqs={scheduler.max_num_seqs}); raise it to {num_rows + num_others}, lower "
            "max_num_seqs, or set limit_mm_per_prompt={'image': 0}",
            parameter="max_num_batched_tokens",
            value=budget,
        )


def load_mm_processor(config: EngineConfig) -> MultiModalProcessor | None:
    """What prepares the images of an engine's prompts; None for an engine that takes text only."""
    multimodal = config.multimodal_config
    if multimodal is None:
        return None
    from tellin.loading import load_image_processor

    model = config.model_config
    processor = load_image_processor(model.path, multimodal.mmproj, multimodal.processor_kwargs)
    if processor is None:
        raise UnsupportedFeatureError(f"{model.path}: the model takes no images")
    return MultiModalProcessor(multimodal, processor, model.served_model_name or model.model)


def _options(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidTypeError(
            "mm_processor_kwargs must be a dict like {'size': {'longest_edge': 1024}}, "
            f"got {given!r}",
            parameter="mm_processor_kwargs",
            value=given,
        )
    return dict(given)


def _limits(given: Any) -> dict[str, int]:
    """Most items by modality. vLLM's form ``{"image": {"count": 2}}`` is taken too."""
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise InvalidTypeError(
            f"limit_mm_per_prompt must be a dict like {{'image': 4}}, got {given!r}",
            parameter="limit_mm_per_prompt",
            value=given,
        )
    limits = dict.fromkeys(MODALITIES, DEFAULT_LIMIT)
    for modality, value in given.items():
        name = f"limit_mm_per_prompt.{modality}"
        if isinstance(value, Mapping):
            value = value.get("count", DEFAULT_LIMIT)
        count = check_int(name, value, 0)
        if modality in MODALITIES:
            limits[modality] = count
        elif count:
            raise UnsupportedFeatureError(f"{name}={count}: of modalities only images are read")
    return limits


def _media_folder(given: str | Path | None) -> Path | None:
    if given is None or given == "":
        return None
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise InvalidParameterError(
            f"allowed_local_media_path must be a folder, got {str(given)!r}",
            parameter="allowed_local_media_path",
            value=str(given),
        )
    return folder.resolve()


def _file(name: str, given: str | Path | None) -> Path | None:
    if given is None:
        return None
    path = Path(given).expanduser()
    if not path.is_file():
        raise InvalidParameterError(
            f"{name} must be a file, got {str(given)!r}", parameter=name, value=str(given)
        )
    return path
