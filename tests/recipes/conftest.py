"""Recipes are tested on one thread, and through the command line on small files in the published layouts."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "data"))  # where `published` is
