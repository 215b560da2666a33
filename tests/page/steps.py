"""What people do on the page, in words of this project: the steps of the tests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

LIMIT_MS = 60_000
Open = Callable[..., "Page"]
"""Opens the page of a server."""


def expect(target: Any) -> Any:
    """Playwright's assertions, which wait for what they state."""
    from playwright.sync_api import expect as playwright_expect

    return playwright_expect(target)


def answer_with(page: Page, text: str, status: int = 200, **headers: str) -> None:
    """Make the server's answer to a chat request up."""

    def fulfill(route: Route) -> None:
        if status != 200:
            route.fulfill(status=status, body=text, headers=headers)
            return
        events = []
        for piece in re.findall(r"(?s).{1,7}", text):
            top = [{"token": t, "logprob": -1.0, "bytes": None} for t in (piece, "<img src=y>")]
            entry = {"token": piece, "logprob": -1.0, "bytes": None, "top_logprobs": top}
            choice = {"index": 0, "delta": {"content": piece}, "logprobs": {"content": [entry]}}
            events.append(json.dumps({"choices": [choice | {"finish_reason": None}]}))
        body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
        route.fulfill(body=body, headers={"Content-Type": "text/event-stream"})

    page.route("**/v1/chat/completions", fulfill)


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def wait_for_answer(page: Page) -> None:
    expect(page.locator(".message.assistant[aria-busy=false] .usage").last).not_to_be_empty()


def set_field(page: Page, label: str, value: str) -> None:
    field = page.get_by_label(f"{label}, as a number")
    field.fill(value)
    field.blur()


def last_answer(page: Page) -> str:
    return page.locator(".message.assistant .text").last.inner_text()
