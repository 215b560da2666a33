"""How a model wants its hidden states pooled, read from the small files beside its weights.

Sentence-transformers folders say it in ``modules.json`` and the pooling module's own folder, GGUF
files in ``<architecture>.pooling_type``. What is not said is None: the engine has defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tellin.config import PoolerConfig
from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.json_file import read_optional_json_object
from tellin.loading.typed_mapping import TypedMapping

_GGUF_POOLING = {1: "MEAN", 2: "CLS", 3: "LAST"}
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


def pooler_from_folder(folder: Path, config: TypedMapping) -> PoolerConfig | None:
    """Pooling of a sentence-transformers folder; None for a folder that is none.

    Args:
        config: the model's ``config.json``.

    Raises:
        UnsupportedModelError: the model pools, or goes on after pooling, in a way that is not
            supported.
        ModelLoadError: one of the files is damaged.
    """
    modules = _modules(folder / "modules.json")
    kinds = [kind for kind, _ in modules]
    if "Pooling" not in kinds:
        return None
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if unknown:
        raise UnsupportedModelError(
            f"{folder / 'modules.json'}: module {unknown[0]!r} is not supported; supported are "
            "Transformer, Pooling, Normalize"
        )
    pooling = folder / modules[kinds.index("Pooling")][1] / "config.json"
    limits = read_optional_json_object(folder / "sentence_bert_config.json")
    has_limit = limits is not None and limits.has("max_seq_length")
    sizes = (
        tuple(int(size) for size in config.get_numbers("matryoshka_dimensions"))
        if config.has("matryoshka_dimensions")
        else ()
    )
    return PoolerConfig(
        pooling_type=_pooling_type(pooling),
        use_activation="Normalize" in kinds,
        is_matryoshka=bool(sizes) or config.get_bool("is_matryoshka", False),
        matryoshka_dimensions=sizes,
        max_seq_length=limits.get_int("max_seq_length") if limits and has_limit else None,
    )


def pooler_from_gguf(values: TypedMapping, architecture: str) -> PoolerConfig | None:
    """Pooling of a GGUF file; None if it names none.

    Raises:
        UnsupportedModelError: of a kind that is not supported.
    """
    key = f"{architecture}.pooling_type"
    number = values.get_int(key, 0)
    if number == 0:
        return None
    if number not in _GGUF_POOLING:
        raise UnsupportedModelError(
            f"{values.path}: {key} is {number}; supported are 1 (mean), 2 (cls) and 3 (last)"
        )
    return PoolerConfig(pooling_type=_GGUF_POOLING[number])


def _modules(path: Path) -> list[tuple[str, str]]:
    """Class name and folder of each module, in order; none without a file."""
    if not path.is_file():
        return []
    try:
        values: Any = msgspec.json.decode(path.read_bytes())
        return [(str(item["type"]).rpartition(".")[2], str(item["path"])) for item in values]
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: is not valid JSON: {error}") from None
    except (TypeError, KeyError, IndexError):
        raise ModelLoadError(f"{path}: is not a list of modules with type and path") from None


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
