"""`LLM` from several threads, and errors of single prompts, in both process modes (5.7, 5.8)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tellin.engine.llm_engine import LLMEngine
from tellin.entrypoints.llm import LLM
from tellin.exceptions import RequestError
from tellin.sampling_params import SamplingParams
from tests.processes.conftest import MakeArgs

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("multiprocess", [False, True])
def test_5_7_5_8_threads_and_bad_prompts(multiprocess: bool, make_args: MakeArgs) -> None:
    """Calls from eight threads, some with an impossible prompt, all get what lone calls get."""
    engine = LLMEngine.from_engine_args(make_args(), enable_multiprocessing=multiprocess)
    with LLM.from_engine(engine) as llm:
        prompts = [f"prompt number {i}" for i in range(8)]
        alone = [llm.generate(p, GREEDY)[0].outputs[0].token_ids for p in prompts]

        def call(i: int) -> list[list[int]]:
            mine = [prompts[i], "", prompts[(i + 1) % 8]]
            if i % 2:
                with pytest.raises(RequestError):
                    llm.generate(mine, GREEDY)
            first, bad, last = llm.generate(mine, GREEDY, on_error="return")
            assert isinstance(bad.error, RequestError)
            assert bad.outputs[0].finish_reason == "error"
            return [first.outputs[0].token_ids, last.outputs[0].token_ids]

        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(call, range(8)))
        assert results == [[alone[i], alone[(i + 1) % 8]] for i in range(8)]
        assert engine.get_num_unfinished_requests() == 0
        assert llm.reset_prefix_cache(), "no block is in use"
