"""The log-density of every row of files, in a stream: tables, arrays and images, by one process or by many."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nicest.data import images
from nicest.data.arrays import as_rows, read_npy, read_npz
from nicest.data.cells import Batch, encode
from nicest.data.columns import Column, require_columns
from nicest.data.splits import folder_images, read_rows
from nicest.data.tables import IN_MEMORY, SUFFIXES, TableFile, append_columns, is_table, table_files, writing
from nicest.errors import NicestError
from nicest.files import replacing
from nicest.inference.engine import Engine
from nicest.messages import listed
from nicest.progress import Bar
from nicest.recipes import Recipe
from nicest.recipes.defaults import FEW
from nicest.recipes.recipe import DataSettings
from nicest.remote import Remote, looked_from, place
from nicest.runs.digests import expect, settle, verify
from nicest.runs.folder import COLUMNS, require_own_file
from nicest.runs.run import Run
from nicest.runs.runtime import rows_to

CAVEAT = "A high density does not mean typical: in many dimensions the densest point is one that you never see."
SCORES = {"train": "training-scores.npy", "valid": "validation-scores.npy"}
SCHEMA = [("file", "string"), ("row", "int64"), ("log_density", "float64"), ("outlier_score", "float64")]
QUANTILES = 1001  # of the log-densities of training, which outlier scores are read from


class Part(NamedTuple):
    """What one process scores at once: a file, or a row group of a table."""

    file: int
    path: Path
    table: TableFile | None
    group: int
    first_row: int


def score(
    run: Run, files: Sequence[str | Path], *, out: str | Path = "scores.csv", draws: int = 8, seed: int = 0
) -> dict[str, Any]:
    """Write one line for every row of the files: file, row, log_density and outlier_score.

    `file` is there where several files are scored, and of the images of a folder, by their paths from there.
    `log_density` is in nats. Of a table with whole numbers, texts or booleans it is the log of the mean of p over
    `draws` of the noise in their steps: from below, and nearer to the log-probability with more draws. Of images with
    levels it is the mean of log p over them, as `evaluate` has it. It is missing where a cell is, and -inf where a
    cell holds a value that training never saw. `outlier_score` is the share of training rows that are denser: near 1
    for what is rarer than nearly all of them.

    Under torchrun every process writes a part of its own, named after its rank; the parts, one after the other, are
    what one process writes. What is shared out are the row groups of Parquet, and whole files of every other kind: a
    large .csv or Arrow file is scored by one process. The noise of a row depends on `seed`, on its file and its row
    group, and on nothing else.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    path = part_path(place(out), rank, size)
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise NicestError(f"expected a file for the scores that ends in .csv or .parquet, got {str(out)!r}")
    recipe, columns = run.recipe, run.columns
    paths = table_files(files) if columns else [place(file) for file in files]
    require_own_file(path, recipe, *paths)
    parts = share(list(plan(paths, columns)), rank, size)
    draws = run.draws(draws)
    quantiles = score_quantiles(run, draws)
    named, text = len(paths) > 1 or bool(image_names(paths[0])), path.suffix.lower() == ".csv"
    counts = {"rows": 0, "missing": 0, "unknown": 0}
    total = 0.0
    with ExitStack() as stack:
        write = stack.enter_context(writing(path, SCHEMA if named else SCHEMA[1:], plain=True))
        bar = stack.enter_context(Bar("scoring", len(parts)))
        for done, part in enumerate(parts):
            row = part.first_row
            own_seed = [seed, part.file, part.group]  # the same noise whichever process scores the part
            batches = chunks(part, columns, recipe)
            for nats, rarities in scored(run, batches, draws=draws, seed=own_seed, quantiles=quantiles):
                names = image_names(part.path, whole=len(paths) > 1) or [plain_name(part.path)] * len(nats)
                numbers = (_cells(each, text=text) for each in (nats, rarities))
                cells = [names, list(range(row, row + len(nats))), *numbers]
                write(cells if named else cells[1:])
                row += len(nats)
                known = nats[np.isfinite(nats)]
                total += float(known.sum())
                counts["rows"] += len(nats)
                counts["missing"] += int(np.isnan(nats).sum())
                counts["unknown"] += int(np.isneginf(nats).sum())
                bar.update(done, f"{counts['rows']:,} rows")
            bar.update(done + 1)
    finite = counts["rows"] - counts["missing"] - counts["unknown"]
    return {
        "out": str(path),
        "dataset": recipe.data.name,
        "draws": draws,
        "seed": seed,
        "mean_nats": total / finite if finite else None,
        "caveat": CAVEAT,
        **counts,
    }


