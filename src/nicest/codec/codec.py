"""Encode and decode blocks of rows with a flow.

The method is local bits-back coding (Ho et al. 2019, "Compression with flows via local bits-back coding") with uniform
instead of Gaussian noise, on a grid as in iFlow (Zhang et al. 2021). The dequantisation noise is popped from a stack of
bits, the layers act on grid points, and the latent is pushed with its probability under the prior. A row costs
-log2 p(x, noise) minus the bits of the noise: the bound that the flow reports.
"""

from __future__ import annotations

import copy
import hashlib
import lzma
import math
import re
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nicest.codec.grid import BITS, Grid, Map, from_grid, split_first, to_grid
from nicest.codec.stack import Corrupt, OutOfBits, Stack, Unencodable, constriction, uniform
from nicest.errors import NicestError
from nicest.flows import Flow, Prior, Units
from nicest.runs.formats import parameter_orders

BIN_BITS, FLOOR = 5, 2.0**-10  # of the quantised prior: narrowest bins of 2^-BIN_BITS, and probability spread over all
NARROWEST = BITS - BIN_BITS  # every bin has a multiple of 2^NARROWEST cells
BATCH = 512  # largest batch
MAX_ROWS = 1 << 16  # in a block
LZMA = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
MAX_RATIO = 1000  # of stored rows: no small file expands to fill the memory
FINER, COARSER = 10, 4  # binary digits of a pixel's grid beyond those of its level, with and without a first layer
HEAD = struct.Struct("<6I")  # rows, batches, stored rows, their bytes, 0, initial words kept


