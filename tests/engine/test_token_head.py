"""Scores by the tokens that a language model would answer with (Qwen3-Reranker)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tellin import LLM, SamplingParams
from tellin.exceptions import ModelLoadError
from tellin.loading import open_model
from tellin.loading.dequantize import dequantize
from tests.loading.gguf_writer import write_gguf
from tests.loading.models import gguf_metadata, gguf_tensors
from tests.models.classifiers import DOCUMENTS, QUERY, VOCAB, write_classifier

EXACT: dict[str, Any] = {
    "activation_precision": "float32",
    "kv_cache_dtype": "float32",
    "num_kv_blocks": 64,
}


def write_folder(folder: Path, **keys: Any) -> Path:
    """A Qwen3 whose output matrix is its embedding, without a head of its own."""
    keys = {"tie_word_embeddings": True, "id2label": None, "label2id": None, **keys}
    write_classifier(folder, "qwen3", **keys)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("score.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_the_share_of_yes(tmp_path: Path) -> None:
    """Its logit less that of no, as the same model generates them; classes of other tokens."""
    ids = [VOCAB[char] for char in "theseacomesin"]
    plain = write_folder(tmp_path / "lm", architectures=["Qwen3ForCausalLM"])
    with LLM(plain, max_logprobs=-1, **EXACT) as llm:
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=-1)
        (entry,) = llm.generate({"prompt_token_ids": ids}, params)[0].outputs[0].logprobs
        logits = [entry[VOCAB[token]].logprob for token in ("n", "y")]
    share = 1 / (1 + math.exp(logits[0] - logits[1]))
    head = {"classifier_from_token": ["n", "y"]}
    folder = write_folder(tmp_path / "original", **head, is_original_qwen3_reranker=True)
    with LLM(folder, **EXACT) as llm:
        assert llm.supported_tasks == ("classify", "score")
        (output,) = llm.classify({"prompt_token_ids": ids})
        assert output.outputs.probs == [pytest.approx(share, abs=1e-5)]
        scores = [output.outputs.score for output in llm.score(QUERY, list(DOCUMENTS))]
        assert len(set(scores)) == len(DOCUMENTS)
    with LLM(write_folder(tmp_path / "classes", **head), **EXACT) as llm:
        (output,) = llm.classify({"prompt_token_ids": ids})
        np.testing.assert_allclose(output.outputs.probs, [1 - share, share], atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"classifier_from_token": ["n", "maybe"]}, "names 'maybe', which is no token"),
        (
            {"classifier_from_token": ["n"], "is_original_qwen3_reranker": True},
            "has 1 tokens; is_original_qwen3_reranker needs two",
        ),
    ],
)
def test_tokens_that_make_no_head(keys: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=match):
        LLM(write_folder(tmp_path, **keys))


def test_labels_yes_and_no_of_a_gguf_file_are_one_score(tmp_path: Path) -> None:
    tensors = gguf_tensors("qwen3")
    rows = tensors["token_embd.weight"][[7, 9]]
    keys = {"pooling_type": 4, "classifier.output_labels": ["yes", "no"]}
    path = write_gguf(
        tmp_path / "m.gguf",
        gguf_metadata("qwen3", **keys),
        tensors | {"cls.output.weight": np.ascontiguousarray(rows)},
    )
    with open_model(path) as source:
        pooler = source.metadata.pooler
        assert pooler is not None
        assert (pooler.pooling_type, pooler.num_labels, pooler.labels) == ("LAST", 1, ())
        head = dequantize(source.tensors["classifier.out_proj.weight"])
        np.testing.assert_array_equal(head, rows[:1] - rows[1:])
