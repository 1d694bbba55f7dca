"""What the studio asks of a model of a table: its rows as JSON has them, and a task of the library in between."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nicest.data.cells import Batch, NotANumber, as_in_training, decode, encode, is_moment
from nicest.data.columns import Column, require_columns
from nicest.data.tables import TableFile
from nicest.data.where import where
from nicest.errors import NicestError
from nicest.inference.conditional import Conditional
from nicest.studio import limits
from nicest.studio.messages import (
    CellSurprise,
    CellSurprises,
    ColumnInfo,
    Histogram,
    ImputedCell,
    ImputedRow,
    Row,
    RowScore,
    Table,
    TableScores,
    number,
)
from nicest.studio.served import Loaded, noise
from nicest.tasks.impute_table import draw_hidden
from nicest.tasks.impute_table import fill as fill_cells
from nicest.tasks.score import CAVEAT, log_densities, outlier_scores

BINS = 24  # of a histogram, at most
FAR = 10  # times the range of a column of fractions: what lies farther off is no question for the model


class Rows:
    """A model of rows of numbers, or of a table."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded, self.columns, self.model = loaded, loaded.columns, loaded.model

    def table_only(self) -> tuple[Column, ...]:
        if not self.columns:
            raise NicestError("this model is not of a table: train one on a .csv or .parquet file")
        return self.columns

    def sample_rows(self, n: int, temperature: float, seed: int, of: int = 0) -> Table:
        """n rows, and histograms of so many."""
        rows = self.model.decode(self.model.draw(max(n, of), temperature=temperature, seed=seed)).cpu().numpy()
        if not self.columns:
            names = [f"x{i + 1}" for i in range(self.loaded.data.dim)]
            return Table(columns=names, rows=[[_cell(each) for each in row] for row in rows[:n].tolist()])
        return self.table(rows, self.columns, n, of)

    def table(self, rows: np.ndarray, columns: Sequence[Column], n: int, of: int) -> Table:
        found = decode(rows[:n], columns)
        bars = [histogram(rows[:of, d], column) for d, column in enumerate(columns)] if of else []
        return Table(columns=found.column_names, rows=_rows_of(found), histograms=bars)

    def where(self, text: str, n: int, seed: int, of: int) -> Table:
        """n rows that meet conditions, and histograms of so many."""
        asked = where(text, self.table_only())
        drawn = Conditional(self.model.flow, asked.ranges, seed=seed)
        rows = asked.clip(np.concatenate([part.cpu().numpy() for part in drawn.draws(max(n, of))]))
        made = self.table(rows, asked.columns, n, of)
        return made.model_copy(update={"share": drawn.share, "r_hat": drawn.r_hat})

    def surprises(self, ask: Row) -> CellSurprises:
        """Every cell of a row beside draws of it, given all the others."""
        rows, columns = self.known(ask), self.table_only()
        if (hidden := np.isnan(rows[0])).any():
            raise NicestError(f"expected a whole row, got none in column {columns[int(hidden.argmax())].name!r}")
        each, one = np.repeat(rows, len(columns), 0), np.eye(len(columns), dtype=bool)
        found = draw_hidden(self.model.flow, each, one, columns, draws=200, steps=400, interval=0.9, seed=ask.seed)
        draws = found.draws.double().cpu().numpy()  # (draws, D, D): of row d the cell d is drawn
        cells = []
        for d, column in enumerate(columns):
            drawn, own = draws[:, d, d], rows[0, d]
            low, likely, high = np.quantile(drawn, [0.05, 0.5, 0.95])
            if column.kind == "values":
                values, counts = np.unique(drawn, return_counts=True)
                of_own = counts[values == own].sum()
                tail, likely = counts[counts <= of_own].sum() / len(drawn), values[counts.argmax()]
            else:
                tail = min(1.0, 2 * min((drawn <= own).mean(), (drawn >= own).mean()))
            low, likely, high = (np.round(each) if column.discrete else each for each in (low, likely, high))
            shown = [_rows_of(decode(np.array([[each]]), [column]))[0][0] for each in (low, likely, high)]
            ends = (None, None) if column.kind == "values" else (shown[0], shown[2])
            cells.append(CellSurprise(column=column.name, tail=float(tail), likely=shown[1], low=ends[0], high=ends[1]))
        return CellSurprises(cells=cells, draws=len(draws))

    def column_infos(self) -> list[ColumnInfo]:
        return [
            ColumnInfo(name=c.name, kind=c.kind, moment=is_moment(c), low=low, high=high, values=list(c.values))
            for c, (low, high) in ((column, _ends(column)) for column in self.table_only())
        ]

    def score_table(self, content: bytes, suffix: str) -> TableScores:
        """The log-density of the first rows of a table; no others are read."""
        columns = self.table_only()
        names = [column.name for column in columns]
        shown: list[list[Any]] = []
        parts: list[Batch] = []
        more = False
        with tempfile.NamedTemporaryFile(suffix=suffix) as file:
            file.write(content)
            file.flush()
            path = Path(file.name)
            try:
                table = TableFile(path, most=limits.UNPACKED)
                require_columns(table.names, columns, table.path)
                for batch in table.batches(names):
                    first = batch.slice(0, limits.ROWS - len(shown))  # before anything is made of them
                    more = first.num_rows < batch.num_rows
                    if first.num_rows:
                        shown += _rows_of(first)
                        parts.append(encode(first, columns, path))
                    if more:
                        break
            except NicestError as error:
                raise NicestError(str(error).replace(str(path), "the table")) from error
        with noise:
            generator = torch.Generator(self.loaded.run.device).manual_seed(0)
            each = [log_densities(self.loaded.engine, part, self.loaded.draws, generator) for part in parts]
        nats = np.concatenate([np.zeros(0), *each])
        shares = outlier_scores(nats, self.loaded.reference())
        scores = [
            RowScore(row=i, nats=number(value), denser_share=number(share), why=_why(value))
            for i, (value, share) in enumerate(zip(nats.tolist(), shares.tolist(), strict=True))
        ]
        total = table.count if table.count is not None else None if more else len(nats)
        reference = self.loaded.compared_with
        return TableScores(columns=names, cells=shown, scores=scores, total=total, reference=reference, caveat=CAVEAT)

    def known(self, ask: Row) -> np.ndarray:
        """A row as the model's numbers, (1, D); what is not known is NaN."""
        import pyarrow as pa

        columns = self.table_only()
        if strange := [name for name in ask.cells if name not in {column.name for column in columns}]:
            raise NicestError(f"expected columns of the model, got {strange[0][:80]!r}")
        cells = [_typed(ask.cells.get(column.name), column) for column in columns]
        batch = pa.record_batch(cells, names=[column.name for column in columns])
        rows, unknown = encode(batch, columns, Path("the row"))
        if unknown.any():
            raise NicestError("the row holds a value that training never saw: choose one of those")
        return rows

    def impute(self, ask: Row) -> ImputedRow:
        """The missing cells of a row, drawn from what the model says of them given the known ones."""
        columns, rows = self.table_only(), self.known(ask)
        hidden = np.isnan(rows)
        found = fill_cells(self.model.flow, rows, hidden, columns, draws=200, steps=400, interval=0.9, seed=ask.seed)
        known = ~hidden[0]
        tables = [_rows_of(decode(each, columns))[0] for each in (np.where(hidden, found.value, rows), *found[1:3])]
        each = zip(columns, *tables, known.tolist(), strict=True)
        r_hat = float(np.nan_to_num(found.r_hat, nan=1.0).max())
        return ImputedRow(
            cells=[ImputedCell(column=c.name, value=v, low=low, high=high, known=k) for c, v, low, high, k in each],
            r_hat=number(r_hat),
        )


