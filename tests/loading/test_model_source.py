"""`open_model`, `open_metadata`: both formats, lifetimes, metadata, and which path means what."""

from __future__ import annotations

import gc
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin.exceptions import LoadError, ModelLoadError, ModelNotFoundError
from tellin.loading import open_metadata, open_model
from tellin.loading.finite import is_finite
from tellin.loading.tensors import QuantType, TensorRef
from tests.kernels.linear_cases import GGUF_TYPES
from tests.loading.gguf_writer import write_gguf
from tests.loading.models import (
    LAYERS,
    VOCAB,
    config,
    gguf_metadata,
    gguf_tensors,
    hf_tensors,
    pack_safetensors,
    write_model,
)


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "hf"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config("llama", tie_word_embeddings=True)))
    (path / "model.safetensors").write_bytes(pack_safetensors(hf_tensors()))
    return path


def test_both_formats_give_the_same_names_and_values(gguf_path: Path, folder: Path) -> None:
    from_gguf, from_folder = open_model(gguf_path), open_model(str(folder))
    assert set(from_gguf.tensors) == set(from_folder.tensors)
    assert len(from_gguf.tensors) == 2 + 9 * LAYERS
    name = "layers.1.mlp.gate_proj.weight"
    tensor = from_folder.tensors[name]
    expected = hf_tensors()["model.layers.1.mlp.gate_proj.weight"]
    assert tensor.data.tobytes() == expected.tobytes()
    assert from_gguf.tensors[name].shape == tensor.shape
    assert from_folder.hparams.rope_interleaved is False
    assert from_gguf.hparams.rope_interleaved is True


def test_close_with_live_views(gguf_path: Path) -> None:
    with open_model(gguf_path) as source:
        tensor = source.tensors["embed_tokens.weight"]
        expected = tensor.data.tobytes()
    source.close()
    gguf_path.unlink()
    with pytest.raises(ValueError, match="the model was closed"):
        _ = source.tensors
    del source
    gc.collect()
    assert tensor.data.tobytes() == expected


def test_close_frees_the_map(gguf_path: Path) -> None:
    source = open_model(gguf_path)
    assert str(gguf_path) in Path("/proc/self/maps").read_text()
    _ = source.metadata
    source.close()
    gc.collect()
    assert str(gguf_path) not in Path("/proc/self/maps").read_text()


def test_release_pages_keeps_contents(gguf_path: Path, folder: Path) -> None:
    for path in (gguf_path, folder):
        source = open_model(path)
        tensor = source.tensors["embed_tokens.weight"]
        before = tensor.data.tobytes()
        source.release_pages(tensor)
        source.release_pages()
        assert tensor.data.tobytes() == before


def test_tensors_are_read_only(gguf_path: Path) -> None:
    source = open_model(gguf_path)
    with pytest.raises(TypeError):
        source.tensors["x"] = None  # type: ignore[index]
    with pytest.raises(ValueError, match="read-only"):
        source.tensors["norm.weight"].data[0] = 1


def test_rope_factors_reach_the_hyperparameters(tmp_path: Path) -> None:
    factors = np.array([1, 2, 3, 4], np.float32)
    tensors = gguf_tensors() | {"rope_freqs.weight": factors}
    source = open_model(write_gguf(tmp_path / "m.gguf", gguf_metadata("llama"), tensors))
    assert source.hparams.rope_scaling.factors == (1.0, 2.0, 3.0, 4.0)
    assert "rope_freqs.weight" not in source.tensors


