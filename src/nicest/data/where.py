"""Conditions on the columns of a table: `age >= 30 and sex = "F"`, parsed, checked, and as ranges of numbers."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from nicest.data.cells import NotANumber, as_in_training, decode
from nicest.data.columns import Column
from nicest.data.tables import require_pyarrow
from nicest.errors import NicestError
from nicest.messages import listed, nearest, shown

TOKEN = re.compile(
    r"""\s*(?:(?P<quoted>"(?:[^"]|"")*"|'(?:[^']|'')*'|`[^`]*`)|(?P<sign><=|>=|==|!=|=|<|>|\(|\)|,)"""
    r"""|(?P<word>[^\s=<>!(),"'`]+)|(?P<end>$))"""
)
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
DATES = re.compile("date|time|duration")

End = tuple[float, int]  # a number, and on which side of it the range ends: -1 just below, 0 at it, 1 just above
Piece = tuple[End, End]
NOWHERE, EVERYWHERE = (-math.inf, 0), (math.inf, 0)


class Token(NamedTuple):
    kind: str  # "quoted", "sign", "word" or "end"
    text: str
    at: int


class Clause(NamedTuple):
    """`name operator values`, and how it was written."""

    name: str
    operator: str
    values: tuple[Token, ...]
    text: str


@dataclass(frozen=True)
class Where:
    """What conditions ask of the columns of a model.

    `ranges` are the pieces of the line in which the numbers of a column must lie, in the numbers of the model, sorted
    and apart from one another; a continuous column that is given has one of no width. Draws are decoded by `columns`,
    whose spikes are those inside the ranges and the numbers that were given: these come back exactly.
    """

    text: str
    columns: tuple[Column, ...]
    ranges: dict[int, tuple[Piece, ...]]

    def clip(self, rows: np.ndarray) -> np.ndarray:
        """Rows of the model's numbers whose continuous cells, which rounding may have taken across an end, lie inside
        as float64 has it."""
        rows = rows.astype(np.float64)
        for d, pieces in self.ranges.items():
            column = self.columns[d]
            if column.kind == "real":
                ends = np.array([[_inside(end, column.taken_off) for end in piece] for piece in pieces])
                near = rows[:, d, None].clip(ends[:, 0], ends[:, 1])
                best = np.abs(near - rows[:, d, None]).argmin(1)
                rows[:, d] = near[np.arange(len(rows)), best]
        return rows


def _inside(end: End, taken_off: float) -> float:
    """An end as a number that stays inside when what was taken off is added again."""
    number, side = end
    return number + side * 4 * np.spacing(max(abs(number), abs(taken_off))) if side else number


def where(text: str, columns: Sequence[Column]) -> Where:
    """What a text such as `age = 30 and sex in ("F", "M") and income > 50000` asks of columns."""
    ranges: dict[int, tuple[Piece, ...]] = {}
    asked: dict[int, list[Clause]] = {}
    names = [column.name for column in columns]
    for clause in parse(text):
        if clause.name not in names:
            hint = nearest(clause.name, names) or f"; the columns are {listed(names)}"
            raise NicestError(f"where: found no column {shown(clause.name)}{hint}")
        d = names.index(clause.name)
        whole = (domain(columns[d]),)
        pieces = meet(pieces_of(clause, columns[d]), whole)
        if not pieces:
            raise NicestError(f"where: no row can meet {clause.text}: {_extent(columns[d])}")
        asked.setdefault(d, []).append(clause)
        ranges[d] = meet(pieces, ranges.get(d, whole))
        if not ranges[d]:
            both = " and ".join(each.text for each in asked[d])
            raise NicestError(f"where: no row can meet {both}: they contradict each other")
    exact = list(columns)
    for d, pieces in ranges.items():
        if columns[d].kind == "real":
            points = {low[0] for low, high in pieces if low == high}
            given = {_number(value, columns[d]) for clause in asked[d] for value in clause.values}
            given = {each for each in given if columns[d].code(each) in points}
            if len(points) > 1 and not given <= set(columns[d].spikes):
                raise NicestError(
                    f"where: expected one number for the continuous column {shown(names[d])}, got {len(points)}: draw"
                    " for each by itself, or give a range"
                )
            spikes = (each for each in columns[d].spikes if _holds(pieces, columns[d].code(each)))
            exact[d] = replace(columns[d], spikes=tuple(sorted({*spikes, *given})))
    ends = {d: _open_ended(pieces, domain(columns[d])) for d, pieces in ranges.items()}
    return Where(text, tuple(exact), ends)


