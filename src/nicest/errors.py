"""The one kind of error a user is meant to read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class NicestError(Exception):
    """A request that cannot be met; its message is one line: what was expected, what came, what to do."""


class Resumable(NicestError):
    """The run in `folder` has no model, but resuming its training writes one. The message ends with this advice."""

    def __init__(self, message: str, folder: object) -> None:
        super().__init__(message)
        self.folder = folder


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """Turn a failed import inside the block into an error that names the extra to install."""
    try:
        yield
    except ImportError as error:
        what = f"this needs {error.name}, which is not installed"
        raise NicestError(f"{what}: pip install 'nicest[{extra}]'") from error
