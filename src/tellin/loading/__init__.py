"""Models as they lie on disk: files, names, hyperparameters, tokenizers, the model store.

Knows file formats and no kernels. `open_model` and `resolve_model` are the two ways in. Names are
loaded on first use, so that importing `tellin.loading` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tellin.loading.images import ImageProcessor, ProcessedImage, load_image_processor
    from tellin.loading.model_metadata import ModelMetadata
    from tellin.loading.model_source import (
        ModelSource,
        open_metadata,
        open_model,
        open_predictor,
    )
    from tellin.loading.store import StoredModel, list_models, pull, resolve_model
    from tellin.loading.tensors import ModelHParams, QuantType, RopeScaling, TensorRef
    from tellin.loading.tokenizer import Tokenizer, load_tokenizer
    from tellin.loading.vision import VisionSource, open_vision

_MODULES = {
    "ImageProcessor": "images",
    "ModelHParams": "tensors",
    "ModelMetadata": "model_metadata",
    "ModelSource": "model_source",
    "ProcessedImage": "images",
    "QuantType": "tensors",
    "RopeScaling": "tensors",
    "StoredModel": "store",
    "TensorRef": "tensors",
    "Tokenizer": "tokenizer",
    "VisionSource": "vision",
    "list_models": "store",
    "load_image_processor": "images",
    "load_tokenizer": "tokenizer",
    "open_metadata": "model_source",
    "open_model": "model_source",
    "open_predictor": "model_source",
    "open_vision": "vision",
    "pull": "store",
    "resolve_model": "store",
}

__all__ = [
    "ImageProcessor",
    "ModelHParams",
    "ModelMetadata",
    "ModelSource",
    "ProcessedImage",
    "QuantType",
    "RopeScaling",
    "StoredModel",
    "TensorRef",
    "Tokenizer",
    "VisionSource",
    "list_models",
    "load_image_processor",
    "load_tokenizer",
    "open_metadata",
    "open_model",
    "open_predictor",
    "open_vision",
    "pull",
    "resolve_model",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tellin.loading' has no attribute {name!r}")
    return getattr(import_module(f"tellin.loading.{_MODULES[name]}"), name)
