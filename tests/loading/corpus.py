"""Texts on which tokenizers differ: code, scripts, emoji, combining marks, white space, control
tokens. Short, so that each can be compared by eye when it fails. They are in a JSON file because
editors and linters trip over such characters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "tokenizer"
TEXTS: tuple[str, ...] = tuple(json.loads((DATA / "corpus.json").read_text()))


def golden(name: str) -> Any:
    """What an original tokenizer gave for `TEXTS`; see ``tests/data/make``."""
    return json.loads((DATA / f"{name}.json").read_text())
