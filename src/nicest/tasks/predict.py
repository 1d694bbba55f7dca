"""Predictions for the rows of a table, from a model of some columns given the others."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nicest.data.cells import as_in_training, decode, encode, is_moment
from nicest.data.columns import Column, require_columns
from nicest.data.tables import IN_MEMORY, SUFFIXES, TableFile, append_columns, require_pyarrow, writing
from nicest.errors import NicestError
from nicest.fast import lower
from nicest.flows import Flow
from nicest.inference.predictive import Predictive, interval
from nicest.messages import shown
from nicest.progress import Bar
from nicest.remote import place
from nicest.runs.folder import require_own_file
from nicest.runs.run import DRAWS, Run

JOINT_DRAWS = 500  # of several targets, whose means and intervals are those of draws
JOINT_ROWS = 1 << 16  # draws of several targets that are made at once
ROWS = 4096  # rows that are predicted at once
DRAWN = 2000  # rows of a picture


@dataclass
class Prediction:
    """What is predicted for some rows; for each target a mapping of names to columns of numbers, (N,) or (N, L).

    Numbers have `mean`, `median`, `low` and `high`; categories their `probabilities`, (N, values). `log_density` is of
    targets that were observed: NaN where one is missing, -inf where one is a value that training never saw.
    """

    targets: list[dict[str, np.ndarray]]
    draws: np.ndarray  # (N, draws, targets), in the numbers of the model
    log_density: np.ndarray | None = None
    pit: np.ndarray | None = None  # of one target that was observed, the probability of less than it or as much


class Observed(NamedTuple):
    """A target as it was observed: the model's numbers, which of them are values that training never saw, and, of a
    column of numbers, those in its own unit."""

    codes: np.ndarray
    unknown: np.ndarray
    values: np.ndarray


class Mean:
    """The mean of numbers that come some at a time; None before the first."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, numbers: np.ndarray) -> None:
        self.total, self.count = self.total + float(numbers.sum()), self.count + numbers.size

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class Tally:
    """How good predictions are, over the rows whose targets are known."""

    rows: int = 0
    unseen: int = 0  # given cells whose value training never saw
    unknown: int = 0
    nats: Mean = field(default_factory=Mean)
    figures: dict[tuple[str, str], Mean] = field(default_factory=lambda: defaultdict(Mean))  # by target and name

    def add(self, found: Prediction, observed: Sequence[Observed], targets: Sequence[Column]) -> None:
        """Take note of how far predictions were from what was observed."""
        assert found.log_density is not None
        self.unknown += int(np.isneginf(found.log_density).sum())
        self.nats.add(found.log_density[np.isfinite(found.log_density)])
        for column, each, seen in zip(targets, found.targets, observed, strict=True):
            if column.values:
                right = (each["probabilities"].argmax(1) == seen.codes) & ~seen.unknown
                self.figures[column.name, "accuracy"].add(right[~np.isnan(seen.codes)])
                continue
            there = np.isfinite(seen.values)
            value = seen.values[there]
            mean, low, high = (own_unit(each[name][there], column) for name in ("mean", "low", "high"))
            slack = 1e-6 * (high - low)  # what rounding takes off the ends of an integer
            self.figures[column.name, "squares"].add((mean - value) ** 2)
            self.figures[column.name, "coverage"].add((value >= low - slack) & (value <= high + slack))

    def of(self, column: Column) -> dict[str, float]:
        """The figures of a target: accuracy of categories, RMSE and coverage of numbers; none where it is not known."""
        found = {name: mean.value for (target, name), mean in self.figures.items() if target == column.name}
        known = {name: value for name, value in found.items() if value is not None}
        if "squares" in known:
            return {"rmse": math.sqrt(known["squares"]), "coverage": known["coverage"]}
        return known


