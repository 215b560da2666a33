"""Safetensors checkpoints: one file, or shards listed by an index; memory-mapped, nothing copied.

Knows the container and no model. The header is JSON that a stranger wrote: sizes and offsets are
checked against the file before any use.

Source of the format: safetensors documentation, "Format" (8 bytes of header length, little-endian;
a JSON header; the data). Own parser, because views must keep the map alive and give raw bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tellin.exceptions import ModelLoadError, ModelNotFoundError, UnsupportedModelError
from tellin.loading.json_file import is_file, read_json_object
from tellin.loading.mapped_file import MappedFile
from tellin.loading.tensors import QuantType, TensorRef

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

PICKLE_HINT = (
    "; pytorch_model.bin is a pickle, which can run code and is not read: save it as safetensors, "
    "for example with transformers: AutoModelForCausalLM.from_pretrained(FOLDER)"
    ".save_pretrained(FOLDER)"
)
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_DTYPES = {"F32": QuantType.F32, "F16": QuantType.F16, "BF16": QuantType.BF16}
RAW_DTYPES = {"F8_E4M3": 1, "I8": 1, "I32": 4, "I64": 8}
"""Types of quantised layers' tensors, and their bytes."""


@dataclass(frozen=True, eq=False)
class RawTensor:
    """A tensor of one of `RAW_DTYPES`: ``data`` is a read-only uint8 view of its bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: npt.NDArray[np.uint8]


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class SafetensorsFile:
    """One file, memory-mapped: ``tensors`` by the file's names.

    Args:
        path: the file.
        is_dropped: names to leave out, before their type is looked at.
        with_raw: take tensors of `RAW_DTYPES`, too; they are in ``raw``.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelLoadError: the file is damaged; the message names it and says what is wrong.
        UnsupportedModelError: a tensor is not F32, F16 or BF16.
    """

    def __init__(
        self, path: Path, is_dropped: Callable[[str], bool], with_raw: bool = False
    ) -> None:
        self.path = path
        self.raw: dict[str, RawTensor] = {}
        self._with_raw = with_raw
        self._file = MappedFile(path)
        try:
            self.tensors = self._read_tensors(is_dropped)
        except BaseException:
            self._file.close()
            raise

    @property
    def num_bytes(self) -> int:
        return self._file.num_bytes

    def release_pages(self, tensor: TensorRef | None = None) -> bool:
        """Give back the pages of a tensor (None: of the file); see `MappedFile.release_pages`."""
        return self._file.release_pages(None if tensor is None else tensor.data)

    def close(self) -> None:
        """Let go of the file. Tensors that are still held stay valid."""
        self.tensors = {}
        self.raw = {}
        self._file.close()

    def _read_tensors(self, is_dropped: Callable[[str], bool]) -> dict[str, TensorRef]:
        header_bytes = int.from_bytes(self._file.map[:8], "little")
        data_start = 8 + header_bytes
        if header_bytes > _MAX_HEADER_BYTES or data_start > self._file.num_bytes:
            raise self._error(
                f"is not a safetensors file: its header would have {header_bytes} bytes "
                f"in a file of {self._file.num_bytes}"
            )
        try:
            header = msgspec.json.decode(self._file.map[8:data_start], type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            entries = {
                name: msgspec.json.decode(raw, type=_Entry)
                for name, raw in header.items()
                if not is_dropped(name)
            }
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise self._error(f"has a damaged header: {error}") from None
        tensors = {}
        for name, entry in entries.items():
            if self._with_raw and entry.dtype in RAW_DTYPES:
                data = self._data(name, entry, RAW_DTYPES[entry.dtype], data_start)
                self.raw[name] = RawTensor(name, tuple(entry.shape), entry.dtype, data)
            else:
                tensors[name] = self._tensor(name, entry, data_start)
        return tensors

    def _tensor(self, name: str, entry: _Entry, data_start: int) -> TensorRef:
        if entry.dtype not in _DTYPES:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} has type {entry.dtype}, which is not supported; "
                f"supported types: {', '.join(_DTYPES)}"
            )
        quant_type = _DTYPES[entry.dtype]
        data = self._data(name, entry, quant_type.block_bytes, data_start)
        return TensorRef(name, tuple(entry.shape), quant_type, data)

    def _data(
        self, name: str, entry: _Entry, element_bytes: int, data_start: int
    ) -> npt.NDArray[np.uint8]:
        if not name:
            raise self._error("has a tensor without a name")
        if len(entry.shape) > 8 or any(size < 1 for size in entry.shape):
            raise self._error(f"tensor {name!r} has shape {entry.shape}")
        num_bytes = math.prod(entry.shape) * element_bytes
        start, end = entry.data_offsets
        if start < 0 or end - start != num_bytes:
            raise self._error(
                f"tensor {name!r} has shape {entry.shape} and type {entry.dtype}, which are "
                f"{num_bytes} bytes, but lies at [{start}, {end})"
            )
        if data_start + end > self._file.num_bytes:
            raise self._error(
                f"tensor {name!r} ends at byte {data_start + end}, "
                f"but the file at {self._file.num_bytes} (truncated?)"
            )
        return self._file.view(data_start + start, num_bytes)

    def _error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {message}")


def open_safetensors(
    folder: Path, is_dropped: Callable[[str], bool], with_raw: bool = False
) -> list[SafetensorsFile]:
    """Open the checkpoint in a folder: ``model.safetensors``, or the shards of its index.

    Args: as of `SafetensorsFile`.

    Raises: as `SafetensorsFile`; `ModelLoadError` also if the index and the shards disagree.
    """
    index_path = folder / INDEX_NAME
    if is_file(folder / SINGLE_NAME):
        return [SafetensorsFile(folder / SINGLE_NAME, is_dropped, with_raw)]
    if not is_file(index_path):
        pickled = any(folder.glob("pytorch_model*.bin"))
        raise ModelNotFoundError(
            f"{folder}: has neither {SINGLE_NAME} nor {INDEX_NAME}{PICKLE_HINT if pickled else ''}"
        )
    weight_map = read_json_object(index_path).get_mapping("weight_map")
    shard_of: dict[str, str] = {name: weight_map.get_str(name) for name in weight_map}
    files: list[SafetensorsFile] = []
    try:
        for shard in sorted(set(shard_of.values())):
            if Path(shard).name != shard or shard in ("", ".", ".."):
                raise ModelLoadError(f"{index_path}: {shard!r} is not a file name")
            if not is_file(folder / shard):
                raise ModelLoadError(f"{index_path}: names {shard}, which is missing")
            files.append(SafetensorsFile(folder / shard, is_dropped, with_raw))
        _check_shards(index_path, shard_of, files, is_dropped)
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def _check_shards(
    index_path: Path,
    shard_of: dict[str, str],
    files: list[SafetensorsFile],
    is_dropped: Callable[[str], bool],
) -> None:
    held = {(name, file.path.name) for file in files for name in (*file.tensors, *file.raw)}
    listed = {(name, shard) for name, shard in shard_of.items() if not is_dropped(name)}
    for name, shard in sorted(listed - held):
        raise ModelLoadError(f"{index_path}: tensor {name!r} is not in {shard}")
    for name, shard in sorted(held - listed):
        raise ModelLoadError(f"{index_path}: does not list tensor {name!r} of {shard}")
