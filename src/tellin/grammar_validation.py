"""Checks of structured-output constraints that need no model; a leaf that both halves may import."""

from __future__ import annotations

import msgspec

from tellin.sampling_params import StructuredOutputsParams


def grammar_key(params: StructuredOutputsParams) -> str:
    """Equal for constraints that compile to the same grammar."""
    return msgspec.json.encode(params).decode()
