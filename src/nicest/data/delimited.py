"""Text files and Excel sheets as people have them: encoding, separator and decimal commas."""

from __future__ import annotations

import codecs
import csv
import io
import re
import zipfile
from collections.abc import Generator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from nicest.data.reading import require_modest
from nicest.errors import NicestError, needing

SAMPLE = 1 << 20  # bytes by which a separator is found
LINES = 20
BLOCK = 1 << 23
SEPARATORS = ",;\t|"
PACKED = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")  # how .xlsx and .xls files begin
NOT_TEXT = re.compile(rb"[\0-\x08\x0e-\x1f\x7f\x81\x8d\x8f\x90\x9d]")  # bytes that no Latin-1 text has
THOUSANDS, DECIMALS = r"^\s*([+-]?\d+)\.(\d{3}(?:\.\d{3})*,\d+)\s*$", r"^\s*([+-]?\d+),(\d+(?:[eE][+-]?\d+)?)\s*$"
NO_VALUE = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "#N/A", "#DIV/0!", "#VALUE!", "#REF!", "#NUM!", "#NAME?")


class Form(NamedTuple):
    """How a text file is written, and the number of its columns."""

    encoding: str
    separator: str
    columns: int


def form_of(path: Path) -> Form:
    """Find the encoding and the separator of a text file."""
    with path.open("rb") as file:
        start = file.read(SAMPLE)
    if not start:
        raise NicestError(f"{path}: expected column names and rows, got an empty file")
    if start.startswith(PACKED):
        raise NicestError(f"{path}: this is an Excel file, not CSV; name it .xlsx, or save it from Excel as CSV UTF-8")
    encoding = _encoding(path, start)
    text = start.decode(encoding, errors="ignore")
    # the separator that gives all lines the same number of cells, the largest one; else the most frequent one
    best = max(SEPARATORS, key=lambda each: (*_widths(text, each, cut=len(start) == SAMPLE), -SEPARATORS.index(each)))
    return Form(encoding, best, _widths(text, best, cut=False)[1])


def _widths(text: str, separator: str, *, cut: bool) -> tuple[bool, int]:
    """Return whether all of the first lines have as many cells as the first one, several, and how many these are."""
    try:
        lines = list(islice(csv.reader(io.StringIO(text, newline=""), delimiter=separator), LINES + 1))
    except csv.Error:
        return False, 1 + text.partition("\n")[0].count(separator)
    lines = lines[:-1] if cut and 1 < len(lines) <= LINES else lines
    widths = [len(line) for line in lines if line] or [1]
    return len(set(widths)) == 1 < widths[0], widths[0]


def _encoding(path: Path, start: bytes) -> str:
    """Find the encoding of a text file; a byte that is not UTF-8 may be its last one."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    for encoding, zeros in (("utf-16-le", start[1::2][:64]), ("utf-16-be", start[::2][:64])):
        if zeros and not any(zeros):
            return encoding
    decoder, is_utf8 = codecs.getincrementaldecoder("utf-8")(), b"\0" not in start
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            if is_utf8:
                try:
                    decoder.decode(block)
                    continue
                except UnicodeDecodeError:
                    is_utf8 = False
                    file.seek(0)
                    block = file.read(BLOCK)
            if NOT_TEXT.search(block):
                raise NicestError(
                    f"{path}: expected text in UTF-8, UTF-16 or Latin-1, got other bytes; save it as UTF-8"
                )
    return "utf-8" if is_utf8 else "cp1252"


def with_points(cells: Any) -> Any:
    """Write texts that are numbers with a decimal comma, such as 1.234,5, with a point: 1234.5."""
    from pyarrow import compute

    while compute.any(compute.match_substring_regex(cells, THOUSANDS)).as_py():
        cells = compute.replace_substring_regex(cells, THOUSANDS, r"\1\2")
    return compute.replace_substring_regex(cells, DECIMALS, r"\1.\2")


def sheet_rows(path: Path) -> Generator[list[str | None]]:
    """Yield the rows of the first sheet of an Excel file as texts, None for empty cells; names come first."""
    with needing("excel"):
        import openpyxl
    with path.open("rb") as file:
        with zipfile.ZipFile(file) as archive:
            require_modest(path, sum(each.file_size for each in archive.infolist()), "save the sheet as CSV UTF-8")
        book = openpyxl.load_workbook(file, read_only=True, data_only=True)
        rows = ([_text(cell) for cell in row] for row in book.worksheets[0].iter_rows(values_only=True))
        filled = (row for row in rows if any(cell is not None for cell in row))
        names = [name or "" for name in next(filled, [])]
        while names and not names[-1]:  # formatted cells to the right of the table
            names.pop()
        yield list(names)
        for row in filled:
            yield (row + [None] * len(names))[: len(names)]
        book.close()


def _text(cell: Any) -> str | None:
    if isinstance(cell, datetime):
        return str(cell).removesuffix(" 00:00:00")
    return None if cell is None or str(cell).strip() in NO_VALUE else str(cell)
