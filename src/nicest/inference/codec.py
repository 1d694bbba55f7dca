"""Lossless coding of discrete rows by a flow: the flow acts on a grid, and what it rounds away goes to a stack of bits.

The method is local bits-back coding (Ho et al. 2019, "Compression with flows via local bits-back coding") with uniform
instead of Gaussian noise, on a grid as in iFlow (Zhang et al. 2021). Dequantisation noise is taken from the stack, the
layers act on points of the grid, and the latent point is put back by the prior. A row costs -log2 P(x, noise) less
the bits of the noise: the bound that the flow reports.
"""

from __future__ import annotations

import copy
import hashlib
import lzma
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nicest.errors import NicestError
from nicest.flows import Flow
from nicest.inference.coded_cells import MISSING, Cells, Grain, Levels, Table
from nicest.inference.stack import BITS, Damaged, Exhausted, Stack, StackGrid, Unfit, constriction

PRIOR_BITS, PRIOR_FLOOR = 5, 2.0**-10  # of the quantised prior: see `_Prior`
NARROW = BITS - PRIOR_BITS  # the narrowest bins have 2^NARROW cells, the others a multiple of that
BATCH = 512  # rows that are coded at once, at most
MOST_ROWS = 1 << 16  # of a block
RAW = [{"id": lzma.FILTER_LZMA2, "preset": 6}]  # how rows are stored that the flow cannot code
DENSEST = 1000  # times its size that what is stored unpacks to, at most: no small file fills the memory
HEAD = struct.Struct("<6I")  # rows, batches, rows stored as they are, their bytes, bytes of the mask, words not taken


