"""Speed, size and equality of lossless compression, as one line of JSON.

    python -m benchmarks.codec_speed mnist images.npy --device cuda --jobs 4 --block 2048

The .npy file holds images of grey levels, (n, ...), which are compressed and decompressed in memory. Rates are MB (10^6
bytes of pixels) per second of wall-clock time, with copying the model and starting the processes. CPU seconds are those
of all processes.
"""

import argparse
import hashlib
import resource
import time
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


def timed(function: Any, *inputs: Any) -> tuple[Any, float, float]:
    """Call a function; return its result, and the wall-clock and CPU seconds that it and its processes took."""
    start, before = time.perf_counter(), cpu_seconds()
    found = function(*inputs)
    return found, time.perf_counter() - start, cpu_seconds() - before


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that it started, which have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


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
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0: the default of the library")
    parser.add_argument("--block", type=int, default=0, help="rows of a block; 0: the default of the library")
    asked = parser.parse_args()
    rows = np.load(asked.file)
    run = Run(asked.model, dtype=torch.float64, device=asked.device)
    jobs, block = ({name: value} if (value := getattr(asked, name)) else {} for name in ("jobs", "block"))
    nicest.decompress(run.flow, nicest.compress(run.flow, rows[:WARM]))
    packed, *encoding = timed(partial(nicest.compress, run.flow, **jobs, **block), rows)
    back, *decoding = timed(partial(nicest.decompress, run.flow, **jobs), packed)
    megabytes, bits, own = rows.size / 1e6, 8 * len(packed) / rows.size, own_bits(run, rows)
    result: dict[str, Any] = {"model": asked.model, "rows": len(rows), "megabytes": megabytes, **jobs, **block}
    for name, (seconds, cpu) in (("compress", encoding), ("decompress", decoding)):
        result |= {f"{name}_megabytes_per_second": megabytes / seconds, f"{name}_cpu_seconds": cpu}
    result |= {"bits_per_dim": bits, "model_bits_per_dim": own, "overhead_percent": 100 * (bits / own - 1)}
    result |= {"equal": bool(np.array_equal(back, rows)), "packed_bytes": len(packed)}
    print(to_json(result | {"sha256": hashlib.sha256(packed).hexdigest()} | origin(run.device), indent=None))
    raise SystemExit(0 if result["equal"] else 1)


if __name__ == "__main__":
    main()
