"""GGUF container: types, tensors, splits, damage (P48, P49), speed."""

from __future__ import annotations

import gc
import os
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from tellin.exceptions import LoadError, ModelLoadError, ModelNotFoundError, UnsupportedModelError
from tellin.loading.gguf import GGUFFile, StringArray, open_gguf
from tellin.loading.tensors import BLOCK_SIZES, QuantType
from tests.kernels.linear_cases import GGUF_TYPES
from tests.loading.gguf_writer import RawTensor, Typed, gguf_bytes, string_bytes, write_gguf

METADATA = {
    "general.architecture": "llama",
    "a.u8": Typed(0, 250),
    "a.i8": Typed(1, -3),
    "a.u16": Typed(2, 65_000),
    "a.i16": Typed(3, -30_000),
    "a.u32": Typed(4, 4_000_000_000),
    "a.i32": Typed(5, -2_000_000_000),
    "a.f32": Typed(6, 0.5),
    "a.true": True,
    "a.false": False,
    "a.text": "zażółć 🐚",
    "a.empty": "",
    "a.u64": Typed(10, 2**64 - 1),
    "a.i64": Typed(11, -(2**63)),
    "a.f64": Typed(12, 0.1),
    "a.strings": ["x", "", "ż", "🐚" * 100],
    "a.floats": np.array([1.5, -2.5], dtype=np.float32),
    "a.ints": np.array([1, 3, 6], dtype=np.int32),
    "a.bools": np.array([True, False]),
    "a.none": np.array([], dtype=np.int64),
    "a.nested": [["a", "b"], ["c"]],
}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    tensors = {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "h": np.arange(8, dtype=np.float16).reshape(2, 4),
    }
    return write_gguf(tmp_path / "plain.gguf", METADATA, tensors)


def test_reads_every_metadata_type(plain: Path) -> None:
    metadata = GGUFFile(plain).metadata
    assert list(metadata) == list(METADATA)
    for key, value in METADATA.items():
        read = metadata[key]
        if isinstance(value, np.ndarray):
            assert isinstance(read, np.ndarray)
            assert read.dtype == value.dtype
            assert read.tolist() == value.tolist()
            assert not read.flags.writeable
        elif key == "a.nested":
            assert [list(part) for part in read] == value
        elif isinstance(value, list):
            assert isinstance(read, StringArray)
            assert list(read) == read.to_list() == value
            assert [read[i] for i in range(-4, 4)] == value + value
            assert list(read[1:3]) == value[1:3]
        else:
            expected = value.value if isinstance(value, Typed) else value
            assert read == expected
            assert type(read) is type(expected)


def test_string_array_index_out_of_range(plain: Path) -> None:
    strings = GGUFFile(plain).metadata.get_strings("a.strings")
    with pytest.raises(IndexError):
        strings[4]


def test_tensors_are_views_in_row_major_order(plain: Path) -> None:
    file = GGUFFile(plain)
    weight = file.tensors["w"]
    assert weight.shape == (3, 4)
    assert weight.quant_type is QuantType.F32
    assert weight.data.dtype == np.uint8
    assert not weight.data.flags.owndata
    assert not weight.data.flags.writeable
    assert weight.data.view(np.float32).tolist() == list(range(12))
    assert file.tensors["h"].data.view(np.float16).tolist() == list(range(8))


def test_views_survive_close(plain: Path) -> None:
    file = GGUFFile(plain)
    tensor, strings = file.tensors["w"], file.metadata.get_strings("a.strings")
    file.close()
    file.close()
    plain.unlink()
    del file
    gc.collect()
    assert tensor.data.view(np.float32).sum() == 66
    assert strings[0] == "x"


def test_release_pages_keeps_content(plain: Path) -> None:
    file = GGUFFile(plain)
    tensor = file.tensors["w"]
    assert file.release_pages(tensor)
    assert file.release_pages()
    assert tensor.data.view(np.float32).sum() == 66


