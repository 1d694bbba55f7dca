"""Compare the probabilities of a model of a table with held-out rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from nicest.data.tables import TableFile
from nicest.errors import NicestError
from nicest.files import require_writable, to_json, write_text
from nicest.remote import place
from nicest.runs.folder import require_own_file
from nicest.runs.run import Run
from nicest.tasks import options, rows
from nicest.tasks.results import Result, cell, columns, count

MOST = 10_000  # rows that are looked at


@dataclass(frozen=True, kw_only=True)
class Calibration(Result):
    """How often held-out cells lie in the intervals of their distribution given the rest of the row.

    `coverage` has a row for each level: the fraction of cells inside, and the range that chance allows. `ks` is the
    Kolmogorov-Smirnov distance of the PIT values from uniform, with its 5 % `limit`; `columns` has it by column.
    `gap` is the distance between a cell's distribution by one pass of the network and by draws of the chain.
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
    gap: float | None
    seed: int

    def lines(self) -> Iterator[Any]:
        """Yield the verdict and the tables behind it."""
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
        if self.gap is not None:
            yield f"one pass and chain draws of the same cells differ by {self.gap:.3f} (KS distance)"
        yield f"{count(self.rows, 'row')} of {Path(self.data).name}, {count(self.cells, 'cell')}"
        if self.unknown:
            yield f"{count(self.unknown, 'cell')} with a value that training never saw, left out"
        yield f"written: {' '.join(self.out)}"


def calibrate(
    run: Run,
    table: Annotated[
        str | Path | None,
        options.option(
            "--data",
            parser=lambda text: place(options.to_read(str(text))),
            metavar="<path>",
            help="A table with rows that training has not seen.",
            show_default="the test split of the run",
        ),
    ] = None,
    *,
    out: Annotated[
        str | Path | None,
        options.out_folder("For calibration.png and calibration.json.", show_default="RUN/calibration"),
    ] = None,
    seed: options.Seed = 0,
) -> Calibration:
    """Check on held-out rows whether the intervals of a model of a table hold the fraction of cells they claim.

    Every observed cell is hidden in turn, and its value compared with its distribution given the rest of its row.

    Example: nicest calibrate runs/people --data new.parquet
    """
    rows.require_table(run)
    folder = Path(out) if out else run.path / "calibration"
    files = {kind: folder / f"calibration.{kind}" for kind in ("json", "png")}
    for file in files.values():
        require_own_file(file, run.recipe, *([Path(table)] if table else []))
        require_writable(file)
    values, unknown = held_out(run, table)
    chosen = np.random.default_rng(seed).permutation(len(values))[:MOST]
    found = run.table.calibration(values[chosen], seed=seed)
    _draw(files["png"], found, run.schema.names, f"{Path(run.recipe.data.name).name}: {run.path.name}")
    result = _summary(run, found, len(chosen)) | {"data": str(table or run.recipe.data.name), "unknown": unknown}
    write_text(files["json"], to_json({**result, "seed": seed}))
    return Calibration(out=[str(file) for file in files.values()], seed=seed, **result)


def held_out(run: Run, table: str | Path | None) -> tuple[np.ndarray, int]:
    """Return the encoded rows of a file, or of the test split of the run, and how many cells training never saw."""
    if table is None:
        try:
            return run.splits.test, 0
        except NicestError as error:
            raise NicestError(f"{run.path} has no held-out rows at hand: name a table by --data ({error})") from error
    path = rows.table_path(table)
    file: TableFile = rows.open_table(path, run.schema)
    parts, unknown, n = [], 0, 0
    for some in rows.batches(file, run.schema.names):
        values, new = rows.encoded(some, run.schema, path)
        parts.append(values)
        unknown, n = unknown + int(new.sum()), n + len(values)
        if n >= 10 * MOST:  # enough to choose from
            break
    if n < 2:
        raise NicestError(f"{path}: expected 2 rows or more, got {n}")
    return np.concatenate(parts), unknown


def ks_distance(pit: np.ndarray) -> float:
    """Return the largest distance of the distribution of values in [0, 1] from the uniform one."""
    ordered, n = np.sort(pit), len(pit)
    if not n:
        return math.nan
    ranks = np.arange(n + 1) / n
    return float(max((ranks[1:] - ordered).max(), (ordered - ranks[:-1]).max()))


def _summary(run: Run, found: dict[str, Any], n: int) -> dict[str, Any]:
    """Return the metrics of `Table.calibration` as the fields of a `Calibration`."""
    pit, independent = np.asarray(found["pit"], dtype=np.float64), max(1, n)
    column = np.broadcast_to(np.asarray(found["column"]), pit.shape)
    coverage, worst = [], 0.0
    for level, share in sorted(found["coverage"].items()):
        # cells of a row depend on one another: chance is that of as many cells as there are rows
        spread = 2 * math.sqrt(level * (1 - level) / independent)
        coverage.append({"level": level, "share": share, "low": level - spread, "high": min(1.0, level + spread)})
        worst = max(worst, abs(share - level) - spread)
    by_column = {name: ks_distance(pit[column == i]) for i, name in enumerate(run.schema.names) if (column == i).any()}
    narrow = sum(row["share"] - row["level"] for row in coverage) < 0
    if worst <= 0:
        verdict = "calibrated: intervals hold the share of cells that they claim, as far as these rows can tell"
    elif narrow:
        verdict = "overconfident: intervals hold fewer cells than they claim"
    else:
        verdict = "underconfident: intervals hold more cells than they claim"
    limit = 1.36 / math.sqrt(independent)
    told: dict[str, Any] = {"rows": n, "cells": len(pit), "verdict": verdict, "coverage": coverage}
    return told | {"ks": ks_distance(pit), "limit": limit, "columns": by_column, "gap": found.get("gap")}


def _draw(path: Path, found: dict[str, Any], names: Sequence[str], title: str) -> None:
    """Draw coverage by level, and a histogram of the PIT values."""
    from nicest.plots import calibration_figure, save_figure

    pit = np.asarray(found["pit"], dtype=np.float64)
    levels, inside = np.linspace(0, 1, 101), np.abs(2 * pit - 1)
    spread = 2 * np.sqrt(levels * (1 - levels) / max(1, len(pit)))
    band = (levels - spread).clip(0), (levels + spread).clip(max=1)
    column = np.broadcast_to(np.asarray(found["column"]), pit.shape)
    worst = max(np.unique(column).tolist(), key=lambda i: ks_distance(pit[column == i]))
    chosen = {"all cells": inside, f"worst column, {names[worst]}": inside[column == worst]}
    curves = {name: np.array([(each <= level).mean() for level in levels]) for name, each in chosen.items()}
    marked = sorted(found["coverage"].items())
    how: dict[str, Any] = {"independent": len(pit), "title": title}
    save_figure(calibration_figure(levels, curves, band, marked, {"cells given the rest": pit}, **how), path)
