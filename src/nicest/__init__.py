"""Exact-likelihood density models by invertible coupling layers (NICE, Dinh, Krueger and Bengio 2014), and tables.

table = nicest.NICETable().fit(frame)    # score, impute, predict, sample: any question about a table
model = nicest.NICE().fit(X)             # the paper's flow as a scikit-learn estimator of rows of numbers
run = nicest.open("runs/mnist")          # run.flow is a torch module: run.flow.log_prob(x), run.flow.sample(10)
flow = nicest.Flow(units, chain, prior)  # or build your own from nicest.flows, and
nicest.fit(flow, rows, valid=held_out)   # train it: in memory, or in a run folder that survives crashes
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

# Threads of torch sleep while they wait for one another. By default they spin, which costs up to 20 times the processor
# time when other programs keep the cores busy. torch reads this when it is imported; your own setting has precedence.
_spins = "torch" in sys.modules and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if TYPE_CHECKING:
    from nicest.codec import compress, decompress
    from nicest.errors import NicestError
    from nicest.estimators.detector import NICEDetector
    from nicest.estimators.nice import NICE
    from nicest.estimators.predictors import NICEClassifier, NICERegressor
    from nicest.estimators.table import NICETable
    from nicest.fast import lower
    from nicest.flows import Chain, Flow, Gaussian, Logistic, Units
    from nicest.inference.engine import Engine
    from nicest.recipes.recipe import TrainSettings
    from nicest.runs.factory import save
    from nicest.runs.folder import RunFolder
    from nicest.runs.run import Run, load
    from nicest.runs.run import Run as open  # noqa: F401
    from nicest.train.fit import fit

__version__ = "0.1.0"
__all__ = [
    "NICE",
    "Chain",
    "Engine",
    "Flow",
    "Gaussian",
    "Logistic",
    "NICEClassifier",
    "NICEDetector",
    "NICERegressor",
    "NICETable",
    "NicestError",
    "Run",
    "RunFolder",
    "TrainSettings",
    "Units",
    "__version__",
    "compress",
    "decompress",
    "fit",
    "load",
    "lower",
    "save",
]

# torch is imported when something needs it, not before: `nicest --help` answers at once
_HOMES = {
    "NICE": "nicest.estimators.nice",
    "NICEClassifier": "nicest.estimators.predictors",
    "NICEDetector": "nicest.estimators.detector",
    "NICERegressor": "nicest.estimators.predictors",
    "NICETable": "nicest.estimators.table",
    "Chain": "nicest.flows",
    "Engine": "nicest.inference.engine",
    "Flow": "nicest.flows",
    "Gaussian": "nicest.flows",
    "Logistic": "nicest.flows",
    "NicestError": "nicest.errors",
    "Run": "nicest.runs.run",
    "RunFolder": "nicest.runs.folder",
    "TrainSettings": "nicest.recipes.recipe",
    "Units": "nicest.flows",
    "compress": "nicest.codec",
    "decompress": "nicest.codec",
    "fit": "nicest.train.fit",
    "load": "nicest.runs.run",
    "lower": "nicest.fast",
    "open": "nicest.runs.run",
    "save": "nicest.runs.factory",
}
_PACKAGES = ("flows", "fast", "data", "tables", "recipes", "inference", "runs", "train", "tasks", "codec", "plots")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), "Run" if name == "open" else name)
    if name in _PACKAGES:
        return importlib.import_module(f"nicest.{name}")
    raise AttributeError(f"module 'nicest' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, which tab completion and help() show, without importing them."""
    return [*_HOMES, *_PACKAGES, *(name for name in globals() if name.startswith("__"))]
