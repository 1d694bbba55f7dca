"""The variational auto-encoder as a NICE over data and noise (NICE App. C), and NICE inside it (NICE §6)."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from nicest.flows.bijection import Bijection
from nicest.flows.chain import Chain, Ledger, ledger
from nicest.flows.coupling import Coupling, Partition
from nicest.flows.density import DensityInUnits
from nicest.flows.flow import Flow, units_ledger
from nicest.flows.laws import Affine, Law
from nicest.flows.noise import batch_size, select
from nicest.flows.priors import Gaussian
from nicest.flows.units import Noise, Units
from nicest.flows.within import Within

ENCODER_BOUND = 8.0  # of |s|, which an encoder has no reason to reach


@dataclass(frozen=True)
class Standardise(Law):
    """g(a; b) = (a - b2) ⊙ exp(-l(b1)), b = (b1, b2); log det = -Σ l(b1): an affine law that subtracts first.

    It is ξ = (x - f(z)) / σ of NICE App. C: b2 is the mean of a, l(b1) = log σ. DIFFERS: l(b1) = floor +
    softplus(b1 + c), with c such that l(0) = 0, is about b1 well above the floor and keeps σ > exp(floor). Without it
    the likelihood of a pixel that the network predicts exactly has no maximum, and one held-out pixel that differs
    from its prediction by r costs r² / 2σ² nats.
    """

    floor: float = -4.0
    size = 2

    def __post_init__(self) -> None:
        if not self.floor < 0:
            raise ValueError(f"expected a floor below 0, got {self.floor}")

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        log_scale = self.log_scale(b[..., 0])
        return (a - b[..., 1]) * torch.exp(-log_scale), -log_scale

    def inverse(self, y: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        log_scale = self.log_scale(b[..., 0])
        return b[..., 1] + y * log_scale.exp(), log_scale

    def log_scale(self, b1: Tensor) -> Tensor:
        return self.floor + functional.softplus(b1 + math.log(math.expm1(-self.floor)))


class VAE(DensityInUnits):
    """A variational auto-encoder, written as a NICE over the pair (x, ε) (NICE App. C).

        z0 = μ(x) + exp(s(x)) ⊙ ε      encoder: an affine coupling that reads x and changes ε
        z  = f(z0; m(x))               posterior: more couplings, so that q(z|x) is a flow; absent, z = z0
        ξ  = (x - μ(z)) / σ(z)         decoder: an affine coupling that reads z and changes x
        h  = g(z)                      prior: more couplings, so that p(z) is a flow; absent, h = z

    `joint` is this flow, with (ξ, h) ~ N(0, I). The two densities of a VAE and its noise ε ~ N(0, I) are in it:

        log p(x, ε) = log p(ξ) - Σ log σ(z) + log p(h) + log |det dg/dz| + log |det dz/dε|
                    = log p(x|z)            + log p(z)                   + log p(ε) - log q(z|x)

    so log p(x, ε) - log p(ε) is the SGVB estimate of the variational bound. With neither f nor g this is App. C; they
    are the "more complex family of approximate posterior distributions" and the "richer family of priors" of NICE §6,
    and here nothing but a longer chain. f takes a `summary` m(x), because the same f for every x would be a prior,
    g = f before a decoder of f(z), and no richer posterior.

    `encoder` maps x to 2 · latent_dim numbers, s and μ of each latent component in turn; `decoder` maps z to 2 · dim
    numbers, log σ and μ of each component of x in turn, with log σ kept above `floor` (see `Standardise`). The paper's
    one σ is a decoder that returns log σ as one parameter, repeated.

    `log_prob` is the bound for one draw of ε, so that `nicest.fit` trains it like a flow.
    """

    def __init__(
        self,
        units: Units,
        latent_dim: int,
        encoder: nn.Module,
        decoder: nn.Module,
        *,
        posterior: Bijection | None = None,
        summary: nn.Module | None = None,
        prior: Bijection | None = None,
        floor: float = -4.0,
    ) -> None:
        if summary is not None and posterior is None:
            raise ValueError("a summary of x is for the couplings of a posterior: give both, or neither")
        super().__init__()
        both = units.dim + latent_dim
        reads_x = Partition(range(units.dim), both)
        layers: dict[str, Bijection] = {"encoder": Coupling(reads_x, Affine(ENCODER_BOUND), encoder)}
        if posterior is not None:
            layers["posterior"] = Within(reads_x, posterior, summary)
        layers["decoder"] = Coupling(reads_x.swap(), Standardise(floor), decoder)
        if prior is not None:
            layers["latent_prior"] = Within(reads_x, prior)
        self.units, self.bijection, self.prior = units, Chain(layers), Gaussian(both)
        self.noise, self.latent_dim = Gaussian(latent_dim), latent_dim

    @property
    def joint(self) -> Flow:
        """The flow of the pair (y, ε)."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # App. C is two couplings: z need not depend on ξ
            units = Units.continuous(self.prior.dim, standardise=False).to(self.units.scale)
            return Flow(units, self.bijection, self.prior)

    def bound(self, y: Tensor, noise: Tensor | None = None, generator: Generator | None = None) -> Tensor:
        """Return log p(y, ε) - log p(ε) for one ε ~ N(0, I) of each row, (B,): a lower bound of log p(y) in the mean.

        See NICE App. C.
        """
        noise = self._draw_noise(len(y), generator) if noise is None else noise
        h, log_det = self.bijection(torch.cat((y, noise), dim=-1))
        return self.prior.log_prob(h) + log_det - self.noise.log_prob(noise)

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor | None = None, *, noise: Noise = True, generator: Generator | None = None
    ) -> Tensor:
        """Return the bound for one ε of each row, in nats of the space in which x is stored."""
        if context is not None:
            raise ValueError("expected no context: this VAE is not conditional")
        y = self.units.enter(x, noise=noise, generator=generator)
        return self.bound(y, generator=generator) + self.units.log_det(y)

    def terms(self, x: Tensor, context: Tensor | None = None, *, generator: Generator | None = None) -> Ledger:
        """Return the ledger of the bound; `noise` is -log p(ε)."""
        y = self.units.enter(x, generator=generator)
        noise = self._draw_noise(len(y), generator)
        h, terms = ledger(self.bijection, torch.cat((y, noise), -1))
        last = {"noise": -self.noise.log_prob(noise), "prior": self.prior.log_prob(h)}
        return units_ledger(self.units, y) | terms | last

    def initialise(self, rows: Tensor, context: Tensor | None = None) -> None:
        """Fit the units to rows, and layers of the posterior and the prior to what reaches them."""
        self.units.fit_rows(rows)
        y = self.units.enter(rows.to(self.device))
        self.bijection.initialise(torch.cat((y, self._draw_noise(len(y))), -1))

    def importance_bound(self, y: Tensor, draws: int) -> Tensor:
        """Return log 1/k Σ_k p(y, ε_k) / p(ε_k), (B,): a bound that rises to log p(y) with the number of draws k."""
        return torch.stack([self.bound(y) for _ in range(draws)]).logsumexp(0) - math.log(draws)

    def decode(self, h: Tensor, context: Tensor | None = None) -> Tensor:
        """Return x from latents (ξ, h)."""
        return self.units.leave(self.bijection.inverse(h, context)[0][:, : self.dim])

    def rsample(
        self, n: int, context: Tensor | None = None, *, temperature: float = 1.0, generator: Generator | None = None
    ) -> Tensor:
        """Draw n rows x, with gradients to the parameters."""
        return self.decode(self.prior.rsample(n, temperature=temperature, generator=generator), context)

    def means(self, n: int, generator: Generator | None = None) -> Tensor:
        """Draw n latents z and return the means of p(x|z), without its noise."""
        h = self.prior.rsample(n, generator=generator).detach()
        h[:, : self.dim] = 0
        return self.decode(h)

    def _draw_noise(self, n: int, generator: Generator | None = None) -> Tensor:
        return select(self.noise.rsample(batch_size(n), generator=generator))
