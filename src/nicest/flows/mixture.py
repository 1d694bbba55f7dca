"""The mean of several densities, each with a chain of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nicest.flows.bijection import Bijection
from nicest.flows.flow import Flow
from nicest.flows.priors import Prior
from nicest.flows.units import Units, check_rows


class Mixture(Flow):
    """p(x) = Σ_k w_k p_k(x): K flows under the same units and prior; an exact likelihood, as that of each is.

    In training, `log_prob` is the mean of the log-likelihoods, so that each learns as if it were alone. They differ
    by their initialisation and dropout, and their mean errs less than any of them (Lakshminarayanan et al. 2017).
    All have the same weight, 1/K; unless there is a `forest`, a chain that is fitted and not trained, which comes last:
    `share` is its weight, and the others share the rest.

    A code is (h, v): v ~ N(0, 1) says whose it is, the k in whose part of [0, 1] Φ(v) lies, and x = f_k⁻¹(h). No x has
    a code of its own.
    """

    share: Tensor

    def __init__(
        self, units: Units, chains: Sequence[Bijection], prior: Prior, forest: Bijection | None = None
    ) -> None:
        super().__init__(units, chains[0], prior)
        self.others = nn.ModuleList([*chains[1:], *([] if forest is None else [forest])])
        self.trained = len(chains)
        if forest is not None:
            self.register_buffer("share", torch.zeros(()))

    @property
    def chains(self) -> list[Bijection]:
        return [self.chain, *self.others]

    @property
    def shares(self) -> Tensor:
        """The weights w_k, (K,)."""
        if self.trained == len(self.chains):
            return self.units.scale.new_full((self.trained,), 1 / self.trained)
        share = self.share.to(self.units.scale)
        return torch.cat((((1 - share) / self.trained).expand(self.trained), share[None]))

    def of_each(self, y: Tensor, context: Tensor | None = None, *, all: bool = True) -> Tensor:
        """The log-density of y in each flow, (K, B), or in each that is trained."""
        found = []
        for chain in self.chains if all else self.chains[: self.trained]:
            h, log_det = chain(y, context)
            found.append(self.prior.log_prob(h) + log_det)
        return torch.stack(found)

    def log_density(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        # the prior's mode, since a lowered flow shares the prior of the plain one, which is switched
        if self.prior.training:
            return self.of_each(y, context, all=False).mean(0)
        return (self.of_each(y, context) + self.shares.log()[:, None]).logsumexp(0)

    def code_density(self, y: Tensor) -> Tensor:
        """The mean over the flows of log p_H(f_k(y)), (B,)."""
        return self.shares @ torch.stack([self.prior.log_prob(chain(y)[0]) for chain in self.chains])

    def encode(self, x: Tensor, context: Tensor | None = None, *, noise: bool | Tensor = True) -> Tensor:
        raise ValueError(f"a mixture of {len(self.chains)} flows has no latent coordinates: each of them has its own")

    @property
    def code_dim(self) -> int:
        return self.dim + 1

    def invert(self, h: Tensor, context: Tensor | None = None) -> Tensor:
        check_rows(h, self.code_dim)
        return self.of_members(h[:, :-1], self.chosen(torch.special.ndtr(h[:, -1])), context)

    def chosen(self, u: Tensor) -> Tensor:
        """The k in whose part of [0, 1] each number u lies; with u drawn from [0, 1], draws of k."""
        return torch.searchsorted(self.shares.cumsum(0)[:-1].to(u), u.contiguous(), right=True)

    def of_members(self, h: Tensor, k: Tensor, context: Tensor | None = None) -> Tensor:
        """y = f_k⁻¹(h), with the k of each row."""
        y = torch.stack([chain.inverse(h, context)[0] for chain in self.chains], 1)
        return y.gather(1, k[:, None, None].expand(-1, 1, self.dim))[:, 0]

    def code_log_prob(self, h: Tensor) -> Tensor:
        v = h[:, -1]
        return self.prior.log_prob(h[:, :-1]) - 0.5 * (v.square() + math.log(2 * math.pi))

    def code_of(self, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """(f_k(y), v), its k drawn by how probable each flow makes y."""
        h, log_det = map(torch.stack, zip(*(chain(y) for chain in self.chains), strict=True))
        shares = self.shares
        each = torch.stack([self.prior.log_prob(one) for one in h]) + log_det + shares.log()[:, None]
        u = torch.rand(2, len(y), generator=generator, dtype=y.dtype, device=y.device)
        k = (each.softmax(0).cumsum(0) < u[0]).sum(0).clamp_max(len(h) - 1)
        below = shares.cumsum(0) - shares
        v = torch.special.ndtri(below[k] + shares[k] * u[1]).clamp(-9, 9)  # whose share of the draws is that of all
        return torch.cat((h[k, torch.arange(len(y), device=y.device)], v[:, None]), 1)

    def draw_latent(self, n: int, *, generator: torch.Generator | None = None, **options: Any) -> Tensor:
        h = super().draw_latent(n, generator=generator, **options)
        v = torch.randn(n, 1, generator=generator, dtype=h.dtype, device=h.device)
        return torch.cat((h, v), 1)

    def terms(self, x: Tensor, context: Tensor | None = None) -> dict[str, Tensor]:
        y = self.enter(x)
        density = self.log_density(y, context)
        return self.units_of_ledger(y, density) | {"mixture": density}
