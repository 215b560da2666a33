"""The worker's adapters: rules 7.3.2 and 7.4, their warts, P50."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tellin import loading
from tellin.config import EngineConfig, LoRAConfig
from tellin.exceptions import (
    AdapterCapacityError,
    AdapterError,
    AdapterNotFoundError,
    EngineError,
    UnsupportedFeatureError,
)
from tellin.loading.lora import Adapter
from tellin.models import build_plan
from tellin.protocol import LoRARequest
from tellin.sampling_params import SamplingParams
from tellin.settings import Settings
from tellin.worker.lora import LoRAManager
from tellin.worker.worker import Worker
from tests.models.adapters import (
    adapter_pairs,
    base_weights,
    write_adapter,
    write_llama_folder,
)
from tests.worker.fakes import Driver, make_config

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and adapters a to e."""
    root = tmp_path_factory.mktemp("lora")
    write_llama_folder(root / "base", base_weights())
    for seed, name in enumerate("abcde"):
        write_adapter(root / name, adapter_pairs(4, 100 + seed, size=0.5))
    return root


class SlotBackend:
    """Notes what is put into its slots."""

    def __init__(self) -> None:
        self.slots: dict[int, Any] = {}

    def set_adapter(self, slot: int, weights: Any) -> None:
        self.slots[slot] = weights

    def clear_adapter(self, slot: int) -> None:
        del self.slots[slot]


class Store:
    """A manager, its backend, and adapters by letter."""

    def __init__(self, folder: Path, max_loras: int, max_cpu_loras: int) -> None:
        self.folder = folder
        self.backend = SlotBackend()
        config = LoRAConfig(16, max_loras, max_cpu_loras)
        plan = build_plan(loading.open_model(folder / "base"), max_lora_rank=16)
        self.manager = LoRAManager(config, folder / "base", plan.lora_sites)

    def request(self, name: str, **changes: Any) -> LoRARequest:
        values = {
            "lora_name": name,
            "lora_int_id": ord(name) - ord("a") + 1,
            "lora_path": str(self.folder / name),
        }
        return LoRARequest(**(values | changes))

    def add(self, name: str, in_use: tuple[int, ...] = (), **changes: Any) -> bool:
        return self.manager.add(self.request(name, **changes), self.backend, in_use)

    def activate(self, *ids: int) -> dict[int, int]:
        return self.manager.activate(set(ids), self.backend)


def test_7_3_2_least_recently_used_goes_first(folder: Path) -> None:
    """The spec's check: capacity 2; a, b, c leave b and c; pins hold; a full store is an error."""
    store = Store(folder, 2, 2)
    for name in "abc":
        assert store.add(name)
    assert store.manager.list() == [2, 3]
    assert store.manager.pin(2)
    store.add("d")
    assert set(store.manager.list()) == {2, 4}
    store.manager.pin(4)
    with pytest.raises(AdapterCapacityError, match="pinned") as caught:
        store.add("e")
    assert isinstance(caught.value, RuntimeError)
    assert set(store.manager.list()) == {2, 4}
    with pytest.raises(AdapterError, match="no loaded"):
        store.manager.pin(5)
    assert store.manager.remove(4, store.backend)
    assert not store.manager.remove(4, store.backend)
    assert store.add("e")


def test_use_and_repeated_add_count_as_use(folder: Path) -> None:
    store = Store(folder, 1, 2)
    store.add("a")
    store.add("b")
    store.activate(1)
    store.add("c")
    assert set(store.manager.list()) == {1, 3}
    assert store.add("a")
    store.add("d")
    assert set(store.manager.list()) == {1, 4}


def test_wart_what_requests_need_is_never_dropped(folder: Path) -> None:
    """The limit gives way: no step reads a file."""
    store = Store(folder, 1, 1)
    store.add("a")
    store.add("b", in_use=(1,))
    store.add("c", in_use=(1, 2))
    assert set(store.manager.list()) == {1, 2, 3}
    store.add("d", in_use=(2,))
    assert set(store.manager.list()) == {2, 4}


