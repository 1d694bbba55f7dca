"""A data home of its own for every test of the data."""

from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data home."""
    monkeypatch.setenv("NICEST_DATA", str(tmp_path / "home"))
    return tmp_path / "home"
