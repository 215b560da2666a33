"""Prompts given as embeddings: what is accepted, checked and brought into one form.

Owns the forms: arrays (and whatever has the array protocol, such as torch's tensors), and the files
that HTTP clients send. The result is always `[num_tokens, hidden_size]` float32 in C order, finite,
read-only, and nobody else's memory that could still change. Nothing here runs code that came with
the data: pickles are never opened.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import struct
from typing import TYPE_CHECKING, Any

from tellin.config import ModelConfig
from tellin.exceptions import (
    ContextLengthError,
    InvalidParameterError,
    InvalidTypeError,
    UnsupportedFeatureError,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_NAME = "prompt_embeds"
_HOW = "[num_tokens, hidden_size] numbers: a NumPy array or a torch tensor"
_SAFETENSORS_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_MAX_HEADER = 1 << 16
"""Longest header of a file: it names one array."""


def prompt_rows(
    given: Any, model: ModelConfig, *, may_be_cut: bool = False
) -> npt.NDArray[np.float32]:
    """The rows of a prompt, as the engine works with them.

    Args:
        given: ``[num_tokens, hidden_size]`` floats of 16, 32 or 64 bits (bfloat16 too), or the same
            with a leading dimension of 1. Anything with ``__array__``, or a torch tensor.
        may_be_cut: whether there may be more rows than the context holds.

    Raises:
        UnsupportedFeatureError: the engine does not take embeddings.
        InvalidTypeError: not an array of floats.
        InvalidParameterError: another shape, or values that are no finite numbers.
        ContextLengthError: more rows than the context holds.
    """
    import numpy as np

    if not model.enable_prompt_embeds:
        raise UnsupportedFeatureError(
            "prompt_embeds are off: start the engine with enable_prompt_embeds=True"
        )
    array = _as_array(given)
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2 or array.shape[1] != model.hidden_size:
        raise InvalidParameterError(
            f"prompt_embeds must have the shape [num_tokens, {model.hidden_size}], the model's "
            f"hidden size, got {list(array.shape)}",
            parameter=_NAME,
        )
    if len(array) == 0:
        raise InvalidParameterError(
            "prompt_embeds have no rows; a prompt must have at least one token", parameter=_NAME
        )
    if len(array) > model.max_model_len and not may_be_cut:
        raise ContextLengthError(
            f"prompt_embeds have {len(array)} rows, but the context (max_model_len) is "
            f"{model.max_model_len}; shorten them, or raise max_model_len"
        )
    if array.dtype == np.float32 and array.flags.c_contiguous and not _may_change(array):
        rows = array
    else:
        with np.errstate(over="ignore"):  # of a float64; found below
            rows = np.array(array, dtype=np.float32, order="C")
        rows.flags.writeable = False
    if not np.isfinite(rows).all():
        bad = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
        raise InvalidParameterError(
            f"prompt_embeds have values that are no finite 32-bit numbers (NaN, inf or too large), "
            f"first in row {bad}",
            parameter=_NAME,
        )
    return rows


def _may_change(array: npt.NDArray[Any]) -> bool:
    """Whether somebody else could still write into it, which would belie the prefix cache."""
    import numpy as np

    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return True
        base = base.base
    return base is not None and not isinstance(base, bytes)


def _as_array(given: Any) -> npt.NDArray[Any]:
    """An array of floats, without a copy where the memory can be shared."""
    import numpy as np

    if isinstance(given, str | bytes | list | tuple) or not (
        hasattr(given, "__array__") or hasattr(given, "__array_interface__")
    ):
        raise InvalidTypeError(
            f"prompt_embeds must be {_HOW}; got {type(given).__name__}", parameter=_NAME
        )
    try:
        if hasattr(given, "detach"):  # a torch tensor: gradients and other devices have no array
            given = given.detach().cpu()
            if str(given.dtype) == "torch.bfloat16":
                given = given.float()
        array: npt.NDArray[Any] = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidTypeError(f"prompt_embeds cannot be read: {error}", parameter=_NAME) from error
    if array.dtype.name == "bfloat16":  # the type of a package beside NumPy
        array = array.astype(np.float32)
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise InvalidTypeError(
            "prompt_embeds must be floats of 16, 32 or 64 bits, got an array of "
            f"{array.dtype.name}; token ids are prompt_token_ids",
            parameter=_NAME,
        )
    return array


# ---------------------------------------------------------------------- files, from HTTP


def read_base64(text: str) -> npt.NDArray[Any]:
    """The array in a base64-encoded ``.npy`` or safetensors file.

    Raises:
        InvalidParameterError: it is neither, or broken.
        UnsupportedFeatureError: a file of ``torch.save``, which is a pickle.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidParameterError(
            f"prompt_embeds is not valid base64: {error}", parameter=_NAME
        ) from None
    if data.startswith(b"\x93NUMPY"):
        return _read_npy(data)
    if data.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        raise UnsupportedFeatureError(
            "prompt_embeds is a file of torch.save or numpy.savez, a pickle or an archive, which "
            "is not opened: send numpy.save(file, tensor.float().numpy()), or safetensors"
        )
    if len(data) > 10 and data[8:9] == b"{":
        return _read_safetensors(data)
    raise InvalidParameterError(
        "prompt_embeds must be a base64-encoded .npy file (numpy.save) or safetensors file; it "
        f"begins with {data[:8]!r}",
        parameter=_NAME,
    )


