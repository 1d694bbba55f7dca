"""Linear layers: diagonal scaling (NICE §3.3), learned mixing, whitening (NICE App. B) and exact ZCA (NICE §5.1)."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from nicest.flows.bijection import Bijection


class DiagonalScaling(Bijection):
    """y = exp(s) ⊙ x, the top layer; log det = Σ_d s_d (NICE §3.3).

    σ_d = exp(-s_d) is the spectrum: how much the model lets component d vary (NICE App. A).
    """

    elementwise = True

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.s = dim, nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x * self.s.exp(), _per_row(self.s.sum(), x)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return y * torch.exp(-self.s), _per_row(-self.s.sum(), y)

    @property
    def sigma(self) -> Tensor:
        return torch.exp(-self.s.detach())


class Mixing(Bijection):
    """y = W x + b with a learned W = L U P; log det = Σ log U_ii (Oliva et al. 2018).

    P is a permutation, drawn once and then fixed. L and U are triangular, L with ones on its diagonal and U with
    positive numbers; both start at the identity.
    """

    order: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
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
        return torch.addmm(self.b, x, self.matrix.mT), _per_row(self.log_diagonal.sum(), x)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        inner = torch.linalg.solve_triangular(self.lu, (y - self.b).mT, upper=False, unitriangular=True)
        x = torch.linalg.solve_triangular(self.upper, inner, upper=True).mT[:, self.order]
        return x, _per_row(-self.log_diagonal.sum(), y)


class Whitening(Bijection):
    """A linear layer that is fitted to data in closed form, in float64 whatever the dtype of the data.

    `shrinkage` is the fraction by which correlations are shrunk: 0 takes the covariance of the data as it is.
    """

    whitens = True

    def __init__(self, dim: int, shrinkage: float = 0.0) -> None:
        super().__init__()
        self.dim, self.shrinkage = dim, shrinkage

    def initialise(self, x: Tensor, context: Tensor | None = None) -> None:
        """Fit to the rows of x, (N, D) with N > D."""
        self.fit_moments(*moments(x))

    def fit_moments(self, mean: Tensor, covariance: Tensor) -> None:
        """Fit to data with this mean and covariance."""
        covariance = covariance.double()
        self._fit(mean.double(), torch.lerp(covariance, covariance.diagonal().diag(), self.shrinkage))

    @abstractmethod
    def _fit(self, mean: Tensor, covariance: Tensor) -> None:
        """Fit to data with this mean and covariance, in float64."""


class TriangularAffine(Whitening):
    """z = L x + b, L lower triangular with a positive diagonal; log det = Σ log L_ii (NICE App. B).

    Under a standard Gaussian prior this is a full Gaussian. Train it by the NICE criterion like any layer, or fit the
    optimum at once: L = chol(Σ)⁻¹, b = -L μ, with Σ and μ the covariance and mean of the data.
    """

    def __init__(self, dim: int, *, shrinkage: float = 0.0) -> None:
        super().__init__(dim, shrinkage)
        self.below = nn.Parameter(torch.zeros(dim, dim))
        self.log_diagonal = nn.Parameter(torch.zeros(dim))
        self.b = nn.Parameter(torch.zeros(dim))

    @property
    def lower(self) -> Tensor:
        """L."""
        return self.below.tril(-1) + self.log_diagonal.exp().diag()

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x @ self.lower.mT + self.b, _per_row(self.log_diagonal.sum(), x)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = torch.linalg.solve_triangular(self.lower, (y - self.b).mT, upper=False).mT
        return x, _per_row(-self.log_diagonal.sum(), y)

    @torch.no_grad()
    def _fit(self, mean: Tensor, covariance: Tensor) -> None:
        _check_rank(torch.linalg.eigvalsh(covariance))
        factor = torch.linalg.cholesky(covariance)
        identity = torch.eye(len(mean), dtype=torch.float64, device=mean.device)
        lower = torch.linalg.solve_triangular(factor, identity, upper=False)
        self.below.copy_(lower.tril(-1))
        self.log_diagonal.copy_(lower.diagonal().log())
        self.b.copy_(-lower @ mean)


class ZCA(Whitening):
    """y = (x - μ) W, W = U Λ^(-1/2) Uᵀ with U Λ Uᵀ the covariance; log det = -½ Σ log λ_d (NICE §5.1).

    Exact: there is no epsilon. Dequantisation noise is what makes the covariance of images full rank.
    """

    mean: Tensor
    whiten: Tensor
    colour: Tensor
    log_det: Tensor

    def __init__(self, dim: int, *, shrinkage: float = 0.0) -> None:
        super().__init__(dim, shrinkage)
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("whiten", torch.zeros(dim, dim).fill_diagonal_(1))
        self.register_buffer("colour", torch.zeros(dim, dim).fill_diagonal_(1))
        self.register_buffer("log_det", torch.zeros(()))

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return (x - self.mean) @ self.whiten, _per_row(self.log_det, x)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return y @ self.colour + self.mean, _per_row(-self.log_det, y)

    @torch.no_grad()
    def _fit(self, mean: Tensor, covariance: Tensor) -> None:
        eigenvalues, vectors = torch.linalg.eigh(covariance)
        _check_rank(eigenvalues)
        self.mean.copy_(mean)
        self.whiten.copy_(vectors * eigenvalues.rsqrt() @ vectors.mT)
        self.colour.copy_(vectors * eigenvalues.sqrt() @ vectors.mT)
        self.log_det.copy_(-0.5 * eigenvalues.log().sum())


def moments(x: Tensor, rows: int = 8192) -> tuple[Tensor, Tensor]:
    """Return the mean and covariance (divided by N) of the rows of x in float64, computed `rows` at a time."""
    mean = torch.stack([part.double().sum(0) for part in x.split(rows)]).sum(0) / len(x)
    scatter = torch.zeros(len(mean), len(mean)).to(mean)
    for part in x.split(rows):
        centred = part.double() - mean
        scatter += centred.mT @ centred
    return mean, scatter / len(x)


def mean_and_variance(x: Tensor, rows: int = 8192) -> tuple[Tensor, Tensor]:
    """Return the mean and variance (divided by N) of every column of x in float64, ignoring NaN."""
    parts = x.split(rows)
    count = torch.stack([(~part.isnan()).sum(0) for part in parts]).sum(0).clamp_min(1)
    mean = torch.stack([part.double().nansum(0) for part in parts]).sum(0) / count
    return mean, torch.stack([(part.double() - mean).square().nansum(0) for part in parts]).sum(0) / count


def _per_row(value: Tensor, x: Tensor) -> Tensor:
    """Repeat a scalar for every row of x."""
    return value.expand(len(x)).clone()


def _check_rank(eigenvalues: Tensor) -> None:
    """Raise ValueError if some of the sorted eigenvalues are rounding errors next to the largest."""
    dim = len(eigenvalues)
    rank = int((eigenvalues > torch.finfo(torch.float64).eps * dim * eigenvalues[-1]).sum())
    if rank < dim:
        raise ValueError(
            f"whitening needs a covariance of full rank, got rank {rank} of {dim}:"
            " drop constant or linearly dependent columns, or use more rows"
        )
