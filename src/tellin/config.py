"""Configuration: what the user may say (`EngineArgs`), and what every part reads (`EngineConfig`).

All classes are frozen. `EngineArgs` holds raw wishes, with the reference system's names and ours;
`tellin.engine.arg_utils.create_engine_config` opens the model's metadata and resolves them into one
`EngineConfig`. Parts that learn better values later (the core may lower ``max_model_len`` to what
memory allows) replace the config with `dataclasses.replace`; nobody mutates it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tellin.exceptions import InvalidParameterError, UnsupportedFeatureError
from tellin.settings import Settings


@dataclass(frozen=True)
class PoolerConfig:
    """How an embedding is made of hidden states: as the model's files say, or the user."""

    pooling_type: str = "LAST"
    """LAST or CLS (the last or the first token's state) or MEAN (of all tokens)."""
    use_activation: bool = True
    """Scale embeddings to L2 norm 1, unless a request says otherwise."""
    is_matryoshka: bool = False
    """The model was trained to have its embeddings cut short (``dimensions``)."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """Lengths that are allowed; empty = all."""
    max_seq_length: int | None = None
    """Longest input the embeddings were made for, in tokens; None = the model's context."""
    num_labels: int = 0
    """Scores that a classifier gives a text, or a cross-encoder a pair (1); 0 = it embeds."""
    labels: tuple[str, ...] = ()
    """Names of a classifier's classes; empty = LABEL_0, LABEL_1, ..."""
    score_activation: str = "auto"
    """What makes scores of a classifier's logits: sigmoid, softmax or none; auto = sigmoid for one
    label, softmax for several."""
    embedding_size: int | None = None
    """Numbers of an embedding behind the dense layers that follow the pooling; None = there are no
    such layers, and it is as long as a hidden state."""


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
    """Of quantised weights' inputs: default, high (int16), int8, mixed, int16 or float32."""
    backend: str = "native"
    """``native`` or ``reference``."""
    tokenizer_path: Path | None = None
    """File or folder of the tokenizer; None = ``path``."""
    pooler_config: PoolerConfig | None = None
    """None = the engine does not pool. With ``runner_type`` ``generate`` it does both."""
    own_chat_template: str | None = None
    """The user's template; None = the model's, of which it may have several."""
    enable_prompt_embeds: bool = False
    """Prompts may be rows of embeddings in the place of tokens."""


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
    """Exact size of the pool in bytes, with a recurrent model's states; wins over
    ``memory_utilization``."""
    kv_cache_dtype: str = "auto"
    """auto (float16), float32, float16, int16 or int8."""
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256"
    enable_kv_cache_events: bool = False
    kv_cache_metrics_sample: float = 0.01
    kv_events_endpoint: str | None = None
    """ZeroMQ endpoint on which KV events are published, e.g. ``tcp://*:5557``; None = nowhere."""
    kv_events_replay_endpoint: str | None = None
    """Endpoint at which a subscriber asks for events it missed."""
    kv_events_topic: str = ""


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
    max_long_partial_prefills: int = 0
    """Most prompts over ``long_prefill_token_threshold`` in progress at once; 0 = no limit."""
    max_num_partial_prefills: int = 0
    """Most prompts that a step may leave unfinished; 0 = no limit."""
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
    """Adapters, several of which may be used at once beside the base model."""

    max_lora_rank: int = 16
    max_loras: int = 1
    """Most adapters in one step."""
    max_cpu_loras: int = 1
    """Most adapters that are kept loaded; those that live requests need do not count."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding. ``method``: ngram, suffix, draft_model or mtp."""

    method: str
    num_speculative_tokens: int
    model: str | None = None
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    adaptive: bool = True
    prompt_lookup_policy: str = "earliest"
    """Which occurrence of the longest match counts: earliest or most_recent."""
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    @property
    def has_weights(self) -> bool:
        """Whether what drafts computes: it takes time, and writes into KV blocks."""
        return self.method in ("draft_model", "mtp")


@dataclass(frozen=True)
class StructuredOutputsConfig:
    backend: str = "guidance"
    compile_timeout_s: float = 5.0
    disable_any_whitespace: bool = False
    reasoning_parser: str | None = None
    enable_in_reasoning: bool = False
    """Constrain a model's thoughts too, not only its answer (see `ReasoningConfig`)."""


