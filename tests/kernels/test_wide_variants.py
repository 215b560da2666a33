"""The vector variants of x86-64 give the same bits: an answer does not depend on the processor."""

from __future__ import annotations

import numpy as np
import pytest

from tellin.kernels import _C
from tellin.kernels.native import NativeBackend
from tellin.loading.tensors import QuantType
from tellin.models import build_plan
from tests.kernels.runtime_plans import Cache, llama_plan, random_ids
from tests.kernels.test_attention import CASES as ATTENTION
from tests.models.stepping import logits_of
from tests.models.tiny import ALL_CASES, MAX_MODEL_LEN, tiny_source, tiny_token_ids

WIDE = [isa for isa in _C.linear_variants() if isa in ("avx2", "avxvnni", "avx512", "amx")]


@pytest.mark.skipif(len(WIDE) < 2, reason="this processor runs one vector variant")
@pytest.mark.parametrize("precision", ["int8", "high", "float32"])
@pytest.mark.parametrize(
    "quant_type", [QuantType.Q4_1, QuantType.Q8_0, QuantType.IQ4_NL, QuantType.MXFP4, QuantType.F32]
)
def test_steps_of_a_quantised_model(quant_type: QuantType, precision: str) -> None:
    plan = llama_plan(quant_type)
    logits = []
    for isa in WIDE:
        cache = Cache(NativeBackend(plan, isa=isa, activation_precision=precision))
        prompt = cache.step(("a", random_ids(40, seed=1, vocab_size=plan.vocab_size)))
        more = cache.step(("a", [3]), ("b", random_ids(7, seed=2, vocab_size=plan.vocab_size)))
        logits.append(np.concatenate([prompt[0], *more]))
    for others in logits[1:]:
        np.testing.assert_array_equal(others, logits[0])


@pytest.mark.skipif(len(WIDE) < 2, reason="this processor runs one vector variant")
@pytest.mark.parametrize("name", ALL_CASES)
def test_every_architecture(name: str) -> None:
    """Norms of both kinds, activations, soft caps and rotary embeddings among them."""
    plan = build_plan(tiny_source(name), max_model_len=MAX_MODEL_LEN.get(name))
    logits = [logits_of(NativeBackend(plan, isa=isa), tiny_token_ids()) for isa in WIDE]
    for others in logits[1:]:
        np.testing.assert_array_equal(others, logits[0])


@pytest.mark.skipif(len(WIDE) < 2, reason="this processor runs one vector variant")
@pytest.mark.parametrize("name", ["group3", "group8", "head24", "head256", "window", "softcap"])
def test_attention_in_integers(name: str) -> None:
    ids = random_ids(300)
    outs = [
        Cache(NativeBackend(ATTENTION[name].plan(), isa=isa, kv_cache_dtype="int16"))
        for isa in WIDE
    ]
    first, *others = [cache.feed("r", ids, 290) for cache in outs]
    for other in others:
        np.testing.assert_array_equal(other, first)
