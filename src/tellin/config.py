"""Configuration: what the user may say (`EngineArgs`), and what every part reads (`EngineConfig`).

All classes are frozen. `EngineArgs` holds raw wishes, with the reference system's names and ours;
`tellin.engine.arg_utils.create_engine_config` opens the model's metadata and resolves them into one
`EngineConfig`. Parts that learn better values later (the core may lower ``max_model_len`` to what
memory allows) replace the config with `dataclasses.replace`; nobody mutates it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tellin.settings import Settings


@dataclass(frozen=True)
class ModelConfig:
    """The model as the shell and the core need to know it; no tensors."""

    model: str
    """What the user named: a path, a store name or a repo id."""
    path: Path
    """Resolved file or folder."""
    architecture: str
    """Name of the module in ``tellin.models`` that records the plan, e.g. ``llama``."""
    max_model_len: int
    vocab_size: int
    """Rows of the output matrix; ids at or above ``tokenizer_size`` are never sampled."""
    tokenizer_size: int
    hidden_size: int
    num_hidden_layers: int
    served_model_name: str = ""
    runner_type: str = "generate"
    """``generate`` or ``pooling``."""
    dtype: str = "auto"
    seed: int = 0
    max_logprobs: int = 20
    """Largest k a request may ask for; -1 = the vocabulary."""
    logprobs_mode: str = "raw_logprobs"
    """raw_logprobs, raw_logits, processed_logprobs or processed_logits."""
    skip_tokenizer_init: bool = False
    auto_max_model_len: bool = False
    """Shrink ``max_model_len`` to what the KV pool holds instead of refusing to start."""
    eos_token_ids: tuple[int, ...] = ()
    """Primary end-of-sequence id first, then the others that end a generation."""
    bos_token_id: int | None = None
    chat_template: str | None = None
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    """Sampling defaults shipped with the model (temperature, top_p, ...)."""
    logits_processors: tuple[Any, ...] = ()
    """Engine-wide logits processor classes or ``module:Class`` names."""
    activation_precision: str = "default"
    """``default`` (int8 activations for quantised weights) or ``high`` (float32)."""
    backend: str = "native"
    """``native`` or ``reference``."""


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = 16
    """Tokens per block; a multiple of 16."""
    num_kv_blocks: int | None = None
    """Exact number of blocks; None = from memory."""
    memory_utilization: float | None = None
    """Fraction of the memory this process may use; None = half of what is free."""
    kv_cache_memory_bytes: int | None = None
    """Exact size of the pool in bytes; wins over ``memory_utilization``."""
    kv_cache_dtype: str = "auto"
    """auto (float16), float32, float16 or int8."""
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256"
    enable_kv_cache_events: bool = False
    kv_cache_metrics_sample: float = 0.01


@dataclass(frozen=True)
class SchedulerConfig:
    """How steps are formed."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_model_len: int = 2048
    policy: str = "fcfs"
    """fcfs or priority."""
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_long_partial_prefills: int = 1
    max_num_partial_prefills: int = 1
    stream_interval: int = 1
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    max_num_queued_reqs: int | None = None
    """Bound of the admission queue of servers; None = unbounded."""


@dataclass(frozen=True)
class ParallelConfig:
    """Processes and threads."""

    num_threads: int | None = None
    """Kernel threads; None = physical cores allowed by affinity and cgroup quota."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    distributed_executor_backend: Any = "uni"

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True)
class LoRAConfig:
    max_lora_rank: int = 16
    max_loras: int = 1
    max_cpu_loras: int = 1


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding. ``method``: ngram, suffix or draft_model."""

    method: str
    num_speculative_tokens: int
    model: str | None = None
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    adaptive: bool = True


@dataclass(frozen=True)
class StructuredOutputsConfig:
    backend: str = "guidance"
    compile_timeout_s: float = 5.0
    disable_any_whitespace: bool = False
    reasoning_parser: str | None = None


@dataclass(frozen=True)
class ObservabilityConfig:
    log_stats: bool = True
    otlp_traces_endpoint: str | None = None


@dataclass(frozen=True)
class EngineConfig:
    """Everything resolved. The only configuration object that is passed around."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig
    settings: Settings
    observability_config: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    structured_outputs_config: StructuredOutputsConfig = field(
        default_factory=StructuredOutputsConfig
    )
    lora_config: LoRAConfig | None = None
    speculative_config: SpeculativeConfig | None = None
    shutdown_timeout_s: float = 0.0
