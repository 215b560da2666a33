"""LoRA adapters in the layout of the PEFT library: a folder with a configuration and two matrices
for each linear layer that was trained.

Knows the model by its hyperparameters and by the layers that can take an adapter; loads all or
nothing. What cannot be applied exactly is refused, every reason at once: an adapter of which half
were left out would answer nonsense without an error.

Source: Hu et al. 2021 (LoRA), section 4; Kalajdzievski 2023 (rsLoRA), section 3, for the scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tellin.exceptions import AdapterError, AdapterNotFoundError, LoadError
from tellin.loading.dequantize import dequantize
from tellin.loading.gated_delta import value_head_order
from tellin.loading.hparams import NEIGHBOUR_PAIRS
from tellin.loading.json_file import is_file, read_json_object
from tellin.loading.name_patterns import NamePatterns
from tellin.loading.names import canonical_hf_name, fused_order, fused_parts
from tellin.loading.safetensors import SafetensorsFile
from tellin.loading.tensors import ModelHParams, TensorRef
from tellin.loading.typed_mapping import TypedMapping

Floats = npt.NDArray[np.float32]

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight\Z"
)
_UNSUPPORTED_FLAGS = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "lora_bias": "biases on the low-rank products",
    "fan_in_fan_out": "transposed weights",
    "layer_replication": "replicated layers",
    "megatron_config": "Megatron layers",
    "trainable_token_indices": "trained token embeddings",
    "modules_to_save": "fully trained modules",
    "target_parameters": "adapters of bare parameters",
}
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that also change the base model's weights, unless converted when saved."""


@dataclass(frozen=True)
class Adapter:
    """By linear layer A ``[rank, in]`` and B ``[out, rank]``, float32, the scale multiplied in."""

    weights: Mapping[str, tuple[Floats, Floats]]

    @property
    def num_bytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self.weights.values())


def load_adapter(
    path: Path, hparams: ModelHParams, sites: Mapping[str, tuple[int, int]], max_rank: int
) -> Adapter:
    """Read an adapter and check it against a model.

    Args:
        path: a folder.
        hparams: of the base model.
        sites: input and output width of the layers that can take an adapter, by canonical name.
        max_rank: largest rank that the engine has room for.

    Raises:
        AdapterNotFoundError: there is no adapter at ``path``.
        AdapterError: it is damaged, or asks for something that is not supported; all that is wrong
            with it is said.
    """
    try:
        path = path.expanduser()
    except RuntimeError as error:  # a home of nobody (~nobody/)
        raise AdapterNotFoundError(f"{path}: {error}") from None
    _check_files(path)
    try:
        config = read_json_object(path / CONFIG_NAME)
        file = SafetensorsFile(path / WEIGHTS_NAME, lambda name: ".base_layer." in name)
        try:
            return _Reader(path, config, hparams, sites, max_rank).read(file.tensors)
        finally:
            file.close()
    except LoadError as error:
        raise AdapterError(str(error)) from None


def _check_files(path: Path) -> None:
    if not path.is_dir():
        raise AdapterNotFoundError(
            f"{path}: no such folder; an adapter is a folder with {CONFIG_NAME} and {WEIGHTS_NAME}"
        )
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if is_file(path / name):
            continue
        pickles = [p.name for p in (path / "adapter_model.bin", path / "adapter_model.pt")]
        found = next((p for p in pickles if name == WEIGHTS_NAME and (path / p).is_file()), None)
        hint = f"; {found} is a pickle, which is not read: save it as safetensors" if found else ""
        raise AdapterNotFoundError(f"{path}: has no {name}{hint}")


