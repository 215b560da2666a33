"""The page in headless Chromium: what people do with it, by mouse, by keyboard, on a phone.

Needs the extra `page-test` and a Chromium (Debian: ``apt-get install chromium``).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.openai.conftest import ENDLESS_TOKENS, SLOW, Serve, Server, run_server

if TYPE_CHECKING:  # the default tests collect this file without the package
    from playwright.sync_api import Browser, BrowserContext, Page, Route

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAMES = ("chromium", "chromium-browser", "google-chrome")
LIMIT_MS = 60_000
HOSTILE = (
    '<img src=x onerror="window.hacked=1"> **<script>window.hacked=2</script>** '
    "[click](javascript:window.hacked=3) ![x](http://evil.test/pixel.png) "
    '<svg onload="window.hacked=4"> `<b>code</b>` [ok](https://example.org/a?b=1)\n\n'
    "```html\n<iframe srcdoc='<script>parent.hacked=5</script>'></iframe>\n```\n"
)


def expect(target: Any) -> Any:
    """Playwright's assertions, which wait for what they state."""
    from playwright.sync_api import expect as playwright_expect

    return playwright_expect(target)


def find_chromium() -> str:
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    assert path, "no Chromium found: apt-get install chromium, or set CHROMIUM to its path"
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import expect as playwright_expect
    from playwright.sync_api import sync_playwright

    playwright_expect.set_options(timeout=LIMIT_MS)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=find_chromium(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield running
        running.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(viewport={"width": 1280, "height": 860}) as made:
        made.set_default_timeout(LIMIT_MS)
        yield made


Open = Callable[..., "Page"]


@pytest.fixture
def open_page(context: BrowserContext) -> Iterator[Open]:
    """Open the page of a server; at the end the browser must have complained about nothing."""
    complaints: list[str] = []

    def go(server: Server, path: str = "/", *, may_complain: str = "$^") -> Page:
        page = context.new_page()

        def note(text: str) -> None:
            if not re.search(may_complain, text):
                complaints.append(text)

        page.on("pageerror", lambda error: note(str(error)))
        page.on("console", lambda m: note(m.text) if m.type in ("error", "warning") else None)
        page.goto(server.url + path)
        return page

    yield go
    assert not complaints


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[Server]:
    """A model that answers sensibly."""
    with run_server(smollm2_path, "--served-model-name", "smollm2") as running:
        yield running


@pytest.fixture(scope="module")
def slow(serve: Serve) -> Iterator[Server]:
    """A model that never ends by itself."""
    with serve(*SLOW, "--set", "max_num_seqs=2") as running:
        yield running


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


# ---------------------------------------------------------------------- the chat


def test_chat_answers(smollm2: Server, open_page: Open) -> None:
    page = open_page(smollm2)
    expect(page.get_by_role("heading", level=1)).to_have_text("smollm2")
    set_field(page, "Temperature", "0")
    say(page, "What is the capital of France?")
    wait_for_answer(page)
    assert "Paris" in last_answer(page)
    usage = page.locator(".usage").last.inner_text()
    assert re.fullmatch(r"\d+ tokens · [\d.]+ tokens/s · first after .*s · prompt \d+.*", usage)
    expect(page.get_by_role("status").first).to_contain_text("The answer is complete")
    page.reload()  # the conversation is still there
    assert "Paris" in last_answer(page)
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".message")).to_have_count(0)
    page.get_by_role("button", name="Bring the conversation back").click()
    assert "Paris" in last_answer(page)


def test_tokens_show_their_alternatives_on_hover_and_focus(
    smollm2: Server, open_page: Open
) -> None:
    page = open_page(smollm2)
    set_field(page, "Temperature", "0")
    say(page, "What is the capital of France?")
    wait_for_answer(page)
    page.get_by_role("button", name="Tokens", exact=True).click()
    token = page.locator(".token", has_text="Paris").first
    label = token.get_attribute("aria-label") or ""
    assert re.fullmatch(r"␣Paris, [\d.]+ %", label)
    token.hover()
    card = page.locator("#token-card")
    expect(card).to_be_visible()
    expect(card.locator(".card-row")).to_have_count(5)
    expect(card.locator(".card-row.chosen .card-text")).to_have_text("␣Paris")
    shares = [row.inner_text() for row in card.locator(".card-p").all()]
    values = [float(text.strip("< %")) for text in shares]
    assert values == sorted(values, reverse=True)
    page.mouse.move(0, 0)
    expect(card).to_be_hidden()

    page.get_by_role("listbox").press("Home")
    page.locator(".token").first.focus()
    expect(card).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token").nth(1)).to_be_focused()
    assert page.locator(".token:focus").get_attribute("aria-describedby") == "token-card"
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(card.locator("button").first).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".token").nth(2)).to_be_focused()


