"""Worker on a real model: sleep and wake, speculation, log-probabilities against full passes."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin import loading
from tellin.config import EngineConfig, SpeculativeConfig
from tellin.exceptions import EngineError, InvalidParameterError
from tellin.kernels.batch import StepBatch
from tellin.sampling_params import SamplingParams
from tellin.settings import Settings
from tellin.worker.memory import resident_bytes
from tellin.worker.worker import Worker
from tests.worker.fakes import Driver, FakeBackend, make_config

MIB = 1 << 20


def config_for(path: Path, **spec: Any) -> EngineConfig:
    metadata = loading.open_metadata(path)
    config = make_config(metadata.vocab_size, metadata.tokenizer_size)
    return dataclasses.replace(
        config,
        model_config=dataclasses.replace(config.model_config, path=path, backend="native"),
        settings=Settings.from_environ(),
        speculative_config=SpeculativeConfig(**spec) if spec else None,
    )


@pytest.fixture(scope="module")
def worker(smollm2_path: Path) -> Iterator[Worker]:
    worker = Worker(config_for(smollm2_path))
    worker.initialize_kv_cache(256)
    yield worker
    worker.shutdown()


PROMPTS = [[1, 9690, 198, 2683, 359], [504, 3575, 282, 4649, 314], list(range(300, 340))]


def generate(worker: Worker, num: int = 12) -> dict[str, list[int]]:
    d = Driver(worker)
    for i, prompt in enumerate(PROMPTS):
        d.add(f"greedy{i}", prompt)
        d.add(f"seeded{i}", prompt, SamplingParams(seed=1, top_p=0.9), rng_key=7 + i)
    d.run(num)
    for req_id in list(d.known):
        d.finish(req_id)
    d.step()
    return {r: ids[:num] for r, ids in d.outputs.items()}


@pytest.mark.parametrize("level", [1, 2])
def test_4_8_sleep_gives_memory_back(worker: Worker, level: int) -> None:
    """4.8: level 1 frees the pool, level 2 the weights too; afterwards the same ids come out."""
    before = generate(worker)
    touch_pool(worker)
    gc.collect()
    awake = resident_bytes()
    worker.sleep(level)
    gc.collect()
    asleep = resident_bytes()
    pool = 256 * worker.config.cache_config.block_size * 30 * 3 * 64 * 2 * 2
    weights = 90 * MIB if level == 2 else 0
    assert awake - asleep > 0.8 * pool + 0.8 * weights
    assert worker.is_sleeping
    empty = Driver(worker).schedule()
    worker.execute_model(empty)  # what has ended is forgotten while it sleeps, too
    worker.sample_tokens(None)
    empty.total_num_scheduled_tokens = 1
    with pytest.raises(EngineError, match="sleeps"):
        worker.execute_model(empty)
    worker.sleep(level)
    worker.wake_up()
    assert not worker.is_sleeping
    assert generate(worker) == before
    assert resident_bytes() < awake + 40 * MIB


def test_a_sleep_that_is_refused_puts_nothing_away(worker: Worker) -> None:
    worker.profile(True)
    with pytest.raises(EngineError, match="profiler"):
        worker.sleep(2)
    assert not worker.is_sleeping
    worker.profile(False)
    worker.sleep(2)
    worker.wake_up()


def touch_pool(worker: Worker) -> None:
    """Write every block, so that the whole pool is resident."""
    backend: Any = worker.runner.backend
    backend.copy_kv_blocks((1, block) for block in range(2, 256))


def test_4_8_wake_by_tags(worker: Worker) -> None:
    before = generate(worker)
    worker.sleep(2)
    worker.wake_up(["weights"])
    assert worker.is_sleeping
    step = Driver(worker).schedule()
    step.total_num_scheduled_tokens = 1
    with pytest.raises(EngineError, match="kv_cache"):
        worker.execute_model(step)
    worker.wake_up(["weights"])  # awake already: a warning, nothing more
    worker.wake_up(["kv_cache", "scheduling"])
    assert not worker.is_sleeping
    assert generate(worker) == before
    with pytest.raises(InvalidParameterError):
        worker.wake_up(["brain"])
    with pytest.raises(InvalidParameterError):
        worker.sleep(3)


def test_kv_cache_alone_does_not_wake_without_weights(worker: Worker) -> None:
    worker.sleep(2)
    worker.wake_up(["kv_cache"])
    assert worker.is_sleeping
    worker.wake_up()
    assert not worker.is_sleeping


@pytest.mark.parametrize(
    "spec",
    [
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
        {"method": "suffix", "num_speculative_tokens": 6},
        {"method": "draft_model", "num_speculative_tokens": 3},
    ],
    ids=lambda spec: spec["method"],
)
def test_e2_speculation_on_a_real_model(
    worker: Worker, smollm2_path: Path, spec: dict[str, Any]
) -> None:
    """Greedy and seeded ids with drafts equal those without, bit for bit, on the native backend."""
    if spec["method"] == "draft_model":
        spec = {**spec, "model": str(smollm2_path)}
    expected = generate(worker, 24)
    drafting = Worker(config_for(smollm2_path, **spec))
    drafting.initialize_kv_cache(128)
    d = Driver(drafting)
    for i, prompt in enumerate(PROMPTS):
        d.add(f"greedy{i}", prompt)
        d.add(f"seeded{i}", prompt, SamplingParams(seed=1, top_p=0.9), rng_key=7 + i)
    drafted = accepted = 0
    while min(map(len, d.outputs.values())) < 24:
        scheduled = d.schedule()
        scheduled.num_spec_tokens_to_schedule = spec["num_speculative_tokens"]
        drafted += sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        drafting.execute_model(scheduled)
        output = drafting.sample_tokens(None)
        accepted += sum(len(ids) - 1 for ids in output.sampled_token_ids if ids)
        d.apply(scheduled, output)
        d.drafts = dict(output.draft_token_ids)
    assert {r: ids[:24] for r, ids in d.outputs.items()} == expected
    assert 0 < accepted <= drafted
    if spec["method"] == "draft_model":
        assert accepted > 0.3 * drafted, "it drafts for itself"
    drafting.shutdown()


def test_e10_logprobs_equal_a_full_pass(worker: Worker) -> None:
    """E10, P08: sampled and prompt log-probabilities are log-softmax of one plain pass's logits."""
    prompt = PROMPTS[2]
    d = Driver(worker)
    d.add("a", prompt, SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2))
    outputs = [d.step({"a": 16}), d.step({"a": 24})]
    outputs += [d.step() for _ in range(4)]
    (table,) = [t for o in outputs for t in o.prompt_logprobs.values()]
    ids = d.known["a"]
    d.finish("a")
    d.step()
    n = len(ids) - 1
    logits = worker.runner.backend.forward(
        StepBatch(
            np.array(ids[:n], np.int32),
            np.arange(n, dtype=np.int32),
            np.array([0, n], np.int32),
            np.array([n], np.int32),
            np.arange(1, 10, dtype=np.int32)[None],
            np.arange(n, dtype=np.int32),
        )
    ).astype(np.float64)
    logprobs = logits - logits.max(axis=1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(axis=1, keepdims=True))
    for i, (columns, values) in enumerate(
        zip(table.logprob_token_ids, table.logprobs, strict=True)
    ):
        assert columns[0] == prompt[i + 1]
        np.testing.assert_allclose(values, logprobs[i, columns], atol=1e-5)
    sampled = [o.logprobs[0] for o in outputs if o.logprobs and o.logprobs[0]]
    for i, entry in enumerate(sampled):
        row = logprobs[len(prompt) - 1 + i]
        np.testing.assert_allclose(entry.logprobs[0], row[entry.logprob_token_ids[0]], atol=1e-5)
        assert entry.sampled_token_ranks[0] == (row >= row[entry.logprob_token_ids[0][0]]).sum()


def test_given_backend_cannot_be_reopened() -> None:
    """Level 2 needs a model the worker can open again: said, not done by half."""
    given = Worker(make_config(), FakeBackend(64))
    given.initialize_kv_cache(8)
    with pytest.raises(ValueError, match="level 2"):
        given.sleep(2)


def test_get_info(worker: Worker) -> None:
    info = worker.get_info()
    assert info["backend"] == "native"
    assert info["num_threads"] >= 1
