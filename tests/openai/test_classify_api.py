"""``/classify``, and ``/score`` and ``/rerank`` of a cross-encoder: vLLM's shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.models.classifiers import DOCUMENTS, QUERY, write_classifier
from tests.openai.conftest import Server, run_server

OPTIONS = ("--max-model-len", "128", "--served-model-name", "tiny")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_classifier(tmp_path_factory.mktemp("classes"), "bert_classes")
    with run_server(folder, *OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_classifier(tmp_path_factory.mktemp("reranker"), "bert")
    with run_server(folder, *OPTIONS) as running:
        yield running


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def refusal(server: Server, path: str, **body: Any) -> str:
    response = server.http.post(path, json=body)
    assert response.status_code == 400, response.text
    message: str = response.json()["error"]["message"]
    return message


def test_classes_and_labels(classifier: Server) -> None:
    reply = post(classifier, "/classify", model="tiny", input=list(DOCUMENTS))
    assert (reply["object"], reply["model"]) == ("list", "tiny")
    assert reply["id"].startswith("classify-")
    assert [item["index"] for item in reply["data"]] == [0, 1, 2]
    names = ["bad", "fair", "good"]
    for item in reply["data"]:
        assert item["num_classes"] == len(item["probs"]) == 3
        assert sum(item["probs"]) == pytest.approx(1)
        assert item["label"] == names[int(np.argmax(item["probs"]))]
    assert len({item["label"] for item in reply["data"]}) > 1
    (alone,) = post(classifier, "/v1/classify", input=DOCUMENTS[1])["data"]
    assert alone["probs"] == reply["data"][1]["probs"]
    assert reply["usage"]["prompt_tokens"] > 3 * 3
    (raw,) = post(classifier, "/classify", input=DOCUMENTS[1], use_activation=False)["data"]
    powers = np.exp(raw["probs"])
    np.testing.assert_allclose(alone["probs"], powers / powers.sum(), atol=1e-6)


def test_what_a_classifier_cannot_do(classifier: Server) -> None:
    assert "supports: classify" in refusal(classifier, "/v1/embeddings", input="a")
    assert "several labels" in refusal(classifier, "/score", text_1="a", text_2="b")
    assert "cannot generate" in refusal(classifier, "/v1/completions", prompt="a")
    long = refusal(classifier, "/classify", input=["a", "b " * 300])
    assert long.startswith("input[1]")
    cut = post(classifier, "/classify", input="b " * 300, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == 128


def test_a_cross_encoder_scores_pairs(reranker: Server) -> None:
    reply = post(reranker, "/score", text_1=QUERY, text_2=list(DOCUMENTS))
    scores = [item["score"] for item in reply["data"]]
    assert all(0 < score < 1 for score in scores)
    for i, document in enumerate(DOCUMENTS):
        (one,) = post(reranker, "/v1/score", text_1=[QUERY], text_2=[document])["data"]
        assert one["score"] == scores[i]
    (other,) = post(reranker, "/score", text_1=DOCUMENTS[0], text_2=QUERY)["data"]
    assert other["score"] != scores[0]
    ranking = post(reranker, "/rerank", query=QUERY, documents=list(DOCUMENTS), top_n=2)
    order = sorted(range(3), key=lambda i: -scores[i])[:2]
    assert [item["index"] for item in ranking["results"]] == order
    assert [item["relevance_score"] for item in ranking["results"]] == [scores[i] for i in order]
    assert ranking["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"]
    long = refusal(reranker, "/rerank", query=QUERY, documents=["a", "b " * 300])
    assert long.startswith("documents[1]")


def test_one_label_is_a_class_too(reranker: Server) -> None:
    (item,) = post(reranker, "/classify", input=DOCUMENTS[0])["data"]
    assert (item["label"], item["num_classes"]) == ("relevant", 1)
