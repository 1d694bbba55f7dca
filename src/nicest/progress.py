"""Progress on the terminal, always on standard error: standard output is for results."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

Item = TypeVar("Item")


class Stderr(io.TextIOBase):
    """Standard error as it is now; what cannot be written there, on a full disk or a closed pipe, is lost quietly."""

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()

    def isatty(self) -> bool:
        with suppress(OSError, ValueError):
            return sys.stderr.isatty()
        return False

    def fileno(self) -> int:
        return sys.stderr.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(sys.stderr, "encoding", None) or "utf-8"


class Bar:
    """A progress bar with a text and the time left; off a terminal, only its notes are printed."""

    def __init__(self, description: str, total: int, done: int = 0) -> None:
        self.console = Console(file=Stderr(), highlight=False)  # type: ignore[arg-type]
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
            TextColumn("left"),
            TextColumn("{task.fields[text]}"),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task(description, total=total, completed=done, text="")

    def update(self, done: int, text: str | None = None) -> None:
        """Show how much is done, with a text."""
        fields = {} if text is None else {"text": text}
        self._progress.update(self._task, completed=done, **fields)  # type: ignore[arg-type]

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._progress.console.print(text, soft_wrap=True, markup=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


def track(items: Iterable[Item], description: str, total: int) -> Iterator[Item]:
    """Yield the items, under a progress bar."""
    with Bar(description, total) as bar:
        for i, item in enumerate(items):
            yield item
            bar.update(i + 1)
