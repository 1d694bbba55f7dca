"""Pictures of the latent space of a flow: spectrum and sphere (NICE App. A), interpolation, truncation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from nicest import plots
from nicest.errors import NicestError
from nicest.runs.run import Run
from nicest.tasks import options
from nicest.tasks.latent_model import Model, principal, straight
from nicest.tasks.pictures import save_arrays
from nicest.tasks.results import Result, columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASES = ("random", "top")
WAYS = ("straight", "spherical")
KEPT = (0, 1, 2, 5, 10, 20, 50, 100, 200)  # numbers of components, and all
EXAMPLES = 1000  # at most, over which errors are averaged


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
    pca: Annotated[bool, options.option(help="Show the spectrum of a PCA of the training data, too.")] = True,
    out: Annotated[str | Path | None, options.figure("spectrum")] = None,
) -> Spectrum:
    """Plot the sorted sigma_d of the scaling layer: how much each component varies (NICE App. A).

    A component's standard deviation is `deviation` sigma_d, which the figure shows. The PCA is of the training data on
    the recipe's interval, with noise. Behind a whitening layer every deviation of the data is 1.

    Example: nicest latent spectrum runs/demo
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
        Literal["random", "top"],
        options.option(help="Random axes, or the three components with the largest sigma_d."),
    ] = "random",
    radius: Annotated[
        float | None,
        options.real(0, 1_000_000, "In units of the prior.", show_default="the typical norm of a draw"),
    ] = None,
    grid: Annotated[int, options.integer(1, 200, "Images per side.")] = 10,
    seed: options.Seed = 0,
    out: Annotated[str | Path | None, options.figure("sphere")] = None,
) -> Sphere:
    """Decode a sphere in three dimensions of latent space (NICE App. A).

    Example: nicest latent sphere runs/demo --basis top
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
    told: dict[str, Any] = {"typical_radius": typical, "basis": basis, "radius": length, "grid": grid, "seed": seed}
    return Sphere(out=str(path), recipe=model.recipe.name, **told)


def sphere_points(n: int) -> np.ndarray:
    """Return n x n points of the unit sphere, (n, n, 3): rows from north to south, columns once around.

    Evenly spaced heights give every point the same area (Archimedes).
    """
    return _points((1 - (2 * np.arange(n) + 1) / n)[:, None], 2 * np.pi * np.arange(n) / n)


def even_points(n: int) -> np.ndarray:
    """Return n points of the unit sphere, (n, 3), from north to south, each turned by the golden angle."""
    return _points(1 - (2 * np.arange(n) + 1) / n, np.pi * (3 - math.sqrt(5)) * np.arange(n))


def _points(height: np.ndarray, angle: np.ndarray) -> np.ndarray:
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
        options.integer(
            0, 10**9, "The index of the first image in the split; repeatable.", "--from", show_default="0, 2, 4, 6, 8"
        ),
    ] = (),
    end: Annotated[
        Sequence[int],
        options.integer(
            0, 10**9, "The index of the last image; one for each --from.", "--to", show_default="1, 3, 5, 7, 9"
        ),
    ] = (),
    steps: Annotated[int, options.integer(2, 1000, "Images per interpolation, both ends included.")] = 10,
    way: Annotated[
        Literal["straight", "spherical"],
        options.option(help="Along a straight line, or along an arc around the mode of the prior."),
    ] = "straight",
    split: options.Split = "test",
    out: Annotated[str | Path | None, options.figure("interpolate")] = None,
) -> Interpolation:
    """Interpolate between images in latent space, and in pixel space for comparison.

    Example: nicest latent interpolate runs/demo --from 3 --to 8 --from 4 --to 5
    """
    if len(start) != len(end):
        raise NicestError(f"expected as many --to as --from, got {len(end)} and {len(start)}")
    if way not in WAYS:
        raise NicestError(f"expected a way of {', '.join(WAYS)}, got {way!r}")
    if steps < 2:
        raise NicestError(f"expected 2 steps, both ends, or more, got {steps}")
    model = Model.with_codes(run)
    path = model.path(out, "interpolate")
    rows = run.rows(split)
    chosen = list(zip(start, end, strict=True)) or [(k, k + 1) for k in range(0, min(10, len(rows)) - 1, 2)]
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
    n: Annotated[int, options.integer(1, 1000, "Images in the figure.", "-n")] = 8,
    keep: Annotated[
        Sequence[int],
        options.integer(
            0, 10**9, "Number of components to keep; repeatable.", show_default="0, 1, 2, 5, 10, ... 200, all"
        ),
    ] = (),
    split: options.Split = "test",
    out: Annotated[str | Path | None, options.figure("truncate")] = None,
) -> Truncation:
    """Reconstruct images from the components with the largest sigma_d, next to a PCA.

    The other components are set to the prior's mode.

    Example: nicest latent truncate runs/demo -n 8
    """
    model = Model.with_codes(run)
    path = model.path(out, "truncate", images=False)
    rows, dim = run.rows(split), model.data.dim
    if not 1 <= n <= len(rows):
        raise NicestError(f"expected 1 to {len(rows)} images of the {split} split, got {n}")
    counts = sorted({*keep} if keep else {*(k for k in KEPT if k < dim), dim})
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
    found: dict[str, Any] = {f"{name}_errors": values for name, values in errors.items()}
    arrays = {name: model.images(torch.stack(images, 1)) for name, images in shown.items()}
    arrays |= {name: np.array(values) for name, values in {**found, "kept": counts}.items()}
    arrays["truth"] = model.images(x[:n])

    def figure() -> Figure:
        flat = len(model.data.shape) == 1
        grids = {} if flat else {name.upper(): model.grid(arrays[name]) for name in errors}
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
