"""From `EngineArgs` to `EngineConfig`: every wish checked, every default decided, in one place.

Opens the model's metadata (headers and small files, no weights). What only the core can know (the
size of the KV cache, the context that fits into it) is taken over afterwards, by `apply_ready`.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tellin.checks import check_bool, check_float, check_int, check_int_list
from tellin.config import (
    CacheConfig,
    EngineArgs,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    PoolerConfig,
    SchedulerConfig,
)
from tellin.engine.arg_checks import (
    check_arg_types,
    check_chat_template,
    check_generation_overrides,
    check_logits_processors,
    check_prompt_embeds,
)
from tellin.engine.mm_config import multimodal_config, with_room_for_parts
from tellin.engine.nested_configs import (
    check_choice,
    config_from_dict,
    reasoning_config,
    speculative_config,
    structured_outputs_config,
)
from tellin.exceptions import (
    InvalidParameterError,
    InvalidTypeError,
    ModelLoadError,
    UnsupportedFeatureError,
)
from tellin.protocol import EngineCoreReady
from tellin.sampling_params import SamplingParams
from tellin.settings import Settings

if TYPE_CHECKING:
    from tellin.engine.renderer import ChatTokenizer
    from tellin.loading import ModelMetadata

logger = logging.getLogger("tellin.engine")

DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
"""Long enough for the matrix kernels to run at full speed, short enough not to stall decodes."""

LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
KV_CACHE_DTYPES = ("auto", "float32", "float16", "int16", "int8")
MAX_LORAS = 4096
MAX_LORA_RANK = 512
POOLING_TYPES = ("LAST", "CLS", "MEAN")
SCORE_ACTIVATIONS = ("auto", "sigmoid", "softmax", "none")


def create_engine_config(args: EngineArgs, settings: Settings | None = None) -> EngineConfig:
    """Resolve arguments against the model's metadata.

    Args:
        settings: default: read from the environment, now.

    Raises:
        ModelNotFoundError, ModelLoadError, UnsupportedModelError: the model cannot be opened.
        InvalidParameterError, UnsupportedFeatureError: an argument cannot be followed.
    """
    from tellin.loading import open_metadata, resolve_model

    settings = settings or Settings.from_environ()
    check_arg_types(args)
    if not str(args.model):
        raise InvalidParameterError(
            "model is missing: give a .gguf file, a model folder, or the name of a pulled model",
            parameter="model",
        )
    path = resolve_model(str(args.model), settings, download=args.download)
    metadata = open_metadata(path)
    model_config = _model_config(args, path, metadata, _tokenizer_path(args, settings))
    whole_prompts = _pools_whole_prompts(metadata, model_config)
    cache_config = _cache_config(args, whole_prompts)
    scheduler_config = _scheduler_config(args, model_config, whole_prompts)
    speculation = speculative_config(args.speculative_config, str(args.model), path)
    looks_up_inputs = metadata.hparams.per_layer_input_size > 0
    check_prompt_embeds(args.enable_prompt_embeds, model_config, speculation, looks_up_inputs)
    multimodal = multimodal_config(args, model_config, scheduler_config, speculation)
    if args.max_num_batched_tokens is None:
        scheduler_config = with_room_for_parts(scheduler_config, multimodal, speculation)
    return EngineConfig(
        model_config=model_config,
        cache_config=cache_config,
        scheduler_config=scheduler_config,
        parallel_config=_parallel_config(args, settings),
        settings=settings,
        observability_config=ObservabilityConfig(
            log_stats=not args.disable_log_stats,
            otlp_traces_endpoint=args.otlp_traces_endpoint,
            metrics_prefix=args.metrics_prefix,
        ),
        structured_outputs_config=structured_outputs_config(args.structured_outputs_config),
        lora_config=_lora_config(args),
        speculative_config=speculation,
        shutdown_timeout_s=check_float("shutdown_timeout_s", args.shutdown_timeout_s, 0, 1e6),
        reasoning_config=reasoning_config(args.reasoning_config, path, model_config),
        multimodal_config=multimodal,
    )


def apply_ready(config: EngineConfig, ready: EngineCoreReady) -> EngineConfig:
    """The configuration with the lengths and sizes that the core has settled."""
    max_model_len = min(config.model_config.max_model_len, ready.max_model_len)
    replace = dataclasses.replace
    return replace(
        config,
        model_config=replace(config.model_config, max_model_len=max_model_len),
        scheduler_config=replace(config.scheduler_config, max_model_len=max_model_len),
        cache_config=replace(
            config.cache_config, num_kv_blocks=ready.num_kv_blocks, block_size=ready.block_size
        ),
    )


def load_engine_tokenizer(config: EngineConfig) -> ChatTokenizer | None:
    """The tokenizer that the configuration names; None with ``skip_tokenizer_init``."""
    if config.model_config.skip_tokenizer_init:
        return None
    from tellin.loading import load_tokenizer

    path = config.model_config.tokenizer_path or config.model_config.path
    return cast("ChatTokenizer", load_tokenizer(path))


# ---------------------------------------------------------------------- parts


def _tokenizer_path(args: EngineArgs, settings: Settings) -> Path | None:
    """Where the tokenizer is: a file or folder, or a model that has it, named as models are."""
    from tellin.loading import resolve_model

    if args.tokenizer is None:
        return None
    path = Path(args.tokenizer)
    if path.exists():  # a folder with a tokenizer need not be a model
        return path
    return resolve_model(args.tokenizer, settings, download=args.download)


def _model_config(
    args: EngineArgs, path: Path, metadata: ModelMetadata, tokenizer_path: Path | None
) -> ModelConfig:
    check_choice("runner", args.runner, ("auto", "generate", "pooling", "both"))
    check_choice("logprobs_mode", args.logprobs_mode, LOGPROBS_MODES)
    check_choice(
        "activation_precision",
        args.activation_precision,
        ("default", "high", "int8", "mixed", "int16", "float32"),
    )
    check_choice("backend", args.backend, ("native", "reference"))
    if args.dtype not in ("auto", "float32", "float"):
        raise UnsupportedFeatureError(
            f"dtype={args.dtype!r} is not supported: weights are used as they are stored and "
            "activations are float32; leave dtype out"
        )
    if args.runner in ("generate", "both") and metadata.is_encoder:
        raise UnsupportedFeatureError(
            f"runner={args.runner!r} does not suit this model: {metadata.architecture!r} is an "
            "encoder, made for 'pooling'"
        )
    if args.runner in ("generate", "both") and metadata.is_classifier:
        raise UnsupportedFeatureError(
            f"runner={args.runner!r} does not suit this model: it is a classifier, made for "
            "'pooling'"
        )
    runner = metadata.runner_type if args.runner == "auto" else args.runner
    runner_type = "generate" if runner == "both" else runner
    if runner_type == "pooling":
        for name in ("speculative_config", "logits_processors"):
            if getattr(args, name):
                raise UnsupportedFeatureError(
                    f"{name} is for models that generate; this one pools (runner='pooling')"
                )
    elif args.pooler_config is not None and runner != "both":
        raise UnsupportedFeatureError(
            "pooler_config is for models that pool; this one generates: set runner='pooling'"
        )
    pooler_config = None if runner == "generate" else _pooler_config(args, metadata)
    if runner == "both" and pooler_config is not None and pooler_config.pooling_type != "LAST":
        raise UnsupportedFeatureError(
            f"runner='both' pools the last token, and this model's pooling_type is "
            f"{pooler_config.pooling_type}, which takes whole prompts; use runner='pooling'"
        )
    max_model_len, auto_max_model_len = _max_model_len(args, metadata, pooler_config)
    own_template = check_chat_template(args.chat_template)
    return ModelConfig(
        model=str(args.model),
        path=path,
        architecture=metadata.architecture,
        max_model_len=max_model_len,
        vocab_size=metadata.vocab_size,
        tokenizer_size=min(metadata.tokenizer_size, metadata.vocab_size),
        hidden_size=metadata.hidden_size,
        num_hidden_layers=metadata.num_hidden_layers,
        served_model_name=args.served_model_name or str(args.model),
        runner_type=runner_type,
        dtype="auto" if args.dtype == "auto" else "float32",
        seed=_seed(args.seed),
        max_logprobs=check_int("max_logprobs", args.max_logprobs, -1),
        logprobs_mode=args.logprobs_mode,
        skip_tokenizer_init=args.skip_tokenizer_init,
        auto_max_model_len=auto_max_model_len,
        eos_token_ids=metadata.eos_token_ids,
        bos_token_id=metadata.bos_token_id,
        chat_template=metadata.chat_template if own_template is None else own_template,
        own_chat_template=own_template,
        generation_defaults=_generation_defaults(args, metadata),
        logits_processors=check_logits_processors(args.logits_processors),
        activation_precision=args.activation_precision,
        backend=args.backend,
        tokenizer_path=tokenizer_path,
        pooler_config=pooler_config,
        enable_prompt_embeds=args.enable_prompt_embeds,
    )


def _pooler_config(args: EngineArgs, metadata: ModelMetadata) -> PoolerConfig:
    """What the user says, before what the files say, before what suits the architecture."""
    base = metadata.pooler or PoolerConfig("MEAN" if metadata.is_encoder else "LAST")
    given = args.pooler_config
    if isinstance(given, Mapping):
        given = dict(given)
        if isinstance(given.get("pooling_type"), str):
            given["pooling_type"] = given["pooling_type"].upper()
        given = dataclasses.asdict(base) | given
        sizes = given["matryoshka_dimensions"]
        given["matryoshka_dimensions"] = tuple(sizes) if isinstance(sizes, list) else sizes
        labels = given["labels"]
        given["labels"] = tuple(labels) if isinstance(labels, list) else labels
    config = config_from_dict("pooler_config", PoolerConfig, given) or base
    check_choice("pooler_config.pooling_type", config.pooling_type, POOLING_TYPES)
    check_choice("pooler_config.score_activation", config.score_activation, SCORE_ACTIVATIONS)
    own = ("num_labels", "labels", "embedding_size")
    if any(getattr(config, name) != getattr(base, name) for name in own):
        raise InvalidParameterError(
            f"pooler_config.{', '.join(own)} are the model's own: leave them out",
            parameter="pooler_config",
        )
    if config.num_labels and config.pooling_type != base.pooling_type:
        raise InvalidParameterError(
            f"pooler_config.pooling_type is {config.pooling_type}, but the classifier of this "
            f"model was trained on {base.pooling_type}",
            parameter="pooler_config",
        )
    check_bool("pooler_config.use_activation", config.use_activation)
    check_bool("pooler_config.is_matryoshka", config.is_matryoshka)
    name = "pooler_config.matryoshka_dimensions"
    for size in check_int_list(name, config.matryoshka_dimensions):
        check_int(name, size, 1)
    if config.max_seq_length is not None:
        check_int("pooler_config.max_seq_length", config.max_seq_length, 1)
    return config


def _pools_whole_prompts(metadata: ModelMetadata, model_config: ModelConfig) -> bool:
    """Whether a prompt is computed in one step, without what earlier ones left in a cache.

    An encoder's tokens see all of it; means and first tokens need states that a cache lacks.
    """
    pooler = model_config.pooler_config
    return pooler is not None and (metadata.is_encoder or pooler.pooling_type != "LAST")


def _max_model_len(
    args: EngineArgs, metadata: ModelMetadata, pooler_config: PoolerConfig | None
) -> tuple[int, bool]:
    """Context in tokens, and whether the core may lower it to what memory holds."""
    longest = metadata.context_length
    if args.max_model_len is None or args.max_model_len == -1:
        if pooler_config is not None and pooler_config.max_seq_length is not None:
            longest = min(longest, pooler_config.max_seq_length)
        return longest, True
    wanted = check_int("max_model_len", args.max_model_len, 1)
    if wanted == 1 and pooler_config is None:
        raise InvalidParameterError(
            "max_model_len must be at least 2, a token of prompt and one of output; got 1",
            parameter="max_model_len",
            value=1,
        )
    if wanted > longest:
        raise InvalidParameterError(
            f"max_model_len={wanted} exceeds what the model was made for, {longest} tokens",
            parameter="max_model_len",
            value=wanted,
        )
    return wanted, False


def _generation_defaults(args: EngineArgs, metadata: ModelMetadata) -> dict[str, Any]:
    check_choice("generation_config", args.generation_config, ("auto", "none", "vllm"))
    defaults = metadata.generation_defaults if args.generation_config == "auto" else {}
    _check_generation_defaults(metadata, defaults, args.override_generation_config)
    return check_generation_overrides(args.override_generation_config, defaults)


def _check_generation_defaults(
    metadata: ModelMetadata, defaults: Mapping[str, Any], overrides: Any
) -> None:
    """Try the sampling defaults that a model comes with, but for those that are overridden.

    Raises:
        ModelLoadError: no sampling parameters can be made of them; the file's key is named.
    """
    overridden = set(overrides) if isinstance(overrides, Mapping) else set()
    for name, value in defaults.items():
        if metadata.sampling_key(name) in overridden or name in overridden:
            continue
        try:
            SamplingParams.from_optional(**{name: value})
        except (InvalidParameterError, InvalidTypeError) as error:
            file = metadata.path / "generation_config.json"
            raise ModelLoadError(
                f"{metadata.path if metadata.file_format == 'gguf' else file}: key "
                f"{metadata.sampling_key(name)!r} is {value!r:.60}, which is no default to sample "
                f"with: {error}; generation_config='none' leaves the model's defaults out"
            ) from None


def _cache_config(args: EngineArgs, whole_prompts: bool) -> CacheConfig:
    block_size = check_int("block_size", args.block_size, 16)
    if block_size % 16:
        raise InvalidParameterError(
            f"block_size must be a multiple of 16, got {block_size}",
            parameter="block_size",
            value=block_size,
        )
    check_choice("kv_cache_dtype", args.kv_cache_dtype, KV_CACHE_DTYPES)
    if args.memory_utilization is not None:
        check_float("memory_utilization", args.memory_utilization, 0, 1, open_low=True)
    if args.kv_events_replay_endpoint is not None and args.kv_events_endpoint is None:
        raise InvalidParameterError(
            "kv_events_replay_endpoint needs kv_events_endpoint: nothing is published without it",
            parameter="kv_events_replay_endpoint",
            value=args.kv_events_replay_endpoint,
        )
    for name, low in (("num_kv_blocks", 2), ("kv_cache_memory_bytes", 1)):
        if getattr(args, name) is not None:
            check_int(name, getattr(args, name), low)
    return CacheConfig(
        block_size=block_size,
        num_kv_blocks=args.num_kv_blocks,
        memory_utilization=args.memory_utilization,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        kv_cache_dtype=args.kv_cache_dtype,
        enable_prefix_caching=args.enable_prefix_caching and not whole_prompts,
        prefix_caching_hash_algo=args.prefix_caching_hash_algo,
        enable_kv_cache_events=args.enable_kv_cache_events or args.kv_events_endpoint is not None,
        kv_cache_metrics_sample=check_float(
            "kv_cache_metrics_sample", args.kv_cache_metrics_sample, 0, 1
        ),
        kv_events_endpoint=args.kv_events_endpoint,
        kv_events_replay_endpoint=args.kv_events_replay_endpoint,
        kv_events_topic=args.kv_events_topic,
    )


def _scheduler_config(
    args: EngineArgs, model_config: ModelConfig, whole_prompts: bool
) -> SchedulerConfig:
    check_choice("scheduling_policy", args.scheduling_policy, ("fcfs", "priority"))
    max_num_seqs = check_int("max_num_seqs", args.max_num_seqs, 1)
    max_model_len = model_config.max_model_len
    if args.max_num_batched_tokens is not None:
        budget = check_int("max_num_batched_tokens", args.max_num_batched_tokens, 1)
    else:
        # A step must be able to hold one token of every running request.
        budget = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, max_num_seqs)
        if not args.enable_chunked_prefill or whole_prompts:
            budget = max(budget, max_model_len)
    if budget < max_num_seqs:
        raise InvalidParameterError(
            f"max_num_batched_tokens must be at least max_num_seqs ({max_num_seqs}), got {budget}",
            parameter="max_num_batched_tokens",
            value=budget,
        )
    threshold = check_int("long_prefill_token_threshold", args.long_prefill_token_threshold, 0)
    if whole_prompts:
        _check_whole_prompts(budget, threshold, max_model_len)
    if args.max_num_queued_reqs is not None:
        check_int("max_num_queued_reqs", args.max_num_queued_reqs, 1)
    return SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        policy=args.scheduling_policy,
        enable_chunked_prefill=args.enable_chunked_prefill and not whole_prompts,
        long_prefill_token_threshold=threshold,
        max_long_partial_prefills=check_int(
            "max_long_partial_prefills", args.max_long_partial_prefills, 0
        ),
        max_num_partial_prefills=check_int(
            "max_num_partial_prefills", args.max_num_partial_prefills, 0
        ),
        stream_interval=check_int("stream_interval", args.stream_interval, 1),
        watermark=check_float("watermark", args.watermark, 0, 1),
        max_num_queued_reqs=args.max_num_queued_reqs,
    )


def _check_whole_prompts(budget: int, threshold: int, max_model_len: int) -> None:
    for name, value, limit in (
        ("max_num_batched_tokens", budget, max_model_len),
        ("long_prefill_token_threshold", threshold or max_model_len, max_model_len),
    ):
        if value < limit:
            raise InvalidParameterError(
                f"{name} must be at least max_model_len ({limit}) for this model, which computes "
                f"every prompt in one step, got {value}; leave it out or lower max_model_len",
                parameter=name,
                value=value,
            )


def _parallel_config(args: EngineArgs, settings: Settings) -> ParallelConfig:
    num_threads = settings.num_threads if args.num_threads is None else args.num_threads
    if num_threads is not None:
        num_threads = check_int("num_threads", num_threads, 1)
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if check_int(name, getattr(args, name), 1) > 1:
            raise UnsupportedFeatureError(
                f"{name}={getattr(args, name)} is not supported: one process uses all cores; "
                "set num_threads instead"
            )
    data_parallel_size = check_int("data_parallel_size", args.data_parallel_size, 1)
    return ParallelConfig(
        num_threads=num_threads,
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        data_parallel_size=data_parallel_size,
        data_parallel_rank=check_int(
            "data_parallel_rank", args.data_parallel_rank, 0, data_parallel_size - 1
        ),
        distributed_executor_backend=args.distributed_executor_backend or "uni",
    )


def _seed(seed: int | None) -> int:
    """The given seed, or a random one."""
    return secrets.randbits(63) if seed is None else check_int("seed", seed, -(2**63), 2**64 - 1)


def _lora_config(args: EngineArgs) -> LoRAConfig | None:
    check_bool("enable_lora", args.enable_lora)
    max_loras = check_int("max_loras", args.max_loras, 1, MAX_LORAS)
    rank = check_int("max_lora_rank", args.max_lora_rank, 1, MAX_LORA_RANK)
    kept = max_loras if args.max_cpu_loras is None else args.max_cpu_loras
    kept = check_int("max_cpu_loras", kept, max_loras)
    return LoRAConfig(rank, max_loras, kept) if args.enable_lora else None
