"""Data: bytes on disk to arrays of train, validation and test rows."""

from nicest.data.loading import load
from nicest.data.splits import Splits, given, in_memory

__all__ = ["Splits", "given", "in_memory", "load"]
