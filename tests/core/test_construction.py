"""The order in which an engine core is built (4.1), and what its loop promises of its order."""

from __future__ import annotations

from typing import Any

import pytest

from tellin.core import engine_core
from tellin.core.core_loop import EngineCoreLoop
from tellin.core.engine_core import EngineCore
from tellin.protocol import EngineCoreOutputs
from tests.core.driver import Driver
from tests.core.fakes import FakeExecutor, make_config, make_request


def test_cor_2_3_4_7_the_parts_are_built_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """COR-2, COR-3, COR-4, COR-7: executor, its callback, KV cache, grammars, scheduler."""
    order: list[str] = []

    class Noting(FakeExecutor):
        def __post_init__(self) -> None:
            order.append("executor")
            super().__post_init__()

        def register_failure_callback(self, callback: Any) -> None:
            order.append("callback")

        def determine_available_memory(self) -> int:
            order.append("memory")
            return super().determine_available_memory()

        def initialize_kv_cache(self, num_blocks: int) -> None:
            order.append("kv cache")
            super().initialize_kv_cache(num_blocks)

    for name in ("StructuredOutputManager", "Scheduler"):
        made = getattr(engine_core, name)
        monkeypatch.setattr(
            engine_core, name, lambda *a, n=name, m=made: (order.append(n), m(*a))[1]
        )
    EngineCore(
        make_config(num_kv_blocks=None),
        Noting,  # type: ignore[arg-type]
        failure_callback=lambda: None,
    )
    parts = ["executor", "callback", "memory", "kv cache", "StructuredOutputManager", "Scheduler"]
    assert order == parts


@pytest.mark.parametrize("caching", [True, False])
def test_cor_10_blocks_are_hashed_only_where_that_is_used(caching: bool) -> None:
    """COR-10, COR-25: all full blocks of the prompt, before the scheduler sees the request."""
    driver = Driver(enable_prefix_caching=caching)
    request = driver.core.preprocess_add_request(make_request("r", list(range(1, 11))))
    assert len(request.block_hashes) == (2 if caching else 0)
    assert not driver.core.has_work()


def test_cor_76_input_comes_before_the_step_and_outputs_after_it() -> None:
    """COR-76, COR-77: all that waits is handled, then one step; its outputs go out at once."""
    driver = Driver()
    order: list[str] = []
    step = driver.core.step

    def stepping() -> Any:
        order.append(f"step {len(driver.scheduler.requests)}")
        return step()

    driver.core.step = stepping  # type: ignore[method-assign]

    def send(client_index: int, batch: EngineCoreOutputs) -> None:
        order.append("send")
        if all(output.finished for output in batch.outputs):
            loop.request_shutdown()

    loop = EngineCoreLoop(driver.core, send)
    for name in ("a", "b"):
        loop.add_request(make_request(name, [1, 2], 2))
    loop.run()
    assert order[:4] == ["step 2", "send", "step 2", "send"]
