"""The table model: p(x_i | any observed cells) for every column i, trained on random masks.

Order-agnostic autoregressive models (Uria, Murray and Larochelle 2014; Strauss and Oliva 2021; Hoogeboom et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nicest.data.columns import Head
from nicest.flows.density import Density, by_rows
from nicest.flows.noise import batch_size, select
from nicest.recipes.settings import TableSettings
from nicest.tables.heads import Categories, Interval, Numbers
from nicest.tables.network import COARSE, FINE, UNUSED, Network

FAR = 1e30  # stands for an infinite bound, since gradients at infinity are NaN
VALIDATION_MASKS = 4  # of every validation row


class TableModel(Density):
    """Densities of rows of a table by one network for p(x_i | any observed cells).

    Rows are encoded by a `Schema`: (B, D) numbers, NaN where a cell is missing. Given a random order of the columns,
    p(x) = prod_i p(x_i | the cells before it) is a normalised density, and so is its mean over several orders.
    A missing cell is never observed: `log_prob` is then the log-probability of the observed cells.

    Parameters
    ----------
    heads : sequence of Head
        What the cells of each column can be.
    settings : TableSettings
        Sizes of the network; `orders` is the number of orders that `log_prob` averages, `members` of networks whose
        probabilities are averaged; `favour` the share of training masks that hide exactly the targets.
    targets : sequence of int
        Columns that training favours.
    """

    atoms: Tensor
    low: Tensor
    high: Tensor
    step: Tensor
    log_unit: Tensor
    target: Tensor
    orders: Tensor

    def __init__(self, heads: Sequence[Head], settings: TableSettings, targets: Sequence[int] = ()) -> None:
        super().__init__()
        self.heads, self.dim, self.targets = tuple(heads), len(heads), tuple(targets)
        self.favour = settings.favour if targets else 0.0
        self.network = Network(
            self.heads,
            members=settings.members,
            width=settings.width,
            depth=settings.depth,
            components=settings.components,
            rate=settings.dropout,
        )
        numbers = [self.heads[i] for i in self.network.numbers]
        self.bounded = any(math.isfinite(head.low) or math.isfinite(head.high) for head in numbers)
        self.stepped = any(head.step > 0 for head in numbers)
        atoms = [[*head.atoms, *[math.nan] * (self.network.n_atoms - len(head.atoms))] for head in numbers]
        constants = {
            "atoms": torch.tensor(atoms).reshape(len(numbers), self.network.n_atoms),
            "low": torch.tensor([max(head.low, -FAR) for head in numbers]),
            "high": torch.tensor([min(head.high, FAR) for head in numbers]),
            "step": torch.tensor([head.step for head in numbers]),
            "log_unit": torch.tensor([0.0 if head.step > 0 else math.log(head.scale) for head in numbers]),
            "target": torch.tensor([float(i in self.targets) for i in range(self.dim)]),
            "orders": torch.stack(_orders(self.dim, settings.orders)),
        }
        for name, tensor in constants.items():
            self.register_buffer(name, tensor, persistent=False)

    # training

    def forward(self, x: Tensor, context: Tensor | None = None, **options: Any) -> Tensor:
        """Return a random estimate of log p(x) of rows (B, D), (B,), whose mean training maximises.

        Of the P observed cells of a row a random set of k is seen, k uniform from 0 to P - 1. P / (P - k) times the
        sum of log p(x_i | seen) over the other cells has the expectation of log p over a random order (chain rule).
        """
        members, n = self.network.members, len(x)
        draws = select(torch.rand(batch_size(n), members, self.dim + 2, device=x.device)).transpose(0, 1)
        favoured = draws[..., -2] < self.favour
        return self._estimate(x.expand(members, -1, -1), draws[..., :-2], draws[..., -1], favoured).mean(0)

    @torch.no_grad()
    def validation_log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the estimate of log p(x) under fixed masks, the members' probabilities averaged, (B,)."""
        generator = torch.Generator(x.device).manual_seed(0)
        total = torch.zeros(len(x), device=x.device, dtype=x.dtype)
        for j in range(VALIDATION_MASKS):
            draws = torch.rand(batch_size(len(x)), self.dim + 1, generator=generator, device=x.device)
            draws = select(draws)[None]
            counts = (draws[..., -1] + j) / VALIDATION_MASKS
            favoured = torch.full_like(counts, (j + 0.5) / VALIDATION_MASKS) < self.favour
            total += self._estimate(x[None], draws[..., :-1], counts, favoured)[0]
        return total / VALIDATION_MASKS

    def _estimate(self, x: Tensor, draws: Tensor, counts: Tensor, favoured: Tensor) -> Tensor:
        """Return the objective, (L, B), for masks made of uniform numbers: `draws` (L, B, D) order cells, `counts`
        (L, B) say how many are seen, and rows that are `favoured` hide the targets alone.

        With L = 1 the members' probabilities are averaged.
        """
        known = ~x.isnan()
        present = known.sum(-1)
        rank = torch.where(known, draws, 2.0).argsort(-1).argsort(-1)
        k = torch.floor(counts * present)
        seen = (rank < k[..., None]) & known
        weight = present / (present - k).clamp_min(1)
        if self.favour:
            hidden = known & (self.target > 0)
            seen = torch.where(favoured[..., None], known & ~hidden, seen)
            weight = torch.where(favoured, 1.0, weight)
        nats = self.conditionals(x, seen.to(x))
        if len(x) < len(nats):
            nats = torch.logsumexp(nats, 0, keepdim=True) - math.log(len(nats))
        return weight * torch.where(known & ~seen, nats, 0.0).sum(-1)

    def conditionals(self, x: Tensor, observed: Tensor) -> Tensor:
        """Return log p(x_i | the observed cells) of every cell by every member, (M, B, D).

        Cells x and `observed`, which is 1 for cells that are seen, are (M, B, D), or (1, B, D) for all members. The
        network does not read the value of a hidden or missing cell.
        """
        filled = torch.nan_to_num(x, nan=0.0)
        hidden, centre, log_deviation = self.network(filled, observed)
        raw = self.network.leave(hidden)
        found = filled.new_zeros(*raw.shape[:-1], self.dim)
        if count := len(self.network.numbers):
            parameters = raw[..., : count * self.network.size].unflatten(-1, (count, -1))
            numbers = self._numbers(parameters, centre, log_deviation)
            found[..., self.network.numbers] = numbers.log_prob(filled[..., self.network.numbers])
        for count, (columns, where) in self.network.by_count.items():
            logits = raw[..., where].unflatten(-1, (len(columns), count))
            found[..., columns] = Categories(logits.log_softmax(-1)).log_prob(filled[..., columns])
        return found

    def _numbers(self, raw: Tensor, centre: Tensor, log_deviation: Tensor, at: slice = slice(None)) -> Numbers:
        """Return the distributions of columns `at` of the numbers from raw parameters (..., n, A + 3 K).

        Locations and scales of the components are relative to the Gaussian of the factor analysis.
        """
        sizes = [self.network.n_atoms + self.network.components, *[self.network.components] * 2]
        logits, loc, log_scale = raw.split(sizes, -1)
        log_deviation = log_deviation[..., at, None]
        loc = centre[..., at, None] + loc * log_deviation.exp()
        log_scale = log_scale + log_deviation
        atoms = self.atoms[at]
        if self.network.n_atoms:
            unused = torch.cat((atoms.isnan(), torch.zeros_like(loc[0, 0], dtype=torch.bool)), -1)
            logits = torch.where(unused, UNUSED, logits)
        log_p = logits.log_softmax(-1)
        return Numbers(
            log_p[..., : self.network.n_atoms],
            log_p[..., self.network.n_atoms :],
            loc,
            log_scale.clamp(COARSE, FINE),
            atoms,
            self.low[at],
            self.high[at],
            self.step[at],
            self.log_unit[at],
            self.bounded,
            self.stepped,
        )

    @torch.no_grad()
    def initialise(self, x: Tensor, context: Tensor | None = None) -> None:
        """Fit the factor analysis to rows (N, D), and start from its Gaussians and from the frequencies of atoms."""
        network, k = self.network, self.network.components
        known, filled = ~x.isnan(), torch.nan_to_num(x, nan=0.0)
        seen = known[:, network.variables.cells].to(x)
        values, count = network.variables(filled), seen.sum(0).clamp_min(1)
        mean = (values * seen).sum(0) / count
        deviation = (((values - mean) ** 2 * seen).sum(0) / count).sqrt().clamp_min(1e-3)
        network.variables.mean.copy_(mean)
        network.variables.deviation.copy_(deviation)
        network.factors.fit((values - mean) / deviation, seen)
        centres = 0.8 * torch.special.ndtri((torch.arange(k).to(x) + 0.5) / k)
        spread = (1 - centres.square().mean()).sqrt()  # of each component: all together have variance 1
        for i, head in enumerate(self.heads):
            bias, cells = network.leave.bias[:, network.slices[i]], x[known[:, i], i]
            if head.categories:
                counts = torch.bincount(cells.long(), minlength=head.categories)[: head.categories]
                bias.copy_(torch.log((counts + 1) / (counts.sum() + head.categories)))
                continue
            counts = (cells[:, None] == cells.new_tensor(head.atoms)).sum(0)
            bias[:, : len(head.atoms)] = torch.log((counts + 1) / (len(cells) + 1))
            rest = ((len(cells) - counts.sum()).clamp_min(0) + 1) / (len(cells) + 1) / k
            bias[:, network.n_atoms : network.n_atoms + k] = torch.log(rest)
            bias[:, network.n_atoms + k : network.n_atoms + 2 * k] = centres
            bias[:, network.n_atoms + 2 * k :] = torch.log(spread * math.sqrt(3) / math.pi)

    # questions

    def log_prob(self, x: Tensor, context: Tensor | None = None, **options: Any) -> Tensor:
        """Return log p of the observed cells of rows (..., D): the log of the mean of p over the model's orders."""

        def of_rows(x: Tensor, context: Tensor | None) -> Tensor:
            each = torch.stack([self.log_prob_in(x, order) for order in self.orders.tolist()])
            return torch.logsumexp(each, 0) - math.log(len(each))

        return by_rows(of_rows, x, context, self.dim)

    def log_prob_in(self, x: Tensor, order: Iterable[int]) -> Tensor:
        """Return log p of the observed cells of rows (B, D) by the chain rule in one order."""
        known, filled = ~x.isnan(), torch.nan_to_num(x, nan=0.0)
        seen, total = torch.zeros_like(filled), filled.new_zeros(len(x))
        for i in order:
            if bool(known[:, i].any()):
                nats = self.conditional(filled, seen, i).log_prob(self.cells(filled, i)).view(-1)
                total = total + torch.where(known[:, i], nats, 0.0)
                seen = seen.clone()
                seen[:, i] = known[:, i].to(seen)
        return total

    def conditional(self, x: Tensor, seen: Tensor, column: int) -> Numbers | Categories:
        """Return p(x_i | seen cells) of one column for rows (B, D), the members' probabilities averaged."""
        return self.heads_of(x, seen, [column])[column]

    def heads_of(self, x: Tensor, seen: Tensor, columns: Sequence[int]) -> dict[int, Numbers | Categories]:
        """Return p(x_i | seen cells) of several columns by one pass of the network."""
        hidden, centre, log_deviation = self.network(torch.nan_to_num(x, nan=0.0)[None], seen[None])
        log_m, found = math.log(len(hidden)), dict[int, Numbers | Categories]()
        for i in columns:
            raw = self.network.leave(hidden, self.network.slices[i])
            if self.heads[i].categories:
                found[i] = Categories(torch.logsumexp(raw.log_softmax(-1), 0) - log_m)
                continue
            place = self.network.numbers.index(i)
            members = self._numbers(raw[:, :, None], centre, log_deviation, slice(place, place + 1))
            found[i] = replace(
                members,
                log_atoms=torch.logsumexp(members.log_atoms, 0) - log_m,
                log_weights=_side_by_side(members.log_weights) - log_m,
                loc=_side_by_side(members.loc),
                log_scale=_side_by_side(members.log_scale),
            )
        return found

    def cells(self, x: Tensor, column: int) -> Tensor:
        """Return the cells of one column as its distribution takes them: (B, 1) of numbers, (B,) of categories."""
        return x[:, column] if self.heads[column].categories else x[:, column : column + 1]

    @torch.no_grad()
    def sample(self, n: int, context: Tensor | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw n rows (n, D): an equal share by the chain in each of the model's orders, in random places."""
        empty = torch.full((n, self.dim), math.nan, device=self.device, dtype=self.dtype)
        parts = [
            self.complete(part, order, generator=generator)
            for part, order in zip(empty.tensor_split(len(self.orders)), self.orders.tolist(), strict=True)
        ]
        rows = torch.cat(parts)
        return rows[torch.randperm(n, generator=generator, device=rows.device)]

    @torch.no_grad()
    def complete(
        self, x: Tensor, order: Iterable[int] | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return rows (B, D) with their missing cells drawn jointly given the observed ones, by the chain."""
        x = x.clone()
        for i in self.orders[0].tolist() if order is None else order:
            missing = x[:, i].isnan()
            if bool(missing.any()):
                rows = x[missing]
                x[missing, i] = self._draw(self.conditional(rows, (~rows.isnan()).to(x), i), i, generator)
        return x

    def _draw(
        self,
        head: Numbers | Categories,
        column: int,
        generator: torch.Generator | None,
        intervals: Sequence[Interval] = (),
    ) -> Tensor:
        """Draw cells (B,) of one column; those of a grid are the float32 numbers of the schema, to the last digit."""
        drawn, step = head.sample(generator, intervals).view(-1), self.heads[column].step
        return (drawn.double() / step).round().mul(step).to(drawn) if step else drawn

    @torch.no_grad()
    def sample_where(
        self,
        n: int,
        observed: Mapping[int, float],
        ranges: Mapping[int, Sequence[Interval]],
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, float, float]:
        """Draw n rows given exact values and ranges of some columns, by sequential Monte Carlo.

        Columns with ranges come first, each drawn inside its ranges. A row's weight is the probability of the ranges
        given what it has drawn before, and rows are resampled by their weights.

        Returns
        -------
        rows : Tensor of shape (n, D)
        log_probability : float
            Estimated log-probability of the ranges given the exact values.
        effective_size : float
            Smallest effective number of rows at a resampling.
        """
        x = torch.full((n, self.dim), math.nan, device=self.device, dtype=self.dtype)
        for i, value in observed.items():
            x[:, i] = value
        log_p, effective = 0.0, float(n)
        for i, intervals in ranges.items():
            head = self.conditional(x, (~x.isnan()).to(x), i)
            log_weight = head.log_probability(intervals).view(-1).double()
            mean = float(torch.logsumexp(log_weight, 0)) - math.log(n)
            if mean == -math.inf:
                return x[:0], -math.inf, 0.0
            weights = torch.softmax(log_weight, 0)
            log_p, effective = log_p + mean, min(effective, 1 / float((weights**2).sum()))
            x[:, i] = self._draw(head, i, generator, intervals)
            x = x[systematic(weights, generator)]
        rest = [i for i in self.orders[0].tolist() if i not in observed and i not in ranges]
        return self.complete(x, rest, generator=generator), log_p, effective


def _side_by_side(values: Tensor) -> Tensor:
    """Return components of all members, (M, ..., K), in one dimension, (..., M K)."""
    return values.movedim(0, -2).flatten(-2)


def systematic(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return n indices drawn with probabilities `weights` (n,), by systematic resampling."""
    n = len(weights)
    start = torch.rand((), generator=generator, device=weights.device, dtype=torch.float64)
    points = (torch.arange(n, device=weights.device) + start) / n
    return torch.searchsorted(weights.double().cumsum(0), points).clamp_max(n - 1)


def _orders(dim: int, count: int) -> list[Tensor]:
    """Return orders of the columns: random ones from a fixed seed, each followed by its reverse."""
    generator = torch.Generator().manual_seed(0)
    orders: list[Tensor] = []
    while len(orders) < count:
        order = torch.randperm(dim, generator=generator)
        orders += [order, order.flip(0)]
    return orders[:count]
