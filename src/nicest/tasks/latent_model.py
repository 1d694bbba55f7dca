"""The latent space of a flow: encode, decode, and move between latents."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nicest import plots
from nicest.errors import NicestError
from nicest.files import require_writable
from nicest.flows import Units, members, moments
from nicest.runs.folder import require_own_file
from nicest.runs.run import Run
from nicest.tasks.pictures import as_images, brightest
from nicest.tasks.rows import require_flow


class Model:
    """A flow that encodes rows of data to latents h, and decodes them, for any number of rows.

    A level is encoded at its middle, without noise; decoding gives levels.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.flow, self.recipe, self.device = run, run.flow, run.recipe, run.device
        self.data, self.units, prior = self.recipe.data, self.flow.units, self.flow.prior
        self.loc, self.scale = prior.mode, prior.log_scale.detach().exp().expand(prior.dim)
        self.deviation = prior.standard_deviation
        found = [getattr(layer, "sigma", None) for layer in self.flow.bijection.modules()]
        scalings = [each for each in found if isinstance(each, Tensor) and each.shape == self.scale.shape]
        self.sigma = (scalings[-1] if scalings else torch.ones_like(self.scale)) * self.scale
        self.order = self.sigma.argsort(descending=True, stable=True)
        self.whitens = any(getattr(layer, "whitens", False) for layer in self.flow.bijection.modules())
        of = "" if run.label is None else f", label {run.label}"
        self.heading = plots.heading(self.data.name, self.recipe.name) + of

    @classmethod
    def with_codes(cls, run: Run) -> Model:
        """Return the model of a run; refuse those without latents."""
        require_flow(run, "latent space")
        if (count := len(members(run.flow))) > 1:
            what = f"{run.path} holds the mean of {count} flows, which has no latent coordinates"
            raise NicestError(f"{what}: train with model.members=1")
        return cls(run)

    def encode(self, x: Tensor) -> Tensor:
        """Return the latents of rows."""
        return torch.cat(list(self.run.engine.each("encode", x, noise=False)))

    def middle(self, x: Tensor) -> Tensor:
        """Return rows as real numbers, each level at its middle."""
        return self.units.enter(x, noise=False)

    def decode(self, h: Tensor) -> Tensor:
        """Return the rows of latents."""
        return torch.cat(list(self.run.engine.each("decode", h)))

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

    def cut(self, h: Tensor, k: int) -> Tensor:
        """Set all but the k components of largest sigma_d to the prior's mode."""
        return torch.where(self.order.argsort() < k, h, self.loc)

    def between(self, h0: Tensor, h1: Tensor, steps: int, way: str) -> Tensor:
        """Interpolate from h0 to h1, (P, steps, D), both ends included."""
        t = torch.linspace(0, 1, steps).to(h0)[:, None]
        if way == "straight":
            return straight(h0, h1, t)
        return self.loc + self.scale * spherical((h0 - self.loc) / self.scale, (h1 - self.loc) / self.scale, t)

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

    def typical_radius(self, basis: str) -> float:
        """Return the root mean square norm of draws of the prior, in all dimensions or ("top") in three."""
        return self.deviation * math.sqrt(self.data.dim if basis == "random" else 3)

    def axes(self, basis: str, seed: int) -> np.ndarray:
        """Return three directions of latent space, (3, D): random, or the components of largest sigma_d."""
        if self.data.dim < 3:
            raise NicestError(f"a sphere needs 3 dimensions, this model has {self.data.dim}")
        if basis == "random":
            return rotation(self.data.dim, seed)
        axes = np.zeros((3, self.data.dim))
        axes[range(3), self.order[:3].cpu()] = 1
        return axes

    def on_sphere(self, points: np.ndarray, axes: np.ndarray, radius: float) -> Tensor:
        """Return latents of points (N, 3) of the unit sphere, scaled to a radius."""
        e = torch.from_numpy(radius * points @ axes).to(self.loc)
        return self.loc + self.scale * e

    def images(self, rows: Tensor) -> np.ndarray:
        """Return rows (..., D) in the shape and type of the data."""
        return as_images(rows.cpu().numpy(), self.data)

    def grid(self, images: np.ndarray) -> Image.Image:
        """Return images (rows, columns, *shape) as one picture."""
        flat, white = images.reshape(-1, *self.data.shape), brightest(images, self.data)
        return plots.image_grid(flat, brightest=white, columns=images.shape[1], size=1)

    def path(self, out: str | Path | None, look: str, *, images: bool = True) -> Path:
        """Return the file to write, arrays (.npz) or a picture; refuse one that cannot be written."""
        path = Path(out) if out else self.run.path / "figures" / f"{look}.png"
        if images and len(self.data.shape) == 1 and path.suffix.lower() != ".npz":
            raise NicestError(f"rows of {self.data.dim} numbers are not images: write arrays, to {look}.npz")
        if path.suffix.lower() != ".npz":
            plots.picture_kind(path)
        require_own_file(path, self.recipe)
        require_writable(path)
        return path


def rotation(dim: int, seed: int) -> np.ndarray:
    """Draw three orthonormal directions (3, D): the first three axes after a random rotation."""
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, 3)))
    return (q * np.sign(np.diag(r))).T


def straight(start: Tensor, end: Tensor, t: Tensor) -> Tensor:
    """Return (1 - t) start + t end, (P, T, D), for ends (P, D) and t (T, 1)."""
    return (1 - t) * start[:, None] + t * end[:, None]


def spherical(start: Tensor, end: Tensor, t: Tensor) -> Tensor:
    """Interpolate direction along an arc and length linearly, (P, T, D), for ends (P, D) and t (T, 1).

    Ends on one line through 0 are joined by a straight line.
    """
    lengths = [each.norm(dim=1)[:, None, None] for each in (start, end)]
    tiny = torch.finfo(start.dtype).tiny
    one, two = (each[:, None] / length.clamp_min(tiny) for each, length in zip((start, end), lengths, strict=True))
    angle = (one * two).sum(-1, keepdim=True).clamp(-1, 1).acos()
    turned = (((1 - t) * angle).sin() * one + (t * angle).sin() * two) / angle.sin()
    around = ((1 - t) * lengths[0] + t * lengths[1]) * turned
    plane = (angle.sin() > 1e-3) & (lengths[0] > 0) & (lengths[1] > 0)
    return torch.where(plane, around, straight(start, end, t))


def principal(units: Units, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a PCA of rows: mean (D,), decreasing standard deviations (D,), and directions (D, D) in columns.

    In float64, with dequantisation noise.
    """
    noise = torch.Generator(rows.device).manual_seed(0)
    mean, covariance = units.moments(rows) or moments(units.enter(rows, generator=noise))
    variances, directions = torch.linalg.eigh(covariance)
    return mean, variances.clamp_min(0).sqrt().flip(0), directions.flip(1)
