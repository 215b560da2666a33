"""``python -m benchmarks rounding``: what rounding the inputs of matrices costs in fidelity.

Simulates schemes of 8-bit activations on the NumPy reference backend, with the weights untouched,
and prints the divergence from float32 of each, for all matrices and for one kind of matrix alone.
It decides how the kernels store activations, so it depends on no kernel and on no machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.fidelity import CHUNK, TEXT, Divergence, Floats, backend_logits, table
from tellin.kernels.reference import ReferenceBackend
from tellin.loading.tensors import TensorRef

Rounding = Callable[[Floats], Floats]


def symmetric(block_size: int) -> Rounding:
    """``d * s`` with one scale per block, s in [-127, 127]."""

    def round_rows(x: Floats) -> Floats:
        blocks = x.reshape(len(x), -1, block_size)
        scale = _nonzero(np.abs(blocks).max(axis=-1, keepdims=True) / 127)
        return np.asarray(np.rint(blocks / scale) * scale, dtype=np.float32).reshape(x.shape)

    return round_rows


def asymmetric(block_size: int) -> Rounding:
    """``c + d * s`` with scale and centre per block: the 256 steps span its least and largest."""

    def round_rows(x: Floats) -> Floats:
        blocks = x.reshape(len(x), -1, block_size)
        low, high = blocks.min(axis=-1, keepdims=True), blocks.max(axis=-1, keepdims=True)
        scale = _nonzero((high - low) / 255)
        steps = np.rint((blocks - low) / scale)
        return np.asarray(low + steps * scale, dtype=np.float32).reshape(x.shape)

    return round_rows


def grid(block_size: int) -> Rounding:
    """``d * (s + 32 * z)``: what the kernels do in 8 bits (csrc/include/tellin/packed_format.h).

    s in [-128, 127], z in [-3, 3] by the middle of the block; d has three significant bits.
    """

    def round_rows(x: Floats) -> Floats:
        blocks = x.reshape(len(x), -1, block_size)
        low, high = blocks.min(axis=-1, keepdims=True), blocks.max(axis=-1, keepdims=True)
        middle = (high + low) * np.float32(127 / 32) / _nonzero(high - low)
        middle = np.where(high > low, middle, np.sign(high) * 3)
        zero = 32 * np.rint(np.clip(middle, -3, 3))
        need = _nonzero(np.maximum(high / (127 + zero), -low / (128 - zero)))
        fraction, exponent = np.frexp(need.astype(np.float32))
        scale = np.ldexp(np.ceil(fraction * 8) / 8, exponent)
        return np.asarray(np.rint(blocks / scale) * scale, dtype=np.float32).reshape(x.shape)

    return round_rows


def two_planes(block_size: int) -> Rounding:
    """Symmetric, and what it leaves over rounded once more: twice the integer work."""
    round_once = symmetric(block_size)

    def round_rows(x: Floats) -> Floats:
        first = round_once(x)
        return first + round_once(x - first)

    return round_rows


def _nonzero(scale: Floats) -> Floats:
    return np.where(scale > 0, scale, np.float32(1))


MATRICES = {
    "q, k, v": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate, up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "output": ("embed_tokens", "lm_head"),
}
EVERYTHING = tuple(part for parts in MATRICES.values() for part in parts)
SCHEMES: dict[str, tuple[Rounding, tuple[str, ...]]] = {
    "symmetric 16": (symmetric(16), EVERYTHING),
    "symmetric 32": (symmetric(32), EVERYTHING),
    "symmetric 64": (symmetric(64), EVERYTHING),
    "asymmetric 16": (asymmetric(16), EVERYTHING),
    "asymmetric 32": (asymmetric(32), EVERYTHING),
    "asymmetric 64": (asymmetric(64), EVERYTHING),
    "grid 32": (grid(32), EVERYTHING),
    "two planes 32": (two_planes(32), EVERYTHING),
    **{f"symmetric 32, {kind}": (symmetric(32), parts) for kind, parts in MATRICES.items()},
}


class RoundedBackend(ReferenceBackend):
    """A reference backend that rounds the inputs of chosen matrices."""

    rounding: Rounding
    matrices: tuple[str, ...]

    def _project(self, x: Floats, weight: TensorRef, bias: TensorRef | None) -> Floats:
        if any(f"{name}.weight" in weight.name for name in self.matrices):
            x = self.rounding(x)
        return super()._project(x, weight, bias)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2", help="store name or path of a model")
    parser.add_argument("--tokens", type=int, default=CHUNK, help=f"default {CHUNK}")


def run(args: argparse.Namespace) -> int:
    from tellin.loading import open_model, resolve_model
    from tellin.models import build_plan
    from tellin.settings import Settings

    path = resolve_model(args.model, Settings.from_environ(), download=True)
    with open_model(path) as source:
        text = TEXT.read_text(encoding="utf-8")
        token_ids = source.load_tokenizer().encode(text)[: args.tokens]
        plan = build_plan(source)
        exact = ReferenceBackend(plan, batched=True)
        rounded = RoundedBackend(plan, batched=True)
    expected = list(backend_logits(exact, token_ids, CHUNK))
    exact.close()
    results = {}
    for name, (rounding, matrices) in SCHEMES.items():
        rounded.rounding, rounded.matrices = rounding, matrices
        results[name] = Divergence(name)
        logits = backend_logits(rounded, token_ids, CHUNK)
        for reference_rows, rows in zip(expected, logits, strict=True):
            results[name].add(reference_rows, rows)
    print(table(Path(path).name, len(token_ids), results))
    return 0