def predict(
    run: Run,
    table: str | Path,
    *,
    out: str | Path = "predictions.csv",
    level: float = 0.9,
    draws: int = 0,
    seed: int = 0,
    picture: str | Path | None = None,
) -> dict[str, Any]:
    """Write a line for every row of a table: what the model predicts of its targets, given the other columns.

    A number has its mean, median, and low and high, between which it lies with probability `level`; a text or boolean
    its most probable value, and the probability of each. `draws` adds so many draws from the joint distribution of the
    targets. Where the table holds the targets, `log_density` is that of the observed ones. Given cells may be missing;
    one that holds a value which training never saw counts as missing. A `picture` shows the predictions of a single
    target that is a number.
    """
    path, target = place(table), place(out)
    targets, given = targets_and_given(run)
    for each in (path, target):
        if each.suffix.lower() not in SUFFIXES:
            raise NicestError(f"expected a table, a file that ends in {', '.join(SUFFIXES)}, got {str(each)!r}")
    if not 0 < level < 1:
        raise NicestError(f"expected a probability between 0 and 1 for the interval, got {level:g}")
    for each in (target, *([Path(picture)] if picture else [])):
        require_own_file(each, run.recipe, path)
    drawn: list[tuple[np.ndarray, ...]] = []
    if picture and (len(targets) > 1 or targets[0].values or is_moment(targets[0])):
        raise NicestError("a picture shows one target that is a number, and these are others: leave the picture out")
    require_pyarrow()
    file = TableFile(path)
    require_columns(file.names, given, path)
    if picture:
        from nicest.plots import picture_kind

        picture_kind(Path(picture))  # now, before predictions are written
    observed = all(column.name in file.names for column in targets)
    tally = Tally()
    with ExitStack() as stack:
        write = stack.enter_context(writing(target, schema(targets, draws, observed=observed), plain=True))
        bar = stack.enter_context(Bar("predicting", file.count or 0))
        names = [column.name for column in (*given, *(targets if observed else ()))]
        for some in blocks(file.batches(names)):
            how: dict[str, Any] = {"level": level, "draws": draws, "seed": [seed, tally.rows]}
            found, seen, unseen = predicted(run, some, path, observed=observed, pit=bool(picture), **how)
            if observed:
                tally.add(found, seen, targets)
            write(predicted_cells(found, targets, tally.rows))
            if picture and tally.rows < DRAWN:
                ends = [own_unit(found.targets[0][name], targets[0]) for name in ("median", "low", "high")]
                drawn.append((*ends, *([seen[0].values, found.pit] if observed else [])))  # type: ignore[arg-type]
            tally.rows, tally.unseen = tally.rows + some.num_rows, tally.unseen + unseen
            bar.update(tally.rows)
        if not tally.rows:
            raise NicestError(f"{path}: expected rows to predict, got only column names")
    if picture:
        _draw(Path(picture), drawn, targets[0].name, level, f"{path.name}, predicted by {run.path.name}")
    return {
        "out": str(target),
        "picture": str(picture) if picture else None,
        "rows": tally.rows,
        "level": level,
        "targets": {column.name: tally.of(column) for column in targets},
        "mean_nats": tally.nats.value,
        "unknown": tally.unknown,
        "unseen": tally.unseen,
        "seed": seed,
    }


def predict_batch(run: Run, table: Any, *, level: float = 0.9, draws: int = 0, seed: int = 0) -> Any:
    """Append predictions to an Arrow table, as `predict` computes them for a file with these rows."""
    import pyarrow as pa

    targets, given = targets_and_given(run)
    require_columns(table.column_names, given, IN_MEMORY)
    observed = all(column.name in table.column_names for column in targets)
    columns = schema(targets, draws, observed=observed)
    parts, row = [columns.empty_table()], 0
    for some in blocks(table.to_batches()):
        how: dict[str, Any] = {"level": level, "draws": draws, "seed": [seed, row]}
        found, _, _ = predicted(run, some, IN_MEMORY, observed=observed, **how)
        parts.append(pa.table(predicted_cells(found, targets, row), schema=columns))
        row += some.num_rows
    return append_columns(table, pa.concat_tables(parts).drop_columns("row"))


def predicted(
    run: Run,
    some: Any,
    path: Path,
    *,
    observed: bool,
    pit: bool = False,
    level: float,
    draws: int,
    seed: list[int],
) -> tuple[Prediction, list[Observed], int]:
    """What is predicted for a table of ROWS rows at most, its targets if `observed`, and how many given values
    training never saw. With the number of the first row in the seed, draws depend on the row, and not on the format
    of the file."""
    targets, given = targets_and_given(run)
    codes, unseen = given_codes(some, given, path)
    found = predictions(run.flow, codes, targets, level=level, draws=draws, seed=seed)
    seen = [_observed(some, column, path) for column in targets] if observed else []
    if observed:
        truth = np.column_stack([each.codes for each in seen])
        unknown = np.any([each.unknown for each in seen], axis=0)
        found.log_density = log_densities(run.flow, codes, truth, unknown, seed=seed)
        if pit:
            shares = Predictive(run.flow, _tensor(run.flow, codes)).cdf(_tensor(run.flow, truth[:, 0]))
            found.pit = np.where(unknown, np.nan, shares.cpu().numpy())
    return found, seen, unseen


