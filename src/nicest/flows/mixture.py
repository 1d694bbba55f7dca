"""Mixtures of densities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.distributions import constraints

from nicest.flows.chain import Ledger
from nicest.flows.density import Density, as_rows, by_rows, in_support
from nicest.flows.flow import Flow, units_ledger
from nicest.flows.units import check_rows


class Mixture(Density):
    """p(x) = Σ_k w_k p_k(x), an exact likelihood if that of every member is.

    The training objective is the mean of the members' own objectives, so each learns as if it were alone; members
    without trainable parameters are left out. The mean of densities that differ by initialisation and dropout errs
    less than any of them (Lakshminarayanan et al. 2017).

    Flows that share their `units` share the dequantisation noise too. If they also share their `prior`, the mixture has
    latents (h, v): v ~ N(0, 1) chooses the member k in whose interval of [0, 1] Φ(v) lies, and x = f_k⁻¹(h).

    Parameters
    ----------
    members : sequence of Density
    weights : sequence of float, optional
        The w_k; equal by default.
    """

    weights: Tensor

    def __init__(self, members: Sequence[Density], weights: Sequence[float] | None = None) -> None:
        super().__init__()
        if len({member.dim for member in members}) != 1:
            raise ValueError(f"expected members of one dimension, got {sorted({m.dim for m in members}) or 'none'}")
        self.members: Any = nn.ModuleList(members)
        self.captures = all(member.captures for member in members)
        count = len(self.members)
        found = [1 / count] * count if weights is None else list(weights)
        if len(found) != count or min(found) < 0 or abs(sum(found) - 1) > 1e-6:
            raise ValueError(f"expected {count} weights of sum 1, got {found}")
        self.register_buffer("weights", torch.tensor(found))

    @property
    def dim(self) -> int:  # type: ignore[override]
        return self.members[0].dim

    @property
    def support(self) -> constraints.Constraint:
        return self.members[0].support

    @property
    def shares_units(self) -> bool:
        """True if all members are flows with the same units."""
        return self._shares("units")

    @property
    def shares_prior(self) -> bool:
        """True if all members are flows with the same prior."""
        return self._shares("prior")

    def _shares(self, name: str) -> bool:
        first = getattr(self.members[0], name, None)
        return all(isinstance(each, Flow) and getattr(each, name) is first for each in self.members)

    @property
    def units(self) -> Any:
        """The units of the flows, which all share them."""
        if not self.shares_units:
            raise ValueError("the members of this mixture do not share units: build them with the same `Units`")
        return self.members[0].units

    @property
    def prior(self) -> Any:
        """The prior of the flows, which all share it."""
        if not self.shares_prior:
            raise ValueError("the members of this mixture do not share a prior: build them with the same `Prior`")
        return self.members[0].prior

    @property
    def interval_nats(self) -> float:  # type: ignore[override]
        return float(self.members[0].interval_nats)

    def log_prob(self, x: Tensor, context: Tensor | None = None, **options: Any) -> Tensor:
        """Return log Σ_k w_k p_k(x | context); the options are those of the members' `log_prob`."""

        def of_rows(x: Tensor, context: Tensor | None) -> Tensor:
            if not self.shares_units:
                return self._mixed(torch.stack([each.log_prob(x, context, **options) for each in self.members]))
            y = self.units.enter(x, **options)
            nats = self.log_density(y, context) + self.units.log_det(y)
            return in_support(nats, self.units.contains(x), x)

        return by_rows(of_rows, x, context, self.dim)

    def forward(self, x: Tensor, context: Tensor | None = None, **options: Any) -> Tensor:
        """Return the mean of the log-likelihoods of the members that train, (B,)."""
        trained = self.trained
        if not self.shares_units:
            return torch.stack([each(x, context, **options) for each in trained]).mean(0)
        y = self.units.enter(x, **options)
        return torch.stack([each.log_density(y, context) for each in trained]).mean(0) + self.units.log_det(y)

    @property
    def trained(self) -> list[Any]:
        """The members with trainable parameters, or all if there are none."""
        found = [each for each in self.members if any(p.requires_grad for p in each.parameters())]
        return found or list(self.members)

    def log_density(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the log-density of real numbers y = units.enter(x), (B,)."""
        return self._mixed(self.log_densities(y, context))

    def log_densities(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the log-density of y in every member, (K, B)."""
        return torch.stack([each.log_density(y, context) for each in self.members])

    def _mixed(self, each: Tensor) -> Tensor:
        return (each + self.weights.to(each).log()[:, None]).logsumexp(0)

    def terms(self, x: Tensor, context: Tensor | None = None, *, generator: Generator | None = None) -> Ledger:
        """Return the ledger: the units, and the mixture as one term; each (B,)."""
        y = self.units.enter(x, generator=generator)
        return units_ledger(self.units, y) | {"mixture": self.log_density(y, context)}

    def rsample(
        self, n: int, context: Tensor | None = None, *, generator: Generator | None = None, **options: Any
    ) -> Tensor:
        """Draw n rows, with gradients to the parameters of the members."""
        context = None if context is None else as_rows(context, (n,))
        if self.shares_units and self.shares_prior:
            return self.decode(self.sample_latent(n, generator=generator, **options), context)
        u = torch.rand(n, generator=generator, device=self.device)
        draws = [getattr(each, "rsample", each.sample) for each in self.members]
        drawn = [draw(n, context, generator=generator, **options) for draw in draws]
        return torch.stack(drawn)[self._chosen(u), torch.arange(n, device=self.device)]

    @torch.no_grad()
    def sample(self, n: int, context: Tensor | None = None, **options: Any) -> Tensor:
        """Draw n rows without gradients; the options are those of `rsample`."""
        return self.rsample(n, context, **options)

    def initialise(self, rows: Tensor, context: Tensor | None = None) -> None:
        """Initialise every member."""
        for each in self.members:
            each.initialise(rows, context)

    def sample_latent(self, n: int, *, temperature: float = 1.0, generator: Generator | None = None) -> Tensor:
        """Draw n latents (h, v), (n, D + 1)."""
        h = self.prior.rsample(n, temperature=temperature, generator=generator)
        return torch.cat((h, torch.randn(n, 1, generator=generator, dtype=h.dtype, device=h.device)), 1)

    def decode(self, latent: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the stored rows x of latents (h, v)."""
        check_rows(latent, self.dim + 1)
        k = self._chosen(torch.special.ndtr(latent[:, -1]))
        return self.units.leave(self.invert_members(latent[:, :-1], k, context))

    def invert_members(self, h: Tensor, k: Tensor, context: Tensor | None = None) -> Tensor:
        """Return y = f_k⁻¹(h) with the k of each row."""
        y = torch.stack([each.bijection.inverse(h, each.embed(context))[0] for each in self.members], 1)
        return y.gather(1, k[:, None, None].expand(-1, 1, self.dim))[:, 0]

    def _chosen(self, u: Tensor) -> Tensor:
        """Return the member k in whose interval of [0, 1] each u lies."""
        return torch.searchsorted(self.weights.cumsum(0)[:-1].to(u), u.contiguous(), right=True)


def members(density: Density) -> list[Any]:
    """Return the members of a mixture, or the density itself."""
    return list(density.members) if isinstance(density, Mixture) else [density]