def test_slots_follow_use(folder: Path) -> None:
    """7.3.2 activate: lowest free slot, then that of the least recently used."""
    store = Store(folder, 2, 5)
    for name in "abcd":
        store.add(name)
    assert store.activate(2) == {2: 0}
    assert store.activate(1, 2) == {1: 1, 2: 0}
    version = store.manager.version
    assert store.activate(1) == {1: 1}
    assert store.manager.version == version
    assert store.activate(3) == {3: 0}
    assert store.manager.version > version
    assert store.activate(1, 3) == {1: 1, 3: 0}
    store.manager.pin(1)
    store.activate(3)
    assert store.activate(4) == {4: 0}  # 1 was used before, but is pinned
    with pytest.raises(EngineError, match="max_loras"):
        store.activate(1, 2, 3)
    assert store.activate(9) == {}  # not loaded
    store.manager.remove(4, store.backend)
    assert set(store.backend.slots) == {1}
    store.manager.forget_slots()
    assert store.activate(1) == {1: 0}


def test_wart_one_name_has_one_id(folder: Path) -> None:
    store = Store(folder, 2, 5)
    store.add("a")
    for changes in ({"lora_int_id": 7}, {"lora_name": "other"}):
        with pytest.raises(AdapterError, match="contradicts"):
            store.add("a", **changes)
    with pytest.raises(AdapterError, match="load_inplace"):
        store.add("a", lora_path=str(folder / "b"))
    assert store.manager.list() == [1]


def test_load_inplace_replaces_weights(folder: Path) -> None:
    store = Store(folder, 1, 1)
    store.add("a")
    store.activate(1)
    before = store.backend.slots[0]
    with pytest.raises(AdapterError, match="in progress"):
        store.add("a", in_use=(1,), lora_path=str(folder / "b"), load_inplace=True)
    assert store.add("a", lora_path=str(folder / "b"), load_inplace=True)
    store.activate(1)
    layer = "layers.0.mlp.up_proj"
    assert not (store.backend.slots[0][layer][0] == before[layer][0]).all()


def test_p50_a_failed_load_changes_nothing(folder: Path, tmp_path: Path) -> None:
    store = Store(folder, 1, 1)
    store.add("a")
    write_adapter(tmp_path, adapter_pairs(4, 1), use_dora=True)
    with pytest.raises(AdapterNotFoundError):
        store.add("b", lora_path=str(folder / "missing"))
    with pytest.raises(AdapterError, match="use_dora"):
        store.add("b", lora_path=str(tmp_path))
    with pytest.raises(AdapterError, match="use_dora"):
        store.add("a", lora_path=str(tmp_path), load_inplace=True)
    assert store.manager.list() == [1]


OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 6), st.frozensets(st.integers(1, 6), max_size=3)),
    st.tuples(st.just("activate"), st.frozensets(st.integers(1, 6), max_size=2), st.none()),
    st.tuples(st.just("remove"), st.integers(1, 6), st.none()),
    st.tuples(st.just("pin"), st.integers(1, 6), st.none()),
)


@given(st.lists(OPERATIONS, max_size=40))
def test_the_stores_under_any_sequence_of_calls(operations: list[Any]) -> None:
    """Slots hold what they are said to hold; what is in use or pinned stays; limits hold else."""
    backend, manager = SlotBackend(), LoRAManager(LoRAConfig(16, 2, 3), Path("none"), {})
    pinned: set[int] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "_load", lambda request: Adapter({request.lora_name: ()}))
        for kind, subject, in_use in operations:
            before = set(manager.list())
            if kind == "add":
                try:
                    manager.add(LoRARequest(f"n{subject}", subject, "/p"), backend, in_use)
                except AdapterCapacityError:
                    assert before <= pinned
                    assert set(manager.list()) == before
                    continue
                kept = set(manager.list())
                assert subject in kept
                assert before - kept <= before - in_use - pinned
                assert len(kept) <= 3 or kept <= in_use | pinned | {subject}
            elif kind == "activate":
                slots = manager.activate(set(subject), backend)
                assert set(slots) == subject & before
                assert len(set(slots.values())) == len(slots)
                for lora_id, slot in slots.items():
                    assert 0 <= slot < 2
                    assert set(backend.slots[slot]) == {f"n{lora_id}"}
            elif kind == "remove":
                assert manager.remove(subject, backend) == (subject in before)
                pinned.discard(subject)
            elif subject in before:
                assert manager.pin(subject)
                pinned.add(subject)
            held = {name for weights in backend.slots.values() for name in weights}
            assert held <= {f"n{lora_id}" for lora_id in manager.list()}


# ---------------------------------------------------------------------- in a worker


def config_for(folder: Path, **lora: Any) -> EngineConfig:
    path = folder / "base"
    metadata = loading.open_metadata(path)
    config = make_config(metadata.vocab_size, metadata.vocab_size)
    return dataclasses.replace(
        config,
        model_config=dataclasses.replace(config.model_config, path=path, backend="native"),
        settings=Settings.from_environ(),
        lora_config=LoRAConfig(16, **lora) if lora else None,
    )


