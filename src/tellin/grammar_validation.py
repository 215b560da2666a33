"""Checks of structured-output constraints that need no model; a leaf for shell and core."""

from __future__ import annotations

import msgspec

from tellin.sampling_params import StructuredOutputsParams


def grammar_key(params: StructuredOutputsParams) -> str:
    """Equal for constraints that compile to the same grammar."""
    return msgspec.json.encode(params).decode()
