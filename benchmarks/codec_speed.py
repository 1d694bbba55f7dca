"""Speed, size and equality of lossless compression, as one line of JSON.

    python -m benchmarks.codec_speed mnist images.npy --device cuda --jobs 4 --out packed.nicest
    python -m benchmarks.codec_speed mnist --decode packed.nicest --expect images.npy --device cpu

The .npy file holds images of grey levels, (n, ...). The first form compresses and decompresses them in memory; `--out`
keeps the compressed stream. The second form decodes a stream that may come from another device. Rates are MB (10^6
bytes of pixels) per second of wall-clock time. They include copying the model and starting the worker processes
(`start_seconds`); the rates `after_start` do not. CPU seconds are those of all processes.
"""

import argparse
import hashlib
import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nicest
from benchmarks.report import origin
from nicest.files import to_json
from nicest.flows import bits_per_dim
from nicest.runs.run import Run

WARM = 64  # rows of the warm-up call
SCORED = 1000  # rows per batch when scoring


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


def timed(function: Any, *inputs: Any) -> tuple[Any, tuple[float, float]]:
    """Call a function; return its result, and the wall-clock and CPU seconds that it took."""
    start, before = time.perf_counter(), cpu_seconds()
    found = function(*inputs)
    return found, (time.perf_counter() - start, cpu_seconds() - before)


@torch.no_grad()
def own_bits(run: Run, rows: np.ndarray) -> float:
    """Return the model's own bits per dimension: the mean of -log2 P, with one draw of the dequantisation noise."""
    torch.manual_seed(0)
    parts = torch.from_numpy(rows.reshape(len(rows), -1).astype(np.int64)).split(SCORED)
    total = sum(float(run.flow.log_prob(part.to(run.device)).sum()) for part in parts)
    return bits_per_dim(total / len(rows), rows[0].size)


def main() -> None:
    """Measure, print, and exit with 1 if the rows came back changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0: the default of the library")
    parser.add_argument("--block", type=int, default=0, help="rows of a block; 0: the default of the library")
    parser.add_argument("--first", type=int, default=None, help="use only the first FIRST rows")
    parser.add_argument("--repeat", type=int, default=1, help="number of measurements; the fastest is reported")
    for name in ("--out", "--decode", "--expect"):
        parser.add_argument(name, type=Path, default=None)
    asked = parser.parse_args()
    file = asked.expect if asked.decode else asked.file
    if file is None:
        parser.error("name FILE.npy, or --decode PACKED and --expect FILE.npy")
    rows = np.load(file)[: asked.first]
    run = Run(asked.model, dtype=torch.float64, device=asked.device)
    how = {name: value for name in ("jobs", "block") if (value := getattr(asked, name))}
    compress = partial(nicest.compress, run.flow, **how)
    decompress = partial(nicest.decompress, run.flow, **({"jobs": asked.jobs} if asked.jobs else {}))
    megabytes, start = rows.size / 1e6, 0.0
    result: dict[str, Any] = {"model": asked.model, "rows": len(rows), "megabytes": megabytes, **how}
    nicest.decompress(run.flow, nicest.compress(run.flow, rows[:WARM]))
    if asked.jobs > 1:  # one block of one row per worker, twice: the first time, workers import modules
        for name in ("first_start_seconds", "start_seconds"):
            once = partial(nicest.compress, run.flow, block=1, jobs=asked.jobs)
            result[name] = start = timed(once, rows[: asked.jobs])[1][0]
    packed = asked.decode.read_bytes() if asked.decode else b""
    seconds = {"compress": list[tuple[float, float]](), "decompress": list[tuple[float, float]]()}
    for _ in range(asked.repeat):
        if not asked.decode:
            packed, took = timed(compress, rows)
            seconds["compress"].append(took)
        back, took = timed(decompress, packed)
        seconds["decompress"].append(took)
    for name, each in seconds.items():
        if each:
            result[f"{name}_megabytes_per_second"] = megabytes / min(each)[0]
            result[f"{name}_megabytes_per_second_after_start"] = megabytes / (min(each)[0] - start)
            result[f"{name}_cpu_seconds"] = min(each)[1]
    bits, own = 8 * len(packed) / rows.size, own_bits(run, rows)
    result |= {"bits_per_dim": bits, "model_bits_per_dim": own, "overhead_percent": 100 * (bits / own - 1)}
    result |= {"equal": bool(np.array_equal(back, rows)), "packed_bytes": len(packed)}
    if asked.out and not asked.decode:
        asked.out.write_bytes(packed)
    print(to_json(result | {"sha256": hashlib.sha256(packed).hexdigest()} | origin(run.device), indent=None))
    raise SystemExit(0 if result["equal"] else 1)


if __name__ == "__main__":
    main()
