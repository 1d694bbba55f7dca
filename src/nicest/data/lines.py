"""A CSV file as lines that follow from their values and from the notation of each column."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nicest.data.kinds import Category, Column
from nicest.data.reading import read_bytes
from nicest.errors import NicestError
from nicest.messages import listed

CELL = re.compile(r'("(?:[^"]|"")*"|[^,"]*)(,|$)')
NULLS = frozenset(["", "?", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None"])
MOST_DECIMALS = 17
SOME = 2000  # lines by which the form of a column is chosen


@dataclass(frozen=True)
class Written:
    """How the cells of a column are written.

    `form` is that of numbers: "i" for integers, "r" as Python writes them, "2" with two decimals; "" for texts.
    `missing` stands in missing cells. Cells are `quoted` if need be, or always.
    """

    form: str
    missing: str
    quoted: bool

    @property
    def known(self) -> bool:
        """Return True if it is one that `CsvLines` gives."""
        forms = ("", "i", "r", *map(str, range(MOST_DECIMALS + 1)))
        return self.form in forms and self.missing in NULLS and isinstance(self.quoted, bool)

    def cell(self, value: str | float | None) -> str:
        if value is None:
            return self.missing
        text = value if isinstance(value, str) else formatted(value, self.form)
        if self.quoted or any(each in text for each in ',"\n\r'):
            return '"' + text.replace('"', '""') + '"'
        return text


def formatted(number: float, form: str) -> str:
    if form == "i":
        return str(int(number))
    return repr(float(number)) if form == "r" else f"{number:.{int(form)}f}"


class CsvLines:
    """The lines of a CSV file after its first, as bytes; `cells` are the texts in them, None where one is missing.

    Of a line that is not UTF-8, or has more or fewer cells than the first, they are None.
    """

    def __init__(self, path: Path, columns: Sequence[Column]) -> None:
        self.head, *self.lines = read_bytes(path).split(b"\n")
        self.ended = bool(self.lines) and not self.lines[-1]  # by a line break
        if self.ended:
            self.lines.pop()
        self.end = "\r" if self.head.endswith(b"\r") else ""
        by_name = {column.name: column for column in columns}
        names = [text for text, _ in _split(self.head, self.end, "utf-8-sig") or []]
        if sorted(names) != sorted(by_name):
            raise NicestError(
                f"{path}: expected the columns of training, {listed(list(by_name))}, got {listed(names) or 'none'}"
            )
        self.columns = [by_name[name] for name in names]
        split = [_split(line, self.end) for line in self.lines]
        split = [each if each is not None and len(each) == len(names) else None for each in split]
        some = [each for each in split[:: 1 + len(split) // SOME] if each is not None]
        self.written = [_form([each[d] for each in some], column) for d, column in enumerate(self.columns)]
        nulls = [_nulls(column) for column in self.columns]
        self.cells: list[list[str | None] | None] = [
            None if line is None else [_known(*cell, own) for cell, own in zip(line, nulls, strict=True)]
            for line in split
        ]


def _split(line: bytes, end: str, encoding: str = "utf-8") -> list[tuple[str, bool]] | None:
    """Return the texts of a line, and which were in quotes; None if it does not parse."""
    try:
        text = line.decode(encoding)
    except UnicodeDecodeError:
        return None
    text = text.removesuffix(end)
    if '"' not in text:
        return [(cell, False) for cell in text.split(",")]
    found, at = [], 0
    while match := CELL.match(text, at):
        cell, comma = match.groups()
        quoted = cell.startswith('"')
        found.append((cell[1:-1].replace('""', '"') if quoted else cell, quoted))
        at = match.end()
        if not comma:
            return found
    return None


def _nulls(column: Column) -> frozenset[str]:
    """Return the texts that stand for a missing cell."""
    return NULLS - frozenset(_texts(column))


def _texts(column: Column) -> list[str]:
    """Return the categories of a column that are texts."""
    return [each for each in column.values if isinstance(each, str)] if isinstance(column, Category) else []


def _known(text: str, quoted: bool, nulls: frozenset[str]) -> str | None:
    return text if quoted or text not in nulls else None


def _form(cells: Sequence[tuple[str, bool]], column: Column) -> Written:
    """Find how most cells of a column are written."""
    own = _nulls(column)
    nulls = Counter(text for text, quoted in cells if _known(text, quoted, own) is None)
    known = [(text, quoted) for text, quoted in cells if _known(text, quoted, own) is not None]
    always = 2 * sum(quoted for _, quoted in known) > len(known)
    form = ""
    if not _texts(column):
        decimals = Counter(len(text.partition(".")[2]) for text, _ in known if "." in text)
        forms = ["i", "r", *(str(min(most, MOST_DECIMALS)) for most, _ in decimals.most_common(3))]
        numbers = list(_numbers(text for text, _ in known))
        form = max(forms, key=lambda each: sum(text == formatted(number, each) for text, number in numbers))
    return Written(form, nulls.most_common(1)[0][0] if nulls else "", always)


def _numbers(texts: Iterator[str]) -> Iterator[tuple[str, float]]:
    for text in texts:
        if (number := as_float(text)) is not None:
            yield text, number


def as_float(text: str) -> float | None:
    """Return the finite number of a text, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None
