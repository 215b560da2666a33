"""A classifier's head: from one pooled state to the scores of its labels.

Owns its small matrices as float32 and the arithmetic on them, in a fixed order of its own for each
request, so that a score does not depend on the batch. It knows no requests and no tokens.

Source: Devlin et al. 2019 (BERT), section 4.1; Liu et al. 2019 (RoBERTa).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tellin.config import PoolerConfig
from tellin.exceptions import ModelLoadError

if TYPE_CHECKING:
    from tellin.loading.model_source import ModelSource

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

_OUT = "classifier.out_proj"
_DENSE = ("classifier.dense", "pooler.dense")
"""RoBERTa's name, BERT's name."""


@dataclass(frozen=True)
class Affine:
    """``weight @ x + bias``; weight ``[n, k]``, bias ``[n]``."""

    weight: Float32Array
    bias: Float32Array | None

    def __call__(self, x: Float64Array) -> Float64Array:
        # Products in float64, and NumPy's own order of summation: a BLAS may choose another one.
        products = self.weight * x
        result: Float64Array = products.sum(axis=1)
        return result if self.bias is None else result + self.bias


@dataclass(frozen=True)
class LayerNorm:
    """Mean 0 and variance 1, times the weight ``[n]``, plus the bias."""

    weight: Float32Array
    bias: Float32Array | None
    eps: float

    def __call__(self, x: Float64Array) -> Float64Array:
        centred = x - x.mean()
        result: Float64Array = self.weight * (
            centred / np.sqrt(np.square(centred).mean() + self.eps)
        )
        return result if self.bias is None else result + self.bias


def _gelu(x: Float64Array) -> Float64Array:
    erf = np.array([math.erf(value) for value in x / math.sqrt(2)])
    result: Float64Array = x * 0.5 * (1 + erf)
    return result


def _gelu_tanh(x: Float64Array) -> Float64Array:
    result: Float64Array = x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return result


_ACTIVATIONS: dict[str, Callable[[Float64Array], Float64Array]] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
}


@dataclass(frozen=True)
class ClassifierHead:
    """``out(act(dense(x)))``, or ``out(x)`` without a dense layer; then an activation."""

    dense: Affine | None
    out: Affine
    activation: str
    """sigmoid, softmax or none."""
    dense_act: str = "tanh"
    """tanh, or what ModernBERT's heads name: gelu, gelu_tanh, relu or silu."""
    norm: LayerNorm | None = None
    """Of ModernBERT: between that and ``out``."""

    @property
    def num_labels(self) -> int:
        return len(self.out.weight)

    def __call__(self, x: Float64Array, activate: bool = True) -> Float64Array:
        """Scores ``[num_labels]`` of a state ``[hidden_size]``; logits without ``activate``."""
        if self.dense is not None:
            x = _ACTIVATIONS[self.dense_act](self.dense(x))
        if self.norm is not None:
            x = self.norm(x)
        logits = self.out(x)
        if not activate or self.activation == "none":
            return logits
        if self.activation == "softmax":
            powers = np.exp(logits - logits.max())
            shares: Float64Array = powers / powers.sum()
            return shares
        with np.errstate(over="ignore"):  # exp of a large number is infinite, its inverse 0
            scores: Float64Array = 1 / (1 + np.exp(-logits))
        return scores


def open_classifier(path: Path, config: PoolerConfig) -> ClassifierHead:
    """Read the head of the model at ``path``.

    Raises:
        ModelLoadError: a tensor is missing, or has the wrong shape.
    """
    from tellin import loading

    with loading.open_model(path) as source:
        width, num_labels = source.hparams.state_size, config.num_labels
        dense = norm = None
        if source.metadata.is_encoder:
            found = [name for name in _DENSE if f"{name}.weight" in source.tensors]
            dense = _affine(source, found[0] if found else _DENSE[0], width, width)
        if source.hparams.architecture == "modern-bert":
            norm = _norm(source, width)
        out = _affine(source, _OUT, num_labels, width)
        source.release_pages()
        dense_act = source.hparams.classifier_act
    return ClassifierHead(dense, out, activation_of(config), dense_act, norm)


def _norm(source: ModelSource, width: int) -> LayerNorm:
    name = "classifier.norm"
    has_bias = f"{name}.bias" in source.tensors
    return LayerNorm(
        _values(source, f"{name}.weight", (width,)),
        _values(source, f"{name}.bias", (width,)) if has_bias else None,
        source.hparams.norm_eps,
    )


def _affine(source: ModelSource, name: str, rows: int, width: int) -> Affine:
    weight = _values(source, f"{name}.weight", (rows, width))
    has_bias = f"{name}.bias" in source.tensors
    return Affine(weight, _values(source, f"{name}.bias", (rows,)) if has_bias else None)


def _values(source: ModelSource, name: str, shape: tuple[int, ...]) -> Float32Array:
    from tellin.loading.dequantize import dequantize

    tensor = source.tensors.get(name)
    if tensor is None:
        raise ModelLoadError(
            f"{source.path}: tensor {name!r}, part of the classifier's head, is missing"
        )
    if tensor.shape != shape:
        raise ModelLoadError(
            f"{source.path}: tensor {name!r} has shape {tensor.shape}; expected {shape}"
        )
    values = dequantize(tensor)
    if not np.isfinite(values).all():
        raise ModelLoadError(f"{source.path}: tensor {name!r} holds NaN or infinity")
    return values


def activation_of(config: PoolerConfig) -> str:
    """sigmoid, softmax or none."""
    if config.score_activation != "auto":
        return config.score_activation
    return "sigmoid" if config.num_labels == 1 else "softmax"
