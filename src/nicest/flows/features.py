"""Coupling functions that read the columns of a table: numbers, categories, and cells that are missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional

from nicest.flows.linear import mean_and_variance
from nicest.flows.noise import batch_size, select

FREQUENCIES = 8  # at which a number is read
SIZE = 8  # numbers that stand for a cell, beside the number in it
SPREAD = 0.1  # standard deviation of the frequencies at first, of numbers whose standard deviation is 1
HIDDEN_ROWS, HIDDEN_CELLS = 0.1, 0.3  # share of training rows that have hidden cells, and of those cells


class Features(nn.Module):
    """Features of the columns of a table for a network.

    A number z becomes z and relu(W (sin 2πfz, cos 2πfz)) with learned frequencies f (Gorishniy et al. 2022, "On
    embeddings for numerical features"); a category becomes a learned vector. A missing cell, NaN, has a learned vector
    too: to train it, some cells are hidden at random.

    Parameters
    ----------
    categories : sequence of int
        Number of categories of each column, whose cells are 0, 1, ...; 0 if it holds numbers.
    may_miss : sequence of bool
        Columns that may have missing cells; all by default.
    """

    numbers: Tensor
    codes: Tensor
    first: Tensor
    last: Tensor
    may_miss: Tensor

    def __init__(self, categories: Sequence[int], may_miss: Sequence[bool] = ()) -> None:
        super().__init__()
        numbers = [i for i, count in enumerate(categories) if not count]
        codes = [i for i, count in enumerate(categories) if count]
        ends = list(accumulate(categories[i] + 1 for i in codes))  # the last vector of each is of missing cells
        constants: dict[str, list[int]] = {
            "numbers": numbers,
            "codes": codes,
            "first": [end - categories[i] - 1 for i, end in zip(codes, ends, strict=True)],
            "last": [end - 1 for end in ends],
            "may_miss": list(may_miss) or [True] * len(categories),
        }
        for name, values in constants.items():
            kind = torch.bool if name == "may_miss" else torch.long
            self.register_buffer(name, torch.tensor(values, dtype=kind), persistent=False)
        self.outputs = len(numbers) * (1 + SIZE) + len(codes) * SIZE
        self.frequency = nn.Parameter(SPREAD * torch.randn(len(numbers), FREQUENCIES))
        self.mixture = nn.Parameter(torch.randn(len(numbers), 2 * FREQUENCIES, SIZE) / math.sqrt(2 * FREQUENCIES))
        self.missing = nn.Parameter(torch.zeros(len(numbers), 1 + SIZE))
        self.vectors = nn.Parameter(torch.randn(ends[-1] if ends else 0, SIZE) / math.sqrt(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        """Return the features (B, outputs) of cells (B, columns)."""
        missing = x.isnan()
        if self.training:
            missing = missing | self._hidden(x)
        z, absent = torch.where(missing, 0.0, x)[:, self.numbers], missing[:, self.numbers]
        turns = 2 * math.pi * z[..., None] * self.frequency
        waves = torch.cat((turns.sin(), turns.cos()), -1)
        mixed = torch.einsum("bnf,nfs->bns", waves, self.mixture).relu()
        read = torch.where(absent[..., None], self.missing, torch.cat((z[..., None], mixed), -1)).flatten(1)
        if not len(self.codes):
            return read
        at = torch.where(missing, 0.0, x)[:, self.codes].long() + self.first
        at = torch.where(missing[:, self.codes], self.last, at.clamp(self.first, self.last - 1))
        return torch.cat((read, functional.embedding(at, self.vectors).flatten(1).to(read.dtype)), -1)

    def _hidden(self, x: Tensor) -> Tensor:
        drawn = select(torch.rand(batch_size(len(x)), 1 + x.shape[1], device=x.device))
        return (drawn[:, :1] < HIDDEN_ROWS) & (drawn[:, 1:] < HIDDEN_CELLS) & self.may_miss

    def extra_repr(self) -> str:
        return f"{len(self.numbers)} numbers, {len(self.codes)} categories"


class FeatureNetwork(nn.Module):
    """A coupling function m(features(context, x_I1)) that reads columns by their `Features`.

    The columns of `features` are those of the context, then those of x_I1. `make` builds m for a number of inputs.
    """

    def __init__(self, features: Features, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.features, self.network = features, make(features.outputs)

    def forward(self, x1: Tensor, context: Tensor | None = None) -> Tensor:
        b: Tensor = self.network(self.features(x1 if context is None else torch.cat((context.to(x1), x1), 1)))
        return b


class Standardiser(nn.Module):
    """An embedding of the columns of a table: (c - loc) / scale of numbers, categories as they are; NaN stays NaN.

    `categories` are as in `Features`.
    """

    loc: Tensor
    scale: Tensor
    numbers: Tensor

    def __init__(self, categories: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("loc", torch.zeros(len(categories)))
        self.register_buffer("scale", torch.ones(len(categories)))
        self.register_buffer("numbers", torch.tensor([not count for count in categories]), persistent=False)

    def forward(self, c: Tensor) -> Tensor:
        return ((c - self.loc) / self.scale).to(self.scale.dtype)

    @torch.no_grad()
    def fit(self, c: Tensor) -> None:
        """Set loc and scale to the mean and standard deviation of the columns of c, (N, C), ignoring NaN."""
        mean, variance = mean_and_variance(c)
        self.loc.copy_(torch.where(self.numbers, mean, 0.0))
        self.scale.copy_(torch.where(self.numbers & (variance > 0), variance.sqrt(), 1.0))

    @torch.no_grad()
    def rescale(self, unit: Tensor) -> None:
        """Adapt to numbers that are `unit` times as large, (C,)."""
        for each in (self.loc, self.scale):
            each.mul_(unit.to(each))