def targets_and_given(run: Run) -> tuple[list[Column], list[Column]]:
    """The columns that a run predicts, and those that it predicts them from."""
    columns, places = run.columns, run.recipe.data.targets
    if not places:
        raise NicestError(f"{run.path} has no target to predict: train a model with --target COLUMN")
    return [columns[i] for i in places], [c for i, c in enumerate(columns) if i not in places]


def _draw(out: Path, drawn: Sequence[tuple[np.ndarray, ...]], name: str, level: float, title: str) -> None:
    """A picture of the first rows."""
    from nicest.plots import prediction_figure, save_figure

    median, low, high, *seen = (np.concatenate(each)[:DRAWN] for each in zip(*drawn, strict=True))
    observed, pit = seen or (None, None)
    pit = pit if pit is None else pit[~np.isnan(pit)]
    save_figure(
        prediction_figure(median, low, high, name=name, level=level, observed=observed, pit=pit, title=title), out
    )


def blocks(batches: Iterable[Any]) -> Iterator[Any]:
    """The rows of record batches as tables of ROWS rows each, the last of fewer."""
    import pyarrow as pa

    kept: list[Any] = []
    for batch in batches:
        while batch.num_rows:
            part = batch.slice(0, ROWS - sum(each.num_rows for each in kept))
            kept.append(part)
            batch = batch.slice(part.num_rows)
            if sum(each.num_rows for each in kept) == ROWS:
                yield pa.Table.from_batches(kept)
                kept = []
    if kept:
        yield pa.Table.from_batches(kept)


def _observed(table: Any, column: Column, path: Path) -> Observed:
    codes, unknown = encode(table, [column], path)
    numbers = np.empty(0) if column.values else as_in_training(table.column(column.name).combine_chunks(), column)
    return Observed(codes[:, 0], unknown, numbers)


def given_codes(table: Any, columns: Sequence[Column], source: Path | str) -> tuple[np.ndarray, int]:
    """The model's numbers of the columns that are given; what is missing, or a value never seen, is NaN. And how many
    values training never saw."""
    found, unseen = [], 0
    for column in columns:
        rows, unknown = encode(table, [column], Path(source))
        found.append(np.where(unknown, np.float32(np.nan), rows[:, 0]))
        unseen += int(unknown.sum())
    return np.column_stack(found), unseen


