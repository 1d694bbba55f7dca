"""The model: a chain of bijections under a factorial prior (NICE eq. 1 and 2)."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from nicest.flows.bijection import Bijection
from nicest.flows.chain import Chain
from nicest.flows.coupling import Coupling
from nicest.flows.pixels import Dequantize, DequantizeColumns
from nicest.flows.priors import Prior

Shape = torch.Size | list[int] | tuple[int, ...]
_ONE_DRAW = torch.Size()


class Flow(nn.Module):
    """log p_X(x) = log p_H(f(x)) + log |det df/dx|, in nats of the space x lives in (NICE eq. 1).

    `forward` is `log_prob`, so that a flow works under compile and data parallelism as it is.
    """

    def __init__(self, chain: Bijection, prior: Prior) -> None:
        super().__init__()
        self.chain = chain if isinstance(chain, Chain) else Chain(chain)
        self.prior = prior
        if "prior" in self.chain.layers:
            raise ValueError("no layer may be called 'prior': the ledger has that name already")
        couplings = sum(isinstance(layer, Coupling) for layer in self.chain)
        if 0 < couplings < 3:
            warnings.warn(
                f"{couplings} coupling layer(s): at least three are needed before every dimension can influence"
                " every other (NICE §3.2)",
                stacklevel=2,
            )

    def encode(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """h = f(x)."""
        return self.chain(x, context)[0]

    def decode(self, h: Tensor, context: Tensor | None = None) -> Tensor:
        """x = f⁻¹(h)."""
        return self.chain.inverse(h, context)

    def log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """log p_X(x), (B,) (NICE eq. 1)."""
        h, log_det = self.chain(x, context)
        return self.prior.log_prob(h) + log_det

    forward = log_prob

    def terms(self, x: Tensor, context: Tensor | None = None) -> dict[str, Tensor]:
        """The ledger of `log_prob`: the log-det of every layer by name, and the prior; each (B,)."""
        h, terms = self.chain.walk(x, context)
        return terms | {"prior": self.prior.log_prob(h)}

    def rsample(
        self,
        n: int,
        context: Tensor | None = None,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """n draws of x = f⁻¹(h), h ~ p_H, with gradients to the parameters (NICE eq. 2).

        A flow that dequantises gives whole levels, through which no gradient flows: see `continuous`.
        """
        return self.decode(self.prior.rsample(n, temperature=temperature, generator=generator), context)

    @torch.no_grad()
    def sample(
        self,
        n: int,
        context: Tensor | None = None,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """n draws of x = f⁻¹(h), h ~ p_H, the prior that was trained (NICE eq. 2)."""
        return self.rsample(n, context, temperature=temperature, generator=generator)

    def sample_and_log_prob(
        self, n: int, context: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """n draws of x, as `rsample` gives them, with log p_X of each."""
        x = self.rsample(n, context, generator=generator)
        return x, self.log_prob(x, context)

    def continuous(self) -> Flow:
        """The model of the dequantised data: the same layers and weights, without the `Dequantize` in front."""
        dequantizes = len(self.chain) > 0 and isinstance(next(iter(self.chain)), Dequantize | DequantizeColumns)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whoever made this flow was warned then
            return Flow(self.chain[1:], self.prior) if dequantizes else self

    def to_distribution(self, context: Tensor | None = None) -> Distribution:
        """The flow as a `torch.distributions.Distribution` that checks its arguments."""
        return FlowDistribution(self, context)


class FlowDistribution(Distribution):
    """A flow in the clothes of `torch.distributions`: event shape (D,), no batch shape."""

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012

    def __init__(self, flow: Flow, context: Tensor | None = None) -> None:
        self.flow, self.context = flow, context
        first = next(iter(flow.chain), None)
        self.has_rsample = not isinstance(first, Dequantize | DequantizeColumns)
        each = constraints.integer_interval(0, first.levels - 1) if isinstance(first, Dequantize) else constraints.real
        self._support = constraints.independent(each, 1)
        super().__init__(event_shape=torch.Size((flow.prior.dim,)), validate_args=True)

    @property
    def support(self) -> constraints.Constraint:
        return self._support

    def log_prob(self, value: Tensor) -> Tensor:
        self._validate_sample(value)
        rows = value.reshape(-1, value.shape[-1])
        return self.flow.log_prob(rows, self._context(len(rows))).reshape(value.shape[:-1])

    def rsample(self, sample_shape: Shape = _ONE_DRAW) -> Tensor:
        if not self.has_rsample:
            raise NotImplementedError("this flow gives whole levels; flow.continuous().to_distribution() has rsample")
        return self._draw(sample_shape)

    def sample(self, sample_shape: Shape = _ONE_DRAW) -> Tensor:
        with torch.no_grad():
            return self._draw(sample_shape)

    def _draw(self, sample_shape: Shape) -> Tensor:
        n = torch.Size(sample_shape).numel()
        return self.flow.rsample(n, self._context(n)).reshape(*sample_shape, self.flow.prior.dim)

    def _context(self, n: int) -> Tensor | None:
        return None if self.context is None else self.context.expand(n, -1)