def test_split_model(tmp_path: Path) -> None:
    """P48: the parts are found and read as one model."""
    tensors = gguf_tensors()
    names = list(tensors)
    for part in range(2):
        metadata: dict[str, Any] = {"split.no": part, "split.count": 2}
        metadata |= gguf_metadata("llama") if part == 0 else {}
        own = {name: tensors[name] for name in names[part::2]}
        write_gguf(tmp_path / f"m-{part + 1:05d}-of-00002.gguf", metadata, own)
    whole = open_model(write_gguf(tmp_path / "whole.gguf", gguf_metadata("llama"), tensors))
    for part in range(2):
        source = open_model(tmp_path / f"m-{part + 1:05d}-of-00002.gguf")
        assert set(source.tensors) == set(whole.tensors)
        assert source.load_tokenizer().encode("a") == whole.load_tokenizer().encode("a")
    (tmp_path / "whole.gguf").unlink()
    assert open_model(tmp_path).path.name == "m-00001-of-00002.gguf"


# ---- metadata ------------------------------------------------------------------------------------


def test_gguf_metadata(tmp_path: Path) -> None:
    values = gguf_metadata("llama", context_length=77) | {
        "general.name": "Tiny",
        "tokenizer.chat_template": "T",
        "tokenizer.ggml.eot_token_id": 5,
        "general.sampling.temp": 0.25,
        "general.sampling.top_k": 40.0,
    }
    metadata = open_metadata(write_gguf(tmp_path / "m.gguf", values, gguf_tensors()))
    assert metadata.name == "Tiny"
    assert (metadata.file_format, metadata.architecture) == ("gguf", "llama")
    assert (metadata.context_length, metadata.vocab_size) == (77, VOCAB)
    assert metadata.tokenizer_size == 258, "two rows of the matrix are padding"
    assert (metadata.bos_token_id, metadata.eos_token_ids) == (0, (1, 5))
    assert (metadata.chat_template, metadata.runner_type) == ("T", "generate")
    assert metadata.generation_defaults == {"temperature": 0.25, "top_k": 40}
    assert metadata.num_bytes == (tmp_path / "m.gguf").stat().st_size


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("<|end|>", "<|endoftext|>"), (1, 250, 251)),
        # gpt-oss: an answer is several messages, each with an end of its own.
        (("<|end|>", "<|return|>", "<|call|>"), (1, 251, 252)),
    ],
)
def test_control_tokens_that_end_an_answer(
    texts: tuple[str, ...], expected: tuple[int, ...], tmp_path: Path
) -> None:
    values = gguf_metadata("llama")
    tokens = list(values["tokenizer.ggml.tokens"])
    types = np.array(values["tokenizer.ggml.token_type"])
    for token_id, text in enumerate(texts, start=250):
        tokens[token_id], types[token_id] = text, 3
    values |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    metadata = open_metadata(write_gguf(tmp_path / "m.gguf", values, gguf_tensors()))
    assert metadata.eos_token_ids == expected


def test_end_tokens_of_real_files(smollm2_path: Path) -> None:
    metadata = open_metadata(smollm2_path)
    assert metadata.eos_token_ids == (2, 0)
    assert (metadata.context_length, metadata.tokenizer_size) == (8192, 49_152)
    assert metadata.chat_template is not None


@pytest.mark.slow
def test_real_files_of_other_kinds(gemma3_path: Path, minilm_path: Path) -> None:
    gemma3 = open_metadata(gemma3_path)
    assert (gemma3.eos_token_ids, gemma3.bos_token_id) == ((1, 106), 2)
    assert gemma3.chat_template is None
    minilm = open_metadata(minilm_path)
    assert (minilm.runner_type, minilm.tokenizer_size) == ("pooling", 30_522)
    assert len(open_model(minilm_path).tensors) == 103
    open_model(gemma3_path).check_weights()


def test_folder_metadata(folder: Path, smollm2_path: Path) -> None:
    from tellin.loading import load_tokenizer

    (folder / "tokenizer.json").write_text(load_tokenizer(smollm2_path).backend.to_str())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}})
    )
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [0, 2], "temperature": 0.6, "top_k": None, "do_sample": True})
    )
    metadata = open_metadata(folder)
    assert metadata.tokenizer_size == 49_152
    assert (metadata.bos_token_id, metadata.eos_token_ids) == (1, (2, 0))
    assert metadata.generation_defaults == {"temperature": 0.6}
    assert metadata.file_format == "safetensors"


