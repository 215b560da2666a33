"""Pictures in the chat: chosen, pasted, dropped, sent, shown, edited; and as code."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from tests.models.vision import write_smolvlm
from tests.openai.conftest import Server, run_server
from tests.page.steps import Open, expect, set_field, wait_for_answer

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_smolvlm(tmp_path_factory.mktemp("models") / "smolvlm")
    limits = ("--max-model-len", "512", "--set", "num_kv_blocks=128")
    with run_server(model, "--served-model-name", "eyes", *limits) as running:
        yield running


def png(seed: int) -> bytes:
    pixels = np.random.RandomState(seed).randint(0, 256, (24, 40, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def choose(page: Page, *files: tuple[str, str, bytes]) -> None:
    expect(page.get_by_role("button", name="Add pictures")).to_be_visible()
    page.locator("#picture-input").set_input_files(
        [{"name": name, "mimeType": kind, "buffer": data} for name, kind, data in files]
    )


def hand_over(page: Page, event: str, target: str, data: bytes) -> None:
    """Paste or drop a picture."""
    page.evaluate(
        """([event, target, text]) => {
          const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
          const data = new DataTransfer();
          data.items.add(new File([bytes], `${event}.png`, { type: "image/png" }));
          const options = { bubbles: true, cancelable: true };
          const made = event === "paste"
            ? new ClipboardEvent("paste", { ...options, clipboardData: data })
            : new DragEvent("drop", { ...options, dataTransfer: data });
          document.querySelector(target).dispatchEvent(made);
        }""",
        [event, target, base64.b64encode(data).decode()],
    )


def bodies_of(page: Page) -> list[dict[str, Any]]:
    bodies: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda r: bodies.append(r.post_data_json) if r.url.endswith("/completions") else None,
    )
    return bodies


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()
    wait_for_answer(page)


def test_a_picture_is_sent_and_shown(eyes: Server, open_page: Open) -> None:
    page = open_page(eyes)
    bodies = bodies_of(page)
    set_field(page, "Max tokens", "4")
    set_field(page, "Temperature", "0")
    choose(page, ("cat.png", "image/png", png(1)), ("dog.png", "image/png", png(2)))
    attached = page.get_by_role("list", name="Pictures for the message")
    expect(attached.get_by_role("img")).to_have_count(2)
    page.get_by_role("button", name="Remove dog.png").click()
    expect(attached.get_by_role("img")).to_have_count(1)
    hand_over(page, "paste", "#prompt", png(3))
    hand_over(page, "drop", "#log", png(4))
    expect(attached.get_by_role("img")).to_have_count(3)
    send(page, "What is it?")
    expect(attached).to_be_hidden()
    (body,) = bodies
    *images, text = body["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is it?"}
    sent = [image["image_url"]["url"].partition(",") for image in images]
    assert {start for start, _, _ in sent} == {"data:image/png;base64"}
    assert [base64.b64decode(data) for _, _, data in sent] == [png(1), png(3), png(4)]
    shown = page.locator(".message.user .pictures img")
    assert [image.get_attribute("alt") for image in shown.all()] == [
        "cat.png", "paste.png", "drop.png",
    ]  # fmt: skip
    assert shown.first.evaluate("it => it.naturalWidth") == 40
    expect(page.locator(".message .notice.fault")).to_have_count(0)

    page.reload()  # pictures are kept with the conversation
    expect(shown).to_have_count(3)
    question = page.locator(".message.user")
    question.hover()
    question.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("And now?")
    page.get_by_role("button", name="Save and answer").click()
    wait_for_answer(page)
    assert bodies[-1]["messages"][0]["content"][:-1] == images
    assert bodies[-1]["messages"][0]["content"][-1]["text"] == "And now?"


def test_a_picture_without_words(eyes: Server, open_page: Open) -> None:
    page = open_page(eyes)
    bodies = bodies_of(page)
    set_field(page, "Max tokens", "2")
    choose(page, ("cat.png", "image/png", png(1)))
    send(page, "")
    assert [part["type"] for part in bodies[0]["messages"][0]["content"]] == ["image_url"]
    expect(page.locator(".message.user .text")).to_be_hidden()


def test_files_that_are_no_pictures(eyes: Server, open_page: Open) -> None:
    page = open_page(eyes)
    choose(page, ("notes.txt", "text/plain", b"hello"))
    expect(page.locator("#announcer")).to_have_text(
        "notes.txt is no picture of a kind that is taken"
    )
    expect(page.locator("#attached li")).to_have_count(0)


def test_pictures_that_are_too_large_to_keep(eyes: Server, open_page: Open) -> None:
    """The tab's storage is a few megabytes: the text is kept, and what is missing is said."""
    page = open_page(eyes, may_complain="400|broken")
    choose(page, ("large.png", "image/png", png(1) + bytes(4 << 20)))
    page.get_by_label("Message", exact=True).fill("Large?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".message.assistant[aria-busy=false]")).to_have_count(1)
    page.reload()
    expect(page.locator(".message.user .text")).to_have_text("Large?")
    expect(page.locator(".message.user .lost")).to_have_text("1 picture not kept: too large")


def test_a_text_model_is_offered_no_pictures(slow: Server, open_page: Open) -> None:
    page = open_page(slow)
    expect(page.locator("#pill-text")).to_have_text("idle")
    expect(page.get_by_role("button", name="Add pictures")).to_be_hidden()
    hand_over(page, "paste", "#prompt", png(1))
    expect(page.locator("#attached li")).to_have_count(0)


def test_code_reads_the_file(eyes: Server, open_page: Open, tmp_path: Path) -> None:
    """Its name is in the code, not its bytes; both programs run."""
    name = "it's a cat.png"
    (tmp_path / name).write_bytes(png(1))
    page = open_page(eyes)
    set_field(page, "Temperature", "0")
    set_field(page, "Max tokens", "4")
    choose(page, (name, "image/png", png(1)))
    send(page, "Costs $5 `or` \\ so?")
    page.get_by_role("button", name="Code").click()
    shell = page.locator("#code-text").inner_text()
    page.get_by_role("button", name="Python").click()
    program = page.locator("#code-text").inner_text()
    assert max(len(shell), len(program)) < 1500
    options: Any = {"capture_output": True, "text": True, "timeout": 120, "cwd": tmp_path}
    sent = subprocess.run(["sh", "-c", shell], **options)
    expected = json.loads(sent.stdout)["choices"][0]["message"]["content"]
    ran = subprocess.run([sys.executable, "-c", program], **options)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == expected.strip()
