"""The sampler in NumPy, one row at a time, by sorting everything: the oracle of the native one.

Written from the rules (core spec 3.6 and csrc/include/tellin/sampler.h), sharing no code with it.
Float32 steps are the same elementary operations, so token ids must be equal, not close.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tellin.sampling_params import SamplingParams

Floats = npt.NDArray[np.float32]
F = np.float32
NEG_INF = F(-np.inf)
WEIGHT_ONE = 2**44


def philox4x32(key: int, counter: tuple[int, int, int, int]) -> list[int]:
    """Ten rounds of Philox4x32 (Salmon et al. 2011, section 3.3)."""
    mask = 0xFFFFFFFF
    k0, k1 = key & mask, key >> 32 & mask
    c = list(counter)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & mask, (p0 >> 32) ^ c[3] ^ k1, p0 & mask]
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c


def random_bits(key: int, index: int, half: int = 0) -> int:
    """The first or second 64 bits for sampling the output at ``index``."""
    words = philox4x32(key, (index, 0, 0, 0))
    return words[2 * half + 1] << 32 | words[2 * half]


def exp_weights(x: Floats, largest: np.float32, inv_t: np.float32) -> npt.NDArray[np.uint64]:
    """round(2^44 * exp((x - largest) * inv_t)), exp in single precision."""
    with np.errstate(invalid="ignore", over="ignore"):
        z = (x - largest) * inv_t
    z = np.where(z < F(-64), F(-64), z)
    shifted = z * F(1.44269504) + F(12582912)
    k = shifted - F(12582912)
    r = (z - k * F(0.693359375)) - k * F(-2.12194440e-4)
    p = r * F(1.0 / 5040.0) + F(1.0 / 720.0)
    for c in (F(1.0 / 120.0), F(1.0 / 24.0), F(1.0 / 6.0), F(0.5), F(1.0), F(1.0)):
        p = p * r + c
    e = np.ldexp(p, k.astype(np.int32))
    assert e.dtype == np.float32
    return np.rint(e.astype(np.float64) * WEIGHT_ONE).astype(np.uint64)


@dataclass
class Expected:
    """What the native sampler must give for a row; ``logprobs`` are in double precision."""

    token: int | None
    status: int = 0
    ids: list[int] | None = None
    logprobs: list[float] | None = None
    rank: int | None = None


def order(x: Floats) -> list[int]:
    """Ids from best to worst: larger value first, then lower id."""
    return sorted(range(len(x)), key=lambda i: (-float(x[i]), i))


def log_softmax(x: Floats) -> npt.NDArray[np.float64]:
    y = x.astype(np.float64) - float(x.max())
    with np.errstate(divide="ignore"):
        return y - math.log(np.exp(y).sum())


def processed(
    x: Floats,
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    allowed: list[bool] | None,
) -> Floats:
    """Logits at the point of the greedy choice (3.6.1 to 3.6.9)."""
    n = len(x)
    x = x.copy()
    if allowed is not None:
        x[~np.array(allowed[:n])] = NEG_INF
    if params.allowed_token_ids is not None:
        keep = np.zeros(n, bool)
        keep[[i for i in params.allowed_token_ids if i < n]] = True
        x[~keep] = NEG_INF
    for word in params.bad_words_token_ids or []:
        if len(word) - 1 <= len(output) and output[len(output) - len(word) + 1 :] == word[:-1]:
            x[word[-1]] = NEG_INF
    if len(output) < params.min_tokens:
        ends = set(params.all_stop_token_ids)
        if params.eos_token_id is not None and not params.ignore_eos:
            ends.add(params.eos_token_id)
        x[[i for i in ends if i < n]] = NEG_INF
    for i, bias in (params.logit_bias or {}).items():
        if i < n:
            x[i] += F(bias)
    r = F(params.repetition_penalty)
    active = r != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
    for i in sorted(set(prompt + output)) if active else ():
        if i < n:
            count = output.count(i)
            value = x[i] / r if x[i] > 0 else x[i] * r
            value = value - F(params.frequency_penalty) * F(count)
            x[i] = value - F(params.presence_penalty) if count else value
    return x


def survivors(x: Floats, params: SamplingParams) -> tuple[list[int], npt.NDArray[np.uint64]]:
    """Ids that min-p, top-k and top-p leave, and all weights."""
    weights = exp_weights(x, x.max(), F(1) / F(params.temperature))
    kept = order(x)
    if params.min_p > 0:
        least = F(math.log(F(params.min_p)))
        with np.errstate(over="ignore"):
            z = (x - x.max()) * (F(1) / F(params.temperature))
        kept = [i for i in kept if z[i] >= least]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        total = sum(int(weights[i]) for i in kept)
        wanted = min(math.ceil(params.top_p * float(total)), total)
        nucleus, before = [], 0
        for i in kept:
            if nucleus and before >= wanted:
                break
            nucleus.append(i)
            before += int(weights[i])
        kept = nucleus
    return sorted(kept), weights


def draw(
    x: Floats,
    params: SamplingParams,
    kept: list[int],
    weights: npt.NDArray[np.uint64],
    rng_key: int,
    index: int,
) -> int:
    """Invert the cumulative weights of ``kept`` in id order.

    Without any filter in two steps: blocks of 64 whose maximum is within 8 nats of the largest are
    the head; the first random number chooses head or tail, the second the entry.
    """
    unfiltered = params.min_p == 0 and params.top_p == 1 and not 0 < params.top_k < len(x)
    if unfiltered:
        least = x.max() - F(8) / (F(1) / F(params.temperature))
        blocks = np.array([x[i : i + 64].max() >= least for i in range(0, len(x), 64)])
        in_head = np.repeat(blocks, 64)[: len(x)]
        head = sum(int(w) for w in weights[in_head])
        total = sum(int(w) for w in weights)
        wanted = (random_bits(rng_key, index, 0) * total >> 64) < head
        kept = [i for i in kept if in_head[i] == wanted]
    total = sum(int(weights[i]) for i in kept)
    r = random_bits(rng_key, index, int(unfiltered)) * total >> 64
    for token in kept:
        if r < int(weights[token]):
            return token
        r -= int(weights[token])
    raise AssertionError("r is below the total")


def sample(
    logits: Floats,
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    rng_key: int,
    mode: str = "raw_logprobs",
    allowed: list[bool] | None = None,
) -> Expected:
    """Sample one row."""
    if not (logits < np.inf).all():
        return Expected(None, 1)
    x = processed(logits, params, prompt, output, allowed)
    if x.max() == NEG_INF:
        return Expected(None, 2)
    greedy = params.temperature < 1e-5
    if greedy:
        token, final = order(x)[0], x
    else:
        kept, weights = survivors(x, params)
        token = draw(x, params, kept, weights, rng_key, len(output))
        final = np.full(len(x), NEG_INF, F)
        final[kept] = x[kept]
        final = final / F(params.temperature)
    if params.num_logprobs is None:
        return Expected(token)
    source = logits if mode.startswith("raw") else final
    values = source.astype(np.float64) if mode.endswith("logits") else log_softmax(source)
    others = params.logprob_token_ids
    if others is None:
        assert params.logprobs is not None
        others = order(source)[: len(source) if params.logprobs == -1 else params.logprobs]
    ids = [token, *others]
    rank = int((source >= source[token]).sum())
    return Expected(token, 0, ids, [float(values[i]) for i in ids], rank)
