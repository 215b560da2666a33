"""How the page looks and how it is reached: contrast, themes, phone, keyboard, screen reader."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.openai.conftest import Server
from tests.page.steps import Open, answer_with, expect, say, set_field, wait_for_answer

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

COLOURS = (Path(__file__).parent / "colours.js").read_text(encoding="utf-8")
RULES = (Path(__file__).parent / "rules.js").read_text(encoding="utf-8")


def luminance(rgb: list[float]) -> float:
    parts = [c / 255 for c in rgb[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: list[float], other: list[float]) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", ["/", "/#engine"])
def test_contrast(
    smollm2: Server, context: BrowserContext, open_page: Open, scheme: Any, view: str
) -> None:
    """WCAG AA: text 4.5:1, large text 3:1, in both themes and views."""
    page = open_page(smollm2, view)
    page.emulate_media(color_scheme=scheme)
    if view == "/":
        answer_with(page, "Some `code`, a [link](https://example.org), **bold**.\n\n> quote")
        say(page, "Hello")
        wait_for_answer(page)
    expect(page.locator("#pill-text")).to_have_text("idle")
    checked = page.evaluate(COLOURS)
    assert len(checked) > 20
    for text, large, colour, ground in checked:
        assert contrast(colour, ground) >= (3 if large else 4.5), (text, colour, ground)


def test_dark_and_light(smollm2: Server, open_page: Open) -> None:
    page = open_page(smollm2)
    ground = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(ground)
    assert light != dark  # follows the system
    button = page.get_by_role("button", name="Dark theme")
    expect(button).to_have_attribute("aria-pressed", "true")
    button.click()
    assert page.evaluate(ground) == light
    page.reload()
    assert page.evaluate(ground) == light  # remembered
    button.click()
    assert page.evaluate("localStorage.getItem('tellin.theme')") is None  # as the system again


@pytest.mark.parametrize("view", ["/", "/#engine"])
def test_phone_has_no_horizontal_scroll(
    smollm2: Server, open_page: Open, context: BrowserContext, view: str
) -> None:
    page = open_page(smollm2, view)
    page.set_viewport_size({"width": 360, "height": 740})
    if view == "/":
        answer_with(
            page, f"{'long' * 60}\n\n```\n{'x' * 300}\n```\n\n|a|b|\n|-|-|\n|{'c' * 200}|d|"
        )
        say(page, "word " * 60 + "x" * 200)
        wait_for_answer(page)
        page.get_by_role("button", name="Settings", exact=True).click()
        expect(page.get_by_label("System prompt")).to_be_visible()
        page.get_by_role("button", name="Close settings").click()
        expect(page.get_by_label("System prompt")).to_be_hidden()
    expect(page.locator("#pill-text")).to_have_text("idle")
    wide = page.evaluate(
        "[document.scrollingElement, ...document.querySelectorAll('#scroller, #engine-view')]"
        ".filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.id || e.tagName)"
    )
    assert wide == []
    for name in ("Message",) if view == "/" else ():
        box = page.get_by_label(name, exact=True).bounding_box()
        assert box
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
        assert box["y"] + box["height"] <= 740


def test_chat_by_keyboard_alone(smollm2: Server, open_page: Open) -> None:
    page = open_page(smollm2)
    seen: list[str] = []
    for _ in range(40):
        page.keyboard.press("Tab")
        name = page.evaluate(
            "(() => { const e = document.activeElement; return e.id || e.textContent; })()"
        )
        outlined = page.evaluate(
            "(() => { const s = getComputedStyle(document.activeElement);"
            " return s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 1; })()"
        )
        assert outlined, f"{name} has no focus ring"
        seen.append(name)
        if name == "prompt":
            break
    assert seen[0] == "Skip to content"
    assert {"nav-chat", "nav-engine", "theme-button", "view-tokens", "prompt"} <= set(seen)
    page.keyboard.type("What is the capital of France?")
    page.keyboard.press("Enter")
    wait_for_answer(page)
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    reached = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert reached in ("Delete from here on", "Edit")


def violations(page: Page) -> list[str]:
    """What axe-core finds: WCAG 2.2 A and AA, and its best practices."""
    from axe_playwright_python.sync_playwright import Axe

    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
    found = Axe().run(page, options={"runOnly": tags}).response["violations"]
    return [f"{v['id']}: {node['html'][:100]}" for v in found for node in v["nodes"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_axe(smollm2: Server, open_page: Open, width: int, scheme: Any) -> None:
    page = open_page(smollm2)
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    answer_with(page, "# Title\n\nText with `code`\n\n```py\nprint(1)\n```\n\n|a|\n|-|\n|b|\n")
    expect(page.locator("#pill-text")).to_have_text("idle")
    assert violations(page) == []
    say(page, "Hello")
    wait_for_answer(page)
    assert violations(page) == []
    page.get_by_role("button", name="Tokens", exact=True).click()
    page.locator(".token").nth(1).focus()
    expect(page.locator("#token-card")).to_be_visible()
    assert violations(page) == []
    page.get_by_role("button", name="Code").click()
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Engine", exact=True).click()
    expect(page.locator("#tile-kv")).not_to_have_text("\u2013")
    assert violations(page) == []


@pytest.mark.parametrize("width", [1280, 360])
def test_rules_of_accessibility(smollm2: Server, open_page: Open, width: int) -> None:
    """Names, references, landmarks, headings, sizes: in both views, and with dialogs open."""
    page = open_page(smollm2)
    page.set_viewport_size({"width": width, "height": 800})
    answer_with(page, "# Title\n\nText with `code`\n\n```py\nprint(1)\n```\n\n|a|\n|-|\n|b|\n")
    expect(page.locator("#pill-text")).to_have_text("idle")
    assert page.evaluate(RULES) == []
    say(page, "Hello")
    wait_for_answer(page)
    assert page.evaluate(RULES) == []
    page.get_by_role("button", name="Tokens", exact=True).click()
    page.locator(".token").nth(1).hover()
    assert page.evaluate(RULES) == []
    page.get_by_role("button", name="Code").click()
    assert page.evaluate(RULES) == []
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Engine", exact=True).click()
    expect(page.locator("#tile-kv")).not_to_have_text("\u2013")
    assert page.evaluate(RULES) == []


def test_streaming_is_announced_politely(slow: Server, open_page: Open) -> None:
    """A screen reader hears that an answer comes and that it is there, not each token."""
    page = open_page(slow)
    set_field(page, "Max tokens", "60")
    log = page.get_by_role("log", name="Conversation")
    expect(log).to_have_attribute("aria-live", "polite")
    say(page, "Hello")
    message = page.locator(".message.assistant")
    expect(message).to_have_attribute("aria-busy", "true")
    expect(page.locator("#announcer")).to_have_text("The model is answering")
    expect(message).to_have_attribute("aria-busy", "false")
    expect(page.locator("#announcer")).to_have_text(re.compile(r"^The answer is complete: \d+"))


def test_motion_is_reduced_where_asked(slow: Server, open_page: Open) -> None:
    page = open_page(slow)
    page.emulate_media(reduced_motion="reduce")
    page.evaluate("document.getElementById('pill').dataset.state = 'busy'")
    style = "getComputedStyle(document.querySelector('.dot')).animationName"
    assert page.evaluate(style) == "none"
