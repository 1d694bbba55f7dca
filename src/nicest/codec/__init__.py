"""Lossless compression with a trained flow.

Layers take part through `to_grid` and `from_grid`, which dispatch on the class of a layer.
"""

from nicest.codec.container import compress, decompress
from nicest.codec.grid import Grid, from_grid, to_grid

__all__ = ["Grid", "compress", "decompress", "from_grid", "to_grid"]
