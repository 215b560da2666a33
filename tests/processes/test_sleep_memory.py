"""Sleep gives memory back, measured as resident size of the process that holds the model (5.9)."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from benchmarks.synthetic import ModelShape, write_llama
from tellin.config import EngineArgs
from tellin.engine.llm_engine import LLMEngine
from tellin.entrypoints.llm import LLM
from tellin.sampling_params import SamplingParams

SHAPE = ModelShape(768, 2048, 8, 12, 4, 4096)
"""About 60 MB of weights: small, but more than an allocator keeps for itself."""
NUM_BLOCKS = 300
POOL_BYTES = NUM_BLOCKS * 16 * 8 * 2 * 4 * 64 * 2  # blocks, tokens, layers, k and v, heads, f16
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "sleeper.gguf", SHAPE, "q8_0")


@pytest.mark.parametrize("multiprocess", [False, True], ids=["in process", "multi-process"])
def test_5_9_levels_1_and_2_give_memory_back_and_wake_equal(
    multiprocess: bool, model: Path
) -> None:
    """Level 1 frees the pool, level 2 the weights too; then ids and logprobs are equal in bits."""
    args = EngineArgs(model=str(model), max_model_len=512, num_kv_blocks=NUM_BLOCKS, num_threads=2)
    engine = LLMEngine.from_engine_args(args, enable_multiprocessing=multiprocess)
    pid = engine.engine_core.core_pid if multiprocess else os.getpid()  # type: ignore[attr-defined]
    process = psutil.Process(pid)
    with LLM.from_engine(engine) as llm:
        weights = llm.collective_rpc("get_info")[0]["weight_bytes"]

        def result() -> object:
            # touches most of the pool, so that there is something to give back
            filling = [{"prompt_token_ids": [3 + i] * 440} for i in range(10)]
            llm.generate(filling, SamplingParams(max_tokens=1))
            output = llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, GREEDY)[0].outputs[0]
            return output.token_ids, output.logprobs

        expected = result()
        for level, least in ((1, 0.85 * POOL_BYTES), (2, 0.85 * POOL_BYTES + 0.9 * weights)):
            before = process.memory_info().rss
            llm.sleep(level)
            asleep = process.memory_info().rss
            assert llm.is_sleeping()
            assert before - asleep > least, (before, asleep, least)
            llm.wake_up()
            assert not llm.is_sleeping()
            assert result() == expected
            assert process.memory_info().rss - before < 16e6, "no growth from nap to nap"
        llm.sleep(2)
        llm.wake_up(["weights"])
        assert llm.is_sleeping(), "half awake is not awake"
        llm.wake_up(["kv_cache", "scheduling"])
        assert result() == expected
