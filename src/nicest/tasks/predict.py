"""Predict columns of a table from the others, in rows that may have missing cells."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from nicest.data.columns import Category, Column, Integer, Moment
from nicest.data.tables import append_columns, writing
from nicest.errors import NicestError
from nicest.messages import shown
from nicest.progress import Bar
from nicest.runs.run import Run
from nicest.tables.marginal import Marginal
from nicest.tasks import rows
from nicest.tasks.options import Interval, Table, option, out_file
from nicest.tasks.results import Result, count

DRAWN = 2000  # rows in a picture
NUMBERS = ("mean", "median", "low", "high")


@dataclass(frozen=True, kw_only=True)
class Predictions(Result):
    """Counts of predicted rows, and metrics of the targets whose values the table has.

    `targets` maps each target to its metrics: `rmse` of the mean, `mae` of the median, `crps` and `coverage` of the
    intervals for numbers, in the unit of the column; `accuracy` and `log_loss` for categories.
    """

    out: str
    picture: str | None
    rows: int
    level: float
    targets: dict[str, dict[str, float]]
    mean_nats: float | None
    unknown: int
    unseen: int

    def lines(self) -> Iterator[Any]:
        yield f"{count(self.rows, 'row')} predicted in {self.out}: {', '.join(self.targets)}"
        if self.unseen:
            yield f"{count(self.unseen, 'given cell')} with a value that training never saw: they count as missing"
        if self.mean_nats is not None:
            yield f"observed targets: mean log-density {self.mean_nats:.3f} nats"
        if self.unknown:
            yield f"{count(self.unknown, 'row')} with a target value that training never saw, left out of the metrics"
        for name, found in self.targets.items():
            each = [f"RMSE {found['rmse']:.4g}, MAE {found['mae']:.4g}, CRPS {found['crps']:.4g}"] * ("rmse" in found)
            if "coverage" in found:
                each.append(f"{self.level:.0%} intervals hold {found['coverage']:.1%} of the values")
            if "accuracy" in found:
                each.append(f"accuracy {found['accuracy']:.1%}, log-loss {found['log_loss']:.4g}")
            yield from [f"{name}: {'; '.join(each)}"] if each else []


def predict(
    run: Run,
    table: Table,
    *,
    target: Annotated[
        Sequence[str], option(help="A column to predict; repeatable.", show_default="those that training favoured")
    ] = (),
    out: Annotated[str | Path, out_file("The predictions.", rows=True)] = "predictions.csv",
    interval: Interval = 0.9,
    picture: Annotated[
        str | Path | None, out_file("A figure of the intervals, for one target that is a number.")
    ] = None,
) -> Predictions:
    """Predict columns of a table from its other columns.

    Numbers get a mean, a median, and the ends `low` and `high` of an interval; categories the most probable value and
    the probability of each. Rows may have missing cells, and the table may lack the targets. Where it has them,
    `log_density` is that of their values given the other columns, and the metrics say how good the predictions are.

    Example: nicest train houses.csv --target price && nicest predict runs/houses new.csv
    """
    rows.require_table(run)
    path, written = rows.table_path(table), rows.table_path(out)
    if not 0 < interval < 1:
        raise NicestError(f"expected a probability between 0 and 1 for the interval, got {interval:g}")
    targets = chosen(run, target)
    columns = [run.table.schema[i] for i in targets]
    if picture:
        from nicest.plots import picture_kind

        if len(columns) > 1 or not is_number(columns[0]) or isinstance(columns[0], Moment):
            raise NicestError("a picture shows one target that is a number: leave the picture out")
        picture_kind(Path(picture))
    rows.require_outputs(run, written, *([Path(picture)] if picture else []), inputs=[path])
    file = rows.open_table(path, run.table.schema, optional=[column.name for column in columns])
    observed = all(column.name in file.names for column in columns)
    import pyarrow as pa

    tally, drawn, n = Tally(), [], 0
    with ExitStack() as stack:
        made = empty_table(run, targets, observed=observed)
        write = stack.enter_context(writing(written, pa.schema([("row", pa.int64()), *made.schema]), plain=True))
        bar = stack.enter_context(Bar("predicting", file.count or 0))
        for some in rows.batches(file, run.table.schema.names):
            found, truth, nats = predicted(run, some, path, targets, tally, observed=observed)
            if observed:
                tally.judge(found, truth, interval)
            write([pa.array(range(n, n + some.num_rows)), *prediction_table(found, interval, nats).columns])
            if picture and n < DRAWN:
                value = columns[0].plain(truth[:, 0])
                seen = (
                    [value, np.where(np.isnan(value), np.nan, found[0].cdf(np.nan_to_num(value)))] if observed else []
                )
                drawn.append([found[0].median(), *found[0].interval(interval).T, *seen])
            n += some.num_rows
            bar.update(n)
        if not n:
            raise NicestError(f"{path}: expected rows to predict, got only column names")
    if picture:
        _draw(Path(picture), drawn, columns[0].name, interval, f"{path.name}, predicted by {run.path.name}")
    return Predictions(
        out=str(written),
        picture=str(picture) if picture else None,
        rows=n,
        level=interval,
        targets={column.name: tally.metrics(column.name) for column in columns},
        mean_nats=tally.mean("", "nats"),
        unknown=tally.unknown,
        unseen=tally.unseen,
    )


def predict_batch(run: Run, table: Any, *, target: Sequence[str] = (), interval: float = 0.9) -> Any:
    """Append predictions to an Arrow table, as `predict` computes them for a file with these rows."""
    targets = chosen(run, target)
    columns = [run.table.schema[i] for i in targets]
    run.table.schema.require_in([*table.column_names, *(column.name for column in columns)], "this table")
    observed = all(column.name in table.column_names for column in columns)
    if table.num_rows:
        found, _, nats = predicted(run, table, "this table", targets, Tally(), observed=observed)
        made = prediction_table(found, interval, nats)
    else:  # engines pass empty batches
        made = empty_table(run, targets, observed=observed)
    there = set(table.column_names)
    names = [f"{name}_predicted" if name in there else name for name in made.column_names]
    return append_columns(table, made.rename_columns(names))


def chosen(run: Run, target: Sequence[str]) -> list[int]:
    """Return the indices of the target columns: those that are named, or those that training favoured."""
    names = list(target) or list(run.recipe.table.targets)
    if not names:
        raise NicestError(f"{run.path} favours no column: name a target to predict")
    if len(set(names)) < len(names):
        raise NicestError(f"expected every target once, got {', '.join(map(shown, names))}")
    return [run.table.schema.index(name) for name in names]


def predicted(
    run: Run, table: Any, source: Any, targets: Sequence[int], tally: Tally, *, observed: bool
) -> tuple[list[Marginal], np.ndarray, np.ndarray | None]:
    """Return the marginals of the targets of an Arrow table, the encoded truth (N, T), and its log-density (N,).

    Missing targets are NaN in both; values that training never saw are infinite, and their log-density -inf. Without
    `observed` targets there is no log-density.
    """
    values, unknown = rows.encoded(table, run.table.schema, source)
    new, truth = unknown[:, targets], values[:, targets]
    tally.unseen += int(unknown.sum() - new.sum())
    found = run.table.marginals(values, targets)
    if not observed:
        return found, truth, None
    nats = np.zeros(len(values))
    for k in range(len(targets)):  # the chain rule: each target given the other columns and the targets before it
        marginal = found[0] if len(targets) == 1 else run.table.marginals(values, targets[k:])[0]
        nats += marginal.log_prob_of(truth[:, k])
    nats = np.where(new.any(1), -np.inf, np.where(np.isnan(truth).any(1), np.nan, nats))
    tally.unknown += int(new.any(1).sum())
    tally.add("", "nats", nats[np.isfinite(nats)])
    return found, np.where(new, np.float32(np.inf), truth), nats


def is_number(column: Column) -> bool:
    """Return True if the values of a column have an order: numbers, dates and times."""
    return not isinstance(column, Category) or column.numeric


class Tally:
    """Sums of metrics over batches, by target and name."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, str], float] = defaultdict(float)
        self.counts: dict[tuple[str, str], int] = defaultdict(int)
        self.unknown = self.unseen = 0

    def add(self, target: str, name: str, numbers: np.ndarray) -> None:
        """Add numbers to the mean of a metric."""
        self.sums[target, name] += float(numbers.sum())
        self.counts[target, name] += numbers.size

    def mean(self, target: str, name: str) -> float | None:
        """Return the mean of a metric; None without numbers."""
        n = self.counts[target, name]
        return self.sums[target, name] / n if n else None

    def judge(self, found: Sequence[Marginal], truth: np.ndarray, level: float) -> None:
        """Add the errors of predictions to the metrics; a category that training never saw counts as wrong."""
        for marginal, codes in zip(found, truth.T, strict=True):
            name, known = marginal.column.name, np.isfinite(codes)
            if isinstance(marginal.column, Category):
                self.add(name, "accuracy", (marginal.best() == codes)[~np.isnan(codes)])
                self.add(name, "log_loss", -marginal.log_prob_of(np.where(known, codes, 0))[known])
            if marginal.numeric:
                value = marginal.column.plain(np.where(known, codes, 0))
                low, high = marginal.interval(level).T
                slack = 1e-6 * (high - low)  # float32 rounds the ends
                self.add(name, "squares", ((marginal.mean() - value) ** 2)[known])
                self.add(name, "mae", np.abs(marginal.median() - value)[known])
                self.add(name, "crps", marginal.crps(value)[known])
                self.add(name, "coverage", ((value >= low - slack) & (value <= high + slack))[known])

    def metrics(self, target: str) -> dict[str, float]:
        """Return the metrics of a target; {} if its values are unknown."""
        names = ("squares", "mae", "crps", "coverage", "accuracy", "log_loss")
        means = {name: value for name in names if (value := self.mean(target, name)) is not None}
        return {"rmse": math.sqrt(means.pop("squares"))} | means if "squares" in means else means


