"""Tiny models of every architecture, with random weights made in memory in a millisecond.

Weights come from NumPy's frozen `RandomState` stream, so the script that stores golden logits and
the tests make the same ones. The module imports nothing that a machine with PyTorch may lack.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tellin.loading.latent import with_latents, yarn_mscale
from tellin.loading.tensors import (
    LatentAttention,
    ModelHParams,
    QuantType,
    RopeScaling,
    TensorRef,
)

VOCAB_SIZE = 64
NUM_TOKENS = 20
"""More than twice the sliding window."""

BASE = ModelHParams(
    architecture="llama",
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=128,
    norm_eps=1e-5,
)
GEMMA = replace(
    BASE,
    hidden_act="gelu_tanh",
    tie_word_embeddings=True,
    embedding_scale=8.0,
    norm_weight_offset=1.0,
    norm_eps=1e-6,
)
SHORT_FACTORS = (1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 1.9, 2.0)
LONG_FACTORS = (1.0, 1.3, 1.9, 2.6, 3.7, 5.0, 7.0, 9.0)


def _rope(kind: str, **values: object) -> ModelHParams:
    return replace(BASE, rope_scaling=RopeScaling(kind, **values))  # type: ignore[arg-type]


def _longrope(original: int) -> RopeScaling:
    return RopeScaling(
        "longrope",
        original_max_position_embeddings=original,
        factors=SHORT_FACTORS,
        long_factors=LONG_FACTORS,
    )


CASES: dict[str, ModelHParams] = {
    "llama": BASE,
    "llama_tied": replace(BASE, tie_word_embeddings=True),
    "llama_biases": replace(BASE, attention_bias=True, mlp_bias=True),
    "llama_rope_linear": _rope("linear", factor=4.0),
    "llama_rope_llama3": _rope(
        "llama3", factor=8.0, original_max_position_embeddings=32, high_freq_factor=4.0
    ),
    "llama_rope_yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=32),
    "mistral": replace(BASE, architecture="mistral", sliding_window=8),
    "gemma": replace(GEMMA, architecture="gemma"),
    "gemma2": replace(
        GEMMA,
        architecture="gemma2",
        sliding_window=8,
        sliding_window_pattern=2,
        attention_scale=24**-0.5,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "granite": replace(
        BASE,
        architecture="granite",
        attention_scale=0.125,
        embedding_scale=3.0,
        residual_scale=0.5,
        logit_scale=2.0,
    ),
    "gemma3": replace(
        GEMMA,
        architecture="gemma3",
        sliding_window=8,
        sliding_window_pattern=3,
        attention_scale=24**-0.5,
        rope_theta=1000000.0,
        rope_local_theta=10000.0,
        rope_scaling=RopeScaling("linear", factor=2.0),
    ),
    "glm4": replace(
        BASE, architecture="glm4", attention_bias=True, rope_dim=8, rope_interleaved=True
    ),
    "olmo2": replace(BASE, architecture="olmo2"),
    "olmo3": replace(
        BASE,
        architecture="olmo3",
        sliding_window=8,
        sliding_window_pattern=3,
        rope_theta=500000.0,
        rope_local_theta=500000.0,
        rope_scaling=RopeScaling("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "smollm3": replace(BASE, architecture="smollm3", num_hidden_layers=4, no_rope_interval=4),
    "phi3": replace(BASE, architecture="phi3", sliding_window=8),
    "phi3_longrope_short": replace(BASE, architecture="phi3", rope_scaling=_longrope(64)),
    "phi3_longrope_long": replace(BASE, architecture="phi3", rope_scaling=_longrope(16)),
    "phi3_partial": replace(BASE, architecture="phi3", rope_dim=12),
    "qwen2": replace(BASE, architecture="qwen2"),
    "qwen3": replace(BASE, architecture="qwen3", head_dim=32),
    "bert": replace(
        BASE,
        architecture="bert",
        num_key_value_heads=4,
        hidden_act="gelu",
        norm_eps=1e-12,
        max_position_embeddings=40,
    ),
}
EXPERTS = replace(
    BASE,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    norm_topk_prob=True,
    norm_eps=1e-6,
)
EXPERT_CASES: dict[str, ModelHParams] = {
    "mixtral": replace(EXPERTS, architecture="mixtral", moe_intermediate_size=96, norm_eps=1e-5),
    "mixtral_window": replace(
        EXPERTS, architecture="mixtral", moe_intermediate_size=96, sliding_window=8
    ),
    "qwen3moe": replace(EXPERTS, architecture="qwen3moe", head_dim=32, num_experts_per_tok=3),
    "qwen3moe_some_dense": replace(
        EXPERTS, architecture="qwen3moe", norm_topk_prob=False, attention_bias=True
    ),
    "olmoe": replace(
        EXPERTS,
        architecture="olmoe",
        intermediate_size=32,
        norm_topk_prob=False,
        num_key_value_heads=4,
    ),
    "qwen2moe": replace(EXPERTS, architecture="qwen2moe", norm_topk_prob=False),
    "glm4moe": replace(
        EXPERTS,
        architecture="glm4moe",
        rope_dim=8,
        attention_bias=True,
        expert_scoring="sigmoid",
        expert_scale=1.5,
    ),
    "glm4moe_head_norms": replace(
        EXPERTS, architecture="glm4moe", head_dim=32, rope_dim=16, expert_scoring="sigmoid"
    ),
    "ernie": replace(
        EXPERTS,
        architecture="ernie4_5-moe",
        rope_interleaved=True,
        tie_word_embeddings=True,
        rope_theta=500000.0,
    ),
    "gpt_oss": replace(
        EXPERTS,
        architecture="gpt-oss",
        hidden_act="swiglu_oai",
        attention_bias=True,
        mlp_bias=True,
        intermediate_size=32,
        sliding_window=8,
        sliding_window_pattern=2,
        rope_theta=150000.0,
        rope_scaling=RopeScaling(
            "yarn", factor=4.0, original_max_position_embeddings=32, truncate=False
        ),
    ),
    "granitemoe": replace(
        EXPERTS,
        architecture="granitemoe",
        intermediate_size=32,
        attention_scale=0.125,
        embedding_scale=3.0,
        residual_scale=0.5,
        logit_scale=2.0,
    ),
}
"""Mixtures of experts."""
LATENT = LatentAttention(rank=32, nope_dim=16, rope_dim=8, value_dim=16)
DEEPSEEK = replace(EXPERTS, architecture="deepseek2", rope_interleaved=True, num_experts=8)
_MSCALE = yarn_mscale(4.0, 0.7)
LATENT_CASES: dict[str, ModelHParams] = {
    "deepseek_v2": with_latents(
        replace(
            DEEPSEEK,
            norm_topk_prob=False,
            rope_scaling=RopeScaling(
                "yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.0
            ),
        ),
        LATENT,
        _MSCALE,
    ),
    "deepseek_v2_groups": with_latents(
        replace(DEEPSEEK, norm_topk_prob=False, expert_groups=4, expert_top_groups=2), LATENT, 1.0
    ),
    "deepseek_v3": with_latents(
        replace(
            DEEPSEEK,
            num_experts_per_tok=3,
            expert_scoring="sigmoid",
            expert_scale=2.5,
            expert_groups=4,
            expert_top_groups=2,
        ),
        replace(LATENT, rank=48, value_dim=32),
        1.0,
    ),
    "glm4_moe_lite": with_latents(
        replace(DEEPSEEK, expert_scoring="sigmoid", expert_scale=1.8),
        replace(LATENT, nope_dim=24),
        1.0,
    ),
}
"""Multi-head latent attention."""
ALL_CASES: dict[str, ModelHParams] = CASES | EXPERT_CASES | LATENT_CASES
DENSE_LAYERS: Mapping[str, tuple[int, ...]] = {
    "qwen3moe_some_dense": (0, 2),
    "glm4moe": (0,),
    "glm4moe_head_norms": (0,),
    "ernie": (0,),
    **dict.fromkeys(LATENT_CASES, (0,)),
}
"""Layers without experts."""
Q_RANK = 32
"""Of queries' latents, in models that score experts by sigmoids."""
SHARED_WIDTH = 64
"""Of shared experts: two, where they are counted in experts."""
WITH_SHARED_EXPERTS = ("deepseek2", "ernie4_5-moe", "glm4moe", "qwen2moe")
MAX_MODEL_LEN: Mapping[str, int] = {"phi3_longrope_short": 64}


