"""The table model: p(x_i | any observed cells) for every column i, trained on random masks.

Order-agnostic autoregressive models (Uria, Murray and Larochelle 2014; Strauss and Oliva 2021; Hoogeboom et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from nicest.data.columns import Head
from nicest.flows.density import Density, by_rows
from nicest.flows.noise import batch_size, select
from nicest.tables.heads import Categories, Interval, Numbers
from nicest.tables.network import COARSE, FINE, UNUSED, Network

FAR = 1e9  # stands for an infinite bound, since gradients at infinity are NaN
VALIDATION_MASKS = 4  # of every validation row


class Settings(Protocol):
    """Settings of the model; `TableSettings` of a recipe has them."""

    width: int
    depth: int
    components: int
    dropout: float
    members: int
    orders: int
    favour: float


class TableModel(Density):
    """Densities of rows of a table by one network for p(x_i | any observed cells).

    Rows are encoded by a `Schema`: (B, D) numbers, NaN where a cell is missing. Given a random order of the columns,
    p(x) = prod_i p(x_i | the cells before it) is a normalised density, and so is its mean over several orders.
    A missing cell is never observed: `log_prob` is then the log-probability of the observed cells.

    Parameters
    ----------
    heads : sequence of Head
        What the cells of each column can be.
    settings : Settings
        Sizes of the network; `orders` is the number of orders that `log_prob` averages, `members` of networks whose
        probabilities are averaged; `favour` the share of training masks that hide exactly the targets.
    targets : sequence of int
        Columns that training favours.
    """

    cells: Tensor

    def __init__(self, heads: Sequence[Head], settings: Settings, targets: Sequence[int] = ()) -> None:
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
        shape = (batch_size(len(x)), self.network.members, self.dim)
        draws = select(torch.rand(shape, device=x.device)).transpose(0, 1)
        counts = select(torch.rand(shape[:2], device=x.device)).T
        favoured = select(torch.rand(shape[:2], device=x.device)).T < self.favour
        return self._estimate(x, draws, counts, favoured, mean=False)

    @torch.no_grad()
    def validation_log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the estimate of log p(x) under fixed masks, the members' probabilities averaged, (B,)."""
        generator = torch.Generator(x.device).manual_seed(0)
        total = torch.zeros(len(x), device=x.device, dtype=x.dtype)
        for j in range(VALIDATION_MASKS):
            draws = torch.rand(1, len(x), self.dim, generator=generator, device=x.device)
            counts = (torch.rand(1, len(x), generator=generator, device=x.device) + j) / VALIDATION_MASKS
            favoured = torch.full_like(counts, (j + 0.5) / VALIDATION_MASKS) < self.favour
            total += self._estimate(x, draws, counts, favoured, mean=True)
        return total / VALIDATION_MASKS

    def _estimate(self, x: Tensor, draws: Tensor, counts: Tensor, favoured: Tensor, *, mean: bool) -> Tensor:
        """Return the objective for masks made of uniform numbers: `draws` (M, B, D) order cells, `counts` (M, B)."""
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
        if mean:
            nats = torch.logsumexp(nats, 0, keepdim=True) - math.log(len(nats))
        return (weight * torch.where(known & ~seen, nats, 0.0).sum(-1)).mean(0)

    def conditionals(self, x: Tensor, observed: Tensor) -> Tensor:
        """Return log p(x_i | the observed cells) of every cell by every member, (M, B, D).

        `observed`, (M or 1, B, D), is 1 for cells that are seen. The value of a hidden or missing cell is not read by
        the network, only scored.
        """
        filled = torch.nan_to_num(x, nan=0.0)
        raw = self.network.leave(self.network.hidden(self.network.entered(filled, observed)))
        found = filled.new_zeros(*raw.shape[:-1], self.dim)
        if count := len(self.network.numbers):
            numbers = self._numbers(raw[..., : count * self.network.size].unflatten(-1, (count, -1)))
            found[..., self.network.numbers] = numbers.log_prob(filled[..., self.network.numbers].float().to(x))
        for count, (columns, where) in self.network.by_count.items():
            logits = raw[..., where].unflatten(-1, (len(columns), count))
            found[..., columns] = Categories(logits.log_softmax(-1)).log_prob(filled[..., columns])
        return found

    def _numbers(self, raw: Tensor, at: slice = slice(None)) -> Numbers:
        """Return the distributions of numbers from raw parameters (..., n, A + 3 K), of columns `at` of the numbers."""
        sizes = [self.network.n_atoms + self.network.components, *[self.network.components] * 2]
        logits, loc, log_scale = raw.split(sizes, -1)
        atoms = self.atoms[at]
        if self.network.n_atoms:
            unused = torch.cat((atoms.isnan(), torch.zeros_like(loc[0, 0], dtype=torch.bool)), -1)
            logits = torch.where(unused, UNUSED, logits)
        log_p = logits.log_softmax(-1)
        constants = (each[at] for each in (self.low, self.high, self.step, self.log_unit))
        return Numbers(
            log_p[..., : self.network.n_atoms],
            log_p[..., self.network.n_atoms :],
            loc,
            log_scale.clamp(COARSE, FINE),
            atoms,
            *constants,
            self.bounded,
            self.stepped,
        )

    @torch.no_grad()
    def initialise(self, x: Tensor, context: Tensor | None = None) -> None:
        """Start from the marginal distributions of rows (N, D): components at quantiles, logits at frequencies."""
        network, k = self.network, self.network.components
        for i, head in enumerate(self.heads):
            bias, cells = network.leave.bias[:, network.slices[i]], x[:, i][~x[:, i].isnan()]
            if head.categories:
                counts = torch.bincount(cells.long(), minlength=head.categories)[: head.categories]
                bias.copy_(torch.log((counts + 1) / (counts.sum() + head.categories)))
                continue
            atoms = cells.new_tensor(head.atoms)
            counts = (cells[:, None] == atoms).sum(0)
            rest = cells[~torch.isin(cells, atoms)] if len(atoms) else cells
            rest = rest if len(rest) else cells.new_zeros(1)
            logits = torch.log((torch.cat((counts, torch.full((k,), len(rest) / k).to(counts))) + 1) / (len(cells) + 1))
            bias[:, : len(atoms)] = logits[: len(atoms)]
            bias[:, network.n_atoms : network.n_atoms + k] = logits[len(atoms) :]
            shares = (torch.arange(k).to(rest) + 0.5) / k
            centres = torch.quantile(rest[:: -(-len(rest) // 100_000)], shares)
            width = torch.gradient(centres)[0].clamp_min(0.02) if k > 1 else rest.std(correction=0)[None].clamp_min(0.02)
            bias[:, network.n_atoms + k : network.n_atoms + 2 * k] = centres
            bias[:, network.n_atoms + 2 * k :] = torch.log(width)

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
        entered, total = self.nothing(len(x)), filled.new_zeros(len(x))
        for i in order:
            if self.heads[i].categories != 1 or not bool((filled[:, i] == 0).all()):
                nats = self.head(self.network.hidden(entered), i).log_prob(self._cell(filled, i))
                total = total + torch.where(known[:, i], nats.view(-1), 0.0)
            entered = entered + self.network.added(i, filled, known.to(filled))
        return total

    def nothing(self, n: int) -> Tensor:
        """Return the first layer of n rows with no observed cell."""
        return self.network.enter.bias[:, None].expand(-1, n, -1)

    def seen(self, x: Tensor) -> Tensor:
        """Return the first layer of rows (B, D), (M, B, width): cells that are not NaN are observed."""
        return self.network.entered(torch.nan_to_num(x, nan=0.0)[None], (~x.isnan()).to(x)[None])

    def head(self, hidden: Tensor, column: int) -> Numbers | Categories:
        """Return the distribution of one column for rows (B,), the members' probabilities averaged."""
        raw = self.network.parameters_of(hidden, column)
        log_m = math.log(len(raw))
        if self.heads[column].categories:
            return Categories(torch.logsumexp(raw.log_softmax(-1), 0) - log_m)
        place = self.network.numbers.index(column)
        members = self._numbers(raw[:, :, None], slice(place, place + 1))  # parameters (M, B, 1, ...)

        def side_by_side(each: Tensor) -> Tensor:
            return each.movedim(0, -2).flatten(-2)

        return Numbers(
            torch.logsumexp(members.log_atoms, 0) - log_m,
            side_by_side(members.log_weights) - log_m,
            side_by_side(members.loc),
            side_by_side(members.log_scale),
            *(getattr(members, name) for name in ("atoms", "low", "high", "step", "log_unit", "bounded", "stepped")),
        )

    def _cell(self, x: Tensor, column: int) -> Tensor:
        """Return the cells of one column as its distribution reads them: (B, 1) of numbers, (B,) of categories."""
        return x[:, column] if self.heads[column].categories else x[:, column : column + 1]

    @torch.no_grad()
    def sample(self, n: int, context: Tensor | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw n rows (n, D): an equal share by the chain in each of the model's orders, in random places."""
        empty = torch.full((n, self.dim), math.nan, device=self.low.device, dtype=self.network.enter.bias.dtype)
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
        entered = self.seen(x)
        for i in self.orders[0].tolist() if order is None else order:
            missing = x[:, i].isnan()
            if not bool(missing.any()):
                continue
            drawn = self.head(self.network.hidden(entered[:, missing]), i).sample(generator).view(-1)
            x[missing, i] = drawn
            entered = entered.clone()
            entered[:, missing] += self.network.added(i, torch.nan_to_num(x[missing], nan=0.0), torch.ones_like(x[missing]))
        return x

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

        Columns with ranges come first, each drawn inside its ranges; a particle's weight is multiplied by the
        probability of the ranges given what it has drawn before. Particles are resampled by their weights.

        Returns
        -------
        rows : Tensor of shape (n, D)
        log_probability : float
            Estimated log-probability of the ranges given the observed values.
        effective_size : float
            Effective number of particles at the last resampling, n if no ranges depend on each other.
        """
        x = torch.full((n, self.dim), math.nan, device=self.low.device, dtype=self.network.enter.bias.dtype)
        for i, value in observed.items():
            x[:, i] = value
        entered, log_weight, log_p, effective = self.seen(x), torch.zeros(n, device=x.device), 0.0, float(n)
        for i, intervals in ranges.items():
            head = self.head(self.network.hidden(entered), i)
            log_weight = log_weight + head.log_probability(intervals).view(-1).to(log_weight)
            mean = float(torch.logsumexp(log_weight, 0)) - math.log(n)
            if mean == -math.inf:
                return x[:0], -math.inf, 0.0
            weights = torch.softmax(log_weight, 0)
            effective = min(effective, 1 / float((weights**2).sum()))
            x[:, i] = head.sample(generator, intervals).view(-1)
            log_p, log_weight = log_p + mean, torch.zeros_like(log_weight)
            x = x[systematic(weights, generator)]
            entered = self.seen(x)
        rest = [i for i in self.orders[0].tolist() if i not in observed and i not in ranges]
        return self.complete(x, rest, generator=generator), log_p, effective


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
