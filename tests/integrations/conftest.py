"""Small models of a table, a Parquet data set of two files, and what the commands write for it."""

import numpy as np
import pyarrow as pa
import pytest
from engines import GROUP, PREDICTS, ROWS, TINY, DataSet, Expected, written
from pyarrow import csv, parquet

from nicest.data.tables import write_table
from nicest.recipes import load_recipe
from nicest.train.fit import train
from small_runs import people


@pytest.fixture(scope="session")
def data_set(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    folder = tmp_path_factory.mktemp("rows")
    table = csv.read_csv(people(folder / "people.csv"), convert_options=csv.ConvertOptions(strings_can_be_null=True))
    write_table(folder / "people.parquet", table)
    for name, more in (("run", TINY), ("target-run", (*PREDICTS, 'data.target=["height", "member"]'))):
        overrides = (f'data.name="{folder / "people.parquet"}"', *more)
        train(load_recipe("table"), folder / name, overrides=overrides, device="cpu")
    (folder / "set").mkdir()
    many = table.take(np.random.default_rng(1).integers(0, len(table), ROWS))
    for i, (part, group) in enumerate(((many.slice(0, 60), 20), (many.slice(60), GROUP))):
        parquet.write_table(part, folder / "set" / f"part-{i}.parquet", row_group_size=group)
    (folder / "set" / "_part-2.parquet").write_bytes(b"what a writer left that was broken off")
    return DataSet(folder / "run", folder / "target-run", folder / "set")


@pytest.fixture(scope="session")
def expected(data_set: DataSet, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """What a command writes for the files: their names and rows, then the results."""
    out, done = tmp_path_factory.mktemp("expected"), {}

    def table(task: str) -> pa.Table:
        if task not in done:
            done[task] = written(task, data_set, out)
        return done[task]

    return table
