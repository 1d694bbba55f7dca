"""Compare the probabilities of a model of a table with held-out rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from nicest.data.tables import TableFile
from nicest.errors import NicestError
from nicest.files import to_json, write_text
from nicest.runs.run import Run
from nicest.tasks import rows
from nicest.tasks.options import Seed, option, out_folder, place, to_read
from nicest.tasks.results import Result, cell, columns, count

LEVELS = (0.5, 0.8, 0.9, 0.95)  # of intervals
MOST, FEWER = 10_000, 1_000  # rows that are looked at, and rows whose chains are drawn


@dataclass(frozen=True, kw_only=True)
class Calibration(Result):
    """How often held-out cells lie in the intervals of their distribution given the rest of the row.

    `coverage` has a row for each level: the fraction of cells inside, and the range that chance allows. `ks` is the
    Kolmogorov-Smirnov distance of the PIT values from uniform, with its 5 % `limit`; `columns` has it by column.
    `gap` is the mean difference between P(X <= truth) by one pass of the network and by joint draws.
    """

    out: list[str]
    data: str
    rows: int
    cells: int
    unknown: int
    verdict: str
    coverage: list[dict[str, float]]
    ks: float
    limit: float
    columns: dict[str, float]
    gap: float
    seed: int

    def lines(self) -> Iterator[Any]:
        yield self.verdict
        levels = columns("intervals", ">cells inside", ">chance allows")
        for row in self.coverage:
            levels.add_row(f"{row['level']:.0%}", f"{row['share']:.1%}", f"{row['low']:.1%} to {row['high']:.1%}")
        yield levels
        pits = columns("PIT of", ">KS distance")
        worst = sorted(self.columns.items(), key=lambda pair: -pair[1])[:5]
        for name, value in [("all cells", self.ks), *worst]:
            pits.add_row(cell(name), f"{value:.3f}")
        yield pits
        if math.isfinite(self.gap):
            yield f"one pass and chain draws of the same cells differ by {self.gap:.3f} on average"
        yield f"{count(self.rows, 'row')} of {Path(self.data).name}, {count(self.cells, 'cell')}"
        if self.unknown:
            yield f"{count(self.unknown, 'cell')} with a value that training never saw, left out"
        yield f"written: {' '.join(self.out)}"


def calibrate(
    run: Run,
    table: Annotated[
        str | Path | None,
        option(
            "--data",
            parser=lambda text: place(to_read(str(text))),
            metavar="<path>",
            help="A table with rows that training has not seen.",
            show_default="the test split of the run",
        ),
    ] = None,
    *,
    out: Annotated[
        str | Path | None, out_folder("For calibration.png and calibration.json.", show_default="RUN/calibration")
    ] = None,
    seed: Seed = 0,
) -> Calibration:
    """Check on held-out rows whether the intervals of a model of a table hold the fraction of cells they claim.

    Every observed cell is hidden in turn, and its value compared with its distribution given the rest of its row.

    Example: nicest calibrate runs/people --data new.parquet
    """
    rows.require_table(run)
    folder = Path(out) if out else run.path / "calibration"
    files = {kind: folder / f"calibration.{kind}" for kind in ("json", "png")}
    rows.require_outputs(run, *files.values(), inputs=[Path(table)] if table else [])
    values, unknown = held_out(run, table)
    rng = np.random.default_rng(seed)
    values = values[rng.permutation(len(values))[:MOST]]
    pits = column_pits(run, values, rng)
    gap = run.table.calibration(values[:FEWER], seed=seed)["gap"]
    told = summary(pits, len(values)) | {"gap": gap, "unknown": unknown, "seed": seed}
    told |= {"data": str(table or run.recipe.data.name)}
    if pits:
        _draw(files["png"], pits, told["coverage"], f"{Path(run.recipe.data.name).name}: {run.path.name}")
    write_text(files["json"], to_json(told))
    return Calibration(out=[str(file) for file in files.values()], **told)


def column_pits(run: Run, values: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return PIT values of every column of numbers given the other columns, by name."""
    found = {}
    for i, name in enumerate(run.table.schema.names):
        (marginal,) = run.table.marginals(values, [i])
        there = ~np.isnan(values[:, i])
        if marginal.numeric and not run.table.schema[i].constant and there.any():
            codes = np.where(there, values[:, i], np.float32(0))
            lower, upper = marginal.cdf_of(codes, strict=True), marginal.cdf_of(codes)
            found[name] = (lower + rng.random(len(codes)) * (upper - lower))[there]
    return found