class Codec:
    """Lossless coder of discrete rows.

    Parameters
    ----------
    flow : Flow
        A single flow of pixels, without conditions. It is copied, in float64.
    device : torch.device, optional
        Device to compute on; by default that of a flow on a GPU, else the CPU (others lack float64).

    Raises
    ------
    NicestError
        If the flow is of another kind, or has a layer without an exact form on a grid.
    """

    def __init__(self, flow: Flow, device: torch.device | None = None) -> None:
        if not isinstance(flow, Flow) or flow.embedding is not None or not flow.units.levels:
            raise NicestError(
                "compression needs a single flow of images in grey levels, without conditions; this model is something"
                " else"
            )
        constriction()
        own = next((each.device for each in flow.parameters()), torch.device("cpu"))
        self.device = device or (own if own.type == "cuda" else torch.device("cpu"))
        self.flow = copy.deepcopy(flow).cpu().double().eval().requires_grad_(False)
        self.digest = digest(self.flow)
        self.flow.bijection.to(self.device), self.flow.prior.to(self.device)
        self.first, self.rest = split_first(self.flow.bijection)
        self.dim, self.levels = flow.dim, flow.units.levels
        self.cells = PixelCells(self.flow.units, plain=self.first is None, device=self.device)
        self.dtype, self.prior = self.cells.dtype, PriorBins(self.flow.prior, self.device)
        try:
            self._push(self.cells.example, Stack(self._initial_words(), fresh=True))
        except NotImplementedError as error:
            hint = ": train one with set model.preprocess=none" if "ZCA" in str(error) else ""
            raise NicestError(f"this model cannot compress: {error}{hint}") from error
        except (Unencodable, OutOfBits):
            pass  # other rows may be fine

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the flow alone, for worker processes."""
        return Codec, (copy.deepcopy(self.flow).cpu(), self.device)

    def encode(self, rows: np.ndarray) -> bytes:
        """Encode a block of grey levels (n, D), decode it again, and compare.

        Rows that the flow cannot code are stored with LZMA.
        """
        rows = np.ascontiguousarray(rows.astype(self.dtype))
        block = self._encode(rows)
        if len(block) >= rows.nbytes:  # few rows, or rows unlike the training data
            block = min(block, self._store(rows), key=len)
        if not self._decodes(block, rows):
            block = self._store(rows)
            if not self._decodes(block, rows):
                raise NicestError("a block did not decode to what was coded; nothing was written")
        return block

    def _decodes(self, block: bytes, rows: np.ndarray) -> bool:
        try:
            return np.array_equal(self.decode(block), rows)
        except NicestError:
            return False

    def _store(self, rows: np.ndarray) -> bytes:
        """Return a block in which all rows are stored."""
        return self._pack(rows, [], range(len(rows)), Stack(self._initial_words(), fresh=True))

    def _encode(self, rows: np.ndarray) -> bytes:
        """Encode rows in batches that grow with the number of bits on the stack, which pay for their noise."""
        stack = Stack(self._initial_words(), fresh=True)
        batches, stored, at = list[int](), list[int](), 0
        floor, per_row = 0, float(stack.bits)  # bits to leave on the stack, and bits that a row takes for a while
        while at < len(rows):
            size = int(min(BATCH, len(rows) - at, max(1, (stack.bits - floor) / per_row)))
            index, before = np.arange(at, at + size), stack.coder.clone()
            while True:
                full = stack.least = stack.bits
                try:
                    self._push(rows[index], stack)
                    break
                except Unencodable as error:
                    stored += index[error.rows].tolist()
                    index = index[~error.rows]
                except OutOfBits:
                    half = len(index) // 2
                    if half:
                        size -= len(index) - half
                    else:
                        stored += index.tolist()
                    index = index[:half]
                stack.coder = before.clone()
            at += size
            batches.append(len(index))
            if len(index):
                floor = floor or stack.least
                per_row = 1.1 * max(full - stack.least, self.dim) / len(index)
        return self._pack(rows, batches, stored, stack)

    def _pack(self, rows: np.ndarray, batches: Sequence[int], stored: Sequence[int], stack: Stack) -> bytes:
        """Return a block: the stack, the sizes of its batches, and the stored rows."""
        words, initial = stack.words(fresh=False), self._initial_words()
        n = min(len(words), len(initial))
        same = int(np.argmin(np.append(words[:n] == initial[:n], False)))  # initial words that were never popped
        raw = compress_lzma(rows[sorted(stored)].tobytes()) if stored else b""
        head = HEAD.pack(len(rows), len(batches), len(stored), len(raw), 0, same)
        lists = np.array(batches, "<u2").tobytes() + np.array(sorted(stored), "<u4").tobytes()
        return head + lists + raw + words[same:].astype("<u4").tobytes()

    def decode(self, block: bytes, expected: int = MAX_ROWS) -> np.ndarray:
        """Decode a block of at most `expected` rows.

        Raises
        ------
        NicestError
            If the block is damaged or comes from another model.
        """
        try:
            count, n_batches, n_stored, size, _, same = HEAD.unpack_from(block)
            batches = np.frombuffer(block, "<u2", n_batches, HEAD.size)
            stored = np.frombuffer(block, "<u4", n_stored, HEAD.size + 2 * n_batches)
            at, initial = HEAD.size + 2 * n_batches + 4 * n_stored, self._initial_words()
            if count > expected or batches.sum() + n_stored != count or same > len(initial) or (stored >= count).any():
                raise Corrupt
            words = np.concatenate([initial[:same], np.frombuffer(block, "<u4", offset=at + size)])
            rows = np.empty((count, self.dim), self.dtype)
            raw = decompress_lzma(block[at : at + size], n_stored * self.dim * self.dtype.itemsize)
            rows[stored] = np.frombuffer(raw, self.dtype).reshape(n_stored, self.dim)
            coded = np.setdiff1d(np.arange(count), stored)
            stack, end = Stack(words.astype(np.uint32), fresh=False), len(coded)
            for n in batches[::-1].tolist():
                index, end = coded[end - n : end], end - n
                rows[index] = self._pop(n, stack)
            if not np.array_equal(stack.words(fresh=True), initial):
                raise Corrupt
        except (Corrupt, OutOfBits, ValueError, IndexError, struct.error, lzma.LZMAError, MemoryError) as error:
            raise NicestError("this block cannot be decoded by this model") from error
        return rows

    @torch.no_grad()
    def _push(self, rows: np.ndarray, stack: Stack) -> None:
        """Push a batch of rows."""
        if not len(rows):
            return
        grid = Grid(stack, len(rows), encoding=True)
        i = self.cells.to_grid(rows, grid).to(self.device)
        # with 3 or 4 levels and a first layer, bits == BITS: format 1 leaves the layer out (lossless, but longer)
        if self.cells.bits != BITS:
            i = grid.bend(i, self._first()[0], bits=self.cells.bits)
        self.prior.push(to_grid(self.rest, i, grid), grid)

    @torch.no_grad()
    def _pop(self, count: int, stack: Stack) -> np.ndarray:
        """Pop a batch of rows."""
        if not count:
            return np.empty((0, self.dim), self.dtype)
        grid = Grid(stack, count, encoding=False)
        j = from_grid(self.rest, self.prior.pop(count, grid), grid)
        if self.cells.bits != BITS:
            j = grid.unbend(j, *self._first(), bits=self.cells.bits, limits=self.cells.limits)
        return self.cells.from_grid(j, grid)

    def _first(self) -> tuple[Map, Map]:
        """Return the first layer, or the identity, and its inverse: from the grid of the data to that of the layers."""
        first = self.first
        if first is None:
            return (lambda a: a), (lambda y: y)
        return (lambda a: first(a)[0]), (lambda y: first.inverse(y)[0])

    def _initial_words(self) -> np.ndarray:
        """Return the constant bits on the stack before the first row: enough for the noise of one row."""
        return np.frombuffer(hashlib.shake_128(b"nicest").digest(4 * (4 * self.dim + 16)), "<u4").astype(np.uint32)


class PixelCells:
    """Grey levels as points k 2^-bits on a device.

    A level owns an interval of the real line. Encoding draws a point in it with bits from the stack, and decoding
    returns those bits.

    If `plain`, the flow has no elementwise first layer, so that pixels may lie on the grid of the layers.
    """

    def __init__(self, units: Units, *, plain: bool, device: torch.device) -> None:
        low, high = units.interval
        self.dim, levels = units.dim, units.levels
        level_bits = math.ceil(math.log2(levels / (high - low)))
        self.bits = BITS if plain and level_bits + COARSER <= BITS else level_bits + FINER
        edges = units.place(torch.arange(levels + 1.0, dtype=torch.float64)[:, None].expand(-1, self.dim))[:, 0]
        self.edges = (edges * 2.0**self.bits).round().long().to(device)
        self.limits = int(self.edges[0]), int(self.edges[-1])
        width, *others = set(self.edges.diff().tolist())
        # equal widths of 2^shift, which need no lookup
        self.shift = width.bit_length() - 1 if not others and 1 < width < 1 << 13 and not width & (width - 1) else 0
        self.dtype = np.dtype(np.uint8 if levels <= 256 else np.uint16).newbyteorder("<")
        self.example = np.zeros((1, self.dim), self.dtype)

    def to_grid(self, rows: np.ndarray, grid: Grid) -> Tensor:
        """Draw a point in the interval of each level; rows are (B, D)."""
        level = torch.from_numpy(rows if rows.itemsize == 1 else rows.astype(np.int32)).to(self.edges.device).long()
        if self.shift:
            noise = grid.stack.pop_from(uniform(self.shift), rows.shape).to(level.device)
            return (level << self.shift).add_(self.limits[0]).add_(noise)
        i = self.edges[level]
        return i + grid.stack.pop(self.edges[level + 1] - i)

    def from_grid(self, i: Tensor, grid: Grid) -> np.ndarray:
        """Return the levels of points, and the bits they were drawn with to the stack."""
        grid.require_between(i, *self.limits)
        if self.shift:
            i = i - self.limits[0]
            level = i >> self.shift
            grid.stack.push_to(uniform(self.shift), i.bitwise_and_((1 << self.shift) - 1))
        else:
            level = torch.searchsorted(self.edges, i, right=True) - 1
            first = self.edges[level]
            grid.stack.push(i - first, self.edges[level + 1] - first)
        return level.to(torch.uint8 if self.dtype.itemsize == 1 else torch.int32).cpu().numpy().astype(self.dtype)


class PriorBins:
    """The prior over grid cells: a bin by its probability, then a cell in it with equal probabilities.

    Bins are narrow in the bulk of the standard distribution and wide in its tails. Each gets a little more than its
    probability, so that all numbers up to 2048 can be coded. A learned location and scale act as a layer.
    """

    def __init__(self, prior: Prior, device: torch.device) -> None:
        self.prior, edges = prior, bin_edges()
        self.bins = constriction().stream.model.Categorical(bin_probabilities(prior), perfect=False)
        self.edges = (edges * 2.0**BITS).long().to(device)
        self.sizes, self.limits = self.edges.diff(), (int(self.edges[0]), int(self.edges[-1]))
        widths = self.sizes >> NARROWEST
        self.bin_of = torch.arange(len(widths), device=device).repeat_interleave(widths)  # one entry per narrowest bin

    def push(self, i: Tensor, grid: Grid) -> None:
        """Push latent points (B, D)."""
        if self.prior.learned:
            i = grid.map(i, *self._standardise())
        grid.require_between(i, *self.limits)
        k = self.bin_of[(i - self.limits[0]) >> NARROWEST]
        grid.stack.push(i - self.edges[k], self.sizes[k])
        grid.stack.push_to(self.bins, k)

    def pop(self, count: int, grid: Grid) -> Tensor:
        """Pop latent points (count, D)."""
        k = grid.stack.pop_from(self.bins, (count, self.prior.dim)).to(self.edges.device).long()
        i = self.edges[k].add_(grid.stack.pop(self.sizes[k]))
        return grid.map(i, *self._standardise()) if self.prior.learned else i

    def _standardise(self) -> tuple[Map, Map]:
        loc, scale = self.prior.loc, self.prior.log_scale.exp()
        return (lambda h: (h - loc) / scale), (lambda e: e * scale + loc)


def bin_edges() -> Tensor:
    """Return the edges of the prior's bins: 1/32 wide up to ±16, then 16 bins for each doubling, up to ±2048."""
    narrow = torch.arange(0, 16, 2.0**-BIN_BITS, dtype=torch.float64)
    wide = [torch.arange(16, 32, dtype=torch.float64) * 2.0**k for k in range(7)]
    above = torch.cat([narrow, *wide, narrow.new_tensor([2048.0])])
    return torch.cat([-above.flip(0)[:-1], above])