def test_the_id_of_no_token_is_no_end(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 7]}))
    assert open_metadata(folder).eos_token_ids == (7,)


def test_folder_without_tokenizer(folder: Path) -> None:
    metadata = open_metadata(folder)
    assert metadata.tokenizer_size == metadata.vocab_size == VOCAB
    assert metadata.eos_token_ids == ()
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json"):
        open_model(folder).load_tokenizer()


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("config.json", "[1]", "is not a JSON object"),
        ("config.json", "{", "is not valid JSON"),
        ("config.json", "[" * 100_000, "is not valid JSON"),
        ("config.json", '{"model_type": "llama"}', "'hidden_size'.*is missing"),
        ("tokenizer.json", '{"model": {"vocab": 5}}', "is not a usable tokenizer file"),
        ("generation_config.json", '{"eos_token_id": "x"}', "'eos_token_id' is a str"),
        ("generation_config.json", '{"eos_token_id": [2, 260]}', "the id 260, but .* 260 tokens"),
        ("generation_config.json", '{"eos_token_id": 4294967296}', "the id 4294967296"),
        ("generation_config.json", '{"eos_token_id": -2}', "the id -2"),
        ("generation_config.json", '{"eos_token_id": [2.5]}', "'2.5', expected integers"),
        ("tokenizer_config.json", '{"chat_template": 5}', "'chat_template' is a int"),
    ],
)
def test_damaged_json(folder: Path, name: str, text: str, fault: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(ModelLoadError, match=rf"{name}: .*{fault}"):
        open_metadata(folder)


# ---- paths ---------------------------------------------------------------------------------------


def test_what_a_path_can_mean(gguf_path: Path, folder: Path, tmp_path: Path) -> None:
    assert open_model(folder / "model.safetensors").path == folder
    assert open_model(tmp_path).path == gguf_path
    write_model(tmp_path / "second.gguf")
    with pytest.raises(ModelNotFoundError, match=r"several models; name one of second\.gguf, tiny"):
        open_model(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelNotFoundError, match=r"has neither a config\.json nor a \.gguf file"):
        open_model(empty)
    with pytest.raises(ModelNotFoundError, match="no such file or folder"):
        open_model(tmp_path / "none")
    (empty / "x.safetensors").write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match=r"needs a config\.json beside it"):
        open_model(empty / "x.safetensors")
    (empty / "notes.txt").write_text("these are 24 bytes or more of text")
    with pytest.raises(ModelLoadError, match="is not a GGUF file"):
        open_model(empty / "notes.txt")


