"""Whether there are kernels of our own for a tensor."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor


def kernels_for(x: Tensor) -> ModuleType | None:
    """Return the module `fast.kernels` if it can handle a tensor, else None.

    It needs a GPU, Triton, a dtype other than float64 and fewer than 2^31 elements.
    """
    return _kernels() if x.is_cuda and x.dtype != torch.float64 and x.numel() < 2**31 else None


@cache
def _kernels() -> ModuleType | None:
    return importlib.import_module("nicest.fast.kernels") if find_spec("triton") else None
