"""Lossless coding of discrete rows by a flow: the flow acts on a grid, and what it rounds away goes to a stack of bits.

The method is local bits-back coding (Ho et al. 2019, "Compression with flows via local bits-back coding") with uniform
instead of Gaussian noise, on a grid as in iFlow (Zhang et al. 2021). Dequantisation noise is taken from the stack, the
layers act on points of the grid, and the latent point is put back by the prior. A row costs -log2 P(x, noise) less
the bits of the noise: the bound that the flow reports.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import lzma
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nicest.errors import NicestError
from nicest.flows import Flow
from nicest.flows.grid import Grid, Map

FINER, COARSER = 10, 4  # bits by which the grid of a dequantised pixel is finer than its level; without a first layer
BITS = 12  # bits after the point between layers
EXTRA = 10  # bits more, to which `bend` resolves an increasing function
LARGEST = 1 << 36  # most values of a symbol
PRIOR_BITS, PRIOR_FLOOR = 5, 2.0**-10  # of the quantised prior: see `_Prior`
ULPS = 2.0**-46  # relative error of a law that another machine may make
NETWORK_ERROR = 2.0**-40  # relative error of a network in float64 that another machine may make
BATCH = 512  # rows that are coded at once, at most
GROUP = 16  # rows that a network reads at once: what it computes stays in the processor's cache
MOST_ROWS = 1 << 16  # of a block
RAW = [{"id": lzma.FILTER_LZMA2, "preset": 6}]  # how rows are stored that the flow cannot code
TRIES = 8  # steps to the cell that `bend` came from


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
    """A stack of bits, from which uniform symbols are taken and to which they are put back."""

    def __init__(self, words: np.ndarray, *, fresh: bool) -> None:
        coding = constriction()
        self.coder = coding.stream.stack.AnsCoder(words, seal=fresh)  # fresh words are arbitrary bits
        self.uniform = coding.stream.model.Uniform()
        self.least = self.bits  # fewest bits that it had

    @property
    def bits(self) -> int:
        return int(self.coder.num_valid_bits())

    def words(self, *, fresh: bool) -> np.ndarray:
        return np.array(self.coder.get_compressed(unseal=fresh))

    def pop(self, sizes: Tensor) -> Tensor:
        """A symbol of 0..n-1 for each size n; the last ones, less than n / 4096 of them, are never taken."""
        high, low = _parts(sizes)
        found = self._pop(high)
        if low is not None:
            found = (found << low) + self._pop(1 << low)
        self._check()
        return torch.from_numpy(found).view(sizes.shape)

    def push(self, symbols: Tensor, sizes: Tensor) -> None:
        """Put back what `pop` with these sizes then takes."""
        high, low = _parts(sizes)
        values = symbols.reshape(-1).numpy()
        if low is not None:
            values, rest = values >> low, values & ((1 << low) - 1)
        if (values < 0).any() or (values >= high).any():
            raise Damaged
        if low is not None:
            self._push(rest, 1 << low)
        self._push(values, high)

    def pop_from(self, model: Any, shape: Sequence[int]) -> Tensor:
        """A symbol of a fixed model for each number of a tensor."""
        found = self.coder.decode(model, math.prod(shape))
        self._check()
        return torch.from_numpy(found).view(*shape).long()

    def push_to(self, model: Any, symbols: Tensor) -> None:
        """Put back what `pop_from` then takes."""
        self.coder.encode_reverse(symbols.reshape(-1).numpy().astype(np.int32), model)

    def _check(self) -> None:
        self.least = min(self.least, self.bits)
        if self.least < 128:
            raise Exhausted

    def _pop(self, sizes: np.ndarray) -> np.ndarray:
        some = sizes > 1
        if some.all():
            return self.coder.decode(self.uniform, sizes.astype(np.int32)).astype(np.int64)
        found = np.zeros(len(sizes), dtype=np.int64)
        found[some] = self.coder.decode(self.uniform, sizes[some].astype(np.int32))
        return found

    def _push(self, symbols: np.ndarray, sizes: np.ndarray) -> None:
        some = sizes > 1
        if not some.all():
            symbols, sizes = symbols[some], sizes[some]
        self.coder.encode_reverse(symbols.astype(np.int32), self.uniform, sizes.astype(np.int32))


def _parts(sizes: Tensor) -> tuple[np.ndarray, np.ndarray | None]:
    """n as about h 2^k with h < 8192: the coder rounds the probabilities of larger alphabets."""
    n = sizes.reshape(-1).numpy()
    if n.max(initial=0) < 1 << 13:
        return n, None
    low = np.maximum(np.frexp(n)[1].astype(np.int64) - 13, 0)
    return n >> low, low


def constriction() -> Any:
    """The library of entropy coders."""
    try:
        import constriction as found
    except ImportError as error:
        raise NicestError("compression needs constriction: pip install 'nicest[codec]'") from error
    return found


class StackGrid(Grid):
    """A grid whose layers take from a stack and put back to it.

    An increasing g takes the cell i to the interval from g(i) to g(i + 1), whose ends are rounded to a grid that is
    finer by `EXTRA` bits. A point in it is drawn by bits from the stack; the bits by which it is finer than the grid
    are put back. So a cell costs minus the logarithm of its mean slope, and no bit is lost. While encoding, a row
    is unfit if another machine might round one of its numbers otherwise.
    """

    def __init__(self, stack: Stack, rows: int, *, encoding: bool) -> None:
        self.stack, self.rows, self.encoding = stack, rows, encoding
        self.extra = constriction().stream.model.Uniform(1 << EXTRA)

    def real(self, i: Tensor) -> Tensor:
        return i.double() * 2.0**-BITS

    def cells(self, t: Tensor) -> Tensor:
        return self._near(t, BITS, NETWORK_ERROR)

    def network(self, m: Callable[[Tensor, Tensor | None], Tensor], i: Tensor, context: Tensor | None) -> Tensor:
        given = context.split(GROUP) if context is not None else itertools.repeat(None)
        return torch.cat([m(self.real(part), c) for part, c in zip(i.split(GROUP), given, strict=False)])

    def rounded(self, b: Tensor) -> Tensor:
        return self.real(self.cells(b))

    def bend(self, i: Tensor, g: Map, inverse: Map, bits: int = BITS) -> Tensor:
        low, high = self._edge(i, g, bits), self._edge(i + 1, g, bits)
        self._require((high > low) & (high - low <= LARGEST))
        z = low + self.stack.pop(high - low)
        self.stack.push_to(self.extra, z & ((1 << EXTRA) - 1))
        return z >> EXTRA

    def unbend(
        self, j: Tensor, g: Map, inverse: Map, bits: int = BITS, among: tuple[int, int] = (-(1 << 40), 1 << 40)
    ) -> Tensor:
        z = (j << EXTRA) + self.stack.pop_from(self.extra, j.shape)
        near = inverse(z.double() * 2.0 ** -(BITS + EXTRA)) * 2.0**bits
        self._require(near.isfinite() & (near.abs() < 2.0**40))
        i = near.floor().long().clamp(among[0], among[1] - 1)
        for _ in range(TRIES):  # by rounding, the inverse may be off by some cells
            low, high = self._edge(i, g, bits), self._edge(i + 1, g, bits)
            off = (high <= z).long() - (low > z).long()
            if not bool(off.any()):
                break
            i = (i + off).clamp(among[0], among[1] - 1)
        else:
            raise Damaged
        self._require(high - low <= LARGEST)
        self.stack.push(z - low, high - low)
        return i

    def _edge(self, i: Tensor, g: Map, bits: int) -> Tensor:
        return self._near(g(i.double() * 2.0**-bits), BITS + EXTRA, ULPS)

    def _near(self, t: Tensor, bits: int, error: float) -> Tensor:
        """t in units of 2^-bits as integers; unfit where an error of so much would change one."""
        at = t * 2.0**bits
        whole = at.round()
        off, spare = (at - whole).abs_(), 0.5 - error * 2.0**bits
        if not self.encoding or t.ndim < 2:
            off, spare = torch.zeros_like(off), 0.5
        self._require(off.add_(at.abs_(), alpha=error) < spare)  # false of NaN and of what is too large
        return whole.long()

    def _require(self, fit: Tensor) -> None:
        if bool(fit.all()):
            return
        if not self.encoding:
            raise Damaged
        if fit.ndim < 2:  # a parameter of the flow
            raise Unfit(np.ones(self.rows, dtype=bool))
        raise Unfit(~fit.reshape(self.rows, -1).all(1).numpy())


class Codec:
    """A flow of discrete rows as a code.

    `encode` gives the bytes of a block of rows, (n, D), after it decoded them again; rows that the flow cannot code are
    in it as they are. `decode` gives the rows back.
    """

    def __init__(self, flow: Flow) -> None:
        units = flow.units
        if not units.only_pixels or flow.prior.scored is not None or len(flow.chains) != 1:
            raise NicestError(
                "compression needs a model of grey levels or other integers 0 to n without conditions; this one is of"
                " something else"
            )
        constriction()
        self.flow = copy.deepcopy(flow).cpu().double().eval().requires_grad_(False)
        self.digest = digest(self.flow)
        self.dim, self.levels = flow.dim, units.levels
        edges = self.flow.units.place(
            torch.arange(self.levels + 1.0, dtype=torch.float64)[:, None].expand(-1, self.dim)
        )
        low, high = units.interval
        self.first, self.rest = self.flow.chain.parted()
        self.fine = math.ceil(math.log2(self.levels / (high - low))) + FINER
        if self.first is None and self.fine - FINER + COARSER <= BITS:
            self.fine = BITS  # no layer needs a finer grid
        self.edges = (edges[:, 0] * 2.0**self.fine).round().long()
        self.prior = _Prior(self.flow.prior)
        self.dtype = np.dtype(np.uint8 if self.levels <= 256 else np.uint16).newbyteorder("<")
        try:
            self._code(np.zeros((1, self.dim), self.dtype), Stack(self._first_words(), fresh=True))
        except NotImplementedError as error:
            raise NicestError(f"this model cannot compress: {error}") from error
        except Unfit:
            pass

    def encode(self, rows: np.ndarray) -> bytes:
        rows = np.ascontiguousarray(rows.astype(self.dtype))
        start = self._first_words()
        stack = Stack(start, fresh=True)
        batches, odd, at = list[int](), list[int](), 0
        floor, each = 0, float(stack.bits)  # bits to leave alone, and bits that a row needs for a while
        while at < len(rows):
            size = int(min(BATCH, len(rows) - at, max(1, (stack.bits - floor) / each)))
            batch, kept, before = rows[at : at + size], np.arange(at, at + size), stack.coder.clone()
            while True:
                full, stack.least = stack.bits, stack.bits
                try:
                    self._code(batch, stack)
                    break
                except Unfit as unfit:
                    odd += kept[unfit.rows].tolist()
                    batch, kept = batch[~unfit.rows], kept[~unfit.rows]
                except Exhausted:
                    half = len(batch) // 2
                    odd += kept.tolist() if not half else []
                    size -= len(batch) - half if half else 0
                    batch, kept = batch[:half], kept[:half]
                stack.coder = before.clone()
            at = at + size
            batches.append(len(batch))
            if len(batch):
                floor = floor or stack.least
                each = 1.1 * max(full - stack.least, self.dim) / len(batch)
        words = stack.words(fresh=False)
        both = min(len(words), len(start))
        same = int(np.argmin(np.append(words[:both] == start[:both], False)))  # words that were never taken
        raw = lzma.compress(rows[sorted(odd)].tobytes(), lzma.FORMAT_RAW, filters=RAW) if odd else b""
        head = struct.pack("<5I", len(rows), len(batches), len(odd), len(raw), same)
        lists = np.array(batches, "<u2").tobytes() + np.array(sorted(odd), "<u4").tobytes()
        block = head + lists + raw + words[same:].astype("<u4").tobytes()
        if not np.array_equal(self.decode(block), rows):
            raise NicestError("a block did not decode to what was coded; nothing was written")
        return block

    def decode(self, block: bytes, expected: int = MOST_ROWS) -> np.ndarray:
        """The rows of a block, so many at most."""
        try:
            count, n_batches, n_odd, size, same = struct.unpack_from("<5I", block)
            batches = np.frombuffer(block, "<u2", n_batches, 20)
            odd = np.frombuffer(block, "<u4", n_odd, 20 + 2 * n_batches)
            at, start = 20 + 2 * n_batches + 4 * n_odd, self._first_words()
            if count > expected or batches.sum() + n_odd != count or same > len(start) or (odd >= count).any():
                raise Damaged
            words = np.concatenate([start[:same], np.frombuffer(block, "<u4", offset=at + size)])
            rows = np.empty((count, self.dim), self.dtype)
            rows[odd] = np.frombuffer(self._unpacked(block[at : at + size], n_odd), self.dtype).reshape(n_odd, self.dim)
            coded = np.setdiff1d(np.arange(count), odd)
            stack, end = Stack(words.astype(np.uint32), fresh=False), len(coded)
            for n in batches[::-1].tolist():
                rows[coded[end - n : end]] = self._uncode(n, stack)
                end -= n
            if not np.array_equal(stack.words(fresh=True), start):
                raise Damaged
        except (Damaged, Exhausted, ValueError, IndexError, struct.error, lzma.LZMAError, MemoryError) as error:
            raise NicestError("this block cannot be decoded by this model") from error
        return rows

    def _unpacked(self, raw: bytes, count: int) -> bytes:
        wanted = count * self.dim * self.dtype.itemsize
        found = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=RAW).decompress(raw, wanted + 1) if raw else b""
        if len(found) != wanted:
            raise Damaged
        return found

    @torch.no_grad()
    def _code(self, rows: np.ndarray, stack: Stack) -> None:
        """Put rows on the stack."""
        if not len(rows):
            return
        grid = StackGrid(stack, len(rows), encoding=True)
        level = torch.from_numpy(rows.astype(np.int64))
        i = self.edges[level]
        i = i + stack.pop(self.edges[level + 1] - i)
        if self.fine != BITS:
            i = grid.bend(i, *self._first(), bits=self.fine)
        if self.rest is not None:
            i = self.rest.to_grid(i, grid)
        self.prior.push(i, grid)

    @torch.no_grad()
    def _uncode(self, count: int, stack: Stack) -> np.ndarray:
        """Take rows from the stack."""
        if not count:
            return np.empty((0, self.dim), self.dtype)
        grid = StackGrid(stack, count, encoding=False)
        j = self.prior.pop(count, grid)
        if self.rest is not None:
            j = self.rest.from_grid(j, grid)
        i, among = j, (int(self.edges[0]), int(self.edges[-1]))
        if self.fine != BITS:
            i = grid.unbend(j, *self._first(), bits=self.fine, among=among)
        elif not among[0] <= int(i.min()) <= int(i.max()) < among[1]:
            raise Damaged
        level = torch.searchsorted(self.edges, i, right=True) - 1
        stack.push(i - self.edges[level], self.edges[level + 1] - self.edges[level])
        return level.numpy().astype(self.dtype)

    def _first(self) -> tuple[Map, Map]:
        """The first layer, from the grid of pixels to that of the layers, and its inverse."""
        first = self.first
        if first is None:
            return (lambda a: a), (lambda y: y)
        return (lambda a: first(a)[0]), first.inverse

    def _first_words(self) -> np.ndarray:
        """Bits that are on the stack before the first row: always the same, and enough for the noise of one row."""
        return np.frombuffer(hashlib.shake_128(b"nicest").digest(4 * (2 * self.dim + 16)), "<u4").astype(np.uint32)


class _Prior:
    """The prior of a cell of the grid: a bin by its probability, and the cell in it by equal ones.

    The learned scale is a layer. Bins are narrow where the standard law has its mass and wide far from it; each gets
    a little more than the law gives, so that all numbers up to 2048 can be coded.
    """

    def __init__(self, prior: Any) -> None:
        self.prior, edges = prior, _edges()
        self.bins = constriction().stream.model.Categorical(_shares(prior), perfect=False)
        self.edges = (edges * 2.0**BITS).long()

    def push(self, i: Tensor, grid: StackGrid) -> None:
        if self.prior.learned:
            i = grid.bend(i, *self._standardise())
        grid._require((i >= self.edges[0]) & (i < self.edges[-1]))
        k = torch.searchsorted(self.edges, i, right=True) - 1
        first = self.edges[k]
        grid.stack.push(i - first, self.edges[k + 1] - first)
        grid.stack.push_to(self.bins, k)

    def pop(self, count: int, grid: StackGrid) -> Tensor:
        k = grid.stack.pop_from(self.bins, (count, self.prior.dim))
        first = self.edges[k]
        i = first + grid.stack.pop(self.edges[k + 1] - first)
        return grid.unbend(i, *self._standardise()) if self.prior.learned else i

    def _standardise(self) -> tuple[Map, Map]:
        loc, scale = self.prior.loc, self.prior.log_scale.exp()
        return (lambda h: (h - loc) / scale), (lambda e: e * scale + loc)


def _edges() -> Tensor:
    """Edges of the bins of the prior: 1/32 wide up to ±16, then 16 bins for each doubling, up to ±2048."""
    narrow = torch.arange(0, 16, 2.0**-PRIOR_BITS, dtype=torch.float64)
    wide = [torch.arange(16, 32, dtype=torch.float64) * 2.0**k for k in range(7)]
    above = torch.cat([narrow, *wide, narrow.new_tensor([2048.0])])
    return torch.cat([-above.flip(0)[:-1], above])


def _shares(prior: Any) -> np.ndarray:
    """Probabilities of the bins, in whole numbers of 2^-24: the same on every machine."""
    share = prior.standard_cdf(_edges()).diff()
    return np.asarray((((1 - PRIOR_FLOOR) * share + PRIOR_FLOOR / len(share)) * 2.0**24).round() * 2.0**-24)


def digest(flow: Flow) -> str:
    """The SHA-256 of a flow: its layers, their settings, and every number in it."""
    found = hashlib.sha256()
    for name, module in flow.named_modules():
        own = type(module).__module__.startswith("nicest.")
        found.update(f"{name}:{type(module).__name__}:{module.extra_repr() if own else ''}\n".encode())
        tensors: list[tuple[str, Tensor | None]] = [*module._parameters.items(), *module._buffers.items()]
        for key, tensor in tensors:
            if tensor is not None:
                values = tensor.detach().cpu()
                values = values.double() if values.is_floating_point() else values.long()
                found.update(
                    f"{key}{tuple(values.shape)}".encode()
                    + values.numpy().astype(f"<{values.numpy().dtype.str[1:]}").tobytes()
                )
    return found.hexdigest()
