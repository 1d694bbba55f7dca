"""Predictions for the rows of a table, from a model of some columns given the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nicest.data.cells import cell_values, decode, encode, is_moment
from nicest.data.columns import Column, require_columns
from nicest.data.tables import SUFFIXES, TableFile, require_pyarrow, writing
from nicest.errors import NicestError
from nicest.flows import Flow
from nicest.inference.predictive import Predictive, interval
from nicest.progress import Bar
from nicest.runs.folder import require_own_file
from nicest.runs.run import DRAWS, Run

JOINT_DRAWS = 500  # of several targets, whose means and intervals are those of draws
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


@dataclass
class Tally:
    """How good predictions are, of the rows whose targets are known."""

    rows: int = 0
    nats: list[float] = field(default_factory=list)
    squares: dict[str, list[float]] = field(default_factory=dict)
    hits: dict[str, list[float]] = field(default_factory=dict)

    def of(self, column: Column) -> dict[str, float]:
        """The figures of a target: accuracy of categories, RMSE and coverage of numbers; none where it is not known."""
        squares, hits = self.squares.get(column.name), self.hits.get(column.name)
        if not squares:
            return {}
        if column.values:
            return {"accuracy": float(np.mean(squares))}
        return {"rmse": math.sqrt(float(np.mean(squares))), "coverage": float(np.mean(hits or [math.nan]))}


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
    path, target = Path(table), Path(out)
    columns, places = run.columns, run.recipe.data.targets
    if not places:
        raise NicestError(f"{run.path} has no target to predict: train a model with --target COLUMN")
    for each in (path, target):
        if each.suffix.lower() not in SUFFIXES:
            raise NicestError(f"expected a table, a file that ends in {', '.join(SUFFIXES)}, got {str(each)!r}")
    require_own_file(target, run.recipe, path)
    shown: list[tuple[np.ndarray, ...]] = []
    if picture and (len(places) > 1 or columns[places[0]].values or is_moment(columns[places[0]])):
        raise NicestError("a picture shows one target that is a number, and these are others: leave the picture out")
    require_pyarrow()
    file = TableFile(path)
    targets, given = [columns[i] for i in places], [c for i, c in enumerate(columns) if i not in places]
    require_columns(file, given)
    observed = all(column.name in file.names for column in targets)
    tally = Tally()
    with ExitStack() as stack:
        write = stack.enter_context(writing(target, _schema(targets, draws, observed=observed), plain=True))
        bar = stack.enter_context(Bar("predicting", file.count or 0))
        for batch in file.batches([column.name for column in (*given, *(targets if observed else ()))]):
            for some in (batch.slice(start, ROWS) for start in range(0, batch.num_rows, ROWS)):
                codes = given_codes(some, given, path)
                truth = encode(some, targets, path) if observed else None
                found = predictions(run.flow, codes, targets, level=level, draws=draws, seed=[seed, tally.rows])
                if truth:
                    found.log_density = log_densities(run.flow, codes, truth.rows, truth.unknown)
                    if picture:
                        shares = Predictive(run.flow, _tensor(run.flow, codes)).cdf(_tensor(run.flow, truth.rows[:, 0]))
                        found.pit = shares.cpu().numpy()
                    _judge(tally, found, truth.rows, targets)
                write(_cells(found, targets, tally.rows))
                if picture and tally.rows < DRAWN:
                    ends = [own_unit(found.targets[0][name], targets[0]) for name in ("median", "low", "high")]
                    seen = [cell_values(truth.rows[:, 0], targets[0]), found.pit] if truth else []
                    shown.append((*ends, *seen))  # type: ignore[arg-type]
                tally.rows += some.num_rows
                bar.update(tally.rows)
    if not tally.rows:
        raise NicestError(f"{path}: expected rows to predict, got none beside the names of its columns")
    if picture:
        _draw(Path(picture), shown, targets[0].name, level, f"{path.name}, predicted by {run.path.name}")
    return {
        "out": str(target),
        "picture": str(picture) if picture else None,
        "rows": tally.rows,
        "level": level,
        "targets": {column.name: tally.of(column) for column in targets},
        "mean_nats": float(np.mean(tally.nats)) if tally.nats else None,
        "seed": seed,
    }


def _draw(out: Path, shown: Sequence[tuple[np.ndarray, ...]], name: str, level: float, title: str) -> None:
    """A picture of the first rows."""
    from nicest.plots import prediction_figure, save_figure

    median, low, high, *seen = (np.concatenate(each)[:DRAWN] for each in zip(*shown, strict=True))
    observed, pit = seen or (None, None)
    save_figure(
        prediction_figure(median, low, high, name=name, level=level, observed=observed, pit=pit, title=title), out
    )


def given_codes(table: Any, columns: Sequence[Column], source: Path | str) -> np.ndarray:
    """The model's numbers of the columns that are given; what is missing, or a value never seen, is NaN."""
    found = []
    for column in columns:
        rows, unknown = encode(table, [column], Path(source))
        found.append(np.where(unknown, np.float32(np.nan), rows[:, 0]))
    return np.column_stack(found)


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
    c, generator = _tensor(flow, given), torch.Generator(flow.device)
    generator.manual_seed(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]) >> 1)
    if len(targets) > 1:
        drawn = _joint(flow, c, max(draws, JOINT_DRAWS), generator)
        each = [_of_draws(drawn[:, :, i], column, level) for i, column in enumerate(targets)]
        return Prediction(each, drawn[:, :draws].cpu().numpy())
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
def log_densities(flow: Flow, given: np.ndarray, targets: np.ndarray, unknown: np.ndarray | bool = False) -> np.ndarray:
    """The log-density of targets (N, T), or, as far as they are discrete, their log-probability; of several discrete
    ones from below."""
    c, x = _tensor(flow, given), _tensor(flow, targets)
    if targets.shape[1] == 1:
        nats = Predictive(flow, c).log_prob(x[:, 0])
    else:
        each = [flow.log_prob(x, given=c) for _ in range(DRAWS if flow.units.discrete else 1)]
        nats = torch.stack(each).logsumexp(0) - math.log(len(each))
    found = nats.double().cpu().numpy()
    return np.where(np.isnan(targets).any(1), np.nan, np.where(unknown, -np.inf, found))