def scored(
    run: Run, batches: Iterable[Batch], *, draws: int, seed: Sequence[int], quantiles: np.ndarray | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the log-densities and outlier scores of batches; the noise depends on the seed and on the row number."""
    first = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]) >> 1
    generator = torch.Generator(run.device).manual_seed(first)
    for batch in batches:
        nats = log_densities(run.engine, batch, draws, generator, run.recipe.data)
        yield nats, outlier_scores(nats, quantiles)


def score_batch(run: Run, table: Any, *, draws: int = 8, seed: int = 0, quantiles: np.ndarray | None = None) -> Any:
    """Append log_density and outlier_score to an Arrow table, as `score` computes them for a file with these rows.

    `quantiles` are those of `score_quantiles`; without them the outlier scores are missing.
    """
    import pyarrow as pa

    require_columns(table.column_names, run.columns, IN_MEMORY)
    batch = encode(table, run.columns, IN_MEMORY)
    (found,) = scored(run, [batch], draws=run.draws(draws), seed=[seed, 0, 0], quantiles=quantiles)
    columns = [pa.array(each, pa.float64(), mask=np.isnan(each)) for each in found]
    return append_columns(table, pa.table(columns, names=["log_density", "outlier_score"]))


def plan(paths: Sequence[Path], columns: Sequence[Column]) -> Iterator[Part]:
    """The parts of all files, in order."""
    for i, path in enumerate(paths):
        if not path.exists():
            raise NicestError(f"expected a file or folder to score, found no {path}{looked_from(path)}")
        if is_table(path):
            if not columns:
                raise NicestError(
                    f"{path} is a table, and the model is not of one, or lacks its {COLUMNS}: train it on a table first"
                )
            file, first = TableFile(path), 0
            if extra := require_columns(file.names, columns, path):
                Bar("", 1).note(f"{path}: ignoring {listed(extra)}, which the training data did not have")
            for group in range(file.groups):
                yield Part(i, path, file, group, first)
                first += file.counts[group] or 0
        elif columns and path.suffix != ".npy":
            raise NicestError(f"{path}: the model is of a table; expected {', '.join(SUFFIXES)} or .npy")
        elif isinstance(path, Remote) and path.suffix not in (".npy", ".npz"):
            raise NicestError(f"{path}: expected a table or an array at an address; copy images to this machine first")
        else:
            yield Part(i, path, None, 0, 0)


def share(parts: Sequence[Part], rank: int, size: int) -> Sequence[Part]:
    """A contiguous run of parts for each process, so that their outputs in order are the whole."""
    return parts[len(parts) * rank // size : len(parts) * (rank + 1) // size]


def part_path(out: Path, rank: int, size: int) -> Path:
    return out if size == 1 else out.with_name(f"{out.stem}-{rank:05d}-of-{size:05d}{out.suffix}")


def chunks(part: Part, columns: Sequence[Column], recipe: Recipe) -> Iterator[Batch]:
    """The rows of a part, some at once."""
    if part.table:
        for batch in part.table.batches([column.name for column in columns], part.group):
            yield encode(batch, columns, part.path)
        return
    if columns:
        yield encode(_read_columns(part.path, columns), columns, part.path)
        return
    values = model_rows(part.path, recipe)
    yield Batch(values, np.zeros(len(values), dtype=bool))


def _read_columns(path: Path, columns: Sequence[Column]) -> Any:
    """An array (N, D) of numbers as a table, whose columns are those of training in their order."""
    import pyarrow as pa

    values = read_npy(path)
    if values.ndim != 2 or values.shape[1] != len(columns) or values.dtype.kind not in "biuf":
        got = f"{values.shape} of {values.dtype}"
        raise NicestError(f"{path}: expected rows of {len(columns)} numbers, the columns of training, got {got}")
    cells = []
    for each, column in zip(values.T, columns, strict=True):
        yes_and_no = column.type == "bool" and np.isin(each, (0, 1)).all()
        cells.append(each.astype(bool if yes_and_no else np.float64))
    return pa.table(cells, [column.name for column in columns])


def model_rows(path: Path, recipe: Recipe) -> np.ndarray:
    """The rows of an array, an image or a folder of images, which must be of the kind the model is of."""
    if is_table(path):
        raise NicestError(f"{path}: expected images or an array (.npy, .npz) of the kind in training, got a table")
    fit = images.Fit(recipe.data.crop, recipe.data.resize) if path.suffix not in (".npy", ".npz") else images.Fit()
    if path.suffix == ".npz":
        every = [as_rows(array, f"{path} [{name}]") for name, array in read_npz(path).items()]
        if any(rows[1:] != every[0][1:] for rows in every):
            raise NicestError(f"{path}: expected arrays of one shape and type, got {[rows.shape for rows in every]}")
        rows = every[0]._replace(values=np.concatenate([rows.values for rows in every]))
    elif path.suffix.lower() in images.IMAGE_SUFFIXES:
        rows = as_rows(images.read_images([path], fit), str(path))
    else:
        rows = read_rows(path, fit)
    data = recipe.data
    if rows.shape != data.shape or bool(rows.levels) != bool(data.levels):
        kind = f"{data.levels} levels" if data.levels else "continuous numbers"
        got = f"{rows.levels} levels" if rows.levels else "continuous numbers"
        raise NicestError(f"{path}: expected shape {data.shape} of {kind}, as in training; got {rows.shape} of {got}")
    if data.levels and int(rows.values.max()) >= data.levels:
        raise NicestError(f"{path}: expected levels 0..{data.levels - 1}, got {int(rows.values.max())}")
    return rows.values


def log_densities(
    engine: Engine,
    chunk: Batch,
    draws: int,
    generator: torch.Generator | None = None,
    data: DataSettings | None = None,
) -> np.ndarray:
    """Return the nats of every row: NaN where a cell is missing, -inf where one is unknown.

    `data` are those of a conditional model: its rows include the context.
    """
    missing = np.isnan(chunk.rows).any(1) if chunk.rows.dtype.kind == "f" else np.zeros(len(chunk.rows), dtype=bool)
    whole = ~(missing | chunk.unknown)
    nats = np.full(len(chunk.rows), np.nan)
    nats[chunk.unknown & ~missing] = -np.inf
    if whole.any():
        rows = rows_to(chunk.rows[whole], engine.device)
        # all draws of a row, then those of the next: so its noise does not depend on how many rows come at once
        parts = rows.split(max(1, engine.batch // draws))
        split = (data or DataSettings()).split
        repeated = (split(part.repeat_interleave(draws, 0)) for part in parts)
        each = torch.cat([engine.log_prob(*x, generator=generator).view(-1, draws) for x in repeated]).double()
        # of a table the log of the mean density, which comes nearer to the log-probability than the mean of the logs
        joined = each.logsumexp(1) - math.log(draws) if chunk.rows.dtype.kind == "f" else each.mean(1)
        mean = joined.cpu().numpy()
        nats[whole] = np.where(np.isnan(mean), -np.inf, mean)  # so far off that float32 has no number for it
    return nats


def ledger(
    engine: Engine, row: np.ndarray, draws: int, generator: torch.Generator | None = None
) -> dict[str, np.ndarray]:
    """Return the terms of the log-density of a row (D,), (draws,) each; for every draw they sum to its nats."""
    repeated = rows_to(np.repeat(row[None], draws, axis=0), engine.device)
    parts: dict[str, list[np.ndarray]] = {}
    for terms in engine.each("terms", repeated, generator=generator):
        for name, term in terms.items():
            parts.setdefault(name, []).append(term.double().cpu().numpy())
    return {name: np.concatenate(each) for name, each in parts.items()}


def kept_quantiles(run: Run, draws: int, split: str = "train") -> np.ndarray | None:
    """Read the quantiles that `score_quantiles` wrote; None if they are missing, damaged or of another model."""
    path, step = scores_path(run.path, split, run.label), int(run.figures.get("step", 0))
    if path.is_file():
        with suppress(NicestError):  # a damaged file is computed again
            verify(path, strict=False)
            kept = read_npy(path)
            if kept.shape == (2 + QUANTILES,) and kept.dtype == np.float64 and tuple(kept[:2]) == (draws, step):
                return kept[2:]
    return None


def score_quantiles(run: Run, draws: int, split: str = "train", engine: Engine | None = None) -> np.ndarray | None:
    """Quantiles of the log-density of the rows of a split, kept in the run folder; None where the data is gone.

    They are kept with the step of the model, since a training that goes on finds a better one. Processes that find
    none each compute them, and write the same file.
    """
    engine = engine or run.engine
    if (kept := kept_quantiles(run, draws, split)) is not None:
        return kept
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # training said what there is to say about them
            splits = run.splits
    except NicestError as error:
        Bar("", 1).note(f"no outlier scores: {error}")
        return None
    rows = splits.split(split)
    if split == "train" and len(rows) < FEW and splits.incomplete is not None:
        # too few complete rows: draws of the model stand for them
        generator = torch.Generator(engine.device).manual_seed(0)
        rows = engine.sample(10_000, generator=generator).cpu().numpy()
    chosen = rows[np.random.default_rng(0).permutation(len(rows))[:100_000]]
    generator = torch.Generator(engine.device).manual_seed(0)
    known = Batch(chosen, np.zeros(len(chosen), dtype=bool))
    nats = log_densities(engine, known, draws, generator, run.recipe.data)
    quantiles = np.nanquantile(nats, np.linspace(0, 1, QUANTILES))
    try:
        keep_quantiles(run.path, quantiles, draws, int(run.figures.get("step", 0)), split, run.label)
    except NicestError as error:  # a folder that may only be read
        Bar("", 1).note(f"the {Path(SCORES[split]).stem.replace('-', ' ')} are not kept: {error}")
    return quantiles


def keep_quantiles(
    folder: Path,
    quantiles: np.ndarray,
    draws: int = 1,
    step: int = 0,
    split: str = "train",
    label: int | None = None,
) -> None:
    """Write the quantiles of the log-densities of a split into a run folder, with their digest."""
    path = scores_path(folder, split, label)
    with replacing(path) as temporary:
        with temporary.open("wb") as file:
            np.save(file, np.array([draws, step, *quantiles]))
        expect(path, temporary)
    settle(path)


def scores_path(folder: Path, split: str, label: int | None = None) -> Path:
    """Where the quantiles of a run are kept, or those of the images of one label."""
    path = folder / SCORES[split]
    return path if label is None else path.with_stem(f"{path.stem}-{label}")


def outlier_scores(nats: np.ndarray, quantiles: np.ndarray | None) -> np.ndarray:
    """The share of training rows with a higher log-density."""
    if quantiles is None:
        return np.full(len(nats), np.nan)
    denser = 1 - np.interp(nats, quantiles, np.linspace(0, 1, len(quantiles)))
    return np.where(np.isnan(nats), np.nan, denser)


def image_names(path: Path, *, whole: bool = False) -> list[str]:
    """The names of the images of a folder, from there or whole, row by row; none of anything else."""
    return (
        [plain_name(file if whole else file.relative_to(path)) for file in folder_images(path)] if path.is_dir() else []
    )


def plain_name(path: Path) -> str:
    """A path as text that UTF-8 can write."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def _cells(values: np.ndarray, *, text: bool) -> list[float | None] | list[str]:
    """A column of the scores; missing ones are None, or empty as text."""
    if text:
        return ["" if each != each else f"{each:.6g}" if abs(each) < 1 else f"{each:.6f}" for each in values.tolist()]
    return [None if each != each else each for each in values.tolist()]