def parse(text: str) -> list[Clause]:
    """The conditions of a text, which are joined by `and`."""
    tokens, clauses = _tokens(text), []
    while True:
        name = _expect(tokens, text, "the name of a column", lambda token: token.kind in ("word", "quoted"))
        sign = _expect(
            tokens,
            text,
            f"one of =, !=, <, <=, >, >=, in after {shown(_plain(name))}",
            lambda token: token.text.lower() in {*COMPARE, "==", "in"} and token.kind != "quoted",
        )
        values = _values(tokens, text, sign)
        end = values[-1].at + len(values[-1].text) if sign.text.lower() != "in" else text.index(")", values[-1].at) + 1
        kind = {"==": "="}.get(sign.text, sign.text.lower())
        clauses.append(Clause(_plain(name), kind, tuple(values), text[name.at : end]))
        joined = _expect(
            tokens, text, "`and` or the end", lambda token: token.kind == "end" or token.text.lower() == "and"
        )
        if joined.kind == "end":
            return clauses


def _values(tokens: list[Token], text: str, sign: Token) -> list[Token]:
    def value(what: str = f"a value after {sign.text}") -> Token:
        return _expect(tokens, text, what, lambda token: token.kind in ("word", "quoted"))

    if sign.text.lower() != "in":
        return [value()]
    _expect(tokens, text, 'a list such as ("a", "b")', lambda token: token.text == "(")
    values = [value()]
    while _expect(tokens, text, "a comma or a closing parenthesis", lambda token: token.text in (",", ")")).text == ",":
        values.append(value())
    return values


def _tokens(text: str) -> list[Token]:
    """The words of a text, the first one last."""
    found: list[Token] = []
    at = 0
    while not found or found[-1].kind != "end":
        match = TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            start = at + len(text[at:]) - len(text[at:].lstrip())
            what = "the quote to be closed" if text[start] in "\"'`" else "a name, a value or an operator"
            raise NicestError(f"where: expected {what}, got {shown(text[start:], 20)} at character {start + 1}")
        found.append(Token(match.lastgroup, match[match.lastgroup], match.start(match.lastgroup)))
        at = match.end()
    return found[::-1]


def _expect(tokens: list[Token], text: str, what: str, fits: Callable[[Token], bool]) -> Token:
    token = tokens.pop()
    if not fits(token):
        got = "the end" if token.kind == "end" else shown(token.text, 40)
        raise NicestError(f"where: expected {what}, got {got} at character {token.at + 1} of {shown(text)}")
    return token


def _plain(token: Token) -> str:
    """What a token says, without quotes; a doubled one inside stands for itself."""
    if token.kind != "quoted":
        return token.text
    return token.text[1:-1].replace(token.text[0] * 2, token.text[0])


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def domain(column: Column) -> Piece:
    """All that the numbers of a column can be, in the numbers of the model."""
    if column.discrete:
        return (0.0, 0), (column.most, 0)
    low, high = column.limits
    return (max(low, column.code(0.0)) if column.low >= 0 else low, 0), (high, 0)


def meet(some: Iterable[Piece], others: Sequence[Piece]) -> tuple[Piece, ...]:
    """Where both hold."""
    pairs = ((max(a[0], b[0]), min(a[1], b[1])) for a in some for b in others)
    return tuple(sorted(pair for pair in pairs if pair[0] <= pair[1]))


def _holds(pieces: Iterable[Piece], number: float) -> bool:
    return any(low <= (number, 0) <= high for low, high in pieces)


def _open_ended(pieces: Sequence[Piece], whole: Piece) -> tuple[Piece, ...]:
    """Pieces without the ends that are those of the column."""
    return tuple(
        (NOWHERE if low <= whole[0] else low, EVERYWHERE if high >= whole[1] else high) for low, high in pieces
    )


def pieces_of(clause: Clause, column: Column) -> tuple[Piece, ...]:
    """Where a condition holds, in the numbers of the model."""
    texts = bool(column.values) and isinstance(column.values[0], str | bool)
    if texts and clause.operator not in ("=", "!=", "in"):
        what = "texts" if isinstance(column.values[0], str) else "booleans"
        raise NicestError(f"where: column {shown(column.name)} holds {what}, which have no order: use =, != or in")
    if not texts and not column.values:
        return _of_numbers(clause, [_number(token, column) for token in clause.values], column)
    values = [_category(token, column) if texts else _number(token, column) for token in clause.values]
    if not texts:  # few different numbers, as float32 tells them apart
        values = [next((each for each in column.values if np.float32(each) == np.float32(v)), v) for v in values]
    exact = clause.operator in ("=", "!=", "in")
    if exact and (unknown := [value for value in values if value not in column.values]):
        raise NicestError(
            f"where: column {shown(column.name)} holds no {shown(unknown[0])}; it holds {listed(column.values)}"
        )
    if clause.operator == "in":
        places = [i for i, each in enumerate(column.values) if each in values]
    else:
        places = [i for i, each in enumerate(column.values) if COMPARE[clause.operator](each, values[0])]
    return _runs(places)


