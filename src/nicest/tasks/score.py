"""Log-densities and outlier scores of the rows of files, by one process or by many.

An outlier score is the fraction of training rows with a higher log-density.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from nicest.data.arrays import read_npy
from nicest.data.columns import Category
from nicest.data.tables import append_columns, table_files, writing
from nicest.errors import NicestError
from nicest.files import replacing
from nicest.inference.engine import Engine
from nicest.progress import Bar
from nicest.runs.digests import expect, settle, verify
from nicest.runs.run import Run
from nicest.runs.runtime import rows_to
from nicest.tasks import rows
from nicest.tasks.options import Noise, Seed, given, option, out_file, place
from nicest.tasks.results import Result, count

CAVEAT = "A high density does not mean typical: in many dimensions the densest point is one that you never see."
SCORES = {"train": "training-scores.npy", "valid": "validation-scores.npy"}
QUANTILES = 1001  # of the log-densities of training rows
ROWS = 100_000  # training rows that the quantiles are computed from
LEVELS = tuple((k + 0.5) / 16 for k in range(16))  # quantiles over which an expected log-density is averaged
SCHEMA = [("file", "string"), ("row", "int64"), ("log_density", "float64"), ("outlier_score", "float64")]
CELLS = [("cell", "string"), ("cell_surprise", "float64")]


@dataclass(frozen=True, kw_only=True)
class Scores(Result):
    """Counts of scored rows: in all, with missing cells, and with values that training never saw."""

    out: str
    dataset: str
    draws: int
    seed: int
    mean_nats: float | None
    caveat: str
    rows: int
    missing: int
    unknown: int

    def lines(self) -> Iterator[Any]:
        mean = "" if self.mean_nats is None else f"; mean log-density: {self.mean_nats:.3f} nats"
        yield f"{count(self.rows, 'row')} scored in {self.out}{mean}"
        if self.missing:
            yield f"{count(self.missing, 'row')} with missing cells: log-density of the observed cells"
        if self.unknown:
            yield (
                f"{count(self.unknown, 'row')} with a value that training never saw, or one far out of range:"
                " log-density -inf"
            )
        yield self.caveat


def score(
    run: Run,
    files: Annotated[Sequence[str | Path], given("Tables, arrays, images, or folders of them.", place)],
    *,
    out: Annotated[str | Path, out_file("The scores: .csv or .parquet.", rows=True)] = "scores.csv",
    cells: Annotated[bool, option("--cells", help="Add the most surprising cell of each row of a table.")] = False,
    draws: Noise = 8,
    seed: Seed = 0,
) -> Scores:
    """Compute the log-density and the outlier score of every row or image.

    `log_density` is in nats: for tables the log of the density of real columns and of the probability of discrete
    ones, without noise; with missing cells, that of the observed cells. `outlier_score` is the fraction of training
    rows with a higher density: near 1 for outliers. --cells adds `cell`, the column that fits the other cells of its
    row least, and `cell_surprise`, minus the log of its density or probability given them.

    Under torchrun every process writes a part, named after its rank: row groups of Parquet files and whole other files
    are shared out, and the parts in order are what one process writes.

    Example: nicest score runs/people new.parquet --out scores.parquet
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    path = rows.part_path(place(out), rank, size)
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise NicestError(f"expected a file for the scores that ends in .csv or .parquet, got {str(out)!r}")
    if cells:
        rows.require_table(run)
    paths = table_files(files) if run.kind == "table" else [place(file) for file in files]
    rows.require_outputs(run, path, inputs=paths)
    parts = rows.share(list(rows.plan(paths, run)), rank, size)
    draws = 1 if run.kind == "table" else run.draws(draws)
    quantiles = score_quantiles(run, draws)
    named, text = len(paths) > 1 or bool(rows.image_names(paths[0])), path.suffix.lower() == ".csv"
    schema = [*SCHEMA[0 if named else 1 :], *(CELLS if cells else [])]
    counts, total = {"rows": 0, "missing": 0, "unknown": 0}, 0.0
    with ExitStack() as stack:
        write = stack.enter_context(writing(path, schema, plain=True))
        bar = stack.enter_context(Bar("scoring", len(parts)))
        for done, part in enumerate(parts, 1):
            row = part.first_row
            for found in _scores(run, part, quantiles, draws, seed, counts, cells=cells):
                nats, n = found[0], len(found[0])
                names = rows.image_names(part.path, whole=len(paths) > 1) or [rows.plain_name(part.path)] * n
                numbers = [each if isinstance(each, list) else rows.csv_cells(each, text=text) for each in found]
                write([*([names] if named else []), list(range(row, row + n)), *numbers])
                row, counts["rows"] = row + n, counts["rows"] + n
                total += float(nats[np.isfinite(nats)].sum())
                bar.update(done - 1, f"{counts['rows']:,} rows")
            bar.update(done)
    finite = counts["rows"] - counts["unknown"]
    told: dict[str, Any] = {"out": str(path), "dataset": run.recipe.data.name, **counts}
    mean = total / finite if finite else None
    return Scores(mean_nats=mean, draws=draws, seed=seed, caveat=CAVEAT, **told)


