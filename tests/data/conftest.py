"""A data home of its own for every test of the data."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nicest.errors import NicestError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data home."""
    monkeypatch.setenv("NICEST_DATA", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def refusal() -> Callable[..., str]:
    """Call something that must be refused, and return the refusal, which is one line."""

    def call(function: Callable[..., object], *args: object, **options: object) -> str:
        with pytest.raises(NicestError) as caught:
            function(*args, **options)
        message = str(caught.value)
        assert "\n" not in message
        return message

    return call
