"""Factor analysis with missing cells: the Gaussian that the table model starts from."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

ITERATIONS, MOST_ROWS = 60, 4_000
RANKS = (0, 1, 2, 4, 8, 16)  # numbers of factors that are tried
LEAST_NOISE = 1e-4  # variance of a variable, of 1, that factors never explain


class Factors(nn.Module):
    """x = loadings f + noise, f ~ N(0, I_r), noise ~ N(0, diag), for V standardised variables.

    The conditional distribution given any observed variables needs only r x r matrices:
    f | x_O ~ N(M^-1 sum_O l_i x_i / noise_i, M^-1), M = I + sum_O l_i l_i^T / noise_i.
    """

    loadings: Tensor
    noise: Tensor

    def __init__(self, variables: int, rank: int = max(RANKS)) -> None:
        super().__init__()
        self.register_buffer("loadings", torch.zeros(variables, min(rank, max(variables - 1, 0))))
        self.register_buffer("noise", torch.ones(variables))

    def forward(self, x: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Return conditional means and standard deviations of all variables, (..., V), given the observed ones.

        Observed variables, too, get the mean and standard deviation of what the factors say of them.
        """
        mean, covariance = self.posterior(x, observed)
        spread = torch.einsum("vr,...rs,vs->...v", self.loadings, covariance, self.loadings)
        return mean @ self.loadings.mT, torch.sqrt(self.noise + spread)

    def posterior(self, x: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean (..., r) and covariance (..., r, r) of the factors given the observed variables."""
        rank = self.loadings.shape[1]
        scaled = self.loadings / self.noise[:, None]
        outer = (self.loadings[:, :, None] * scaled[:, None]).flatten(1)
        precision = (observed @ outer).unflatten(-1, (rank, rank)) + torch.eye(rank).to(x)
        covariance = torch.cholesky_inverse(torch.linalg.cholesky(precision))
        return ((x * observed) @ scaled)[..., None, :].matmul(covariance)[..., 0, :], covariance

    @torch.no_grad()
    def fit(self, x: Tensor, observed: Tensor) -> None:
        """Fit to rows (N, V) by expectation maximisation; the number of factors is chosen on a fifth of the rows."""
        rows = slice(None, None, -(-len(x) // MOST_ROWS))
        x, observed, dtype = x[rows].double(), observed[rows].double(), self.noise.dtype
        dtype = self.loadings.dtype
        self.double()
        held_out = torch.arange(len(x)) % 5 == 0
        most = self.loadings.shape[1]
        best, found = -math.inf, 0
        for rank in sorted({min(each, most) for each in RANKS}):
            self._maximise(x[~held_out], observed[~held_out], rank)
            nats = float(self.log_prob(x[held_out], observed[held_out]).mean())
            if nats > best:
                best, found = nats, rank
        self._maximise(x, observed, found)
        self.to(dtype)

    def _maximise(self, x: Tensor, observed: Tensor, rank: int) -> None:
        """Fit `rank` factors; the other loadings are 0."""
        count = observed.sum(0).clamp_min(1)
        square = (observed * x**2).sum(0) / count
        self.loadings.zero_()
        self.noise.copy_(square.clamp_min(LEAST_NOISE))
        if not rank:
            return
        covariance = (x * observed).mT @ (x * observed) / (observed.mT @ observed).clamp_min(1)
        values, vectors = torch.linalg.eigh(covariance)
        self.loadings[:, :rank] = vectors[:, -rank:] * values[-rank:].clamp_min(0.01).sqrt() * 0.9
        self.noise.copy_((square - (self.loadings**2).sum(1)).clamp_min(0.05))
        for _ in range(ITERATIONS):
            mean, posterior = self.posterior(x, observed)
            second = (posterior + mean[:, :, None] * mean[:, None])[:, :rank, :rank]
            cross = (x * observed).mT @ mean[:, :rank]  # (V, r)
            # a ridge of one row keeps loadings of few rows small
            gram = torch.einsum("nv,nrs->vrs", observed, second) + torch.eye(rank).to(x)
            self.loadings[:, :rank] = torch.linalg.solve(gram, cross)
            explained = (self.loadings[:, :rank] * cross).sum(1) / count
            self.noise.copy_((square - explained).clamp_min(LEAST_NOISE))

    def log_prob(self, x: Tensor, observed: Tensor) -> Tensor:
        """Return the log-density of the observed variables of rows, (N,)."""
        covariance = self.loadings @ self.loadings.mT + self.noise.diag()
        # hidden variables become independent unit Gaussians at 0
        both = observed[:, :, None] * observed[:, None]
        full = covariance * both + torch.diag_embed(1 - observed)
        factor = torch.linalg.cholesky(full)
        z = torch.linalg.solve_triangular(factor, (x * observed)[..., None], upper=False)[..., 0]
        log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -0.5 * (z**2).sum(-1) - log_det - 0.5 * math.log(2 * math.pi) * observed.sum(-1)