class _Reader:
    def __init__(
        self,
        path: Path,
        config: TypedMapping,
        hparams: ModelHParams,
        sites: Mapping[str, tuple[int, int]],
        max_rank: int,
    ) -> None:
        self.path = path
        self.config = config
        self.hparams = hparams
        self.sites = sites
        self.max_rank = max_rank
        self.reasons: list[str] = []
        self._alphas = NamePatterns(config, "alpha_pattern")
        self._ranks = NamePatterns(config, "rank_pattern")

    def read(self, tensors: Mapping[str, TensorRef]) -> Adapter:
        self._check_config()
        pairs = self._pairs(tensors)
        weights: dict[str, tuple[Floats, Floats]] = {}
        for layer, sides in pairs.items():
            weights |= self._layer(layer, sides)
        if not weights and not self.reasons:
            self.reasons.append(f"{WEIGHTS_NAME} has no matrices")
        if self.reasons:
            raise AdapterError(f"{self.path}: this adapter cannot be used: " + self._all_reasons())
        return Adapter(weights)

    def _all_reasons(self) -> str:
        reasons = list(dict.fromkeys(self.reasons))
        more = f"; and {len(reasons) - 8} more" if len(reasons) > 8 else ""
        return "; ".join(reasons[:8]) + more

    def _check_config(self) -> None:
        config = self.config
        for key in ("r", "lora_alpha", "target_modules"):
            if not config.has(key):
                self.reasons.append(f"{CONFIG_NAME} lacks {key!r}")
        if config.get_str("peft_type", "LORA") != "LORA":
            self.reasons.append(f"it is of type {config.get_str('peft_type')}, not LORA")
        if config.get_str("bias", "none") != "none":
            self.reasons.append(f"bias={config.get_str('bias')!r} is not supported")
        for key, what in _UNSUPPORTED_FLAGS.items():
            # Of GPT-2 it is true: not of the adapter, whose matrices are as any other's.
            is_usual = key == "fan_in_fan_out" and self.hparams.architecture == "gpt2"
            if config.get(key) and not is_usual:
                given = str(config.get(key))
                self.reasons.append(f"{key} ({what}) is not supported (it is {given:.40})")
        start = config.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
            self.reasons.append(
                f"init_lora_weights={start!r} also changed the base model; convert the adapter to "
                "a plain one when saving it"
            )

    def _pairs(self, tensors: Mapping[str, TensorRef]) -> dict[str, dict[str, TensorRef]]:
        """Matrices A and B by the layer's name in the file."""
        pairs: dict[str, dict[str, TensorRef]] = {}
        for name, tensor in tensors.items():
            match = _KEY.match(name)
            if match is None:
                self.reasons.append(f"tensor {name!r} is not a matrix of a linear layer's adapter")
            else:
                pairs.setdefault(match["layer"], {})[match["side"]] = tensor
        return pairs

    def _layer(
        self, layer: str, sides: Mapping[str, TensorRef]
    ) -> dict[str, tuple[Floats, Floats]]:
        """The matrices of one layer of the file: of several of the model's if it is a fused one."""
        name = canonical_hf_name(self.hparams.architecture, f"{layer}.weight")
        name = name.removesuffix(".weight")
        if ".mlp.experts." in f"{name}.":
            self.reasons.append(
                "it changes the experts of a mixture, which is not supported; train one of "
                "attention (target_modules q_proj, k_proj, v_proj, o_proj)"
            )
            return {}
        parts = fused_parts(self.hparams, name) or [(name, self.sites.get(name, (0, 0))[1])]
        if any(part not in self.sites for part, _ in parts):
            self.reasons.append(f"{layer} is not a layer that can take an adapter")
            return {}
        if len(sides) != 2:
            self.reasons.append(f"{layer} has only one of its two matrices")
            return {}
        a, b = dequantize(sides["A"]), dequantize(sides["B"])
        num_in, num_out = self.sites[parts[0][0]][0], sum(rows for _, rows in parts)
        if a.ndim != 2 or b.shape != (num_out, a.shape[0]) or a.shape[1] != num_in:
            self.reasons.append(
                f"{layer} has matrices of shapes {a.shape} and {b.shape}; the model needs "
                f"(r, {num_in}) and ({num_out}, r)"
            )
            return {}
        rank = a.shape[0]
        if rank > self.max_rank:
            self.reasons.append(
                f"its rank is {rank}, the engine's max_lora_rank {self.max_rank}; raise that"
            )
            return {}
        if self.config.has("r") and rank != self._rank(layer):
            self.reasons.append(
                f"{CONFIG_NAME} gives {layer} rank {self._rank(layer)} ('r' or 'rank_pattern'), "
                f"its matrices have {rank}"
            )
            return {}
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            self.reasons.append(f"{layer} holds NaN or infinity")
            return {}
        if self.reasons:
            return {}
        with np.errstate(over="ignore", invalid="ignore"):
            b = b * np.float32(self._scale(layer, rank))
        if not np.isfinite(b).all():
            self.reasons.append(
                f"{layer} overflows when it is scaled by its alpha "
                f"(lora_alpha or alpha_pattern: {self._alpha(layer):g})"
            )
            return {}
        order = fused_order(self.hparams, name)
        if order is not None:
            b = b[order]
        if (
            name.endswith(".out_proj")
            and (order := value_head_order(self.hparams, name)) is not None
        ):
            a = a[:, order]
        found = {}
        start = 0
        for part, rows in parts:
            own = self._reordered(part, b[start : start + rows])
            found[part] = (np.ascontiguousarray(a), np.ascontiguousarray(own))
            start += rows
        return found

    def _scale(self, layer: str, rank: int) -> float:
        """What B is multiplied by: the alpha of the layer over its rank."""
        rs = self.config.get_bool("use_rslora", False)
        return self._alpha(layer) / (math.sqrt(rank) if rs else rank)

    def _alpha(self, layer: str) -> float:
        key = self._alphas.find(layer)
        if key is None:
            return self.config.get_float("lora_alpha")
        return self.config.get_mapping("alpha_pattern").get_float(key)

    def _rank(self, layer: str) -> int:
        """The rank that the configuration gives the layer."""
        key = self._ranks.find(layer)
        if key is None:
            return self.config.get_int("r")
        return self.config.get_mapping("rank_pattern").get_int(key)

    def _reordered(self, layer: str, b: Floats) -> Floats:
        """Output rows in the order of the model's own.

        GGUF files of Llamas keep the two halves of a rotated pair next to each other, where the
        checkpoints that adapters are trained on have them half a head apart; those of Qwen3.5 have
        value heads in another order.
        """
        hparams = self.hparams
        order = None if layer.endswith(".out_proj") else value_head_order(hparams, layer)
        if order is not None:
            return b[order]
        is_reordered = hparams.rope_interleaved and hparams.architecture not in NEIGHBOUR_PAIRS
        if not is_reordered or not layer.endswith((".q_proj", ".k_proj")):
            return b
        heads = len(b) // hparams.head_dim
        halves = b.reshape(heads, 2, hparams.head_dim // 2, b.shape[1])
        return halves.swapaxes(1, 2).reshape(b.shape)
