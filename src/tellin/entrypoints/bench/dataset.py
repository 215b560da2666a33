"""What a benchmark asks: requests from a file, or made of random words or ids.

Knows no server and no engine. Equal arguments and seeds give equal requests.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tellin.exceptions import InvalidParameterError

_WORD_LIST = """
    time way year work day thing man world life part child place week case point company
    number group problem fact hand eye water room mother area money story month book study
    night word issue side kind head house service friend father power hour game line end
    member law car city name team minute idea body back parent face level office door health
    person art war history party result change morning reason research girl guy moment air
    teacher force order river stone garden winter summer letter music paper market road light
"""
WORDS = tuple(_WORD_LIST.split())
"""Frequent words: most tokenizers write each of them, with its space, as one token."""
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
          "system": "system"}  # fmt: skip


@dataclass(frozen=True)
class BenchRequest:
    """One request: a conversation or a text, and how much to generate (None = as much as given
    on the command line)."""

    messages: tuple[dict[str, Any], ...] = ()
    prompt: str | None = None
    output_len: int | None = None

    def as_text(self) -> str:
        """The prompt for an endpoint that continues texts."""
        if self.prompt is not None:
            return self.prompt
        return "\n".join(str(message.get("content") or "") for message in self.messages)

    def as_messages(self) -> list[dict[str, Any]]:
        """The prompt for an endpoint that answers conversations."""
        return list(self.messages) or [{"role": "user", "content": self.prompt or ""}]


def random_requests(
    num_requests: int, input_len: int, prefix_len: int = 0, seed: int = 0
) -> list[BenchRequest]:
    """Texts of ``input_len`` random words, the first ``prefix_len`` of which all of them share."""
    generator = random.Random(seed)
    prefix = [generator.choice(WORDS) for _ in range(min(prefix_len, input_len))]
    return [
        BenchRequest(
            prompt=" ".join(
                [*prefix, *(generator.choice(WORDS) for _ in range(input_len - len(prefix)))]
            )
        )
        for _ in range(num_requests)
    ]


def random_ids(
    num_prompts: int, input_len: int, vocab: Sequence[int], seed: int
) -> list[list[int]]:
    """Prompts of random ids out of ``vocab``."""
    generator = random.Random(seed)
    return [generator.choices(vocab, k=input_len) for _ in range(num_prompts)]


def load_requests(path: Path, num_requests: int, seed: int = 0) -> list[BenchRequest]:
    """Requests from a file: JSON lines, or one JSON array.

    An entry has ``messages``, ``prompt`` or ``conversations`` (as ShareGPT: the first turn of the
    human is asked); ``max_tokens`` is optional. Entries that ask nothing are skipped. If the file
    has more than wanted, a random part of it is taken; if it has fewer, they are repeated.

    Raises:
        InvalidParameterError: the file cannot be read, or holds no request.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError(
            f"cannot read the dataset {path}: {error}", parameter="--dataset", value=str(path)
        ) from None
    requests = [request for entry in _entries(text, path) if (request := _request(entry, path))]
    if not requests:
        raise InvalidParameterError(
            f"{path} holds no request; an entry needs messages, prompt or conversations",
            parameter="--dataset",
            value=str(path),
        )
    random.Random(seed).shuffle(requests)
    repeats = -(-num_requests // len(requests))
    return (requests * repeats)[:num_requests]


def _entries(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    """Entries with the line (or the position in the array) that holds them."""
    try:
        if text.lstrip().startswith("["):
            yield from enumerate(json.loads(text), 1)
            return
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield number, json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidParameterError(
            f"{path} is neither JSON lines nor a JSON array: {error}", parameter="--dataset"
        ) from None


def _request(numbered: tuple[int, Any], path: Path) -> BenchRequest | None:
    number, entry = numbered

    def fail(reason: str) -> InvalidParameterError:
        return InvalidParameterError(f"{path}, entry {number}: {reason}", parameter="--dataset")

    if not isinstance(entry, dict):
        raise fail(f"it is no object but a {type(entry).__name__}")
    output_len = entry.get("max_tokens", entry.get("output_len"))
    if output_len is not None and (not isinstance(output_len, int) or output_len < 1):
        raise fail(f"max_tokens must be a positive integer, got {output_len!r}")
    messages, prompt, turns = (entry.get(k) for k in ("messages", "prompt", "conversations"))
    if isinstance(prompt, str) and prompt:
        return BenchRequest(prompt=prompt, output_len=output_len)
    if isinstance(messages, list) and messages:
        if not all(isinstance(message, dict) for message in messages):
            raise fail("messages must be objects")
        return BenchRequest(messages=tuple(messages), output_len=output_len)
    if isinstance(turns, list):
        return _first_question(turns, output_len)
    return None


def _first_question(turns: list[Any], output_len: int | None) -> BenchRequest | None:
    """What is said up to and with the human's first turn."""
    messages = []
    for turn in turns:
        role = _ROLES.get(str(turn.get("from"))) if isinstance(turn, dict) else None
        if role in (None, "assistant") or not turn.get("value"):
            return None
        messages.append({"role": role, "content": str(turn["value"])})
        if role == "user":
            return BenchRequest(messages=tuple(messages), output_len=output_len)
    return None
