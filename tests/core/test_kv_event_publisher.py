"""2.11.3: events reach subscribers, and those who missed some can ask again."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from tellin.core.kv_event_publisher import END_OF_REPLAY, KVEventPublisher
from tellin.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from tellin.exceptions import InvalidParameterError
from tests.core.driver import Driver
from tests.core.test_scheduler import unlike


def decode(payload: bytes) -> KVEventBatch:
    return msgspec.msgpack.decode(payload, type=KVEventBatch)


def test_wire_format() -> None:
    """2.11.1, 2.11.3: ``[ts, events, rank]``, events as tagged maps: readable without our types."""
    batch = KVEventBatch(1.5, [BlockStored([7], None, [1, 2], 2), BlockRemoved([7])], 3)
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    assert raw[0] == 1.5
    assert raw[1][0] == {
        "type": "BlockStored",
        "block_hashes": [7],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
        "extra_keys": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "kv_cache_spec_sliding_window": None,
    }
    assert raw[1][1] == {
        "type": "BlockRemoved",
        "block_hashes": [7],
        "medium": "CPU",
        "group_idx": 0,
    }
    assert raw[2] == 3
    assert decode(msgspec.msgpack.encode(batch)) == batch


def test_events_of_an_engine_reach_a_subscriber(tmp_path: Path) -> None:
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    driver = Driver(
        cache={
            "enable_kv_cache_events": True,
            "kv_events_endpoint": endpoint,
            "kv_events_replay_endpoint": replay,
            "kv_events_topic": "kv",
        }
    )
    context = zmq.Context()
    subscriber, asker = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    subscriber.connect(endpoint)
    subscriber.subscribe(b"kv")
    asker.connect(replay)
    deadline = time.monotonic() + 60
    while not subscriber.poll(50):  # until the subscription has arrived
        assert time.monotonic() < deadline
        publisher = driver.core._kv_event_publisher
        assert publisher is not None
        publisher.publish(KVEventBatch(0.0, [AllBlocksCleared()]))
    try:
        driver.add("a", unlike(1, 12), 6)
        driver.run()
        stored: list[int] = []
        while len(stored) < 4:
            assert subscriber.poll(60_000)
            topic, _, payload = subscriber.recv_multipart()
            assert topic == b"kv"
            for event in decode(payload).events:
                if not isinstance(event, AllBlocksCleared):
                    assert isinstance(event, BlockStored)
                    stored += event.block_hashes
        # Replay from the beginning gives the same hashes.
        asker.send((0).to_bytes(8, "big"))
        replayed: list[int] = []
        while True:
            assert asker.poll(60_000)
            number, payload = asker.recv_multipart()
            if number == END_OF_REPLAY:
                break
            for event in decode(payload).events:
                if not isinstance(event, AllBlocksCleared):
                    assert isinstance(event, BlockStored)
                    replayed += event.block_hashes
        assert replayed == stored
    finally:
        driver.core.shutdown()
        context.destroy(linger=0)
    assert "tellin-kv-events" not in [t.name for t in threading.enumerate()]


@pytest.mark.parametrize(
    ("endpoints", "name"),
    [
        (("nonsense",), "kv_events_endpoint='nonsense'"),
        (("ipc://{}", "tcp://nonsense"), "kv_events_replay_endpoint='tcp://nonsense'"),
    ],
)
def test_a_bad_endpoint_is_an_error_at_start(
    endpoints: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidParameterError, match=f"{name} cannot be used: "):
        KVEventPublisher(*(endpoint.format(tmp_path / "a") for endpoint in endpoints))


def test_shutdown_sends_what_is_queued_and_is_idempotent(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    publisher = KVEventPublisher(endpoint)
    publisher.publish(KVEventBatch(0.0, []))
    publisher.publish(KVEventBatch(0.0, [AllBlocksCleared()]))
    publisher.shutdown()
    publisher.shutdown()
    assert len(publisher._sent) == 1
