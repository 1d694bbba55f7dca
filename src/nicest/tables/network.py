"""The network of the table model: from the observed cells of a row to the parameters of every cell's distribution."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from nicest.data.columns import Head
from nicest.flows.noise import dropout
from nicest.tables.factors import Factors

FARTHEST = 10.0  # standardised numbers are clipped to this before the network reads them
COARSE, FINE = -9.0, 4.0  # range of the components' log-scales
UNUSED = -1e4  # logit of an atom that a column does not have
MOST_INDICATORS = 50  # categories of a column that the factor analysis takes part in


class Features(nn.Module):
    """Numbers that the network reads of every cell, F in all; `column` says which cell each is of.

    A number x gives x itself, one ramp from 0 to 1 between every two neighbouring knots, and an indicator of each
    atom. A category gives an indicator of each value and, if it is ordered, its standardised number.
    """

    start: Tensor
    slope: Tensor
    least: Tensor
    most: Tensor
    indicator: Tensor
    values: Tensor
    cells: Tensor

    def __init__(self, heads: Sequence[Head]) -> None:
        super().__init__()
        ramps, indicators, ordered = [], [], []
        for i, head in enumerate(heads):
            if head.categories:
                indicators += [(i, float(code)) for code in range(head.categories)] if head.categories > 1 else []
                ordered += [(i, head.values)] if head.values else []
                continue
            ramps.append((i, 0.0, 1.0, -FARTHEST, FARTHEST))
            pairs = [(a, b) for a, b in zip(head.knots[:-1], head.knots[1:], strict=True) if b > a]
            ramps += [(i, low, 1 / (high - low), 0.0, 1.0) for low, high in pairs]
            indicators += [(i, atom) for atom in head.atoms]
        self.ramped, self.indicated, self.ordered = ([e[0] for e in each] for each in (ramps, indicators, ordered))
        self.column = [*self.ramped, *self.indicated, *self.ordered]
        table = torch.tensor([each[1:] for each in ramps]).reshape(-1, 4)
        longest = max((len(values) for _, values in ordered), default=0)
        values = [[*values, *[0.0] * (longest - len(values))] for _, values in ordered]
        for name, tensor in (
            ("start", table[:, 0]),
            ("slope", table[:, 1]),
            ("least", table[:, 2]),
            ("most", table[:, 3]),
            ("indicator", torch.tensor([each[1] for each in indicators])),
            ("values", torch.tensor(values).reshape(len(values), longest)),
            ("cells", torch.tensor(self.column, dtype=torch.long)),
        ):
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, x: Tensor, observed: Tensor) -> Tensor:
        """Return the features (..., F) of cells x (..., D); 0 where `observed` (..., D), a mask of floats, is 0."""
        ramps = torch.clamp((x[..., self.ramped] - self.start) * self.slope, self.least, self.most)
        parts = [ramps, (x[..., self.indicated] == self.indicator).to(x)]
        if self.ordered:
            code = x[..., self.ordered].clamp(0, self.values.shape[1] - 1).long()
            parts.append(torch.gather(self.values.to(x).expand(*code.shape, -1), -1, code[..., None])[..., 0])
        return torch.cat(parts, -1) * observed[..., self.cells]


class MemberLinear(nn.Module):
    """M linear maps side by side: (M, B, n_in) to (M, B, n_out)."""

    def __init__(self, members: int, n_in: int, n_out: int, *, scale: float | None = None) -> None:
        super().__init__()
        scale = 1 / math.sqrt(max(n_in, 1)) if scale is None else scale
        self.weight = nn.Parameter(torch.randn(members, n_in, n_out) * scale)
        self.flat_bias = nn.Parameter(torch.zeros(members * n_out))  # a vector, which weight decay leaves alone

    @property
    def bias(self) -> Tensor:
        """The biases, (M, n_out)."""
        return self.flat_bias.view(len(self.weight), -1)

    def forward(self, x: Tensor, where: slice = slice(None)) -> Tensor:
        """Return outputs `where` of the maps."""
        if len(self.weight) == 1:
            return functional.linear(x, self.weight[0, :, where].mT, self.bias[0, where])
        return torch.baddbmm(self.bias[:, None, where], x, self.weight[..., where])


class Block(nn.Module):
    """A residual block: h + down(dropout(gelu(up(norm(h)))))."""

    def __init__(self, members: int, width: int, rate: float) -> None:
        super().__init__()
        self.up, self.down = MemberLinear(members, width, 2 * width), MemberLinear(members, 2 * width, width)
        self.rate, self.width = rate, width

    def forward(self, h: Tensor) -> Tensor:
        inner = functional.gelu(self.up(functional.layer_norm(h, (self.width,))), approximate="tanh")
        if self.training and self.rate:
            inner = dropout(inner.transpose(0, 1), self.rate).transpose(0, 1)  # rows first: processes share a batch
        return h + self.down(inner)


class Variables(nn.Module):
    """The standardised variables of the factor analysis: numbers, ordered categories, and indicators of categories."""

    table: Tensor
    codes: Tensor
    mean: Tensor
    deviation: Tensor

    def __init__(self, heads: Sequence[Head]) -> None:
        super().__init__()
        numbers = [i for i, head in enumerate(heads) if not head.categories]
        ordered = [i for i, head in enumerate(heads) if head.values]
        pairs = [
            (i, code)
            for i, head in enumerate(heads)
            if 1 < head.categories <= MOST_INDICATORS and not head.values
            for code in range(head.categories)
        ]
        self.numbers, self.ordered, self.indicated = numbers, ordered, [i for i, _ in pairs]
        self.cells = [*numbers, *ordered, *self.indicated]
        longest = max((len(heads[i].values) for i in ordered), default=0)
        table = [[*heads[i].values, *[0.0] * (longest - len(heads[i].values))] for i in ordered]
        self.register_buffer("table", torch.tensor(table).reshape(len(ordered), longest), persistent=False)
        self.register_buffer("codes", torch.tensor([float(code) for _, code in pairs]), persistent=False)
        self.register_buffer("mean", torch.zeros(len(self.cells)))
        self.register_buffer("deviation", torch.ones(len(self.cells)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the variables (..., V) of cells x (..., D) without NaN."""
        parts = [x[..., self.numbers].clamp(-FARTHEST, FARTHEST)]
        if self.ordered:
            code = x[..., self.ordered].clamp(0, self.table.shape[1] - 1).long()
            parts.append(torch.gather(self.table.to(x).expand(*code.shape, -1), -1, code[..., None])[..., 0])
        parts.append((x[..., self.indicated] == self.codes).to(x))
        return (torch.cat(parts, -1) - self.mean) / self.deviation