@dataclass(frozen=True)
class ReasoningConfig:
    """Where a thinking model's thoughts begin and end.

    With it requests may have a ``thinking_token_budget``, and structured outputs constrain only
    what comes after the thoughts. The ids follow from the texts unless they are given.
    """

    think_start_str: str = "<think>"
    think_end_str: str = "</think>"
    think_start_token_ids: tuple[int, ...] = ()
    think_end_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class MultiModalConfig:
    """Images in prompts. An engine without it takes text only, and loads no encoder."""

    limit_per_prompt: Mapping[str, int]
    """Most items of each modality in one prompt."""
    max_tokens_per_item: int
    """Most rows that the encoder makes of one item."""
    encoder_cache_size: int
    """Rows of encoder outputs that are kept."""
    processor_cache_gb: float = 1.0
    """Processed items that are kept for prompts to come, in GiB; 0 = none."""
    allowed_local_media_path: Path | None = None
    """Folder whose files ``file:`` URLs may name; None = no such URL is read."""
    mmproj: Path | None = None
    """File that holds the encoder of a GGUF model; None = where the model is."""
    max_rows_per_step: int | None = None
    """Most rows of items that one step computes; a part of an item (a tile) always is; None = no
    limit."""
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the image processor in the place of the model's."""
    rows_see_each_other: bool = False
    """Rows of a part of an item are attended to by each other, also those behind: a step computes
    all of them or none."""


@dataclass(frozen=True)
class ObservabilityConfig:
    log_stats: bool = True
    otlp_traces_endpoint: str | None = None
    metrics_prefix: str = "tellin:"


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
    reasoning_config: ReasoningConfig | None = None
    multimodal_config: MultiModalConfig | None = None
    """None = prompts are text only."""


class _EngineArgsMeta(type):
    """Construction takes what vLLM's takes: see `EngineArgs`."""

    if not TYPE_CHECKING:  # checkers and editors are to see the constructor itself

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **_accepted_engine_args(kwargs))


