"""Multi-head latent attention in files: its dimensions, and the matrices that the plan wants of it.

A checkpoint holds one matrix that makes keys and values of all heads from a latent. The plan caches
latents, so it wants two: per head, the one that brings queries to latents, which is the keys' half
transposed, and the values' half. GGUF files of 2025 and later hold these two already.

Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.2 and appendix C.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.dequantize import dequantize_rows
from tellin.loading.tensors import LatentAttention, ModelHParams, QuantType, TensorRef
from tellin.loading.typed_mapping import TypedMapping

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2")
"""``model_type`` of configurations: all are of architecture deepseek2, as GGUF calls it."""

_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_act": "silu"}
_V3: dict[str, Any] = {
    **_LATENT,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {
        **_LATENT,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "moe_intermediate_size": 1407,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
    },
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "glm4_moe_lite": {
        **_V3,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202_752,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
    },
}
"""What configurations leave out. Source: the configuration classes' documented defaults."""


def with_latents(hparams: ModelHParams, latent: LatentAttention, mscale: float) -> ModelHParams:
    """``hparams`` of a model whose attention is ``latent``.

    ``mscale`` is YaRN's factor of queries and of keys. Source: DeepSeek-V2's model card, "mscale".
    """
    head_dim = latent.nope_dim + latent.rope_dim
    return replace(
        hparams,
        num_key_value_heads=hparams.num_attention_heads,
        head_dim=head_dim,
        rope_dim=latent.rope_dim,
        latent=latent,
        attention_scale=mscale * mscale / math.sqrt(head_dim) if head_dim > 0 else None,
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's temperature of a context extended by ``factor``. Source: YaRN, eq. 22."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


# ---- config.json -----------------------------------------------------------------------------


def latents_from_config(hparams: ModelHParams, config: TypedMapping) -> ModelHParams:
    """``hparams`` with what a configuration says of latents and of experts."""
    if config.get_bool("attention_bias", False):
        raise _unsupported(config, "attention_bias", False)
    latent = LatentAttention(
        rank=config.get_int("kv_lora_rank"),
        nope_dim=config.get_int("qk_nope_head_dim"),
        rope_dim=config.get_int("qk_rope_head_dim"),
        value_dim=config.get_int("v_head_dim"),
    )
    key = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    rope = config.get_mapping(key) if config.has(key) else TypedMapping(config.path, {})
    mscale = 1.0
    if hparams.rope_scaling.kind != "none" and rope.get_float("mscale_all_dim", 0.0):
        mscale = yarn_mscale(hparams.rope_scaling.factor, rope.get_float("mscale_all_dim"))
    hparams = replace(hparams, rope_interleaved=config.get_bool("rope_interleave", True))
    hparams = with_latents(hparams, latent, mscale)
    return _experts_from_config(hparams, config) if config.has("n_routed_experts") else hparams


def _experts_from_config(hparams: ModelHParams, config: TypedMapping) -> ModelHParams:
    if config.get_int("moe_layer_freq", 1) != 1:
        raise _unsupported(config, "moe_layer_freq", 1)
    scoring = config.get_str("scoring_func")
    method = config.get_str("topk_method")
    methods = {"greedy": "softmax", "group_limited_greedy": "softmax", "noaux_tc": "sigmoid"}
    if methods.get(method) != scoring:
        raise UnsupportedModelError(
            f"{config.path}: 'topk_method' {method!r} with 'scoring_func' {scoring!r} is not "
            f"supported; supported are {', '.join(f'{m} with {s}' for m, s in methods.items())}"
        )
    normalizes = config.get_bool("norm_topk_prob")
    if normalizes and scoring == "softmax":
        raise _unsupported(config, "norm_topk_prob", False)
    has_groups = method != "greedy"
    return replace(
        hparams,
        num_experts=config.get_int("n_routed_experts"),
        num_experts_per_tok=config.get_int("num_experts_per_tok"),
        moe_intermediate_size=config.get_int("moe_intermediate_size"),
        norm_topk_prob=normalizes,
        expert_scoring=scoring,
        expert_scale=config.get_float("routed_scaling_factor"),
        expert_groups=config.get_int("n_group", 1) if has_groups else 1,
        expert_top_groups=config.get_int("topk_group", 1) if has_groups else 1,
    )


def _unsupported(config: TypedMapping, key: str, supported: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{config.path}: {key!r} is {config[key]!r}, which is not supported for "
        f"{config['model_type']!r}; supported is {supported!r}"
    )


# ---- GGUF ------------------------------------------------------------------------------------


def latents_from_gguf(hparams: ModelHParams, metadata: TypedMapping) -> ModelHParams:
    """``hparams`` with what a GGUF file says of latents.

    Files with the two matrices give the sizes of heads under names that end in ``_mla``.
    """
    prefix = f"{hparams.architecture}."

    def size(key: str) -> int:
        full = f"{prefix}attention.{key}_mla"
        return metadata.get_int(
            full if metadata.has(full) else full.removesuffix("_mla")
        )  # fmt: skip

    if metadata.get_float(f"{prefix}attention.temperature_scale", 0.0):
        raise UnsupportedModelError(
            f"{metadata.path}: {prefix}attention.temperature_scale is "
            f"{metadata.get_float(f'{prefix}attention.temperature_scale'):g}; supported is 0"
        )
    rope_dim = metadata.get_int(f"{prefix}rope.dimension_count")
    latent = LatentAttention(
        rank=metadata.get_int(f"{prefix}attention.kv_lora_rank"),
        nope_dim=size("key_length") - rope_dim,
        rope_dim=rope_dim,
        value_dim=size("value_length"),
    )
    scaling, mscale = hparams.rope_scaling, 1.0
    multiplier = metadata.get_float(f"{prefix}rope.scaling.yarn_log_multiplier", 0.0)
    if scaling.kind == "yarn" and multiplier:
        # A tenth of mscale_all_dim; mscale, which is not told, is the same in all models.
        mscale = yarn_mscale(scaling.factor, 10 * multiplier)
        hparams = replace(hparams, rope_scaling=replace(scaling, attention_factor=1.0))
    return with_latents(hparams, latent, mscale)


# ---- tensors ---------------------------------------------------------------------------------


def split_latent(
    path: Path, hparams: ModelHParams, name: str, tensor: TensorRef
) -> list[tuple[str, TensorRef]]:
    """The two matrices of a ``kv_b_proj``, and those that are two already as matrices.

    ``k_b_proj`` ``(heads * rank, nope_dim)``, ``v_b_proj`` ``(heads * value_dim, rank)``; other
    tensors pass.
    """
    latent, heads = hparams.latent, hparams.num_attention_heads
    stem, _, part = name.removesuffix(".weight").rpartition(".")
    if latent is None or part not in ("kv_b_proj", "k_b_proj", "v_b_proj"):
        return [(name, tensor)]
    rows = {"k_b_proj": latent.rank, "v_b_proj": latent.value_dim}
    widths = {"k_b_proj": latent.nope_dim, "v_b_proj": latent.rank}
    if part in rows:
        _expect(path, tensor, (heads, rows[part], widths[part]))
        return [(name, replace(tensor, shape=(heads * rows[part], widths[part])))]
    per_head = latent.nope_dim + latent.value_dim
    _expect(path, tensor, (heads * per_head, latent.rank))
    keys = KeyRows(tensor, heads, per_head, latent.nope_dim)
    values = ValueRows(tensor, per_head, latent.nope_dim)
    return [
        (f"{stem}.k_b_proj.weight", _made(tensor, keys, heads * latent.rank, latent.nope_dim)),
        (f"{stem}.v_b_proj.weight", _made(tensor, values, heads * latent.value_dim, latent.rank)),
    ]


def _expect(path: Path, tensor: TensorRef, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ModelLoadError(
            f"{path}: tensor {tensor.name!r} has shape {tensor.shape}, expected {shape}"
        )


def _made(tensor: TensorRef, reader: KeyRows | ValueRows, rows: int, width: int) -> TensorRef:
    return TensorRef(tensor.name, (rows, width), reader.quant_type, tensor.data, reader)


@dataclass(frozen=True, eq=False)
class ValueRows:
    """Of every ``per_head`` rows of a matrix those from ``first`` on, as they are."""

    tensor: TensorRef
    per_head: int
    first: int

    @property
    def quant_type(self) -> QuantType:
        return self.tensor.quant_type

    @property
    def format_name(self) -> str:
        return self.tensor.format_name

    @property
    def views(self) -> Sequence[npt.NDArray[np.uint8]]:
        return _views(self.tensor)

    def read_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        count = self.per_head - self.first
        parts = []
        while start < stop:
            head, row = divmod(start, count)
            end = min(stop, (head + 1) * count)
            begin = head * self.per_head + self.first + row
            parts.append(self.tensor.read_rows(begin, begin + end - start))
            start = end
        return np.concatenate(parts)


@dataclass(frozen=True, eq=False)
class KeyRows:
    """The first ``count`` of every ``per_head`` rows of a matrix, transposed: no value changes.

    Blocks lie along rows, so a matrix of blocks becomes float32.
    """

    tensor: TensorRef
    num_heads: int
    per_head: int
    count: int

    @property
    def quant_type(self) -> QuantType:
        own = self.tensor.quant_type
        return own if own in _FLOATS and self.tensor.reader is None else QuantType.F32

    @property
    def format_name(self) -> str:
        return self.tensor.format_name

    @property
    def views(self) -> Sequence[npt.NDArray[np.uint8]]:
        return _views(self.tensor)

    def read_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        rank = self.tensor.shape[1]
        parts = []
        while start < stop:
            head, row = divmod(start, rank)
            end = min(stop, (head + 1) * rank)
            columns = self._head(head)[:, row : row + end - start]
            parts.append(np.ascontiguousarray(columns.T).reshape(-1).view(np.uint8))
            start = end
        return np.concatenate(parts)

    def _head(self, head: int) -> npt.NDArray[Any]:
        begin = head * self.per_head
        if self.quant_type is not self.tensor.quant_type:
            return dequantize_rows(self.tensor, begin, begin + self.count)
        rows = self.tensor.read_rows(begin, begin + self.count)
        return rows.view(_FLOATS[self.quant_type]).reshape(self.count, -1)


_FLOATS: Mapping[QuantType, type[np.unsignedinteger[Any]]] = {
    QuantType.F32: np.uint32,
    QuantType.F16: np.uint16,
    QuantType.BF16: np.uint16,
}
"""Types whose values are moved as they are, and their bits."""


def _views(tensor: TensorRef) -> Sequence[npt.NDArray[np.uint8]]:
    return [tensor.data] if tensor.reader is None else tensor.reader.views
