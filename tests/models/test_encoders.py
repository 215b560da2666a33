"""EmbeddingGemma, ModernBERT, nomic-bert and GTE: transformers' numbers, two-sided windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tellin import LLM, PoolingParams
from tellin.kernels.batch import StepBatch
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading import open_model
from tellin.models import build_plan
from tellin.worker.profiler import ProfiledBackend
from tests.models.encoder_files import write_encoder_gguf
from tests.models.encoders import (
    CASES,
    DENSE,
    EMBEDDERS,
    HIDDEN,
    QUERY,
    SCORERS,
    TEXTS,
    write_encoder,
)

GGUF_CASES = ("gemma", "modernbert", "modernbert_scores", "nomic")
STORED = np.load(Path(__file__).parents[1] / "data" / "encoders.npz")


def step(*lengths: int) -> StepBatch:
    """Whole texts of these lengths, with ids that depend on the length alone."""
    ids = [np.random.default_rng(n).integers(4, 50, n) for n in lengths]
    return StepBatch(
        token_ids=np.concatenate(ids).astype(np.int32),
        positions=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        query_start_loc=np.cumsum([0, *lengths]).astype(np.int32),
        seq_lens=np.array(lengths, np.int32),
        block_table=np.zeros((len(lengths), 1), np.int32),
        logits_indices=np.zeros(0, np.int32),
    )


@pytest.mark.parametrize("case", EMBEDDERS)
def test_states_and_embeddings_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    path = write_encoder(tmp_path, case)
    for backend in ("native", "reference"):
        with LLM(str(path), num_threads=2, backend=backend) as llm:
            raw = PoolingParams(use_activation=False)
            [states] = llm.encode([TEXTS[0]], raw, pooling_task="token_embed")
            np.testing.assert_allclose(
                states.outputs.data, STORED[f"{case}_states"], rtol=1e-4, atol=1e-4
            )
            embeds = [one.outputs.embedding for one in llm.embed(list(TEXTS))]
            np.testing.assert_allclose(embeds, STORED[f"{case}_embeds"], rtol=1e-4, atol=2e-6)
            alone = [llm.embed([text])[0].outputs.embedding for text in TEXTS]
            assert alone == embeds


@pytest.mark.parametrize("case", SCORERS)
def test_scores_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    with LLM(str(write_encoder(tmp_path, case)), num_threads=2) as llm:
        scores = [one.outputs.score for one in llm.score(QUERY, list(TEXTS))]
    expected = 1 / (1 + np.exp(-STORED[f"{case}_scores"].astype(np.float64)))
    np.testing.assert_allclose(scores, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("case", "window"), [("gemma", 8), ("gemma", 300), ("modernbert", 8), ("modernbert", 700)]
)
def test_windows_of_long_texts(tmp_path: Path, case: str, window: int) -> None:
    """Across the parts into which the native attention cuts a text; the same bits in a batch."""
    name = "sliding_window" if case == "gemma" else "local_attention"
    changes = {name: window, "max_position_embeddings": 4096}
    source = open_model(write_encoder(tmp_path, case, **changes))
    plan = build_plan(source)
    assert plan.kv_layers == ()
    reference, native = ReferenceBackend(plan), NativeBackend(plan, num_threads=2)
    batch = step(700, 5, 333)
    states = np.array(native.forward(batch))
    np.testing.assert_allclose(states, reference.forward(batch), rtol=1e-3, atol=1e-4)
    alone = NativeBackend(plan, num_threads=1)
    assert (np.array(alone.forward(step(700))) == states[:700]).all()
    assert (np.array(native.forward(step(333))) == states[705:]).all()


@pytest.mark.parametrize("window", [8, 300])
def test_profiles_count_what_windows_show(tmp_path: Path, window: int) -> None:
    """Pairs of a query and a key that it sees, on both sides, whatever the request's place."""
    plan = build_plan(open_model(write_encoder(tmp_path, "modernbert", local_attention=window)))
    profiled = ProfiledBackend(NativeBackend(plan, num_threads=1))
    profiled.forward(step(40, 7))
    _, operations = profiled.finish()
    found = [op.macs for op in operations if op.name.startswith("attention")]
    full = sum(n * n for n in (40, 7))
    near = sum(abs(i - j) <= window // 2 for n in (40, 7) for i in range(n) for j in range(n))
    assert sum(found) == (2 * full + near) * HIDDEN * 2


def test_dense_layers_give_the_size_of_embeddings(tmp_path: Path) -> None:
    path = write_encoder(tmp_path, "gemma", matryoshka_dimensions=[8, 16])
    with LLM(str(path), num_threads=1) as llm:
        assert llm.model_config.pooler_config.embedding_size == DENSE[-1]
        assert len(llm.embed([TEXTS[0]])[0].outputs.embedding) == DENSE[-1]
        assert CASES["gemma"]["use_bidirectional_attention"]


@pytest.mark.parametrize("case", GGUF_CASES)
def test_gguf_files_give_what_folders_give(tmp_path: Path, case: str) -> None:
    with LLM(str(write_encoder(tmp_path / "folder", case)), num_threads=2) as of_folder:
        expected, ids = [], []
        for text in TEXTS:
            prompt = of_folder.llm_engine.renderer.render_cmpl([text])[0]["prompt_token_ids"]
            ids.append({"prompt_token_ids": prompt})
            expected.append(vector(of_folder, ids[-1]))
    path = write_encoder_gguf(tmp_path / "model.gguf", case)
    with LLM(str(path), num_threads=2, skip_tokenizer_init=True) as of_file:
        for prompt, values in zip(ids, expected, strict=True):
            np.testing.assert_allclose(vector(of_file, prompt), values, rtol=1e-5, atol=1e-6)


def vector(llm: LLM, prompt: dict[str, list[int]]) -> list[float]:
    if "classify" in llm.supported_tasks:
        return llm.classify([prompt])[0].outputs.probs
    return llm.embed([prompt])[0].outputs.embedding