def _scores(
    run: Run,
    part: rows.Part,
    quantiles: np.ndarray | None,
    draws: int,
    seed: int,
    counts: dict[str, int],
    *,
    cells: bool,
) -> Iterator[list[Any]]:
    """Yield the columns of scores for each batch, and count rows with missing or unknown cells."""
    if run.kind == "table":
        for values, unknown in rows.table_rows(part, run):
            counts["missing"] += int((np.isnan(values) & ~unknown).any(1).sum())
            counts["unknown"] += int(unknown.any(1).sum())
            yield table_scores(run, values, unknown, quantiles, cells=cells)
        return
    # the noise depends on the seed and on the file alone
    state = np.random.SeedSequence([seed, part.file, part.group]).generate_state(1, np.uint64)[0]
    generator = torch.Generator(run.device).manual_seed(int(state) >> 1)
    nats = log_densities(run.engine, rows.model_rows(part.path, run.recipe), draws, generator)
    yield [nats, outlier_scores(nats, quantiles)]


def table_scores(
    run: Run, values: np.ndarray, unknown: np.ndarray, quantiles: np.ndarray | None, *, cells: bool = False
) -> list[Any]:
    """Return log-densities, outlier scores and, if asked, the most surprising cells of encoded rows (N, D)."""
    nats = np.where(unknown.any(1), -np.inf, run.table.score(values))
    found: list[Any] = [nats, outlier_scores(nats + typical_rest(run.table, values), quantiles)]
    if cells:
        surprise = np.where(unknown, np.inf, -np.asarray(run.table.surprise(values), dtype=np.float64))
        most = np.where(np.isnan(surprise), -np.inf, surprise).argmax(1)
        largest = surprise[np.arange(len(most)), most]  # NaN in rows without any cell
        names = [run.table.schema.names[i] for i in most.tolist()]
        found += [[None if size != size else name for name, size in zip(names, largest, strict=True)], largest]
    return found


def score_batch(run: Run, table: Any, *, quantiles: np.ndarray | None = None) -> Any:
    """Append log_density and outlier_score to an Arrow table, as `score` computes them for a file with these rows.

    `quantiles` are those of `score_quantiles`; without them the outlier scores are missing.
    """
    import pyarrow as pa

    run.table.schema.require_in(table.column_names, "this table")
    found = table_scores(run, *rows.encoded(table, run.table.schema, "this table"), quantiles)
    columns = [pa.array(each, pa.float64(), mask=np.isnan(each)) for each in found]
    return append_columns(table, pa.table(columns, names=["log_density", "outlier_score"]))


