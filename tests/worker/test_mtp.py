"""Drafts of a model's own layer: what they are, that no result changes, that they can be right."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin import LLM, SamplingParams
from tellin.exceptions import TellinError
from tellin.kernels.batch import StepBatch
from tellin.kernels.native import NativeBackend
from tellin.loading import open_model, open_predictor
from tellin.models import build_plan, build_predictor
from tellin.outputs import RequestOutput
from tellin.worker.mtp import PredictorDrafter
from tests.models.predictors import VOCAB, agreeing_checkpoint, write_checkpoint
from tests.models.stepping import Stepper

FAMILIES = ["qwen35", "deepseek_v3", "mimo"]


def mtp(k: int, **more: Any) -> dict[str, Any]:
    return {"method": "mtp", "num_speculative_tokens": k, "adaptive": False, **more}


def engine(path: Path, spec: dict[str, Any] | None, **options: Any) -> LLM:
    options = {"max_model_len": 128, "num_kv_blocks": 96, "num_threads": 1} | options
    return LLM(path, speculative_config=spec, **options)


def some_requests(seed: int, count: int) -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    """Prompts, of which some share a beginning, and parameters of some kinds."""
    rng = random.Random(seed)
    prompts, params = [], []
    for i in range(count):
        ids = [9] * rng.choice([0, 0, 32, 33])
        ids += [rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 40))]
        prompts.append({"prompt_token_ids": ids})
        extra = rng.choice([{}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"presence_penalty": 0.5}])
        params.append(
            SamplingParams(
                temperature=rng.choice([0, 0.3, 0.9]),
                seed=i,
                max_tokens=rng.randrange(2, 30),
                ignore_eos=rng.random() < 0.5,
                **extra,
            )
        )
    return prompts, params


def summary(output: RequestOutput) -> Any:
    """Everything that must be equal."""
    first = output.outputs[0]
    return first.token_ids, first.finish_reason, first.logprobs, output.prompt_logprobs


@pytest.mark.parametrize(
    ("name", "tight"),
    [("qwen35", False), ("qwen35", True), ("deepseek_v3", True), ("mimo", False)],
)
def test_e2_drafts_change_no_bit(name: str, tight: bool, tmp_path: Path) -> None:
    """E2, promise 1: sampled and greedy; ``tight``: small chunks, preemption, a full pool."""
    path = write_checkpoint(tmp_path / name, name)
    prompts, params = some_requests(1, 12)
    with engine(path, None) as llm:
        expected = [summary(output) for output in llm.generate(prompts, params)]
    options: dict[str, Any] = {"max_num_batched_tokens": 19, "num_kv_blocks": 15} if tight else {}
    with engine(path, mtp(3), max_num_seqs=8, **options) as llm:
        for _ in range(2):  # the second time mostly from the prefix cache
            found = [summary(output) for output in llm.generate(prompts, params)]
            assert found == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_right_drafts_are_accepted(name: str, tmp_path: Path) -> None:
    """The layer knows the model's next id by construction: all drafts are right."""
    path = agreeing_checkpoint(tmp_path / name, name)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with engine(path, mtp(3), disable_log_stats=False) as llm:
        ids = list(range(5, 20))
        (output,) = llm.generate({"prompt_token_ids": ids}, params)
        assert output.outputs[0].token_ids == [(19 + 7 * (i + 1)) % VOCAB for i in range(24)]
        counts = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
        drafted, accepted = (
            counts[f"tellin:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted")
        )
        assert drafted == accepted == 17, "the first id, then five steps of four, then three"


class Oracle:
    """What the layer drafts, computed anew from all ids for every draft."""

    def __init__(self, path: Path) -> None:
        options = {"num_threads": 1, "activation_precision": "int8"}
        with open_model(path) as source:
            self.target = NativeBackend(build_plan(source, all_hidden=True), **options)
        with open_predictor(path) as source:
            self.layer = NativeBackend(build_predictor(source), **options)

    def drafts(self, ids: list[int], count: int) -> list[int]:
        Stepper(self.target).step([("r", ids[:-1])])
        hidden, following = np.array(self.target.hidden()), ids[1:]
        drafts: list[int] = []
        while True:
            num = len(following)
            arange = np.arange(num, dtype=np.int32)
            step = StepBatch(
                np.array(following, np.int32), arange, np.array([0, num], np.int32),
                np.array([num], np.int32), np.arange(1, 9, dtype=np.int32)[None], arange[-1:],
                embeds=hidden, embed_rows=arange,
            )  # fmt: skip
            self.layer.init_kv_cache(9)
            drafts.append(int(self.layer.forward(step)[0].argmax()))
            if len(drafts) == count:
                return drafts
            hidden = np.concatenate([hidden, self.layer.hidden()])
            following = [*following, drafts[-1]]