@dataclass(frozen=True)
class MemorySource:
    """A model that lies in memory: what `build_plan` needs of a `ModelSource`."""

    hparams: ModelHParams
    tensors: dict[str, TensorRef]
    path: Path = Path("tiny")


def tensor_shapes(
    hp: ModelHParams, dense_layers: tuple[int, ...] = ()
) -> dict[str, tuple[int, ...]]:
    """Canonical name and shape of every tensor of an architecture."""
    return _bert_shapes(hp) if hp.architecture == "bert" else _decoder_shapes(hp, dense_layers)


def tiny_arrays(name: str) -> dict[str, np.ndarray]:
    """Float32 weights of a case, by canonical name."""
    hp = ALL_CASES[name]
    random = np.random.RandomState(zlib.crc32(name.encode()))
    arrays = {}
    for tensor, shape in tensor_shapes(hp, DENSE_LAYERS.get(name, ())).items():
        values = random.standard_normal(shape)
        if "norm" in tensor and tensor.endswith(".weight"):
            values = 1 - hp.norm_weight_offset + 0.2 * values
        elif tensor.endswith("selection.bias"):
            values = 0.1 * values
        elif len(shape) == 2 and not tensor.startswith("embed"):
            values = 1.3 * values / np.sqrt(shape[1])
        arrays[tensor] = values.astype(np.float32)
    return arrays


