"""Classifiers and cross-encoders from text to score: rules 9.1, 9.5, P51, promise 1.

Reference values are those of `transformers` in float32 (tests/data/make).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tellin import LLM, ClassificationRequestOutput, EngineArgs, LLMEngine, PoolingParams
from tellin.engine.pairs import shares_of
from tellin.exceptions import (
    ContextLengthError,
    InvalidParameterError,
    InvalidTypeError,
    ModelLoadError,
    UnsupportedFeatureError,
    UnsupportedModelError,
)
from tests.models.classifiers import (
    CASES,
    DECODERS,
    DOCUMENTS,
    QUERY,
    VOCAB,
    weights,
    write_classifier,
)

DATA = Path(__file__).parents[1] / "data"
RAW = PoolingParams(use_activation=False)
EXACT: dict[str, Any] = {"activation_precision": "float32", "kv_cache_dtype": "float32"}
TEXTS = [f"{'the tide comes in and goes out ' * (i % 5)} {chr(97 + i)}" for i in range(20)]


def open_case(folder: Path, case: str, **options: Any) -> LLM:
    sizes = {"num_kv_blocks": 64} if case in DECODERS else {}
    return LLM(write_classifier(folder, case), **EXACT, **sizes, **options)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(DATA / "classifiers.npz") as stored:
        return dict(stored)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A cross-encoder with token types."""
    with open_case(tmp_path_factory.mktemp("bert"), "bert") as llm:
        yield llm


def probs(outputs: list[ClassificationRequestOutput]) -> np.ndarray:
    return np.array([output.outputs.probs for output in outputs])


def scores(llm: LLM, *texts: Any, **options: Any) -> np.ndarray:
    return np.array([output.outputs.score for output in llm.score(*texts, **options)])


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_values(case: str, backend: str, golden: dict[str, np.ndarray], tmp_path: Path) -> None:
    """Logits, what the model's files make of them, and those of pairs."""
    with open_case(tmp_path, case, backend=backend) as llm:
        logits = probs(llm.classify(list(DOCUMENTS), pooling_params=RAW))
        np.testing.assert_allclose(logits, golden[f"{case}_texts"], rtol=0, atol=5e-5)
        found = probs(llm.classify(list(DOCUMENTS)))
        num_labels = len(CASES[case]["labels"])
        if case == "bert_identity":
            expected = logits
        elif num_labels == 1:
            expected = 1 / (1 + np.exp(-logits))
        else:
            expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        if num_labels > 1:
            assert llm.supported_tasks == ("classify",)
            return
        assert llm.supported_tasks == ("classify", "score")
        pairs = scores(llm, QUERY, list(DOCUMENTS), pooling_params=RAW)
        np.testing.assert_allclose(pairs, golden[f"{case}_pairs"][:, 0], rtol=0, atol=5e-5)
        (last,) = llm.score(QUERY, DOCUMENTS[-1])
        assert last.prompt_token_ids == golden[f"{case}_ids"].tolist()


def test_9_5_1_pairs_one_with_many_and_many_with_many(reranker: LLM) -> None:
    many = scores(reranker, [QUERY, TEXTS[1]], [DOCUMENTS[0], DOCUMENTS[2]])
    assert many[0] == scores(reranker, QUERY, DOCUMENTS[0])[0]
    assert many[1] == scores(reranker, TEXTS[1], {"prompt": DOCUMENTS[2]})[0]
    assert many[0] != scores(reranker, DOCUMENTS[0], QUERY)[0]
    with pytest.raises(InvalidParameterError, match="1 with N or N with N"):
        reranker.score([QUERY, QUERY], list(DOCUMENTS))
    with pytest.raises(InvalidTypeError, match="pairs of texts"):
        reranker.score(QUERY, {"prompt_token_ids": [5, 6]})


