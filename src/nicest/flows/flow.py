"""Normalizing flows: units, a bijection and a factorial prior (NICE eq. 1 and 2)."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Generator, Tensor, nn

from nicest.flows.bijection import Bijection
from nicest.flows.chain import Chain, Ledger, flattened, initialises, leaves, ledger
from nicest.flows.coupling import Coupling
from nicest.flows.density import DensityInUnits, as_rows
from nicest.flows.linear import Whitening
from nicest.flows.priors import Prior
from nicest.flows.units import Noise, Units

FIT_ROWS = 5000  # rows that layers behind a coupling are initialised with, at most
FIT_NUMBERS, FEWEST_FIT_ROWS = 500_000, 256


class Flow(DensityInUnits):
    """log p(x) = log p_H(f(y)) + log |det df/dy| + log |dy/dx|, y = units.enter(x) (NICE eq. 1).

    Log-likelihoods are in nats of the space in which x is stored.

    Parameters
    ----------
    units : Units
        Map stored data x to real numbers y.
    bijection : Bijection
        The paper's encoder f; usually a `Chain`.
    prior : Prior
        The density p_H of the latents.
    embedding : nn.Module, optional
        Maps a context (B, ...) to the numbers (B, C) that the bijection is conditioned on.
    """

    def __init__(self, units: Units, bijection: Bijection, prior: Prior, embedding: nn.Module | None = None) -> None:
        super().__init__()
        if units.dim != prior.dim:
            raise ValueError(f"expected a prior of {units.dim} dimensions, as the units have, got {prior.dim}")
        self.units, self.bijection, self.prior, self.embedding = units, bijection, prior, embedding
        couplings = sum(isinstance(layer, Coupling) for layer in leaves(bijection))
        if 0 < couplings < 3 and embedding is None:  # a context may do most of the work
            warnings.warn(
                f"{couplings} coupling layer(s): at least three are needed before every dimension can influence"
                " every other (NICE §3.2)",
                stacklevel=2,
            )

    def forward(self, x: Tensor, context: Tensor | None = None, **options: Any) -> Tensor:
        """Return log p(x | context) of rows (B, D) in the support, the objective of training.

        The options are those of `Units.enter`.
        """
        y = self.units.enter(x, **options)
        return self.log_density(y, context) + self.units.log_det(y)

    def log_density(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the log-density of real numbers y = units.enter(x), (B,), in nats of y."""
        h, log_det = self.bijection(y, self.embed(context))
        return self.prior.log_prob(h) + log_det

    def encode(self, x: Tensor, context: Tensor | None = None, *, noise: Noise = True) -> Tensor:
        """Return the latents h = f(y) of rows x."""
        h: Tensor = self.bijection(self.units.enter(x, noise=noise), self.embed(context))[0]
        return h

    def decode(self, h: Tensor, context: Tensor | None = None) -> Tensor:
        """Return x = f⁻¹(h) in stored form: discrete dimensions in whole steps."""
        return self.units.leave(self.bijection.inverse(h, self.embed(context))[0])

    def embed(self, context: Tensor | None) -> Tensor | None:
        """Return what the bijection is conditioned on."""
        return context if context is None or self.embedding is None else self.embedding(context)

    def rsample(
        self, n: int, context: Tensor | None = None, *, temperature: float = 1.0, generator: Generator | None = None
    ) -> Tensor:
        """Draw n rows x = f⁻¹(h), h ~ p_H, with gradients to the parameters (NICE eq. 2).

        `temperature` multiplies the scale of the prior. Discrete data comes in whole steps, which have no gradient.
        """
        if context is not None:
            if context.shape[:-1] not in ((), (1,), (n,)):
                raise ValueError(f"expected one context, or one for each of {n} draws; got {tuple(context.shape[:-1])}")
            context = as_rows(context, (n,))
        return self.decode(self.prior.rsample(n, temperature=temperature, generator=generator), context)

    def terms(self, x: Tensor, context: Tensor | None = None, *, generator: Generator | None = None) -> Ledger:
        """Return the ledger of `log_prob`: units, the log-determinant of every layer, and the prior; each (B,)."""
        y = self.units.enter(x, generator=generator)
        h, terms = ledger(self.bijection, y, self.embed(context))
        first, last = units_ledger(self.units, y), {"prior": self.prior.log_prob(h)}
        if terms.keys() & (first | last).keys():
            raise ValueError("a layer has the name of another term of the ledger: 'prior', or one of the units")
        return first | terms | last

    @torch.no_grad()
    def initialise(self, rows: Tensor, context: Tensor | None = None) -> None:
        """Fit the units to rows, then let every layer set its data-dependent start.

        A whitening that comes first is fitted in closed form to the moments of all rows with their dequantisation
        noise. If a layer behind a coupling has a start of its own, a few thousand rows are used: they pass through the
        networks before it.

        Parameters
        ----------
        rows : Tensor of shape (N, D)
        context : Tensor of shape (N, C), optional
        """
        training = [module for module in self.modules() if module.training]
        self.eval()  # no dropout
        self.units.fit_rows(rows)
        inside = list(leaves(self.bijection))
        starts = [i for i, layer in enumerate(inside) if initialises(layer)]
        some = slice(None)
        if any(isinstance(layer, Coupling) for layer in inside[: max(starts, default=0)]):
            some = slice(None, None, -(-len(rows) // min(FIT_ROWS, max(FEWEST_FIT_ROWS, FIT_NUMBERS // self.dim))))
        layers = list(flattened(self.bijection))
        whitening = layers[0] if layers and isinstance(layers[0], Whitening) else None
        if whitening is not None:
            whitening.fit_moments(*self.units.moments(rows))
        if len(starts) > (whitening is not None):
            embedded = None if context is None else self.embed(context[some].to(self.device))
            y = self.units.enter(rows[some].to(self.device))
            if whitening is not None:
                y, layers = whitening(y, embedded)[0], layers[1:]
            Chain(*layers).initialise(y, embedded)
        for module in training:
            module.training = True


def units_ledger(units: Units, y: Tensor) -> Ledger:
    """Return the terms of the units, by name, each (B,)."""
    return {name: y.new_zeros(len(y)) + term for name, term in units.terms().items()}
