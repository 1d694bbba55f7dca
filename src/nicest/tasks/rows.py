"""Rows of files in a stream: tables, arrays and images, in parts that processes share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nicest.data import images
from nicest.data.arrays import as_rows, read_npy, read_npz
from nicest.data.columns import Schema
from nicest.data.loading import folder_images, read_rows
from nicest.data.tables import SUFFIXES, TableFile, is_table
from nicest.errors import NicestError
from nicest.files import require_writable
from nicest.messages import listed
from nicest.progress import Bar
from nicest.recipes import Recipe
from nicest.remote import Remote, looked_from, place
from nicest.runs.folder import require_own_file
from nicest.runs.run import Run


class Part(NamedTuple):
    """What one process reads at once: a file, or a row group of a table."""

    file: int
    path: Path
    table: TableFile | None
    group: int
    first_row: int


def plan(paths: Sequence[Path], run: Run) -> Iterator[Part]:
    """Yield the parts of all files, in order."""
    for i, path in enumerate(paths):
        if not path.exists():
            raise NicestError(f"expected a file or folder to score, found no {path}{looked_from(path)}")
        if is_table(path):
            if run.kind != "table":
                raise NicestError(f"{path} is a table, but {run.path} is not a model of one: train it on a table first")
            file, first = open_table(path, run.table.schema), 0
            for group in range(file.groups):
                yield Part(i, path, file, group, first)
                first += file.counts[group] or 0
        elif run.kind == "table" and path.suffix != ".npy":
            raise NicestError(f"{path}: the model is of a table; expected {', '.join(SUFFIXES)} or .npy")
        elif isinstance(path, Remote) and path.suffix not in (".npy", ".npz"):
            raise NicestError(f"{path}: expected a table or an array at an address; copy images to this machine first")
        else:
            yield Part(i, path, None, 0, 0)


def share(parts: Sequence[Part], rank: int, size: int) -> Sequence[Part]:
    """Return a contiguous range of parts for each process, so that their outputs in order are the whole."""
    return parts[len(parts) * rank // size : len(parts) * (rank + 1) // size]


def part_path(out: Path, rank: int, size: int) -> Path:
    """Return the path of the output of one process."""
    return out if size == 1 else out.with_name(f"{out.stem}-{rank:05d}-of-{size:05d}{out.suffix}")


def open_table(path: Path, schema: Schema, optional: Sequence[str] = ()) -> TableFile:
    """Open a table that has all columns of a schema; `optional` ones may be absent, additional ones are ignored."""
    file = TableFile(path)
    if extra := schema.require_in([*file.names, *(name for name in optional if name not in file.names)], path):
        Bar("", 1).note(f"{path}: ignoring {listed(extra)}, which the training data did not have")
    return file


def require_table(run: Run) -> None:
    """Refuse a model that is not of a table."""
    if run.kind != "table":
        raise NicestError(f"{run.path} is not a model of a table: train one with `nicest train FILE.csv`")


def require_flow(run: Run, task: str) -> None:
    """Refuse the model of a table, which is not a flow."""
    if run.kind == "table":
        raise NicestError(f"{run.path} is a model of a table, but {task} needs a flow: a model of images or arrays")


def require_outputs(run: Run, *paths: Path, inputs: Sequence[Path] = ()) -> None:
    """Refuse to write where nothing can be written, or over the data of a run or one of the inputs."""
    for path in paths:
        require_own_file(path, run.recipe, *inputs)
        require_writable(path)


def table_path(name: str | Path) -> Path:
    """Return the path of a table to read or write; refuse other kinds of files."""
    path = place(name)
    if path.suffix.lower() not in SUFFIXES:
        raise NicestError(f"expected a table, a file that ends in {', '.join(SUFFIXES)}, got {str(path)!r}")
    return path


def batches(file: TableFile, names: Sequence[str], group: int | None = None) -> Iterator[Any]:
    """Yield Arrow tables of the named columns, of the whole file or of one row group."""
    import pyarrow as pa

    for batch in file.batches([name for name in names if name in file.names], group):
        yield pa.Table.from_batches([batch])


def encoded(table: Any, schema: Schema, source: Path | str) -> tuple[np.ndarray, np.ndarray]:
    """Encode an Arrow table, in which columns may be absent, or an array: rows (N, D), and a mask of unknown values.

    Rows are NaN where a cell is missing or holds a value that training never saw. The mask is True for the latter.
    """
    if not isinstance(table, np.ndarray):
        import pyarrow as pa

        for name in schema.names:
            if name not in table.column_names:
                table = table.append_column(name, pa.nulls(table.num_rows))
    rows = schema.encode(table, source)
    unknown = np.isinf(rows)
    return np.where(unknown, np.float32(np.nan), rows), unknown


def table_rows(part: Part, run: Run) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the encoded rows of a part, in batches, and which of their values training never saw."""
    if part.table:
        for table in batches(part.table, run.table.schema.names, part.group):
            yield encoded(table, run.table.schema, part.path)
        return
    values = read_npy(part.path)
    if values.ndim != 2 or values.shape[1] != len(run.table.schema) or values.dtype.kind not in "biuf":
        got = f"{values.shape} of {values.dtype}"
        raise NicestError(f"{part.path}: expected rows of {len(run.table.schema)} numbers, as in training, got {got}")
    yield encoded(values, run.table.schema, part.path)


def model_rows(path: Path, recipe: Recipe) -> np.ndarray:
    """Read the rows of an array, an image or a folder of images, which must be of the kind in training."""
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


def image_names(path: Path, *, whole: bool = False) -> list[str]:
    """Return the names of the images of a folder, relative to it or `whole`; [] for anything else."""
    found = folder_images(path) if path.is_dir() else []
    return [plain_name(file if whole else file.relative_to(path)) for file in found]


def plain_name(path: Path) -> str:
    """Return a path as text that UTF-8 can write."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def csv_cells(values: np.ndarray, *, text: bool) -> list[Any]:
    """Return numbers as cells of a file: None, or empty text in CSV files, where they are NaN."""
    if text:
        return ["" if each != each else f"{each:.6g}" if abs(each) < 1 else f"{each:.6f}" for each in values.tolist()]
    return [None if each != each else each for each in values.tolist()]
