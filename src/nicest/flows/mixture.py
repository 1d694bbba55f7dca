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
from nicest.flows.units import Units


class Mixture(Flow):
    """p(x) = 1/K Σ_k p_k(x): K flows under the same units and prior; an exact likelihood, as that of each is.

    In training, `log_prob` is the mean of the K log-likelihoods, so that each learns as if it were alone. They differ
    by their initialisation and dropout, and their mean errs less than any of them (Lakshminarayanan et al. 2017).
    """

    def __init__(self, units: Units, chains: Sequence[Bijection], prior: Prior) -> None:
        super().__init__(units, chains[0], prior)
        self.others = nn.ModuleList(chains[1:])

    @property
    def chains(self) -> list[Bijection]:
        return [self.chain, *self.others]

    def log_density(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        found = []
        for chain in self.chains:
            h, log_det = chain(y, context)
            found.append(self.prior.log_prob(h) + log_det)
        each = torch.stack(found)
        # the prior's mode, since a lowered flow shares the prior of the plain one, which is switched
        return each.mean(0) if self.prior.training else each.logsumexp(0) - math.log(len(found))

    def encode(self, x: Tensor, context: Tensor | None = None, *, noise: bool | Tensor = True) -> Tensor:
        raise ValueError(f"a mixture of {len(self.chains)} flows has no latent coordinates: each of them has its own")

    def decode(self, h: Tensor, context: Tensor | None = None) -> Tensor:
        """x = f_k⁻¹(h), with a k drawn for each row."""
        return self.drawn(h, context, None)

    def drawn(self, h: Tensor, context: Tensor | None, generator: torch.Generator | None) -> Tensor:
        k = torch.randint(len(self.chains), (len(h),), generator=generator, device=h.device)
        return self.of_members(h, k, context)

    def of_members(self, h: Tensor, k: Tensor, context: Tensor | None = None) -> Tensor:
        """x = f_k⁻¹(h), with the k of each row."""
        y = torch.stack([chain.inverse(h, context) for chain in self.chains], 1)
        return self.units.leave(y.gather(1, k[:, None, None].expand(-1, 1, self.dim))[:, 0])

    def terms(self, x: Tensor, context: Tensor | None = None) -> dict[str, Tensor]:
        y = self.enter(x)
        density = self.log_density(y, context)
        return self.units_of_ledger(y, density) | {"mixture": density}

    def sample_and_log_prob(
        self, n: int, context: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        x: Any = self.rsample(n, context, generator=generator)
        return x, self.log_prob(x, context)
