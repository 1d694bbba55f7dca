"""The units of a log-likelihood: nats of levels, nats on an interval, bits per dimension (docs/conventions.md)."""

from __future__ import annotations

import math

from nicest.recipes.recipe import DataSettings

INPUT_LAYERS = ("dequantise", "interval")  # between the levels of the data and the interval nats are reported on


def interval_nats(data: DataSettings) -> float:
    """What turns nats of the data's own levels into nats on the recipe's interval, the paper's unit (NICE §5.1).

    A pixel's level has volume 1 among levels and (high - low)/levels on the interval, so
    log p_interval = log p_levels + D log(levels / (high - low)). Continuous data has no such change of unit.
    """
    low, high = data.interval
    return data.dim * math.log(data.levels / (high - low)) if data.levels else 0.0


def bits_per_dim(nats: float, dim: int) -> float:
    """Nats in the data's own space as bits for each dimension."""
    return -nats / (dim * math.log(2))