class Network(nn.Module):
    """M residual networks from the observed cells of rows to the parameters of all cells.

    Parameters
    ----------
    heads : sequence of Head
        The columns.
    members, width, depth, components : int
        Networks side by side, their width, residual blocks, and components of the mixture of a number.
    rate : float
        Dropout.
    """

    def __init__(
        self, heads: Sequence[Head], *, members: int, width: int, depth: int, components: int, rate: float
    ) -> None:
        super().__init__()
        self.features, self.variables = Features(heads), Variables(heads)
        self.factors = Factors(len(self.variables.cells))
        self.dim, self.members, self.components, self.width = len(heads), members, components, width
        self.n_atoms = max((len(head.atoms) for head in heads if not head.categories), default=0)
        self.size = self.n_atoms + 3 * components  # parameters of a number
        self.numbers = self.variables.numbers
        self.slices: dict[int, slice] = {}  # outputs of each column
        at = 0
        for i in [*self.numbers, *(i for i, head in enumerate(heads) if head.categories)]:
            size = heads[i].categories or self.size
            self.slices[i], at = slice(at, at + size), at + size
        same = defaultdict(list)
        for i, head in enumerate(heads):
            if head.categories:
                same[head.categories].append(i)
        self.by_count = {  # columns with the same number of categories, and where their outputs are
            count: (columns, torch.cat([torch.arange(at)[self.slices[i]] for i in columns]))
            for count, columns in same.items()
        }
        n_inputs = len(self.features.column) + self.dim + 2 * len(self.variables.cells)
        self.enter = MemberLinear(members, n_inputs, width, scale=1 / math.sqrt(3 * max(self.dim, 1)))
        self.blocks = nn.Sequential(*[Block(members, width, rate) for _ in range(depth)])
        self.leave = MemberLinear(members, width, at, scale=0.1 / math.sqrt(width))

    def forward(self, x: Tensor, observed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the last hidden layer (M, B, width), and the means and log standard deviations of the factor analysis.

        Cells x and `observed`, a mask of floats, are (M or 1, B, D); the means and deviations, of the columns of
        numbers, are (M or 1, B, n).
        """
        with torch.no_grad():
            variables = self.variables(x)
            mean, deviation = self.factors(variables, observed[..., self.variables.cells].expand_as(variables))
            inputs = torch.cat((self.features(x, observed), observed, mean, deviation.log()), -1)
            n = len(self.numbers)
            scale, offset = self.variables.deviation[:n], self.variables.mean[:n]
        hidden = self.blocks(self.enter(inputs.expand(self.members, -1, -1)))
        hidden = functional.layer_norm(hidden, (self.width,))
        return hidden, mean[..., :n] * scale + offset, (deviation[..., :n] * scale).log()