@pytest.fixture
def worker(folder: Path) -> Iterator[Worker]:
    worker = Worker(config_for(folder, max_loras=2, max_cpu_loras=4))
    worker.initialize_kv_cache(128)
    yield worker
    worker.shutdown()


def add(d: Driver, store: Store, name: str, lora: str | None) -> None:
    d.add(name, PROMPT, SamplingParams(temperature=0))
    if lora is not None:
        d.new[name].lora_request = store.request(lora)


def test_7_4_each_request_its_own_adapter(worker: Worker, folder: Path) -> None:
    """Rows of a step that has two adapters and none; steady steps and joins included."""
    store = Store(folder, 2, 4)
    expected = {}
    for lora in (None, "a", "b"):
        d = Driver(worker)
        if lora is not None:
            worker.add_lora(store.request(lora))
        add(d, store, f"alone {lora}", lora)
        expected[lora] = d.run(12)[f"alone {lora}"][:12]
        d.finish(f"alone {lora}")
        d.step({})
    assert len({tuple(ids) for ids in expected.values()}) == 3
    d = Driver(worker)
    add(d, store, "one", "a")
    add(d, store, "two", None)
    d.run(4)
    add(d, store, "three", "b")
    d.run(8)
    d.finish("one")
    d.run(12)
    assert d.outputs["three"][:12] == expected["b"]
    assert d.outputs["two"][:12] == expected[None]
    assert d.outputs["one"] == expected["a"][: len(d.outputs["one"])]


def test_an_adapter_that_moves_to_another_slot(worker: Worker, folder: Path) -> None:
    """Wart of 7.4: a steady batch notices that slots have changed."""
    store = Store(folder, 2, 4)
    worker.add_lora(store.request("a"))
    d = Driver(worker)
    add(d, store, "x", "a")
    expected = d.run(12)["x"][:12]
    d.finish("x")
    d.step({})
    d = Driver(worker)
    add(d, store, "y", "a")
    d.run(5)
    worker.runner.lora.forget_slots()  # type: ignore[union-attr]
    worker.add_lora(store.request("b"))
    assert d.run(12)["y"][:12] == expected


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_are_loaded_while_the_model_sleeps(
    level: int, worker: Worker, folder: Path
) -> None:
    """A request that comes then waits like any other: its adapter must not need the weights."""
    store = Store(folder, 2, 4)
    outputs = []
    for is_asleep in (False, True):
        if is_asleep:
            worker.sleep(level)
        assert worker.add_lora(store.request("a"))
        assert worker.list_loras() == [1]
        if is_asleep:
            worker.wake_up()
        d = Driver(worker)
        add(d, store, "x", "a")
        outputs.append(d.run(8)["x"][:8])
        d.finish("x")
        d.step({})
        worker.remove_lora(1)
    assert outputs[0] == outputs[1]


def test_sleep_and_wake_bring_adapters_back(worker: Worker, folder: Path) -> None:
    store = Store(folder, 2, 4)
    worker.add_lora(store.request("a"))
    outputs = []
    for i in range(2):
        d = Driver(worker)
        add(d, store, f"r{i}", "a")
        outputs.append(d.run(10)[f"r{i}"][:10])
        d.finish(f"r{i}")
        d.step({})
        worker.sleep(2)
        worker.wake_up()
    assert outputs[0] == outputs[1]
    assert worker.list_loras() == [1]


def test_an_adapter_that_was_removed_fails_its_request_alone(worker: Worker, folder: Path) -> None:
    store = Store(folder, 2, 4)
    worker.add_lora(store.request("a"))
    d = Driver(worker)
    add(d, store, "good", None)
    add(d, store, "bad", "a")
    d.run(2)
    worker.remove_lora(1)
    add(d, store, "joins", None)
    output = d.step()
    assert set(output.errors) == {"bad"}
    assert "not loaded" in output.errors["bad"]


def test_without_lora(folder: Path) -> None:
    worker = Worker(config_for(folder))
    with pytest.raises(UnsupportedFeatureError, match="enable_lora"):
        worker.add_lora(LoRARequest("a", 1, str(folder / "a")))
    with pytest.raises(UnsupportedFeatureError, match="enable_lora"):
        worker.pin_lora(1)
    assert worker.remove_lora(1) is False
    assert worker.list_loras() == []
    worker.shutdown()
