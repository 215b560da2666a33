"""The page in headless Chromium. Needs the extra `page-test` and a Chromium (Debian: ``apt-get
install chromium``).

All of it is slow. While the browser runs, Playwright keeps an event loop in this thread: no test of
this package may start one of its own.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.openai.conftest import SLOW, Serve, Server, run_server, serve, tiny_model
from tests.page.steps import LIMIT_MS, Open

if TYPE_CHECKING:  # the default tests collect these files without the package
    from playwright.sync_api import Browser, BrowserContext, Page

__all__ = ["serve", "tiny_model"]
HOSTS = "--host-resolver-rules=MAP tellin.test 127.0.0.1"
"""A name that is not this machine's own: browsers trust it less."""
NAMES = ("chromium", "chromium-browser", "google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(600))


def find_chromium() -> str:
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    assert path, "no Chromium found: apt-get install chromium, or set CHROMIUM to its path"
    return path


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import expect as playwright_expect
    from playwright.sync_api import sync_playwright

    playwright_expect.set_options(timeout=LIMIT_MS)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=find_chromium(),
            args=["--no-sandbox", "--disable-dev-shm-usage", HOSTS],
        )
        yield running
        running.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(viewport={"width": 1280, "height": 860}) as made:
        made.set_default_timeout(LIMIT_MS)
        yield made


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


@pytest.fixture(scope="package")
def smollm2(smollm2_path: Path) -> Iterator[Server]:
    """A model that answers sensibly."""
    names = ("--served-model-name", "smollm2", "--allowed-host", "tellin.test")
    with run_server(smollm2_path, *names) as running:
        yield running


@pytest.fixture(scope="package")
def slow(serve: Serve) -> Iterator[Server]:
    """A model that never ends by itself."""
    with serve(*SLOW, "--set", "max_num_seqs=2") as running:
        yield running


@pytest.fixture(scope="module")
def browser_page(browser: Browser, smollm2: Server) -> Iterator[Page]:
    page = browser.new_page()
    page.goto(smollm2.url)
    yield page
    page.close()