def _read_npy(data: bytes) -> npt.NDArray[Any]:
    import numpy as np
    from numpy.lib import format as npy

    stream = io.BytesIO(data)
    try:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, is_fortran, dtype = read(stream)
    except ValueError as error:
        raise InvalidParameterError(
            f"prompt_embeds: broken .npy file: {error}", parameter=_NAME
        ) from None
    if dtype.hasobject:
        raise InvalidTypeError("prompt_embeds: a .npy file of Python objects", parameter=_NAME)
    start = stream.tell()
    _check_size(shape, dtype.itemsize, len(data) - start)
    flat = np.frombuffer(data, dtype, offset=start)
    return flat.reshape(shape, order="F" if is_fortran else "C")


def _read_safetensors(data: bytes) -> npt.NDArray[Any]:
    """The one tensor of a file: header size as u64, header as JSON, values."""
    import numpy as np

    (size,) = struct.unpack_from("<Q", data)
    try:
        if size > min(_MAX_HEADER, len(data) - 8):
            raise ValueError(f"its header is said to have {size} bytes")
        header = json.loads(data[8 : 8 + size])
        tensors = [value for key, value in header.items() if key != "__metadata__"]
        if len(tensors) != 1:
            raise ValueError(f"it holds {len(tensors)} tensors; send one")
        kind, shape = tensors[0]["dtype"], [int(extent) for extent in tensors[0]["shape"]]
        begin, end = tensors[0]["data_offsets"]
        if kind not in _SAFETENSORS_TYPES:
            raise ValueError(f"its dtype is {kind}; send {', '.join(_SAFETENSORS_TYPES)}")
        if not 0 <= begin <= end <= len(data) - 8 - size:
            raise ValueError("its values are not where the header says")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidParameterError(
            f"prompt_embeds: broken safetensors file: {error}", parameter=_NAME
        ) from None
    dtype = np.dtype(_SAFETENSORS_TYPES[kind])
    _check_size(shape, dtype.itemsize, end - begin)
    flat: npt.NDArray[Any] = np.frombuffer(data[8 + size + begin : 8 + size + end], dtype)
    if kind == "BF16":
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    return flat.reshape(shape)


def _check_size(shape: Any, itemsize: int, num_bytes: int) -> None:
    """Refuse a header that promises something else than there is."""
    if any(extent < 0 for extent in shape) or math.prod(shape) * itemsize != num_bytes:
        raise InvalidParameterError(
            f"prompt_embeds: the file says its shape is {list(shape)}, which are not the "
            f"{num_bytes} bytes of values that follow",
            parameter=_NAME,
        )
