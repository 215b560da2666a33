"""Safetensors: equality with the reference library, shards, damage."""

from __future__ import annotations

import gc
import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tellin.exceptions import LoadError, ModelLoadError, ModelNotFoundError, UnsupportedModelError
from tellin.loading.safetensors import INDEX_NAME, SafetensorsFile, open_safetensors
from tellin.loading.tensors import QuantType
from tests.loading.models import pack_safetensors, safetensors_bytes, safetensors_entry


def keep(name: str) -> bool:
    return False


def write(folder: Path, data: bytes, name: str = "model.safetensors") -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def test_equal_to_what_the_reference_library_wrote(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    arrays = {
        "a": generator.standard_normal((3, 4)).astype(np.float32),
        "b.weight": generator.standard_normal(5).astype(np.float16),
        "c": generator.standard_normal((2, 1, 2)).astype(np.float32),
    }
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "np"})
    tensors = SafetensorsFile(tmp_path / "model.safetensors", keep).tensors
    assert set(tensors) == set(arrays)
    for name, array in arrays.items():
        assert tensors[name].shape == array.shape
        assert tensors[name].data.tobytes() == array.tobytes()
        assert not tensors[name].data.flags.writeable
        assert not tensors[name].data.flags.owndata
    assert tensors["b.weight"].quant_type is QuantType.F16


def test_bfloat16_stays_raw(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC000], np.uint16)
    tensor = SafetensorsFile(write(tmp_path, pack_safetensors({"x": bits})), keep).tensors["x"]
    assert tensor.quant_type is QuantType.BF16
    assert tensor.data.view(np.uint16).tolist() == bits.tolist()


def test_views_survive_close(tmp_path: Path) -> None:
    path = write(tmp_path, pack_safetensors({"x": np.arange(4, dtype=np.float32)}))
    file = SafetensorsFile(path, keep)
    tensor = file.tensors["x"]
    file.close()
    path.unlink()
    del file
    gc.collect()
    assert tensor.data.view(np.float32).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_dropped_names_may_have_any_type(tmp_path: Path) -> None:
    header = {
        "position_ids": safetensors_entry("I64", (1,), 0, 8),
        "x": safetensors_entry("F32", (1,), 8, 12),
    }
    path = write(tmp_path, safetensors_bytes(header, bytes(12)))
    with pytest.raises(UnsupportedModelError, match="'position_ids' has type I64"):
        SafetensorsFile(path, keep)
    assert list(SafetensorsFile(path, lambda name: "ids" in name).tensors) == ["x"]


