"""A real Spark cluster on this machine: what it computes is what the commands write, also if a worker is killed."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from engines import DRAWS, IMPUTES, DataSet, Expected, same, workers
from pyarrow import parquet

from nicest.integrations import spark as engine

pytestmark = pytest.mark.filterwarnings("ignore")  # of what Spark imports


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    sql = pytest.importorskip("pyspark.sql", reason="needs the extra `spark`")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # a JVM with two cores, beside it Python workers; a task that failed is tried four times, as on a cluster
    builder = sql.SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


def test_a_worker_is_killed_and_nothing_is_lost(
    spark: Any, data_set: DataSet, expected: Expected, tmp_path: Path
) -> None:
    """It is killed when the first part was committed, and others were not."""
    killed: list[int] = []

    def kill() -> None:
        until = time.monotonic() + 300
        while not killed and time.monotonic() < until:
            running = workers("pyspark.daemon", beneath="pyspark.daemon")
            if running and any(tmp_path.glob("scores/_temporary/0/task_*")):
                os.kill(running[0], signal.SIGKILL)
                killed.append(running[0])
            time.sleep(0.01)

    scores = engine.score(spark, data_set.run, data_set.folder, draws=DRAWS, seed=3)
    thread = threading.Thread(target=kill)
    thread.start()
    scores.write.parquet(str(tmp_path / "scores"))
    thread.join()
    assert killed
    assert (tmp_path / "scores" / "_SUCCESS").exists()
    same(_read(tmp_path / "scores"), expected("score"))


def test_every_task_gives_what_its_command_writes(
    spark: Any, data_set: DataSet, expected: Expected, tmp_path: Path
) -> None:
    frames = {
        "impute": engine.impute(spark, data_set.run, data_set.files[:1], **IMPUTES),
        "predict": engine.predict(spark, data_set.target_run, data_set.files, draws=1),
        "sample": engine.sample(spark, data_set.run, 250, rows=100, seed=7),
    }
    for task, frame in frames.items():
        frame.write.parquet(str(tmp_path / task))
        same(_read(tmp_path / task), expected(task))


def _read(folder: Path) -> pa.Table:
    return pa.concat_tables(map(parquet.read_table, folder.glob("*.parquet")))