def _runs(places: Sequence[int]) -> tuple[Piece, ...]:
    """Integers as pieces from the first to the last of those that follow one another."""
    pieces: list[Piece] = []
    for place in map(float, places):
        if pieces and pieces[-1][1][0] == place - 1:
            pieces[-1] = (pieces[-1][0], (place, 0))
        else:
            pieces.append(((place, 0), (place, 0)))
    return tuple(pieces)


def _of_numbers(clause: Clause, values: Sequence[float], column: Column) -> tuple[Piece, ...]:
    codes = [column.code(value) for value in values]
    if column.kind == "steps":
        codes = [round(code) if abs(code - round(code)) < 1e-6 else code for code in codes]
        if clause.operator in ("=", "in") and (between := [code for code in codes if code != round(code)]):
            number = values[codes.index(between[0])]
            raise NicestError(f"where: no row can meet {clause.text}, with {number:.15g}: {_extent(column)}")
    if clause.operator == "in":
        return tuple(sorted({((code, 0), (code, 0)) for code in codes}))
    pieces = _compared(clause.operator, codes[0])
    if column.kind == "steps":
        pieces = tuple(((_whole(low, math.ceil), 0), (_whole(high, math.floor), 0)) for low, high in pieces)
    return pieces


def _whole(end: End, inward: Callable[[float], int]) -> float:
    """The first whole number inside an end, which it may be itself."""
    number, side = end
    if not side or math.isinf(number):
        return float(inward(number)) if math.isfinite(number) else number
    return float(math.floor(number) + 1 if side > 0 else math.ceil(number) - 1)


def _compared(sign: str, code: float) -> tuple[Piece, ...]:
    below, above = (NOWHERE, (code, -1)), ((code, 1), EVERYWHERE)
    return {
        "=": (((code, 0), (code, 0)),),
        "!=": (below, above),
        "<": (below,),
        "<=": ((NOWHERE, (code, 0)),),
        ">": (above,),
        ">=": (((code, 0), EVERYWHERE),),
    }[sign]


def _number(token: Token, column: Column) -> float:
    """The number that a value of a column of numbers stands for: that of a moment is Arrow's."""
    text = _plain(token)
    if not column.values and DATES.search(column.type):
        require_pyarrow()
        import pyarrow as pa

        try:
            return float(as_in_training(pa.array([text]), column)[0])
        except (pa.ArrowException, NotANumber):
            raise NicestError(
                f"where: expected {column.type} for column {shown(column.name)}, such as 2026-01-31, got {shown(text)}"
            ) from None
    if not _is_number(text):
        raise NicestError(f"where: expected a number for column {shown(column.name)}, got {shown(text)}")
    return float(text)


def _category(token: Token, column: Column) -> str | bool:
    text = _plain(token)
    if isinstance(column.values[0], bool):
        known = {"true": True, "false": False}
        if text.lower() not in known:
            raise NicestError(f"where: expected true or false for column {shown(column.name)}, got {shown(text)}")
        return known[text.lower()]
    if token.kind == "word" and _is_number(text):
        raise NicestError(
            f"where: expected a text for column {shown(column.name)}, got the number {text}: if it is a text, quote it"
        )
    return text


def _extent(column: Column) -> str:
    """Which values a column has, in words."""
    name = f"column {shown(column.name)}"
    if column.values:
        return f"{name} holds {listed(column.values)}"
    if column.kind == "steps":
        ends = f"{column.low:.15g} to {column.high:.15g}"
        if DATES.search(column.type):
            low, high = decode(np.array([[0.0], [column.most]]), [column]).column(0).to_pylist()
            ends = f"{low} to {high}"
        return f"{name} holds {ends}, in steps of {column.step:g}"
    low, high = (end[0] + column.taken_off for end in domain(column))
    return f"{name} has no values below {low:g}" + (f" or above {high:g}" if math.isfinite(high) else "")
