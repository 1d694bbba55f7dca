"""Small models of a table, a Parquet data set of two files, and what the commands write for it."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from nicest import Run
from nicest.tasks.impute_table import impute_table
from nicest.tasks.predict import predict
from nicest.tasks.sample import sample
from nicest.tasks.score import score

TINY = (
    *("model.law=additive", "model.width=8", "model.couplings=3", "model.hidden_layers=1"),
    *("train.epochs=2", "train.patience=0"),
)
PREDICTS = ("train.effort=low", "train.epochs=2", "train.lr=0.01", "train.warmup=0", "model.width=8", "model.members=1")
IMPUTES: dict[str, Any] = {"draws": 16, "steps": 8}
DRAWS = 100
ROWS, GROUP = 5000, 1100  # a block of predictions is 4096 rows: it ends within a row group


class DataSet(NamedTuple):
    """A model of whole rows and one of a target, and the folder of Parquet files."""

    run: Path
    target_run: Path
    folder: Path

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("part-*.parquet"))


Expected = Callable[[str], pa.Table]


def make_data_set(trained: Path, folder: Path, rows: int, group: int) -> DataSet:
    """Rows of the table that was trained on, in two files; the second has row groups of `group` rows."""
    table = parquet.read_table(trained / "people.parquet")
    many = table.take(np.random.default_rng(1).integers(0, len(table), rows))
    for i, (part, size) in enumerate(((many.slice(0, 60), 20), (many.slice(60), group))):
        parquet.write_table(part, folder / f"part-{i}.parquet", row_group_size=size)
    (folder / "_part-2.parquet").write_bytes(b"what a writer left that was broken off")
    return DataSet(trained / "run", trained / "target-run", folder)


def commands(data: DataSet, out: Path) -> Expected:
    """What a command writes for the files: their names and rows, then the results."""
    done: dict[str, pa.Table] = {}

    def table(task: str) -> pa.Table:
        if task not in done:
            done[task] = written(task, data, out)
        return done[task]

    return table


def written(task: str, data: DataSet, out: Path) -> pa.Table:
    whole, targeted, path = Run(data.run), Run(data.target_run), out / "out.parquet"
    if task == "score":
        score(whole, data.files, out=path, draws=DRAWS, seed=3)
        return parquet.read_table(path)
    if task == "sample":
        tables = []
        for i, n in enumerate((100, 100, 50)):
            sample(whole, n, seed=7 + i, out=path)
            tables.append(parquet.read_table(path))
        return pa.concat_tables(tables)
    tables = []
    for file in data.files[:1] if task == "impute" else data.files:
        if task == "impute":
            impute_table(whole, file, out=path, **IMPUTES)
        else:
            predict(targeted, file, out=path, draws=1)
        table = parquet.read_table(path)
        names = pa.array([str(file)] * len(table))
        if task == "impute":
            table = table.add_column(0, "row", pa.array(range(len(table))))
        tables.append(table.add_column(0, "file", names))
    return pa.concat_tables(tables)


def same(found: pa.Table, wanted: pa.Table) -> None:
    """The same rows, in whatever order they came."""
    assert found.column_names == wanted.column_names
    order = [(name, "ascending") for name in found.column_names if name in ("file", "row")]
    order = order or [(name, "ascending") for name in found.column_names]
    found, wanted = found.sort_by(order), wanted.sort_by(order)
    assert len(found) == len(wanted)
    for name in found.column_names:
        some, other = found.column(name), wanted.column(name)
        if pa.types.is_floating(some.type):
            np.testing.assert_allclose(some.to_numpy(), other.to_numpy(), rtol=1e-6, atol=1e-6, err_msg=name)
        else:
            assert some.to_pylist() == other.to_pylist(), name


def workers(of: str, *, beneath: str = "") -> list[int]:
    """The processes that this one started, directly or not, whose command says `of` and whose parent's `beneath`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = _parent(int(process.name))
            if of in _command(int(process.name)) and beneath in _command(parent) and _is_ours(parent):
                found.append(int(process.name))
    return found


def _command(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def _is_ours(process: int) -> bool:
    return process == os.getpid() or (process > 1 and _is_ours(_parent(process)))
