"""Models as they lie on disk: files, names, hyperparameters, tokenizers, the model store.

Knows file formats and no kernels. `open_model` and `resolve_model` are the two ways in. Names are
loaded on first use, so that importing `tellin.loading` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tellin.loading.model_metadata import ModelMetadata
    from tellin.loading.model_source import ModelSource, open_metadata, open_model
    from tellin.loading.store import StoredModel, list_models, pull, resolve_model
    from tellin.loading.tensors import ModelHParams, QuantType, RopeScaling, TensorRef
    from tellin.loading.tokenizer import Tokenizer, load_tokenizer

_MODULES = {
    "ModelHParams": "tensors",
    "ModelMetadata": "model_metadata",
    "ModelSource": "model_source",
    "QuantType": "tensors",
    "RopeScaling": "tensors",
    "StoredModel": "store",
    "TensorRef": "tensors",
    "Tokenizer": "tokenizer",
    "list_models": "store",
    "load_tokenizer": "tokenizer",
    "open_metadata": "model_source",
    "open_model": "model_source",
    "pull": "store",
    "resolve_model": "store",
}

__all__ = [
    "ModelHParams",
    "ModelMetadata",
    "ModelSource",
    "QuantType",
    "RopeScaling",
    "StoredModel",
    "TensorRef",
    "Tokenizer",
    "list_models",
    "load_tokenizer",
    "open_metadata",
    "open_model",
    "pull",
    "resolve_model",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tellin.loading' has no attribute {name!r}")
    return getattr(import_module(f"tellin.loading.{_MODULES[name]}"), name)
