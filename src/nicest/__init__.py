"""Exact-likelihood density models by invertible coupling layers (NICE, Dinh, Krueger and Bengio 2014).

model = nicest.NICE().fit(X)          # a scikit-learn estimator for tables
flow = nicest.load("runs/mnist")      # a torch module; flow(x) is flow.log_prob(x)
flow = nicest.Flow(chain, prior)      # or build your own from nicest.flows
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nicest.errors import NicestError
    from nicest.estimator import NICE
    from nicest.flows import Flow
    from nicest.inference.engine import Engine
    from nicest.runs.folder import load

__version__ = "0.1.0"
__all__ = ["NICE", "Engine", "Flow", "NicestError", "__version__", "load"]

# torch is imported when something needs it, not before: `nicest --help` answers at once
_HOMES = {
    "NICE": "nicest.estimator",
    "Engine": "nicest.inference.engine",
    "Flow": "nicest.flows",
    "NicestError": "nicest.errors",
    "load": "nicest.runs.folder",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in ("flows", "data", "recipes", "inference", "runs", "train", "tasks", "studies", "plots"):
        return importlib.import_module(f"nicest.{name}")
    raise AttributeError(f"module 'nicest' has no attribute {name!r}")