def test_an_alternative_can_be_taken(smollm2: Server, open_page: Open) -> None:
    page = open_page(smollm2)
    set_field(page, "Temperature", "0")
    set_field(page, "Max tokens", "12")
    say(page, "Name a colour.")
    wait_for_answer(page)
    page.get_by_role("button", name="Tokens", exact=True).click()
    before = page.locator(".token").all_inner_texts()
    page.locator(".token").nth(2).focus()
    page.keyboard.press("Enter")
    chosen = page.locator("#token-card button").first.locator(".card-text").inner_text()
    page.keyboard.press("Enter")
    wait_for_answer(page)
    after = page.locator(".token").all_inner_texts()
    assert after[:2] == before[:2]
    assert (page.locator(".token").nth(2).get_attribute("aria-label") or "").startswith(chosen)
    assert after[2] != before[2]
    assert len(after) > 3
    expect(page.locator(".token").nth(2)).to_be_focused()  # where the keyboard was
    page.get_by_role("button", name="Text", exact=True).click()
    assert last_answer(page).replace(" ", "").startswith("".join(after[:3]).replace(" ", ""))


def test_stop_stops_the_engine(slow: Server, open_page: Open) -> None:
    page = open_page(slow)
    set_field(page, "Max tokens", str(ENDLESS_TOKENS - 1000))
    say(page, "go on")
    expect(page.locator("#pill")).to_contain_text("1 running")
    expect(page.locator(".message.assistant .usage").last).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator("#pill-text")).to_have_text("idle")
    assert slow.http.get("/engine/state").json()["core"]["num_running"] == 0
    assert slow.http.get("/engine/state").json()["core"]["blocks"]["num_used"] == 0
    expect(page.locator(".message .notice").last).to_have_text("Stopped.")
    say(page, "again")
    expect(page.locator("#pill")).to_contain_text("1 running")
    page.get_by_label("Message", exact=True).press("Escape")
    expect(page.locator("#pill-text")).to_have_text("idle")
    say(page, "and once more")
    expect(page.locator("#pill")).to_contain_text("1 running")
    page.close()  # nobody reads any more
    state = slow.http.get("/engine/state").json()
    while state["core"]["num_running"]:  # bounded by the test's own limit
        state = slow.http.get("/engine/state").json()


def test_settings_reach_the_request(smollm2: Server, open_page: Open) -> None:
    page = open_page(smollm2)
    bodies: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda r: bodies.append(r.post_data_json) if r.url.endswith("/completions") else None,
    )
    page.get_by_label("System prompt").fill("Answer in one word.")
    set_field(page, "Temperature", "0")
    set_field(page, "Top k", "20")
    set_field(page, "Max tokens", "7")
    page.get_by_label("Seed").fill("42")
    page.get_by_label("Seed").blur()
    say(page, "Hello")
    wait_for_answer(page)
    (body,) = bodies
    assert body["messages"] == [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Hello"},
    ]
    sampling = {"temperature": 0, "top_k": 20, "max_tokens": 7, "seed": 42}
    assert {name: body.get(name) for name in sampling} == sampling
    assert not {"top_p", "min_p", "repetition_penalty"} & set(body)  # left on auto: not sent
    page.reload()
    assert page.get_by_label("Top k, as a number").input_value() == "20"
    page.get_by_role("button", name="Reset all").click()
    assert page.get_by_label("Top k, as a number").input_value() == ""
    assert page.get_by_label("System prompt").input_value() == ""


def test_edit_again_and_delete(smollm2: Server, open_page: Open) -> None:
    page = open_page(smollm2)
    set_field(page, "Temperature", "0")
    set_field(page, "Max tokens", "24")
    say(page, "What is the capital of France?")
    wait_for_answer(page)
    first = last_answer(page)
    page.get_by_role("button", name="Answer again").click()
    wait_for_answer(page)
    assert last_answer(page) == first  # greedy
    page.get_by_role("button", name="Answer again").press("Enter")
    expect(page.locator("#prompt")).to_be_focused()  # the button that had the focus is gone
    wait_for_answer(page)
    question = page.locator(".message.user")
    question.hover()
    question.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("What is the capital of Italy?")
    page.get_by_role("button", name="Save and answer").click()
    wait_for_answer(page)
    assert last_answer(page) != first
    expect(question).to_contain_text("Italy")
    expect(page.locator(".message")).to_have_count(2)
    page.get_by_role("button", name="Edit").last.click()
    page.get_by_label("Edit the message").fill("My own words")
    page.get_by_role("button", name="Save", exact=True).click()
    assert last_answer(page) == "My own words"
    page.get_by_role("button", name="Continue this answer").click()
    wait_for_answer(page)
    assert last_answer(page).startswith("My own words")
    page.locator(".message.assistant").get_by_role("button", name="Delete from here on").click()
    expect(page.locator(".message")).to_have_count(1)


