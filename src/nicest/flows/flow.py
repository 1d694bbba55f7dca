"""The model: units, a chain of bijections, and a factorial prior (NICE eq. 1 and 2)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from nicest.flows.bijection import Bijection
from nicest.flows.chain import Chain
from nicest.flows.coupling import Coupling
from nicest.flows.linear import Whitening, mean_and_variance, moments
from nicest.flows.priors import Prior
from nicest.flows.units import Units

Shape = torch.Size | list[int] | tuple[int, ...]
_ONE_DRAW = torch.Size()
FIT_ROWS = 5000  # rows that a layer without a closed form is fitted to


class Flow(nn.Module):
    """log p(x) = log p_H(f(y)) + log |det df/dy| + log |dy/dx|, y = units.enter(x) (NICE eq. 1).

    `units` go from stored data to real numbers, `chain` is the paper's encoder f, `prior` is p_H. Log-likelihoods are
    in nats of the space x lives in. `forward` is `log_prob`, so that a flow works under compile and data parallelism.
    """

    def __init__(self, units: Units, chain: Bijection, prior: Prior) -> None:
        super().__init__()
        if units.dim != prior.dim:
            raise ValueError(f"expected a prior of {units.dim} dimensions, as the units have, got {prior.dim}")
        self.units, self.chain, self.prior = units, chain, prior
        couplings = sum(isinstance(layer, Coupling) for layer in layers_of(chain))
        if 0 < couplings < 3:
            warnings.warn(
                f"{couplings} coupling layer(s): at least three are needed before every dimension can influence"
                " every other (NICE §3.2)",
                stacklevel=2,
            )

    @property
    def dim(self) -> int:
        return self.units.dim

    @property
    def device(self) -> torch.device:
        return self.units.scale.device

    @property
    def units_log_det(self) -> Tensor | float:
        """log |dy/dx|, of the dimensions that the prior scores."""
        return sum(self.units.terms(self.prior.scored).values())

    def enter(self, x: Tensor, *, noise: bool = True) -> Tensor:
        """What the chain is given for rows x."""
        return self.units.enter(x, noise=noise)

    def encode(self, x: Tensor, context: Tensor | None = None, *, noise: bool = True) -> Tensor:
        """h = f(y); without noise, of the middle of every level."""
        h: Tensor = self.chain(self.enter(x, noise=noise), context)[0]
        return h

    def decode(self, h: Tensor, context: Tensor | None = None) -> Tensor:
        """x = f⁻¹(h), in whole levels where the data has levels."""
        return self.units.leave(self.chain.inverse(h, context))

    def log_prob(self, x: Tensor, context: Tensor | None = None, *, noise: bool = True) -> Tensor:
        """log p(x), (B,) (NICE eq. 1); of discrete data a bound in the mean over the noise, see `Units`."""
        return self.log_density(self.enter(x, noise=noise), context) + self.units_log_det

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        return self.log_prob(*inputs, **options)

    def log_density(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        """The log-density of real numbers y = units.enter(x), (B,), in nats of y."""
        h, log_det = self.chain(y, context)
        return self.prior.log_prob(h) + log_det

    def terms(self, x: Tensor, context: Tensor | None = None) -> dict[str, Tensor]:
        """The ledger of `log_prob`: units, the log-det of every layer by name, and the prior; each (B,)."""
        h, terms = self.chain.walk(self.enter(x), context)
        units = {name: h.new_zeros(len(h)) + term for name, term in self.units.terms(self.prior.scored).items()}
        found = units | terms | {"prior": self.prior.log_prob(h)}
        if len(found) < len(units) + len(terms) + 1:
            raise ValueError("a layer has the name of another term of the ledger: 'prior', or one of the units")
        return found

    def rsample(
        self,
        n: int,
        context: Tensor | None = None,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """n draws of x = f⁻¹(h), h ~ p_H, with gradients to the parameters (NICE eq. 2).

        Discrete data comes in whole steps, through which no gradient flows.
        """
        return self.decode(self.prior.rsample(n, temperature=temperature, generator=generator), context)

    @torch.no_grad()
    def sample(self, *inputs: Any, **options: Any) -> Tensor:
        """What `rsample` gives, without gradients."""
        return self.rsample(*inputs, **options)

    def sample_and_log_prob(
        self, n: int, context: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """n draws of x, as `rsample` gives them, with log p(x) of each; one pass through the chain.

        Only discrete data takes a second pass: its log-probability is of the whole step, not of the y that was drawn.
        """
        h = self.prior.rsample(n, generator=generator)
        y, log_det = self.chain.inverse_and_log_det(h, context)
        x = self.units.leave(y)
        if self.units.discrete:
            return x, self.log_prob(x, context)
        return x, self.prior.log_prob(h) + log_det + self.units_log_det

    @torch.no_grad()
    def fit_constants(self, rows: Tensor) -> None:
        """Fit to training rows what is fitted before training and then held: standardisation, marginals, whitening.

        Mean and covariance are carried through the layers in closed form, in float64, dequantisation noise included;
        behind a layer that cannot carry them they are counted anew.
        """
        training = [module for module in self.modules() if module.training]
        self.eval()  # dropout is for training
        if self.units.standardise:
            self.units.fit(*mean_and_variance(rows))
        before: list[Bijection] = []

        def reached(part: Tensor) -> Tensor:
            y = self.units.enter(part.to(self.device))
            for layer in before:
                y = layer(y)[0]
            return y

        def carried() -> tuple[Tensor, Tensor] | None:
            known: tuple[Tensor, Tensor] | None = self.units.carry(*moments(rows))
            for layer in before:
                known = known and layer.carry(*known)
            return known

        for layer in layers_of(self.chain):
            if isinstance(layer, Whitening):
                layer.fit_moments(*(carried() or moments(rows, of=reached)))
            elif type(layer).fit is not Bijection.fit:
                layer.fit(reached(rows[:: -(-len(rows) // FIT_ROWS)]))
            before.append(layer)
        for module in training:
            module.training = True

    def to_distribution(self, context: Tensor | None = None) -> Distribution:
        """The flow as a `torch.distributions.Distribution` that checks its arguments."""
        return FlowDistribution(self, context)


def layers_of(chain: Bijection) -> Iterator[Bijection]:
    """The layers of a chain, and of the chains within it, in the order data meets them."""
    if not isinstance(chain, Chain):
        yield chain
        return
    for layer in chain:
        yield from layers_of(layer)


class FlowDistribution(Distribution):
    """A flow as `torch.distributions` has it: event shape (D,), no batch shape."""

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012

    def __init__(self, flow: Flow, context: Tensor | None = None) -> None:
        self.flow, self.context = flow, context
        self.has_rsample = not flow.units.discrete
        super().__init__(event_shape=torch.Size((flow.dim,)), validate_args=True)

    @property
    def support(self) -> constraints.Constraint:
        return self.flow.units.support

    def log_prob(self, value: Tensor) -> Tensor:
        self._validate_sample(value)
        rows = value.reshape(-1, value.shape[-1])
        return self.flow.log_prob(rows, self._context(len(rows))).reshape(value.shape[:-1])

    def rsample(self, sample_shape: Shape = _ONE_DRAW) -> Tensor:
        if not self.has_rsample:
            raise NotImplementedError("this flow gives whole steps, through which no gradient flows: use sample")
        return self._draw(sample_shape)

    def sample(self, sample_shape: Shape = _ONE_DRAW) -> Tensor:
        with torch.no_grad():
            return self._draw(sample_shape)

    def _draw(self, sample_shape: Shape) -> Tensor:
        n = torch.Size(sample_shape).numel()
        return self.flow.rsample(n, self._context(n)).reshape(*sample_shape, self.flow.dim)

    def _context(self, n: int) -> Tensor | None:
        return None if self.context is None else self.context.expand(n, -1)
