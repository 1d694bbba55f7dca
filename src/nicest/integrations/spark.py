"""Spark: what `nicest score`, `impute`, `predict` and `sample` write, as lazy data frames."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nicest.errors import NicestError
from nicest.tasks.parts import Files, Job, imputing, predicting, sampling, scoring


def score(session: Any, run: str | Path, files: Files, **options: Any) -> Any:
    """A data frame with the file, row, log_density and outlier_score of every row of Parquet files.

        from nicest.integrations.spark import score
        score(session, "runs/table", "s3://bucket/rows/").write.parquet("s3a://bucket/scores")

    `files` are Parquet files, folders of them or addresses with `*`; all workers must be able to read them and the run.
    `options` are those of `nicest score`: draws and seed; and `device`.
    """
    return _frame(session, scoring(run, files, **options))


def impute(session: Any, run: str | Path, files: Files, **options: Any) -> Any:
    """A data frame with the file and row of every row of Parquet files, and its cells, none of them missing.

    `options` are those of `nicest impute`: draws, steps, interval and seed; and `device`.
    """
    return _frame(session, imputing(run, files, **options))


def predict(session: Any, run: str | Path, files: Files, **options: Any) -> Any:
    """A data frame with the file and row of every row of Parquet files, and what is predicted for it.

    `options` are those of `nicest predict`: level, draws and seed; and `device`.
    """
    return _frame(session, predicting(run, files, **options))


def sample(session: Any, run: str | Path, n: int, **options: Any) -> Any:
    """A data frame of n samples, in parts of `rows`: part i is what `nicest sample` draws with the seed `seed` + i.

    `options` are rows, temperature, seed and `device`.
    """
    return _frame(session, sampling(run, n, **options))


def _frame(session: Any, job: Job) -> Any:
    try:
        from pyspark.sql.pandas.types import from_arrow_schema
    except ImportError as error:
        raise NicestError("this needs pyspark, which is not installed: pip install 'nicest[spark]'") from error
    work = job.worker("spark")

    def worked(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from work(number)

    parts = session.range(0, len(job.parts), 1, len(job.parts))  # a task for each
    return parts.mapInArrow(worked, from_arrow_schema(job.schema))