def prediction_table(found: Sequence[Marginal], level: float, nats: np.ndarray | None) -> Any:
    """Return predictions, and log-densities (N,) if there are any, as an Arrow table."""
    import pyarrow as pa

    named: list[tuple[str, Any]] = []
    for marginal in found:
        column = marginal.column
        if marginal.numeric:
            numbers = [marginal.mean(), marginal.median(), *marginal.interval(level).T]
            if isinstance(column, Moment):
                numbers = [column.decode(column.code(each)) for each in numbers]
            elif isinstance(column, Integer):  # grid points exactly
                numbers[1:] = [column.plain(column.code(each)) for each in numbers[1:]]
            named += [(f"{column.name}_{name}", each) for name, each in zip(NUMBERS, numbers, strict=True)]
        else:
            named.append((column.name, column.decode(marginal.best())))
        if isinstance(column, Category):
            shares = marginal.probabilities().T.astype(np.float64)
            named += [(f"{column.name}={value}", each) for value, each in zip(column.values, shares, strict=True)]
    named += [] if nats is None else [("log_density", pa.array(nats, mask=np.isnan(nats)))]
    names = [name for name, _ in named]
    if twice := [name for name, n in Counter(["row", *names]).items() if n > 1]:
        raise NicestError(f"the predictions would have two columns called {shown(twice[0])}: rename the target")
    return pa.table([pa.array(each) for _, each in named], names=names)


def empty_table(run: Run, targets: Sequence[int], *, observed: bool) -> Any:
    """Return predictions of no rows."""
    blank = np.full((1, len(run.table.schema)), np.nan, dtype=np.float32)
    return prediction_table(run.table.marginals(blank, targets), 0.9, np.zeros(1) if observed else None).slice(0, 0)


def _draw(out: Path, drawn: Sequence[Sequence[np.ndarray]], name: str, level: float, title: str) -> None:
    """Draw the intervals of the first rows."""
    from nicest.plots import prediction_figure, save_figure

    median, low, high, *seen = (np.concatenate(each)[:DRAWN] for each in zip(*drawn, strict=True))
    observed, pit = seen or (None, None)
    pit = pit if pit is None else pit[~np.isnan(pit)]
    how: dict[str, Any] = {"name": name, "level": level, "observed": observed, "pit": pit}
    save_figure(prediction_figure(median, low, high, title=title, **how), out)