def test_code_runs(smollm2: Server, open_page: Open) -> None:
    """What "Code" shows is a program that works."""
    page = open_page(smollm2)
    page.get_by_label("System prompt").fill("It's \"quoted\" \\ 'twice' $HOME `id`")
    set_field(page, "Temperature", "0")
    set_field(page, "Min p", "0.1")
    set_field(page, "Max tokens", "5")
    page.get_by_label("Message", exact=True).fill("What's up?\nNew line \U0001f600")
    page.get_by_role("button", name="Code").click()
    shell = page.locator("#code-text").inner_text()
    page.get_by_role("button", name="Python").click()
    program = page.locator("#code-text").inner_text()
    assert "min_p" in program.partition("extra_body")[2]
    environment = os.environ | {"PYTHONWARNINGS": "default"}
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    sent = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=120)
    answer = json.loads(sent.stdout)
    assert answer["choices"][0]["message"]["content"].strip() == ran.stdout.strip()
    page.keyboard.press("Escape")
    expect(page.locator("#code-dialog")).to_be_hidden()


# ---------------------------------------------------------------------- hostile text, errors, keys


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


# ---------------------------------------------------------------------- the engine


def test_engine_view_follows_a_generation(slow: Server, open_page: Open) -> None:
    page = open_page(slow)
    set_field(page, "Max tokens", str(ENDLESS_TOKENS - 1000))
    say(page, "go on and on")
    page.get_by_role("link", name="Engine", exact=True).click()
    expect(page.get_by_role("heading", name="Engine")).to_be_visible()
    expect(page.locator("#tile-running")).to_have_text("1")
    row = page.locator("#request-rows tr")
    expect(row).to_have_count(1)
    expect(row.locator(".state")).to_have_text("decode")
    tokens = row.locator(".col-output")
    before = tokens.inner_text()
    expect(tokens).not_to_have_text(before)  # it goes on
    expect(page.locator("#tile-output")).not_to_have_text("0")
    expect(page.locator("#count-block-used")).not_to_have_text("0")
    expect(page.locator("#timeline-note")).to_contain_text("decode")
    expect(page.locator("#step-note")).to_contain_text("steps, up to")
    label = page.locator("#block-map").get_attribute("aria-label") or ""
    assert re.search(r"\d+ free, \d+ cached, [1-9]\d* used", label)
    drawn = """(id) => {
        const canvas = document.getElementById(id);
        const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return new Set(new Uint32Array(data.buffer)).size;
    }"""
    for canvas in ("block-map", "timeline", "step-bars", "spark-output"):
        assert page.evaluate(drawn, canvas) >= 2, canvas
    page.get_by_role("link", name="Chat", exact=True).click()
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("link", name="Engine", exact=True).click()
    expect(page.locator("#tile-running")).to_have_text("0")
    expect(page.locator("#no-requests")).to_be_visible()
    expect(page.locator("#count-block-used")).to_have_text("0")


def test_map_takes_a_hundred_thousand_blocks(smollm2: Server, open_page: Open) -> None:
    page = open_page(smollm2)
    result = page.evaluate(
        """async () => {
        const {decodeRuns, fit, usedExtent, BlockMap} = await import("/page/blocks.js");
        const states = decodeRuns("50000u25000s5000c20000f");
        const canvas = document.createElement("canvas");
        canvas.style.cssText = "width: 900px; height: 176px; display: block";
        document.body.append(canvas);
        const map = new BlockMap(canvas);
        const start = performance.now();
        map.draw(states, states.length);
        const {columns, cell, perCell, numCells} = map.layout;
        const first = map.at(1, 1);
        const layout = fit(100000, 900, 176);
        return {length: states.length, ms: performance.now() - start, columns, cell, perCell,
                numCells, first, extent: usedExtent(states),
                rows: Math.ceil(layout.numCells / layout.columns) * (layout.cell + 1)};
    }"""
    )
    assert result["length"] == 100_000
    assert result["perCell"] > 1
    assert result["perCell"] * result["numCells"] >= 100_000
    assert result["columns"] * (result["cell"] + 1) <= 900 + 1
    assert result["rows"] <= 176 + 1
    assert result["extent"] == 80_000
    assert result["first"]["counts"] == [0, 0, result["perCell"], 0]
    assert result["ms"] < 1000


