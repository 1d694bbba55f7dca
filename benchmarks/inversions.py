"""Count the failures of random inversions of the spline law, with parameters from ordinary to absurd.

python -m benchmarks.inversions 100000000 --out results/spline-inversions.json
"""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.report import origin
from nicest.files import to_json, write_text
from nicest.flows import Spline
from nicest.runs.runtime import choose_device

SIZES = (0.1, 1.0, 3.0, 10.0, 100.0, 1e4, 1e30)
LAWS = (Spline(), Spline(bins=2), Spline(bins=32, bound=3.0))
STEPS = 64  # tolerance, in roundings of y plus the change of y from one rounding of x


def worst_inversions(count: int, dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, float]:
    """Compute g(g⁻¹(y)) for `count` draws of y and of parameters, and count how often it is not y.

    x = g⁻¹(y) is rounded to `dtype`, so the tolerance covers the change of g(x) from one rounding of x.
    """
    generator = torch.Generator(device).manual_seed(seed)
    done = failed = not_finite = 0
    worst, eps = 0.0, torch.finfo(dtype).eps
    while done < count:
        law, size = LAWS[done % len(LAWS)], SIZES[(done // 7) % len(SIZES)]
        n = min(count - done, 100_003)
        b = size * torch.randn(n, law.size, generator=generator, device=device, dtype=dtype)
        if size > 3:  # ordinary and absurd parameters in the same row
            b *= torch.rand(b.shape, generator=generator, device=device, dtype=dtype) ** 8
        y = law.bound * 1.1 * (2 * torch.rand(n, 1, generator=generator, device=device, dtype=dtype) - 1)
        x = law.inverse(y, b[:, None])[0]
        again, log_slope = law.forward(x, b[:, None])
        off = ((again - y).abs() / (eps * law.bound * (1 + log_slope.exp())))[:, 0]
        not_finite += int((~(x.isfinite()[:, 0] & again.isfinite()[:, 0] & log_slope.isfinite()[:, 0])).sum())
        failed += int((~(off <= STEPS)).sum())
        worst = max(worst, float(off.nan_to_num(nan=torch.inf).max()))
        done += n
    return {"inversions": done, "failed": failed, "not_finite": not_finite, "worst": worst}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    device = choose_device()
    types = {"float32": torch.float32, "float64": torch.float64}
    found = {name: worst_inversions(asked.count, dtype, device, seed=0) for name, dtype in types.items()}
    text = to_json(origin(device) | {"allowed": STEPS} | found)
    write_text(asked.out, text)
    print(text)
    sys.exit(any(each["failed"] or each["not_finite"] for each in found.values()))
