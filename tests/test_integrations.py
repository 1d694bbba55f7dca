"""A worker for Ray and Spark computes for a batch what the commands write for a file with the same rows."""

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv, parquet

from nicest import Run
from nicest.data import tables
from nicest.integrations import TASKS, Worker
from nicest.recipes import load_recipe
from nicest.tasks.impute import impute
from nicest.tasks.predict import predict
from nicest.tasks.sample import sample
from nicest.tasks.score import score
from nicest.train.fit import train
from small_runs import people

TINY = ("table.width=8", "table.depth=1", "table.components=2", "train.epochs=2")
OPTIONS: dict[str, dict[str, Any]] = {
    "score": {},
    "impute": {},
    "predict": {"target": ["height", "seen"], "interval": 0.8},
    "sample": {"rows": 40, "seed": 7},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with rows.parquet, which has a column unknown to the models, and a run for each task."""
    folder = tmp_path_factory.mktemp("integrations")
    table = csv.read_csv(people(folder / "people.csv"), convert_options=csv.ConvertOptions(strings_can_be_null=True))
    seen = np.random.default_rng(0).integers(0, 10**8, len(table)).astype("datetime64[s]")
    table = table.append_column("seen", pa.array(seen, pa.timestamp("ms", "UTC")))
    parquet.write_table(table, folder / "train.parquet")
    data = f'data.name="{folder / "train.parquet"}"'
    train(replace(load_recipe("table"), sized=False), folder / "run", overrides=(data, *TINY), device="cpu")
    rows = table.slice(0, 250).append_column("key", pa.array(range(250)))
    parquet.write_table(rows, folder / "rows.parquet")
    return folder


def expected(task: str, folder: Path) -> pa.Table:
    """Return what the command writes for rows.parquet, without its row numbers."""
    run, file, out, options = Run(folder / "run"), folder / "rows.parquet", folder / f"{task}.parquet", OPTIONS[task]
    if task == "sample":
        written = []
        for i in range(3):
            sample(run, options["rows"], seed=options["seed"] + i, out=out)
            written.append(parquet.read_table(out))
        return pa.concat_tables(written)
    if task == "score":
        score(run, [file], out=out, **options)
    else:
        {"impute": impute, "predict": predict}[task](run, file, out=out, **options)
    written = parquet.read_table(out)
    return written.drop_columns("row") if "row" in written.column_names else written


def same(task: str, found: pa.Table, folder: Path) -> None:
    """Compare the columns that the task adds with those of the command, and all others with the input."""
    wanted, rows = expected(task, folder), parquet.read_table(folder / "rows.parquet")
    if task in ("score", "predict"):
        wanted = pa.table([*rows.columns, *wanted.columns], [*rows.column_names, *wanted.column_names])
    assert found.column_names == wanted.column_names
    for name in wanted.column_names:
        some, other = found[name], wanted[name]
        if pa.types.is_floating(other.type):
            np.testing.assert_allclose(some.to_numpy(), other.to_numpy(), rtol=1e-6, atol=1e-6, err_msg=name)
        else:
            assert some.cast(other.type).to_pylist() == other.to_pylist(), name


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("task", TASKS)
def test_a_batch_gets_what_the_command_writes(task: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "BATCH", 64)  # several parts, the last one smaller
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    worker = pickle.loads(pickle.dumps(Worker(folder / "run", task, **OPTIONS[task])))
    batch = pa.table({"id": range(3)}) if task == "sample" else parquet.read_table(folder / "rows.parquet")
    found = worker(batch)
    same(task, found, folder)
    assert torch.get_num_threads() == 1
    assert worker(batch.slice(0, 0)) == found.slice(0, 0)  # engines also pass empty batches
    if task != "sample":
        packed = batch.set_column(2, "colour", batch["colour"].dictionary_encode())
        same(task, worker(packed.combine_chunks().to_batches()[0]), folder)
    assert pa.Table.from_batches(worker.map(batch.to_batches())).cast(found.schema).equals(found)


def test_bad_input_is_one_line(folder: Path, refusal: Callable[..., str]) -> None:
    assert "expected a task, 'score', 'impute'" in refusal(Worker, folder / "run", "guess")
    assert "name a target" in refusal(Worker, folder / "run", "predict")
    assert "not a model of a table" in refusal(Worker, "digits-conv", "sample")
    with pytest.raises(TypeError, match="unexpected keyword argument 'steps'"):
        Worker(folder / "run", "score", steps=3)
    rows = parquet.read_table(folder / "rows.parquet")
    worker = Worker(folder / "run", **OPTIONS["score"])
    assert "lacks 'height', which training had" in refusal(worker, rows.drop_columns("height"))
    assert "two columns 'log_density', 'outlier_score'" in refusal(worker, worker(rows))
    assert "expected a column `id`" in refusal(Worker(folder / "run", "sample"), rows)
    worker.version = "0.0.1"
    assert "expected nicest 0.0.1 on every worker, found" in refusal(worker, rows)


@pytest.mark.filterwarnings("ignore")  # of what Ray imports
def test_ray(folder: Path) -> None:
    ray = pytest.importorskip("ray", reason="needs the extra `ray`")
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=1 << 27, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    for task, options in OPTIONS.items():
        rows = ray.data.read_parquet(str(folder / "rows.parquet"), override_num_blocks=1)
        rows = ray.data.range(3, override_num_blocks=1) if task == "sample" else rows
        found = rows.map_batches(Worker(folder / "run", task, **options), batch_format="pyarrow", batch_size=None)
        same(task, pa.concat_tables(ray.get(found.to_arrow_refs())), folder)
    ray.shutdown()


@pytest.mark.filterwarnings("ignore")  # of what Spark imports
def test_spark(folder: Path) -> None:
    sql = pytest.importorskip("pyspark.sql", reason="needs the extra `spark`")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = sql.SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    for task, options in OPTIONS.items():
        worker = Worker(folder / "run", task, **options)
        rows = session.range(0, 3, 1, 1) if task == "sample" else session.read.parquet(str(folder / "rows.parquet"))
        same(task, rows.mapInArrow(worker.map, worker.schema(rows.schema)).toArrow(), folder)
    session.stop()