@dataclass(frozen=True)
class EngineArgs(metaclass=_EngineArgsMeta):
    """What a user may say about an engine: vLLM's names, and ours.

    Values are checked where they are resolved (`tellin.engine.arg_utils.create_engine_config`).
    Names that speak of a GPU are accepted as aliases: ``gpu_memory_utilization`` for
    ``memory_utilization``, ``num_gpu_blocks_override`` for ``num_kv_blocks``. None stands for the
    default of what cannot be None. Names of vLLM's that need nothing here are taken and forgotten.

    Raises (at construction):
        InvalidParameterError: unknown name (the message has the nearest known one) or contradicting
            aliases.
        UnsupportedFeatureError: a name that vLLM knows for something this engine cannot do.
    """

    model: str | Path = ""
    """A ``.gguf`` file, a safetensors folder, the name of a pulled model, or a hub repo id."""
    tokenizer: str | Path | None = None
    """File or folder with the tokenizer; None = the model's own."""
    skip_tokenizer_init: bool = False
    """Prompts are token ids and outputs have no text."""
    download: bool = False
    """Pull the model first if it is not in the model store."""
    served_model_name: str | None = None
    """Name of the model in metrics and in the API; None = ``model``."""
    runner: str = "auto"
    """generate, pooling (embeddings, of any model), both, or auto: what the model is made for."""
    pooler_config: dict[str, Any] | PoolerConfig | None = None
    """How to pool, where the model's files say nothing or are to be overruled."""
    dtype: str = "auto"
    """auto or float32: weights stay as stored, activations are float32."""
    seed: int | None = 0
    """Seed of requests that have none is drawn from this engine's seed; None = a random one."""
    max_model_len: int | None = None
    """Longest prompt + output in tokens; None = the model's, lowered to what memory allows; -1 =
    the most that memory allows."""
    max_logprobs: int = 20
    """Largest number of logprobs that a request may ask for; -1 = the vocabulary."""
    logprobs_mode: str = "raw_logprobs"
    chat_template: str | None = None
    """A Jinja template, or a file that holds one; None = the model's."""
    generation_config: str = "auto"
    """auto = use the sampling defaults shipped with the model; none (or vllm) = plain defaults."""
    override_generation_config: dict[str, Any] | None = None
    """Sampling defaults on top of those."""
    logits_processors: list[Any] | None = None
    """Engine-wide logits processor classes, or ``module:Class`` names."""
    activation_precision: str = "default"
    """Of quantised weights' inputs: default, high (int16), int8, mixed, int16 or float32."""
    backend: str = "native"
    """native (C++ kernels) or reference (NumPy: slow, for comparison)."""

    block_size: int = 16
    num_kv_blocks: int | None = None
    memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256"
    enable_kv_cache_events: bool = False
    kv_cache_metrics_sample: float = 0.01
    kv_events_endpoint: str | None = None
    """ZeroMQ endpoint on which KV cache events are published, e.g. ``tcp://*:5557``."""
    kv_events_replay_endpoint: str | None = None
    """ZeroMQ endpoint at which a subscriber asks for events it missed."""
    kv_events_topic: str = ""

    max_num_batched_tokens: int | None = None
    """Most tokens computed in one step; None = 2048, at least one block, at most what is useful."""
    max_num_seqs: int = 128
    """Most requests computed at once."""
    scheduling_policy: str = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_long_partial_prefills: int = 0
    max_num_partial_prefills: int = 0
    stream_interval: int = 1
    """Tokens between two streamed outputs."""
    watermark: float = 0.0
    max_num_queued_reqs: int | None = None

    num_threads: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    distributed_executor_backend: Any = None
    """uni, mp, ray, an executor class, or its import path; None = uni."""

    enable_lora: bool = False
    """Accept LoRA adapters, per request."""
    max_loras: int = 1
    """Most LoRA adapters in one step."""
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    """Most LoRA adapters that are kept loaded; None = ``max_loras``."""

    limit_mm_per_prompt: dict[str, Any] | None = None
    """Most images in one prompt: ``{"image": 4}``; 0 = the model's image encoder is not loaded.
    None = 999."""
    mm_processor_cache_gb: float = 1.0
    """Processed images that are kept for prompts to come, in GiB; 0 = none."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Settings of the image processor in the place of the model's: ``{"size": {"longest_edge":
    1024}}`` makes fewer tiles of an image."""
    mmproj: str | Path | None = None
    """The ``mmproj-*.gguf`` file with the image encoder of a GGUF model; None = the one that lies
    beside the model, if there is one."""
    allowed_local_media_path: str | Path | None = None
    """Folder from which ``file:`` URLs of images may be read; None = from nowhere."""
    enable_prompt_embeds: bool = False
    """Take prompts as embeddings too: ``{"prompt_embeds": [num_tokens, hidden_size] array}``."""

    speculative_config: dict[str, Any] | SpeculativeConfig | None = None
    structured_outputs_config: dict[str, Any] | StructuredOutputsConfig | None = None
    reasoning_config: dict[str, Any] | ReasoningConfig | None = None
    """Markers of a thinking model's thoughts; ``{}`` = ``<think>`` and ``</think>``."""

    disable_log_stats: bool = False
    otlp_traces_endpoint: str | None = None
    metrics_prefix: str = "tellin:"
    """Prefix of metric names; ``vllm:`` suits dashboards made for vLLM."""
    shutdown_timeout_s: float = 0.0
    """Seconds that live requests get to finish at shutdown; 0 = they are aborted."""

    gpu_memory_utilization: float | None = None
    num_gpu_blocks_override: int | None = None

    def __post_init__(self) -> None:
        for alias, name in ENGINE_ARG_ALIASES.items():
            given, canonical = getattr(self, alias), getattr(self, name)
            if given is not None and canonical is not None and given != canonical:
                raise InvalidParameterError(
                    f"{name}={canonical!r} and its alias {alias}={given!r} contradict each other; "
                    f"give {name} only",
                    parameter=name,
                    value=canonical,
                )
            if given is not None:
                object.__setattr__(self, name, given)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineArgs:
        """From names and values given by a user. Raises as the constructor."""
        return cls(**values)


ENGINE_ARG_ALIASES = {
    "gpu_memory_utilization": "memory_utilization",
    "num_gpu_blocks_override": "num_kv_blocks",
}

ENGINE_ARGS_WITHOUT_EFFECT = frozenset(
    {
        "async_scheduling",
        "disable_custom_all_reduce",
        "disable_log_requests",
        "enable_sleep_mode",
        "enforce_eager",
        "mamba_block_size",
        "mamba_cache_mode",
        "max_seq_len_to_capture",
        "trust_remote_code",
    }
)
"""Names from vLLM that need nothing here, whatever the value: there are no captured graphs, no
ranks that reduce and no device to run ahead of, an engine can always sleep, a model's code is never
run, requests are not logged, and snapshots of recurrent states lie where prefixes end and fork."""