def test_opening_a_path_needs_no_network(
    gguf_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P48"""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    for path in (gguf_path, folder):
        open_model(path).close()
        open_metadata(path)
    open_model(gguf_path).load_tokenizer()


def test_importing_costs_nothing() -> None:
    """Neither numpy nor tokenizers until something is opened."""
    code = "import sys, tellin.loading; print('numpy' in sys.modules, 'tokenizers' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "False False\n"


# ---- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant_type", GGUF_TYPES)
def test_finite_blocks_and_broken_ones(quant_type: QuantType) -> None:
    """P49: a NaN or infinite scale is found wherever it is."""
    from benchmarks.synthetic import random_blocks
    from tellin.loading.dequantize import dequantize

    generator = np.random.default_rng(quant_type.value)
    raw = random_blocks(generator, quant_type, 70_000, 0.02)
    data = np.frombuffer(bytearray(raw), np.uint8)
    tensor = TensorRef("x", (70_000, quant_type.block_size), quant_type, data)
    assert is_finite(tensor)
    halves = np.array([np.nan, np.inf], np.float16).view(np.uint8)
    bad = {
        QuantType.F32: np.array([np.nan], np.float32).view(np.uint8),
        QuantType.BF16: np.array([0x7F80], np.uint16).view(np.uint8),
        QuantType.MXFP4: np.array([0xFF], np.uint8),
    }.get(quant_type, halves[2:])
    num_broken = 0
    for offset in range(0, quant_type.block_bytes - len(bad) + 1, 2):
        for block in (0, 69_999):
            start = block * quant_type.block_bytes + offset
            saved = data[start : start + len(bad)].copy()
            data[start : start + len(bad)] = bad
            with np.errstate(all="ignore"):
                values = dequantize(_block(tensor, block))
            assert is_finite(tensor) == bool(np.isfinite(values).all()), offset
            num_broken += not is_finite(tensor)
            data[start : start + len(bad)] = saved
    assert num_broken >= 2


def _block(tensor: TensorRef, index: int) -> TensorRef:
    quant_type, size = tensor.quant_type, tensor.quant_type.block_bytes
    data = tensor.data[index * size : (index + 1) * size]
    return TensorRef("block", (1, quant_type.block_size), quant_type, data)


def test_check_weights_names_the_tensor(tmp_path: Path) -> None:
    tensors = gguf_tensors()
    tensors["blk.1.ffn_down.weight"][3, 5] = np.nan
    source = open_model(write_gguf(tmp_path / "m.gguf", gguf_metadata("llama"), tensors))
    with pytest.raises(ModelLoadError, match=r"'layers\.1\.mlp\.down_proj\.weight' holds NaN"):
        source.check_weights()


# ---- speed and damage ----------------------------------------------------------------------------


def test_smollm2_opens_in_a_tenth_of_a_second(smollm2_path: Path) -> None:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        open_metadata(smollm2_path)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.1


def open_everything(path: Path) -> None:
    """All that an engine would read of a file, short of computing with it."""
    with open_model(path) as source:
        _ = source.metadata
        source.load_tokenizer().encode("text")
        for tensor in source.tensors.values():
            assert tensor.data.size == tensor.num_elements // tensor.quant_type.block_size * (
                tensor.quant_type.block_bytes
            )


def mutate(data: bytes, generator: np.random.Generator) -> bytes:
    """Flip, cut, double or overwrite bytes of a file's head, where everything of interest is."""
    mutant = bytearray(data)
    for _ in range(int(generator.integers(1, 8))):
        position = int(generator.integers(0, max(1, len(mutant))))
        kind = int(generator.integers(0, 6))
        if kind <= 2:
            mutant[position : position + 1] = generator.bytes(1)
        elif kind == 3:
            mutant[position : position + 8] = generator.choice(EXTREMES)
        elif kind == 4:
            del mutant[position : position + int(generator.integers(1, 16))]
        else:
            mutant[position:position] = mutant[position : position + 16]
    return bytes(mutant)


EXTREMES = [
    value.to_bytes(8, "little") for value in (0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
]


def fuzz(path: Path, data: bytes, head: int, seed: int, rounds: int) -> int:
    """Number of mutants refused; anything but `LoadError` fails the test."""
    generator = np.random.default_rng(seed)
    refused = 0
    for _ in range(rounds):
        path.write_bytes(mutate(data[:head], generator) + data[head:])
        try:
            open_everything(path)
        except LoadError as error:
            refused += 1
            message = str(error)
        else:
            continue
        assert path.name in message
    return refused


def test_fuzz_gguf(gguf_path: Path, tmp_path: Path) -> None:
    """P49, quick: see the slow test for the long run."""
    data = gguf_path.read_bytes()
    assert fuzz(tmp_path / "mutant.gguf", data, 7000, seed=0, rounds=150) > 75


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3"])
@pytest.mark.parametrize("seed", range(4))
def test_fuzz_gguf_for_long(tmp_path: Path, architecture: str, seed: int) -> None:
    data = write_model(tmp_path / "tiny.gguf", architecture).read_bytes()
    assert fuzz(tmp_path / "mutant.gguf", data, 7000, seed=seed + 1, rounds=1500) > 400