def test_typed_getters_name_file_key_and_types(plain: Path) -> None:
    metadata = GGUFFile(plain).metadata
    assert metadata.get_int("a.i16") == -30_000
    assert metadata.get_float("a.u8") == 250.0
    assert metadata.get_int("missing", 7) == 7
    with pytest.raises(
        ModelLoadError, match=r"plain\.gguf: .*'a\.text' is a str, expected an integer"
    ):
        metadata.get_int("a.text")
    with pytest.raises(ModelLoadError, match=r"'a\.true' is a bool, expected a number"):
        metadata.get_float("a.true")
    with pytest.raises(ModelLoadError, match=r"'nope'.*is missing"):
        metadata.get_str("nope")
    with pytest.raises(ModelLoadError, match="an array of numbers, expected an array of strings"):
        metadata.get_strings("a.floats")


def test_version_2_and_other_alignment(tmp_path: Path) -> None:
    data = gguf_bytes(
        {"general.alignment": 64}, {"w": np.ones((2, 3), np.float32)}, version=2, alignment=64
    )
    file = GGUFFile(_write(tmp_path, data))
    assert (file.version, file.alignment) == (2, 64)
    assert file.tensors["w"].data.view(np.float32).tolist() == [1.0] * 6


@pytest.mark.parametrize("quant_type", GGUF_TYPES)
def test_block_sizes_equal_the_specification(quant_type: QuantType) -> None:
    oracle = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(quant_type.value)]
    assert BLOCK_SIZES[quant_type] == oracle


