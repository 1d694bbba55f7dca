"""Parts of the work that engines share out: done alone and in any order, they are what the commands write."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from engines import DRAWS, IMPUTES, DataSet, Expected, commands, make_data_set, same

from nicest.integrations import ray, spark
from nicest.tasks.parts import Job, imputing, predicting, sampling, scoring

Refusal = Callable[..., str]
FORMAT_1 = Path(__file__).parent.parent / "fixtures" / "format-1"


@pytest.fixture(scope="module", autouse=True)
def _short_blocks() -> Iterator[None]:
    """Predictions of 360 rows at once, a block that ends within the fourth row group of the second file."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("predict", "parts"):
            patch.setattr(f"nicest.tasks.{module}.ROWS", 360)
        yield


@pytest.fixture(scope="module")
def data_set(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    return make_data_set(trained, tmp_path_factory.mktemp("set"), 500, 98)


@pytest.fixture(scope="module")
def expected(data_set: DataSet, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return commands(data_set, tmp_path_factory.mktemp("expected"))


def done(job: Job) -> pa.Table:
    """All parts, the last first."""
    work = job.worker("ray")
    batches = [batch for number in reversed(range(len(job.parts))) for batch in work(number)]
    return pa.Table.from_batches(batches, job.schema)


def job(task: str, data: DataSet) -> Job:
    return {
        "score": lambda: scoring(data.run, data.folder, draws=DRAWS, seed=3),
        "impute": lambda: imputing(data.run, data.files[:1], **IMPUTES),
        "predict": lambda: predicting(data.target_run, data.folder, draws=1),
        "sample": lambda: sampling(data.run, 250, rows=100, seed=7),
    }[task]()


@pytest.mark.parametrize("task", ["score", "impute", "predict", "sample"])
def test_parts_are_what_the_command_writes(task: str, data_set: DataSet, expected: Expected) -> None:
    found = job(task, data_set)
    assert len(found.parts) == (8 if task in ("score", "predict") else 3)
    same(done(found), expected(task))


def test_bad_input_is_one_line(data_set: DataSet, tmp_path: Path, refusal: Refusal) -> None:
    people = data_set.run.parent / "people.csv"
    assert "expected Parquet files" in refusal(scoring, data_set.run, people)
    assert "found none in" in refusal(scoring, data_set.run, tmp_path)
    assert "found no" in refusal(scoring, data_set.run, tmp_path / "none.parquet")
    assert "is a model of 'height', 'member' given the other columns" in refusal(
        imputing, data_set.target_run, data_set.folder
    )
    assert "has no target" in refusal(predicting, data_set.run, data_set.folder)
    assert "not a model of a table" in refusal(sampling, FORMAT_1 / "images", 10)


def test_a_worker_without_nicest_or_with_another_version_says_so(
    data_set: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = job("score", data_set).worker("ray")
    monkeypatch.setattr("nicest.__version__", "0.0.1")
    with pytest.raises(RuntimeError, match=r"a worker has nicest 0\.0\.1, and this is \S+: install one version"):
        next(work(0))
    monkeypatch.setitem(__import__("sys").modules, "nicest.tasks.parts", None)
    with pytest.raises(RuntimeError, match=r"a worker has no nicest: install 'nicest\[ray\]==\S+' there"):
        next(work(0))


def test_an_engine_that_is_not_installed_is_named(
    data_set: DataSet, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    for name in ("ray", "ray.data", "pyspark", "pyspark.sql.pandas.types"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    assert refusal(ray.sample, data_set.run, 10) == "this needs ray, which is not installed: pip install 'nicest[ray]'"
    assert "pip install 'nicest[spark]'" in refusal(spark.sample, None, data_set.run, 10)
