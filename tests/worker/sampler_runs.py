"""Runs the native sampler on rows of logits, for tests."""

from __future__ import annotations

import numpy as np

from tellin.kernels.sampler import Sampler, SampleResult, SampleRows
from tellin.sampling_params import SamplingParams

F = np.float32
ISAS = [None, "portable", "avx2", "avx512", "neon"]


def available_isas() -> list[str]:
    names = []
    for name in ISAS[1:]:
        try:
            names.append(Sampler(4, isa=name).isa)
        except ValueError:
            continue
    return names


def run(
    logits: np.ndarray,
    params: list[SamplingParams],
    histories: list[tuple[list[int], list[int]]] | None = None,
    keys: list[int] | None = None,
    mode: str = "raw_logprobs",
    num_ids: int | None = None,
    masks: list[list[bool] | None] | None = None,
    isa: str | None = None,
    with_maxima: bool = False,
) -> SampleResult:
    """Sample one row per entry of ``params``; the slots are spread out on purpose."""
    logits = np.array(logits, F)
    count = len(params)
    sampler = Sampler(num_ids or logits.shape[1], mode, isa)
    histories = histories or [([], [])] * count
    slots = [3 * i + 1 for i in range(count)]
    width = max(len(p) + len(o) for p, o in histories) + 1
    history = np.zeros((3 * count + 1, width), np.int32)
    for i, (prompt, output) in enumerate(histories):
        sampler.set_slot(slots[i], params[i], (keys or [7] * count)[i])
        history[slots[i], : len(prompt) + len(output)] = [*prompt, *output]
    rows = SampleRows(
        np.array(slots, np.int32),
        np.arange(count, dtype=np.int32),
        np.array([len(p) + len(o) for p, o in histories], np.int32),
        np.array([len(p) for p, _ in histories], np.int32),
        history,
    )
    if masks is not None:
        rows.bitmask = np.stack([pack_mask(m or [True] * logits.shape[1]) for m in masks])
        rows.bitmask_rows = np.array(
            [-1 if m is None else i for i, m in enumerate(masks)], np.int32
        )
    if with_maxima:
        rows.maxima = block_maxima(logits)
    columns = max(sampler.num_logprob_columns(s) for s in slots)
    return sampler.sample(logits, rows, num_logprob_columns=columns)


def block_maxima(logits: np.ndarray) -> np.ndarray:
    """What `NativeBackend.block_maxima` gives for these logits, and columns that are not read."""
    finite = np.where(np.isnan(logits), np.inf, logits)
    maxima = np.maximum.reduceat(finite, np.arange(0, logits.shape[1], 64), axis=1)
    return np.pad(maxima, ((0, 0), (0, 3)), constant_values=np.nan).astype(F)


def pack_mask(mask: list[bool]) -> np.ndarray:
    padded = np.zeros(-(-len(mask) // 32) * 32, np.uint8)
    padded[: len(mask)] = mask
    return np.packbits(padded, bitorder="little").view(np.int32)
