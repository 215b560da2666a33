"""Writes models with random weights in any size and quantisation, for benchmarks and tests.

Llama, Qwen3-MoE where the shape has experts, or Qwen3.5 where it has linear attention.

Weights are random but sane: blocks are valid, values have mean 0 and a standard deviation that
keeps activations near 1, so that kernels meet no NaN, no infinity and no denormal. The tokenizer is
byte-level without merges: a character is a token or a few. Run it from the repository's root:

    python -m benchmarks.synthetic /tmp/1b.gguf --size 1b --quant q4_k_m
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tellin.loading.tensors import BLOCK_SIZES, QuantType
from tests.loading.gguf_writer import TensorEntry, header_bytes

Bytes = npt.NDArray[np.uint8]
_CHUNK_BLOCKS = 1 << 17
"""Blocks made at a time: bounds memory while writing models larger than it."""
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a model: Llama, or Qwen3-MoE if ``num_experts`` is not 0.

    ``intermediate_size`` is the width of one expert then. Qwen3.5 if ``num_linear_heads`` is not 0:
    so many keys and values of linear attention, `LINEAR_DIM` wide, in three layers of four.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    head_dim: int | None = None
    max_position_embeddings: int = 8192
    rope_theta: float = 100_000.0
    tie_word_embeddings: bool = True
    num_experts: int = 0
    num_experts_per_tok: int = 0
    num_linear_heads: int = 0

    @property
    def architecture(self) -> str:
        if self.num_linear_heads:
            return "qwen35"
        return "qwen3moe" if self.num_experts else "llama"


SIZES = {
    "tiny": ModelShape(256, 512, 2, 4, 2, 512),
    "135m": ModelShape(576, 1536, 30, 9, 3, 49_152),
    "360m": ModelShape(960, 2560, 32, 15, 5, 49_152),
    "1b": ModelShape(2048, 8192, 16, 32, 8, 128_256),
    "3b": ModelShape(3072, 8192, 28, 24, 8, 128_256),
    "8b": ModelShape(4096, 14_336, 32, 32, 8, 128_256, tie_word_embeddings=False),
    "tiny-moe": ModelShape(256, 256, 2, 4, 2, 512, num_experts=8, num_experts_per_tok=2),
    "moe": ModelShape(
        1024, 512, 24, 16, 4, 32_000, tie_word_embeddings=False, num_experts=64,
        num_experts_per_tok=8,
    ),
    "30b-moe": ModelShape(
        2048, 768, 48, 32, 4, 151_936, 128, tie_word_embeddings=False, num_experts=128,
        num_experts_per_tok=8,
    ),
    "hybrid": ModelShape(1024, 3584, 24, 8, 2, 32_000, 256, num_linear_heads=16),
}  # fmt: skip
"""Shapes of SmolLM2 (135m, 360m), Llama 3 (1b, 3b, 8b), Qwen3-30B-A3B (30b-moe) and Qwen3.5 0.8B
with fewer words (hybrid), of a mixture of 2.5 billion weights of which a token uses 0.4 (moe), and
two that a test can afford."""
LINEAR_DIM, LINEAR_KERNEL = 128, 4


def write_llama(path: Path, shape: ModelShape, quant: str = "q4_0", seed: int = 0) -> Path:
    """Write a model.

    Args:
        path: the GGUF file to write.
        shape: its dimensions.
        quant: a `QuantType` name in any case, or ``q4_k_m``: the mix that is usual under that name.
        seed: of the random weights; equal arguments give equal files.
    """
    plan = list(_tensors(shape, quant.upper()))
    entries, offset = [], 0
    for name, dims, quant_type in plan:
        entries.append(TensorEntry(name, dims, quant_type.value, offset))
        num_bytes = _num_blocks(dims, quant_type) * quant_type.block_bytes
        offset += -(-num_bytes // 32) * 32
    generator = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(header_bytes(_metadata(shape, quant), entries))
        for name, dims, quant_type in plan:
            num_blocks = _num_blocks(dims, quant_type)
            sigma = 1.0 if name == "token_embd.weight" else dims[-1] ** -0.5
            if shape.num_experts and ("attn_output" in name or "ffn_down" in name):
                # What layers add must not drown a token's embedding: the hidden states of all
                # tokens would become alike, and choose the same experts.
                sigma *= _SMALL_ADDITION
            if name.endswith("ssm_a"):
                file.write(np.full(num_blocks, -0.05, dtype=np.float32).tobytes())
                num_blocks = 0
            for start in range(0, num_blocks, _CHUNK_BLOCKS):
                count = min(_CHUNK_BLOCKS, num_blocks - start)
                file.write(random_blocks(generator, quant_type, count, sigma, len(dims) == 1))
            file.write(bytes(-file.tell() % 32))
    return path


_SMALL_ADDITION = 0.05


def random_blocks(
    generator: np.random.Generator,
    quant_type: QuantType,
    num_blocks: int,
    sigma: float,
    is_norm: bool = False,
) -> bytes:
    """Blocks of one type: values of mean 0 (norms: 1) and standard deviation about ``sigma``."""
    if quant_type in (QuantType.F32, QuantType.F16, QuantType.BF16):
        values = generator.standard_normal(num_blocks, dtype=np.float32)
        values = 1 + np.float32(0.1) * values if is_norm else np.float32(sigma) * values
        if quant_type is QuantType.F16:
            return values.astype(np.float16).tobytes()
        if quant_type is QuantType.BF16:
            return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return values.tobytes()
    blocks = np.frombuffer(
        generator.bytes(num_blocks * quant_type.block_bytes), dtype=np.uint8
    ).reshape(num_blocks, -1)
    blocks = blocks.copy()
    jitter = generator.uniform(0.8, 1.2, num_blocks)
    _SCALERS[quant_type](blocks, (sigma * jitter).astype(np.float32))
    return blocks.tobytes()


def _put_half(blocks: Bytes, position: int, values: npt.NDArray[Any]) -> None:
    blocks[:, position : position + 2] = (
        values.astype(np.float16).view(np.uint8).reshape(len(blocks), 2)
    )


def _legacy(num_levels: int, has_minimum: bool) -> Callable[[Bytes, npt.NDArray[np.float32]], None]:
    """Types of 32 elements: scale, perhaps minimum, then equally likely levels."""
    deviation = num_levels / 12**0.5

    def scale(blocks: Bytes, sigma: npt.NDArray[np.float32]) -> None:
        step = sigma / deviation
        if has_minimum:
            _put_half(blocks, 0, step)
            _put_half(blocks, 2, -step * (num_levels - 1) / 2)
        else:  # levels from -n / 2 to n / 2 - 1
            _put_half(blocks, 0, step * _random_signs(blocks))

    return scale


def _k_with_minimum(
    num_levels: int, d_at: int, scales_at: int
) -> Callable[[Bytes, npt.NDArray[np.float32]], None]:
    """Types of 256 elements with 6-bit (Q2_K: 4-bit) scales and minimums of sub-blocks.

    Each minimum equals its scale, so that ``dmin = d * middle level`` centres all values.
    """
    deviation = num_levels / 12**0.5

    def scale(blocks: Bytes, sigma: npt.NDArray[np.float32]) -> None:
        if num_levels == 4:
            low = blocks[:, scales_at : scales_at + 16] & 7 | 8
            blocks[:, scales_at : scales_at + 16] = low | low << 4
            mean_scale = 11.5
        else:
            sub = blocks[:, scales_at : scales_at + 8] & 31 | 32
            packed = np.empty((len(blocks), 12), dtype=np.uint8)
            packed[:, 0:4] = sub[:, 0:4] | sub[:, 4:8] >> 4 << 6
            packed[:, 4:8] = packed[:, 0:4]
            packed[:, 8:12] = sub[:, 4:8] & 15 | (sub[:, 4:8] & 15) << 4
            blocks[:, scales_at : scales_at + 12] = packed
            mean_scale = 47.5
        step = sigma / (deviation * mean_scale)
        _put_half(blocks, d_at, step)
        _put_half(blocks, d_at + 2, step * (num_levels - 1) / 2)

    return scale


def _q3_k(blocks: Bytes, sigma: npt.NDArray[np.float32]) -> None:
    # Scales are 6-bit values less 32 and levels -4 to 3: all bits random is centred already.
    _put_half(blocks, 108, sigma / (18.5 * 2.3))


def _q6_k(blocks: Bytes, sigma: npt.NDArray[np.float32]) -> None:
    _put_half(blocks, 208, sigma / (74.0 * 18.5))


_IQ4_DEVIATION = 67.4
"""Of equally likely levels, whose mean is -5.9."""


def _iq4_nl(blocks: Bytes, sigma: npt.NDArray[np.float32]) -> None:
    _put_half(blocks, 0, sigma / _IQ4_DEVIATION * _random_signs(blocks))


def _iq4_xs(blocks: Bytes, sigma: npt.NDArray[np.float32]) -> None:
    # Scales are 6-bit values less 32: all bits random is centred already.
    _put_half(blocks, 0, sigma / (_IQ4_DEVIATION * 18.5))


def _mxfp4(blocks: Bytes, sigma: npt.NDArray[np.float32]) -> None:
    # Twice the values of 4 bits have a deviation of 5.85.
    blocks[:, 0] = 128 + np.rint(np.log2(sigma / 5.85)).astype(np.int32)


def _random_signs(blocks: Bytes) -> npt.NDArray[np.float32]:
    return np.where(blocks[:, 0] & 1, np.float32(-1), np.float32(1))


_SCALERS: dict[QuantType, Callable[[Bytes, npt.NDArray[np.float32]], None]] = {
    QuantType.Q4_0: _legacy(16, False),
    QuantType.Q4_1: _legacy(16, True),
    QuantType.Q5_0: _legacy(32, False),
    QuantType.Q5_1: _legacy(32, True),
    QuantType.Q8_0: _legacy(256, False),
    QuantType.Q2_K: _k_with_minimum(4, 80, 0),
    QuantType.Q3_K: _q3_k,
    QuantType.Q4_K: _k_with_minimum(16, 0, 4),
    QuantType.Q5_K: _k_with_minimum(32, 0, 4),
    QuantType.Q6_K: _q6_k,
    QuantType.IQ4_NL: _iq4_nl,
    QuantType.IQ4_XS: _iq4_xs,
    QuantType.MXFP4: _mxfp4,
}


def _tensors(shape: ModelShape, quant: str) -> Iterator[tuple[str, tuple[int, ...], QuantType]]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    head_dim = shape.head_dim or hidden // shape.num_attention_heads
    kv = shape.num_key_value_heads * head_dim
    query = shape.num_attention_heads * head_dim

    def matrix(
        name: str, rows: int, columns: int, role: str, layer: int = 0
    ) -> tuple[str, tuple[int, ...], QuantType]:
        return name, (rows, columns), _quant_type(shape, quant, role, layer, columns)

    def mlp(
        name: str, rows: int, columns: int, role: str, layer: int = 0
    ) -> tuple[str, tuple[int, ...], QuantType]:
        """A matrix, or a stack of one per expert."""
        if not shape.num_experts:
            return matrix(f"{name}.weight", rows, columns, role, layer)
        quant_type = _quant_type(shape, quant, role, layer, columns)
        return f"{name}_exps.weight", (shape.num_experts, rows, columns), quant_type

    yield matrix("token_embd.weight", shape.vocab_size, hidden, "embedding")
    for i in range(shape.num_hidden_layers):
        yield f"blk.{i}.attn_norm.weight", (hidden,), QuantType.F32
        is_hybrid = shape.num_linear_heads > 0
        if is_hybrid and (i + 1) % 4:
            width = shape.num_linear_heads * LINEAR_DIM
            yield matrix(f"blk.{i}.attn_qkv.weight", 3 * width, hidden, "other")
            yield matrix(f"blk.{i}.attn_gate.weight", width, hidden, "other")
            for part in ("alpha", "beta"):
                rows = shape.num_linear_heads
                yield matrix(f"blk.{i}.ssm_{part}.weight", rows, hidden, "other")
            yield f"blk.{i}.ssm_conv1d.weight", (3 * width, LINEAR_KERNEL), QuantType.F32
            yield f"blk.{i}.ssm_a", (shape.num_linear_heads,), QuantType.F32
            yield f"blk.{i}.ssm_dt.bias", (shape.num_linear_heads,), QuantType.F32
            yield f"blk.{i}.ssm_norm.weight", (LINEAR_DIM,), QuantType.F32
            yield matrix(f"blk.{i}.ssm_out.weight", hidden, width, "other")
        else:
            # Qwen3.5's queries have a gate each.
            queries = 2 * query if is_hybrid else query
            yield matrix(f"blk.{i}.attn_q.weight", queries, hidden, "other")
            yield matrix(f"blk.{i}.attn_k.weight", kv, hidden, "other")
            yield matrix(f"blk.{i}.attn_v.weight", kv, hidden, "sensitive", i)
            yield matrix(f"blk.{i}.attn_output.weight", hidden, query, "other")
            if shape.num_experts or is_hybrid:
                yield f"blk.{i}.attn_q_norm.weight", (head_dim,), QuantType.F32
                yield f"blk.{i}.attn_k_norm.weight", (head_dim,), QuantType.F32
        norm = "post_attention_norm" if is_hybrid else "ffn_norm"
        yield f"blk.{i}.{norm}.weight", (hidden,), QuantType.F32
        if shape.num_experts:
            yield f"blk.{i}.ffn_gate_inp.weight", (shape.num_experts, hidden), QuantType.F32
        yield mlp(f"blk.{i}.ffn_gate", inner, hidden, "other")
        yield mlp(f"blk.{i}.ffn_up", inner, hidden, "other")
        yield mlp(f"blk.{i}.ffn_down", hidden, inner, "sensitive", i)
    yield "output_norm.weight", (hidden,), QuantType.F32
    if not shape.tie_word_embeddings:
        yield matrix("output.weight", shape.vocab_size, hidden, "head")


def _quant_type(shape: ModelShape, quant: str, role: str, layer: int, columns: int) -> QuantType:
    """Type of a matrix. In ``Q4_K_M`` the head is Q6_K, and so are, in about half of the layers,
    values and down projections; rows that are no multiple of 256 fall back to 32-element types."""
    if quant != "Q4_K_M":
        wanted = QuantType[quant]
        return wanted if columns % wanted.block_size == 0 else QuantType.Q8_0
    num_layers = shape.num_hidden_layers
    eighth = num_layers // 8
    is_precise = (
        layer < eighth or layer >= num_layers - eighth or (layer - eighth) % 3 == 2
        if role == "sensitive"
        else role == "head" or (role == "embedding" and shape.tie_word_embeddings)
    )
    if columns % 256:
        return QuantType.Q8_0 if is_precise else QuantType.Q5_0
    return QuantType.Q6_K if is_precise else QuantType.Q4_K


def _num_blocks(dims: tuple[int, ...], quant_type: QuantType) -> int:
    return int(np.prod(dims, dtype=np.int64)) // BLOCK_SIZES[quant_type][0]


def _metadata(shape: ModelShape, quant: str) -> dict[str, Any]:
    head_dim = shape.head_dim or shape.hidden_size // shape.num_attention_heads
    tokens = [*_SPECIALS, *byte_tokens()]
    if len(tokens) > shape.vocab_size:
        raise ValueError(f"vocab_size is {shape.vocab_size}, at least {len(tokens)} are needed")
    types = [3] * len(_SPECIALS) + [1] * 256
    fillers = shape.vocab_size - len(tokens)
    tokens += [f"filler{i}" for i in range(fillers)]
    types += [1] * fillers
    own: dict[str, Any] = {
        "block_count": shape.num_hidden_layers,
        "context_length": shape.max_position_embeddings,
        "embedding_length": shape.hidden_size,
        "feed_forward_length": shape.intermediate_size,
        "attention.head_count": shape.num_attention_heads,
        "attention.head_count_kv": shape.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": shape.rope_theta,
        "rope.dimension_count": head_dim // 4 if shape.num_linear_heads else head_dim,
        "vocab_size": shape.vocab_size,
    }
    if shape.num_linear_heads:
        own |= {
            "rope.dimension_sections": np.array([11, 11, 10, 0], dtype=np.int32),
            "ssm.conv_kernel": LINEAR_KERNEL,
            "ssm.state_size": LINEAR_DIM,
            "ssm.group_count": shape.num_linear_heads,
            "ssm.time_step_rank": shape.num_linear_heads,
            "ssm.inner_size": shape.num_linear_heads * LINEAR_DIM,
            "full_attention_interval": 4,
        }
    if shape.num_experts:
        own |= {
            "expert_count": shape.num_experts,
            "expert_used_count": shape.num_experts_per_tok,
            "expert_feed_forward_length": shape.intermediate_size,
        }
    return {
        "general.architecture": shape.architecture,
        "general.name": f"synthetic {quant}",
        **{f"{shape.architecture}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _CHAT_TEMPLATE,
    }


def byte_tokens() -> list[str]:
    """The 256 tokens of a byte-level vocabulary, by byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="GGUF file to write")
    parser.add_argument("--size", choices=SIZES, default="135m")
    parser.add_argument("--quant", default="q4_0", help="a quantisation type, or q4_k_m")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    path = write_llama(arguments.path, SIZES[arguments.size], arguments.quant, arguments.seed)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