class Codec:
    """A flow of discrete rows as a code.

    `encode` gives the bytes of a block of rows, (n, D), after it decoded them again; rows that the flow cannot code are
    in it as they are. `decode` gives the rows back.
    """

    def __init__(self, flow: Flow, grains: Sequence[Grain] = (), device: torch.device | None = None) -> None:
        """`grains` are of the columns of a table; the device is by default that of the flow."""
        units, self.grains = flow.units, tuple(grains)
        if not (grains or units.only_pixels) or flow.prior.scored is not None or len(flow.chains) != 1:
            raise NicestError(
                "compression needs a single flow of images in grey levels, or of a table, without conditions; this"
                " model is something else"
            )
        constriction()
        self.flow = copy.deepcopy(flow).cpu().double().eval().requires_grad_(False)
        self.digest = digest(self.flow)
        self.device = device or device_of(flow)
        self.flow.chain.to(self.device), self.flow.prior.to(self.device)
        self.dim, self.levels = flow.dim, units.levels
        self.first, self.rest = self.flow.chain.parted()
        units = self.flow.units
        levels = Levels(units, plain=self.first is None, bits=BITS, device=self.device) if not grains else None
        self.cells: Cells = levels or Table(units, grains)
        self.dtype, self.prior = self.cells.dtype, _Prior(self.flow.prior, self.device)
        try:
            self._code(self.cells.example(), Stack(self._first_words(), fresh=True))
        except NotImplementedError as error:
            hint = ": train one with set model.preprocess=none" if "ZCA" in str(error) else ""
            raise NicestError(f"this model cannot compress: {error}{hint}") from error
        except (Unfit, Exhausted):
            pass

    def __reduce__(self) -> tuple[Any, ...]:
        """How another process makes it: from the numbers of the flow, and on the same device."""
        return Codec, (copy.deepcopy(self.flow).cpu(), self.grains, self.device)

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
        block = self._block(rows, batches, odd, stack)
        if len(block) >= rows.nbytes:  # few rows, or rows that the model is not of
            block = min(block, self._block(rows, [], range(len(rows)), Stack(start, fresh=True)), key=len)
        if not self._decodes(block, rows):
            block = self._block(rows, [], range(len(rows)), Stack(start, fresh=True))
            if not self._decodes(block, rows):
                raise NicestError("a block did not decode to what was coded; nothing was written")
        return block

    def _decodes(self, block: bytes, rows: np.ndarray) -> bool:
        try:
            return np.array_equal(self.decode(block), rows)
        except NicestError:
            return False

    def _block(self, rows: np.ndarray, batches: Sequence[int], odd: Sequence[int], stack: Stack) -> bytes:
        """The bytes of rows on a stack, in batches, beside those that are stored as they are."""
        words, start = stack.words(fresh=False), self._first_words()
        both = min(len(words), len(start))
        same = int(np.argmin(np.append(words[:both] == start[:both], False)))  # words that were never taken
        raw = stored(rows[sorted(odd)].tobytes()) if odd else b""
        missing = rows == MISSING if self.dtype.kind == "i" else np.zeros(0, dtype=bool)
        mask = stored(np.packbits(missing.T).tobytes()) if missing.any() else b""
        head = HEAD.pack(len(rows), len(batches), len(odd), len(raw), len(mask), same)
        lists = np.array(batches, "<u2").tobytes() + np.array(sorted(odd), "<u4").tobytes()
        return head + lists + raw + mask + words[same:].astype("<u4").tobytes()

    def decode(self, block: bytes, expected: int = MOST_ROWS) -> np.ndarray:
        """The rows of a block, so many at most."""
        try:
            count, n_batches, n_odd, size, mask, same = HEAD.unpack_from(block)
            batches = np.frombuffer(block, "<u2", n_batches, HEAD.size)
            odd = np.frombuffer(block, "<u4", n_odd, HEAD.size + 2 * n_batches)
            at, start = HEAD.size + 2 * n_batches + 4 * n_odd, self._first_words()
            if count > expected or batches.sum() + n_odd != count or same > len(start) or (odd >= count).any():
                raise Damaged
            words = np.concatenate([start[:same], np.frombuffer(block, "<u4", offset=at + size + mask)])
            rows = np.empty((count, self.dim), self.dtype)
            raw = unstored(block[at : at + size], n_odd * self.dim * self.dtype.itemsize)
            rows[odd] = np.frombuffer(raw, self.dtype).reshape(n_odd, self.dim)
            missing = np.zeros((count, self.dim), dtype=bool)
            if mask:
                bits = np.frombuffer(unstored(block[at + size : at + size + mask], -(-missing.size // 8)), np.uint8)
                missing = np.unpackbits(bits, count=missing.size).view(bool).reshape(self.dim, count).T
            coded = np.setdiff1d(np.arange(count), odd)
            stack, end = Stack(words.astype(np.uint32), fresh=False), len(coded)
            for n in batches[::-1].tolist():
                some = coded[end - n : end]
                rows[some] = self._uncode(n, stack, missing[some])
                end -= n
            if not np.array_equal(stack.words(fresh=True), start):
                raise Damaged
        except (Damaged, Exhausted, ValueError, IndexError, struct.error, lzma.LZMAError, MemoryError) as error:
            raise NicestError("this block cannot be decoded by this model") from error
        return rows

    @torch.no_grad()
    def _code(self, rows: np.ndarray, stack: Stack) -> None:
        """Put rows on the stack."""
        if not len(rows):
            return
        grid = StackGrid(stack, len(rows), encoding=True)
        i = self.cells.to_grid(rows, grid).to(self.device)
        if self.cells.fine != BITS:
            i = grid.bend(i, *self._first(), bits=self.cells.fine)
        if self.rest is not None:
            i = self.rest.to_grid(i, grid)
        self.prior.push(i, grid)

    @torch.no_grad()
    def _uncode(self, count: int, stack: Stack, missing: np.ndarray) -> np.ndarray:
        """Take rows from the stack."""
        if not count:
            return np.empty((0, self.dim), self.dtype)
        grid = StackGrid(stack, count, encoding=False)
        j = self.prior.pop(count, grid)
        if self.rest is not None:
            j = self.rest.from_grid(j, grid)
        if self.cells.fine != BITS:
            j = grid.unbend(j, *self._first(), bits=self.cells.fine, among=self.cells.among)
        return self.cells.from_grid(j, grid, missing)

    def _first(self) -> tuple[Map, Map]:
        """The first layer, from the grid of pixels to that of the layers, and its inverse."""
        first = self.first
        if first is None:
            return (lambda a: a), (lambda y: y)
        return (lambda a: first(a)[0]), first.inverse

    def _first_words(self) -> np.ndarray:
        """Bits that are on the stack before the first row: always the same, and enough for the noise of one row."""
        return np.frombuffer(hashlib.shake_128(b"nicest").digest(4 * (4 * self.dim + 16)), "<u4").astype(np.uint32)


class _Prior:
    """The prior of a cell of the grid: a bin by its probability, and the cell in it by equal ones.

    The learned scale is a layer. Bins are narrow where the standard law has its mass and wide far from it; each gets
    a little more than the law gives, so that all numbers up to 2048 can be coded.
    """

    def __init__(self, prior: Any, device: torch.device) -> None:
        self.prior, edges = prior, _edges()
        self.bins = constriction().stream.model.Categorical(_shares(prior), perfect=False)
        self.edges = (edges * 2.0**BITS).long().to(device)
        self.sizes, self.ends = self.edges.diff(), (int(self.edges[0]), int(self.edges[-1]))
        widths = self.sizes >> NARROW  # of bins, in narrowest ones
        self.bin_of = torch.arange(len(widths), device=device).repeat_interleave(widths)  # of each narrowest bin

    def push(self, i: Tensor, grid: StackGrid) -> None:
        if self.prior.learned:
            i = grid.bend(i, *self._standardise())
        grid.require_below(i, self.ends[1], least=self.ends[0])
        k = self.bin_of[(i - self.ends[0]) >> NARROW]
        grid.stack.push(i - self.edges[k], self.sizes[k])
        grid.stack.push_to(self.bins, k)

    def pop(self, count: int, grid: StackGrid) -> Tensor:
        k = grid.stack.pop_from(self.bins, (count, self.prior.dim)).to(self.edges.device).long()
        i = self.edges[k].add_(grid.stack.pop(self.sizes[k]))
        return grid.unbend(i, *self._standardise()) if self.prior.learned else i

    def _standardise(self) -> tuple[Map, Map]:
        loc, scale = self.prior.loc, self.prior.log_scale.exp()
        return (lambda h: (h - loc) / scale), (lambda e: e * scale + loc)


def device_of(flow: Flow) -> torch.device:
    """Where a flow is coded: on its own GPU, else on the CPU, which other accelerators lack float64 for."""
    found = next((each.device for each in flow.parameters()), torch.device("cpu"))
    return found if found.type == "cuda" else torch.device("cpu")


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


def stored(data: bytes) -> bytes:
    """Bytes as LZMA; as they are, if that is no shorter or far shorter."""
    packed = lzma.compress(data, lzma.FORMAT_RAW, filters=RAW)
    return packed if len(packed) < len(data) <= DENSEST * len(packed) else data


def unstored(packed: bytes, wanted: int) -> bytes:
    """What `stored` was given: so many bytes."""
    if len(packed) == wanted:
        return packed
    if wanted > DENSEST * len(packed):
        raise Damaged
    found = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=RAW).decompress(packed, wanted + 1)
    if len(found) != wanted:
        raise Damaged
    return found


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