def log_densities(engine: Engine, rows: np.ndarray, draws: int, generator: torch.Generator | None = None) -> np.ndarray:
    """Return the mean log-density of rows (N, D) over draws of the dequantisation noise, (N,)."""
    # all draws of a row, then those of the next one: its noise does not depend on the size of the batch
    parts = rows_to(rows, engine.device).split(max(1, engine.batch // draws))
    each = [engine.log_prob(part.repeat_interleave(draws, 0), generator=generator).view(-1, draws) for part in parts]
    nats = torch.cat(each).double().mean(1).cpu().numpy() if each else np.empty(0)
    return np.where(np.isnan(nats), -np.inf, nats)  # so far off that float32 has no number for it


def typical_rest(table: Any, rows: np.ndarray) -> np.ndarray:
    """Return the expected log-density of the missing cells of rows (N, D), each given the observed ones; (N,).

    Added to the log-density of the observed cells, it makes incomplete rows comparable with complete ones.
    """
    total = np.zeros(len(rows))
    for i, marginal, missing in table.missing(rows):
        if isinstance(table.schema[i], Category):
            p = np.asarray(marginal.probabilities(), dtype=np.float64)
            total[missing] += (p * np.log(np.where(p > 0, p, 1.0))).sum(1)
        else:
            total[missing] += np.mean([marginal.log_prob(marginal.quantile(level)) for level in LEVELS], axis=0)
    return total


def kept_quantiles(run: Run, draws: int = 1, split: str = "train") -> np.ndarray | None:
    """Read the quantiles that `score_quantiles` wrote; None if they are missing, damaged or of another model."""
    path = scores_path(run, split)
    if path.is_file():
        with suppress(NicestError):  # a damaged file is computed again
            verify(path, strict=False)
            kept = read_npy(path)
            if kept.shape == (2 + QUANTILES,) and (*kept[:2],) == (draws, run.figures.get("step", 0)):
                return kept[2:]
    return None


def score_quantiles(run: Run, draws: int = 1, split: str = "train", engine: Engine | None = None) -> np.ndarray | None:
    """Return quantiles of the log-density of the rows of a split; None if the data is gone.

    They are kept in the run folder with the step of the model, because training that continues finds a better one.
    """
    if (kept := kept_quantiles(run, draws, split)) is not None:
        return kept
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # training reported them
            rows = run.splits.split(split)
    except NicestError as error:
        Bar("", 1).note(f"no outlier scores: {error}")
        return None
    chosen = rows[np.random.default_rng(0).permutation(len(rows))[:ROWS]]
    if run.kind == "table":
        nats = run.table.score(chosen) + typical_rest(run.table, chosen)
    else:
        engine = engine or run.engine
        nats = log_densities(engine, chosen, draws, torch.Generator(engine.device).manual_seed(0))
    quantiles: np.ndarray = np.nanquantile(nats, np.linspace(0, 1, QUANTILES))
    try:
        keep_quantiles(scores_path(run, split), quantiles, draws, int(run.figures.get("step", 0)))
    except NicestError as error:  # a read-only folder
        Bar("", 1).note(f"the {Path(SCORES[split]).stem.replace('-', ' ')} are not kept: {error}")
    return quantiles


def keep_quantiles(path: Path, quantiles: np.ndarray, draws: int = 1, step: int = 0) -> None:
    """Write the quantiles of the log-densities of a split to a file, with their digest."""
    with replacing(path) as temporary:
        with temporary.open("wb") as file:
            np.save(file, np.array([draws, step, *quantiles]))
        expect(path, temporary)
    settle(path)


def scores_path(run: Run, split: str = "train") -> Path:
    """Return the file that keeps the quantiles of a run, or of the images of its label."""
    path = run.path / SCORES[split]
    return path if run.label is None else path.with_stem(f"{path.stem}-{run.label}")


def outlier_scores(nats: np.ndarray, quantiles: np.ndarray | None) -> np.ndarray:
    """Return the fraction of training rows with a higher log-density, NaN without quantiles."""
    if quantiles is None:
        return np.full(len(nats), np.nan)
    denser = 1 - np.interp(nats, quantiles, np.linspace(0, 1, len(quantiles)))
    return np.where(np.isnan(nats), np.nan, denser)