def predictions(
    flow: Flow,
    given: np.ndarray,
    targets: Sequence[Column],
    *,
    level: float = 0.9,
    draws: int = 0,
    seed: int | list[int] = 0,
) -> Prediction:
    """What a flow of targets predicts for rows of given columns, in the numbers of the model."""
    c, generator = _tensor(flow, given), _generator(flow, seed)
    if len(targets) > 1:
        n, fast = max(draws, JOINT_DRAWS), lower(flow)
        parts = [_joint(fast, some, n, generator) for some in c.split(max(1, JOINT_ROWS // n))]
        each = [
            _joined([_of_draws(part[:, :, i], column, level) for part in parts]) for i, column in enumerate(targets)
        ]
        return Prediction(each, torch.cat([part[:, :draws] for part in parts]).cpu().numpy())
    ahead, column = Predictive(flow, c), targets[0]
    kept = ahead.sample(draws, generator)[..., None].cpu().numpy() if draws else np.empty((len(given), 0, 1))
    if column.values:
        values = torch.arange(len(column.values)).to(c)
        return Prediction([{"probabilities": ahead.probability(values).cpu().numpy()}], kept)
    low, high = interval(level)
    ends = ahead.quantile(torch.tensor([0.5, low, high]))
    numbers = dict(zip(("mean", "median", "low", "high"), (ahead.mean(), *ends.unbind(1)), strict=True))
    return Prediction([{name: values.cpu().numpy() for name, values in numbers.items()}], kept)


@torch.no_grad()
def log_densities(
    flow: Flow,
    given: np.ndarray,
    targets: np.ndarray,
    unknown: np.ndarray | bool = False,
    *,
    seed: int | list[int] = 0,
) -> np.ndarray:
    """The log-density of targets (N, T), or, as far as they are discrete, their log-probability; of several discrete
    ones from below, by draws of the dequantisation noise."""
    c, x, units = _tensor(flow, given), _tensor(flow, targets), flow.units
    if targets.shape[1] == 1:
        nats = Predictive(flow, c).log_prob(x[:, 0])
    else:
        fast, generator = lower(flow), _generator(flow, seed)
        drawn = [units.enter(x, generator=generator) for _ in range(DRAWS if units.discrete else 1)]
        each = [fast.log_density(y, c) + units.log_det(y) for y in drawn]
        nats = torch.stack(each).logsumexp(0) - math.log(len(each))
    found = nats.double().cpu().numpy()
    return np.where(np.isnan(targets).any(1), np.nan, np.where(unknown, -np.inf, found))


def own_unit(codes: np.ndarray, column: Column) -> np.ndarray:
    """The model's numbers of a column of numbers in its own unit, as real numbers: means lie between whole steps."""
    return codes.astype(np.float64) * (column.step or 1.0) + column.taken_off


def _generator(flow: Flow, seed: int | list[int]) -> torch.Generator:
    state = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]
    return torch.Generator(flow.device).manual_seed(int(state) >> 1)


def _joint(flow: Flow, given: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """Draws of all targets, (N, draws, T)."""
    drawn = flow.sample(len(given) * draws, given.repeat_interleave(draws, 0), generator=generator)
    return drawn.unflatten(0, (-1, draws))


def _of_draws(drawn: Tensor, column: Column, level: float) -> dict[str, np.ndarray]:
    if column.values:
        values = torch.arange(len(column.values)).to(drawn)
        return {"probabilities": (drawn[..., None] == values).double().mean(1).cpu().numpy()}
    shares = torch.tensor([0.5, *interval(level)]).to(drawn)
    ends = torch.quantile(drawn, shares, dim=1, interpolation="nearest")
    numbers = dict(zip(("median", "low", "high"), ends, strict=True))
    return {"mean": drawn.mean(1).cpu().numpy()} | {name: each.cpu().numpy() for name, each in numbers.items()}


def _joined(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _tensor(flow: Flow, rows: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows)).to(flow.units.scale)


def schema(targets: Sequence[Column], draws: int, *, observed: bool) -> Any:
    import pyarrow as pa

    fields: list[tuple[str, Any]] = [("row", pa.int64())]
    for column in targets:
        kind = decode(np.zeros((1, 1)), [column]).schema.field(0).type
        if column.values:
            fields += [(column.name, kind), *((f"{column.name}={value}", pa.float64()) for value in column.values)]
        else:
            number = kind if is_moment(column) else pa.float64()
            fields += [(f"{column.name}_{name}", number) for name in ("mean", "median", "low", "high")]
    kinds = [(column.name, decode(np.zeros((1, 1)), [column]).schema.field(0).type) for column in targets]
    fields += [(f"{name}_draw{i + 1}", kind) for i in range(draws) for name, kind in kinds]
    fields += [("log_density", pa.float64())] if observed else []
    if twice := [name for name, count in Counter(name for name, _ in fields).items() if count > 1]:
        raise NicestError(f"the predictions would have two columns called {shown(twice[0])}: rename the target")
    return pa.schema(fields)


def predicted_cells(found: Prediction, targets: Sequence[Column], first_row: int) -> list[Any]:
    """The columns of the table of predictions."""
    import pyarrow as pa

    n = len(found.draws)
    cells: list[Any] = [pa.array(range(first_row, first_row + n), pa.int64())]
    for column, each in zip(targets, found.targets, strict=True):
        if column.values:
            likeliest = each["probabilities"].argmax(1).astype(np.float64)
            cells.append(_decoded(likeliest, column))
            cells += [pa.array(shares) for shares in each["probabilities"].T.astype(np.float64)]
        elif is_moment(column):
            cells += [_decoded(codes, column) for codes in each.values()]
        else:
            cells += [pa.array(own_unit(codes, column)) for codes in each.values()]
    for i in range(found.draws.shape[1]):
        cells += [_decoded(found.draws[:, i, t], column) for t, column in enumerate(targets)]
    if found.log_density is not None:
        cells.append(pa.array(found.log_density, mask=np.isnan(found.log_density)))
    return cells


def _decoded(codes: np.ndarray, column: Column) -> Any:
    return decode(codes[:, None], [column]).column(0).combine_chunks()
