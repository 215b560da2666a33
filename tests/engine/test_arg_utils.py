"""From arguments to a configuration: names, aliases, defaults, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tellin.config import EngineArgs, EngineConfig, SpeculativeConfig
from tellin.engine.arg_utils import apply_ready, create_engine_config
from tellin.exceptions import (
    InvalidParameterError,
    ModelNotFoundError,
    UnsupportedFeatureError,
)
from tellin.loading.model_metadata import ModelMetadata
from tellin.loading.tensors import ModelHParams
from tellin.protocol import EngineCoreReady
from tellin.settings import Settings

HPARAMS = ModelHParams("llama", 64, 128, 2, 4, 2, 16, 100, 512)


@pytest.fixture(autouse=True)
def metadata(monkeypatch: pytest.MonkeyPatch) -> ModelMetadata:
    made = ModelMetadata(
        path=Path("/models/m.gguf"),
        file_format="gguf",
        name="m",
        hparams=HPARAMS,
        num_bytes=1000,
        tokenizer_size=98,
        eos_token_ids=(2, 3),
        bos_token_id=1,
        chat_templates={"default": "{{ messages }}"},
        generation_defaults={"temperature": 0.6, "top_k": 20},
    )
    monkeypatch.setattr("tellin.loading.resolve_model", lambda *a, **k: made.path, raising=False)
    monkeypatch.setattr("tellin.loading.open_metadata", lambda path: made, raising=False)
    monkeypatch.setattr("tellin.loading.load_image_processor", lambda *paths: None, raising=False)
    return made


def create(**values: Any) -> EngineConfig:
    return create_engine_config(
        EngineArgs.from_dict({"model": "m", **values}), Settings.from_environ({})
    )


def test_no_seed_is_a_random_one() -> None:
    assert create().model_config.seed == create(seed=0).model_config.seed == 0
    seeds = {create(seed=None).model_config.seed for _ in range(3)}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    with pytest.raises(InvalidParameterError, match="seed"):
        create(seed="x")


def test_model_facts_and_defaults() -> None:
    config = create()
    model = config.model_config
    assert (model.architecture, model.vocab_size, model.tokenizer_size) == ("llama", 100, 98)
    assert (model.eos_token_ids, model.bos_token_id) == ((2, 3), 1)
    assert (model.max_model_len, model.auto_max_model_len) == (512, True)
    assert model.chat_template == "{{ messages }}"
    assert model.generation_defaults == {"temperature": 0.6, "top_k": 20}
    assert (model.served_model_name, model.runner_type) == ("m", "generate")
    assert config.scheduler_config.max_num_batched_tokens == 2048
    assert config.cache_config.block_size == 16
    assert config.parallel_config.distributed_executor_backend == "uni"
    assert config.lora_config is None
    assert config.speculative_config is None


@pytest.mark.parametrize(
    ("alias", "name", "value"),
    [
        ("gpu_memory_utilization", "memory_utilization", 0.5),
        ("num_gpu_blocks_override", "num_kv_blocks", 9),
    ],
)
def test_aliases(alias: str, name: str, value: Any) -> None:
    assert getattr(create(**{alias: value}).cache_config, name) == value
    assert getattr(create(**{name: value}).cache_config, name) == value
    assert getattr(create(**{name: value, alias: value}).cache_config, name) == value
    with pytest.raises(InvalidParameterError, match=f"{name}.*{alias}"):
        create(**{name: value, alias: value / 2})


def test_unknown_names_are_refused_with_a_hint() -> None:
    with pytest.raises(InvalidParameterError, match=r"'max_model_length'.*max_model_len\?"):
        create(max_model_length=5)
    with pytest.raises(UnsupportedFeatureError, match="quantization='awq'"):
        create(quantization="awq")
    create(enforce_eager=True, trust_remote_code=True, enable_sleep_mode=True)
    create(async_scheduling=True)


def test_engine_args_themselves_take_what_llm_takes() -> None:
    args = EngineArgs(
        "m",
        enforce_eager=True,  # type: ignore[call-arg]
        disable_log_requests=True,
        worker_cls="auto",
        max_num_seqs=None,  # type: ignore[arg-type]
        enable_chunked_prefill=None,  # type: ignore[arg-type]
        seed=None,
    )
    assert args == EngineArgs("m", seed=None)  # None is a seed: a random one
    with pytest.raises(InvalidParameterError, match=r"'max_num_seq'; did you mean max_num_seqs\?"):
        EngineArgs("m", max_num_seq=1)  # type: ignore[call-arg]
    with pytest.raises(UnsupportedFeatureError, match="write speculative_config"):
        EngineArgs("m", spec_method="ngram")  # type: ignore[call-arg]


def test_names_of_vllm_with_values_that_ask_for_nothing_are_accepted() -> None:
    create(quantization=None, revision=None, swap_space=0, tokenizer_mode="auto", device="cpu")
    create(load_format="auto", task="auto", hf_overrides={}, cpu_offload_gb=0.0)
    for name, bad, hint in (
        ("swap_space", 4, "recomputed"),
        ("task", "embed", "runner"),
        ("device", "cuda", "processor"),
        ("download_dir", "/tmp", "TELLIN_HOME"),
    ):
        with pytest.raises(UnsupportedFeatureError, match=f"{name}=.*{hint}"):
            create(**{name: bad})


def test_the_tokenizer_may_be_named_as_models_are(tmp_path: Path) -> None:
    assert create(tokenizer="smollm2").model_config.tokenizer_path == Path("/models/m.gguf")
    assert create(tokenizer=tmp_path).model_config.tokenizer_path == tmp_path
    assert create().model_config.tokenizer_path is None


def test_a_grammar_backend_that_is_not_there_is_refused() -> None:
    create(structured_outputs_config={"backend": "auto"})
    with pytest.raises(UnsupportedFeatureError, match=r"backend='xgrammar'.*llguidance"):
        create(structured_outputs_config={"backend": "xgrammar"})


def ngram(tokens: int = 2, **options: Any) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": tokens, **options}


def suffix(**options: Any) -> dict[str, Any]:
    return {"method": "suffix", **{f"suffix_decoding_{k}": v for k, v in options.items()}}


@pytest.mark.parametrize(
    ("given", "method", "num_tokens", "lookup"),
    [
        (ngram(), "ngram", 2, (5, 5)),
        (ngram(prompt_lookup_max=4), "ngram", 2, (4, 4)),
        (ngram(prompt_lookup_min=2, prompt_lookup_max=None), "ngram", 2, (2, 2)),
        (ngram(prompt_lookup_min=2, prompt_lookup_max=4), "ngram", 2, (2, 4)),
        ({"model": "[ngram]", "num_speculative_tokens": 3}, "ngram", 3, (5, 5)),
        ({"model": "m", "num_speculative_tokens": 3}, "draft_model", 3, (5, 5)),
        ({"method": "qwen3_next_mtp"}, "mtp", 1, (5, 5)),
        ({"method": "mtp", "num_speculative_tokens": None}, "mtp", 1, (5, 5)),
        ({"method": "mtp", "num_speculative_tokens": 3}, "mtp", 3, (5, 5)),
        ({"method": "mtp", "model": "m"}, "mtp", 1, (5, 5)),
        ({"method": "mimo_mtp", "model": "/models/../models/m.gguf"}, "mtp", 1, (5, 5)),
        (suffix(), "suffix", 24, (5, 5)),
        (suffix(max_tree_depth=6), "suffix", 6, (5, 5)),
        (suffix(max_tree_depth=600), "suffix", 128, (5, 5)),
    ],
)
def test_5_1_what_follows_of_a_speculative_config_may_be_left_out(
    given: dict[str, Any], method: str, num_tokens: int, lookup: tuple[int, int]
) -> None:
    """5.1.2, 5.1.4, 5.4.2."""
    spec = create(speculative_config=given).speculative_config
    assert spec is not None
    assert (spec.method, spec.num_speculative_tokens) == (method, num_tokens)
    assert (spec.prompt_lookup_min, spec.prompt_lookup_max) == lookup
    assert spec.model == ("m" if method == "draft_model" else None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OUTPUT_CHUNK_SIZE", "0"),
        ("MAX_N_SEQUENCES", "0"),
        ("MSGPACK_ZERO_COPY_THRESHOLD", "-1"),
        ("SHUTDOWN_TIMEOUT_S", "nan"),
        ("ENGINE_READY_TIMEOUT_S", "-1"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"TELLIN_{name} must be at least"):
        Settings.from_environ({f"TELLIN_{name}": value})


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("block_size", [8, 24, "16"]),
        ("memory_utilization", [0, 1.5, float("nan"), True]),
        ("num_kv_blocks", [1, 2.5]),
        ("kv_cache_dtype", ["fp8"]),
        ("max_num_seqs", [0, True]),
        ("max_num_batched_tokens", [0, 16]),
        ("stream_interval", [0]),
        ("max_model_len", [0, 513, 1.5]),
        ("max_logprobs", [-2]),
        ("logprobs_mode", ["raw"]),
        ("scheduling_policy", ["lifo"]),
        ("generation_config", ["file"]),
        ("backend", ["cuda"]),
        ("activation_precision", ["low"]),
        ("num_threads", [0]),
        ("runner", ["draft"]),
        ("speculative_config", [{"method": "eagle", "num_speculative_tokens": 1}, {"metod": 1}, 5]),
        (
            "speculative_config.prompt_lookup_max",
            [
                ngram(prompt_lookup_min=3, prompt_lookup_max=2),
                ngram(prompt_lookup_min=1, prompt_lookup_max="x"),
            ],
        ),
        ("speculative_config.prompt_lookup_min", [ngram(prompt_lookup_min=0)]),
        ("speculative_config.prompt_lookup_policy", [ngram(prompt_lookup_policy="latest")]),
        ("speculative_config.adaptive", [ngram(adaptive=1)]),
        (
            "speculative_config.suffix_decoding_max_tree_depth",
            [suffix(max_tree_depth=0), suffix(max_tree_depth="x")],
        ),
        (
            "speculative_config.suffix_decoding_max_cached_requests",
            [suffix(max_cached_requests=-1)],
        ),
        ("speculative_config.suffix_decoding_max_spec_factor", [suffix(max_spec_factor=-1)]),
        ("speculative_config.suffix_decoding_min_token_prob", [suffix(min_token_prob=1.5)]),
        ("speculative_config.method", [{"num_speculative_tokens": 2}]),
        ("speculative_config.num_speculative_tokens", [{"method": "ngram"}, ngram(tokens=0)]),
        ("structured_outputs_config", [{"nope": 1}]),
        ("structured_outputs_config.compile_timeout_s", [{"compile_timeout_s": 0}]),
        ("structured_outputs_config.disable_any_whitespace", [{"disable_any_whitespace": "x"}]),
        ("data_parallel_rank", [-1, 1]),
        ("kv_events_replay_endpoint", ["tcp://*:5558"]),
        ("chat_template", ["/no/such/file.jinja"]),
    ],
)
def test_bad_values_are_refused_by_name(name: str, bad: list[Any]) -> None:
    for value in bad:
        with pytest.raises(InvalidParameterError) as info:
            create(**{name.partition(".")[0]: value})
        assert name in str(info.value)


@pytest.mark.parametrize("sizes", [5, "64", [0], ["64"]])
def test_bad_sizes_of_embeddings_are_refused_by_name(sizes: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"config\.matryoshka_dimensions must be"):
        create(runner="pooling", pooler_config={"matryoshka_dimensions": sizes})


@pytest.mark.parametrize(
    "values",
    [
        {"dtype": "bfloat16"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"pooler_config": {"pooling_type": "CLS"}},
        {"lora_extra_vocab_size": 256},
        {"reasoning_parser": "think"},
        {"structured_outputs_config": {"reasoning_parser": "think"}},
    ],
)
def test_what_cannot_be_done_is_said(values: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFeatureError, match=next(iter(values))):
        create(**values)


def test_context_length() -> None:
    for given, expected in ((100, (100, False)), (-1, (512, True)), (None, (512, True))):
        model = create(max_model_len=given).model_config
        assert (model.max_model_len, model.auto_max_model_len) == expected
    ready = EngineCoreReady("t", 300, num_kv_blocks=20, block_size=16, dtype="auto")
    config = apply_ready(create(), ready)
    assert config.model_config.max_model_len == 300
    assert config.scheduler_config.max_model_len == 300
    assert config.cache_config.num_kv_blocks == 20


def test_generation_defaults() -> None:
    assert create(generation_config="none").model_config.generation_defaults == {}
    override = {"override_generation_config": {"temperature": 0.1, "max_new_tokens": 9}}
    assert create(**override).model_config.generation_defaults == {
        "temperature": 0.1,
        "top_k": 20,
        "max_tokens": 9,
    }


def test_chat_template_text_or_file(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ from_file }}")
    assert create(chat_template=str(file)).model_config.chat_template == "{{ from_file }}"
    assert create(chat_template="{{ text }}").model_config.chat_template == "{{ text }}"


def test_nested_configs() -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 4}
    assert create(speculative_config=speculative).speculative_config == SpeculativeConfig(
        "ngram", 4
    )
    config = create(structured_outputs_config={"disable_any_whitespace": True})
    assert config.structured_outputs_config.disable_any_whitespace
    draft = {"method": "draft_model", "num_speculative_tokens": 4}
    with pytest.raises(InvalidParameterError, match="model"):
        create(speculative_config=draft)
    with pytest.raises(InvalidParameterError, match="num_speculative_tokens"):
        create(speculative_config={"method": "ngram"})


def test_batched_tokens_default_suits_the_other_limits() -> None:
    assert create(max_num_seqs=4000).scheduler_config.max_num_batched_tokens == 4000


def test_missing_model() -> None:
    with pytest.raises(InvalidParameterError, match="model is missing"):
        create_engine_config(EngineArgs())


def test_a_home_of_nobody_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users without an entry are usual in containers; with a TELLIN_HOME they need none."""
    with pytest.raises(InvalidParameterError, match=r"no folder for models: .* Set TELLIN_HOME"):
        Settings.from_environ({"TELLIN_HOME": "~nobody-here/models"})
    monkeypatch.setattr("pathlib.Path.expanduser", _no_home)
    with pytest.raises(InvalidParameterError, match=r"no folder for models: .* Set TELLIN_HOME"):
        Settings.from_environ({})
    monkeypatch.undo()
    assert Settings.from_environ({"TELLIN_HOME": "/models"}).home == Path("/models")
    assert Settings.from_environ({"HOME": "/h"}).home == Path("/h/.cache/tellin")
    assert Settings.from_environ({"XDG_CACHE_HOME": "/c"}).home == Path("/c/tellin")


def _no_home(path: Path) -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_settings_give_the_number_of_threads() -> None:
    settings = Settings.from_environ({"TELLIN_NUM_THREADS": "3"})
    args = EngineArgs(model="m")
    assert create_engine_config(args, settings).parallel_config.num_threads == 3
    args = EngineArgs(model="m", num_threads=1)
    assert create_engine_config(args, settings).parallel_config.num_threads == 1


def test_unknown_model_names_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: str, settings: Settings, download: bool) -> Path:
        raise ModelNotFoundError(f"{name} {download}")

    monkeypatch.setattr("tellin.loading.resolve_model", resolve, raising=False)
    with pytest.raises(ModelNotFoundError, match="nope True"):
        create_engine_config(EngineArgs(model="nope", download=True))
