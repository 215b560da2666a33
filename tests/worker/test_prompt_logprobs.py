"""3.6 Wart, 3.10: prompt log-probabilities follow ``logprobs_mode`` like those of outputs."""

from __future__ import annotations

import numpy as np
import pytest

from tellin.sampling_params import SamplingParams
from tellin.step_protocol import LogprobsLists
from tellin.worker import prompt_logprobs
from tellin.worker.model_runner import ModelRunner
from tests.worker import reference_sampler
from tests.worker.fakes import Driver, FakeBackend, make_config

V = 40
PROMPT = [1, 5, 5, 9, 30, 2, 7, 5, 5, 11, 3]
PARAMS = [
    SamplingParams(temperature=0.0, repetition_penalty=1.4),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(temperature=1.3, top_k=6, min_p=0.02, logit_bias={5: 2.0}),
    SamplingParams(temperature=1.0, allowed_token_ids=[1, 2, 5, 9, 11, 30]),
]


def scored(params: SamplingParams) -> SamplingParams:
    params = params.clone()
    params.prompt_logprobs = 2
    return params


def expected(params: SamplingParams, mode: str, k: int) -> LogprobsLists:
    """Entry by entry: what the sampler makes of a prompt that ends there."""
    whole = params.clone()
    whole.logprobs = -1
    backend, state = FakeBackend(V), 0
    table = LogprobsLists([], [], [])
    for i, token in enumerate(PROMPT[:-1]):
        state = (state * 6364136223846793005 + token + 1) % 2**64
        row = backend.logits(state)
        found = reference_sampler.sample(row, whole, PROMPT[: i + 1], [], 0, mode)
        assert found.ids is not None
        assert found.logprobs is not None
        ids, values = found.ids[1:], found.logprobs[1:]
        value = values[ids.index(PROMPT[i + 1])]
        table.logprob_token_ids.append([PROMPT[i + 1], *ids[:k]])
        table.logprobs.append([value, *values[:k]])
        table.sampled_token_ranks.append(sum(v >= value for v in values))
    return table


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("chunk", [3, 100])
def test_processed_modes(
    params: SamplingParams, mode: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks and at once, in tables of one row and of many."""
    if chunk == 3:
        monkeypatch.setattr(prompt_logprobs, "_MAX_TABLE_BYTES", 1)
    d = Driver(ModelRunner(make_config(V, logprobs_mode=mode), FakeBackend(V)))
    d.add("a", PROMPT, scored(params))
    tables = []
    while not tables:
        tables += d.step({"a": min(chunk, len(PROMPT) - d.computed["a"])}).prompt_logprobs.values()
    (table,) = tables
    wanted = expected(params, mode, 2)
    np.testing.assert_allclose(table.logprobs, wanted.logprobs, atol=2e-6)
    assert table.sampled_token_ranks == wanted.sampled_token_ranks
    for got, want, values in zip(
        table.logprob_token_ids, wanted.logprob_token_ids, wanted.logprobs, strict=True
    ):
        # Which ids follow those that were filtered out means nothing: all are -inf.
        assert [i for i, v in zip(got, values, strict=True) if v > -np.inf] == [
            i for i, v in zip(want, values, strict=True) if v > -np.inf
        ]
    whole = Driver(ModelRunner(make_config(V, logprobs_mode=mode), FakeBackend(V)))
    whole.add("a", PROMPT, scored(params))
    assert whole.step().prompt_logprobs["a"] == table


def test_masks_that_leave_nothing_are_named() -> None:
    config = make_config(V, logprobs_mode="processed_logprobs")
    d = Driver(ModelRunner(config, FakeBackend(V)))
    params = SamplingParams(allowed_token_ids=[7], prompt_logprobs=1)
    params.bad_words_token_ids = [[7]]
    d.add("a", PROMPT, params)
    d.add("b", PROMPT, SamplingParams(prompt_logprobs=0))
    output = d.step()
    assert set(output.errors) == {"a"}
    assert len(output.prompt_logprobs["b"]) == len(PROMPT) - 1