GOOD = {"x": safetensors_entry("F32", (2, 2), 0, 16)}
ONE_TENSOR = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
DAMAGED: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "is empty"),
    "short": (b"abc", "is not a safetensors file"),
    "huge header": (struct.pack("<Q", 2**63) + b"{}", "header would have 9223372036854775808"),
    "header past the end": (struct.pack("<Q", 100) + b"{}", "in a file of 10"),
    "no JSON": (safetensors_bytes(b"hello"), "damaged header"),
    "a list": (safetensors_bytes(b"[]"), "damaged header"),
    "not UTF-8": (safetensors_bytes(b'{"\xff": 1}'), "damaged header"),
    "deep nesting": (safetensors_bytes(b'{"x":' + b"[" * 100_000), "damaged header"),
    "entry of a wrong type": (safetensors_bytes({"x": 5}), "damaged header"),
    "missing offsets": (safetensors_bytes({"x": {"dtype": "F32", "shape": [1]}}), "damaged header"),
    "shape of floats": (safetensors_bytes({"x": ONE_TENSOR | {"shape": [1.5]}}), "damaged header"),
    "three offsets": (
        safetensors_bytes({"x": ONE_TENSOR | {"data_offsets": [0, 1, 2]}}),
        "damaged header",
    ),
    "negative size": (
        safetensors_bytes({"x": ONE_TENSOR | {"shape": [-2, -2]}}, bytes(16)),
        "has shape",
    ),
    "negative offset": (
        safetensors_bytes({"x": ONE_TENSOR | {"data_offsets": [-16, 0]}}, bytes(16)),
        r"lies at \[-16, 0\)",
    ),
    "wrong length": (
        safetensors_bytes({"x": ONE_TENSOR | {"data_offsets": [0, 12]}}, bytes(16)),
        "are 16 bytes",
    ),
    "overflow": (
        safetensors_bytes({"x": ONE_TENSOR | {"shape": [2**62, 2**62]}}, bytes(16)),
        "but lies at",
    ),
    "past the end": (safetensors_bytes(GOOD, bytes(15)), r"truncated\?"),
    "no name": (safetensors_bytes({"": ONE_TENSOR}, bytes(16)), "tensor without a name"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named_at_once(tmp_path: Path, case: str) -> None:
    data, fault = DAMAGED[case]
    path = write(tmp_path, data)
    start = time.perf_counter()
    with pytest.raises(ModelLoadError, match=fault) as caught:
        SafetensorsFile(path, keep)
    assert time.perf_counter() - start < 1.0
    assert str(caught.value).startswith(str(path))


def test_random_damage_never_escapes_load_error(tmp_path: Path) -> None:
    data = pack_safetensors({"abc": np.ones(4, np.float32), "de": np.ones((2, 3), np.float16)})
    generator = np.random.default_rng(1)
    refused = 0
    for _ in range(400):
        mutant = bytearray(data)
        for _ in range(int(generator.integers(1, 5))):
            mutant[int(generator.integers(0, len(mutant)))] = int(generator.integers(0, 256))
        try:
            SafetensorsFile(write(tmp_path, bytes(mutant)), keep)
        except LoadError:
            refused += 1
    assert refused > 100


# ---- shards --------------------------------------------------------------------------------------


def write_shards(folder: Path, weight_map: dict[str, Any]) -> None:
    write(folder, pack_safetensors({"a": np.ones(2, np.float32)}), "one.safetensors")
    write(folder, pack_safetensors({"b": np.ones(3, np.float32)}), "two.safetensors")
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    files = open_safetensors(tmp_path, keep)
    assert [list(file.tensors) for file in files] == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("weight_map", "fault"),
    [
        ({"a": "one.safetensors", "b": "three.safetensors"}, "names three.safetensors, which is"),
        ({"a": "one.safetensors", "c": "one.safetensors"}, "tensor 'c' is not in one.safetensors"),
        ({"a": "two.safetensors", "b": "two.safetensors"}, "'a' is not in two.safetensors"),
        ({"a": "../one.safetensors"}, "'../one.safetensors' is not a file name"),
        ({"a": "/etc/passwd"}, "is not a file name"),
        ({"a": 5}, "'a' is a int, expected a string"),
    ],
)
def test_faulty_indices(tmp_path: Path, weight_map: dict[str, Any], fault: str) -> None:
    write_shards(tmp_path, weight_map)
    with pytest.raises(ModelLoadError, match=fault):
        open_safetensors(tmp_path, keep)


def test_unlisted_tensor(tmp_path: Path) -> None:
    write_shards(tmp_path, {"b": "two.safetensors"})
    both = pack_safetensors({"b": np.ones(3, np.float32), "z": np.ones(1, np.float32)})
    write(tmp_path, both, "two.safetensors")
    with pytest.raises(ModelLoadError, match="does not list tensor 'z' of two"):
        open_safetensors(tmp_path, keep)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has neither model\.safetensors nor \S+\Z"):
        open_safetensors(tmp_path, keep)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_pickled_weights_are_refused_with_the_way_to_convert_them(
    tmp_path: Path, name: str
) -> None:
    """As in the folders of OPT."""
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match=r"is a pickle.*safetensors.*save_pretrained"):
        open_safetensors(tmp_path, keep)
