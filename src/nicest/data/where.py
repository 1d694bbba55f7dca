"""Conditions on the columns of a table: `age >= 30 and sex = "F"`, as intervals of encoded values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from nicest.data.cells import NUMBER
from nicest.data.columns import Category, Column, Number, Schema
from nicest.errors import NicestError
from nicest.messages import shown

VALUE = r"""(?:"(?:[^"]|"")*"|'(?:[^']|'')*'|`[^`]*`|[^\s=<>!(),"'`]+)"""
CLAUSE = re.compile(
    rf"(?P<text>(?P<name>{VALUE})\s*(?:(?P<sign><=|>=|==|!=|=|<|>)\s*(?P<value>{VALUE})"
    rf"|in\s*\(\s*(?P<values>{VALUE}(?:\s*,\s*{VALUE})*)\s*\)))(?P<more>\s+and\s+|\s*$)",
    re.IGNORECASE,
)
EXACT = ("=", "!=", "in")

Interval = tuple[float, float]
EVERYWHERE: tuple[Interval, ...] = ((-math.inf, math.inf),)


class Clause(NamedTuple):
    """`name operator values`, with the values in their quotes, and how it was written."""

    name: str
    operator: str
    values: tuple[str, ...]
    text: str


def where(text: str, schema: Schema) -> dict[int, tuple[Interval, ...]]:
    """Return the encoded values that a text such as `age = 30 and sex in ("F", "M") and income > 5e4` allows.

    Parameters
    ----------
    text : str
        Conditions on columns, joined by `and`: =, !=, <, <=, >, >= and in. Names with spaces are quoted.
    schema : Schema
        Columns of the table.

    Returns
    -------
    dict
        For each column with a condition, its closed intervals: increasing, apart, with infinite ends where nothing
        beyond is excluded. An equality is an interval of width 0; ends on grids and of categories are whole codes.
        Conditions that all values of a column meet are left out.

    Raises
    ------
    NicestError
        If the text does not parse, or no row can meet it.
    """
    allowed: dict[int, tuple[Interval, ...]] = {}
    asked: dict[int, list[Clause]] = {}
    for clause in parse(text):
        try:
            d = schema.index(clause.name)
        except NicestError as error:
            raise NicestError(f"where: {error}") from error
        found = _allowed(clause, schema[d])
        if not found:
            raise NicestError(f"where: no row can meet {clause.text}: column {shown(clause.name)} {schema[d].extent()}")
        asked.setdefault(d, []).append(clause)
        allowed[d] = _meet(found, allowed.get(d, EVERYWHERE))
        if not allowed[d]:
            both = " and ".join(each.text for each in asked[d])
            raise NicestError(f"where: no row can meet {both}: they contradict each other")
    for d, intervals in allowed.items():
        _require_one_number(intervals, schema[d])
    return {d: intervals for d, intervals in allowed.items() if intervals != EVERYWHERE and not schema[d].constant}


def _require_one_number(intervals: Sequence[Interval], column: Column) -> None:
    """Refuse several single numbers of a continuous column that have no probability."""
    points = {low for low, high in intervals if low == high}
    if not column.discrete and len(points) > 1 and not points <= set(column.head().atoms):
        raise NicestError(
            f"where: expected one number for the continuous column {shown(column.name)}, got {len(points)}: draw for"
            " each by itself, or give a range"
        )


def parse(text: str) -> list[Clause]:
    """Return the conditions of a text, which are joined by `and`."""
    clauses, at, more = [], len(text) - len(text.lstrip()), True
    while more:
        if (found := CLAUSE.match(text, at)) is None:
            got = f"{shown(text[at:], 40)} at character {at + 1}" if text[at:] else "the end"
            raise NicestError(f"where: expected conditions such as age >= 30 and sex in (F, M), got {got}")
        values = re.findall(VALUE, found["values"]) if found["values"] else [found["value"]]
        operator = {"==": "=", None: "in"}.get(found["sign"], found["sign"])
        clauses.append(Clause(_plain(found["name"]), operator, tuple(values), found["text"]))
        at, more = found.end(), bool(found["more"].strip())
    return clauses


def _plain(text: str) -> str:
    """Return a name or a value without its quotes; a doubled one inside stands for itself."""
    return text[1:-1].replace(text[0] * 2, text[0]) if text[0] in "\"'`" else text


