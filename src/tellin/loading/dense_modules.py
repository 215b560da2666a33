"""The dense layers that some embedding models have after their pooling, as they lie on disk.

Sentence-transformers folders have a folder for each; GGUF files have them among their tensors. What
they mean is `tellin.worker.dense_layers`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.json_file import read_optional_json_object
from tellin.loading.pooling import GGUF_DENSE, module_list
from tellin.loading.safetensors import SafetensorsFile, open_safetensors
from tellin.loading.tensors import TensorRef

if TYPE_CHECKING:
    from tellin.loading.model_source import ModelSource

_DENSE_ACTIVATIONS = {"Identity": "none", "Tanh": "tanh"}
"""PyTorch's modules that dense layers name."""


@dataclass(frozen=True)
class DenseModule:
    """A dense layer after the pooling: its tensors and what its values go through."""

    weight: TensorRef
    bias: TensorRef | None
    activation: str
    """none or tanh."""


def dense_modules(source: ModelSource) -> tuple[list[DenseModule], list[SafetensorsFile]]:
    """The dense layers after the pooling, in order, and the files to close when they are read.

    Of a folder as ``modules.json`` lists them; of a GGUF file its tensors ``dense_2``, ``dense_3``.

    Raises:
        ModelLoadError: a file is missing or damaged.
        UnsupportedModelError: an activation that is not supported.
    """
    if source.metadata.file_format == "gguf":
        names = [f"{name}.weight" for name in GGUF_DENSE]
        found = [source.tensors[name] for name in names if name in source.tensors]
        return [DenseModule(tensor, None, "none") for tensor in found], []
    layers: list[DenseModule] = []
    files: list[SafetensorsFile] = []
    for kind, place in module_list(source.path / "modules.json"):
        if kind != "Dense":
            continue
        folder = source.path / place
        config = read_optional_json_object(folder / "config.json")
        name = config.get_str("activation_function", "Tanh") if config else "Tanh"
        short = name.rpartition(".")[2]
        if short not in _DENSE_ACTIVATIONS:
            raise UnsupportedModelError(
                f"{folder / 'config.json'}: activation {name!r} is not supported; supported are "
                f"{', '.join(_DENSE_ACTIVATIONS)}"
            )
        opened = open_safetensors(folder, lambda name: False)
        files += opened
        tensors = {key: tensor for file in opened for key, tensor in file.tensors.items()}
        if "linear.weight" not in tensors:
            raise ModelLoadError(f"{folder}: has no tensor 'linear.weight'")
        layers.append(
            DenseModule(
                tensors["linear.weight"], tensors.get("linear.bias"), _DENSE_ACTIVATIONS[short]
            )
        )
    return layers, files
