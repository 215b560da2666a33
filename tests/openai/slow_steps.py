"""A logits processor that makes each step take its time, so that a request outlives its test."""

from __future__ import annotations

import time
from typing import Any

from tellin.logits_processor import LogitsProcessor

STEP_S = 0.005


class SlowSteps(LogitsProcessor):
    def apply(self, logits: Any) -> Any:
        time.sleep(STEP_S)
        return logits

    def is_argmax_invariant(self) -> bool:
        return False
