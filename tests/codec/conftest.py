"""The zoo of `tests/flows` is compressed here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "flows"))
