"""The models that are measured, and what one of their tokens costs in bytes and multiplications.

Names: a model of tellin's store (``smollm2``, ``gemma3-270m``), ``synthetic-q4_0`` and its like
(the 1.1 B Llama with random weights that `benchmarks.synthetic` writes into the cache),
``synthetic-moe-q4_0`` and its like (2.5 B weights in 64 experts, of which a token uses 8),
``synthetic-hybrid-q4_0`` and its like (Qwen3.5's layers, 0.5 B weights), or a GGUF path.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

SYNTHETIC = "synthetic-"
SYNTHETIC_SHAPES = ("moe", "hybrid")
"""Of `benchmarks.synthetic`, besides the Llama."""
FULL_MODELS = (
    "smollm2",
    "gemma3-270m",
    "synthetic-q4_0",
    "synthetic-q4_k_m",
    "synthetic-q8_0",
    "synthetic-f16",
    "synthetic-moe-q4_0",
)
QUICK_MODELS = ("smollm2",)
UNQUANTISED = {"F32", "F16", "BF16"}


@dataclass(frozen=True)
class BenchModel:
    """A model file and the least work that one token needs (attention left out)."""

    name: str
    path: Path
    file_bytes: int
    quant_type: str
    """Storage type of most of the weights."""
    vocab_size: int
    context_length: int
    weight_bytes_per_token: int
    """Bytes of weights that one decode step has to read: everything, but of an embedding matrix
    that is not also the output matrix only one row, and only the experts that a token uses."""
    macs_per_prefill_token: int
    """Multiply-accumulates of a prompt token: the layers' matrices; the output matrix is needed for
    the last token alone."""

    @property
    def is_quantised(self) -> bool:
        return self.quant_type not in UNQUANTISED


def open_bench_model(name: str, cache: Path) -> BenchModel:
    """Find, pull or write the model ``name`` and read what its tokens cost."""
    from tellin.loading import open_model

    path = _path_of(name, cache)
    source = open_model(path)
    try:
        tensors = dict(source.tensors)
        tied = "lm_head.weight" not in tensors
        hp = source.hparams
        used = Fraction(hp.num_experts_per_tok, hp.num_experts or 1)
        weight_bytes = macs = Fraction(0)
        bytes_of_type: Counter[str] = Counter()
        for tensor_name, tensor in tensors.items():
            bytes_of_type[tensor.quant_type.name] += tensor.num_bytes
            share = used if ".experts." in tensor_name else 1
            if tensor_name != "embed_tokens.weight" or tied:
                weight_bytes += share * tensor.num_bytes
            if tensor_name.startswith("layers.") and len(tensor.shape) == 2:
                macs += share * math.prod(tensor.shape)
        return BenchModel(
            name=path.stem if Path(name).exists() else name,
            path=path,
            file_bytes=path.stat().st_size,
            quant_type=bytes_of_type.most_common(1)[0][0],
            vocab_size=tensors["embed_tokens.weight"].shape[0],
            context_length=source.metadata.context_length,
            weight_bytes_per_token=round(weight_bytes),
            macs_per_prefill_token=round(macs),
        )
    finally:
        source.close()


def _path_of(name: str, cache: Path) -> Path:
    if name.startswith(SYNTHETIC):
        from benchmarks.synthetic import SIZES, ModelShape, write_llama

        path = cache / f"{name}.gguf"
        if not path.exists():
            cache.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            # 1.1 billion weights: 16 layers, 32 heads of 64, 8 key-value heads, as in Llama 3.2 1B.
            shape = ModelShape(2048, 8192, 16, 32, 8, 32_000, tie_word_embeddings=False)
            quant = name.removeprefix(SYNTHETIC)
            for size in SYNTHETIC_SHAPES:
                if quant.startswith(f"{size}-"):
                    shape, quant = SIZES[size], quant.removeprefix(f"{size}-")
            write_llama(partial, shape, quant)
            partial.rename(path)
        return path
    if Path(name).exists():
        return Path(name)
    from tellin.loading import resolve_model
    from tellin.settings import Settings

    return resolve_model(name, Settings.from_environ(), download=True)
