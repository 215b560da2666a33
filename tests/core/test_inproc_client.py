"""The in-process client: every call is one of the core's (3.2)."""

from __future__ import annotations

from typing import Any

import pytest

from tellin.core.engine_core import EngineCore
from tellin.engine.core_client import InprocClient
from tellin.exceptions import EngineClosedError, UnsupportedFeatureError
from tests.core.fakes import FakeExecutor, make_config, make_request


@pytest.fixture
def client() -> InprocClient:
    return InprocClient(make_config(), FakeExecutor, False)  # type: ignore[arg-type]


def test_cli_5_one_step_for_each_output(
    client: InprocClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CLI-5, ENG-32, ENG-33: the hook after the step runs; other clients' outputs are not ours."""
    executed: list[bool] = []
    monkeypatch.setattr(EngineCore, "post_step", lambda self, ran: executed.append(ran))
    assert client.get_output().outputs == []
    client.add_request(make_request("other", [3, 4], 1, client_index=1))
    client.add_request(make_request("mine", [1, 2], 2))
    batches = [client.get_output().outputs for _ in range(3)]
    assert [[output.request_id for output in batch] for batch in batches] == [["mine"]] * 2 + [[]]
    assert executed == [False, True, True, False]


def test_eng_31_outputs_come_in_the_order_of_the_core(client: InprocClient) -> None:
    """ENG-31, COR-33, TYP-20: that of scheduling, with the core's monotonic time."""
    names = ["c", "a", "b"]
    for name in names:
        client.add_request(make_request(name, [1, 2], 3))
    first, second = client.get_output(), client.get_output()
    assert [output.request_id for output in first.outputs] == names
    assert [output.request_id for output in second.outputs] == names
    assert 0 < first.timestamp <= second.timestamp


def test_cli_6_errors_and_aborts_are_the_cores(
    client: InprocClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CLI-6, ENG-21: what preprocessing raises, `add_request` raises; no empty abort is sent."""
    bad = make_request("bad", [1])
    bad.resumable = True
    with pytest.raises(UnsupportedFeatureError, match="resumable"):
        client.add_request(bad)
    assert client.get_output().outputs == []
    aborted: list[Any] = []
    monkeypatch.setattr(EngineCore, "abort_requests", lambda self, ids: aborted.append(ids))
    client.abort_requests([])
    client.abort_requests(["x"])
    assert aborted == [["x"]]


def test_cli_7_8_calls_are_passed_on_until_the_end(client: InprocClient) -> None:
    """CLI-7, CLI-8, CLI-42: no ranks to wait for; what comes after `shutdown` is told so."""
    assert client.dp_engines_running() is False
    assert client.call_utility("get_supported_tasks") == ("generate",)
    assert client.call_utility("reset_prefix_cache", False, False) is True
    client.shutdown()
    client.shutdown()
    client.abort_requests(["x"])
    for call in (client.get_output, lambda: client.call_utility("is_sleeping")):
        with pytest.raises(EngineClosedError, match="shut down"):
            call()
