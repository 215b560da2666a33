"""COR-8, INP-58: pixels travel to a core process once, and the two sides never disagree."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tellin.core.mm_transfer import MultiModalReceiver, MultiModalSender
from tellin.exceptions import EngineError
from tellin.protocol import EngineCoreRequest, MultiModalFeature
from tests.core.fakes import make_request


def make(*names: str | None) -> EngineCoreRequest:
    """A request with an item for each name, whose data are as many bytes as its letter says."""
    items = []
    for index, name in enumerate(names):
        size = 1 if name is None else ord(name) - ord("a") + 1
        data = np.full(size, ord(name or "?"), np.uint8)
        items.append(MultiModalFeature("image", name or "?", index, 1, data, name))
    return make_request("r", [1] * len(names), mm_features=items)


def travel(
    sender: MultiModalSender, receiver: MultiModalReceiver, request: EngineCoreRequest
) -> list[bool]:
    """Send it; returns which items came with their data. All must have it at the end."""
    travelling = sender.prepare(request)
    sender.sent(travelling)
    came = [item.data is not None for item in travelling.mm_features or []]
    items = [msgspec.structs.replace(item) for item in travelling.mm_features or []]
    arrived = msgspec.structs.replace(travelling, mm_features=items)
    receiver.resolve(arrived)
    for item, original in zip(items, request.mm_features or [], strict=True):
        assert item.data is not None
        assert item.data.tolist() == original.data.tolist()
        assert original.data is not None, "the request itself is not changed"
    return came


def test_data_is_sent_once() -> None:
    sender, receiver = MultiModalSender(10), MultiModalReceiver()
    assert travel(sender, receiver, make("a", "b", "a")) == [True, True, False]
    assert travel(sender, receiver, make("b", "a")) == [False, False]
    assert travel(sender, receiver, make(None, None)) == [True, True]
    assert travel(sender, receiver, make("h")) == [True]
    assert travel(sender, receiver, make("a", "b")) == [False, True], "b was unused the longest"
    assert set(receiver._data) == set(sender._sizes) == {"a", "b"}


def test_what_does_not_fit_is_passed_on_and_not_kept() -> None:
    sender, receiver = MultiModalSender(5), MultiModalReceiver()
    assert travel(sender, receiver, make("b")) == [True]
    assert travel(sender, receiver, make("z")) == [True]
    assert travel(sender, receiver, make("z", "b")) == [True, False]
    assert set(receiver._data) == {"b"}
    assert travel(MultiModalSender(0), receiver, make("c")) == [True]
    assert set(receiver._data) == {"b"}


def test_s72_after_a_reset_data_is_sent_again() -> None:
    sender, receiver = MultiModalSender(10), MultiModalReceiver()
    travel(sender, receiver, make("a"))
    sender.clear()
    receiver.clear()
    assert travel(sender, receiver, make("a")) == [True]


def test_8_3_wart_a_receiver_without_the_data_says_so() -> None:
    sender = MultiModalSender(10)
    travel(sender, MultiModalReceiver(), make("a"))
    with pytest.raises(EngineError, match="send it again"):
        travel(sender, MultiModalReceiver(), make("a"))


REQUEST = st.lists(st.sampled_from([*"abcdefghij", None]), min_size=1, max_size=4)


@given(st.integers(0, 20), st.lists(st.tuples(REQUEST, st.sampled_from(["", "lost", "late"]))))
def test_8_3_3_no_order_of_events_leaves_an_item_without_data(
    capacity: int, events: list[tuple[list[str | None], str]]
) -> None:
    """``lost``: the message was prepared and never sent; ``late``: sent, but that went unnoticed.

    Both happen to a sender that is interrupted.
    """
    sender, receiver = MultiModalSender(capacity), MultiModalReceiver()
    for names, what in events:
        if what == "":
            travel(sender, receiver, make(*names))
            continue
        travelling = sender.prepare(make(*names))
        if what == "late":
            items = [msgspec.structs.replace(item) for item in travelling.mm_features or []]
            receiver.resolve(msgspec.structs.replace(travelling, mm_features=items))
    travel(sender, receiver, make("a"))
    if all(what == "" for _, what in events):
        assert set(sender._sizes) == set(receiver._data), "nothing is kept for nobody"
    known = sum(ord(name) - ord("a") + 1 for name in sender._sizes)
    assert known <= capacity
    assert set(sender._sizes) <= set(receiver._data)
