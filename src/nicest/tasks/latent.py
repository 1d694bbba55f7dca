"""Pictures of the latent space of a flow: spectrum and sphere (NICE App. A), interpolation, truncation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nicest import plots
from nicest.errors import NicestError
from nicest.flows import Units, members, moments
from nicest.runs.run import Run
from nicest.tasks.options import Seed, Split, figure, integer, option, real
from nicest.tasks.results import Result, columns
from nicest.tasks.rows import require_flow, require_outputs
from nicest.tasks.sample import as_images, brightest, save_arrays

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASES = ("random", "top")
WAYS = ("straight", "spherical")
KEPT = (0, 1, 2, 5, 10, 20, 50, 100, 200)  # numbers of components, and all
EXAMPLES = 1000  # at most, over which errors are averaged


class Model:
    """A flow that encodes rows of data to latents h, and decodes them, for any number of rows.

    A level is encoded at its middle, without noise; decoding gives levels.
    """

    def __init__(self, run: Run) -> None:
        require_flow(run, "latent space")
        if (count := len(members(run.flow))) > 1:
            raise NicestError(f"{run.path} holds the mean of {count} flows, which has no latent coordinates")
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

    def encode(self, x: Tensor) -> Tensor:
        """Return the latents of rows."""
        return torch.cat(list(self.run.engine.each("encode", x, noise=False)))

    def decode(self, h: Tensor) -> Tensor:
        """Return the rows of latents."""
        return torch.cat(list(self.run.engine.each("decode", h)))

    def cut(self, h: Tensor, k: int) -> Tensor:
        """Set all but the k components of largest sigma_d to the prior's mode."""
        return torch.where(self.order.argsort() < k, h, self.loc)

    def between(self, h0: Tensor, h1: Tensor, steps: int, way: str) -> Tensor:
        """Interpolate from h0 to h1, (P, steps, D), both ends included."""
        t = torch.linspace(0, 1, steps).to(h0)[:, None]
        if way == "straight":
            return straight(h0, h1, t)
        return self.loc + self.scale * spherical((h0 - self.loc) / self.scale, (h1 - self.loc) / self.scale, t)

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
        require_outputs(self.run, path)
        return path


def rotation(dim: int, seed: int) -> np.ndarray:
    """Draw three orthonormal directions (3, D): the first three axes after a random rotation."""
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, 3)))
    return (q * np.sign(np.diag(r))).T


def straight(start: Tensor, end: Tensor, t: Tensor) -> Tensor:
    """Return (1 - t) start + t end, (P, T, D), for ends (P, D) and t (T, 1)."""
    return (1 - t) * start[:, None] + t * end[:, None]


def spherical(start: Tensor, end: Tensor, t: Tensor) -> Tensor:
    """Interpolate direction along an arc, if there is one, and length linearly: (P, T, D) for (P, D) and t (T, 1)."""
    lengths = [each.norm(dim=1)[:, None, None] for each in (start, end)]
    tiny = torch.finfo(start.dtype).tiny
    one, two = (each[:, None] / length.clamp_min(tiny) for each, length in zip((start, end), lengths, strict=True))
    angle = (one * two).sum(-1, keepdim=True).clamp(-1, 1).acos()
    turned = (((1 - t) * angle).sin() * one + (t * angle).sin() * two) / angle.sin()
    around = ((1 - t) * lengths[0] + t * lengths[1]) * turned
    plane = (angle.sin() > 1e-3) & (lengths[0] > 0) & (lengths[1] > 0)
    return torch.where(plane, around, straight(start, end, t))


