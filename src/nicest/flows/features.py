"""Features of numbers for networks that read them: waves with learned frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

FREQUENCIES = 8  # of the waves of each number
SIZE = 8  # features of each number, besides the number itself
STANDARD_DEVIATION = 0.1  # of the initial frequencies, for numbers whose standard deviation is 1


class Features(nn.Module):
    """Features of `dim` numbers: z becomes z and relu(W (sin 2πfz, cos 2πfz)) with learned frequencies f.

    See Gorishniy et al. 2022, "On embeddings for numerical features in tabular deep learning".
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.outputs = dim * (1 + SIZE)
        self.frequency = nn.Parameter(STANDARD_DEVIATION * torch.randn(dim, FREQUENCIES))
        self.mixture = nn.Parameter(torch.randn(dim, 2 * FREQUENCIES, SIZE) / math.sqrt(2 * FREQUENCIES))

    def forward(self, x: Tensor) -> Tensor:
        """Return the features (B, outputs) of numbers (B, dim)."""
        turns = 2 * math.pi * x[..., None] * self.frequency
        waves = torch.cat((turns.sin(), turns.cos()), -1)
        mixed = torch.einsum("bnf,nfs->bns", waves, self.mixture).relu()
        return torch.cat((x[..., None], mixed), -1).flatten(1)

    def extra_repr(self) -> str:
        return f"{len(self.frequency)} numbers"
