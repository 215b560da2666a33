"""Prompts given as embeddings: what is accepted, checked and brought into one form.

Owns the forms: arrays (and whatever has the array protocol, such as torch's tensors), and the files
that HTTP clients send. The result is always `[num_tokens, hidden_size]` float32 in C order, finite,
read-only, and nobody else's memory that could still change. Nothing here runs code that came with
the data: pickles are never opened.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import math
import re
import struct
import warnings
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
_MAX_DIMENSIONS, _MAX_EXTENT = 8, 1 << 40
_NUMBERS = re.compile(r"[<>=|]?(b1|[iu][1248]|f[248]|c8|c16)")
"""Types of NumPy whose meaning is plain; of these `prompt_rows` takes the floats."""


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
    """A ``.npy`` file: version, size of the header, the header as a literal of Python, values.

    Source: NumPy's documentation of the format (NEP 1). The header is read here, because NumPy's
    reader lets many exceptions through when one is broken.
    """
    import numpy as np

    try:
        size_bytes = {(1, 0): 2, (2, 0): 4, (3, 0): 4}.get((data[6], data[7]))
        if size_bytes is None:
            raise ValueError(f"its version is {data[6]}.{data[7]}; 1.0, 2.0 and 3.0 are read")
        start = 8 + size_bytes + int.from_bytes(data[8 : 8 + size_bytes], "little")
        if start > min(_MAX_HEADER, len(data)):
            raise ValueError(f"its header is said to end at byte {start} of {len(data)}")
        header = _literal(data[8 + size_bytes : start])
        if not isinstance(header, dict) or set(header) != {"descr", "fortran_order", "shape"}:
            raise ValueError("its header does not name descr, fortran_order and shape alone")
        if not isinstance(header["fortran_order"], bool):
            raise ValueError(f"its fortran_order is {header['fortran_order']!r:.60}")
    except (IndexError, ValueError) as error:
        raise InvalidParameterError(
            f"prompt_embeds: broken .npy file: {error}", parameter=_NAME
        ) from None
    descr = header["descr"]
    if not isinstance(descr, str) or not _NUMBERS.fullmatch(descr):
        raise InvalidTypeError(
            f"prompt_embeds: a .npy file of {descr!r:.60}, which are no numbers (no Python "
            "objects, texts or records)",
            parameter=_NAME,
        )
    dtype = np.dtype(descr)
    shape = _checked_shape(header["shape"], dtype.itemsize, len(data) - start)
    flat = np.frombuffer(data, dtype, offset=start)
    return flat.reshape(shape, order="F" if header["fortran_order"] else "C")


def _literal(header: bytes) -> Any:
    """The value of a literal of Python; nothing is run.

    Raises:
        ValueError: it is none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of strange escapes in texts
            return ast.literal_eval(header.decode("utf-8").strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise ValueError("its header is not a dictionary as numpy.save writes it") from None


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
        kind, shape = tensors[0]["dtype"], tensors[0]["shape"]
        begin, end = tensors[0]["data_offsets"]
        if kind not in _SAFETENSORS_TYPES:
            raise ValueError(f"its dtype is {kind}; send {', '.join(_SAFETENSORS_TYPES)}")
        if type(begin) is not int or type(end) is not int:
            raise ValueError(f"its data_offsets are {[begin, end]!r:.60}, expected two integers")
        if not 0 <= begin <= end <= len(data) - 8 - size:
            raise ValueError("its values are not where the header says")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidParameterError(
            f"prompt_embeds: broken safetensors file: {error}", parameter=_NAME
        ) from None
    dtype = np.dtype(_SAFETENSORS_TYPES[kind])
    shape = _checked_shape(shape, dtype.itemsize, end - begin)
    flat: npt.NDArray[Any] = np.frombuffer(data[8 + size + begin : 8 + size + end], dtype)
    if kind == "BF16":
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    return flat.reshape(shape)


def _checked_shape(shape: Any, itemsize: int, num_bytes: int) -> tuple[int, ...]:
    """The shape that a header promises, refused if it is something else than there is."""
    if (
        not isinstance(shape, tuple | list)
        or not all(type(extent) is int and 0 <= extent <= _MAX_EXTENT for extent in shape)
        or len(shape) > _MAX_DIMENSIONS
        or math.prod(shape) * itemsize != num_bytes
    ):
        raise InvalidParameterError(
            f"prompt_embeds: the file says its shape is {shape!r:.100}, which are not the "
            f"{num_bytes} bytes of values that follow",
            parameter=_NAME,
        )
    return tuple(shape)
