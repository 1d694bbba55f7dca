"""Small models of a table, a Parquet data set of two files, and what the commands write for it."""

from pathlib import Path

import pytest
from engines import GROUP, PREDICTS, ROWS, TINY, DataSet, Expected, commands, make_data_set
from pyarrow import csv

from nicest.data.tables import write_table
from nicest.recipes import load_recipe
from nicest.train.fit import train
from small_runs import people


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with people.csv, people.parquet, a run of whole rows and one of targets."""
    folder = tmp_path_factory.mktemp("rows")
    table = csv.read_csv(people(folder / "people.csv"), convert_options=csv.ConvertOptions(strings_can_be_null=True))
    write_table(folder / "people.parquet", table)
    for name, more in (("run", TINY), ("target-run", (*PREDICTS, 'data.target=["height", "member"]'))):
        overrides = (f'data.name="{folder / "people.parquet"}"', *more)
        train(load_recipe("table"), folder / name, overrides=overrides, device="cpu")
    return folder


@pytest.fixture(scope="session")
def data_set(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    return make_data_set(trained, tmp_path_factory.mktemp("set"), ROWS, GROUP)


@pytest.fixture(scope="session")
def expected(data_set: DataSet, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return commands(data_set, tmp_path_factory.mktemp("expected"))
