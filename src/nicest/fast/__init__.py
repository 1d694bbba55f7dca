"""Fast twins of flows: the same function, computed in fewer passes, in reduced precision, on a GPU in one graph."""

from nicest.fast.graphs import capture
from nicest.fast.lower import LoweredChain, copy_weights, lower, lowered_chains

__all__ = ["LoweredChain", "capture", "copy_weights", "lower", "lowered_chains"]