def tiny_source(name: str) -> MemorySource:
    """Case ``name`` as a source of float32 tensors."""
    return memory_source(ALL_CASES[name], tiny_arrays(name))


def memory_source(hparams: ModelHParams, arrays: Mapping[str, np.ndarray]) -> MemorySource:
    """A source of float32 tensors."""
    return MemorySource(hparams, {k: float_tensor(k, v) for k, v in arrays.items()})


def float_tensor(name: str, values: np.ndarray) -> TensorRef:
    """A float32 tensor over ``values``."""
    data = np.ascontiguousarray(values, dtype=np.float32).reshape(-1).view(np.uint8)
    return TensorRef(name, values.shape, QuantType.F32, data)


def tiny_token_ids(num_tokens: int = NUM_TOKENS) -> np.ndarray:
    """The prompt of the golden logits."""
    return np.random.RandomState(7).randint(0, VOCAB_SIZE, num_tokens).astype(np.int32)


def _decoder_shapes(hp: ModelHParams, dense_layers: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    hidden, inner = hp.hidden_size, hp.intermediate_size
    q, kv = hp.num_attention_heads * hp.head_dim, hp.num_key_value_heads * hp.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (hp.vocab_size, hidden)}
    for i in range(hp.num_hidden_layers):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        linears = {
            f"{attention}.q_proj": (q, hidden),
            f"{attention}.k_proj": (kv, hidden),
            f"{attention}.v_proj": (kv, hidden),
            f"{attention}.o_proj": (hidden, q),
        }
        if hp.latent is not None:
            linears = _latent_shapes(hp, attention, hp.expert_scoring == "sigmoid")
        if hp.num_experts and i not in dense_layers:
            linears |= _expert_shapes(hp, mlp)
        else:
            linears |= _mlp_shapes(mlp, hidden, inner)
        biased = set()
        if hp.attention_bias:
            parts = "qkv" if hp.architecture.startswith("glm4") else "qkvo"
            biased |= {f"{attention}.{p}_proj" for p in parts}
        if hp.mlp_bias:
            biased |= {name for name in linears if name.startswith(mlp)}
        if hp.architecture in ("qwen2", "qwen2moe"):
            biased |= {f"{attention}.{p}_proj" for p in "qkv"}
        for name, shape in linears.items():
            if name.endswith(".selection"):
                shapes[f"{name}.bias"] = shape
                continue
            shapes[f"{name}.weight"] = shape
            if name in biased:
                shapes[f"{name}.bias"] = shape[:1]
        norms = ["input_layernorm", "post_attention_layernorm"]
        if hp.architecture in ("gemma2", "gemma3", "glm4"):
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        elif hp.architecture in ("olmo2", "olmo3"):
            norms = ["post_attention_layernorm", "post_feedforward_layernorm"]
        shapes |= {f"layers.{i}.{norm}.weight": (hidden,) for norm in norms}
        if hp.latent is not None:
            shapes[f"{attention}.kv_a_layernorm.weight"] = (hp.latent.rank,)
            if f"{attention}.q_a_proj" in linears:
                shapes[f"{attention}.q_a_layernorm.weight"] = (Q_RANK,)
        has_head_norms = hp.architecture == "glm4moe" and not hp.attention_bias
        if has_head_norms or hp.architecture in ("qwen3", "qwen3moe", "gemma3"):
            shapes |= {f"{attention}.{p}_norm.weight": (hp.head_dim,) for p in "qk"}
        if hp.architecture == "gpt-oss":
            shapes[f"{attention}.sinks.weight"] = (hp.num_attention_heads,)
        if hp.architecture.startswith("olmo"):
            shapes |= {f"{attention}.q_norm.weight": (q,), f"{attention}.k_norm.weight": (kv,)}
    shapes["norm.weight"] = (hidden,)
    if not hp.tie_word_embeddings:
        shapes["lm_head.weight"] = (hp.vocab_size, hidden)
    return shapes


