"""Ray Data: what `nicest score`, `impute`, `predict` and `sample` write, as lazy data sets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nicest.errors import NicestError
from nicest.remote import place
from nicest.tasks.parts import Files, Job, imputing, predicting, sampling, scoring

MOST_BLOCKS = 10_000  # parts that are started alone; of more, some together


def score(run: str | Path, files: Files, *, workers: Any = None, **options: Any) -> Any:
    """A data set with the file, row, log_density and outlier_score of every row of Parquet files.

        from nicest.integrations.ray import score, write
        write(score("runs/table", "s3://bucket/rows/", draws=8), "s3://bucket/scores")

    `files` are Parquet files, folders of them or addresses with `*`; all workers must be able to read them and the run.
    `options` are those of `nicest score`: draws and seed; and `device`, "cuda" for workers with a GPU. `workers` is
    how many there are, or the least and the most, and what else Ray's `map_batches` takes as `concurrency`.
    """
    return _dataset(scoring(run, files, **options), workers)


def impute(run: str | Path, files: Files, *, workers: Any = None, **options: Any) -> Any:
    """A data set with the file and row of every row of Parquet files, and its cells, none of them missing.

    `options` are those of `nicest impute`: draws, steps, interval and seed; and `device`.
    """
    return _dataset(imputing(run, files, **options), workers)


def predict(run: str | Path, files: Files, *, workers: Any = None, **options: Any) -> Any:
    """A data set with the file and row of every row of Parquet files, and what is predicted for it.

    `options` are those of `nicest predict`: level, draws and seed; and `device`.
    """
    return _dataset(predicting(run, files, **options), workers)


def sample(run: str | Path, n: int, *, workers: Any = None, **options: Any) -> Any:
    """A data set of n samples, in parts of `rows`: part i is what `nicest sample` draws with the seed `seed` + i.

    `options` are rows, temperature, seed and `device`.
    """
    return _dataset(sampling(run, n, **options), workers)


def write(results: Any, folder: str | Path) -> None:
    """Write a data set into a new folder, as Parquet files, and after all of them an empty file `_SUCCESS`, as Spark
    does: a folder without it is not complete."""
    target = place(folder)
    if target.exists():
        raise NicestError(f"expected a new folder for the results, got {folder}, where something is: choose another")
    results.write_parquet(str(folder), ray_remote_args={"num_cpus": 0})  # workers may hold all cores
    with place(f"{str(folder).rstrip('/')}/_SUCCESS").open("wb"):
        pass


def _dataset(job: Job, workers: Any) -> Any:
    try:
        import ray.data
    except ImportError as error:
        raise NicestError("this needs ray, which is not installed: pip install 'nicest[ray]'") from error
    work, on_gpu = job.worker("ray"), job.options["device"] != "cpu"

    class Worker:
        """An actor of its own, whose process keeps the model."""

        def __call__(self, numbers: Any) -> Iterator[Any]:
            import pyarrow as pa

            for number in numbers["id"]:
                for batch in work(int(number)):
                    yield pa.Table.from_batches([batch])

    numbers = [{"id": number} for number in range(len(job.parts))]  # in memory: no task reads them
    parts = ray.data.from_items(numbers, override_num_blocks=min(len(job.parts), MOST_BLOCKS))
    how = {"num_gpus": 1} if on_gpu else {"num_cpus": 1}
    return parts.map_batches(Worker, batch_size=1, concurrency=workers or (1, _workers(ray, on_gpu)), **how)


def _workers(ray: Any, on_gpu: bool) -> int:
    """One for each core, or GPU, of the cluster."""
    if not ray.is_initialized():
        ray.init()
    return max(1, int(ray.cluster_resources().get("GPU" if on_gpu else "CPU", 1)))
