"""Tables: one network for the distribution of any cell given any others."""

from nicest.tables.heads import Categories, Numbers
from nicest.tables.model import TableModel

__all__ = ["Categories", "Numbers", "TableModel"]
