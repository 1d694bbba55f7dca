"""Speed, size and equality of lossless compression, as one line of JSON.

    python -m benchmarks.codec_speed mnist images.npy --device cuda --jobs 4 --out packed.nicest
    python -m benchmarks.codec_speed mnist --decode packed.nicest --expect images.npy --device cpu

The .npy file holds images of grey levels, (n, ...). The first form compresses and decompresses them in memory; `--out`
keeps the compressed stream. The second form decodes a stream that may come from another device. Rates are MB (10^6
bytes of pixels) per second of wall-clock time. They include copying the model and starting the worker processes
(`start_seconds`); the rates `after_start` do not. CPU seconds are those of all processes. A few rows are compressed
before the measurement, to warm up the device and to import the modules of the workers (`first_start_seconds`).
"""

import argparse
import hashlib
import inspect
import json
import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nicest
from benchmarks.scale_speed import cpu_seconds
from nicest.flows import bits_per_dim
from nicest.runs.run import Run

WARM = 64  # rows of the warm-up call
SCORED = 1000  # rows per batch when scoring


def options(function: Any, asked: argparse.Namespace) -> dict[str, int]:
    """Return the given options that the function of this version accepts."""
    known = inspect.signature(function).parameters
    return {name: getattr(asked, name) for name in ("jobs", "block") if name in known and getattr(asked, name)}


def timed(function: Any, *inputs: Any, **options: Any) -> tuple[Any, tuple[float, float]]:
    """Call a function; return its result, and the wall-clock and CPU seconds that it took."""
    start, before = time.perf_counter(), cpu_seconds()
    found = function(*inputs, **options)
    return found, (time.perf_counter() - start, cpu_seconds() - before)


@torch.no_grad()
def own_bits(run: Run, rows: np.ndarray) -> float:
    """Return the model's own bits per dimension: the mean of -log2 P, with one draw of the dequantisation noise."""
    torch.manual_seed(0)
    flat, total = rows.reshape(len(rows), -1), 0.0
    for start in range(0, len(flat), SCORED):
        some = torch.from_numpy(flat[start : start + SCORED].astype(np.int64)).to(run.device)
        total += float(run.flow.log_prob(some).sum())
    return bits_per_dim(total / len(flat), flat.shape[1])


def hardware(device: torch.device) -> dict[str, Any]:
    """Describe the machine and the versions."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch": torch.__version__,
        "constriction": metadata.version("constriction"),
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0: the default of the library")
    parser.add_argument("--block", type=int, default=0, help="rows of a block; 0: the default of the library")
    parser.add_argument("--first", type=int, default=None, help="use only the first FIRST rows")
    parser.add_argument("--repeat", type=int, default=1, help="number of measurements; the fastest is reported")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--decode", type=Path, default=None)
    parser.add_argument("--expect", type=Path, default=None)
    asked = parser.parse_args()
    file = asked.expect if asked.decode else asked.file
    if file is None:
        parser.error("name FILE.npy, or --decode PACKED and --expect FILE.npy")
    rows = np.load(file)[: asked.first]
    run = Run(asked.model, dtype=torch.float64, device=asked.device)
    flow, megabytes = run.flow, rows.size / 1e6
    result: dict[str, Any] = {"model": asked.model, "rows": len(rows), "megabytes": round(megabytes, 3)}
    result |= {"jobs": asked.jobs, "block": asked.block, "threads": torch.get_num_threads()}
    nicest.decompress(flow, nicest.compress(flow, rows[:WARM]))
    start = 0.0
    if asked.jobs > 1:  # one block of one row per worker
        for name in ("first_start_seconds", "start_seconds"):
            start = timed(nicest.compress, flow, rows[: asked.jobs], block=1, jobs=asked.jobs)[1][0]
            result[name] = round(start, 3)
    packed = asked.decode.read_bytes() if asked.decode else b""
    seconds = {"compress": list[tuple[float, float]](), "decompress": list[tuple[float, float]]()}
    for _ in range(asked.repeat):
        if not asked.decode:
            packed, took = timed(nicest.compress, flow, rows, **options(nicest.compress, asked))
            seconds["compress"].append(took)
        how = {name: value for name, value in options(nicest.decompress, asked).items() if name != "block"}
        back, took = timed(nicest.decompress, flow, packed, **how)
        seconds["decompress"].append(took)
    for name, each in seconds.items():
        if each:
            result[f"{name}_megabytes_per_second"] = round(megabytes / min(each)[0], 3)
            result[f"{name}_megabytes_per_second_after_start"] = round(megabytes / (min(each)[0] - start), 3)
            result[f"{name}_cpu_seconds"] = round(min(each)[1], 3)
    bits, own = 8 * len(packed) / rows.size, own_bits(run, rows)
    result |= {"bits_per_dim": round(bits, 5), "model_bits_per_dim": round(own, 5)}
    result |= {"overhead_percent": round(100 * (bits / own - 1), 3), "equal": bool(np.array_equal(back, rows))}
    result |= {"packed_bytes": len(packed), "sha256": hashlib.sha256(packed).hexdigest(), **hardware(run.device)}
    if asked.out and not asked.decode:
        asked.out.write_bytes(packed)
    print(json.dumps(result))
    raise SystemExit(0 if result["equal"] else 1)


if __name__ == "__main__":
    main()
