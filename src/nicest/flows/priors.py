"""Factorial priors p_H(h) = Π_d p(h_d) (NICE §3.4)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from nicest.flows.units import check_rows


class Prior(nn.Module, ABC):
    """p_H(h) = Π_d p((h_d - loc_d) / scale_d) / scale_d, p one standard law (NICE §3.4).

    loc = 0 and scale = 1, unless `learned`: then both are parameters of every dimension, trained with the flow
    (NICE §2, footnote).
    """

    loc: Tensor
    log_scale: Tensor
    standard_deviation: float  # of the standard law

    def __init__(self, dim: int, *, learned: bool = False) -> None:
        super().__init__()
        self.dim, self.learned = dim, learned
        for name in ("loc", "log_scale"):
            if learned:
                self.register_parameter(name, nn.Parameter(torch.zeros(dim)))
            else:
                self.register_buffer(name, torch.zeros(()), persistent=False)

    @abstractmethod
    def standard_log_prob(self, e: Tensor) -> Tensor:
        """Return Σ_d log p(e_d), (B,)."""

    @abstractmethod
    def standard_sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Draw from p, in the dtype and on the device of the prior."""

    def standard_cdf(self, e: Tensor) -> Tensor:
        """Return P(E <= e) elementwise, for E of the standard law; only some tasks need it."""
        raise NotImplementedError(f"{type(self).__name__} has no standard_cdf")

    def standard_quantile(self, p: Tensor) -> Tensor:
        """Return the inverse of `standard_cdf`; only some tasks need it."""
        raise NotImplementedError(f"{type(self).__name__} has no standard_quantile")

    def quantile(self, p: Tensor) -> Tensor:
        """Return the h, (..., D), below which a component is with probability p."""
        return self.loc + self.log_scale.exp() * self.standard_quantile(p)

    def log_prob(self, h: Tensor) -> Tensor:
        """Return log p_H(h), (B,)."""
        check_rows(h, self.dim)
        if not self.learned:
            return self.standard_log_prob(h)
        e = (h - self.loc) * torch.exp(-self.log_scale)
        return self.standard_log_prob(e) - self.log_scale.sum()

    def rsample(self, n: int, *, temperature: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """Draw n latents, (n, D), with gradients to loc and scale; `temperature` multiplies the scale."""
        e = self.standard_sample((n, self.dim), generator)
        return self.loc + temperature * self.log_scale.exp() * e

    @property
    def mode(self) -> Tensor:
        return self.loc.detach().expand(self.dim)

    def extra_repr(self) -> str:
        return f"{self.dim}, learned={self.learned}"


class Gaussian(Prior):
    """log p(e) = -½ (e² + log 2π) (NICE §3.4)."""

    standard_deviation = 1.0

    def standard_log_prob(self, e: Tensor) -> Tensor:
        return -0.5 * (e.square().sum(-1) + self.dim * math.log(2 * math.pi))

    def standard_sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=self.loc.dtype, device=self.loc.device)

    def standard_cdf(self, e: Tensor) -> Tensor:
        return 0.5 * torch.special.erfc(-e / math.sqrt(2))  # torch's ndtr is 1 + erf, which rounds the tail away

    def standard_quantile(self, p: Tensor) -> Tensor:
        return torch.special.ndtri(p)


class Logistic(Prior):
    """log p(e) = -log(1 + exp e) - log(1 + exp -e) (NICE §3.4).

    Computed as 2 (log sigmoid(e) - e/2), which overflows nowhere and is exact in the tails.
    """

    standard_deviation = math.pi / math.sqrt(3)

    def standard_log_prob(self, e: Tensor) -> Tensor:
        return 2 * torch.sub(functional.logsigmoid(e), e, alpha=0.5).sum(-1)

    def standard_sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        u = torch.rand(shape, generator=generator, dtype=self.loc.dtype, device=self.loc.device)
        eps = torch.finfo(u.dtype).eps  # u is a multiple of eps/2: 0 stands for [0, eps/2), of middle eps/4
        return torch.logit(u.clamp(eps / 4, 1 - eps / 2))

    def standard_cdf(self, e: Tensor) -> Tensor:
        return torch.sigmoid(e)

    def standard_quantile(self, p: Tensor) -> Tensor:
        return torch.logit(p)
