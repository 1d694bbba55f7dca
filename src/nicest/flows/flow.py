"""The model: units, a chain of bijections, and a factorial prior (NICE eq. 1 and 2)."""

from __future__ import annotations

import warnings
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from nicest.flows.bijection import Bijection
from nicest.flows.chain import Chain, flattened, initialises, leaves, ledger
from nicest.flows.coupling import Coupling
from nicest.flows.linear import Whitening
from nicest.flows.priors import PartPrior, Prior
from nicest.flows.units import Units

Shape = torch.Size | list[int] | tuple[int, ...]
_ONE_DRAW = torch.Size()
FIT_ROWS = 5000  # rows that layers behind a coupling are initialised with, at most
FIT_NUMBERS, FEWEST_FIT_ROWS = 500_000, 256


class Flow(nn.Module):
    """log p(x) = log p_H(f(y)) + log |det df/dy| + log |dy/dx|, y = units.enter(x) (NICE eq. 1).

    `units` go from stored data to real numbers, `chain` is the paper's encoder f, `prior` is p_H. Log-likelihoods are
    in nats of the space x lives in. `forward` is `log_prob`, so that a flow works under compile and data parallelism.

    Under a `PartPrior` the flow is of x given c: `log_prob(x, given=c)` and `sample(n, given=c)`. Inside, and in
    training, both stand side by side in one row, [c | x].
    """

    def __init__(self, units: Units, chain: Bijection, prior: Prior) -> None:
        super().__init__()
        if units.dim != prior.dim:
            raise ValueError(f"expected a prior of {units.dim} dimensions, as the units have, got {prior.dim}")
        self.units, self.chain, self.prior = units, chain, prior
        couplings = sum(isinstance(layer, Coupling) for layer in leaves(chain))
        if 0 < couplings < 3 and prior.scored is None:
            warnings.warn(
                f"{couplings} coupling layer(s): at least three are needed before every dimension can influence"
                " every other (NICE §3.2)",
                stacklevel=2,
            )

    @property
    def dim(self) -> int:
        return self.units.dim

    @property
    def chains(self) -> list[Bijection]:
        """Its chain; a `Mixture` has several."""
        return [self.chain]

    @property
    def code_dim(self) -> int:
        """How many numbers a code h has: D, and one more in a `Mixture`."""
        return self.dim

    @property
    def device(self) -> torch.device:
        return self.units.scale.device

    @property
    def units_log_det(self) -> Tensor | float:
        """log |dy/dx|, of the dimensions that the prior scores."""
        return sum(self.units.terms(self.prior.scored).values())

    def enter(self, x: Tensor, *, noise: bool | Tensor = True) -> Tensor:
        """What the chain is given for rows x."""
        return self.units.enter(x, noise=noise)

    def encode(self, x: Tensor, context: Tensor | None = None, *, noise: bool | Tensor = True) -> Tensor:
        """h = f(y); without noise, of the middle of every level."""
        h: Tensor = self.chain(self.enter(x, noise=noise), context)[0]
        return h

    def decode(self, h: Tensor, context: Tensor | None = None) -> Tensor:
        """x = f⁻¹(h), in whole levels where the data has levels."""
        return self.units.leave(self.invert(h, context))

    def invert(self, h: Tensor, context: Tensor | None = None) -> Tensor:
        """y = f⁻¹(h), the real numbers that the units make x of."""
        return self.chain.inverse(h, context)[0]

    def code_log_prob(self, h: Tensor) -> Tensor:
        """log p_H(h), (B,), of codes as `draw_latent` gives them."""
        return self.prior.log_prob(h)

    def log_prob(
        self, x: Tensor, context: Tensor | None = None, *, noise: bool | Tensor = True, given: Tensor | None = None
    ) -> Tensor:
        """log p(x), (...) for x (..., D) (NICE eq. 1), or log p(x | c) for a condition c that is `given`.

        Of discrete data it is a bound in the mean over the noise, see `Units`.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"expected a tensor, got {type(x).__name__}: torch.as_tensor(x) makes one")
        if given is not None:
            x = self.beside(given, x)
        elif isinstance(self.prior, PartPrior) and x.shape[-1:] != (self.dim,):
            raise ValueError(f"expected x with its condition, {self.prior.of}; got no condition: give it as given=")
        if x.ndim == 2 and (context is None or context.ndim > 1):
            y = self.enter(x, noise=noise)
            return self.log_density(y, context) + self.units_log_det + self.units.local(y, self.prior.scored)
        if x.ndim == 0:
            raise ValueError(f"expected x of {self.dim} numbers, got a scalar")
        context = context if context is None else as_rows(context, x.shape[:-1])
        return self.log_prob(as_rows(x, x.shape[:-1]), context, noise=noise).reshape(x.shape[:-1])

    @property
    def conditional_prior(self) -> PartPrior:
        """The prior, of a flow of x given a condition."""
        if not isinstance(self.prior, PartPrior):
            raise ValueError("expected no condition: the prior of this flow is of all dimensions, not a PartPrior")
        return self.prior

    def beside(self, given: Tensor, x: Tensor) -> Tensor:
        """Rows [c | x] (..., D) of x and the condition c that it is given; they are broadcast against each other."""
        part = self.conditional_prior.partition
        if (got := (x.shape[-1:], given.shape[-1:])) != ((len(part.i2),), (len(part.i1),)):
            counts = " given ".join(str(each[0]) if each else "a scalar" for each in got)
            raise ValueError(f"expected x with its condition, {self.conditional_prior.of}; got {counts}")
        shape = torch.broadcast_shapes(x.shape[:-1], given.shape[:-1])
        return part.merge(as_rows(given, shape), as_rows(x, shape)).reshape(*shape, self.dim)

    def code_of(self, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A code that y = units.enter(x) may have been drawn by: f(y), the only one but in a `Mixture`."""
        h: Tensor = self.chain(y)[0]
        return h

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        return self.log_prob(*inputs, **options)

    def log_density(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        """The log-density of real numbers y = units.enter(x), (B,), in nats of y."""
        h, log_det = self.chain(y, context)
        return self.prior.log_prob(h) + log_det

    def code_density(self, y: Tensor) -> Tensor:
        """log p_H(f(y)), (B,): how probable the code of y is, whatever units or spikes y comes in; no log-det."""
        return self.prior.log_prob(self.chain(y)[0])

    def terms(self, x: Tensor, context: Tensor | None = None) -> dict[str, Tensor]:
        """The ledger of `log_prob`: units, the log-det of every layer by name, and the prior; each (B,)."""
        y = self.enter(x)
        h, terms = ledger(self.chain, y, context)
        units = self.units_of_ledger(y, h)
        found = units | terms | {"prior": self.prior.log_prob(h)}
        if len(found) < len(units) + len(terms) + 1:
            raise ValueError("a layer has the name of another term of the ledger: 'prior', or one of the units")
        return found

    def units_of_ledger(self, y: Tensor, like: Tensor) -> dict[str, Tensor]:
        """The terms of the units, by name, each (B,)."""
        of_units = self.units.terms(self.prior.scored)
        if isinstance(local := self.units.local(y, self.prior.scored), Tensor):
            of_units["atoms"] = local
        return {name: like.new_zeros(len(like)) + term for name, term in of_units.items()}

    def rsample(
        self,
        n: int,
        context: Tensor | None = None,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        given: Tensor | None = None,
    ) -> Tensor:
        """n draws of x = f⁻¹(h), h ~ p_H, with gradients to the parameters (NICE eq. 2).

        A condition that is `given` is one for all draws, (C,), or one for each, (n, C). Discrete data comes in whole
        steps, through which no gradient flows.
        """
        h = self.draw_latent(n, temperature=temperature, generator=generator, given=given)
        x = self.decode(h, context)
        return x if given is None else self.conditional_prior.partition.split(x)[1]

    def draw_latent(
        self,
        n: int,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        given: Tensor | None = None,
    ) -> Tensor:
        """n draws h ~ p_H, (n, code_dim), beside the condition that is `given`, if any."""
        if given is None:
            return self.prior.rsample(n, temperature=temperature, generator=generator)
        if given.shape[:-1] not in ((), (1,), (n,)):
            raise ValueError(f"expected one condition, or one for each of {n} draws; got {tuple(given.shape[:-1])}")
        prior, part = self.conditional_prior.prior, self.conditional_prior.partition
        x = given.new_zeros(n, len(part.i2))  # nobody looks at it
        y = self.units.enter(self.beside(given, x), generator=generator)
        h = prior.rsample(n, temperature=temperature, generator=generator)
        return part.merge(part.split(y)[0], h)

    @torch.no_grad()
    def sample(self, *inputs: Any, **options: Any) -> Tensor:
        """What `rsample` gives, without gradients."""
        return self.rsample(*inputs, **options)

    @torch.no_grad()
    def initialise(self, rows: Tensor) -> None:
        """Fit the units to rows, then let every layer set its data-dependent start.

        A whitening that comes first is fitted in closed form to the moments of all rows with their dequantisation
        noise. If a layer behind a coupling has a start of its own, a few thousand rows are used: they pass through the
        networks before it.

        Parameters
        ----------
        rows : Tensor of shape (N, D)
        """
        training = [module for module in self.modules() if module.training]
        self.eval()  # no dropout
        self.units.fit_rows(rows)
        for chain in self.chains:
            inside = list(leaves(chain))
            starts = [i for i, layer in enumerate(inside) if initialises(layer)]
            some = rows
            if any(isinstance(layer, Coupling) for layer in inside[: max(starts, default=0)]):
                some = rows[:: -(-len(rows) // min(FIT_ROWS, max(FEWEST_FIT_ROWS, FIT_NUMBERS // self.dim)))]
            first, *rest = flattened(chain)
            known = self.units.moments(rows) if isinstance(first, Whitening) else None
            if isinstance(first, Whitening) and known is not None:
                first.fit_moments(*known)
                if len(starts) > 1:
                    Chain(*rest).initialise(first(self.enter(some.to(self.device)))[0])
            elif starts:
                chain.initialise(self.enter(some.to(self.device)))
        for module in training:
            module.training = True

    def to_distribution(self, context: Tensor | None = None, *, given: Tensor | None = None) -> Distribution:
        """The flow as a `torch.distributions.Distribution` that checks its arguments; see `FlowDistribution`."""
        return FlowDistribution(self, context, given)


def as_rows(values: Tensor, shape: Shape) -> Tensor:
    """Numbers (..., D), broadcast to a batch of this shape, as rows (B, D)."""
    return values.expand(*shape, values.shape[-1]).reshape(-1, values.shape[-1])


class FlowDistribution(Distribution):
    """A flow as `torch.distributions` has it: event shape (D,), and the batch shape of its condition or context.

    Without either the batch shape is (), until `expand`. A condition (K, C) makes K densities, which may be the
    components of a `MixtureSameFamily`.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012

    def __init__(
        self, flow: Flow, context: Tensor | None = None, given: Tensor | None = None, batch_shape: Shape = _ONE_DRAW
    ) -> None:
        self.flow, self.context, self.given = flow, context, given
        self.has_rsample = not flow.units.discrete
        dim = flow.dim
        if isinstance(flow.prior, PartPrior):
            if given is None:
                raise ValueError(f"expected a condition, {flow.prior.of}; got none: give it as given=")
            dim = len(flow.prior.partition.i2)
        if given is not None:
            flow.beside(given, given.new_zeros(dim))  # which refuses what does not fit
        shapes = (each.shape[:-1] for each in (context, given) if each is not None)
        shape = torch.broadcast_shapes(torch.Size(batch_shape), *shapes)
        super().__init__(shape, torch.Size((dim,)), validate_args=True)

    @property
    def support(self) -> constraints.Constraint:
        return self.flow.units.support(self.flow.prior.scored)

    def expand(self, batch_shape: Shape, _instance: object = None) -> Self:
        shape = torch.Size(batch_shape)
        context, given = (c if c is None else c.expand(*shape, c.shape[-1]) for c in (self.context, self.given))
        return type(self)(self.flow, context, given, shape)

    def log_prob(self, value: Tensor) -> Tensor:
        self._validate_sample(value)
        shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        context, given = self._conditions(shape)
        return self.flow.log_prob(as_rows(value, shape), context, given=given).reshape(shape)

    def rsample(self, sample_shape: Shape = _ONE_DRAW) -> Tensor:
        if not self.has_rsample:
            raise NotImplementedError("this flow gives whole steps, through which no gradient flows: use sample")
        return self._draw(sample_shape)

    def sample(self, sample_shape: Shape = _ONE_DRAW) -> Tensor:
        with torch.no_grad():
            return self._draw(sample_shape)

    def _draw(self, sample_shape: Shape) -> Tensor:
        shape = torch.Size(sample_shape) + self.batch_shape
        context, given = self._conditions(shape)
        return self.flow.rsample(shape.numel(), context, given=given).reshape(shape + self.event_shape)

    def _conditions(self, shape: Shape) -> tuple[Tensor | None, ...]:
        return tuple(each if each is None else as_rows(each, shape) for each in (self.context, self.given))
