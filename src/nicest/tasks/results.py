"""Results of tasks: frozen dataclasses that print themselves for people and dump themselves as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nicest.files import to_json
from nicest.messages import printable


@dataclass(frozen=True, kw_only=True)
class Result:
    """Base class of what tasks return.

    Subclasses declare their fields and override `lines`. A field that is None by default is optional: `to_dict` leaves
    it out if it has no value.
    """

    def lines(self) -> Iterator[Any]:
        """Yield lines of text and rich tables for people."""
        yield from ()

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0 done, 1 failed in part, 130 interrupted."""
        return 0

    def show(self) -> None:
        """Print the result for people."""
        for each in self.lines():
            if isinstance(each, str):
                print(printable(each))
            else:
                from rich.console import Console

                Console(highlight=False).print("", each, "")

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain dictionaries and lists, without absent optional fields."""
        found: dict[str, Any] = _plain(self)
        return found

    def to_json(self) -> str:
        """Return the result as one line of JSON; numbers that are not finite become null."""
        return to_json(self.to_dict(), indent=None)


def _plain(value: Any) -> Any:
    if isinstance(value, Result):
        pairs = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {field.name: _plain(each) for field, each in pairs if each is not None or field.default is not None}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def columns(*names: str) -> Any:
    """Return an empty rich table; columns whose name starts with ">" are aligned right."""
    from rich.table import Table

    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in names:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    return table


def cell(text: object) -> str:
    """Return text from data as a cell of a rich table, on one line and without markup."""
    from rich.markup import escape

    return escape(printable(text))


def count(n: int, what: str) -> str:
    """Return "1 row" or "1,234 rows"."""
    return f"{n:,} {what}" + ("" if n == 1 else "s")


def plus_minus(mean: float, error: float) -> str:
    """Return "mean ± error", or the mean alone if there is no error."""
    return f"{mean:.2f} ± {error:.2f}" if math.isfinite(error) else f"{mean:.2f}"
