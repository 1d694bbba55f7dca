"""Golden values: float64 log-densities, latents and inverses of stored models, which no redesign may change.

`tests/golden/values.npz` was written by commit 4e26a78 (format 2). Latents and noise come from a fixed low-discrepancy
sequence, so that no random number generator is involved. `python tests/test_golden.py NAME ...` adds the values of new
models; it never overwrites one.
"""

import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import nicest
from nicest.flows import Mixture

TESTS = Path(__file__).parent
VALUES = TESTS / "golden" / "values.npz"
SHIPPED = ("digits-conv", "mnist", "mnist-conv", "mnist-labels", "svhn-conv")
KINDS = ("additive", "affine", "spline", "conv", "labels")
FIXTURES = ("format-1/images", "format-2/images")
LABEL = 3.0


def fixed(n: int, dim: int) -> Tensor:
    """Return an (n, dim) tensor of well-spread numbers in (0, 1)."""
    return ((torch.arange(1, n * dim + 1, dtype=torch.float64) * 0.6180339887498949) % 1).reshape(n, dim)


def open_run(name: str) -> nicest.Run:
    """Open a shipped model, a small model of `tests/golden` or a fixture of an old format, in float64."""
    path = name if name in SHIPPED else TESTS / ("golden" if name in KINDS else "fixtures") / name
    return nicest.open(path, dtype=torch.float64)


def probe(run: nicest.Run) -> dict[str, np.ndarray]:
    """Compute what is compared: inverses of fixed latents, and log-densities and latents of rows."""
    flow = run.flow
    members = list(flow.members) if isinstance(flow, Mixture) else [flow]
    n = 2 if run.kind == "images" else 8
    context = None
    if run.recipe.data.classes:
        context = torch.full((n, 1), LABEL, dtype=torch.float64)
    h = flow.prior.quantile(fixed(n, flow.dim))
    y = torch.stack([each.bijection.inverse(h, each.embed(context))[0] for each in members])
    x = flow.units.leave(y[0])
    found: dict[str, Any] = {"inverse": y, "sample": x}
    noise = fixed(n, flow.dim)
    found["log_prob"] = flow.log_prob(x, context, noise=noise)
    if not isinstance(flow, Mixture):
        found["latent"] = flow.encode(x, context, noise=noise)
    if context is None:
        found["seeded"] = flow.sample(2, generator=torch.Generator().manual_seed(0))
    return {key: value.detach().numpy() for key, value in found.items()}


@pytest.mark.parametrize("name", [*SHIPPED, *KINDS, *FIXTURES])
def test_values_are_what_they_were(name: str) -> None:
    with np.load(VALUES) as stored:
        expected = {key.removeprefix(f"{name}/"): stored[key] for key in stored.files if key.startswith(f"{name}/")}
    found = probe(open_run(name))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-9, atol=1e-9, err_msg=key)


def write(names: list[str]) -> None:
    """Add the values of models to the file."""
    with zipfile.ZipFile(VALUES, "a", zipfile.ZIP_DEFLATED) as archive:
        there = {entry.partition(".npy")[0] for entry in archive.namelist()}
        for name in names:
            for key, value in probe(open_run(name)).items():
                if f"{name}/{key}" in there:
                    raise SystemExit(f"{name}/{key} has a value already: golden values are never overwritten")
                with archive.open(f"{name}/{key}.npy", "w") as file:
                    np.save(file, value)


if __name__ == "__main__":
    write(sys.argv[1:])