def test_token_types_reach_the_model(reranker: LLM, golden: dict[str, np.ndarray]) -> None:
    """The ids of a pair without its types are another input; with them they are the pair."""
    ids, types = golden["bert_ids"].tolist(), golden["bert_types"].tolist()
    assert sorted(set(types)) == [0, 1]
    (pair,) = reranker.score(QUERY, DOCUMENTS[-1])
    (plain,) = reranker.classify({"prompt_token_ids": ids})
    assert plain.outputs.probs != [pair.outputs.score]
    raw = {"prompt_token_ids": ids, "token_type_ids": types}
    assert reranker.classify(raw)[0].outputs.probs == [pair.outputs.score]
    cut = reranker.classify(raw, tokenization_kwargs={"truncate_prompt_tokens": len(ids) - 3})
    shorter = {"prompt_token_ids": ids[:-3], "token_type_ids": types[:-3]}
    assert cut[0].outputs.probs == reranker.classify(shorter)[0].outputs.probs
    rendered = {"type": "token", "prompt_token_ids": ids, "token_type_ids": types}
    (again,) = reranker.classify(rendered)
    assert again.outputs.probs == [pair.outputs.score]
    start = PoolingParams(extra_kwargs={"compressed_token_type_ids": types.index(1)})
    (compressed,) = reranker.classify({"prompt_token_ids": ids}, pooling_params=start)
    assert compressed.outputs.probs == [pair.outputs.score]


@pytest.mark.parametrize("types", [[0, 1], [1, 0, 1], [0, 0, 2], [0, 1, True], "011"])
def test_bad_token_types(reranker: LLM, types: Any) -> None:
    prompt = {"prompt_token_ids": [5, 6, 7], "token_type_ids": types}
    for one in (prompt, prompt | {"type": "token"}):
        with pytest.raises(InvalidParameterError, match="token_type_ids"):
            reranker.classify(one)
    with pytest.raises(InvalidParameterError, match="one for each token"):
        reranker.classify({"prompt": "abc", "token_type_ids": [0]})


# ---------------------------------------------------------------------- promise 1


def test_p51_alone_is_as_in_a_batch(reranker: LLM, tmp_path: Path) -> None:
    """Pairs and single texts in the same steps; a decoder in chunks, with a prefix cache."""
    together = scores(reranker, QUERY, TEXTS)
    alone = [scores(reranker, QUERY, text)[0] for text in TEXTS]
    assert together.tolist() == alone
    assert len(set(alone)) > len(TEXTS) // 2
    sizes = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "num_kv_blocks": 64}
    with open_case(tmp_path, "qwen2") as whole, LLM(tmp_path, **EXACT, **sizes) as small:
        expected = scores(whole, QUERY, TEXTS)
        assert scores(small, QUERY, TEXTS).tolist() == expected.tolist()
        assert [scores(whole, QUERY, text)[0] for text in TEXTS] == expected.tolist()


def test_threads_and_variants_of_the_native_backend_agree_on_types(tmp_path: Path) -> None:
    values = []
    for threads in (1, 2):
        with open_case(tmp_path, "bert", num_threads=threads) as llm:
            values.append(scores(llm, QUERY, TEXTS).tolist())
    assert values[0] == values[1]


# ---------------------------------------------------------------------- truncation


def test_9_4_2_the_longer_text_gives_way(reranker: LLM) -> None:
    """As the tokenizers library's longest_first, cut on the right; special tokens stay."""
    backend = reranker.get_tokenizer().backend
    texts = ("abcd efgh", "ij klmnop qrstu vw")
    whole = reranker.score(*texts)[0].prompt_token_ids
    for limit in range(6, len(whole) + 2):
        copy = type(backend).from_str(backend.to_str())
        copy.enable_truncation(limit, strategy="longest_first")
        (output,) = reranker.score(*texts, tokenization_kwargs={"truncate_prompt_tokens": limit})
        assert output.prompt_token_ids == copy.encode(*texts).ids
        assert output.num_truncated_prompt_tokens == max(len(whole) - limit, 0)
    with pytest.raises(InvalidParameterError, match="no room for two texts"):
        reranker.score(*texts, tokenization_kwargs={"truncate_prompt_tokens": 4})


def test_shares() -> None:
    assert shares_of(3, 4, 7) == (3, 4)
    assert shares_of(2, 9, 7) == (2, 5)
    assert shares_of(9, 2, 7) == (5, 2)
    assert shares_of(9, 8, 7) == (4, 3)
    assert shares_of(8, 8, 7) == (3, 4)


def test_a_pair_that_is_too_long(reranker: LLM) -> None:
    long = "ab " * 200
    with pytest.raises(ContextLengthError, match="130"):
        reranker.score(QUERY, long)
    (cut,) = reranker.score(QUERY, long, tokenization_kwargs={"truncate_prompt_tokens": -1})
    assert len(cut.prompt_token_ids) == 130
    assert cut.prompt_token_ids[-1] == VOCAB["[SEP]"]


