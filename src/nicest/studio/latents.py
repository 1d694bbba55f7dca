"""Draw, move and place latents of a flow, and even points of a sphere."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from nicest.tasks.latent import Model, sphere_surface


class Latents(Model):
    """A flow with the moves in its latent space that the page shows."""

    def draw(self, n: int, *, temperature: float = 1.0, seed: int = 0) -> Tensor:
        """Draw latents of n samples, (n, D)."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return self.flow.prior.rsample(n, temperature=temperature, generator=generator).detach()

    def nats(self, x: Tensor) -> Tensor:
        """Return log p of rows, (B,), each level at its middle, on the recipe's interval."""
        with torch.no_grad():
            return self.flow.log_prob(x, noise=False).double() + self.units.interval_nats

    @torch.no_grad()
    def code_nats(self, h: Tensor) -> Tensor:
        """Return log p of decoded latents, (B,), before rounding to levels, on the recipe's interval."""
        _, log_det = self.flow.bijection.inverse(h)
        return (self.flow.prior.log_prob(h) - log_det + self.units.log_det(h)).double() + self.units.interval_nats

    def places(self, h: Tensor) -> Tensor:
        """Return latents in standard deviations of the prior from its mode, components of largest sigma_d first."""
        return ((h - self.loc) / (self.deviation * self.scale))[..., self.order]

    def put(self, h: Tensor, places: Tensor) -> Tensor:
        """Set the components of largest sigma_d of latents to `places` (..., k), in the unit of `places`."""
        chosen = self.order[: places.shape[-1]]
        moved = h.clone()
        moved[..., chosen] = self.loc[chosen] + self.deviation * self.scale[chosen] * places.to(h)
        return moved

    def plane(self, corners: Tensor, points: Tensor, way: str) -> Tensor:
        """Return latents (N, D) of points (N, 2) in the plane with corners (3, D) at (0, 0), (1, 0) and (0, 1).

        "spherical": at the weighted mean distance of the corners from the mode.
        """
        points = points.to(corners)
        weights = torch.cat((1 - points.sum(1, keepdim=True), points), 1)
        e = (corners - self.loc) / self.scale
        at = weights @ e
        if way == "spherical":
            length = (weights @ e.norm(dim=1, keepdim=True)).clamp_min(0)
            at = at * length / at.norm(dim=1, keepdim=True).clamp_min(torch.finfo(at.dtype).tiny)
        return self.loc + self.scale * at


def even_points(n: int) -> np.ndarray:
    """Return n points of the unit sphere, (n, 3), from north to south, each turned by the golden angle."""
    return sphere_surface(1 - (2 * np.arange(n) + 1) / n, np.pi * (3 - math.sqrt(5)) * np.arange(n))
