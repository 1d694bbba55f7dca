"""Data sets as train, validation and test rows: the published ones by name, own data by path."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nicest.data import download, images
from nicest.data.arrays import Rows, as_rows, read_npy, read_npz, require_varying
from nicest.errors import NicestError

PARTS = ("train", "valid", "test")
IDX_IMAGES = re.compile(r"idx[23]|\.idx(\.gz)?$")


@dataclass(frozen=True)
class Splits:
    """Train, validation and test rows of one data set, each (N, D), uint8/uint16 levels or float32.

    `shape` is that of one row: (H, W) grey, (C, H, W) colour, channel-planar, (D,) plain rows. `levels` is the number
    of grey levels, None where the data is continuous.
    """

    name: str
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    shape: tuple[int, ...]
    levels: int | None

    @property
    def dim(self) -> int:
        """Features of one row, D."""
        return int(self.train.shape[1])

    def split(self, name: str) -> np.ndarray:
        """The rows of one split."""
        if name not in PARTS:
            raise NicestError(f"expected a split of {', '.join(PARTS)}, got '{name}'")
        rows: np.ndarray = getattr(self, name)
        return rows


def load(name_or_path: str, *, seed: int = 0, valid: float = 0.1, test: float = 0.1) -> Splits:
    """Load a data set by name (digits, mnist, cifar10, svhn, tfd) or own data by path; a known name comes first.

    A path is a .npy, .npz or idx file, or a folder of idx files or of images. Digits and own data are split by a
    permutation from `seed`, with the fractions `valid` and `test`; sets and files that come with their own split
    ignore what it already settles. Nothing is downloaded.
    """
    _require_fractions(seed, valid, test)
    if name_or_path == "digits":
        return by_seed("digits", _digits(), seed, valid, test)
    if name_or_path in PUBLISHED:
        return PUBLISHED[name_or_path]()
    path = Path(name_or_path).expanduser()
    if path.exists() or path.suffix or os.sep in name_or_path or "/" in name_or_path:
        return _load_path(path, seed, valid, test)
    raise NicestError(str(_unknown(name_or_path)))
