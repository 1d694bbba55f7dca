"""Whether there are kernels of our own for a tensor."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor


def kernels_for(x: Tensor) -> ModuleType | None:
    """`fast.kernels` for a tensor on a GPU, where Triton is installed and 32 bits count its numbers; else None.

    The kernels compute in float32: float64 has none.
    """
    return _kernels() if x.is_cuda and x.dtype != torch.float64 and x.numel() < 2**31 else None


@cache
def _kernels() -> ModuleType | None:
    return importlib.import_module("nicest.fast.kernels") if find_spec("triton") else None