def principal(units: Units, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a PCA of noisy rows: mean (D,), decreasing standard deviations (D,), and directions (D, D) in columns."""
    noise = torch.Generator(rows.device).manual_seed(0)
    mean, covariance = units.moments(rows) or moments(units.enter(rows, generator=noise))
    variances, directions = torch.linalg.eigh(covariance)
    return mean, variances.clamp_min(0).sqrt().flip(0), directions.flip(1)


@dataclass(frozen=True, kw_only=True)
class Picture(Result):
    """A picture of the latent space: its file and the recipe of the model."""

    out: str
    recipe: str

    def lines(self) -> Iterator[Any]:
        yield f"{type(self).__name__.lower()} in {self.out}"


@dataclass(frozen=True, kw_only=True)
class Spectrum(Picture):
    """`sigma` from the largest; `pca`: standard deviations of the data along its principal components."""

    deviation: float
    sigma: list[float]
    pca: list[float] | None = None


def spectrum(
    run: Run,
    *,
    pca: Annotated[bool, option(help="Show the spectrum of a PCA of the training data, too.")] = True,
    out: Annotated[str | Path | None, figure("spectrum")] = None,
) -> Spectrum:
    """Plot the sorted sigma_d of the scaling layer: how much each component varies (NICE App. A).

    A component's standard deviation is `deviation` sigma_d, which the figure shows. The PCA is of the training data on
    the recipe's interval, with noise. Behind a whitening layer every deviation of the data is 1.

    Example: nicest latent spectrum runs/demo
    """
    model = Model(run)
    path = model.path(out, "spectrum", images=False)
    arrays = {"sigma": model.sigma[model.order].cpu().numpy()}
    if pca:
        arrays["pca"] = principal(model.units, run.rows("train"))[1].cpu().numpy()

    def figure() -> Figure:
        deviations, title = model.deviation * arrays["sigma"], f"{model.heading}: spectrum of the scaling layer"
        beside = None if model.whitens else arrays.get("pca")
        return plots.spectrum_figure(deviations, title=title, pca=beside, whitened=pca and model.whitens)

    _write(path, arrays, figure)
    found = {name: values.tolist() for name, values in arrays.items()}
    return Spectrum(out=str(path), recipe=model.recipe.name, deviation=model.deviation, **found)


@dataclass(frozen=True, kw_only=True)
class Sphere(Picture):
    """A decoded sphere."""

    typical_radius: float
    basis: str
    radius: float
    grid: int
    seed: int

    def lines(self) -> Iterator[Any]:
        yield f"sphere of radius {self.radius:.2f} in {self.out}"


def sphere(
    run: Run,
    *,
    basis: Annotated[
        Literal["random", "top"], option(help="Random axes, or the three components with the largest sigma_d.")
    ] = "random",
    radius: Annotated[
        float | None, real(0, 1_000_000, "In units of the prior.", show_default="the typical norm of a draw")
    ] = None,
    grid: Annotated[int, integer(1, 200, "Images per side.")] = 10,
    seed: Seed = 0,
    out: Annotated[str | Path | None, figure("sphere")] = None,
) -> Sphere:
    """Decode a sphere in three dimensions of latent space (NICE App. A).

    Example: nicest latent sphere runs/demo --basis top
    """
    if basis not in BASES or grid < 1 or (radius is not None and not 0 < radius < math.inf):
        what = f"a basis of {', '.join(BASES)}, a grid of 1 or more a side and a radius above 0"
        raise NicestError(f"expected {what}, got {basis!r}, {grid} and {radius}")
    model = Model(run)
    path = model.path(out, "sphere")
    axes, typical = model.axes(basis, seed), model.typical_radius(basis)
    length = typical if radius is None else radius
    points = sphere_points(grid)
    h = model.on_sphere(points.reshape(-1, 3), axes, length)
    images = model.images(model.decode(h)).reshape(grid, grid, *model.data.shape)
    arrays = {"images": images, "h": h.cpu().numpy().reshape(grid, grid, -1), "points": points, "basis": axes}
    where = "a random subspace" if basis == "random" else "the components of largest $\\sigma_d$"
    title = f"{model.heading}: sphere of radius {length:.1f}, in {where}"
    _write(path, arrays, lambda: plots.sphere_figure(model.grid(images), grid, title=title))
    told: dict[str, Any] = {"typical_radius": typical, "basis": basis, "radius": length, "grid": grid, "seed": seed}
    return Sphere(out=str(path), recipe=model.recipe.name, **told)


def sphere_points(n: int) -> np.ndarray:
    """Return n x n points of the unit sphere, (n, n, 3), of equal areas: rows from north to south, columns around."""
    return sphere_surface((1 - (2 * np.arange(n) + 1) / n)[:, None], 2 * np.pi * np.arange(n) / n)


def sphere_surface(height: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Return points (..., 3) of the unit sphere at these heights and angles."""
    level = np.sqrt(1 - height**2)
    return np.stack(np.broadcast_arrays(level * np.cos(angle), level * np.sin(angle), height), -1)


@dataclass(frozen=True, kw_only=True)
class Interpolation(Picture):
    """Interpolations between pairs of images of a split."""

    split: str
    pairs: list[list[int]]
    steps: int
    way: str

    def lines(self) -> Iterator[Any]:
        yield f"{len(self.pairs)} interpolations in {self.out}"


def interpolate(
    run: Run,
    *,
    start: Annotated[
        Sequence[int],
        integer(
            0, 10**9, "The index of the first image in the split; repeatable.", "--from", show_default="0, 2, 4, 6, 8"
        ),
    ] = (),
    end: Annotated[
        Sequence[int],
        integer(0, 10**9, "The index of the last image; one for each --from.", "--to", show_default="1, 3, 5, 7, 9"),
    ] = (),
    steps: Annotated[int, integer(2, 1000, "Images per interpolation, both ends included.")] = 10,
    way: Annotated[
        Literal["straight", "spherical"],
        option(help="Along a straight line, or along an arc around the mode of the prior."),
    ] = "straight",
    split: Split = "test",
    out: Annotated[str | Path | None, figure("interpolate")] = None,
) -> Interpolation:
    """Interpolate between images in latent space, and in pixel space for comparison.

    Example: nicest latent interpolate runs/demo --from 3 --to 8 --from 4 --to 5
    """
    if len(start) != len(end):
        raise NicestError(f"expected as many --to as --from, got {len(end)} and {len(start)}")
    if way not in WAYS or steps < 2:
        raise NicestError(f"expected a way of {', '.join(WAYS)} and 2 steps or more, got {way!r} and {steps}")
    model = Model(run)
    path = model.path(out, "interpolate")
    rows = run.rows(split)
    chosen = list(zip(start, end, strict=True)) or [(k, k + 1) for k in range(0, min(10, len(rows)) - 1, 2)]
    for each in (place for pair in chosen for place in pair):
        if not 0 <= each < len(rows):
            raise NicestError(f"expected images 0 to {len(rows) - 1} of the {split} split, got {each}")
    x = rows[torch.tensor(chosen, device=rows.device).flatten()]
    ends = model.encode(x), model.units.enter(x, noise=False)
    (h0, h1), (y0, y1) = (each.unflatten(0, (-1, 2)).unbind(1) for each in ends)
    t = torch.linspace(0, 1, steps).to(h0)[:, None]
    h = model.between(h0, h1, steps, way)
    latent = model.decode(h.flatten(0, 1)).unflatten(0, h.shape[:2])
    pixels = model.units.leave(straight(y0, y1, t).flatten(0, 1)).unflatten(0, h.shape[:2])
    images = {"images": model.images(latent), "pixels": model.images(pixels)}
    arrays = {**images, "h": h.cpu().numpy(), "pairs": np.array(chosen)}

    def figure() -> Figure:
        panels = {f"through latent space, {way}": "images", "through pixels, straight": "pixels"}
        grids = {name: model.grid(arrays[key]) for name, key in panels.items()}
        names = [f"{one} → {other}" for one, other in chosen]
        return plots.panel_figure(grids, names, title=f"{model.heading}: between images of the {split} split")

    _write(path, arrays, figure)
    told: dict[str, Any] = {"split": split, "pairs": [list(pair) for pair in chosen], "steps": steps, "way": way}
    return Interpolation(out=str(path), recipe=model.recipe.name, **told)


@dataclass(frozen=True, kw_only=True)
class Truncation(Picture):
    """Mean squared errors of images of which only some components are `kept`, on the recipe's interval."""

    split: str
    n: int
    examples: int
    kept: list[int]
    nice_errors: list[float]
    pca_errors: list[float]

    def lines(self) -> Iterator[Any]:
        table = columns(">kept", ">NICE", ">PCA")
        for k, *errors in zip(self.kept, self.nice_errors, self.pca_errors, strict=True):
            table.add_row(str(k), *(f"{error:.5f}" for error in errors))
        yield f"mean squared error of {self.examples} images of the {self.split} split"
        yield table
        yield f"truncate in {self.out}"


def truncate(
    run: Run,
    *,
    n: Annotated[int, integer(1, 1000, "Images in the figure.", "-n")] = 8,
    keep: Annotated[
        Sequence[int],
        integer(0, 10**9, "Number of components to keep; repeatable.", show_default="0, 1, 2, 5, 10, ... 200, all"),
    ] = (),
    split: Split = "test",
    out: Annotated[str | Path | None, figure("truncate")] = None,
) -> Truncation:
    """Reconstruct images from the components with the largest sigma_d, next to a PCA.

    The other components are set to the prior's mode.

    Example: nicest latent truncate runs/demo -n 8
    """
    model = Model(run)
    path = model.path(out, "truncate", images=False)
    rows, dim = run.rows(split), model.data.dim
    if not 1 <= n <= len(rows):
        raise NicestError(f"expected 1 to {len(rows)} images of the {split} split, got {n}")
    counts = sorted({*keep} if keep else {*(k for k in KEPT if k < dim), dim})
    if not 0 <= counts[0] <= counts[-1] <= dim:
        raise NicestError(f"expected to keep 0 to {dim} components, got {counts[0] if counts[0] < 0 else counts[-1]}")
    x = rows[: max(n, EXAMPLES)]
    y, h = model.units.enter(x, noise=False), model.encode(x)
    mean, _, directions = (each.to(y) for each in principal(model.units, run.rows("train")))
    shown: dict[str, list[Tensor]] = {"nice": [], "pca": []}
    errors: dict[str, list[float]] = {"nice": [], "pca": []}
    for k in counts:
        v = directions[:, :k]
        cut = {"nice": model.decode(model.cut(h, k)), "pca": model.units.leave(mean + (y - mean) @ v @ v.mT)}
        for name, images in cut.items():
            shown[name].append(images[:n])
            errors[name].append(float((model.units.enter(images, noise=False) - y).square().mean(dtype=torch.float64)))
    found: dict[str, Any] = {f"{name}_errors": values for name, values in errors.items()}
    arrays = {name: model.images(torch.stack(images, 1)) for name, images in shown.items()}
    arrays |= {name: np.array(values) for name, values in {**found, "kept": counts}.items()}
    arrays["truth"] = model.images(x[:n])

    def figure() -> Figure:
        pictured = () if len(model.data.shape) == 1 else errors
        grids = {name.upper(): model.grid(arrays[name]) for name in pictured}
        curves = {name.upper(): values for name, values in errors.items()}
        return plots.truncation_figure(counts, curves, grids, title=f"{model.heading}: k components of each code kept")

    _write(path, arrays, figure)
    told: dict[str, Any] = {"split": split, "n": n, "examples": len(x), "kept": counts}
    return Truncation(out=str(path), recipe=model.recipe.name, **told, **found)


def _write(path: Path, arrays: dict[str, np.ndarray], figure: Callable[[], Figure]) -> None:
    if path.suffix.lower() == ".npz":
        save_arrays(path, **arrays)
    else:
        plots.save_figure(figure(), path)
