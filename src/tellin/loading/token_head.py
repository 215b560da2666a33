"""A classifier's head made of a language model's output matrix: how likely it goes on with a token.

Qwen3-Reranker answers "yes" or "no". The two tokens' rows of the output matrix are a head of two
labels; their difference is one of one label, whose sigmoid is the share of "yes" between the two.

Source: Zhang et al. 2025 (Qwen3 Embedding), section 2; ``classifier_from_token`` and
``is_original_qwen3_reranker`` as vLLM's configurations have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tellin.exceptions import ModelLoadError
from tellin.loading.dequantize import dequantize, dequantize_rows
from tellin.loading.model_metadata import find_token
from tellin.loading.pooling import FROM_TOKEN, YES_OR_NO, judges_yes_or_no
from tellin.loading.tensors import QuantType, TensorRef
from tellin.loading.typed_mapping import TypedMapping

_HEAD = "classifier.out_proj.weight"


def head_of_folder(
    folder: Path, config: TypedMapping, tensors: Mapping[str, TensorRef]
) -> dict[str, TensorRef]:
    """The head that a ``config.json`` makes of tokens, by its canonical name; none if it does not.

    Raises:
        ModelLoadError: a token is not in the vocabulary, or there is no output matrix.
    """
    if not config.has(FROM_TOKEN) or _HEAD in tensors:
        return {}
    matrix = tensors.get("lm_head.weight", tensors.get("embed_tokens.weight"))
    if matrix is None:
        raise ModelLoadError(f"{config.path}: {FROM_TOKEN!r} needs an output matrix; there is none")
    rows = []
    for text in config.get_strings(FROM_TOKEN):
        token = find_token(folder / "tokenizer.json", text)
        if token is None or token >= matrix.shape[0]:
            raise ModelLoadError(f"{config.path}: {FROM_TOKEN!r} names {text!r}, which is no token")
        rows.append(dequantize_rows(matrix, token, token + 1)[0])
    values = np.stack(rows)
    if judges_yes_or_no(config):
        values = values[1:] - values[:1]
    return {_HEAD: _tensor(values)}


def head_of_gguf(values: TypedMapping, tensors: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    """The one-label head of a file that has one of the labels yes and no; none for other files."""
    name = f"{values.get_str('general.architecture', '')}.classifier.output_labels"
    head = tensors.get(_HEAD)
    if head is None or not values.has(name) or tuple(values.get_strings(name)) != YES_OR_NO:
        return {}
    if len(head.shape) != 2 or head.shape[0] != 2:
        raise ModelLoadError(f"{values.path}: the head has shape {head.shape}; expected two rows")
    rows = dequantize(head)
    return {_HEAD: _tensor(rows[:1] - rows[1:])}


def _tensor(values: npt.NDArray[np.float32]) -> TensorRef:
    data = np.ascontiguousarray(values, dtype=np.float32).reshape(-1).view(np.uint8)
    return TensorRef(_HEAD, values.shape, QuantType.F32, data)