def histogram(codes: np.ndarray, column: Column) -> Histogram:
    """Of the model's numbers of one column."""
    if column.kind == "values":
        counts = np.bincount(codes.round().astype(int).clip(0, len(column.values) - 1), minlength=len(column.values))
        order = np.argsort(-counts, kind="stable")[:BINS]
        values = [_cell(column.values[i]) for i in order]
        return Histogram(column=column.name, counts=counts[order].tolist(), values=values, low=None, high=None)
    low, high = float(codes.min()), float(codes.max())
    bins = min(BINS, round(high - low) + 1) if column.discrete else BINS
    edge = 0.5 if column.discrete else 0.0
    counts, _ = np.histogram(codes, bins, (low - edge, high + edge if high > low or edge else high + 1))
    (first,), (last,) = _rows_of(decode(np.array([[low], [high]]), [column]))
    return Histogram(column=column.name, counts=counts.tolist(), values=[], low=first, high=last)


def _why(nats: float) -> str:
    return "a cell is missing" if nats != nats else "a value that training never saw" if nats == -math.inf else ""


def _rows_of(table: Any) -> list[list[Any]]:
    """The rows of an Arrow table or batch; what JSON has no word for is text."""
    columns = [[_cell(each) for each in column.to_pylist()] for column in table.columns]
    return [list(row) for row in itertools.zip_longest(*columns)]


def _typed(value: Any, column: Column) -> Any:
    """One cell as an Arrow array, of the kind that the column is of."""
    import pyarrow as pa

    if column.values and isinstance(column.values[0], str):
        if value is not None and str(value) not in column.values:
            raise _not_of(column, f"one of {', '.join(map(repr, column.values[:10]))}", value)
        return pa.array([None if value is None else str(value)], pa.string())
    if column.values and isinstance(column.values[0], bool):
        if value is not None and not isinstance(value, bool):
            raise _not_of(column, "true or false", value)
        return pa.array([value], pa.bool_())
    if value is None:
        return pa.array([None], pa.float64())
    low, high = _ends(column)
    try:
        if isinstance(value, bool):  # which Python would take for 0 or 1
            raise NotANumber
        found = float(as_in_training(pa.array([str(value)]), column)[0]) if is_moment(column) else float(value)
    except (ValueError, OverflowError, NotANumber, pa.ArrowException):
        found = math.nan
    if not math.isfinite(found):
        raise _not_of(column, f"a moment, as {low}," if is_moment(column) else "a number", value)
    if column.kind == "values" and found not in column.values:
        raise _not_of(column, f"one of {', '.join(f'{each:g}' for each in column.values)}", value)
    span, room = column.high - column.low, 0 if column.discrete else FAR
    if column.kind != "values" and not column.low - room * span <= found <= column.high + room * span:
        what = "a moment" if is_moment(column) else "a number"
        raise _not_of(column, f"{what} as training had, {_word(low)} to {_word(high)},", value)
    if column.kind == "steps" and (found - column.low) % column.step:
        raise _not_of(column, f"steps of {column.step:g} from {_word(low)}", value)
    return pa.array([str(value)]) if is_moment(column) else pa.array([found], pa.float64())


def _ends(column: Column) -> tuple[Any, Any]:
    """The smallest and the largest cell of training, as people write them."""
    if not is_moment(column):
        return column.low, column.high
    span = column.high - column.low
    (low,), (high,) = _rows_of(decode(np.array([[0.0], [span / column.step if column.step else span]]), [column]))
    return low, high


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _not_of(column: Column, wanted: str, value: Any) -> NicestError:
    return NicestError(f"expected {wanted} in column {column.name!r}, got {str(value)[:80]!r}")


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    return number(float(f"{value:.7g}")) if isinstance(value, float) else str(value)
