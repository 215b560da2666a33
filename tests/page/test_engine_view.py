"""The engine view follows what the engine does."""

from __future__ import annotations

import re

from tests.openai.conftest import ENDLESS_TOKENS, Serve, Server
from tests.page.steps import Open, expect, say, set_field


def test_engine_view_follows_a_generation(slow: Server, open_page: Open) -> None:
    page = open_page(slow)
    set_field(page, "Max tokens", str(ENDLESS_TOKENS - 1000))
    say(page, "go on and on")
    page.get_by_role("link", name="Engine", exact=True).click()
    expect(page.get_by_role("heading", name="Engine")).to_be_visible()
    expect(page.locator("#engine-about")).to_contain_text("llama · context")
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
