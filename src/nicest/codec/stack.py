"""A stack of bits, from which symbols are decoded and onto which they are encoded."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nicest.errors import NicestError

RESERVE = 128  # bits that always stay on the stack


class Unencodable(Exception):
    """Raised while encoding for rows (a mask, shape (B,)) that not every machine would decode to the same values."""

    def __init__(self, rows: np.ndarray) -> None:
        super().__init__(f"{rows.sum()} rows cannot be encoded")
        self.rows = rows


class OutOfBits(Exception):
    """Raised when the stack has too few bits left for the noise of a batch."""


class Corrupt(Exception):
    """Raised when the decoded bits cannot come from the encoder of this flow."""


class Stack:
    """Asymmetric numeral systems (ANS) coder in memory: last in, first out.

    It starts with `words`, uint32: arbitrary bits if `fresh`, else the contents of another stack.
    """

    def __init__(self, words: np.ndarray, *, fresh: bool) -> None:
        stream = constriction().stream
        self.coder = stream.stack.AnsCoder(words, seal=fresh)
        self.uniform = stream.model.Uniform()
        self.least = self.bits  # fewest bits so far

    @property
    def bits(self) -> int:
        """Number of bits on the stack."""
        return int(self.coder.num_valid_bits())

    def words(self, *, fresh: bool) -> np.ndarray:
        """Return the contents, as arbitrary bits (`fresh`) or for a later `Stack(words, fresh=False)`."""
        try:
            return np.array(self.coder.get_compressed(unseal=fresh))
        except AssertionError as error:  # the coder's state is not one that arbitrary bits lead to
            raise Corrupt from error

    def pop(self, sizes: Tensor) -> Tensor:
        """Pop a uniform symbol in 0..n-1 for each size n; the last n / 4096 symbols at most are never drawn."""
        high, shift = _split_size(sizes)
        symbols = self._pop(high)
        if shift is not None:
            symbols = (symbols.astype(np.int64) << shift) + self._pop(np.left_shift(1, shift, dtype=np.int32))
        self._check()
        return torch.from_numpy(symbols).view(sizes.shape).to(sizes.device)

    def push(self, symbols: Tensor, sizes: Tensor) -> None:
        """Push symbols such that `pop(sizes)` returns them."""
        high, shift = _split_size(sizes)
        if shift is None:
            values = _int32(symbols)
        else:
            wide = symbols.reshape(-1).cpu().numpy()
            values = (wide >> shift).astype(np.int32)
            rest = (wide & ((1 << shift.astype(np.int64)) - 1)).astype(np.int32)
        if (values < 0).any() or (values >= high).any():
            raise Corrupt
        if shift is not None:
            self._push(rest, np.left_shift(1, shift, dtype=np.int32))
        self._push(values, high)

    def pop_from(self, model: Any, shape: Sequence[int]) -> Tensor:
        """Pop symbols (int32, of this shape) that all have the same probability model."""
        symbols = self.coder.decode(model, math.prod(shape))
        self._check()
        return torch.from_numpy(symbols).view(*shape)

    def push_to(self, model: Any, symbols: Tensor) -> None:
        """Push symbols such that `pop_from(model, symbols.shape)` returns them."""
        self.coder.encode_reverse(_int32(symbols), model)

    def _check(self) -> None:
        self.least = min(self.least, self.bits)
        if self.least < RESERVE:
            raise OutOfBits

    def _pop(self, sizes: np.ndarray) -> np.ndarray:
        symbols, some = np.zeros(len(sizes), dtype=np.int32), sizes > 1  # the coder needs two symbols or more
        symbols[some] = self.coder.decode(self.uniform, sizes[some].astype(np.int32, copy=False))
        return symbols

    def _push(self, symbols: np.ndarray, sizes: np.ndarray) -> None:
        some = sizes > 1
        symbols, sizes = (each[some].astype(np.int32, copy=False) for each in (symbols, sizes))
        self.coder.encode_reverse(symbols, self.uniform, sizes)


def _int32(t: Tensor) -> np.ndarray:
    """Flatten to the int32 array that the coder takes; converting first halves the transfer from a GPU."""
    values: np.ndarray = t.reshape(-1).to(torch.int32).cpu().numpy()
    return values


def _split_size(sizes: Tensor) -> tuple[np.ndarray, np.ndarray | None]:
    """Return (h, k) with n ≈ h 2^k and h < 8192: the coder rounds the probabilities of larger alphabets."""
    n = sizes.reshape(-1)
    if not len(n) or int(n.max()) < 1 << 13:
        return _int32(n), None
    shift = (torch.frexp(n.double())[1] - 13).clamp_min_(0)
    return _int32(n >> shift), _int32(shift)


@functools.cache
def uniform(bits: int) -> Any:
    """Return the model of 2^bits equally probable symbols, bits > 0."""
    return constriction().stream.model.Uniform(1 << bits)


def constriction() -> Any:
    """Import the library of entropy coders, or raise a NicestError that tells how to install it."""
    try:
        import constriction as library
    except ImportError as error:
        raise NicestError("compression needs constriction: pip install 'nicest[codec]'") from error
    return library
