"""Pictures in a worker: what is encoded when, chunks within a picture, what is forgotten."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin import loading
from tellin.config import EngineConfig, MultiModalConfig
from tellin.exceptions import EngineError
from tellin.protocol import MultiModalFeature
from tellin.sampling_params import SamplingParams
from tellin.settings import Settings
from tellin.step_protocol import SchedulerOutput
from tellin.worker.image_inputs import ENCODE_IMAGES
from tellin.worker.worker import Worker
from tests.loading.models import config, hf_tensors, pack_safetensors
from tests.models.vision import IMAGE_TOKEN_ID, write_smolvlm
from tests.worker.fakes import Driver, make_config

TEXT = [40, 41, 42]
NUM_ROWS = 8
"""Two tiles."""


def config_for(folder: Path, backend: str = "native", images: bool = True) -> EngineConfig:
    metadata = loading.open_metadata(folder)
    config = make_config(metadata.vocab_size, metadata.tokenizer_size)
    return dataclasses.replace(
        config,
        model_config=dataclasses.replace(config.model_config, path=folder, backend=backend),
        settings=Settings.from_environ(),
        multimodal_config=MultiModalConfig({"image": 4}, 68, 4096) if images else None,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_smolvlm(tmp_path_factory.mktemp("smolvlm"))


@pytest.fixture
def worker(folder: Path) -> Iterator[Worker]:
    worker = Worker(config_for(folder))
    worker.initialize_kv_cache(256)
    yield worker
    worker.shutdown()


class ImageDriver(Driver):
    """A driver whose requests have pictures, which it encodes when their first row is due."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.features: dict[str, list[MultiModalFeature]] = {}
        self.encoded: set[str] = set()
        self.free: list[str] = []

    def add_images(self, req_id: str, *names: str, params: SamplingParams | None = None) -> None:
        """Text, then for each picture a mark, 4 rows, a mark, 4 rows, and text again."""
        prompt = list(TEXT)
        features = []
        for name in names:
            span = [259, *[IMAGE_TOKEN_ID] * 4, 259, *[IMAGE_TOKEN_ID] * 4]
            runs = [(1, 4), (6, 4)]
            features.append(
                MultiModalFeature(
                    "image", name, len(prompt), len(span), pixels_of(name), name, runs
                )
            )
            prompt += span + TEXT
        self.add(req_id, prompt, params)
        self.new[req_id].mm_features = features
        self.features[req_id] = features

    def schedule(self, counts: dict[str, int] | None = None) -> SchedulerOutput:
        before = dict(self.computed)
        step = super().schedule(counts)
        for req_id, count in step.num_scheduled_tokens.items():
            start = before[req_id]
            for i, feature in enumerate(self.features.get(req_id, ())):
                if (
                    feature.embeds_in(start, start + count)
                    and feature.identifier not in self.encoded
                ):
                    step.scheduled_encoder_inputs.setdefault(req_id, []).append(i)
                    self.encoded.add(feature.identifier)
        step.free_encoder_mm_hashes, self.free = self.free, []
        return step


def pixels_of(name: str) -> np.ndarray:
    seed = sum(name.encode())
    return np.random.RandomState(seed).standard_normal((2, 16, 48)).astype(np.float32)


def alone(worker: Worker, *names: str, count: int = 6) -> list[int]:
    d = ImageDriver(worker)
    d.add_images("alone", *names)
    ids = d.run(count)["alone"][:count]
    d.finish("alone")
    d.free = list(d.encoded)
    d.step({})
    return ids


def test_pictures_matter(worker: Worker) -> None:
    outputs = [alone(worker, *names) for names in (("a",), ("b",), ("c",), ("a", "b"), ("b", "a"))]
    assert len({tuple(ids) for ids in outputs}) >= 4
    assert alone(worker, "a") == outputs[0]


@pytest.mark.parametrize("chunk", [1, 2, 5, 7])
def test_chunks_within_a_picture(worker: Worker, chunk: int) -> None:
    """Promise 1: wherever a prompt is cut, also between two rows of a picture."""
    expected = alone(worker, "a", "b")
    d = ImageDriver(worker)
    d.add_images("x", "a", "b")
    length = len(d.known["x"])
    while d.computed["x"] < length:
        d.step({"x": min(chunk, length - d.computed["x"])})
    d.run(6)
    assert d.outputs["x"][:6] == expected


