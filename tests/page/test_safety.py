"""Hostile text, errors, keys: nothing runs, nothing is hidden, nothing leaks."""

from __future__ import annotations

import pytest

from tests.openai.conftest import Serve, Server
from tests.page.steps import Open, answer_with, expect, say, set_field, wait_for_answer

HOSTILE = (
    '<img src=x onerror="window.hacked=1"> **<script>window.hacked=2</script>** '
    "[click](javascript:window.hacked=3) ![x](http://evil.test/pixel.png) "
    '<svg onload="window.hacked=4"> `<b>code</b>` [ok](https://example.org/a?b=1)\n\n'
    "```html\n<iframe srcdoc='<script>parent.hacked=5</script>'></iframe>\n```\n"
)


@pytest.mark.parametrize("view", ["Text", "Tokens"])
def test_hostile_text_stays_text(smollm2: Server, open_page: Open, view: str) -> None:
    """<img src=x onerror=...> in the question, the answer, the alternatives: nothing runs."""
    page = open_page(smollm2)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    answer_with(page, HOSTILE)
    page.get_by_role("button", name=view, exact=True).click()
    say(page, HOSTILE)
    wait_for_answer(page)
    shown = page.locator(".message.assistant")
    expect(shown).to_contain_text("onerror=")
    if view == "Tokens":
        page.locator(".token").nth(3).hover()
        expect(page.locator("#token-card")).to_contain_text("<img src=y>")
    else:
        expect(shown.locator("code").first).to_have_text("<b>code</b>")
        links = [a.get_attribute("href") for a in shown.locator("a").all()]
        assert links == ["http://evil.test/pixel.png", "https://example.org/a?b=1"]
    assert page.locator(":is(.message, .card) :is(img, script, iframe, svg[onload])").count() == 0
    assert page.evaluate("window.hacked") is None
    assert all(url.startswith(smollm2.url) for url in asked)


def test_policy_forbids_markup_and_foreign_scripts(smollm2: Server, open_page: Open) -> None:
    """Even a bug could not turn text into markup: the browser refuses."""
    page = open_page(smollm2, may_complain="TrustedHTML|Content Security Policy|Refused")
    error = page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>'; return ''; } "
        "catch (e) { return e.name; } }"
    )
    assert error == "TypeError"
    page.evaluate(
        "() => { const s = document.createElement('img'); s.src = 'http://evil.test/x.png';"
        " document.body.append(s); }"
    )
    page.wait_for_timeout(200)
    assert page.evaluate("document.querySelector('img').naturalWidth") == 0


@pytest.mark.parametrize(
    ("status", "body", "headers", "shown"),
    [
        (400, '{"error": {"message": "top_k <b>is</b> wrong"}}', {}, "Top_k <b>is</b> wrong"),
        (429, '{"error": {"message": "full"}}', {"Retry-After": "3"}, "busy. It asks to wait 3 s."),
        (503, '{"error": {"message": "shutting down"}}', {}, "Shutting down"),
        (502, "<html>Bad gateway</html>", {}, "The server answered 502"),
    ],
)
def test_errors_are_shown(
    smollm2: Server, open_page: Open, status: int, body: str, headers: dict[str, str], shown: str
) -> None:
    page = open_page(smollm2, may_complain="Failed to load resource")
    answer_with(page, body, status, **headers)
    say(page, "Hello")
    notice = page.locator(".message .notice.fault").last
    expect(notice).to_contain_text(shown)
    page.unroute("**/v1/chat/completions")
    notice.get_by_role("button", name="Try again").click()
    wait_for_answer(page)
    expect(page.locator(".message .notice.fault:visible")).to_have_count(0)


def test_a_refused_parameter_is_explained(smollm2: Server, open_page: Open) -> None:
    page = open_page(smollm2, may_complain="Failed to load resource")
    set_field(page, "Temperature", "-3")
    say(page, "Hello")
    expect(page.locator(".message .notice.fault").last).to_contain_text("emperature")


def test_api_key(serve: Serve, open_page: Open) -> None:
    with serve("--api-key", "secret") as server:
        page = open_page(server, may_complain="Failed to load resource")
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_be_visible()
        page.get_by_label("Key", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("did not take this key")
        page.get_by_label("Key", exact=True).fill("secret")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator("#pill-text")).to_have_text("idle")
        set_field(page, "Max tokens", "5")
        say(page, "Hello")
        wait_for_answer(page)
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
        assert "secret" in page.evaluate("JSON.stringify(sessionStorage)")
        page.get_by_role("button", name="Code").click()
        code = page.locator("#code-text").inner_text()
        assert "secret" not in code
        assert "$TELLIN_API_KEY" in code
