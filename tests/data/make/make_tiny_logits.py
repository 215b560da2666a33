"""Makes tests/data/tiny_logits*.npz: logits of every tiny model, computed by `transformers`.

Run it with PyTorch and transformers installed, from the repository root:

    PYTHONPATH=src:. python tests/data/make/make_tiny_logits.py [latent]

Each case of `tests.models.tiny` is loaded into the `transformers` class of its architecture, in
float32 with eager attention, and run over one prompt. Stored per case: logits (of an encoder:
hidden states), and the rotary frequencies and attention factor of its (global) layers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

from tellin.loading.tensors import ModelHParams
from tests.models.tiny import (
    CASES,
    DENSE_LAYERS,
    EXPERT_CASES,
    LATENT_CASES,
    Q_RANK,
    SHARED_WIDTH,
    tiny_arrays,
    tiny_token_ids,
)

CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "gemma": ("GemmaConfig", "GemmaForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "ernie4_5-moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM"),
    "glm4": ("Glm4Config", "Glm4ForCausalLM"),
    "glm4moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM"),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "deepseek_v2_groups": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM"),
    "qwen2moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "qwen3moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "bert": ("BertConfig", "BertModel"),
}
ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh", "swiglu_oai": "silu"}
BERT_NAMES = {
    "embed_tokens": "embeddings.word_embeddings",
    "embed_positions": "embeddings.position_embeddings",
    "embed_token_types": "embeddings.token_type_embeddings",
    "embed_layernorm": "embeddings.LayerNorm",
    "layers.": "encoder.layer.",
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.o_proj": "attention.output.dense",
    "post_attention_layernorm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "post_feedforward_layernorm": "output.LayerNorm",
}
PHI3_FUSED = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
}


def rope_parameters(hp: ModelHParams) -> dict[str, object]:
    scaling = hp.rope_scaling
    values: dict[str, object] = {"rope_theta": hp.rope_theta, "rope_type": "default"}
    if hp.rope_dim is not None and hp.latent is None:
        values["partial_rotary_factor"] = hp.rope_dim / hp.head_dim
    if scaling.kind == "none":
        return values
    values["rope_type"] = scaling.kind
    if scaling.kind != "longrope":
        values["factor"] = scaling.factor
    if scaling.kind != "linear":
        values["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    if scaling.kind == "yarn":
        values["truncate"] = scaling.truncate
        if hp.latent is not None:
            values |= {"mscale": 0.7, "mscale_all_dim": 0.7}
    if scaling.kind == "llama3":
        values["low_freq_factor"] = scaling.low_freq_factor
        values["high_freq_factor"] = scaling.high_freq_factor
    if scaling.kind == "longrope":
        values["short_factor"] = list(scaling.factors or ())
        values["long_factor"] = list(scaling.long_factors or ())
    return values


def expert_values(name: str, hp: ModelHParams) -> dict[str, object]:
    """What the configurations of mixtures say of experts."""
    if hp.architecture in ("deepseek2", "ernie4_5-moe", "glm4moe"):
        return special_experts(name, hp)
    values: dict[str, object] = {"num_experts_per_tok": hp.num_experts_per_tok}
    if hp.architecture in ("gpt-oss", "mixtral", "granitemoe"):
        values["num_local_experts"] = hp.num_experts
        values["intermediate_size"] = hp.moe_intermediate_size
    else:
        values["num_experts"] = hp.num_experts
        values["norm_topk_prob"] = hp.norm_topk_prob
    if hp.architecture.startswith("qwen"):
        values["moe_intermediate_size"] = hp.moe_intermediate_size
        values["mlp_only_layers"] = list(DENSE_LAYERS.get(name, ()))
    if hp.architecture == "qwen2moe":
        values["shared_expert_intermediate_size"] = SHARED_WIDTH
    return values


def special_experts(name: str, hp: ModelHParams) -> dict[str, object]:
    """GLM-4.5 and ERNIE 4.5 have words of their own."""
    num_dense, num_shared = len(DENSE_LAYERS[name]), SHARED_WIDTH // hp.moe_intermediate_size
    if hp.architecture in ("deepseek2", "glm4moe"):
        return {
            "num_experts_per_tok": hp.num_experts_per_tok,
            "n_routed_experts": hp.num_experts,
            "norm_topk_prob": hp.norm_topk_prob,
            "moe_intermediate_size": hp.moe_intermediate_size,
            "n_shared_experts": num_shared,
            "first_k_dense_replace": num_dense,
            "routed_scaling_factor": hp.expert_scale,
            **(latent_values(name, hp) if hp.latent else {"use_qk_norm": not hp.attention_bias}),
        }
    return {
        "moe_k": hp.num_experts_per_tok,
        "moe_num_experts": hp.num_experts,
        "moe_intermediate_size": hp.moe_intermediate_size,
        "moe_num_shared_experts": num_shared,
        "moe_layer_start_index": num_dense,
    }


def latent_values(name: str, hp: ModelHParams) -> dict[str, object]:
    assert hp.latent is not None
    values: dict[str, object] = {
        "kv_lora_rank": hp.latent.rank,
        "q_lora_rank": Q_RANK if hp.expert_scoring == "sigmoid" else None,
        "qk_nope_head_dim": hp.latent.nope_dim,
        "qk_rope_head_dim": hp.latent.rope_dim,
        "v_head_dim": hp.latent.value_dim,
        "n_group": hp.expert_groups,
        "topk_group": hp.expert_top_groups,
        "head_dim": hp.latent.rope_dim,
    }
    if name.startswith("deepseek_v2"):
        values["topk_method"] = "greedy" if hp.expert_groups == 1 else "group_limited_greedy"
    return values


def class_names(name: str, hp: ModelHParams) -> tuple[str, str]:
    """Configuration and model in `transformers`."""
    return CLASSES[name if hp.latent is not None else hp.architecture]


def make_config(name: str, hp: ModelHParams) -> transformers.PretrainedConfig:
    values: dict[str, object] = {
        "vocab_size": hp.vocab_size,
        "hidden_size": hp.hidden_size,
        "intermediate_size": hp.intermediate_size,
        "num_hidden_layers": hp.num_hidden_layers,
        "num_attention_heads": hp.num_attention_heads,
        "max_position_embeddings": hp.max_position_embeddings,
        "hidden_act": ACTIVATIONS.get(hp.hidden_act, hp.hidden_act),
        "tie_word_embeddings": hp.tie_word_embeddings,
        "attn_implementation": "eager",
        "pad_token_id": 0,
    }
    if hp.architecture == "bert":
        values["layer_norm_eps"] = hp.norm_eps
    else:
        values |= {
            "num_key_value_heads": hp.num_key_value_heads,
            "head_dim": hp.head_dim,
            "rms_norm_eps": hp.norm_eps,
            "attention_bias": hp.attention_bias,
            "rope_parameters": rope_parameters(hp),
            "sliding_window": hp.sliding_window,
        }
    if hp.num_experts:
        values |= expert_values(name, hp)
    if hp.architecture.startswith("granite"):
        values |= {
            "attention_multiplier": hp.attention_scale,
            "embedding_multiplier": hp.embedding_scale,
            "residual_multiplier": hp.residual_scale,
            "logits_scaling": 1 / hp.logit_scale,
        }
    if hp.architecture == "llama":
        values["mlp_bias"] = hp.mlp_bias
    if hp.rope_scaling.kind == "longrope":
        original = hp.rope_scaling.original_max_position_embeddings
        values["original_max_position_embeddings"] = original
    if hp.architecture.startswith("gemma"):
        values["hidden_activation"] = values["hidden_act"]
    if hp.sliding_window_pattern is not None:
        values["layer_types"] = [
            "full_attention" if (i + 1) % hp.sliding_window_pattern == 0 else "sliding_attention"
            for i in range(hp.num_hidden_layers)
        ]
    if hp.architecture in ("gemma2", "gemma3"):
        values["query_pre_attn_scalar"] = round((hp.attention_scale or 1) ** -2)
    if hp.architecture == "gemma2":
        values["attn_logit_softcapping"] = hp.attn_logit_softcapping
        values["final_logit_softcapping"] = hp.final_logit_softcapping
    if hp.architecture == "smollm3":
        interval = hp.no_rope_interval or 1
        values["no_rope_layers"] = [
            int((i + 1) % interval != 0) for i in range(hp.num_hidden_layers)
        ]
    if hp.architecture in ("gemma3", "olmo3"):
        values["rope_parameters"] = {
            "full_attention": rope_parameters(hp),
            "sliding_attention": {"rope_type": "default", "rope_theta": hp.rope_local_theta},
        }
    return getattr(transformers, class_names(name, hp)[0])(**values)


def state_dict(name: str, hp: ModelHParams) -> dict[str, torch.Tensor]:
    state = {}
    for tensor, values in tiny_arrays(name).items():
        if hp.architecture == "bert":
            for ours, theirs in BERT_NAMES.items():
                tensor = tensor.replace(ours, theirs)
        elif tensor != "lm_head.weight":
            tensor = f"model.{tensor}"
        state[tensor] = torch.from_numpy(values)
    if hp.architecture == "glm4":
        state = {glm4_name(tensor): values for tensor, values in state.items()}
    if hp.architecture in ("glm4", "phi3"):
        for i in range(hp.num_hidden_layers):
            for fused, parts in PHI3_FUSED.items():
                if hp.architecture == "glm4" and "qkv" in fused:
                    continue
                prefix, name = f"model.layers.{i}.{fused}".rsplit(".", 1)
                matrices = [state.pop(f"{prefix}.{part}.weight") for part in parts]
                state[f"{prefix}.{name}.weight"] = torch.cat(matrices)
    for i in range(hp.num_hidden_layers):
        if hp.latent is not None:
            join_latents(state, f"model.layers.{i}.self_attn", hp)
        stack_experts(state, f"model.layers.{i}.mlp", hp)
    return state


def join_latents(state: dict[str, torch.Tensor], name: str, hp: ModelHParams) -> None:
    """One matrix that makes keys and values of all heads."""
    assert hp.latent is not None
    heads, rank = hp.num_attention_heads, hp.latent.rank
    keys = state.pop(f"{name}.k_b_proj.weight").reshape(heads, rank, -1).mT
    values = state.pop(f"{name}.v_b_proj.weight").reshape(heads, -1, rank)
    state[f"{name}.kv_b_proj.weight"] = torch.cat([keys, values], dim=1).reshape(-1, rank)


def glm4_name(tensor: str) -> str:
    """Norms after blocks as GLM-4 calls them."""
    return (
        tensor.replace("post_attention_layernorm", "post_self_attn_layernorm")
        .replace("pre_feedforward_layernorm", "post_attention_layernorm")
        .replace("post_feedforward_layernorm", "post_mlp_layernorm")
    )


def stack_experts(state: dict[str, torch.Tensor], mlp: str, hp: ModelHParams) -> None:
    """Experts as `transformers` holds them in memory: gate over up, one on the other."""
    if f"{mlp}.gate.weight" not in state:
        return
    experts = [f"{mlp}.experts.{e}" for e in range(hp.num_experts)]
    if hp.architecture == "gpt-oss":
        return stack_gpt_oss(state, mlp, experts)
    gate, up, down = (
        torch.stack([state.pop(f"{expert}.{part}_proj.weight") for expert in experts])
        for part in ("gate", "up", "down")
    )
    module = mlp
    if hp.architecture in ("deepseek2", "ernie4_5-moe", "glm4moe"):
        for part in ("gate", "up", "down"):
            own = state.pop(f"{mlp}.shared_expert.{part}_proj.weight")
            state[f"{mlp}.shared_experts.{part}_proj.weight"] = own
        bias = state.pop(f"{mlp}.selection.bias", None)
        if bias is None:
            pass
        elif hp.architecture != "ernie4_5-moe":
            state[f"{mlp}.gate.e_score_correction_bias"] = bias
        else:
            state[f"{mlp}.gate.moe_statics.e_score_correction_bias"] = bias[None]
    if hp.architecture == "granitemoe":
        module = mlp.replace("mlp", "block_sparse_moe")
        state[f"{module}.router.weight"] = state.pop(f"{mlp}.gate.weight")
    state[f"{module}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
    state[f"{module}.experts.down_proj"] = down


def stack_gpt_oss(state: dict[str, torch.Tensor], mlp: str, experts: list[str]) -> None:
    """Matrices transposed, columns of gate and up in turns."""
    for kind in ("weight", "bias"):
        gate, up, down = (
            torch.stack([state.pop(f"{expert}.{part}_proj.{kind}") for expert in experts])
            for part in ("gate", "up", "down")
        )
        both = torch.stack([gate, up], dim=2).flatten(1, 2)
        suffix = "" if kind == "weight" else "_bias"
        state[f"{mlp}.experts.gate_up_proj{suffix}"] = both.mT if kind == "weight" else both
        state[f"{mlp}.experts.down_proj{suffix}"] = down.mT if kind == "weight" else down
        state[f"{mlp}.router.{kind}"] = state.pop(f"{mlp}.gate.{kind}")
    attention = mlp.replace("mlp", "self_attn")
    state[f"{attention}.sinks"] = state.pop(f"{attention}.sinks.weight")


def run(name: str, hp: ModelHParams) -> dict[str, np.ndarray]:
    model = getattr(transformers, class_names(name, hp)[1])(make_config(name, hp)).eval()
    state = state_dict(name, hp)
    missing, unexpected = model.load_state_dict(state, strict=False)
    wrong = [key for key in missing if "pooler" not in key]
    if hp.tie_word_embeddings:
        wrong = [key for key in wrong if key != "lm_head.weight"]
    if wrong or unexpected:
        raise SystemExit(f"{name}: missing {missing}, unexpected {unexpected}")
    with torch.no_grad():
        out = model(torch.from_numpy(tiny_token_ids().astype(np.int64))[None])
    stored = {name: (out.last_hidden_state if hp.architecture == "bert" else out.logits)[0].numpy()}
    if hp.architecture != "bert":
        rotary = model.model.rotary_emb
        prefix = "full_attention_" if hp.architecture in ("gemma3", "olmo3") else ""
        stored[f"{name}/inv_freq"] = getattr(rotary, f"{prefix}inv_freq").numpy()
        stored[f"{name}/attention_factor"] = np.float64(
            getattr(rotary, f"{prefix}attention_scaling")
        )
    return stored


PARTS = {"": CASES | EXPERT_CASES, "latent": LATENT_CASES}
"""Cases of each file."""


def main(parts: list[str]) -> None:
    torch.manual_seed(0)
    for part in parts or PARTS:
        stored: dict[str, np.ndarray] = {}
        for name, hp in PARTS[part].items():
            stored |= run(name, hp)
            print(name, stored[name].shape, "std", stored[name].std())
        path = Path(f"tests/data/tiny_logits{'_' * bool(part)}{part}.npz")
        np.savez_compressed(path, **stored)
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