def bin_probabilities(prior: Any) -> np.ndarray:
    """Return the probabilities of the bins, rounded to multiples of 2^-24: the same on every machine."""
    p = prior.standard_cdf(bin_edges()).diff()
    return np.asarray((((1 - FLOOR) * p + FLOOR / len(p)) * 2.0**24).round() * 2.0**-24)


def compress_lzma(data: bytes) -> bytes:
    """Compress with LZMA; return the data unchanged if that is not shorter, or shorter by more than `MAX_RATIO`."""
    packed = lzma.compress(data, lzma.FORMAT_RAW, filters=LZMA)
    return packed if len(packed) < len(data) <= MAX_RATIO * len(packed) else data


def decompress_lzma(packed: bytes, size: int) -> bytes:
    """Invert `compress_lzma` for data of a known size; raise `Corrupt` if it has another."""
    if len(packed) == size:
        return packed
    if size > MAX_RATIO * len(packed):
        raise Corrupt
    data = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=LZMA).decompress(packed, size + 1)
    if len(data) != size:
        raise Corrupt
    return data


def digest(flow: Flow) -> str:
    """Return the SHA-256 of a flow: the class names and settings of its modules, and every number in them.

    Names and the order of numbers are those of file format 2, so that older compressed files stay readable.
    """
    found, orders = hashlib.sha256(), dict(parameter_orders(flow))
    for full_name, module in flow.named_modules():
        name = re.sub(r"^bijection\b", "chain", full_name)
        settings = module.extra_repr() if type(module).__module__.startswith("nicest.") else ""
        found.update(f"{name}:{type(module).__name__}:{settings}\n".encode())
        tensors: list[tuple[str, Tensor | None]] = [*module._parameters.items(), *module._buffers.items()]
        for key, tensor in tensors:
            if tensor is not None:
                values = tensor.detach().cpu()
                if (order := orders.get(f"{full_name}.{key}")) is not None:
                    values = values[order.argsort()]
                numbers = (values.double() if values.is_floating_point() else values.long()).numpy()
                found.update(f"{key}{numbers.shape}".encode() + numbers.astype(f"<{numbers.dtype.str[1:]}").tobytes())
    return found.hexdigest()