UNSUPPORTED_ENGINE_ARGS = {
    "attention_config": "there is one kernel, chosen for the processor; TELLIN_ISA forces another",
    "config_format": "the file says what it is",
    "enable_expert_parallel": "one process uses all cores",
    "enable_log_requests": "what requests say is never logged",
    "fully_sharded_loras": "one process uses all cores",
    "hf_token": "the environment variable HF_TOKEN is read when a model is pulled",
    "kv_events_config": "say where to publish with kv_events_endpoint",
    "mamba_cache_dtype": "recurrent states are float32",
    "mamba_ssm_cache_dtype": "recurrent states are float32",
    "model_impl": "there is one implementation of each architecture",
    "profiler_config": "start_profile() and stop_profile() need none",
    "rope_scaling": "edit config.json instead",
    "rope_theta": "edit config.json instead",
    "scheduler_cls": "there is one scheduler; see scheduling_policy",
    "spec_method": "write speculative_config={'method': ..., 'num_speculative_tokens': ...}",
    "spec_model": "write speculative_config={'method': 'draft_model', 'model': ...}",
    "spec_tokens": "write speculative_config={..., 'num_speculative_tokens': ...}",
    "worker_cls": "give an executor of your own as distributed_executor_backend",
    "lora_extra_vocab_size": "adapters cannot add tokens",
    "reasoning_parser": "say where thoughts begin and end with reasoning_config",
    "quantization": "leave it out: a checkpoint says itself how it is quantised",
    "cpu_offload_gb": "weights already live in main memory",
    "swap_space": "preempted requests are recomputed, not swapped",
    "hf_overrides": "edit config.json instead",
    "revision": "name a local folder or file instead",
    "tokenizer_revision": "name a local folder or file instead",
    "tokenizer_mode": "the tokenizer is chosen by the file",
    "kv_transfer_config": "external KV stores are not connected",
    "compilation_config": "nothing is compiled at run time",
    "attention_backend": "there is one, chosen for the processor; TELLIN_ISA forces its variant",
    "convert": "say what the model is to do with runner",
    "device": "kernels run on the processor",
    "download_dir": "models live in the folder that TELLIN_HOME names",
    "guided_decoding_backend": "grammars are compiled by llguidance",
    "load_format": "the file says what it is",
    "task": "say what the model is to do with runner: generate, pooling or both",
}
"""Names from vLLM for what this engine does not do, and why or what else to write."""

_NEUTRAL_ENGINE_ARGS: Mapping[str, tuple[Any, ...]] = {
    "attention_config": ({},),
    "compilation_config": ({},),
    "config_format": ("auto",),
    "convert": ("auto",),
    "cpu_offload_gb": (0,),
    "device": ("auto", "cpu"),
    "enable_expert_parallel": (False,),
    "enable_log_requests": (False,),
    "fully_sharded_loras": (False,),
    "hf_overrides": ({},),
    "load_format": ("auto",),
    "mamba_cache_dtype": ("auto", "float32"),
    "mamba_ssm_cache_dtype": ("auto", "float32"),
    "model_impl": ("auto",),
    "reasoning_parser": ("",),
    "swap_space": (0,),
    "task": ("auto",),
    "tokenizer_mode": ("auto",),
    "worker_cls": ("auto",),
}
"""Values of those names that ask for what happens anyway; None always does."""


def _accepted_engine_args(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are fields, without those that ask for what happens anyway."""
    known = {item.name: "None" in str(item.type) for item in fields(EngineArgs)}
    accepted = {}
    for name, value in given.items():
        if name in known:
            if value is not None or known[name]:
                accepted[name] = value
        elif name not in ENGINE_ARGS_WITHOUT_EFFECT and not _asks_for_nothing(name, value):
            _raise_unknown_engine_arg(name, value, set(known))
    return accepted


def _asks_for_nothing(name: str, value: Any) -> bool:
    if name not in UNSUPPORTED_ENGINE_ARGS:
        return False
    return value is None or value in _NEUTRAL_ENGINE_ARGS.get(name, ())


def _raise_unknown_engine_arg(name: str, value: Any, known: set[str]) -> NoReturn:
    if name in UNSUPPORTED_ENGINE_ARGS:
        raise UnsupportedFeatureError(
            f"engine argument {name}={value!r} is not supported: {UNSUPPORTED_ENGINE_ARGS[name]}"
        )
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise InvalidParameterError(
        f"unknown engine argument {name!r}{hint}", parameter=name, value=value
    )