# ---------------------------------------------------------------------- what it is not


def test_a_classifier_does_not_embed(reranker: LLM, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFeatureError, match="'embed'; it supports classify, score"):
        reranker.embed("a")
    with pytest.raises(UnsupportedFeatureError, match="does not generate"):
        reranker.generate("a")
    with pytest.raises(UnsupportedFeatureError, match="classifier, made for 'pooling'"):
        LLM(write_classifier(tmp_path / "q", "qwen2"), runner="generate")
    with (
        open_case(tmp_path / "c", "bert_classes") as llm,
        pytest.raises(UnsupportedFeatureError, match="classifier of several labels"),
    ):
        llm.score("a", "b")


def test_pooler_config_may_change_the_activation_only(tmp_path: Path) -> None:
    write_classifier(tmp_path, "bert_classes")
    with LLM(tmp_path, pooler_config={"score_activation": "sigmoid"}) as llm:
        (found,) = llm.classify("abc")
        (raw,) = llm.classify("abc", pooling_params=RAW)
        np.testing.assert_allclose(
            found.outputs.probs, 1 / (1 + np.exp(-np.array(raw.outputs.probs))), atol=1e-6
        )
        assert found.outputs.num_classes == 3
    for options, words in (
        ({"num_labels": 2}, "the model's own"),
        ({"pooling_type": "MEAN"}, "trained on CLS"),
        ({"score_activation": "tanh"}, "score_activation"),
    ):
        with pytest.raises(InvalidParameterError, match=words):
            LLM(tmp_path, pooler_config=options)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"id2label": {"0": "a"}}, ModelLoadError, r"expected \(1, 32\)"),
        ({"id2label": {"0": "a", "7": "b"}}, ModelLoadError, "id2label"),
        ({"problem_type": "guessing"}, ModelLoadError, "problem_type"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}},
            UnsupportedModelError,
            "torch.nn.Tanh",
        ),
        (
            {"architectures": ["MptForSequenceClassification"]},
            UnsupportedModelError,
            "MptForSequenceClassification",
        ),
    ],
)
def test_files_that_do_not_fit(
    config: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    write_classifier(tmp_path, "bert_classes", **config)
    with pytest.raises(error, match=words):
        LLM(tmp_path)


# ---------------------------------------------------------------------- beside classifiers


def test_an_xlm_roberta_embeds(golden: dict[str, np.ndarray], tmp_path: Path) -> None:
    """The encoder of a classifier, saved alone: its first state, under the head, is the golden
    logit. Positions begin behind the padding id, and there is one token type."""
    names = {"architectures": ["XLMRobertaModel"], "id2label": None, "label2id": None}
    write_classifier(tmp_path, "xlmr", **names)
    arrays = weights("xlmr")
    bare = {name.removeprefix("roberta."): values for name, values in arrays.items()}
    head = {name: bare.pop(name) for name in list(bare) if name.startswith("classifier.")}
    bare["pooler.dense.weight"] = np.zeros((32, 32), np.float32)
    save_file(bare, tmp_path / "model.safetensors")
    pooler = {"pooling_type": "CLS", "use_activation": False}
    with LLM(tmp_path, pooler_config=pooler, **EXACT) as llm:
        assert llm.supported_tasks == ("embed", "token_embed")
        assert llm.model_config.max_model_len == 128
        states = np.array([o.outputs.embedding for o in llm.embed(list(DOCUMENTS))])
    dense = np.tanh(states @ head["classifier.dense.weight"].T + head["classifier.dense.bias"])
    logits = dense @ head["classifier.out_proj.weight"].T + head["classifier.out_proj.bias"]
    np.testing.assert_allclose(logits, golden["xlmr_texts"], rtol=0, atol=5e-5)


def test_a_core_in_another_process_gets_the_types(reranker: LLM, tmp_path: Path) -> None:
    expected = scores(reranker, QUERY, DOCUMENTS[0])
    args = EngineArgs(model=write_classifier(tmp_path, "bert"), **EXACT)
    found = []
    with LLMEngine.from_engine_args(args, enable_multiprocessing=True) as engine:
        (pair,) = engine.renderer.render_pairs([(QUERY, DOCUMENTS[0])])
        engine.add_request("0", pair, PoolingParams(task="score"))
        while engine.has_unfinished_requests():
            found += [output.outputs.data for output in engine.step(timeout=60)]
    assert np.concatenate(found).tolist() == expected.tolist()
