"""Documentation is checked: links lead somewhere, named code exists, the example runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files_that_hold_what_they_name(page: Path) -> None:
    for text, target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path = (page.parent / target).resolve()
        assert path.exists(), f"{page.name}: {target} does not exist"
        name = re.fullmatch(r"`(?:(\w+)\.)?(\w+)`", text)
        if name is None:
            continue
        source = path.read_text(encoding="utf-8")
        for word in filter(None, name.groups()):
            defined = re.search(rf"^\s*(class|def|async def) {word}\b", source, re.MULTILINE)
            assert defined, f"{page.name}: {target} defines no {word}"


ANCHOR = re.compile(r"\]\(([^)#\s]*\.md)?#([^)\s]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_headings(page: Path) -> None:
    for target, anchor in ANCHOR.findall(page.read_text(encoding="utf-8")):
        text = (page.parent / target if target else page).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert anchor in slugs, f"{page.name}: {target}#{anchor} is no heading"


def test_readme_example_runs(smollm2_path: Path, tmp_path: Path) -> None:
    """The Python block of the README, as it stands there, with the model's path for its name."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = code.replace('"smollm2"', repr(str(smollm2_path)))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3
    assert done.stderr == ""  # P57: a library call is silent unless asked


def test_make_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    shown = makefile.partition("\n\n")[0]
    for target in set(phony.split()) - {"help"}:
        assert f"make {target}" in shown, f"make {target} is not in the help at the Makefile's top"
