"""Writes hybrids with random weights as `benchmarks.synthetic` writes Llamas: LFM2 and Granite 4.

    python -m benchmarks.synthetic_hybrids /tmp/lfm2.gguf --size lfm2-1.2b --quant q4_0

llama.cpp reads these files, too; `python -m benchmarks compare --models /tmp/lfm2.gguf` compares.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.synthetic import byte_tokens, random_blocks
from tellin.loading.tensors import BLOCK_SIZES, QuantType
from tests.loading.gguf_writer import TensorEntry, header_bytes

_CHUNK_BLOCKS = 1 << 17
_STATE_SIZE = 128


@dataclass(frozen=True)
class HybridShape:
    """Dimensions: layers without attention have short convolutions or, with heads of it, Mamba2."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    attention_layers: tuple[int, ...]
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    mamba_heads: int = 0

    @property
    def architecture(self) -> str:
        return "granitehybrid" if self.mamba_heads else "lfm2"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def conv_kernel(self) -> int:
        return 4 if self.mamba_heads else 3


SIZES = {
    "lfm2-1.2b": HybridShape(2048, 8192, 16, (2, 5, 8, 10, 12, 14), 32, 8, 65_536),
    "granite-h-1b": HybridShape(1536, 4096, 40, (5, 15, 25, 35), 12, 4, 100_352, 48),
    "tiny-lfm2": HybridShape(256, 512, 3, (1,), 4, 2, 512),
    "tiny-granite": HybridShape(256, 512, 3, (1,), 4, 2, 512, 8),
}
"""Shapes of LFM2 1.2B and Granite 4.0 H 1B, and two that a test can afford."""
Tensor = tuple[str, tuple[int, ...], QuantType]


def write_hybrid(path: Path, shape: HybridShape, quant: str = "q4_0", seed: int = 0) -> Path:
    """Write a model whose matrices are of type ``quant``; equal arguments give equal files."""
    quant_type = QuantType[quant.upper()]
    plan = list(_tensors(shape, quant_type))
    entries, offset = [], 0
    for name, dims, kind in plan:
        entries.append(TensorEntry(name, dims, kind.value, offset))
        offset += -(-_num_blocks(dims, kind) * kind.block_bytes // 32) * 32
    generator = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(header_bytes(_metadata(shape, quant), entries))
        for name, dims, kind in plan:
            num_blocks = _num_blocks(dims, kind)
            sigma = 1.0 if name == "token_embd.weight" else dims[-1] ** -0.5
            if name.endswith("ssm_a"):  # states must shrink
                file.write((-generator.uniform(0.5, 4.0, num_blocks)).astype(np.float32).tobytes())
                num_blocks = 0
            for start in range(0, num_blocks, _CHUNK_BLOCKS):
                count = min(_CHUNK_BLOCKS, num_blocks - start)
                file.write(random_blocks(generator, kind, count, sigma, len(dims) == 1))
            file.write(bytes(-file.tell() % 32))
    return path


def _num_blocks(dims: tuple[int, ...], quant_type: QuantType) -> int:
    return int(np.prod(dims, dtype=np.int64)) // BLOCK_SIZES[quant_type][0]


def _tensors(shape: HybridShape, quant_type: QuantType) -> Iterator[Tensor]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    norm = "output_norm" if shape.mamba_heads else "token_embd_norm"
    yield "token_embd.weight", (shape.vocab_size, hidden), quant_type
    yield f"{norm}.weight", (hidden,), QuantType.F32
    for i in range(shape.num_hidden_layers):
        sizes: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
        if i in shape.attention_layers:
            kv = shape.num_key_value_heads * shape.head_dim
            sizes |= {"attn_q": (hidden, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
            sizes["attn_output"] = (hidden, hidden)
            if not shape.mamba_heads:
                sizes |= {f"attn_{part}_norm": (shape.head_dim,) for part in "qk"}
        else:
            sizes |= _recurrent(shape)
        sizes |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden)}
        sizes["ffn_down"] = (hidden, inner)
        for name, dims in sizes.items():
            full = f"blk.{i}.{name}" + ("" if name in ("ssm_a", "ssm_d") else ".weight")
            is_matrix = len(dims) == 2 and dims[1] >= hidden
            full = full.replace(".bias.weight", ".bias")
            yield full, dims, quant_type if is_matrix else QuantType.F32


def _recurrent(shape: HybridShape) -> dict[str, tuple[int, ...]]:
    """Sizes of a recurrent layer's tensors."""
    hidden, kernel, heads = shape.hidden_size, shape.conv_kernel, shape.mamba_heads
    if not heads:
        return {
            "shortconv.in_proj": (3 * hidden, hidden),
            "shortconv.conv": (hidden, kernel),
            "shortconv.out_proj": (hidden, hidden),
        }
    inner = 2 * hidden
    convolved = inner + 2 * _STATE_SIZE
    return {
        "ssm_in": (inner + convolved + heads, hidden),
        "ssm_conv1d": (convolved, kernel),
        "ssm_conv1d.bias": (convolved,),
        "ssm_a": (heads, 1),
        "ssm_d": (heads, 1),
        "ssm_dt.bias": (heads,),
        "ssm_norm": (inner,),
        "ssm_out": (hidden, inner),
    }


def _metadata(shape: HybridShape, quant: str) -> dict[str, Any]:
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    fillers = shape.vocab_size - 256 - len(specials)
    tokens = [*specials, *byte_tokens(), *(f"filler{i}" for i in range(fillers))]
    kv_heads = [
        shape.num_key_value_heads if i in shape.attention_layers else 0
        for i in range(shape.num_hidden_layers)
    ]
    own: dict[str, Any] = {
        "block_count": shape.num_hidden_layers,
        "context_length": 8192,
        "embedding_length": shape.hidden_size,
        "feed_forward_length": shape.intermediate_size,
        "attention.head_count": shape.num_attention_heads,
        "attention.head_count_kv": np.array(kv_heads, dtype=np.int32),
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e6,
        "vocab_size": shape.vocab_size,
    }
    if shape.mamba_heads:
        own |= {
            "ssm.conv_kernel": shape.conv_kernel,
            "ssm.state_size": _STATE_SIZE,
            "ssm.group_count": 1,
            "ssm.inner_size": 2 * shape.hidden_size,
            "ssm.time_step_rank": shape.mamba_heads,
            "rope.scaling.finetuned": False,
        }
    else:
        own["shortconv.l_cache"] = shape.conv_kernel
    return {
        "general.architecture": shape.architecture,
        "general.name": f"synthetic {quant}",
        **{f"{shape.architecture}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3] * 3 + [1] * (len(tokens) - 3), dtype=np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="GGUF file to write")
    parser.add_argument("--size", choices=SIZES, default="lfm2-1.2b")
    parser.add_argument("--quant", default="q4_0", help="a quantisation type")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    path = write_hybrid(arguments.path, SIZES[arguments.size], arguments.quant, arguments.seed)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
