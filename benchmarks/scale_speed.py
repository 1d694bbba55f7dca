"""CPU seconds that `nicest score`, Ray and Spark take to score a table of numbers, on two cores.

    python -m benchmarks.scale_speed FOLDER 10000000 score     # or ray, or spark: the extras `ray` and `spark`

The first call writes a Parquet data set and a model of 8 columns into FOLDER. Each later call writes the scores there
and prints the wall-clock seconds, and the CPU seconds of this process and its descendants, start-up included.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from nicest.integrations import Worker

GROUP = 100_000  # rows of a row group; a file has ten
NICEST = [sys.executable, "-m", "nicest"]


def make(folder: Path, rows: int) -> None:
    """Write rows of eight correlated columns as Parquet files."""
    mixing = np.random.default_rng(0).normal(size=(8, 8))
    for i in range(max(1, rows // (10 * GROUP))):
        values = np.random.default_rng(i).normal(size=(min(rows, 10 * GROUP), 8)) @ mixing
        table = pa.table(list(np.tanh(values).astype(np.float32).T), names=list("abcdefgh"))
        parquet.write_table(table, folder / f"part-{i:03d}.parquet", row_group_size=GROUP)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and all its descendants, finished ones included."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
            ticks[int(stat.parent.name)] = sum(map(int, fields[11:15]))

    def is_ours(process: int) -> bool:
        return process == os.getpid() or (process in parents and is_ours(parents[process]))

    return sum(each for process, each in ticks.items() if is_ours(process)) / os.sysconf("SC_CLK_TCK")


def main(folder: Path, rows: int, engine: str) -> None:
    """Make the data and the model if they are missing; otherwise score the data and print the time."""
    files, run, out = folder / f"rows-{rows}", folder / "run", folder / f"scores-{engine}"
    if not files.exists():
        files.mkdir(parents=True)
        make(files, rows)
        few = folder / "few.parquet"
        parquet.write_table(parquet.ParquetFile(files / "part-000.parquet").read_row_group(0).slice(0, 20_000), few)
        settings = ["--set", "train.effort=low", "--device", "cpu"]
        subprocess.run([*NICEST, "train", str(few), "--out", str(run), *settings], check=True)
        print("made", files)
        return
    shutil.rmtree(out, ignore_errors=True)
    start = time.monotonic()
    if engine == "score":
        words = ["score", str(run), str(files), "--out", f"{out}.parquet", "--device", "cpu"]
        subprocess.run([*NICEST, *words], check=True)
    elif engine == "ray":
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        data = ray.data.read_parquet(str(files))
        data.map_batches(Worker(run), batch_format="pyarrow", batch_size=50_000).write_parquet(str(out))
    else:
        from pyspark.sql import SparkSession

        os.environ["PYSPARK_PYTHON"] = sys.executable
        builder = SparkSession.builder.master("local[2,4]").config("spark.driver.host", "127.0.0.1")
        frame = builder.config("spark.ui.enabled", "false").getOrCreate().read.parquet(str(files))
        worker = Worker(run)
        frame.mapInArrow(worker.map, worker.schema(frame.schema)).write.parquet(str(out))
    times = {"seconds": round(time.monotonic() - start, 1), "cpu_seconds": round(cpu_seconds(), 1)}
    print(json.dumps({"engine": engine, "rows": rows, **times}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
