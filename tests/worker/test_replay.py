"""E8, G10: a worker needs nothing but the stream of steps."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.synthetic import SIZES, write_llama
from tellin import LLM, SamplingParams
from tellin.step_protocol import ModelRunnerOutput, SchedulerOutput
from tellin.worker.backends import open_backend
from tellin.worker.model_runner import ModelRunner


def recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[SchedulerOutput], list[Any], list[ModelRunnerOutput]]:
    """Lists that fill with every step, the arrays made of it, and its result."""
    steps: list[SchedulerOutput] = []
    inputs: list[Any] = []
    outputs: list[ModelRunnerOutput] = []
    execute, sample = ModelRunner.execute_model, ModelRunner.sample_tokens

    def execute_model(self: ModelRunner, step: SchedulerOutput) -> None:
        steps.append(copy.deepcopy(step))
        execute(self, step)
        assert self._pending is not None
        inputs.append(copy.deepcopy(self._pending[1].step))

    def sample_tokens(self: ModelRunner, grammar: Any) -> ModelRunnerOutput:
        output = sample(self, grammar)
        outputs.append(copy.deepcopy(output))
        return output

    monkeypatch.setattr(ModelRunner, "execute_model", execute_model)
    monkeypatch.setattr(ModelRunner, "sample_tokens", sample_tokens)
    return steps, inputs, outputs


@pytest.mark.parametrize("drafts", [False, True])
def test_a_fresh_worker_replays_a_recorded_stream(
    drafts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefix hits, copies, preemption, aborts, drafts: the same arrays and the same ids again."""
    model = write_llama(tmp_path / "tiny.gguf", SIZES["tiny"], "q8_0")
    steps, inputs, outputs = recorded(monkeypatch)
    spec = {"method": "suffix", "num_speculative_tokens": 3, "adaptive": False}
    rng = random.Random(5)
    with LLM(
        model,
        num_kv_blocks=14,
        max_model_len=128,
        max_num_batched_tokens=48,
        max_num_seqs=8,
        speculative_config=spec if drafts else None,
    ) as llm:
        engine = llm.llm_engine
        for name in ("first", "same"):  # the second copies the last block of the first's prompt
            params = SamplingParams(temperature=0, max_tokens=40, logprobs=1)
            engine.add_request(name, {"prompt_token_ids": [*range(10, 50)]}, params)
            for _ in range(4):
                engine.step()
        for number in range(24):
            ids = [9] * 20 + [rng.randrange(3, 99) for _ in range(rng.randrange(1, 20))]
            params = SamplingParams(
                temperature=rng.choice([0, 1]),
                max_tokens=rng.randrange(20, 60),
                logprobs=1,
            )
            engine.add_request(f"r{number}", {"prompt_token_ids": ids}, params)
            if number % 3 == 2:
                engine.step()
            if number % 7 == 6:
                engine.abort_request([f"r{number - 1}"])
        while engine.has_unfinished_requests():
            engine.step()
        core = engine.engine_core.engine_core
        assert core.scheduler.num_preemptions > 0
        assert any(step.kv_block_copies for step in steps)
        assert any(step.scheduled_spec_decode_tokens for step in steps) == drafts
        config, num_blocks = core.config, core.ready.num_kv_blocks
    monkeypatch.undo()
    runner = ModelRunner(config, open_backend(config, model))
    runner.init_kv_cache(num_blocks)
    for step, arrays, expected in zip(steps, inputs, outputs, strict=True):
        runner.execute_model(copy.deepcopy(step))
        assert runner._pending is not None
        again = runner._pending[1].step
        for name in ("token_ids", "positions", "query_start_loc", "seq_lens", "logits_indices"):
            np.testing.assert_array_equal(getattr(again, name), getattr(arrays, name))
        output = runner.sample_tokens(None)
        assert output.sampled_token_ids == expected.sampled_token_ids
        assert output.logprobs == expected.logprobs
        assert output.draft_token_ids == expected.draft_token_ids
    runner.release_backend()
