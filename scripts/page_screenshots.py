"""Take the screenshots of the page that the documentation shows, from a real model under load.

    python scripts/page_screenshots.py        (needs the extra page-test and a Chromium)

Starts a server with SmolLM2, talks to it as a user does, and gives it company for the engine view.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

DOCS = Path(__file__).resolve().parent.parent / "docs"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
SIZE = {"width": 1200, "height": 800}
NUM_CLIENTS = 11
LOAD_S = 26
SUBJECTS = ("shells", "tides", "ferns", "beetles", "comets")
GUIDE = "You are a patient guide in a museum of natural history. Answer simply and kindly. " * 24


@contextlib.contextmanager
def running_server() -> Iterator[str]:
    """A server's URL."""
    command = [sys.executable, "-m", "tellin.entrypoints.cli", "serve", "smollm2", "--port", "0"]
    options = ["--set", "num_kv_blocks=4096", "--set", "max_num_seqs=8"]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            if line.startswith("  page"):
                url = line.split()[1]
            if line.startswith("  memory"):
                break
        drain = threading.Thread(target=process.stderr.read, daemon=True)
        drain.start()
        try:
            yield url
        finally:
            process.terminate()


def converse(url: str, number: int, stop: threading.Event) -> None:
    """One client: questions of various lengths, half of them behind a common system prompt."""
    choose = random.Random(number)
    while not stop.wait(choose.random()):
        question = f"Tell me about {choose.choice(SUBJECTS)}. " * choose.choice((1, 4, 40))
        messages = [{"role": "user", "content": question}]
        if number % 2:
            messages.insert(0, {"role": "system", "content": GUIDE})
        body = {
            "messages": messages,
            "max_tokens": choose.choice((40, 160, 320)),
            "ignore_eos": True,
            "seed": number,
        }
        request = urllib.request.Request(
            f"{url}v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with contextlib.suppress(OSError), urllib.request.urlopen(request) as answer:
            answer.read()


def take_chat(page: Page, path: Path) -> None:
    """A short answer, its tokens, and the alternatives of one of them."""
    page.get_by_label("Temperature, as a number").fill("0")
    page.get_by_label("Temperature, as a number").blur()
    page.get_by_label("Max tokens, as a number").fill("96")
    page.get_by_label("Max tokens, as a number").blur()
    page.get_by_label("Message", exact=True).fill("What is the capital of France?")
    page.keyboard.press("Enter")
    page.locator(".message.assistant[aria-busy=false]").wait_for()
    page.get_by_label("Message", exact=True).fill("Why do seashells have ridges?")
    page.keyboard.press("Enter")
    page.locator(".message.assistant[aria-busy=false]").nth(1).wait_for()
    page.get_by_role("button", name="Tokens", exact=True).click()
    surprising = max(
        range(4, 40),
        key=lambda i: float(
            page.locator(".message")
            .last.locator(".token")
            .nth(i)
            .evaluate("(e) => e.style.getPropertyValue('--surprise')")
        ),
    )
    page.locator(".message").last.locator(".token").nth(surprising).hover()
    page.locator("#token-card").wait_for()
    page.screenshot(path=path)


def take_engine(page: Page, url: str, path: Path) -> None:
    """The engine while it serves several clients."""
    stop = threading.Event()
    clients = [
        threading.Thread(target=converse, args=(url, number, stop), daemon=True)
        for number in range(NUM_CLIENTS)
    ]
    page.mouse.move(0, 0)
    page.get_by_role("link", name="Engine", exact=True).click()
    for client in clients:
        client.start()
    page.wait_for_timeout(LOAD_S * 1000)
    page.set_viewport_size({"width": SIZE["width"], "height": 1120})
    page.wait_for_timeout(1200)
    page.screenshot(path=path)
    stop.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=DOCS, help="where the pictures go")
    parser.add_argument("--dark", action="store_true", help="in dark colours")
    args = parser.parse_args()
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM)), None)
    if found is None:
        sys.exit("no Chromium found: apt-get install chromium, or set CHROMIUM to its path")
    scheme = "dark" if args.dark else "light"
    with sync_playwright() as playwright, running_server() as url:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme=scheme)  # type: ignore[arg-type]
        page.goto(url)
        take_chat(page, args.folder / "page-chat.png")
        take_engine(page, url, args.folder / "page-engine.png")
        browser.close()


if __name__ == "__main__":
    main()
