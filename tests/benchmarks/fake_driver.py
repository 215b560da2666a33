"""An engine whose speed is known: ``python -m tests.benchmarks.fake_driver TOKENS_PER_S [FAULT]``.

FAULT: ``load`` or ``prefill`` fails there with an error; ``die`` ends the process in a measurement.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.drivers.base import Driver, main


class FakeDriver(Driver):
    def __init__(self, tokens_per_s: float, fault: str) -> None:
        self._tokens_per_s = tokens_per_s
        self._fault = fault

    def info(self) -> dict[str, Any]:
        print("an engine that talks on stdout")
        return {"version": "1.0", "pid": os.getpid()}

    def load(self, model: str, options: dict[str, Any]) -> dict[str, Any]:
        if self._fault == "load":
            raise ValueError(f"cannot open {model}")
        return {"seconds": 0.5}

    def prepare(self, case: dict[str, Any]) -> dict[str, Any]:
        return {"chosen": case["kind"]}

    def measure(self, case: dict[str, Any], seed: int) -> dict[str, Any]:
        if self._fault == "die":
            os._exit(3)
        if self._fault == case["kind"]:
            raise RuntimeError(f"no {case['kind']} today")
        tokens = case["num_tokens"] or case["steps"] * case["streams"]
        # Rounds differ: the median of rounds 1, 2, 3 is that of round 2, the nominal speed.
        return {"seconds": tokens / self._tokens_per_s * seed / 2, "tokens": tokens}

    def first_token(self, model: str, report: Callable[..., None]) -> None:
        report("loaded")
        report("first_token")


if __name__ == "__main__":
    speed = float(sys.argv.pop(1))
    fault = sys.argv.pop(1) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else ""
    main(lambda: FakeDriver(speed, fault))
