"""Linear layers: diagonal scaling (NICE §3.3), learned mixing, whitening (NICE App. B) and exact ZCA (NICE §5.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from nicest.flows.bijection import Bijection, check_features


class DiagonalScaling(Bijection):
    """y = exp(s) ⊙ x, the top layer; log det = Σ_d s_d (NICE §3.3).

    σ_d = exp(-s_d) is the spectrum: how much the model lets component d vary (NICE App. A).
    """

    elementwise = True

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_features(x, len(self.s))
        return x * self.s.exp(), self.s.sum().expand(x.shape[0]).clone()

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        check_features(y, len(self.s))
        return y * torch.exp(-self.s)

    def carry(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.s.exp().to(mean)
        return mean * scale, scale[:, None] * covariance * scale

    @property
    def sigma(self) -> Tensor:
        return torch.exp(-self.s.detach())


class Mixing(Bijection):
    """y = W x + b with W = L U P, learned; log det = Σ log U_ii (Oliva et al. 2018, "Transformation autoregressive
    networks"). P is a permutation, drawn once and then fixed; L and U are triangular, L with ones on its diagonal and U
    with positive numbers, and start at the identity.
    """

    order: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("order", torch.randperm(dim))  # P as an index
        self.lu = nn.Parameter(torch.zeros(dim, dim))  # L below the diagonal, U above it
        self.log_diagonal = nn.Parameter(torch.zeros(dim))
        self.b = nn.Parameter(torch.zeros(dim))

    @property
    def upper(self) -> Tensor:
        """U."""
        return self.lu.triu(1) + self.log_diagonal.exp().diag()

    @property
    def matrix(self) -> Tensor:
        """W."""
        upper = self.upper
        return torch.addmm(upper, self.lu.tril(-1), upper).index_select(1, self.order)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_features(x, len(self.b))
        return torch.addmm(self.b, x, self.matrix.mT), self.log_diagonal.sum().expand(x.shape[0]).clone()

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        check_features(y, len(self.b))
        inner = torch.linalg.solve_triangular(self.lu, (y - self.b).mT, upper=False, unitriangular=True)
        return torch.linalg.solve_triangular(self.upper, inner, upper=True).mT[:, self.order]

    def carry(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        matrix = self.matrix.to(mean)
        return matrix @ mean + self.b.to(mean), matrix @ covariance @ matrix.mT


class Whitening(Bijection):
    """A linear layer that can be fitted to data in closed form, in float64 whatever dtype the data has.

    `shrinkage` is the share of every correlation that it disbelieves: 0 takes the covariance of the data as it is.
    """

    whitens = True

    def __init__(self, shrinkage: float = 0.0) -> None:
        super().__init__()
        self.shrinkage = shrinkage

    def fit(self, x: Tensor) -> Self:
        """Fit to the rows of x, (N, D) with N > D."""
        return self.fit_moments(*moments(x))

    def fit_moments(self, mean: Tensor, covariance: Tensor) -> Self:
        """Fit to data of this mean and covariance."""
        covariance = covariance.double()
        return self._fit(mean.double(), torch.lerp(covariance, covariance.diagonal().diag(), self.shrinkage))

    def _fit(self, mean: Tensor, covariance: Tensor) -> Self:
        raise NotImplementedError


class TriangularAffine(Whitening):
    """z = L x + b, L lower triangular with a positive diagonal; log det = Σ log L_ii (NICE App. B).

    Under a standard Gaussian prior this is a full Gaussian; train it by the NICE criterion like any layer, or take
    the optimum at once: L = chol(Σ)⁻¹, b = -L μ, Σ and μ the covariance and mean of the data.
    """

    def __init__(self, dim: int, *, shrinkage: float = 0.0) -> None:
        super().__init__(shrinkage)
        self.below = nn.Parameter(torch.zeros(dim, dim))
        self.log_diagonal = nn.Parameter(torch.zeros(dim))
        self.b = nn.Parameter(torch.zeros(dim))

    @property
    def lower(self) -> Tensor:
        """L."""
        return self.below.tril(-1) + self.log_diagonal.exp().diag()

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_features(x, len(self.b))
        return x @ self.lower.mT + self.b, self.log_diagonal.sum().expand(x.shape[0]).clone()

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        check_features(y, len(self.b))
        return torch.linalg.solve_triangular(self.lower, (y - self.b).mT, upper=False).mT

    @torch.no_grad()
    def _fit(self, mean: Tensor, covariance: Tensor) -> Self:
        _check_rank(torch.linalg.eigvalsh(covariance))
        factor = torch.linalg.cholesky(covariance)
        identity = torch.eye(len(mean), dtype=torch.float64, device=mean.device)
        lower = torch.linalg.solve_triangular(factor, identity, upper=False)
        self.below.copy_(lower.tril(-1))
        self.log_diagonal.copy_(lower.diagonal().log())
        self.b.copy_(-lower @ mean)
        return self


class ZCA(Whitening):
    """y = (x - μ) W, W = U Λ^(-1/2) Uᵀ with U Λ Uᵀ the covariance; log det = -½ Σ log λ_d (NICE §5.1).

    Exact: there is no epsilon. Dequantisation noise is what makes the covariance of images full rank.
    """

    mean: Tensor
    whiten: Tensor
    colour: Tensor
    log_det: Tensor

    def __init__(self, dim: int, *, shrinkage: float = 0.0) -> None:
        super().__init__(shrinkage)
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("whiten", torch.zeros(dim, dim).fill_diagonal_(1))
        self.register_buffer("colour", torch.zeros(dim, dim).fill_diagonal_(1))
        self.register_buffer("log_det", torch.zeros(()))

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_features(x, len(self.mean))
        return (x - self.mean) @ self.whiten, self.log_det.expand(x.shape[0]).clone()

    def carry(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        whiten = self.whiten.to(mean)
        return (mean - self.mean.to(mean)) @ whiten, whiten.mT @ covariance @ whiten

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        check_features(y, len(self.mean))
        return y @ self.colour + self.mean

    @torch.no_grad()
    def _fit(self, mean: Tensor, covariance: Tensor) -> Self:
        eigenvalues, vectors = torch.linalg.eigh(covariance)
        _check_rank(eigenvalues)
        self.mean.copy_(mean)
        self.whiten.copy_(vectors * eigenvalues.rsqrt() @ vectors.mT)
        self.colour.copy_(vectors * eigenvalues.sqrt() @ vectors.mT)
        self.log_det.copy_(-0.5 * eigenvalues.log().sum())
        return self


def moments(x: Tensor, rows: int = 8192, *, of: Callable[[Tensor], Tensor] = Tensor.double) -> tuple[Tensor, Tensor]:
    """Mean and covariance (divided by N) of the rows of x, or of a function of them, in float64 without a copy."""
    mean = torch.stack([of(part).double().sum(0) for part in x.split(rows)]).sum(0) / len(x)
    scatter = torch.zeros(len(mean), len(mean)).to(mean)
    for part in x.split(rows):
        centred = of(part).double() - mean
        scatter += centred.mT @ centred
    return mean, scatter / len(x)


def mean_and_variance(x: Tensor, rows: int = 8192) -> tuple[Tensor, Tensor]:
    """Mean and variance (divided by N) of every column of x, in float64 without a copy; NaN are left out."""
    parts = x.split(rows)
    count = torch.stack([(~part.isnan()).sum(0) for part in parts]).sum(0).clamp_min(1)
    mean = torch.stack([part.double().nansum(0) for part in parts]).sum(0) / count
    return mean, torch.stack([(part.double() - mean).square().nansum(0) for part in parts]).sum(0) / count


def _check_rank(eigenvalues: Tensor) -> None:
    """Refuse a covariance some of whose eigenvalues, sorted, are rounding errors beside the largest."""
    dim = len(eigenvalues)
    rank = int((eigenvalues > torch.finfo(torch.float64).eps * dim * eigenvalues[-1]).sum())
    if rank < dim:
        raise ValueError(
            f"whitening needs a covariance of full rank, got rank {rank} of {dim}:"
            " drop constant or linearly dependent columns, or use more rows"
        )