def watched(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every draft from now on whether it is the oracle's."""
    oracle, seen = Oracle(path), list[bool]()
    original = PredictorDrafter.propose

    def propose(self: PredictorDrafter, slots: np.ndarray, wanted: np.ndarray) -> list[list[int]]:
        drafts = original(self, slots, wanted)
        for slot, found in zip(slots.tolist(), drafts, strict=True):
            known = self.batch.token_ids[slot, : self.batch.num_tokens[slot]].tolist()
            if found:
                seen.append(found == oracle.drafts(known, len(found)))
        return drafts

    monkeypatch.setattr(PredictorDrafter, "propose", propose)
    return seen


@pytest.mark.parametrize(
    ("name", "cached"), [("qwen35", False), ("deepseek_v3", True), ("mimo", False)]
)
def test_drafts_are_those_of_the_whole_text(
    name: str, cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, rejected drafts, preemption, prompts' log-probabilities: the same drafts, bitwise.

    With a prefix cache nearly always: a shared block's last position may have seen another id.
    """
    path = write_checkpoint(tmp_path / name, name)
    seen = watched(path, monkeypatch)
    prompts, params = some_requests(2, 10)
    options = {"max_num_batched_tokens": 19, "num_kv_blocks": 12, "max_num_seqs": 8}
    with engine(path, mtp(3), enable_prefix_caching=cached, **options) as llm:
        llm.generate(prompts, params)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        assert scheduler.num_preemptions > 0
    assert len(seen) > 50
    assert sum(seen) >= (0.9 if cached else 1) * len(seen)


def test_a_prompt_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last block, which is copied, brings what the layer holds along."""
    path = write_checkpoint(tmp_path / "m", "deepseek_v3")
    seen = watched(path, monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with engine(path, mtp(3)) as llm:
        for _ in range(3):
            (output,) = llm.generate({"prompt_token_ids": list(range(3, 15))}, params)
        assert output.num_cached_tokens == 11
    assert seen
    assert all(seen)


def test_log_probabilities_of_long_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of their own for the logits of prompts show the layer their rows as well."""
    path = write_checkpoint(tmp_path / "m", "qwen35")
    monkeypatch.setattr("tellin.worker.prompt_passes._LOGITS_BYTES", 4 * VOCAB * 16)
    seen = watched(path, monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0)
    with engine(path, mtp(2)) as llm:
        llm.generate({"prompt_token_ids": list(range(3, 73))}, params)
    assert seen
    assert all(seen)


def test_adaptive_drafting_and_sleep(tmp_path: Path) -> None:
    """Useless drafts are given up; after sleep the layer is there again."""
    path = write_checkpoint(tmp_path / "m", "mimo")
    prompts, params = some_requests(3, 4)
    with engine(path, None) as llm:
        expected = [summary(output) for output in llm.generate(prompts, params)]
    spec = {"method": "deepseek_mtp"}
    with engine(path, spec) as llm:
        for level in (1, 2):
            assert [summary(output) for output in llm.generate(prompts, params)] == expected
            llm.sleep(level)
            llm.wake_up()
        assert [summary(output) for output in llm.generate(prompts, params)] == expected


def test_an_engine_that_pools_too(tmp_path: Path) -> None:
    """Vectors are those without drafts; where the layer wants other states it is refused."""
    path, vectors = write_checkpoint(tmp_path / "m", "qwen35"), []
    prompts, params = some_requests(4, 5)
    for spec in (None, mtp(2)):
        with engine(path, spec, runner="both", max_num_batched_tokens=32, max_num_seqs=8) as llm:
            vectors.append([output.outputs.embedding for output in llm.embed(prompts)])
            vectors[-1].append([summary(output) for output in llm.generate(prompts, params)])
    assert vectors[0] == vectors[1]
    path = write_checkpoint(tmp_path / "mimo", "mimo")
    with pytest.raises(TellinError, match=r"'mtp' does not go with runner='both'"):
        engine(path, mtp(2), runner="both")


def test_what_does_not_go_together(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m", "mimo")
    with pytest.raises(TellinError, match=r"engine's own model \('.*m'\), got model='other'"):
        engine(path, mtp(2, model="other"))
    with pytest.raises(TellinError, match="method='mtp' does not go with enable_prompt_embeds"):
        engine(path, mtp(2), enable_prompt_embeds=True)
    with pytest.raises(TellinError, match=r"has no layer that predicts further tokens.*'ngram'"):
        engine(_without_layer(path), mtp(2))


def _without_layer(path: Path) -> Path:
    from safetensors.numpy import load_file, save_file

    arrays = load_file(path / "model.safetensors")
    kept = {key: values for key, values in arrays.items() if "mtp_layers" not in key}
    save_file(kept, path / "model.safetensors")
    return path
