"""Columns of a table that mix probability and density: categories, and spikes in the midst of other numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.nn import functional

from nicest.flows.bijection import Bijection
from nicest.flows.linear import mean_and_variance
from nicest.flows.marginals import Bounded
from nicest.flows.noise import batch_size, select
from nicest.flows.units import Bounds, InSteps, Units, check_rows

FIT_ROWS = 50_000  # rows that the widths of atoms are fitted to
SMOOTHING = 0.5  # rows added to every category
FEW_ATOMS = 50  # values of a category by which those of another are compared


class MixedUnits(Units):
    """Units in which some values, atoms, have a probability of their own, beside the density of the rest.

    Every atom gets an interval of the real line, from which it is drawn uniformly, as a whole step is by `Units`; the
    rest of its column moves apart to make room. A category consists of atoms alone, in [0, 1], each as wide as it is
    frequent; those of an `unordered` one lie beside others whose rows are like theirs. Every real number belongs to a
    value, so that draws hold no others.

    `local(y)` is what a row's atoms add to its log-likelihood, the log of the width of their intervals: log p(x) is of
    the measure that counts atoms and measures the rest. As for whole steps it is a bound, from below.

    `bounds` are of each column, infinite where it has none. What lies between two of them is standardised onto [0, 1],
    and what lies above a lower one onto [0, ∞), with mean 1; the layer `Bounded` goes on from there.
    """

    at: Tensor  # (D, A), sorted; inf where a column has fewer
    start: Tensor  # (D, A): where the interval of each atom begins and ends, beside the rest of its column
    end: Tensor
    line: Tensor  # (D,): 0 for categories, which lie on no line, 1 for the rest
    low: Tensor
    high: Tensor

    def __init__(
        self,
        step: Sequence[float],
        atoms: Sequence[Sequence[float]],
        *,
        categories: Sequence[bool] = (),
        unordered: Sequence[bool] = (),
        bounds: Sequence[tuple[float, float]] = (),
        room: int = 1,
    ) -> None:
        super().__init__(step, standardise=True)
        self.discrete, self.unordered = True, tuple(unordered) or (False,) * self.dim
        dim, room = self.dim, max(room, *map(len, atoms), 1)
        at = torch.full((dim, room), math.inf)
        for d, each in enumerate(atoms):
            at[d, : len(each)] = torch.tensor(sorted(each))
        if any(math.isinf(low) and math.isfinite(high) for low, high in bounds):
            raise ValueError("expected a lower bound beside every upper bound")
        line = 1 - torch.tensor([float(each) for each in categories] or [0.0] * dim)
        pairs = torch.tensor([tuple(pair) for pair in bounds] or [(-math.inf, math.inf)] * dim)
        pairs[line == 0] = torch.tensor([0.0, 0.0])
        self.bounded = pairs.isfinite().sum(1)
        even = torch.arange(room + 1) / room
        start, end = (torch.where((line[:, None] > 0) | at.isinf(), at, each) for each in (even[:-1], even[1:]))
        named = {"at": at, "start": start, "end": end, "line": line, "low": pairs[:, 0], "high": pairs[:, 1]}
        for name, values in named.items():
            self.register_buffer(name, values.clone().to(torch.get_default_dtype()))

    def enter(self, x: Tensor, *, noise: bool | Tensor = True, generator: torch.Generator | None = None) -> Tensor:
        check_rows(x, self.dim)
        stored, x = x, x.to(self.scale.dtype)
        if noise is True:
            shape = (batch_size(len(x)), self.dim)
            noise = select(torch.rand(shape, dtype=x.dtype, device=x.device, generator=generator))
        i, hit, below = self._found(x)
        count = (x.detach() / self._unit).round() * self._unit + below
        # between which ends a cell lies: of its atom, of its step, or of the atoms beside it
        first, last = self._pick(self.end, i - 1, -math.inf), self._pick(self.start, i, math.inf)
        first, last = torch.where(self.step > 0, count, first), torch.where(self.step > 0, count + self.step, last)
        start, end = self._pick(self.start, i, 0.0), self._pick(self.end, i, 0.0)
        first, last = torch.where(hit, start, first), torch.where(hit, end, last)
        u = 0.5 if noise is False else noise
        drawn = hit | (self.step > 0)
        inside = torch.where(drawn, first, 0.0) + torch.where(drawn, last - first, 0.0) * u
        y = torch.where(drawn, self._standard(inside), self._standard(stored) + below / self.scale)
        # rounding may take y across an edge, which is where `leave` looks for it
        last = self._standard(last)
        return torch.maximum(
            torch.minimum(y, torch.nextafter(last, torch.full_like(last, -math.inf))), self._standard(first)
        )

    def place(self, x: Tensor) -> Tensor:
        """Map real numbers in the units of the data to y; an atom or a step to its left end."""
        x = x.to(self.scale.dtype)
        return self._standard(self.line * x + self._found(x)[2])

    def leave(self, y: Tensor) -> Tensor:
        check_rows(y, self.dim)
        starts, ends = self._edges()
        hits = (y[..., None] >= starts) & (y[..., None] < ends)
        passed = (y[..., None] >= ends) & (self.line[:, None] > 0)
        below = torch.where(passed, self._room, 0.0).sum(-1)
        x = y * self.scale + self.loc - below
        count = (x / self._unit).floor()
        edge = count * self._unit + below
        count = count + (self._standard(edge + self._unit) <= y).to(y) - (self._standard(edge) > y).to(y)
        x = torch.where(self.step > 0, count * self._unit, x)
        x = torch.where(self.line > 0, x.clamp(self.low, self.high), x)
        return torch.where(hits.any(-1), torch.where(hits, self.at, 0.0).sum(-1), x)

    def local(self, y: Tensor) -> Tensor:
        starts, ends = self._edges()
        hits = (y[..., None] >= starts) & (y[..., None] < ends)
        logs = torch.where(hits, (self._width / self._unit[:, None]).log(), 0.0).sum(-1)
        return logs.sum(-1)

    @property
    def support(self) -> constraints.Constraint:
        return Mixed(self.step, self.at, self.line, self.low, self.high)

    def box(self, bounds: Bounds | None = None) -> tuple[Tensor, Tensor]:
        low, high = bounds or (-math.inf, math.inf)
        lower, upper = (torch.as_tensor(end).to(self.scale).expand(1, self.dim) for end in (low, high))
        lower, upper = self.place(lower), self.place(upper)
        lower = torch.where(self.low.isfinite(), lower.nan_to_num(0.0).clamp_min(0), lower)
        upper = torch.where(self.high.isfinite(), upper.nan_to_num(1.0).clamp_max(1), upper)
        upper = torch.where(self.line > 0, upper, 1.0)
        if not bool((lower < upper).all()):
            raise ValueError("expected every lower bound below its upper bound; one is not, or is not a number")
        return lower, upper

    def values_of(self, column: int) -> Tensor | None:
        return None if bool(self.line[column]) else self.at[column][self.at[column].isfinite()]

    def moments(self, rows: Tensor) -> None:
        """Return None: atoms have no closed form."""

    def _found(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the index of the first atom not below each cell, whether it is the cell, and the width before it."""
        cells, at = x.detach().float().mT.contiguous(), self.at.float()  # as data is stored: there an atom is one value
        i = torch.searchsorted(at, cells).mT
        hit = self._pick(at, i, math.inf) == cells.mT
        return i, hit & cells.mT.isfinite(), self._pick(self._room.cumsum(1), i - 1, 0.0)

    def _pick(self, table: Tensor, i: Tensor, beyond: float) -> Tensor:
        """Return the i-th entry of each column's row of a table; `beyond` outside its range."""
        return functional.pad(table, (1, 1), value=beyond).gather(1, (i + 1).mT).mT

    def _standard(self, position: Tensor) -> Tensor:
        return ((position - self.loc) / self.scale).to(self.scale.dtype)

    @property
    def n_drawn(self) -> int:
        return int(((self.step > 0) | self.at[:, 0].isfinite()).sum())

    def first_layers(self) -> dict[str, Bijection]:
        return {"bounds": Bounded(self.bounded)}

    @property
    def _width(self) -> Tensor:
        return torch.where(self.at.isfinite(), self.end - self.start, 0.0)

    @property
    def _room(self) -> Tensor:
        """By how much an atom moves what lies above it: its width, less that of the step which it is anyway."""
        return torch.where((self.line[:, None] > 0) & self.at.isfinite(), self._width - self.step[:, None], 0.0)

    def _edges(self) -> tuple[Tensor, Tensor]:
        """Return where the intervals of atoms begin and end, in y; the outer ones of a category are infinite."""
        outer = self.line[:, None] == 0
        start = torch.where(outer & (self.start <= 0), -math.inf, self._standard(self.start.mT).mT)
        end = torch.where(outer & (self.end >= 1), math.inf, self._standard(self.end.mT).mT)
        return start, end

    @torch.no_grad()
    def rescale(self, unit: Tensor) -> None:
        super().rescale(unit)
        for each in (self.at, self.start, self.end):
            each.mul_(unit.to(each)[:, None])
        for each in (self.low, self.high):
            each.mul_(unit.to(each))

    @torch.no_grad()
    def fit_rows(self, rows: Tensor) -> None:
        """Make room for the atoms by how often they come, then standardise."""
        some = rows[:: -(-len(rows) // FIT_ROWS)].double()
        for d in range(self.dim):
            count = (some[:, d, None].float() == self.at[d].float()).double().sum(0)
            if not bool(self.line[d]):
                self._fit_category(d, count, self._alike(d, some))
            elif bool(self.at[d].isfinite().any()):
                self._fit_spikes(d, some[:, d], count)
        self.loc.zero_()
        self.scale.fill_(1.0)
        generator = torch.Generator(rows.device).manual_seed(0)
        mean, variance = mean_and_variance(self.enter(rows, generator=generator))
        plain = self.at[:, 0].isinf() & self.low.isinf()
        if bool(plain.any()):  # without a draw of the noise
            exact = mean_and_variance(rows)
            mean = torch.where(plain, exact[0] + self.step / 2, mean)
            variance = torch.where(plain, exact[1] + self.step.double() ** 2 / 12, variance)
        ends = torch.where(self.line > 0, self.high + self.step + self._room.sum(1), 1.0)
        reach = torch.where(self.high.isfinite(), ends - self.low, mean - self.low)
        self.loc.copy_(torch.where(self.low.isfinite(), self.low, mean))
        spread = torch.where(variance > 0, variance.sqrt(), 1.0)  # a column that is given may be constant
        self.scale.copy_(torch.where(self.low.isfinite(), reach, spread))

    def _fit_category(self, d: int, count: Tensor, order: Tensor) -> None:
        count = count[order] + SMOOTHING
        edges = functional.pad((count / count.sum()).cumsum(0), (1, 0))
        edges[-1] = 1.0
        self.start[d, order], self.end[d, order] = edges[:-1].to(self.start), edges[1:].to(self.end)

    def _alike(self, d: int, rows: Tensor) -> Tensor:
        """Order the atoms of a category so that neighbours have similar rows in the other columns.

        The order is that of the first coordinate of a correspondence analysis.
        """
        known, others = int(self.at[d].isfinite().sum()), []
        for c in range(self.dim):
            if c == d:
                continue
            atoms = self.at[c][self.at[c].isfinite()]
            if self.line[c]:
                others.append(rows[:, c, None])
            elif len(atoms) <= FEW_ATOMS:
                others.append((rows[:, c, None].float() == atoms.float()).to(rows))
        if not self.unordered[d] or known < 3 or not others:
            return torch.arange(known, device=rows.device)
        features = torch.cat(others, 1)
        mean, variance = mean_and_variance(features)
        features = ((features - mean) / variance.clamp_min(1e-30).sqrt()).nan_to_num(0.0).clamp(-5, 5)
        values = (rows[:, d, None].float() == self.at[d, :known].float()).to(rows)
        root = (values.sum(0) + SMOOTHING).sqrt()
        vectors = torch.linalg.svd(values.mT @ features / root[:, None], full_matrices=False)[0]
        return (vectors[:, 0] / root).argsort()

    def _fit_spikes(self, d: int, cells: Tensor, count: Tensor) -> None:
        """Make the interval of a spike as wide as the rest of the column would be with as many rows."""
        known = int(self.at[d].isfinite().sum())
        rest = cells[~torch.isin(cells.float(), self.at[d].float())]
        tenths = torch.quantile(rest, torch.tensor([0.1, 0.9]).to(rest)) if len(rest) > 1 else torch.ones(2).to(cells)
        reach = float((tenths[1] - tenths[0]).clamp_min(self._unit[d].double() if self.step[d] else 1e-30)) / 0.8
        width = reach * count[:known].clamp_min(1) / max(1, len(rest)) + self.step[d]
        before = functional.pad((width - self.step[d]).cumsum(0), (1, 0))
        self.start[d, :known] = (self.at[d, :known] + before[:-1]).to(self.start)
        self.end[d, :known] = self.start[d, :known] + width.to(self.end)


class Mixed(InSteps):
    """Rows of steps and bounded numbers, and of categories, which are some of their atoms."""

    def __init__(self, step: Tensor, at: Tensor, line: Tensor, low: Tensor, high: Tensor) -> None:
        super().__init__(step)
        self.at, self.line, self.low, self.high = at, line, low, high

    @property
    def is_discrete(self) -> bool:  # type: ignore[override]
        return bool(((self.step > 0) | (self.line == 0)).all())

    def each(self, value: Tensor) -> Tensor:
        atom = (value[..., None].float() == self.at.float()).any(-1)
        inside = (value >= self.low) & (value <= self.high)
        number = self.line > 0  # no torch.where of booleans: onnxruntime has none
        return atom & (value.isfinite() | ~number) | super().each(value) & inside & number
