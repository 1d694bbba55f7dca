"""What a column of a table is to a model, and how that is kept beside it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from nicest.data.tables import TableFile
from nicest.errors import NicestError
from nicest.messages import brief, listed

Kind = Literal["real", "steps", "values"]


@dataclass(frozen=True)
class Column:
    """What the numbers of a column mean.

    real    a continuous number; the model has its density, in the column's own unit
    steps   whole steps of `step`, counted from `low`; the model has the probability of each count
    values  one of `values`, whose number is its place among them; the model has the probability of each

    `type` is Arrow's name for the cells, which samples get back. `low` and `high` are of the rows of training;
    `low`, or `origin` where there is one, is taken off before the cells are rounded to float32.
    """

    name: str
    type: str
    kind: Kind
    low: float = 0.0
    high: float = 0.0
    step: float = 0.0
    values: tuple[Any, ...] = ()
    origin: float | None = None

    @property
    def taken_off(self) -> float:
        return self.low if self.origin is None else self.origin

    @property
    def discrete(self) -> bool:
        return self.kind != "real"

    @property
    def most(self) -> float:
        """The largest whole number of the cells of training; none is where they are continuous."""
        if self.kind == "steps":
            return (self.high - self.low) / self.step
        return len(self.values) - 1 if self.values else math.inf

    @property
    def bounds(self) -> tuple[float, float]:
        """Where a missing cell may lie: anywhere, or from the first whole number to the end of the last."""
        return (0.0, self.most + 1 - 1e-3) if self.discrete else (-math.inf, math.inf)


def leave_out(name: str) -> str:
    """What to do about a column, quoted as Python and a shell do."""
    if len(name) > 100:
        return "leave it out by data.drop"
    quoted = json.dumps([name], ensure_ascii=False)
    plain = "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in quoted)  # as TOML has it
    return f"leave it out: set {shlex.quote('data.drop=' + plain)}"


def require_columns(file: TableFile, columns: Sequence[Column]) -> list[str]:
    """Refuse a table that lacks columns of training; the columns it has too many are returned."""
    have, known = set(file.names), {column.name for column in columns}
    missing = [column.name for column in columns if column.name not in have]
    extra = [name for name in file.names if name not in known]
    if missing:
        more = f", and has {listed(extra)}, which it had not" if extra else ""
        raise NicestError(f"{file.path}: lacks {listed(missing)}, which training had{more}")
    return extra


def columns_to_json(columns: Sequence[Column]) -> list[dict[str, Any]]:
    rows = [vars(column) | {"values": list(column.values)} for column in columns]
    return [{name: value for name, value in row.items() if value not in ([], None)} for row in rows]


def columns_from_json(rows: Any, source: str) -> tuple[Column, ...]:
    """What `columns_to_json` gave, checked."""
    try:
        if not isinstance(rows, list) or not all(isinstance(row.get("values", []), list) for row in rows):
            raise ValueError("there is no list")
        columns = tuple(Column(**row | {"values": tuple(row.get("values", ()))}) for row in rows)
        if len({column.name for column in columns}) < len(columns):
            raise ValueError("a name comes twice")
        for column in columns:
            _require_sound(column)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise NicestError(
            f"{source}: expected what nicest writes about columns, got something else ({brief(error)})"
        ) from error
    return tuple(
        replace(column, low=float(column.low), high=float(column.high), step=float(column.step)) for column in columns
    )


def _require_sound(column: Column) -> None:
    numbers, kinds = (column.low, column.high, column.step, column.taken_off), {type(value) for value in column.values}
    if not (isinstance(column.name, str) and isinstance(column.type, str)):
        raise ValueError("names or types are wanting")
    if not all(isinstance(each, int | float) and math.isfinite(float(each)) for each in numbers):
        raise ValueError("numbers are wanting")
    if column.kind not in ("real", "steps", "values") or (column.step > 0) != column.discrete or column.step < 0:
        raise ValueError(f"no kind of column: {column.kind}")
    if bool(column.values) != (column.kind == "values") or column.low > column.high:
        raise ValueError("no such values")
    if kinds and (
        len(kinds) > 1 or not kinds <= {str, bool, float} or list(column.values) != sorted(set(column.values))
    ):
        raise ValueError("no such values")
    if kinds == {float} and not all(map(math.isfinite, column.values)):
        raise ValueError("no such values")
