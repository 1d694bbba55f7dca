"""A real Ray cluster on this machine: what it computes is what the commands write, also if a worker is killed."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from engines import DRAWS, IMPUTES, DataSet, Expected, same, workers
from pyarrow import parquet

from nicest.integrations import ray as engine

pytestmark = pytest.mark.filterwarnings("ignore")  # of what Ray imports


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="needs the extra `ray`")
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=1 << 27, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


def test_a_worker_is_killed_and_nothing_is_lost(ray: Any, data_set: DataSet, expected: Expected) -> None:
    found, killed = [], []
    scores = engine.score(data_set.run, data_set.folder, draws=DRAWS, seed=3, workers=1)
    for batch in scores.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        found.append(batch)
        if not killed:
            killed = workers("MapWorker")
            os.kill(killed[0], signal.SIGKILL)
            assert sum(map(len, found)) < len(expected("score"))
    same(pa.concat_tables(found), expected("score"))
    assert not set(workers("MapWorker")) & set(killed)


def test_every_task_gives_what_its_command_writes(
    ray: Any, data_set: DataSet, expected: Expected, tmp_path: Path
) -> None:
    results = {
        "impute": engine.impute(data_set.run, data_set.files[:1], workers=1, **IMPUTES),
        "predict": engine.predict(data_set.target_run, data_set.files, workers=1, draws=1),
        "sample": engine.sample(data_set.run, 250, rows=100, seed=7),
    }
    for task, found in results.items():
        engine.write(found, tmp_path / task)
        assert (tmp_path / task / "_SUCCESS").is_file()
        same(pa.concat_tables(map(parquet.read_table, (tmp_path / task).glob("*.parquet"))), expected(task))


def test_a_result_that_is_not_whole_is_not_marked(
    ray: Any, data_set: DataSet, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    shutil.copytree(data_set.folder, tmp_path / "set")
    scores = engine.score(data_set.run, tmp_path / "set", draws=1)
    (tmp_path / "set" / "part-1.parquet").unlink()
    with pytest.raises(ray.exceptions.RayTaskError, match="found no"):
        engine.write(scores, tmp_path / "scores")
    assert not (tmp_path / "scores" / "_SUCCESS").exists()
    (tmp_path / "scores").mkdir(exist_ok=True)
    assert "expected a new folder" in refusal(engine.write, scores, tmp_path / "scores")