def test_the_page_comes_back_when_the_server_does(serve: Serve, open_page: Open) -> None:
    with serve() as server:
        page = open_page(server, "/#engine", may_complain="Failed to load resource")
        expect(page.locator("#pill-text")).to_have_text("idle")
    expect(page.locator("#pill-text")).to_have_text("server not reached")
    expect(page.locator("#engine-lost")).to_be_visible()
    port = server.url.rpartition(":")[2]
    with serve("--port", port):
        expect(page.locator("#pill-text")).to_have_text("idle")
        expect(page.locator("#engine-lost")).to_be_hidden()


# ---------------------------------------------------------------------- how it looks and is reached


def luminance(rgb: list[float]) -> float:
    parts = [c / 255 for c in rgb[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: list[float], other: list[float]) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


COLOURS = """() => {
    // Every colour through a canvas pixel, so that all notations become numbers.
    const context = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
    const paint = (colours) => {
        context.clearRect(0, 0, 1, 1);
        for (const colour of colours) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }
        return [...context.getImageData(0, 0, 1, 1).data];
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node; (node = walker.nextNode());) {
        const element = node.parentElement;
        if (!node.data.trim() || !element.checkVisibility({visibilityProperty: true})) continue;
        if (element.closest(".sr, .skip, :disabled, noscript, option, svg")) continue;
        const layers = [];
        for (let e = element; e; e = e.parentElement) {
            layers.unshift(getComputedStyle(e).backgroundColor);
        }
        const style = getComputedStyle(element);
        const size = parseFloat(style.fontSize);
        const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
        const text = node.data.trim().slice(0, 40);
        found.push([text, large, paint([...layers, style.color]), paint(layers)]);
    }
    return found;
}"""


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


RULES = """() => {
    const faults = [];
    const visible = (e) => e.checkVisibility({visibilityProperty: true});
    const named = (e) => {
        const by = (e.getAttribute("aria-labelledby") ?? "").split(/\\s+/).filter(Boolean);
        const labels = [...(e.labels ?? [])].map((l) => l.textContent);
        labels.push(...by.map((id) => document.getElementById(id)?.textContent));
        const texts = [e.getAttribute("aria-label"), ...labels, e.textContent, e.title];
        return texts.some((text) => text?.trim());
    };
    const wanted = "button, a, input, textarea, select, canvas, dialog, [role]";
    for (const e of document.querySelectorAll(wanted)) {
        if (e.matches("[aria-hidden=true], [role=status], [role=alert]")) continue;
        if (visible(e) && !named(e)) faults.push(`no name: ${e.outerHTML.slice(0, 80)}`);
    }
    const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
    if (ids.length !== new Set(ids).size) faults.push(`an id is there twice: ${ids}`);
    for (const name of ["aria-labelledby", "aria-describedby", "aria-controls", "for"]) {
        for (const e of document.querySelectorAll(`[${name}]`)) {
            for (const id of e.getAttribute(name).split(/\\s+/)) {
                if (!document.getElementById(id)) faults.push(`${name} names no element: ${id}`);
            }
        }
    }
    if (document.querySelector("[tabindex]:not([tabindex='0'], [tabindex='-1'])")) {
        faults.push("tabindex > 0");
    }
    if (!document.documentElement.lang) faults.push("no language");
    const landmarks = [...document.querySelectorAll("main")].filter(visible).length;
    if (landmarks !== 1) faults.push(`${landmarks} main landmarks`);
    const headings = [...document.querySelectorAll("h1,h2,h3,h4,h5,h6")].filter(visible);
    if (headings.filter((e) => e.tagName === "H1").length !== 1) faults.push("not one h1");
    let level = 0;
    for (const e of headings) {
        const own = Number(e.tagName[1]);
        if (own > level + 1) faults.push(`heading level jumps to ${own}: ${e.textContent}`);
        level = own;
    }
    for (const e of document.querySelectorAll("button, a.pill, nav a, input, select")) {
        const box = e.getBoundingClientRect();
        const hidden = !visible(e) || e.closest(".sr, .skip") || e.type === "range";
        const small = box.width < 20 || box.height < 20;
        if (!hidden && small) faults.push(`too small: ${e.outerHTML.slice(0, 80)}`);
    }
    for (const e of document.querySelectorAll("[role=option]")) {
        if (!e.closest("[role=listbox]")) faults.push("option outside a listbox");
    }
    return faults;
}"""


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


# ---------------------------------------------------------------------- Markdown


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


@pytest.fixture(scope="module")
def browser_page(browser: Browser, smollm2: Server) -> Iterator[Page]:
    page = browser.new_page()
    page.goto(smollm2.url)
    yield page
    page.close()