def test_a_tile_is_encoded_when_it_is_due(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each, and not before; those before a prefix-cache hit's end never."""
    assert worker.runner.images is not None
    encoder = worker.runner.images.encoder
    assert encoder is not None
    encode, sizes = encoder.encode, []

    def counted(pixels: np.ndarray, grid: None) -> np.ndarray:
        sizes.append(len(pixels))
        return encode(pixels)

    monkeypatch.setattr(encoder, "encode", counted)
    d = ImageDriver(worker)
    d.add_images("x", "a")
    d.step({"x": 4})
    assert sizes == []
    d.step({"x": 3})
    assert sizes == [1]
    d.step({"x": 3})
    assert sizes == [1, 1]
    d.run(2)
    assert sizes == [1, 1]


def test_several_requests_in_a_step(worker: Worker) -> None:
    """One with two pictures, one that shares one of them, one without, and one that joins."""
    expected = {names: alone(worker, *names) for names in (("a", "b"), ("b",), (), ("c",))}
    d = ImageDriver(worker)
    d.add_images("two", "a", "b")
    d.add_images("shared", "b")
    d.add_images("none")
    d.step()
    d.add_images("joins", "c")
    d.run(6)
    assert d.outputs["two"][:6] == expected["a", "b"]
    assert d.outputs["shared"][:6] == expected["b",]
    assert d.outputs["none"][:6] == expected[()]
    assert d.outputs["joins"][:6] == expected["c",]


def test_preempted_and_encoded_again(worker: Worker) -> None:
    expected = alone(worker, "a")
    d = ImageDriver(worker)
    d.add_images("x", "a")
    d.step()
    d.step()
    d.preempt("x")
    d.free, d.encoded = ["a"], set()
    d.run(6)
    assert d.outputs["x"][:6] == expected


def test_encoding_is_a_phase_of_profiles(worker: Worker) -> None:
    """Between the start and the stop alone, and beside the operations of the text model."""
    alone(worker, "a")
    worker.profile(True)
    alone(worker, "a", "b")
    spans = worker.profile(False)
    encoding = [span for span in spans if span.name == ENCODE_IMAGES]
    assert encoding
    [operation] = [op for op in worker.operation_profile() if op["name"] == ENCODE_IMAGES]
    assert operation["seconds"] == sum(span.duration_ns for span in encoding) / 1e9 > 0
    for span in spans:  # a forward pass begins when its rows are there
        if span.name == "forward":
            ends = span.start_ns + span.duration_ns
            assert all(
                one.start_ns + one.duration_ns <= span.start_ns or one.start_ns >= ends
                for one in encoding
            )
    worker.profile(True)
    assert not [span for span in worker.profile(False) if span.name == ENCODE_IMAGES]


def test_outputs_are_freed_in_steady_steps(worker: Worker) -> None:
    images = worker.runner.images
    assert images is not None
    d = ImageDriver(worker)
    d.add_images("x", "a")
    for _ in range(4):
        d.step()
    assert list(images._outputs) == ["a"]
    d.free = ["a"]
    d.step()
    assert not images._outputs
    d.run(8)


def test_prompt_logprobs(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that give prompt positions their logits see pictures too."""
    params = SamplingParams(temperature=0, prompt_logprobs=0)
    tables = []
    for limit in (1000, 4):
        monkeypatch.setattr(worker.runner.prompts, "max_logits", limit)
        d = ImageDriver(worker)
        d.add_images("x", "a", params=params)
        output = d.step()
        tables.append(output.prompt_logprobs["x"].logprobs)
        d.finish("x")
        d.free = ["a"]
        d.step({})
    assert tables[0] == tables[1]


def test_a_picture_that_was_not_encoded(worker: Worker) -> None:
    d = ImageDriver(worker)
    d.add_images("x", "a")
    d.add_images("y", "b")
    d.encoded = {"a"}
    output = d.step()
    assert "was not scheduled to be encoded before its use" in output.errors["x"]


def test_a_picture_that_cannot_be_encoded(worker: Worker) -> None:
    """It is its request's error alone."""
    expected = alone(worker, "b", count=1)
    d = ImageDriver(worker)
    d.add_images("x", "a")
    d.add_images("y", "b")
    d.features["x"][0].data = np.zeros((1, 16, 48), np.float32)
    output = d.step()
    assert "makes 4 rows of it, but the prompt has 8 places" in output.errors["x"]
    assert d.outputs["y"] == expected


def test_sleep_gives_the_encoder_back(worker: Worker) -> None:
    expected = alone(worker, "a")
    assert worker.runner.images is not None
    worker.sleep(2)
    assert worker.runner.images.encoder is None
    worker.wake_up()
    assert alone(worker, "a") == expected


def test_no_encoder_for_text_only(folder: Path) -> None:
    worker = Worker(config_for(folder, images=False))
    assert worker.runner.images is None
    worker.shutdown()


def test_reference_backend(folder: Path, worker: Worker) -> None:
    reference = Worker(config_for(folder, backend="reference"))
    reference.initialize_kv_cache(64)
    assert len(alone(reference, "a", count=2)) == 2
    reference.shutdown()


def test_a_model_without_an_encoder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config(tie_word_embeddings=True)))
    (tmp_path / "model.safetensors").write_bytes(pack_safetensors(hf_tensors()))
    with pytest.raises(EngineError, match="no image encoder"):
        Worker(config_for(tmp_path))
