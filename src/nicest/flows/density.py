"""Densities, and densities as distributions of torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from nicest.flows.units import Noise, Units

Shape = torch.Size | list[int] | tuple[int, ...]


class Density(nn.Module, ABC):
    """A normalised density p(x | context) of rows x.

    To write one, define `dim`, `log_prob` and `sample`; `nicest.fit` then trains it. Calling the module returns the
    objective that training maximises, by default `log_prob`.

    Attributes
    ----------
    dim : int
        Number of features of x.
    interval_nats : float
        What is added to log-likelihoods that are reported; 0 except for pixels on an interval.
    captures : bool
        True if its methods can be captured as CUDA graphs: they read nothing from the device, and draw random numbers
        from torch's default generator alone.
    """

    dim: int
    interval_nats: float = 0.0
    captures = False

    @abstractmethod
    def log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return log p(x | context), of shape (...), for x (..., D) and a context (..., C) that broadcast."""

    @abstractmethod
    def sample(self, n: int, context: Tensor | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw n rows, (n, D), for one context, (C,) or (1, C), or for one context each, (n, C)."""

    def forward(self, x: Tensor, context: Tensor | None = None, **options: Any) -> Tensor:
        return self.log_prob(x, context, **options)

    def validation_log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return what validation takes the mean of, (B,), for rows (B, D): by default `log_prob`."""
        return self.log_prob(x, context)

    def initialise(self, rows: Tensor, context: Tensor | None = None) -> None:
        """Set the data-dependent start from training rows (N, D); the default has none."""

    @property
    def device(self) -> torch.device:
        return self._example.device

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type that the density computes in."""
        return self._example.dtype

    @property
    def _example(self) -> Tensor:
        """The first floating-point parameter or buffer."""
        found = (each for each in (*self.parameters(), *self.buffers()) if each.is_floating_point())
        return next(found, torch.empty(0))

    def given(self, context: Tensor | None = None) -> DensityDistribution:
        """Return p(x | context) as a `torch.distributions.Distribution`."""
        return DensityDistribution(self, context)

    @property
    def support(self) -> constraints.Constraint:
        """The values that x can take."""
        return constraints.real_vector


class DensityInUnits(Density):
    """A density of stored data x that is computed from real numbers y = units.enter(x).

    To write one, set `units` and define `forward` and `rsample`; `forward` has the options of `Units.enter`.
    """

    units: Units
    captures = True
    rsample: Callable[..., Tensor]

    @property
    def dim(self) -> int:  # type: ignore[override]
        return self.units.dim

    @property
    def device(self) -> torch.device:
        return self.units.scale.device

    @property
    def dtype(self) -> torch.dtype:
        return self.units.scale.dtype

    @property
    def interval_nats(self) -> float:  # type: ignore[override]
        return self.units.interval_nats

    @property
    def support(self) -> constraints.Constraint:
        return self.units.support

    def log_prob(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        noise: Noise = True,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return log p(x | context); -inf where x is not in the support (NICE eq. 1).

        Parameters
        ----------
        x : Tensor of shape (..., D)
        context : Tensor of shape (..., C), optional
        noise : bool or Tensor
            Dequantisation noise of discrete dimensions: True draws it, False takes the middle of a step, a tensor in
            [0, 1) is used as it is. The mean over draws is a lower bound of the log-probability, see `Units`.
        generator : torch.Generator, optional
            Source of the noise.
        """

        def of_rows(x: Tensor, context: Tensor | None) -> Tensor:
            nats = self(x, context, noise=noise, generator=generator)
            return in_support(nats, self.units.contains(x), x)

        return by_rows(of_rows, x, context, self.dim)

    @torch.no_grad()
    def sample(self, n: int, context: Tensor | None = None, **options: Any) -> Tensor:
        """Draw n rows without gradients; the options are those of `rsample`."""
        return self.rsample(n, context, **options)


class DensityDistribution(Distribution):
    """A density as a distribution of torch, which checks its arguments.

    The event shape is (D,), the batch shape that of the context without its last dimension. A context (K, C) makes K
    distributions, which may be the components of a `MixtureSameFamily`.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012

    def __init__(self, density: Density, context: Tensor | None = None, batch_shape: Shape = ()) -> None:
        self.density, self.context = density, context
        self.has_rsample = hasattr(density, "rsample") and not density.support.is_discrete
        shape = torch.broadcast_shapes(torch.Size(batch_shape), () if context is None else context.shape[:-1])
        super().__init__(shape, torch.Size((density.dim,)), validate_args=True)

    @property
    def support(self) -> constraints.Constraint:
        return self.density.support

    def expand(self, batch_shape: Shape, _instance: object = None) -> Self:
        shape = torch.Size(batch_shape)
        context = None if self.context is None else self.context.expand(*shape, self.context.shape[-1])
        return type(self)(self.density, context, shape)

    def log_prob(self, value: Tensor) -> Tensor:
        self._validate_sample(value)
        shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        return self.density.log_prob(value.expand(*shape, value.shape[-1]), self.context)

    def rsample(self, sample_shape: Shape = ()) -> Tensor:
        if not self.has_rsample:
            raise NotImplementedError("discrete samples have no gradient: use sample")
        return self._draw(self.density.rsample, sample_shape)  # type: ignore[arg-type]

    def sample(self, sample_shape: Shape = ()) -> Tensor:
        with torch.no_grad():
            return self._draw(self.density.sample, sample_shape)

    def _draw(self, draw: Callable[..., Tensor], sample_shape: Shape) -> Tensor:
        shape = torch.Size(sample_shape) + self.batch_shape
        context = None if self.context is None else as_rows(self.context, shape)
        return draw(shape.numel(), context).reshape(shape + self.event_shape)


def by_rows(function: Callable[..., Tensor], x: Tensor, context: Tensor | None, dim: int) -> Tensor:
    """Call a function of rows (B, D) and their context with x (..., D) and a context (..., C) that broadcast."""
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a tensor, got {type(x).__name__}: torch.as_tensor(x) makes one")
    if x.ndim == 0:
        raise ValueError(f"expected x of {dim} numbers, got a scalar")
    if x.ndim == 2 and (context is None or context.shape[:-1] == x.shape[:-1]):
        return function(x, context)
    batches = x.shape[:-1], torch.Size() if context is None else context.shape[:-1]
    try:
        shape = torch.broadcast_shapes(*batches)
    except RuntimeError as error:
        raise ValueError(
            f"expected a context for each row, got rows {tuple(batches[0])} and contexts {tuple(batches[1])}"
        ) from error
    return function(as_rows(x, shape), None if context is None else as_rows(context, shape)).reshape(shape)


def in_support(nats: Tensor, inside: Tensor, x: Tensor) -> Tensor:
    """Set the log-likelihoods of rows x to -inf where they are not inside the support; rows with NaN keep theirs."""
    return torch.where(inside | x.isnan().any(-1) if x.is_floating_point() else inside, nats, -torch.inf)


def as_rows(values: Tensor, shape: Shape) -> Tensor:
    """Broadcast values (..., D) to a batch of this shape and flatten the batch to rows (B, D)."""
    return values.expand(*shape, values.shape[-1]).reshape(-1, values.shape[-1])
