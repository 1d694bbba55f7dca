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

FARTHEST = 10.0  # standardised numbers are clipped to this before the network reads them
COARSE, FINE = -9.0, 4.0  # range of the components' log-scales
UNUSED = -1e4  # logit of an atom that a column does not have


class Features(nn.Module):
    """Numbers that the network reads of every cell, F in all; `column` says which cell each is of.

    A number x gives x itself, one ramp from 0 to 1 between every two neighbouring knots, and an indicator of each
    atom. A category gives an indicator of each value and, if it is ordered, its standardised number.
    """

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
        self.bias = nn.Parameter(torch.zeros(members, n_out))

    def forward(self, x: Tensor) -> Tensor:
        if len(self.weight) == 1:
            return functional.linear(x, self.weight[0].mT, self.bias[0])
        return torch.baddbmm(self.bias[:, None], x, self.weight)


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
        self.features = Features(heads)
        self.dim, self.members, self.components = len(heads), members, components
        self.n_atoms = max((len(head.atoms) for head in heads if not head.categories), default=0)
        self.size = self.n_atoms + 3 * components  # parameters of a number
        self.numbers = [i for i, head in enumerate(heads) if not head.categories]
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
        n_features = len(self.features.column)
        self.enter = MemberLinear(members, n_features + self.dim, width, scale=1 / math.sqrt(2 * max(self.dim, 1)))
        self.blocks = nn.Sequential(*[Block(members, width, rate) for _ in range(depth)])
        self.leave = MemberLinear(members, width, at, scale=0.1 / math.sqrt(width))
        self.inputs = [  # inputs of each column: its features and its mask bit
            [*(k for k, column in enumerate(self.features.column) if column == i), n_features + i]
            for i in range(self.dim)
        ]
        self.width = width

    def entered(self, x: Tensor, observed: Tensor) -> Tensor:
        """Return the first layer (M, B, width) of cells x of which `observed` are seen, both (M or 1, B, D)."""
        inputs = torch.cat((self.features(x, observed), observed), -1)
        return self.enter(inputs.expand(self.members, -1, -1))

    def added(self, column: int, x: Tensor, observed: Tensor) -> Tensor:
        """Return what one column adds to the first layer, (M, B, width), for rows x and observed (B, D)."""
        rows = self.inputs[column]
        features = self.features(x, observed)
        inputs = torch.cat((features[:, rows[:-1]], observed[:, column : column + 1]), -1)
        return inputs @ self.enter.weight[:, rows]

    def hidden(self, entered: Tensor) -> Tensor:
        """Return the last hidden layer, (M, B, width)."""
        return functional.layer_norm(self.blocks(entered), (self.width,))

    def parameters_of(self, hidden: Tensor, column: int) -> Tensor:
        """Return the raw parameters of one column, (M, B, size)."""
        where = self.slices[column]
        return torch.baddbmm(self.leave.bias[:, None, where], hidden, self.leave.weight[..., where])
