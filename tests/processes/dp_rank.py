"""One data-parallel rank of `test_seed_claims_mp`: runs its own requests, prints what it did.

Arguments: model, rank, endpoint, number of own requests, 1 = core in a child process.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tellin.config import EngineArgs
from tellin.engine.arg_utils import create_engine_config
from tellin.engine.dp_group import ZmqDataParallelGroup
from tellin.engine.llm_engine import LLMEngine
from tellin.sampling_params import SamplingParams


def main() -> None:
    model, rank, endpoint, num_requests, multiprocess = sys.argv[1:]
    group = ZmqDataParallelGroup(int(rank), 2, endpoint, timeout_s=30)
    args = EngineArgs(
        model=model,
        max_model_len=256,
        num_kv_blocks=64,
        num_threads=1,
        data_parallel_size=2,
        data_parallel_rank=int(rank),
    )
    config = create_engine_config(args)
    engine = LLMEngine(config, multiprocess_mode=bool(int(multiprocess)), dp_group=group)
    calls: list[str] = []
    call_utility = engine.engine_core.call_utility

    def spy(method: str, *args: Any) -> Any:
        calls.append(method)
        return call_utility(method, *args)

    engine.engine_core.call_utility = spy  # type: ignore[method-assign]
    for i in range(int(num_requests)):
        params = SamplingParams(temperature=0, max_tokens=20 + i, ignore_eos=True)
        engine.add_request(str(i), "hello", params)
    lengths: dict[str, int] = {}
    while engine.has_unfinished_requests():
        for output in engine.step(timeout=20):
            lengths[output.request_id] = len(output.outputs[0].token_ids)  # type: ignore[union-attr]
    engine.shutdown()
    print(json.dumps({"dummies": calls.count("execute_dummy_batch"), "lengths": lengths}))


if __name__ == "__main__":
    main()
