"""Predict columns of a table from the others, in rows that may have missing cells."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from nicest.data.columns import Category, Moment
from nicest.data.tables import append_columns, writing
from nicest.errors import NicestError
from nicest.messages import shown
from nicest.progress import Bar
from nicest.runs.folder import require_own_file
from nicest.runs.run import Run
from nicest.tasks import options, rows
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
        """Yield the counts and the metrics."""
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


class Prediction(NamedTuple):
    """What is predicted of one target for N rows, in the unit of the column.

    Numbers have `numbers`, (N,) each; categories, also those that are numbers, have `probabilities`, (N, values).
    """

    column: Any
    marginal: Any
    numbers: dict[str, np.ndarray]
    probabilities: np.ndarray | None


def predict(
    run: Run,
    table: options.Table,
    *,
    target: Annotated[
        Sequence[str],
        options.option(help="A column to predict; repeatable.", show_default="those that training favoured"),
    ] = (),
    out: Annotated[str | Path, options.out_file("The predictions.", rows=True)] = "predictions.csv",
    interval: options.Interval = 0.9,
    picture: Annotated[
        str | Path | None, options.out_file("A figure of the intervals, for one target that is a number.")
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
    columns = [run.schema[i] for i in targets]
    if picture:
        from nicest.plots import picture_kind

        if len(columns) > 1 or not rows.is_number(columns[0]) or isinstance(columns[0], Moment):
            raise NicestError("a picture shows one target that is a number: leave the picture out")
        picture_kind(Path(picture))
    for each in (written, *([Path(picture)] if picture else [])):
        require_own_file(each, run.recipe, path)
    file = rows.open_table(path, run.schema, optional=[column.name for column in columns])
    observed = all(column.name in file.names for column in columns)
    tally, drawn, n = Tally(), [], 0
    with ExitStack() as stack:
        write = stack.enter_context(writing(written, schema(columns, observed=observed), plain=True))
        bar = stack.enter_context(Bar("predicting", file.count or 0))
        for some in rows.batches(file, run.schema.names):
            found, truth, nats = predicted(run, some, path, targets, interval, tally, observed=observed)
            write([_range(n, some.num_rows), *cells(found, nats)])
            if picture and n < DRAWN:
                seen = [own_unit(columns[0], truth[:, 0]), found[0].marginal.cdf(truth[:, 0])] if observed else []
                drawn.append([*(found[0].numbers[name] for name in NUMBERS[1:]), *seen])
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
    import pyarrow as pa

    targets = chosen(run, target)
    columns = [run.schema[i] for i in targets]
    rows.require_columns(table.column_names, run.schema, "this table", [column.name for column in columns])
    observed = all(column.name in table.column_names for column in columns)
    found, _, nats = predicted(run, table, "this table", targets, interval, Tally(), observed=observed)
    fields = schema(columns, observed=observed)
    made = pa.table([_range(0, table.num_rows), *cells(found, nats)], schema=fields).drop_columns("row")
    names = [f"{name}_predicted" if name in table.column_names else name for name in made.column_names]
    return append_columns(table, made.rename_columns(names))


def chosen(run: Run, target: Sequence[str]) -> list[int]:
    """Return the indices of the target columns: those that are named, or those that training favoured."""
    names = list(target) or list(run.recipe.table.targets)
    if not names:
        raise NicestError(f"{run.path} favours no column: name one to predict by --target COLUMN")
    if len(set(names)) < len(names):
        raise NicestError(f"expected every target once, got {', '.join(map(shown, names))}")
    return [run.schema.index(name) for name in names]


def predicted(
    run: Run, table: Any, source: Any, targets: Sequence[int], level: float, tally: Tally, *, observed: bool
) -> tuple[list[Prediction], np.ndarray, np.ndarray | None]:
    """Predict the targets of an Arrow table.

    Returns
    -------
    predictions : list of Prediction
        One for each target.
    truth : ndarray, shape (N, T)
        The encoded targets of the table, NaN where they are missing.
    nats : ndarray of shape (N,), or None
        Log-density of the targets given the other columns, if they are `observed`: NaN where one is missing, -inf
        where training never saw its value.
    """
    values, unknown = rows.encoded(table, run.schema, source)
    truth, new = values[:, targets], unknown[:, targets].any(1)
    hidden = values.copy()
    hidden[:, targets] = np.nan
    tally.unseen += int(unknown.sum() - unknown[:, targets].sum())
    marginals = run.table.marginals(hidden, targets)
    found = [of_target(run.schema[i], each, level) for i, each in zip(targets, marginals, strict=True)]
    if not observed:
        return found, truth, None
    # the chain rule: each target given the other columns and the targets before it
    nats = np.zeros(len(values))
    for k, i in enumerate(targets):
        marginal = marginals[0] if k == 0 else run.table.marginals(hidden, [i])[0]
        nats += marginal.log_prob(truth[:, k])
        hidden[:, i] = truth[:, k]
    nats = np.where(new, -np.inf, np.where(np.isnan(truth).any(1), np.nan, nats))
    tally.unknown += int(new.sum())
    tally.add("", "nats", nats[np.isfinite(nats)])
    for k, each in enumerate(found):
        tally.judge(each, truth[:, k], unknown[:, targets[k]])
    return found, truth, nats


def of_target(column: Any, marginal: Any, level: float) -> Prediction:
    """Return what a marginal distribution predicts, in the unit of the column."""
    shares = (0.5, 0.5 - level / 2, 0.5 + level / 2)
    if isinstance(column, Category):
        p = np.asarray(marginal.probabilities(), dtype=np.float64)
        if not rows.is_number(column):
            return Prediction(column, marginal, {}, p)
        values, below = np.array(column.values, dtype=np.float64), p.cumsum(1)
        ends = [values[(below < share - 1e-9).sum(1).clip(max=len(values) - 1)] for share in shares]
        return Prediction(column, marginal, dict(zip(NUMBERS, (p @ values, *ends), strict=True)), p)
    found = (marginal.mean(), *(marginal.quantile(share) for share in shares))
    return Prediction(column, marginal, {n: own_unit(column, x) for n, x in zip(NUMBERS, found, strict=True)}, None)


def own_unit(column: Any, codes: Any) -> np.ndarray:
    """Return encoded numbers in the unit of their column, without rounding: means lie between integers."""
    codes = np.asarray(codes, dtype=np.float64)
    if isinstance(column, Category):
        return np.interp(codes, np.arange(len(column.values)), column.values)
    return np.asarray(codes * column.scale + column.offset)


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

    def judge(self, found: Prediction, truth: np.ndarray, unknown: np.ndarray) -> None:
        """Add the errors of predictions where the target is known; an unknown category counts as wrong."""
        name, there = found.column.name, ~np.isnan(truth)
        known, nats = truth[there], -np.asarray(found.marginal.log_prob(truth), dtype=np.float64)
        if found.probabilities is not None:
            self.add(name, "accuracy", (found.probabilities.argmax(1) == truth)[there | unknown])
            self.add(name, "log_loss", nats[there])
        if found.numbers:
            value, numbers = own_unit(found.column, known), {key: x[there] for key, x in found.numbers.items()}
            slack = 1e-6 * (numbers["high"] - numbers["low"])  # rounding at the ends of a grid
            self.add(name, "squares", (numbers["mean"] - value) ** 2)
            self.add(name, "mae", np.abs(numbers["median"] - value))
            self.add(name, "crps", crps(found, truth)[there])
            self.add(name, "coverage", (value >= numbers["low"] - slack) & (value <= numbers["high"] + slack))

    def metrics(self, target: str) -> dict[str, float]:
        """Return the metrics of a target; {} if its values are unknown."""
        names = ("squares", "mae", "crps", "coverage", "accuracy", "log_loss")
        means = {name: value for name in names if (value := self.mean(target, name)) is not None}
        return {"rmse": math.sqrt(means.pop("squares"))} | means if "squares" in means else means


def crps(found: Prediction, truth: np.ndarray) -> np.ndarray:
    """Return the continuous ranked probability score of encoded truths (N,), in the unit of the column."""
    if found.probabilities is None:
        return np.asarray(found.marginal.crps(truth), dtype=np.float64) * found.column.scale
    values = np.array(found.column.values, dtype=np.float64)
    reached = np.arange(len(values))[:-1] >= np.nan_to_num(truth)[:, None]
    return ((found.probabilities.cumsum(1)[:, :-1] - reached) ** 2 @ np.diff(values)).astype(np.float64)


def schema(columns: Sequence[Any], *, observed: bool) -> Any:
    """Return the Arrow schema of predictions."""
    import pyarrow as pa

    fields: list[tuple[str, Any]] = [("row", pa.int64())]
    for column in columns:
        kind = column.decode(np.zeros(1)).type
        if not rows.is_number(column):
            fields.append((column.name, kind))
        else:
            number = kind if isinstance(column, Moment) else pa.float64()
            fields += [(f"{column.name}_{name}", number) for name in NUMBERS]
        if isinstance(column, Category):
            fields += [(f"{column.name}={value}", pa.float64()) for value in column.values]
    fields += [("log_density", pa.float64())] if observed else []
    if twice := [name for name, n in Counter(name for name, _ in fields).items() if n > 1]:
        raise NicestError(f"the predictions would have two columns called {shown(twice[0])}: rename the target")
    return pa.schema(fields)


def cells(found: Sequence[Prediction], nats: np.ndarray | None) -> list[Any]:
    """Return the columns of predictions for `schema`, without the row numbers."""
    import pyarrow as pa

    arrays: list[Any] = []
    for each in found:
        if not each.numbers and each.probabilities is not None:
            arrays.append(each.column.decode(each.probabilities.argmax(1).astype(np.float64)))
        for values in each.numbers.values():
            moment = isinstance(each.column, Moment)
            arrays.append(each.column.decode(each.column.code(values)) if moment else pa.array(values))
        arrays += [] if each.probabilities is None else map(pa.array, each.probabilities.T)
    return arrays if nats is None else [*arrays, pa.array(nats, mask=np.isnan(nats))]


def _range(first: int, n: int) -> Any:
    import pyarrow as pa

    return pa.array(range(first, first + n), pa.int64())


def _draw(out: Path, drawn: Sequence[Sequence[np.ndarray]], name: str, level: float, title: str) -> None:
    """Draw the intervals of the first rows."""
    from nicest.plots import prediction_figure, save_figure

    median, low, high, *seen = (np.concatenate(each)[:DRAWN] for each in zip(*drawn, strict=True))
    observed, pit = seen or (None, None)
    pit = pit if pit is None else pit[~np.isnan(pit)]
    how: dict[str, Any] = {"name": name, "level": level, "observed": observed, "pit": pit}
    save_figure(prediction_figure(median, low, high, title=title, **how), out)