def _allowed(clause: Clause, column: Column) -> tuple[Interval, ...]:
    """Return where a condition holds among the values of a column."""
    name, ordered = f"column {shown(column.name)}", not isinstance(column, Category) or column.numeric
    if not ordered and clause.operator not in EXACT:
        raise NicestError(f"where: {name} has no order, it {column.extent()}: use =, != or in")
    codes = [_code(value, column) for value in clause.values]
    if isinstance(column, Category):
        if clause.operator in EXACT and (unknown := [t for t, c in zip(clause.values, codes, strict=True) if c % 1]):
            raise NicestError(f"where: {name} holds no {shown(_plain(unknown[0]))}; it {column.extent()}")
        return _on_grid(_compared(clause.operator, codes), 1.0, (0.0, len(column.values) - 1.0))
    assert isinstance(column, Number)
    low, high = (float(column.code(end)) for end in column.domain)
    if column.step:
        return _on_grid(_compared(clause.operator, codes), column.step / column.scale, (low, high))
    if clause.operator in ("=", "in"):
        return tuple((code, code) for code in sorted(set(codes)) if low <= code <= high)
    found = [(_inside(a, column, 1), _inside(b, column, -1)) for a, b in _compared(clause.operator, codes)]
    return tuple(
        (a if a > low else -math.inf, b if b < high else math.inf) for a, b in found if max(a, low) <= min(b, high)
    )


End = tuple[float, bool]  # a code, and whether it belongs to the interval


def _code(value: str, column: Column) -> float:
    known = column.values if isinstance(column, Category) and isinstance(column.values[0], str) else ()
    if known and value not in known and re.match(NUMBER, value):
        got = f"the number {value}: if it is a text, quote it"
        raise NicestError(f"where: expected a text for column {shown(column.name)}, got {got}")
    try:
        return column.parse(_plain(value))
    except ValueError as error:
        what = f"{error} for column {shown(column.name)}, got {shown(_plain(value))}"
        raise NicestError(f"where: expected {what}") from error


def _compared(operator: str, codes: Sequence[float]) -> list[tuple[End, End]]:
    first, below, above = codes[0], (-math.inf, True), (math.inf, True)
    found: dict[str, list[tuple[End, End]]] = {
        "=": [((first, True), (first, True))],
        "in": [((code, True), (code, True)) for code in sorted(set(codes))],
        "!=": [(below, (first, False)), ((first, False), above)],
        "<": [(below, (first, False))],
        "<=": [(below, (first, True))],
        ">": [((first, False), above)],
        ">=": [((first, True), above)],
    }
    return found[operator]


def _on_grid(ends: Iterable[tuple[End, End]], step: float, domain: Interval) -> tuple[Interval, ...]:
    """Return the grid points inside as intervals, those that follow one another as one."""
    first, last = (round(end / step) for end in domain)
    found: list[list[float]] = []
    for (low, has_low), (high, has_high) in ends:
        a, b = max(low / step, first), min(high / step, last)
        a, b = math.ceil(a - 1e-6), math.floor(b + 1e-6)
        a += not has_low and abs(a - low / step) < 1e-6
        b -= not has_high and abs(b - high / step) < 1e-6
        if a > b:
            continue
        if found and found[-1][1] == a - 1:
            found[-1][1] = b
        else:
            found.append([a, b])
    return tuple(
        (a * step if a > first or a == b else -math.inf, b * step if b < last or a == b else math.inf) for a, b in found
    )


def _inside(end: End, column: Number, inward: int) -> float:
    """Return an end as a code all beyond which decodes to numbers inside, though decoding rounds."""
    code, included = end
    if math.isinf(code):
        return code
    number = code * column.scale + column.offset
    if column.decimals is None:
        slack = 4 * np.spacing(abs(number)) * (1 if included else -1)
        while inward * (float(column.plain(np.array([code], np.float32))[0]) - number) + slack < 0:
            code = float(np.nextafter(np.float32(code), np.float32(inward * math.inf)))
        return code
    scaled = number * 10.0**column.decimals
    whole = round(scaled)
    if abs(scaled - whole) > 1e-6 + 1e-12 * abs(scaled):
        whole = math.ceil(scaled) if inward > 0 else math.floor(scaled)
    elif not included:
        whole += inward
    return float(column.code(whole / 10.0**column.decimals))


def _meet(some: Iterable[Interval], others: Sequence[Interval]) -> tuple[Interval, ...]:
    """Return where both hold."""
    pairs = ((max(a[0], b[0]), min(a[1], b[1])) for a in some for b in others)
    return tuple(sorted(pair for pair in pairs if pair[0] <= pair[1]))
