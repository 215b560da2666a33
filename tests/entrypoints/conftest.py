"""Fixtures of the entry points' tests."""

from __future__ import annotations

import pytest

from tests.engine.fakes import EngineMaker


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch) -> EngineMaker:
    """Builds engines around a scripted core."""
    return EngineMaker(monkeypatch)
