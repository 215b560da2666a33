"""Drafts of a model's own layer beside whatever else an engine does: no result changes (promise 1).

Models whose layer always knows the next id and models whose layer never does, so that drafts are
kept, cut short by what is beside them, and rejected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin import LLM, EngineArgs, LLMEngine, LoRARequest, SamplingParams
from tellin.engine.arg_utils import create_engine_config
from tellin.engine.dp_group import ZmqDataParallelGroup
from tellin.loading import open_model
from tellin.models import build_plan
from tellin.sampling_params import StructuredOutputsParams
from tests.models.adapters import write_adapter
from tests.models.predictors import agreeing_checkpoint, write_checkpoint

MTP = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
SMALL: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 96, "num_threads": 1}
MAKERS: dict[str, Callable[[Path, str], Path]] = {
    "agreeing": agreeing_checkpoint,
    "random": write_checkpoint,
}
PROMPTS = [
    {"prompt_token_ids": [(7 * i + 3 * j) % 97 + 2 for j in range(9 + 8 * i)]} for i in range(5)
]


@pytest.fixture(scope="module", params=["agreeing mimo", "random mimo", "agreeing qwen35"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    maker, name = request.param.split()
    return MAKERS[maker](tmp_path_factory.mktemp(maker) / name, name)


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.7, "seed": 5, "max_tokens": 24} | more)


def results(outputs: list[Any]) -> list[Any]:
    return [
        (
            one.prompt_logprobs,
            [
                (o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs)
                for o in one.outputs
            ],
        )
        for one in outputs
    ]


def num_accepted(llm: LLM) -> int:
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return int(values["tellin:spec_decode_num_accepted_tokens"])


# One request of each kind, alone and all of them together.
KINDS: dict[str, SamplingParams] = {
    "regex": params(structured_outputs=StructuredOutputsParams(regex="[a-zA-Z ]{9,20}")),
    "json": params(
        temperature=0,
        structured_outputs=StructuredOutputsParams(
            json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        ),
    ),
    "choice": params(structured_outputs=StructuredOutputsParams(choice=["yes", "yellow", "no"])),
    "stop string": params(temperature=0, stop=["a", "z", "0"], ignore_eos=True),
    "kept stop string": params(stop=["ab", "e"], include_stop_str_in_output=True),
    "stop ids": params(temperature=0, stop_token_ids=[30, 60, 90], min_tokens=5),
    "three samples": params(n=3, logprobs=1),
    "logprobs": params(logprobs=4, prompt_logprobs=2, frequency_penalty=0.3),
    "bad words": params(bad_words=["a", "b"], logit_bias={9: 3.0}, repetition_penalty=1.2),
}


def test_everything_at_once(model: Path) -> None:
    """Also a second time, from the prefix cache, and where requests are preempted."""
    kinds = list(KINDS.values())
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(kinds))]
    with LLM(model, **SMALL) as llm:
        expected = results(llm.generate(prompts, kinds))
    tight = {"num_kv_blocks": 16, "max_num_batched_tokens": 24, "max_num_seqs": 8}
    for options in ({}, tight):
        with LLM(model, **SMALL | options, speculative_config=MTP, disable_log_stats=False) as llm:
            for _ in range(2):
                assert results(llm.generate(prompts, kinds)) == expected
            assert num_accepted(llm) > 20 or "random" in str(model)
            scheduler = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
            assert bool(scheduler.num_preemptions) == bool(options)


def test_adapters(model: Path, tmp_path: Path) -> None:
    """The layer drafts without them; requests with and without, in one batch."""
    random = np.random.RandomState(3)
    with open_model(model) as source:
        sites = build_plan(source, max_lora_rank=4).lora_sites
    pairs = {
        name: (
            random.standard_normal((4, width)).astype(np.float32) / 8,
            random.standard_normal((height, 4)).astype(np.float32) / 8,
        )
        for name, (width, height) in sites.items()
        if name.endswith(("o_proj", "down_proj"))
    }
    lora = LoRARequest("a", 1, str(write_adapter(tmp_path / "a", pairs)))
    wanted = params(temperature=0, logprobs=1, ignore_eos=True)
    found = []
    for spec in (None, MTP):
        options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
        with LLM(model, **SMALL | options, speculative_config=spec) as llm:
            for loras in ([lora, None, lora, None, lora], None):
                outputs = llm.generate(PROMPTS, wanted, lora_request=loras)
                found.append(results(outputs))
    assert found[:2] == found[2:]
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]


def run(engine: LLMEngine, num_requests: int) -> list[Any]:
    for i in range(num_requests):
        wanted = params(logprobs=1, max_tokens=10 + 5 * i, ignore_eos=True)
        engine.add_request(str(i), PROMPTS[i], wanted)
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step(timeout=20):
            if output.finished:
                done[output.request_id] = output
    return results([done[str(i)] for i in range(num_requests)])


@pytest.mark.parametrize("multiprocess", [False, True])
def test_ranks_that_step_together(model: Path, multiprocess: bool, tmp_path: Path) -> None:
    """Two engines, one with less to do, whose cores are in processes of their own or are not."""
    with LLM(model, **SMALL) as llm:
        expected = run(llm.llm_engine, 4)
    counts, found = (4, 1), dict[int, list[Any]]()

    def rank(number: int) -> None:
        args = EngineArgs(
            str(model), **SMALL, speculative_config=MTP, data_parallel_size=2,
            data_parallel_rank=number,
        )  # fmt: skip
        group = ZmqDataParallelGroup(number, 2, f"ipc://{tmp_path / 'ranks'}", timeout_s=30)
        engine = LLMEngine(
            create_engine_config(args), multiprocess_mode=multiprocess, dp_group=group
        )
        try:
            found[number] = run(engine, counts[number])
        finally:
            engine.shutdown()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: expected[:count] for number, count in enumerate(counts)}
