"""Data: bytes on disk to arrays of train, validation and test rows."""

from nicest.data.splits import Splits, load

__all__ = ["Splits", "load"]
