"""The zoo of `tests/flows` is tested here too, and bfloat16 on CPUs where oneDNN cannot compute it."""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "flows"))


@pytest.fixture(autouse=True)
def _without_onednn() -> Iterator[None]:
    """oneDNN's bfloat16 kernels die of an illegal instruction on virtual machines that claim AMX but lack it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration")  # torch's own, whenever the flags are set
        with torch.backends.mkldnn.flags(enabled=False):
            yield