def held_out(run: Run, table: str | Path | None) -> tuple[np.ndarray, int]:
    """Return the encoded rows of a file, or of the test split of the run, and how many cells training never saw."""
    if table is None:
        try:
            return run.splits.test, 0
        except NicestError as error:
            raise NicestError(f"{run.path} has no held-out rows at hand: name a table as data ({error})") from error
    path = rows.table_path(table)
    file: TableFile = rows.open_table(path, run.table.schema)
    parts, unknown, n = [], 0, 0
    for some in rows.batches(file, run.table.schema.names):
        values, new = rows.encoded(some, run.table.schema, path)
        parts.append(values)
        unknown, n = unknown + int(new.sum()), n + len(values)
        if n >= 10 * MOST:  # enough to choose from
            break
    if n < 2:
        raise NicestError(f"{path}: expected 2 rows or more, got {n}")
    return np.concatenate(parts), unknown


def ks_distance(pit: np.ndarray) -> float:
    """Return the largest distance of the distribution of values in [0, 1] from the uniform one; NaN without values."""
    ordered, ranks = np.sort(pit), np.arange(len(pit) + 1) / max(1, len(pit))
    return float(max((ranks[1:] - ordered).max(), (ordered - ranks[:-1]).max())) if len(pit) else math.nan


def summary(pits: dict[str, np.ndarray], n: int) -> dict[str, Any]:
    """Return the metrics of PIT values by column, of n rows, as fields of a `Calibration`."""
    pit = np.concatenate([*pits.values(), np.empty(0)])
    coverage, worst = [], 0.0
    for level in LEVELS if len(pit) else ():
        share = float((np.abs(2 * pit - 1) <= level).mean())
        spread = 2 * math.sqrt(level * (1 - level) / n)  # cells of a row are dependent: as if each row had one
        coverage.append({"level": level, "share": share, "low": level - spread, "high": min(1.0, level + spread)})
        worst = max(worst, abs(share - level) - spread)
    if not len(pit):
        verdict = "the table has no columns of numbers, so there are no intervals to check"
    elif worst <= 0:
        verdict = "calibrated: intervals hold the fraction of cells that they claim, as far as these rows can tell"
    elif sum(row["share"] - row["level"] for row in coverage) < 0:
        verdict = "overconfident: intervals hold fewer cells than they claim"
    else:
        verdict = "underconfident: intervals hold more cells than they claim"
    columns = {name: ks_distance(each) for name, each in pits.items()}
    told: dict[str, Any] = {"rows": n, "cells": len(pit), "verdict": verdict, "coverage": coverage}
    return told | {"ks": ks_distance(pit), "limit": 1.36 / math.sqrt(n), "columns": columns}


def _draw(path: Path, pits: dict[str, np.ndarray], coverage: list[dict[str, float]], title: str) -> None:
    """Draw coverage by level, and histograms of the PIT values."""
    from nicest.plots import calibration_figure, save_figure

    worst = max(pits, key=lambda name: ks_distance(pits[name]))
    pit, levels = np.concatenate(list(pits.values())), np.linspace(0, 1, 101)
    shown = {"all cells": pit, f"worst column, {worst}": pits[worst]}
    curves = {name: (np.abs(2 * each - 1)[:, None] <= levels).mean(0) for name, each in shown.items()}
    spread = 2 * np.sqrt(levels * (1 - levels) / len(pit))
    band = (levels - spread).clip(0), (levels + spread).clip(max=1)
    marked = [(row["level"], row["share"]) for row in coverage]
    how: dict[str, Any] = {"independent": len(pit), "title": title}
    save_figure(calibration_figure(levels, curves, band, marked, shown, **how), path)
