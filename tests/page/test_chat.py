"""The chat: answers, stop, tokens, settings, editing, the request as code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

from tests.openai.conftest import ENDLESS_TOKENS, Server
from tests.page.steps import Open, expect, last_answer, say, set_field, wait_for_answer


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
    assert re.fullmatch(r"Paris, [\d.]+ %", label)
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
    chosen = page.locator("#token-card button").first.locator(".card-text").inner_text().strip("␣")
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


def test_copies_over_plain_http_from_another_machine(smollm2: Server, open_page: Open) -> None:
    """Browsers keep their clipboard from pages that are neither local nor encrypted."""
    url = smollm2.url.replace("127.0.0.1", "tellin.test")
    page = open_page(replace(smollm2, url=url))
    assert page.evaluate("isSecureContext") is False
    page.get_by_role("button", name="Code").click()
    page.locator("#code-copy").click()
    expect(page.locator("#code-copy")).to_have_text("Copied")
    page.keyboard.press("Escape")
    page.locator("#prompt").focus()
    page.keyboard.press("Control+V")
    assert page.locator("#prompt").input_value().startswith(f"curl {url}/v1/chat/completions")
    set_field(page, "Max tokens", "5")
    say(page, "Hello")
    wait_for_answer(page)


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
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    sent = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=120)
    answer = json.loads(sent.stdout)
    assert answer["choices"][0]["message"]["content"].strip() == ran.stdout.strip()
    page.keyboard.press("Escape")
    expect(page.locator("#code-dialog")).to_be_hidden()