def test_equal_to_the_reference_reader(tmp_path: Path) -> None:
    """A file written by the `gguf` package is read back by both, all supported tensor types."""
    path = tmp_path / "reference.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ć"])
    writer.add_array("scores", [0.5, 1.5])
    writer.add_uint64("big", 1 << 40)
    generator = np.random.default_rng(0)
    for quant_type in GGUF_TYPES:
        block, num_bytes = BLOCK_SIZES[quant_type]
        raw = generator.integers(0, 256, (3, 2 * num_bytes), dtype=np.uint8)
        reference_type = gguf.GGMLQuantizationType(quant_type.value)
        if quant_type in (QuantType.F32, QuantType.F16):
            ones = np.ones((3, 2 * block), f"float{8 * num_bytes}")
            writer.add_tensor(quant_type.name, ones)
        else:
            writer.add_tensor(quant_type.name, raw, raw_dtype=reference_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _assert_equal_to_reference(path)


def _assert_equal_to_reference(path: Path) -> None:
    file, reference = GGUFFile(path), gguf.GGUFReader(path)
    assert len(file.tensors) == len(reference.tensors)
    for tensor in reference.tensors:
        ours = file.tensors[tensor.name]
        assert ours.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert ours.quant_type.name == tensor.tensor_type.name
        assert ours.data.tobytes() == np.ascontiguousarray(tensor.data).tobytes()
    for key, field in reference.fields.items():
        if key.startswith("GGUF."):
            continue
        ours_value, expected = file.metadata[key], field.contents()
        if isinstance(expected, list):
            assert list(ours_value) == expected
        else:
            assert ours_value == expected


def _write(tmp_path: Path, data: bytes, name: str = "bad.gguf") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


ONE = {"w": np.ones((2, 3), np.float32)}
RAW_HEAD = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
DAMAGED = {
    "no bytes": (b"", "is empty"),
    "text": (b"hello, I am no model file", "is not a GGUF file"),
    "magic only": (b"GGUF", "is 4 bytes long"),
    "37 bytes": (RAW_HEAD + string_bytes("") + struct.pack("<IB", 0, 1), "key 0 .*is empty"),
    "key count": (gguf_bytes({}, num_keys=2**63), "metadata key count is 9223372036854775808"),
    "tensor count": (gguf_bytes({}, num_tensors=2**40), "tensor count is 1099511627776"),
    "one key too many": (gguf_bytes({"a": "x" * 99}, num_keys=2), "key 1 .* is empty"),
    "duplicate key": (gguf_bytes([("a", 1), ("a", 2)]), "'a' appears twice"),
    "huge key": (RAW_HEAD + struct.pack("<Q", 2**62) + bytes(64), "4611686018427387904 bytes long"),
    "key not utf-8": (RAW_HEAD + string_bytes(b"\xff\xfe") + bytes(16), "not valid UTF-8"),
    "huge string": (
        RAW_HEAD + string_bytes("k") + struct.pack("<IQ", 8, 2**64 - 1) + bytes(64),
        r"'k' \(18446744073709551615 bytes long\)",
    ),
    "unknown type": (RAW_HEAD + string_bytes("k") + struct.pack("<I", 77) + bytes(64), "number 77"),
    "bool of 2": (RAW_HEAD + string_bytes("k") + struct.pack("<IB", 7, 2), "expected 0 or 1"),
    "bools of 2": (gguf_bytes({"k": np.array([0, 2], np.uint8)}).replace(
        struct.pack("<II", 9, 0), struct.pack("<II", 9, 7)), "neither 0 nor 1"),
    "huge array": (
        RAW_HEAD + string_bytes("k") + struct.pack("<IIQ", 9, 4, 2**61) + bytes(64),
        "2305843009213693952 elements",
    ),
    "huge string array": (
        RAW_HEAD + string_bytes("k") + struct.pack("<IIQ", 9, 8, 2**60) + bytes(64),
        "length of metadata key 'k' is 1152921504606846976",
    ),
    "string array runs out": (
        RAW_HEAD + string_bytes("k") + struct.pack("<IIQQ", 9, 8, 2, 2**63) + bytes(64),
        "ends inside metadata key 'k'",
    ),
    "string array wraps": (
        RAW_HEAD + string_bytes("k") + struct.pack("<IIQQ", 9, 8, 1, 2**64 - 8) + bytes(64),
        "ends inside metadata key 'k'",
    ),
    "deep nesting": (
        RAW_HEAD + string_bytes("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 500,
        "nested more than 4 deep",
    ),
    "alignment 0": (gguf_bytes({"general.alignment": 0}, ONE), "general.alignment is 0"),
    "alignment 24": (gguf_bytes({"general.alignment": 24}, ONE), "power of two"),
    "alignment text": (gguf_bytes({"general.alignment": "x"}, ONE), "expected an integer"),
    "offset past the end": (gguf_bytes({}, ONE, offsets={"w": 1 << 20}), "the file ends at"),
    "offset near 2^64": (gguf_bytes({}, ONE, offsets={"w": 2**64 - 32}), "the file ends at"),
    "offset not aligned": (gguf_bytes({}, ONE, offsets={"w": 3}), "not a multiple of 32"),
    "no dimensions": (gguf_bytes({}, {"w": RawTensor((), 0, b"0000")}), "has 0 dimensions"),
    "five dimensions": (gguf_bytes({}, {"w": RawTensor((1,) * 5, 0, b"0000")}), "5 dimensions"),
    "size zero": (gguf_bytes({}, {"w": RawTensor((0, 4), 0, b"")}), "impossible"),
    "size overflows": (
        gguf_bytes({}, {"w": RawTensor((2**62, 2**62, 2**62), 0, b"0000")}),
        "impossible in this file",
    ),
    "broken rows": (gguf_bytes({}, {"w": RawTensor((2, 33), 2, bytes(64))}), "block size 32"),
    "unknown tensor type": (gguf_bytes({}, {"w": RawTensor((2, 2), 999, bytes(64))}), "999"),
    "empty tensor name": (gguf_bytes({}, {"": np.ones(4, np.float32)}), "tensor 0 is empty"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named_at_once(tmp_path: Path, case: str) -> None:
    """P49: one exception type, with file and fault, in under a second."""
    data, fault = DAMAGED[case]
    path = _write(tmp_path, data)
    start = time.perf_counter()
    with pytest.raises(ModelLoadError, match=fault) as caught:
        GGUFFile(path)
    assert time.perf_counter() - start < 1.0
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 400 + len(str(path))


def test_duplicate_tensor(tmp_path: Path) -> None:
    data = gguf_bytes({}, {"ab": np.ones(4, np.float32), "ac": np.ones(4, np.float32)})
    with pytest.raises(ModelLoadError, match="'ab' appears twice"):
        GGUFFile(_write(tmp_path, data.replace(b"ac", b"ab")))


def test_every_truncation_is_a_load_error(plain: Path, tmp_path: Path) -> None:
    data = plain.read_bytes()
    path = tmp_path / "short.gguf"
    for length in range(0, len(data) - 32, 7):
        path.write_bytes(data[:length])
        with pytest.raises(ModelLoadError, match=r"short\.gguf"):
            GGUFFile(path)


def test_overlapping_tensors_are_fine(tmp_path: Path) -> None:
    tensors = {"a": np.ones(8, np.float32), "b": np.zeros(8, np.float32)}
    file = GGUFFile(_write(tmp_path, gguf_bytes({}, tensors, offsets={"b": 0})))
    assert file.tensors["b"].data.view(np.float32).tolist() == [1.0] * 8


def test_unsupported_versions_and_types(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="version 1 is not supported"):
        GGUFFile(_write(tmp_path, gguf_bytes({"a": 1}, version=1)))
    with pytest.raises(UnsupportedModelError, match="big-endian"):
        GGUFFile(_write(tmp_path, gguf_bytes({"a": 1}, version=3 << 24)))
    tensors = {"w": RawTensor((1, 256), 21, bytes(110))}
    with pytest.raises(UnsupportedModelError, match=r"'w' has type IQ3_S.*Q4_K.*IQ4_XS"):
        GGUFFile(_write(tmp_path, gguf_bytes({}, tensors)))


def test_what_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file"):
        GGUFFile(tmp_path / "none.gguf")
    with pytest.raises(ModelLoadError, match="not a regular file"):
        GGUFFile(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelLoadError, match="not a regular file"):
        GGUFFile(tmp_path / "pipe.gguf")


def _write_parts(folder: Path, count: int = 2, **changes: object) -> list[Path]:
    paths = []
    for number in range(count):
        metadata = {"split.no": number, "split.count": count, "split.tensors.count": count}
        if number == 0:
            metadata["general.architecture"] = "llama"  # type: ignore[assignment]
        metadata.update(changes)  # type: ignore[arg-type]
        path = folder / f"model-{number + 1:05d}-of-{count:05d}.gguf"
        write_gguf(path, metadata, {f"w{number}": np.full(4, number, np.float32)})
        paths.append(path)
    return paths


@pytest.mark.parametrize("named", [0, 1, 2])
def test_split_model_opens_by_any_part(tmp_path: Path, named: int) -> None:
    """P48: the other parts are found."""
    paths = _write_parts(tmp_path, 3)
    files = open_gguf(paths[named])
    assert [file.path for file in files] == paths
    assert [list(file.tensors) for file in files] == [["w0"], ["w1"], ["w2"]]


def test_split_model_faults(tmp_path: Path) -> None:
    first, second = _write_parts(tmp_path)
    second.rename(tmp_path / "away.gguf")
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002\.gguf is missing"):
        open_gguf(first)
    with pytest.raises(ModelLoadError, match="is not named like"):
        open_gguf(tmp_path / "away.gguf")
    first.write_bytes(first.read_bytes())
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelLoadError, match="part 1, not 2"):
        open_gguf(first)
    _write_parts(tmp_path, **{"split.tensors.count": 5})
    with pytest.raises(ModelLoadError, match="hold 2 tensors, expected 5"):
        open_gguf(first)
    _write_parts(tmp_path, **{"split.count": 2**31})
    with pytest.raises(ModelLoadError, match="is not named like"):
        open_gguf(first)


def test_many_strings_open_quickly_and_lazily(tmp_path: Path) -> None:
    """A vocabulary of 262,144 tokens costs milliseconds, and no strings, until it is read."""
    tokens = [f"token{i}" for i in range(262_144)]
    path = write_gguf(tmp_path / "vocab.gguf", {"tokenizer.ggml.tokens": tokens})
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        file = GGUFFile(path)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.25
    strings = file.metadata.get_strings("tokenizer.ggml.tokens")
    assert strings[262_143] == "token262143"
    assert strings.to_list() == tokens


def test_random_damage_never_escapes_load_error(plain: Path, tmp_path: Path) -> None:
    """P49: flipped bytes either do not matter or raise `LoadError`."""
    data = plain.read_bytes()
    generator = np.random.default_rng(7)
    path = tmp_path / "mutant.gguf"
    refused = 0
    for _ in range(400):
        mutant = bytearray(data)
        for _ in range(int(generator.integers(1, 6))):
            mutant[int(generator.integers(0, len(mutant)))] = int(generator.integers(0, 256))
        path.write_bytes(mutant)
        try:
            file = GGUFFile(path)
            for value in file.metadata.values():
                if isinstance(value, StringArray):
                    value.to_list()
        except LoadError:
            refused += 1
    assert refused > 50