def _latent_shapes(
    hp: ModelHParams, name: str, has_query_latents: bool
) -> dict[str, tuple[int, ...]]:
    latent, hidden, heads = hp.latent, hp.hidden_size, hp.num_attention_heads
    assert latent is not None
    q = {f"{name}.q_proj": (heads * hp.head_dim, hidden)}
    if has_query_latents:
        q = {
            f"{name}.q_a_proj": (Q_RANK, hidden),
            f"{name}.q_b_proj": (heads * hp.head_dim, Q_RANK),
        }
    return q | {
        f"{name}.kv_a_proj_with_mqa": (latent.rank + latent.rope_dim, hidden),
        f"{name}.k_b_proj": (heads * latent.rank, latent.nope_dim),
        f"{name}.v_b_proj": (heads * latent.value_dim, latent.rank),
        f"{name}.o_proj": (hidden, heads * latent.value_dim),
    }


def _mlp_shapes(name: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj": (inner, hidden),
        f"{name}.up_proj": (inner, hidden),
        f"{name}.down_proj": (hidden, inner),
    }


def _expert_shapes(hp: ModelHParams, name: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.gate": (hp.num_experts, hp.hidden_size)}
    for e in range(hp.num_experts):
        shapes |= _mlp_shapes(f"{name}.experts.{e}", hp.hidden_size, hp.moe_intermediate_size)
    if hp.architecture in WITH_SHARED_EXPERTS:
        shapes |= _mlp_shapes(f"{name}.shared_expert", hp.hidden_size, SHARED_WIDTH)
    if hp.architecture in ("ernie4_5-moe", "glm4moe") or (
        hp.latent is not None and hp.expert_scoring == "sigmoid"
    ):
        shapes[f"{name}.selection"] = (hp.num_experts,)
    if hp.architecture == "qwen2moe":
        shapes[f"{name}.shared_expert_gate"] = (1, hp.hidden_size)
    return shapes


def _bert_shapes(hp: ModelHParams) -> dict[str, tuple[int, ...]]:
    hidden, inner = hp.hidden_size, hp.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (hp.vocab_size, hidden),
        "embed_positions.weight": (hp.max_position_embeddings, hidden),
        "embed_token_types.weight": (2, hidden),
    }
    norms = ["embed_layernorm"]
    for i in range(hp.num_hidden_layers):
        linears = {f"self_attn.{p}_proj": (hidden, hidden) for p in "qkvo"}
        linears |= {"mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        for name, shape in linears.items():
            shapes[f"layers.{i}.{name}.weight"] = shape
            shapes[f"layers.{i}.{name}.bias"] = shape[:1]
        norms += [f"layers.{i}.post_attention_layernorm", f"layers.{i}.post_feedforward_layernorm"]
    for norm in norms:
        shapes |= {f"{norm}.weight": (hidden,), f"{norm}.bias": (hidden,)}
    return shapes


def golden_logits() -> dict[str, np.ndarray]:
    """What `tests/data/make/make_tiny_logits.py` stored."""
    stored: dict[str, np.ndarray] = {}
    for path in sorted((Path(__file__).parents[1] / "data").glob("tiny_logits*.npz")):
        with np.load(path) as part:
            stored |= dict(part)
    return stored