def own_unit(codes: np.ndarray, column: Column) -> np.ndarray:
    """The model's numbers of a column of numbers in its own unit, as real numbers: means lie between whole steps."""
    return codes.astype(np.float64) * (column.step or 1.0) + column.taken_off


def _joint(flow: Flow, given: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """Draws of all targets, (N, draws, T)."""
    drawn = flow.sample(len(given) * draws, given=given.repeat_interleave(draws, 0), generator=generator)
    return drawn.unflatten(0, (-1, draws))


def _of_draws(drawn: Tensor, column: Column, level: float) -> dict[str, np.ndarray]:
    if column.values:
        values = torch.arange(len(column.values)).to(drawn)
        return {"probabilities": (drawn[..., None] == values).double().mean(1).cpu().numpy()}
    shares = torch.tensor([0.5, *interval(level)]).to(drawn)
    numbers = dict(zip(("median", "low", "high"), torch.quantile(drawn, shares, dim=1), strict=True))
    return {"mean": drawn.mean(1).cpu().numpy()} | {name: each.cpu().numpy() for name, each in numbers.items()}


def _tensor(flow: Flow, rows: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows)).to(flow.units.scale)


def _schema(targets: Sequence[Column], draws: int, *, observed: bool) -> Any:
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
    return pa.schema(fields + ([("log_density", pa.float64())] if observed else []))


def _cells(found: Prediction, targets: Sequence[Column], first_row: int) -> list[Any]:
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


def _judge(tally: Tally, found: Prediction, truth: np.ndarray, targets: Sequence[Column]) -> None:
    """Take note of how far predictions were from what was observed."""
    assert found.log_density is not None
    tally.nats += found.log_density[np.isfinite(found.log_density)].tolist()
    for i, (column, each) in enumerate(zip(targets, found.targets, strict=True)):
        there = ~np.isnan(truth[:, i])
        observed = truth[there, i].astype(np.float64)
        if column.values:
            right = each["probabilities"].argmax(1)[there] == observed
            tally.squares.setdefault(column.name, []).extend(right.astype(float).tolist())
            continue
        value = cell_values(observed, column)
        off = own_unit(each["mean"][there], column) - value
        tally.squares.setdefault(column.name, []).extend((off**2).tolist())
        inside = (observed >= each["low"][there] - 1e-6) & (observed <= each["high"][there] + 1e-6)
        tally.hits.setdefault(column.name, []).extend(inside.astype(float).tolist())
