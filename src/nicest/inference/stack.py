"""A stack of bits, and a grid whose layers take from it and put back to it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nicest.errors import needing
from nicest.flows.grid import Grid, Map

BITS = 12  # bits after the point between layers
EXTRA = 10  # bits more, to which `bend` resolves an increasing function
LARGEST = 1 << 36  # most values of a symbol
ULPS = 2.0**-46  # relative error of a law that another machine may make
NETWORK_ERROR = 2.0**-40  # relative error of a network in float64 that another machine may make
GROUP, NUMBERS = 16, 1 << 17  # rows that a network reads at once, or more if it gives fewer numbers: the cache is small
DOUBLINGS = 40  # of the distance at which the cell is looked for that `bend` came from


class Unfit(Exception):
    """Rows, a mask, that cannot be coded so that every machine decodes them."""

    def __init__(self, rows: np.ndarray) -> None:
        super().__init__(f"{rows.sum()} rows do not fit")
        self.rows = rows


class Exhausted(Exception):
    """The stack has too few bits for the noise of so many rows."""


class Damaged(Exception):
    """What is decoded was not coded by this flow."""


class Stack:
    """A stack of bits in memory, from which uniform symbols are taken and to which they are put back."""

    def __init__(self, words: np.ndarray, *, fresh: bool) -> None:
        coding = constriction()
        self.coder = coding.stream.stack.AnsCoder(words, seal=fresh)  # fresh words are arbitrary bits
        self.uniform = coding.stream.model.Uniform()
        self.least = self.bits  # fewest bits that it had

    @property
    def bits(self) -> int:
        return int(self.coder.num_valid_bits())

    def words(self, *, fresh: bool) -> np.ndarray:
        try:
            return np.array(self.coder.get_compressed(unseal=fresh))
        except AssertionError as error:  # bits that cannot have been fresh words
            raise Damaged from error

    def pop(self, sizes: Tensor) -> Tensor:
        """A symbol of 0..n-1 for each size n; the last ones, less than n / 4096 of them, are never taken."""
        high, low = _parts(sizes)
        found = self._pop(high)
        if low is not None:
            found = (found.astype(np.int64) << low) + self._pop(np.left_shift(1, low, dtype=np.int32))
        self._check()
        return torch.from_numpy(found).view(sizes.shape).to(sizes.device)

    def push(self, symbols: Tensor, sizes: Tensor) -> None:
        """Put back what `pop` with these sizes then takes."""
        high, low = _parts(sizes)
        if low is None:
            values = _numbers(symbols)
        else:
            wide = symbols.reshape(-1).cpu().numpy()
            values, rest = (wide >> low).astype(np.int32), (wide & ((1 << low.astype(np.int64)) - 1)).astype(np.int32)
        if (values < 0).any() or (values >= high).any():
            raise Damaged
        if low is not None:
            self._push(rest, np.left_shift(1, low, dtype=np.int32))
        self._push(values, high)

    def pop_wide(self, sizes: Tensor) -> Tensor:
        """A symbol of 0..n-1 for each size n up to 2^60; all of them may be put back."""
        high, low = _wide(sizes)
        found = self._pop(high)
        for k in (32, 16, 0):
            found = found.astype(np.int64) << (bits := (low - k).clip(0, 16)) | self._pop(1 << bits)
        self._check()
        if (found >= sizes.numpy()).any():
            raise Damaged
        return torch.from_numpy(found)

    def push_wide(self, symbols: Tensor, sizes: Tensor) -> None:
        """Put back what `pop_wide` then takes."""
        (high, low), values = _wide(sizes), symbols.numpy()
        for k in (0, 16, 32):
            bits = (low - k).clip(0, 16)
            self._push(values & ((1 << bits) - 1), 1 << bits)
            values = values >> bits
        self._push(values, high)

    def pop_from(self, model: Any, shape: Sequence[int]) -> Tensor:
        """A symbol of a fixed model for each number of a tensor, as int32."""
        found = self.coder.decode(model, math.prod(shape))
        self._check()
        return torch.from_numpy(found).view(*shape)

    def push_to(self, model: Any, symbols: Tensor) -> None:
        """Put back what `pop_from` then takes."""
        self.coder.encode_reverse(_numbers(symbols), model)

    def _check(self) -> None:
        self.least = min(self.least, self.bits)
        if self.least < 128:
            raise Exhausted

    def _pop(self, sizes: np.ndarray) -> np.ndarray:
        some = sizes > 1
        if some.all():
            found: np.ndarray = self.coder.decode(self.uniform, sizes.astype(np.int32, copy=False))
            return found
        found = np.zeros(len(sizes), dtype=np.int32)
        found[some] = self.coder.decode(self.uniform, sizes[some].astype(np.int32, copy=False))
        return found

    def _push(self, symbols: np.ndarray, sizes: np.ndarray) -> None:
        some = sizes > 1
        if not some.all():
            symbols, sizes = symbols[some], sizes[some]
        symbols, sizes = symbols.astype(np.int32, copy=False), sizes.astype(np.int32, copy=False)
        self.coder.encode_reverse(symbols, self.uniform, sizes)


def _numbers(t: Tensor) -> np.ndarray:
    """Numbers below 2^31 as the coder takes them; from a GPU, half as many bytes."""
    found: np.ndarray = t.reshape(-1).to(torch.int32).cpu().numpy()
    return found


def _parts(sizes: Tensor) -> tuple[np.ndarray, np.ndarray | None]:
    """n as about h 2^k with h < 8192: the coder rounds the probabilities of larger alphabets."""
    n = sizes.reshape(-1)
    if not len(n) or int(n.max()) < 1 << 13:
        return _numbers(n), None
    low = (torch.frexp(n.double())[1] - 13).clamp_min_(0)
    return _numbers(n >> low), _numbers(low)


def _wide(sizes: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """n as h 2^k or a little less, with h <= 8192."""
    n = sizes.numpy()
    low = np.maximum(np.frexp(n.astype(np.float64))[1].astype(np.int64) - 13, 0)
    return -(-n >> low), low


@functools.cache
def fixed(bits: int) -> Any:
    """2^bits symbols of equal probability, more than one."""
    return constriction().stream.model.Uniform(1 << bits)


def constriction() -> Any:
    """Import the library of entropy coders."""
    with needing("codec"):
        import constriction
    return constriction


class StackGrid(Grid):
    """A grid whose layers take from a stack and put back to it.

    An increasing g takes the cell i to the interval from g(i) to g(i + 1), whose ends are rounded to a grid that is
    finer by `EXTRA` bits. A point in it is drawn by bits from the stack; the bits by which it is finer than the grid
    are put back. So a cell costs minus the logarithm of its mean slope, and no bit is lost. While encoding, a row
    is unfit if another machine might round one of its numbers otherwise.
    """

    def __init__(self, stack: Stack, rows: int, *, encoding: bool) -> None:
        self.stack, self.rows, self.encoding = stack, rows, encoding

    def real(self, i: Tensor) -> Tensor:
        return i.double().mul_(2.0**-BITS)

    def cells(self, t: Tensor) -> Tensor:
        return self._near(t, BITS, NETWORK_ERROR)

    def network(self, m: Callable[[Tensor, Tensor | None], Tensor], i: Tensor, context: Tensor | None) -> Tensor:
        found, at, size = list[Tensor](), 0, len(i) if i.is_cuda else GROUP
        while at < len(i):
            rows = slice(at, at + size)
            found.append(m(self.real(i[rows]), None if context is None else context[rows]))
            at, size = at + size, max(GROUP, NUMBERS // found[0].shape[1])
        return torch.cat(found)

    def rounded(self, b: Tensor) -> Tensor:
        return self.real(self.cells(b))

    def bend(self, i: Tensor, g: Map, inverse: Map, bits: int = BITS) -> Tensor:
        low, high = self._edge(i, g, bits), self._edge(i + 1, g, bits)
        size = high.sub_(low)
        self.require_below(size, LARGEST + 1, least=1)
        z = low.add_(self.stack.pop(size))
        self.stack.push_to(fixed(EXTRA), z & ((1 << EXTRA) - 1))
        return z >> EXTRA

    def unbend(
        self, j: Tensor, g: Map, inverse: Map, bits: int = BITS, among: tuple[int, int] = (-(1 << 40), 1 << 40)
    ) -> Tensor:
        z = (j << EXTRA) + self.stack.pop_from(fixed(EXTRA), j.shape).to(j.device)
        near = inverse(z.double().mul_(2.0 ** -(BITS + EXTRA))) * 2.0**bits
        self.require_below(near.abs(), 2.0**40)
        i = near.floor_().long().clamp_(among[0], among[1] - 1)
        i, low, high = self._cell(i, z, g, bits, among)
        self.require_below(high - low, LARGEST + 1)
        self.stack.push(z - low, high - low)
        return i

    def _cell(self, i: Tensor, z: Tensor, g: Map, bits: int, among: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """The cell whose interval z lies in: i, or near it where the inverse is not exact; and its interval."""
        end = i + 1
        low, high = self._edge(i, g, bits), self._edge(end, g, bits)
        for k in range(DOUBLINGS):
            above, below = low > z, high <= z
            if not bool((above | below).any()):
                break
            i = torch.where(above, i - (1 << k), i).clamp_min(among[0])
            end = torch.where(below, end + (1 << k), end).clamp_max(among[1])
            low, high = self._edge(i, g, bits), self._edge(end, g, bits)
        else:
            raise Damaged
        while k and bool((end - i > 1).any()):
            middle = (i + end) >> 1
            edge = self._edge(middle, g, bits)
            above = edge > z
            i, end = torch.where(above, i, middle), torch.where(above, middle, end)
            low, high = torch.where(above, low, edge), torch.where(above, edge, high)
        return i, low, high

    def _edge(self, i: Tensor, g: Map, bits: int) -> Tensor:
        return self._near(g(i.double().mul_(2.0**-bits)), BITS + EXTRA, ULPS)

    def _near(self, t: Tensor, bits: int, error: float) -> Tensor:
        """t in units of 2^-bits as integers; unfit where an error of so much would change one."""
        at = t * 2.0**bits
        whole = at.round()
        if self.encoding and t.ndim > 1:
            off = (at - whole).abs_().add_(at.abs_(), alpha=error)
            self.require_below(off, 0.5 - error * 2.0**bits)
        else:
            self.require_below(at.abs_().mul_(error), 0.5)
        return whole.long()

    def require_below(self, t: Tensor, most: float, least: float = -math.inf) -> None:
        """Numbers from `least` on, and below `most`: not NaN."""
        if not t.numel():
            return
        fits = bool(t.max() < most) and (least == -math.inf or bool(t.min() >= least))
        if not fits:  # which numbers, is seldom of interest
            self.require((t < most) & (t >= least))

    def require(self, fit: Tensor) -> None:
        if bool(fit.all()):
            return
        if not self.encoding:
            raise Damaged
        if fit.ndim < 2:  # a parameter of the flow
            raise Unfit(np.ones(self.rows, dtype=bool))
        raise Unfit(~fit.reshape(self.rows, -1).all(1).cpu().numpy())
