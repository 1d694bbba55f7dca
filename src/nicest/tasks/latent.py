"""Looking inside a trained model: spectrum and sphere (NICE App. A), ways between images, codes cut short."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from nicest.tasks.pictures import as_images, brightest, save_arrays

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASES = ("random", "top")
WAYS = ("straight", "spherical")
KEPT = (0, 1, 2, 5, 10, 20, 50, 100, 200)  # and all
EXAMPLES = 1000  # at most, that an error is the mean of


class Model:
    """The flow of a run, and both ways through it, from rows of data to codes h and back, for any number of rows.

    A level is encoded at its middle, so that no code depends on a draw of noise; decoding gives whole levels.
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
        """The model of a run, unless its rows have no codes."""
        if (count := len(members(run.flow))) > 1:
            what = f"{run.path} holds the mean of {count} flows, which has no latent coordinates"
            raise NicestError(f"{what}: train with model.members=1")
        return cls(run)

    def encode(self, x: Tensor) -> Tensor:
        return torch.cat(list(self.run.engine.each("encode", x, noise=False)))

    def middle(self, x: Tensor) -> Tensor:
        """Rows as real numbers, each level at its middle."""
        return self.units.enter(x, noise=False)

    def decode(self, h: Tensor) -> Tensor:
        return torch.cat(list(self.run.engine.each("decode", h)))

    def draw(self, n: int, *, temperature: float = 1.0, seed: int = 0) -> Tensor:
        """Codes of n samples, (n, D)."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return self.flow.prior.rsample(n, temperature=temperature, generator=generator).detach()

    def nats(self, x: Tensor) -> Tensor:
        """log p of rows, (B,), a level at its middle, in the recipe's unit."""
        with torch.no_grad():
            return self.flow.log_prob(x, noise=False).double() + self.units.interval_nats

    @torch.no_grad()
    def code_nats(self, h: Tensor) -> Tensor:
        """log p of the points that codes stand for, (B,), before they are rounded to levels, in the recipe's unit."""
        _, log_det = self.flow.bijection.inverse(h)
        return (self.flow.prior.log_prob(h) - log_det + self.units.log_det(h)).double() + self.units.interval_nats

    def places(self, h: Tensor) -> Tensor:
        """Codes in standard deviations of the prior from its mode, the components of largest σ_d first."""
        return ((h - self.loc) / (self.deviation * self.scale))[..., self.order]

    def put(self, h: Tensor, places: Tensor) -> Tensor:
        """Codes whose first components, of largest σ_d, are put at `places` (..., k), which are as `places` gives."""
        chosen = self.order[: places.shape[-1]]
        moved = h.clone()
        moved[..., chosen] = self.loc[chosen] + self.deviation * self.scale[chosen] * places.to(h)
        return moved

    def cut(self, h: Tensor, k: int) -> Tensor:
        """Codes with all but their k components of largest σ_d put to the prior's mode."""
        return torch.where(self.order.argsort() < k, h, self.loc)

    def between(self, h0: Tensor, h1: Tensor, steps: int, way: str) -> Tensor:
        """Codes on the way from h0 to h1, (P, steps, D), both ends among them."""
        t = torch.linspace(0, 1, steps).to(h0)[:, None]
        if way == "straight":
            return straight(h0, h1, t)
        return self.loc + self.scale * spherical((h0 - self.loc) / self.scale, (h1 - self.loc) / self.scale, t)

    def plane(self, corners: Tensor, points: Tensor, way: str) -> Tensor:
        """Codes (N, D) of points (N, 2) of the plane through three codes (3, D): (0, 0), (1, 0) and (0, 1) are those.

        "spherical", they lie as far from the mode as the weighted mean of the three does.
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
        """Of a sphere in the prior: the root of its mean square in all dimensions, or, of "top", in three."""
        return self.deviation * math.sqrt(self.data.dim if basis == "random" else 3)

    def axes(self, basis: str, seed: int) -> np.ndarray:
        """Three directions of latent space, (3, D): random ones, or the components of largest σ_d."""
        if self.data.dim < 3:
            raise NicestError(f"a sphere needs 3 dimensions, this model has {self.data.dim}")
        if basis == "random":
            return rotation(self.data.dim, seed)
        axes = np.zeros((3, self.data.dim))
        axes[range(3), self.order[:3].cpu()] = 1
        return axes

    def on_sphere(self, points: np.ndarray, axes: np.ndarray, radius: float) -> Tensor:
        """Codes of points (N, 3) of the unit sphere, made as large as the radius says."""
        e = torch.from_numpy(radius * points @ axes).to(self.loc)
        return self.loc + self.scale * e

    def images(self, rows: Tensor) -> np.ndarray:
        """Rows (..., D) in the shape and the number type of the data."""
        return as_images(rows.cpu().numpy(), self.data)

    def grid(self, images: np.ndarray) -> Image.Image:
        """Images (rows, columns, *shape) as one picture."""
        flat, white = images.reshape(-1, *self.data.shape), brightest(images, self.data)
        return plots.image_grid(flat, brightest=white, columns=images.shape[1], size=1)

    def path(self, out: str | Path | None, look: str, *, images: bool = True) -> Path:
        """Where to write: refused before the work where it cannot be; .npz is for arrays, any other for pictures."""
        path = Path(out) if out else self.run.path / "figures" / f"{look}.png"
        if images and len(self.data.shape) == 1 and path.suffix.lower() != ".npz":
            raise NicestError(f"rows of {self.data.dim} numbers are not images: write arrays, to {look}.npz")
        if path.suffix.lower() != ".npz":
            plots.picture_kind(path)
        require_own_file(path, self.recipe)
        require_writable(path)
        return path


def spectrum(run: Run, *, pca: bool = True, out: str | Path | None = None) -> dict[str, Any]:
    """σ_d = exp(-s_d), times the prior's scale where that is learned, from the largest (NICE App. A).

    Beside it, `pca`: the standard deviations of the training data along its principal components, on the interval
    of the recipe, noise included, or of standardised columns. That is the space σ_d lives in, unless the model
    whitens: behind a whitening every deviation is 1, which is what the figure then shows. A component's own standard
    deviation is `deviation` σ_d; that is what the figure draws.
    """
    model = Model.with_codes(run)
    path = model.path(out, "spectrum", images=False)
    arrays = {"sigma": model.sigma[model.order].cpu().numpy()}
    if pca:
        arrays["pca"] = principal(model.units, run.rows("train"))[1].cpu().numpy()

    def figure() -> Figure:
        deviations, title = model.deviation * arrays["sigma"], f"{model.heading}: spectrum of the scaling layer"
        beside = None if model.whitens else arrays.get("pca")
        return plots.spectrum_figure(deviations, title=title, pca=beside, whitened=pca and model.whitens)

    _write(path, arrays, figure)
    result: dict[str, Any] = {"out": str(path), "recipe": model.recipe.name, "deviation": model.deviation}
    return result | {name: values.tolist() for name, values in arrays.items()}


def sphere(
    run: Run,
    *,
    basis: str = "random",
    radius: float | None = None,
    grid: int = 10,
    seed: int = 0,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """f⁻¹(R(S)): a sphere in three dimensions of latent space, decoded point by point (NICE App. A).

    R takes the sphere into a random subspace, drawn from the seed, or, as "top", to the three components of largest
    σ_d. In units of the prior's scale, around its mode, all points have one norm: the root of the prior's mean
    square, √D deviations, where nearly all of its draws lie; of "top", that of its three components, √3 deviations.
    """
    if basis not in BASES:
        raise NicestError(f"expected a basis of {', '.join(BASES)}, got {basis!r}")
    if grid < 1:
        raise NicestError(f"expected a grid of 1 or more a side, got {grid}")
    if radius is not None and not 0 < radius < math.inf:
        raise NicestError(f"expected a radius above 0, such as 10, got {radius}")
    model = Model.with_codes(run)
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
    asked = {"basis": basis, "radius": length, "grid": grid, "seed": seed}
    return {"out": str(path), "recipe": model.recipe.name, "typical_radius": typical, **asked}


def rotation(dim: int, seed: int) -> np.ndarray:
    """Three orthonormal directions (3, D), uniform among all: what a random rotation makes of the first three axes."""
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, 3)))
    return (q * np.sign(np.diag(r))).T


def sphere_points(n: int) -> np.ndarray:
    """n x n points of the unit sphere, (n, n, 3): rows from north to south, columns once around.

    Heights are evenly spaced, and so, as Archimedes found, every point stands for the same area.
    """
    return _points((1 - (2 * np.arange(n) + 1) / n)[:, None], 2 * np.pi * np.arange(n) / n)


def even_points(n: int) -> np.ndarray:
    """n points of the unit sphere, (n, 3), from north to south, each turned by the golden angle from the last."""
    return _points(1 - (2 * np.arange(n) + 1) / n, np.pi * (3 - math.sqrt(5)) * np.arange(n))


def _points(height: np.ndarray, angle: np.ndarray) -> np.ndarray:
    level = np.sqrt(1 - height**2)
    return np.stack(np.broadcast_arrays(level * np.cos(angle), level * np.sin(angle), height), -1)


def interpolate(
    run: Run,
    *,
    pairs: Sequence[tuple[int, int]] | None = None,
    steps: int = 10,
    way: str = "straight",
    split: str = "test",
    out: str | Path | None = None,
) -> dict[str, Any]:
    """From one image to another through latent space, `steps` images with both ends; beside it, through pixels.

    The way is "straight", h = (1 - t) h₀ + t h₁, or "spherical", around the prior's mode. Pairs are places in the
    split; without them the first ten images go two by two.
    """
    if way not in WAYS:
        raise NicestError(f"expected a way of {', '.join(WAYS)}, got {way!r}")
    if steps < 2:
        raise NicestError(f"expected 2 steps, both ends, or more, got {steps}")
    model = Model.with_codes(run)
    path = model.path(out, "interpolate")
    rows = run.rows(split)
    chosen = list(pairs or [(k, k + 1) for k in range(0, min(10, len(rows)) - 1, 2)])
    for each in (place for pair in chosen for place in pair):
        if not 0 <= each < len(rows):
            raise NicestError(f"expected images 0 to {len(rows) - 1} of the {split} split, got {each}")
    x = rows[torch.tensor(chosen, device=rows.device).flatten()]
    (h0, h1), (y0, y1) = (ends.unflatten(0, (-1, 2)).unbind(1) for ends in (model.encode(x), model.middle(x)))
    t = torch.linspace(0, 1, steps).to(h0)[:, None]
    h = model.between(h0, h1, steps, way)
    latent = model.decode(h.flatten(0, 1)).unflatten(0, h.shape[:2])
    pixels = model.units.leave(straight(y0, y1, t).flatten(0, 1)).unflatten(0, h.shape[:2])
    images = {"images": model.images(latent), "pixels": model.images(pixels)}
    arrays = {**images, "h": h.cpu().numpy(), "pairs": np.array(chosen)}

    def figure() -> Figure:
        panels = {f"through latent space, {way}": "images", "through pixels, straight": "pixels"}
        grids = {name: model.grid(arrays[key]) for name, key in panels.items()}
        names = [f"{start} → {end}" for start, end in chosen]
        return plots.panel_figure(grids, names, title=f"{model.heading}: between images of the {split} split")

    _write(path, arrays, figure)
    asked = {"split": split, "pairs": [list(pair) for pair in chosen], "steps": steps, "way": way}
    return {"out": str(path), "recipe": model.recipe.name, **asked}


def straight(start: Tensor, end: Tensor, t: Tensor) -> Tensor:
    """(1 - t) start + t end: (P, D) and (T, 1) give (P, T, D)."""
    return (1 - t) * start[:, None] + t * end[:, None]


def spherical(start: Tensor, end: Tensor, t: Tensor) -> Tensor:
    """The direction turns evenly from start to end and the length goes straight; (P, D) and (T, 1) give (P, T, D).

    Where the two lie on one line through 0, or one is 0, the way is straight.
    """
    lengths = [each.norm(dim=1)[:, None, None] for each in (start, end)]
    tiny = torch.finfo(start.dtype).tiny
    one, two = (each[:, None] / length.clamp_min(tiny) for each, length in zip((start, end), lengths, strict=True))
    angle = (one * two).sum(-1, keepdim=True).clamp(-1, 1).acos()
    turned = (((1 - t) * angle).sin() * one + (t * angle).sin() * two) / angle.sin()
    around = ((1 - t) * lengths[0] + t * lengths[1]) * turned
    plane = (angle.sin() > 1e-3) & (lengths[0] > 0) & (lengths[1] > 0)
    return torch.where(plane, around, straight(start, end, t))


def truncate(
    run: Run, *, n: int = 8, kept: Sequence[int] | None = None, split: str = "test", out: str | Path | None = None
) -> dict[str, Any]:
    """What is left of images when only k components of their codes are kept, those of largest σ_d.

    The other components are put to the prior's mode. Beside it stands a PCA of the training data that keeps k
    directions. Errors are mean squares of the images that come out, over pixels and up to 1000 images, on the
    interval of the recipe or of standardised columns.
    """
    model = Model.with_codes(run)
    path = model.path(out, "truncate", images=False)
    rows, dim = run.rows(split), model.data.dim
    if not 1 <= n <= len(rows):
        raise NicestError(f"expected 1 to {len(rows)} images of the {split} split, got {n}")
    counts = sorted({*kept} if kept else {*(k for k in KEPT if k < dim), dim})
    if not 0 <= counts[0] <= counts[-1] <= dim:
        raise NicestError(f"expected to keep 0 to {dim} components, got {counts[0] if counts[0] < 0 else counts[-1]}")
    x = rows[: max(n, EXAMPLES)]
    y, h = model.middle(x), model.encode(x)
    mean, _, directions = (each.to(y) for each in principal(model.units, run.rows("train")))
    shown: dict[str, list[Tensor]] = {"nice": [], "pca": []}
    errors: dict[str, list[float]] = {"nice": [], "pca": []}
    for k in counts:
        v = directions[:, :k]
        cut = {"nice": model.decode(model.cut(h, k)), "pca": model.units.leave(mean + (y - mean) @ v @ v.mT)}
        for name, images in cut.items():
            shown[name].append(images[:n])
            errors[name].append(float((model.middle(images) - y).square().mean(dtype=torch.float64)))
    found = {f"{name}_errors": values for name, values in errors.items()}
    arrays = {name: model.images(torch.stack(images, 1)) for name, images in shown.items()}
    arrays |= {name: np.array(values) for name, values in {**found, "kept": counts}.items()}
    arrays["truth"] = model.images(x[:n])

    def figure() -> Figure:
        flat = len(model.data.shape) == 1
        grids = {} if flat else {name.upper(): model.grid(arrays[name]) for name in errors}
        curves = {name.upper(): values for name, values in errors.items()}
        return plots.truncation_figure(counts, curves, grids, title=f"{model.heading}: k components of each code kept")

    _write(path, arrays, figure)
    asked = {"split": split, "n": n, "examples": len(x), "kept": counts}
    return {"out": str(path), "recipe": model.recipe.name, **asked, **found}


def principal(units: Units, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (D,), standard deviations (D,) from the largest, and directions (D, D), in columns, of rows y.

    In float64, dequantisation noise included.
    """
    noise = torch.Generator(rows.device).manual_seed(0)
    mean, covariance = units.moments(rows) or moments(units.enter(rows, generator=noise))
    variances, directions = torch.linalg.eigh(covariance)
    return mean, variances.clamp_min(0).sqrt().flip(0), directions.flip(1)


def _write(path: Path, arrays: dict[str, np.ndarray], figure: Callable[[], Figure]) -> None:
    if path.suffix.lower() == ".npz":
        save_arrays(path, **arrays)
    else:
        plots.save_figure(figure(), path)
