"""How a model wants its hidden states pooled, read from the small files beside its weights.

Sentence-transformers folders say it in ``modules.json`` and the pooling module's own folder, GGUF
files in ``<architecture>.pooling_type``, classifiers and cross-encoders in ``config.json``. What is
not said is None: the engine has defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tellin.config import PoolerConfig
from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.classic_hparams import CLASSIC_CLASSIFIERS
from tellin.loading.json_file import is_file, read_file, read_optional_json_object
from tellin.loading.typed_mapping import TypedMapping

_GGUF_POOLING = {1: "MEAN", 2: "CLS", 3: "LAST"}
_GGUF_RANKERS = {"bert": 2, "modern-bert": 1, "qwen3": 3, "qwen3vl": 3}
"""Architectures whose files score, and the pooling of those that do not say it."""
_GGUF_RANK = 4
"""Source: GGUF specification, pooling types; 0 = none, 4 = rank (a cross-encoder's score)."""

_FLAGS = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_lasttoken": "LAST",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_NAMES = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
_SUPPORTED = ("CLS", "MEAN", "LAST")

_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
"""Of sentence-transformers, in the order in which they may come; there may be several Dense."""
GGUF_DENSE = ("dense_2", "dense_3")

_CLASSIFIER = "ForSequenceClassification"
_CLASSIFIERS = {
    "Bert": "CLS",
    "Roberta": "CLS",
    "XLMRoberta": "CLS",
    "Gte": "CLS",
    "New": "CLS",
    "ModernBert": "CLS",
    "Llama": "LAST",
    "Mistral": "LAST",
    "Qwen2": "LAST",
    "Qwen3": "LAST",
    "Qwen3Next": "LAST",
    "Qwen3_5Text": "LAST",
    **dict.fromkeys(CLASSIC_CLASSIFIERS, "LAST"),
}
"""Token whose state a classifier of a family judges; of ModernBERT its configuration says which."""
_ACTIVATIONS = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
"""PyTorch's modules that cross-encoders name."""
_PROBLEM_TYPES = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_MAX_LABELS = 1 << 20
FROM_TOKEN = "classifier_from_token"
YES_OR_NO = ("yes", "no")
"""Labels of Qwen3-Reranker in GGUF: one score is made of them."""


def pooler_from_folder(folder: Path, config: TypedMapping) -> PoolerConfig | None:
    """Pooling of a classifier or of a sentence-transformers folder; None for other folders.

    Args:
        config: the model's ``config.json``.

    Raises:
        UnsupportedModelError: the model pools, or goes on after pooling, in a way that is not
            supported.
        ModelLoadError: one of the files is damaged.
    """
    classifier = _classifier(config)
    if classifier is not None:
        return classifier
    modules = module_list(folder / "modules.json")
    kinds = [kind for kind, _ in modules]
    unknown = [kind for kind in kinds if kind not in _MODULES]
    if unknown:
        raise UnsupportedModelError(
            f"{folder / 'modules.json'}: module {unknown[0]!r:.60} (key 'type') is not supported; "
            f"supported are {', '.join(_MODULES)}"
        )
    if "Pooling" not in kinds:
        return None
    dense = [path for kind, path in modules if kind == "Dense"]
    if kinds != sorted(kinds, key=_MODULES.index):
        raise UnsupportedModelError(
            f"{folder / 'modules.json'}: the order of the modules, {', '.join(kinds)}, is not "
            f"supported; supported is {', '.join(_MODULES)}"
        )
    pooling = folder / modules[kinds.index("Pooling")][1] / "config.json"
    limits = read_optional_json_object(folder / "sentence_bert_config.json")
    has_limit = limits is not None and limits.has("max_seq_length")
    sizes = (
        tuple(int(size) for size in config.get_integers("matryoshka_dimensions"))
        if config.has("matryoshka_dimensions")
        else ()
    )
    return PoolerConfig(
        pooling_type=_pooling_type(pooling),
        use_activation="Normalize" in kinds,
        is_matryoshka=bool(sizes) or config.get_bool("is_matryoshka", False),
        matryoshka_dimensions=sizes,
        max_seq_length=limits.get_int("max_seq_length") if limits and has_limit else None,
        embedding_size=_embedding_size(folder / dense[-1]) if dense else None,
    )


def _embedding_size(module: Path) -> int:
    config = read_optional_json_object(module / "config.json")
    if config is None:
        raise ModelLoadError(f"{module / 'config.json'}: is missing, but modules.json names it")
    return config.get_int("out_features")


def pooler_from_gguf(values: TypedMapping, architecture: str) -> PoolerConfig | None:
    """Pooling of a GGUF file; None if it names none.

    Raises:
        UnsupportedModelError: of a kind that is not supported.
    """
    key = f"{architecture}.pooling_type"
    number = values.get_int(key, 0)
    if number == 0:
        return None
    if number == _GGUF_RANK and architecture in _GGUF_RANKERS:
        names = f"{architecture}.classifier.output_labels"
        labels = tuple(values.get_strings(names)) if values.has(names) else ()
        labels = () if labels == YES_OR_NO else labels
        pooled = _GGUF_RANKERS[architecture]
        pooled = values.get_int(f"{architecture}.classifier.pooling_type", pooled)
        if pooled not in _GGUF_POOLING:
            raise UnsupportedModelError(
                f"{values.path}: {architecture}.classifier.pooling_type is {pooled}; supported are "
                "1 (mean), 2 (cls) and 3 (last)"
            )
        return PoolerConfig(_GGUF_POOLING[pooled], num_labels=max(len(labels), 1), labels=labels)
    if number not in _GGUF_POOLING:
        raise UnsupportedModelError(
            f"{values.path}: {key} is {number}; supported are 1 (mean), 2 (cls), 3 (last), and "
            f"4 (rank) of {', '.join(_GGUF_RANKERS)}"
        )
    sizes = [values.get_int(f"{architecture}.{name}_feat_out", 0) for name in GGUF_DENSE]
    return PoolerConfig(
        pooling_type=_GGUF_POOLING[number],
        embedding_size=next((size for size in reversed(sizes) if size), None),
    )


def _classifier(config: TypedMapping) -> PoolerConfig | None:
    """What ``config.json`` says of a classifier or cross-encoder; None if it is of another model.

    Source: the documented fields of configurations (transformers 5.24) and of cross-encoders
    (sentence-transformers 5).
    """
    names = config.get_strings("architectures") if config.has("architectures") else ()
    name = next((name for name in names if name.endswith(_CLASSIFIER)), None)
    if name is None:
        return None
    family = name.removesuffix(_CLASSIFIER)
    if family not in _CLASSIFIERS:
        raise UnsupportedModelError(
            f"{config.path}: classifier {name} is not supported; supported are "
            f"{', '.join(_CLASSIFIERS)}, each with {_CLASSIFIER}"
        )
    labels = _labels(config)
    num_labels = len(labels) or config.get_int("num_labels", 2)
    if config.has(FROM_TOKEN):
        labels = () if judges_yes_or_no(config) else tuple(config.get_strings(FROM_TOKEN))
        num_labels = max(len(labels), 1)
    if not 1 <= num_labels <= _MAX_LABELS:
        raise ModelLoadError(f"{config.path}: num_labels is {num_labels}, allowed are 1 to 2^20")
    pooling_type = _CLASSIFIERS[family]
    if family == "ModernBert":
        name = config.get_str("classifier_pooling", "cls")
        if name not in ("cls", "mean"):
            raise ModelLoadError(f"{config.path}: classifier_pooling is {name!r}, not cls or mean")
        pooling_type = name.upper()
    return PoolerConfig(
        pooling_type,
        num_labels=num_labels,
        labels=labels,
        score_activation=_score_activation(config),
    )


def judges_yes_or_no(config: TypedMapping) -> bool:
    """Whether a head is made of two tokens, of which the second says yes: Qwen3-Reranker's own.

    Raises:
        ModelLoadError: there are not two of them.
    """
    if not config.get_bool("is_original_qwen3_reranker", False):
        return False
    tokens = config.get_strings(FROM_TOKEN)
    if len(tokens) != 2:
        raise ModelLoadError(
            f"{config.path}: {FROM_TOKEN!r} has {len(tokens)} tokens; is_original_qwen3_reranker "
            'needs two, ["no", "yes"]'
        )
    return True


def _labels(config: TypedMapping) -> tuple[str, ...]:
    """``id2label``: names of the classes in order; none if the file has none."""
    if not config.has("id2label"):
        return ()
    given = config.get_mapping("id2label")
    labels = [given.get(str(i)) for i in range(len(given))]
    if not all(isinstance(label, str) for label in labels):
        raise ModelLoadError(
            f"{config.path}: key 'id2label' must name the labels 0 to {len(labels) - 1}"
        )
    return tuple(str(label) for label in labels)


def _score_activation(config: TypedMapping) -> str:
    """What a cross-encoder's own files say, before what suits the kind of problem."""
    own = config.get_mapping("sentence_transformers") if config.has("sentence_transformers") else {}
    name = own.get("activation_fn") or config.get("sbert_ce_default_activation_function")
    if name is not None:
        short = str(name).rpartition(".")[2]
        if short not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"{config.path}: activation {name!r} of scores is not supported; supported are "
                f"{', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[short]
    problem = config.get_str("problem_type", "")
    if problem and problem not in _PROBLEM_TYPES:
        raise ModelLoadError(
            f"{config.path}: problem_type is {problem!r}, allowed are {', '.join(_PROBLEM_TYPES)}"
        )
    return _PROBLEM_TYPES.get(problem, "auto")


def module_list(path: Path) -> list[tuple[str, str]]:
    """Class name and folder of each module, in order; none without a file."""
    if not is_file(path):
        return []
    try:
        values: Any = msgspec.json.decode(read_file(path))
        modules = [(item["type"], item["path"]) for item in values]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: is not valid JSON: {error}") from None
    except (TypeError, KeyError, IndexError):
        raise ModelLoadError(f"{path}: is not a list of modules with type and path") from None
    for kind, place in modules:
        if not isinstance(kind, str) or not isinstance(place, str):
            wrong = ("path", place) if isinstance(kind, str) else ("type", kind)
            raise ModelLoadError(f"{path}: key {wrong[0]!r} is {wrong[1]!r:.60}, expected a string")
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise ModelLoadError(f"{path}: key 'path' is {place!r:.60}, which is not in the folder")
    return [(kind.rpartition(".")[2], place) for kind, place in modules]


def _pooling_type(path: Path) -> str:
    config = read_optional_json_object(path)
    if config is None:
        raise ModelLoadError(f"{path}: is missing, but modules.json names it")
    if config.has("pooling_mode"):
        name = config.get_str("pooling_mode")
        kinds = [_NAMES.get(name, name)]
    else:
        kinds = [kind for flag, kind in _FLAGS.items() if config.get_bool(flag, False)]
    if len(kinds) != 1 or kinds[0] not in _SUPPORTED:
        raise UnsupportedModelError(
            f"{path}: pools by {' and '.join(kinds) or 'nothing'}; supported is one of "
            "cls, mean, lasttoken"
        )
    return kinds[0]
