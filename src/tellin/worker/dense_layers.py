"""The dense layers that some models put behind their pooling: from one vector to another.

Owns their matrices as float32 and the arithmetic on them, one vector at a time, in an order of its
own, so that an embedding does not depend on the batch. EmbeddingGemma has two such layers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from tellin.exceptions import ModelLoadError
from tellin.worker.classifier import Affine

Float64Array = npt.NDArray[np.float64]


class DenseLayers:
    """Layers, each an affine map and its activation (none or tanh), one after the other."""

    def __init__(self, layers: list[tuple[Affine, str]]) -> None:
        self._layers = layers

    def __call__(self, x: Float64Array) -> Float64Array:
        """``[embedding_size]`` of a pooled state ``[hidden_size]``."""
        for affine, activation in self._layers:
            # Not a matrix product: a BLAS may choose another order of summation.
            result = np.einsum("nk,k->n", affine.weight, x.astype(np.float32)).astype(np.float64)
            if affine.bias is not None:
                result = result + affine.bias
            x = np.tanh(result) if activation == "tanh" else result
        return x


def open_dense_layers(path: Path, embedding_size: int) -> DenseLayers:
    """Read the layers of the model at ``path``, the last of which has ``embedding_size`` outputs.

    Raises:
        ModelLoadError: one is missing, or does not fit the one before.
    """
    from tellin import loading
    from tellin.loading.dense_modules import dense_modules
    from tellin.loading.dequantize import dequantize

    layers: list[tuple[Affine, str]] = []
    with loading.open_model(path) as source:
        modules, files = dense_modules(source)
        try:
            width = source.hparams.state_size
            for module in modules:
                rows = module.weight.shape[0]
                has_bias = module.bias is not None and module.bias.shape != (rows,)
                if module.weight.shape != (rows, width) or has_bias:
                    raise ModelLoadError(
                        f"{path}: the dense layer {len(layers)} after the pooling has shape "
                        f"{module.weight.shape}; its input has {width} values"
                    )
                weight = dequantize(module.weight)
                bias = None if module.bias is None else dequantize(module.bias)
                values = [weight] if bias is None else [weight, bias]
                if not all(np.isfinite(one).all() for one in values):
                    raise ModelLoadError(f"{path}: a dense layer holds NaN or infinity")
                layers.append((Affine(weight, bias), module.activation))
                width = rows
        finally:
            for file in files:
                file.close()
            source.release_pages()
    if width != embedding_size or not layers:
        raise ModelLoadError(
            f"{path}: the {len(layers)} dense layers after the pooling end with {width} values; "
            f"the configuration (out_features or feat_out) says {embedding_size}"
        )
    return DenseLayers(layers)
