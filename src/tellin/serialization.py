"""msgpack encoding of the protocol structs, with arrays kept out of the way.

A message is one main frame plus auxiliary frames: NumPy arrays of at least ``zero_copy_threshold``
bytes travel as frames of their own that alias the array's memory; smaller ones are inlined. Other
objects are refused, unless insecure serialization is switched on (then they are pickled). Encoders
and decoders are not thread-safe: one per thread.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from tellin.exceptions import InvalidTypeError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")

EXT_ARRAY_INLINE = 1
EXT_ARRAY_FRAME = 2
EXT_PICKLE = 3

Frame = bytes | bytearray | memoryview


def join_frames(frames: Sequence[Frame]) -> bytes:
    """All frames in one piece, for transports where only one piece is sent whole or not at all.

    Layout: number of frames and the size of each as little-endian 64-bit integers, then the frames.
    """
    sizes = struct.pack(f"<{len(frames) + 1}Q", len(frames), *map(len, frames))
    return b"".join((sizes, *frames))


def split_frames(message: Frame) -> list[memoryview]:
    """The frames in a message of `join_frames`, without a copy.

    Raises:
        msgspec.DecodeError: it is none.
    """
    view = memoryview(message)
    try:
        (count,) = struct.unpack_from("<Q", view)
        sizes = struct.unpack_from(f"<{count}Q", view, 8)
    except struct.error as error:
        raise msgspec.DecodeError(f"message of {len(view)} bytes has no frames: {error}") from None
    frames = []
    start = 8 * (count + 1)
    for size in sizes:
        frames.append(view[start : start + size])
        start += size
    if not frames or start != len(view):
        raise msgspec.DecodeError(f"message has {len(view)} bytes where its sizes say {start}")
    return frames


class Encoder:
    """Turns an object into frames.

    The auxiliary frames alias the arrays of the object: keep it alive until the frames are sent.
    """

    def __init__(self, zero_copy_threshold: int = 256, allow_insecure: bool = False) -> None:
        self._threshold = zero_copy_threshold
        self._allow_insecure = allow_insecure
        self._frames: list[Frame] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._enc_hook)

    def encode(self, obj: Any) -> list[Frame]:
        """Frames of ``obj``; the first is the main frame.

        Raises:
            InvalidTypeError: an object inside cannot be serialized; the message says how to allow
                it.
        """
        frames: list[Frame] = [b""]
        self._frames = frames
        frames[0] = self._encoder.encode(obj)
        self._frames = []
        return frames

    def _enc_hook(self, obj: Any) -> Any:
        import numpy as np

        if isinstance(obj, np.ndarray) and obj.dtype.kind in "biufc":
            return self._encode_array(obj)
        if isinstance(obj, np.generic):
            return obj.item()
        what = f"object of type {type(obj).__module__}.{type(obj).__qualname__}"
        if not self._allow_insecure:
            raise InvalidTypeError(
                f"{what} cannot be sent to another process; set "
                "TELLIN_ALLOW_INSECURE_SERIALIZATION=1 to allow pickling, or run in process"
            )
        try:
            return msgspec.msgpack.Ext(EXT_PICKLE, pickle.dumps(obj))
        except Exception as error:  # pickling can run anything
            raise InvalidTypeError(
                f"{what} cannot be sent to another process: {error}; run in process"
            ) from error

    def _encode_array(self, array: npt.NDArray[Any]) -> msgspec.msgpack.Ext:
        import numpy as np

        array = np.asarray(array, order="C")
        head = (array.dtype.str, array.shape)
        if array.nbytes < max(self._threshold, 1):
            data = msgspec.msgpack.encode((*head, array.tobytes()))
            return msgspec.msgpack.Ext(EXT_ARRAY_INLINE, data)
        self._frames.append(memoryview(array.data).cast("B"))
        data = msgspec.msgpack.encode((*head, len(self._frames) - 1))
        return msgspec.msgpack.Ext(EXT_ARRAY_FRAME, data)


class Decoder(Generic[T]):
    """Turns frames back into an object of ``type_``.

    Decoded arrays of auxiliary frames alias the frame and are read-only.
    """

    def __init__(self, type_: type[T] | Any = Any, allow_insecure: bool = False) -> None:
        self._allow_insecure = allow_insecure
        self._frames: Sequence[Frame] = ()
        self._decoder = msgspec.msgpack.Decoder(type_, ext_hook=self._ext_hook)

    def decode(self, frames: Sequence[Frame]) -> T:
        """Object made of ``frames``.

        Raises:
            msgspec.DecodeError: the bytes are no msgpack, or do not have the declared type.
            TypeError: a pickled object came although insecure serialization is off.
        """
        self._frames = frames
        try:
            result: T = self._decoder.decode(frames[0])
        finally:
            self._frames = ()
        return result

    def _ext_hook(self, code: int, data: memoryview) -> Any:
        if code == EXT_ARRAY_INLINE:
            return _array_from(*msgspec.msgpack.decode(data))
        if code == EXT_ARRAY_FRAME:
            dtype, shape, index = msgspec.msgpack.decode(data)
            if not 0 < index < len(self._frames):
                raise msgspec.ValidationError(f"message has no auxiliary frame {index}")
            return _array_from(dtype, shape, self._frames[index])
        if code == EXT_PICKLE:
            if not self._allow_insecure:
                raise TypeError("received a pickled object, but insecure serialization is off")
            return pickle.loads(data)
        raise msgspec.ValidationError(f"unknown msgpack extension code {code}")


def _array_from(dtype: str, shape: list[int], data: Frame) -> npt.NDArray[np.generic]:
    import numpy as np

    array = (
        np.frombuffer(data, dtype=np.dtype(dtype)) if len(data) else np.empty(0, np.dtype(dtype))
    )
    array = array.reshape(shape)
    if not array.flags.aligned:  # it lies anywhere in a message; not all code copes with that
        array = array.copy()
    array.flags.writeable = False
    return array
