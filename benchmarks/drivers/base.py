"""The child's side of the protocol: one JSON object a line on stdin, one answer a line on stdout.

A call names a method and its arguments (``{"call": "measure", "args": {...}}``); the answer holds
its result or an error text. Engines like to print, so the real stdout is kept for answers alone and
file descriptor 1 is pointed at stderr before an engine is imported.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

CHAT = [
    {
        "role": "system",
        "content": "You are a helpful AI assistant named SmolLM, trained by a team.",
    },
    {"role": "user", "content": "What is the capital of France?"},
]
"""The chat of the first-token measurement: 37 tokens with SmolLM2's template."""
PLAIN_TEXT = "\n\n".join(f"{message['role']}: {message['content']}" for message in CHAT)
"""The same for models that have no chat template."""


class Driver:
    """An engine that can be measured. All times are seconds of wall clock."""

    name = "engine"

    def info(self) -> dict[str, Any]:
        """Version and whatever tells this build from another."""
        raise NotImplementedError

    def load(self, model: str, options: dict[str, Any]) -> dict[str, Any]:
        """Open ``model`` ready for every case; options: num_threads, max_model_len,
        max_num_seqs."""
        raise NotImplementedError

    def prepare(self, case: dict[str, Any]) -> dict[str, Any]:
        """Warm up, and choose the engine's best settings for ``case``; returns the settings."""
        raise NotImplementedError

    def measure(self, case: dict[str, Any], seed: int) -> dict[str, Any]:
        """Run once; returns ``seconds`` and ``tokens``."""
        raise NotImplementedError

    def unload(self) -> dict[str, Any]:
        """Give the model's memory back."""
        raise NotImplementedError

    def first_token(self, model: str, report: Callable[..., None]) -> None:
        """Answer `CHAT` from nothing; calls ``report("loaded")`` and ``report("first_token")``."""
        raise NotImplementedError


def random_tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    """Ordinary token ids: the first few hundred may be special tokens in some vocabularies."""
    rng = random.Random(seed)
    low = min(300, vocab_size // 4)
    return [rng.randrange(low, vocab_size) for _ in range(count)]


def _end_with_parent() -> None:
    """A driver is stopped most of the time: it would outlive a parent that was killed."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _private_stdout() -> TextIO:
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _serve(driver: Driver, answers: TextIO) -> None:
    calls: dict[str, Callable[..., dict[str, Any]]] = {
        "info": driver.info,
        "load": driver.load,
        "prepare": driver.prepare,
        "measure": driver.measure,
        "unload": driver.unload,
    }
    for line in sys.stdin:
        message = json.loads(line)
        try:
            result = calls[message["call"]](**message["args"])
            answer = {"ok": True, "result": result}
        except Exception as error:
            traceback.print_exc()
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


def main(make_driver: Callable[[], Driver]) -> None:
    """Entry point of every driver module: serve calls, or with ``--first-token MODEL`` answer
    once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first-token", metavar="MODEL")
    args = parser.parse_args()
    _end_with_parent()
    answers = _private_stdout()
    if args.first_token is None:
        _serve(make_driver(), answers)
        return

    def report(event: str, **values: Any) -> None:
        answers.write(json.dumps({"event": event, "time": time.time(), **values}) + "\n")

    make_driver().first_token(args.first_token, report)
