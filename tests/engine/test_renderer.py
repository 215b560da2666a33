"""Where prompts are rendered: short ones at once, long ones in a thread."""

from __future__ import annotations

from typing import Any

import pytest

from tellin.engine.renderer import INLINE_CHARS, _is_short

LONG = "x" * (INLINE_CHARS + 1)


@pytest.mark.parametrize(
    "part",
    [
        LONG,
        [LONG],
        [{"role": "user", "content": [{"type": "text", "text": LONG}]}],
        {"parameters": {"properties": {LONG: {"type": "integer"}}}},  # templates show names, too
        dict.fromkeys(range(INLINE_CHARS + 1)),
        list(range(INLINE_CHARS + 1)),
        {"a": "x" * INLINE_CHARS},
    ],
)
def test_long_parts_do_not_hold_up_the_event_loop(part: Any) -> None:
    assert not _is_short("a", part)


@pytest.mark.parametrize(
    "part", ["x" * INLINE_CHARS, [{"role": "user", "content": "hi"}], {"a": {"b": [1, None]}}, None]
)
def test_short_parts_are_rendered_at_once(part: Any) -> None:
    assert _is_short(part)
