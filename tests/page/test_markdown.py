"""Markdown: what it becomes, and what hostile text cannot make of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.mark.parametrize(
    ("source", "selector", "text"),
    [
        ("a **b** c", "p strong", "b"),
        ("a *b* and _c_", "p em", "b"),
        ("snake_case_name and 2*3*4", "p", "snake_case_name and 2*3*4"),
        ("`a *b*`", "p code", "a *b*"),
        ("# Head", "h3", "Head"),
        ("- one\n- two\n  - in two", "ul li ul li", "in two"),
        ("3. three\n4. four", "ol[start='3'] li", "three"),
        ("```py\nx = 1\n\n# no heading\n```", "figure.code code", "x = 1\n\n# no heading"),
        ("```\nunfinished <b>", "figure.code code", "unfinished <b>"),
        ("> quote\n> goes on", "blockquote p", "quote goes on"),
        ("| a | b |\n|---|---|\n| 1 | 2 |", "td", "1"),
        ("see https://example.org/x.", "a", "https://example.org/x"),
        ("[x](data:text/html,hi)", "p", "[x](data:text/html,hi)"),
        ("~~gone~~", "del", "gone"),
        ("---", "hr", ""),
        ("**unfinished", "p", "**unfinished"),
    ],
)
def test_markdown(browser_page: Page, source: str, selector: str, text: str) -> None:
    script = """async ([source, selector]) => {
        const {MarkdownView} = await import("/page/markdown.js");
        const whole = document.createElement("div");
        new MarkdownView(whole).update(source);
        const grown = document.createElement("div");
        const view = new MarkdownView(grown);
        for (let i = 1; i <= source.length; i += 1) view.update(source.slice(0, i));
        return [whole.querySelector(selector)?.textContent, grown.isEqualNode(whole)];
    }"""
    found, same = browser_page.evaluate(script, [source, selector])
    assert found is not None
    assert " ".join(found.split()) == " ".join(text.split())
    assert same, "built piece by piece it differs from built at once"


HOSTILE_UNITS = (
    "_a ",
    "**a ",
    "`a ",
    "[a",
    "~~a ",
    "| a ",
    "> ",
    "- ",
    "*",
    "**_",
    "  - a\n ",
    "(",
)


@pytest.mark.parametrize("unit", HOSTILE_UNITS)
def test_markdown_takes_hostile_lengths(browser_page: Page, unit: str) -> None:
    """Thousands of opening marks neither hang the page nor overflow its stack; no text is lost."""
    script = """async (source) => {
        const {MarkdownView} = await import("/page/markdown.js");
        const element = document.createElement("div");
        const start = performance.now();
        new MarkdownView(element).update(source);
        return [performance.now() - start, (element.textContent.match(/a/g) ?? []).length];
    }"""
    milliseconds, num_letters = browser_page.evaluate(script, unit * 6000)
    assert milliseconds < 20_000
    assert num_letters == (unit * 6000).count("a")
