"""1.4, 1.2.7: the line, in both policies."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tellin.core.request import Request, RequestStatus
from tellin.core.request_queue import RequestQueue
from tellin.core.waiting_room import WaitingRoom
from tellin.sampling_params import SamplingParams


def make(number: int, priority: int = 0, arrival_time: float = 0.0) -> Request:
    request = Request(
        f"r{number}",
        [1],
        SamplingParams(max_tokens=1),
        None,
        max_model_len=9,
        priority=priority,
        arrival_time=arrival_time,
    )
    request.arrival_rank = number
    return request


def drain(queue: RequestQueue) -> list[str]:
    return [queue.pop_request().request_id for _ in range(len(queue))]


def test_empty_queue() -> None:
    """1.4.1."""
    queue = RequestQueue()
    assert not queue
    for operation in (queue.pop_request, queue.peek_request):
        with pytest.raises(IndexError):
            operation()


def test_a_returning_request_takes_its_old_place() -> None:
    """1.5.3 Wart: arrival order holds without reversing lists."""
    queue = RequestQueue("fcfs")
    requests = [make(i) for i in range(4)]
    for request in requests:
        queue.add_request(request)
    first, second = queue.pop_request(), queue.pop_request()
    queue.add_request(second)
    queue.add_request(first)
    assert drain(queue) == ["r0", "r1", "r2", "r3"]


def test_priority_order() -> None:
    """TYP-8, 1.2.7, P22: lower number first, then arrival, then a total order."""
    queue = RequestQueue("priority")
    for number, priority, arrival in ((0, 1, 5.0), (1, 0, 9.0), (2, 1, 4.0), (3, 1, 4.0)):
        queue.add_request(make(number, priority, arrival))
    assert [r.request_id for r in queue] == ["r1", "r2", "r3", "r0"]
    assert len(queue) == 4
    assert drain(queue) == ["r1", "r2", "r3", "r0"]


def test_removal() -> None:
    """1.4.4: bulk removal ignores what is absent, single removal does not."""
    queue = RequestQueue()
    requests = [make(i) for i in range(3)]
    for request in requests:
        queue.add_request(request)
    queue.remove_requests([requests[0], make(9)])
    with pytest.raises(ValueError, match="r0"):
        queue.remove_request(requests[0])
    queue.remove_request(requests[1])
    assert requests[2] in queue
    assert requests[1] not in queue
    assert drain(queue) == ["r2"]


def test_an_id_used_again_is_another_request() -> None:
    queue = RequestQueue()
    old, new = make(0), make(0)
    queue.add_request(old)
    queue.remove_request(old)
    new.arrival_rank = 5
    queue.add_request(new)
    assert old not in queue
    assert queue.pop_request() is new
    assert not queue


@settings(deadline=None)
@given(st.data())
def test_equals_a_sorted_list(data: Any) -> None:
    """Against the obvious implementation."""
    queue, model = RequestQueue("priority"), []
    for number in range(data.draw(st.integers(0, 30))):
        if model and data.draw(st.booleans()):
            victim = data.draw(st.sampled_from(model))
            model.remove(victim)
            queue.remove_requests([victim])
        else:
            request = make(number, data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2)))
            model.append(request)
            queue.add_request(request)
        model.sort(key=lambda r: (r.priority, r.arrival_time, r.arrival_rank))
        assert list(queue) == model
        assert len(queue) == len(model)
        if model:
            assert queue.peek_request() is model[0]
    assert drain(queue) == [r.request_id for r in model]


def test_removal_is_cheap() -> None:
    """1.4 Wart: not O(n) per removal."""
    queue = RequestQueue("priority")
    requests = [make(i) for i in range(5_000)]
    for request in requests:
        queue.add_request(request)
    start = time.process_time()
    for request in requests[:-1]:
        queue.remove_request(request)
    assert time.process_time() - start < 0.5
    assert len(queue._heap) < 100
    assert queue.pop_request() is requests[-1]


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match="policy"):
        RequestQueue("lifo")


def test_room_merges_new_and_preempted() -> None:
    """The first by the policy, wherever it waits."""
    room = WaitingRoom("fcfs")
    requests = [make(i) for i in range(4)]
    for request in requests:
        request.arrival_rank = -1
        room.add(request)
    popped = [room.pop() for _ in range(3)]
    assert popped == requests[:3]
    for request in (requests[1], requests[0]):
        request.status = RequestStatus.PREEMPTED
        room.add(request)
    room.add(requests[2])
    assert room.pop(preempted_only=True) is requests[0]
    assert [room.pop(), room.pop(), room.pop(), room.pop()] == [*requests[1:], None]


def test_room_forgets_blocked_requests() -> None:
    room = WaitingRoom("fcfs")
    request = make(0)
    room.block_on_grammar(request)
    assert len(room) == 1
    room.remove([request])
    room.grammar_compiled(request)
    assert room.take_compiled() == []
    assert len(room) == 0
    assert room.pop() is None
