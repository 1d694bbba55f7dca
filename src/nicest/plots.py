"""Figures: arrays in, pictures out."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from nicest.errors import NicestError
from nicest.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, ACCENT, QUIET = "#1b3a4b", "#d1495b", "#8d99ae"
DPI = 130


def _blank(**how: Any) -> Figure:
    """Return an empty figure; matplotlib is imported here, because the import is slow."""
    from matplotlib.figure import Figure

    return Figure(**how, layout="constrained")


def image_grid(
    images: np.ndarray, *, brightest: float, columns: int | None = None, gap: int = 1, size: int = 720
) -> Image.Image:
    """Return images (N, H, W) or (N, C, H, W) as one picture of at least `size` pixels; `brightest` is white."""
    n, (height, width) = len(images), images.shape[-2:]
    columns = columns or math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    grey = np.clip(images.astype(np.float64) * 255 / brightest, 0, 255).round().astype(np.uint8)
    colour = grey if grey.ndim == 4 else grey[:, None]
    sheet = np.full((rows * (height + gap) + gap, columns * (width + gap) + gap, colour.shape[1]), 96, np.uint8)
    for i, image in enumerate(colour):
        top, left = gap + i // columns * (height + gap), gap + i % columns * (width + gap)
        sheet[top : top + height, left : left + width] = image.transpose(1, 2, 0)
    picture = Image.fromarray(sheet.squeeze(-1) if sheet.shape[-1] == 1 else sheet)
    zoom = math.ceil(size / max(picture.size))
    return picture.resize((picture.width * zoom, picture.height * zoom), Image.Resampling.NEAREST)


def heading(data: str, recipe: str) -> str:
    """Return the start of a title: the name of the data, of a path the last part, and that of the recipe."""
    return f"{Path(data).absolute().name} (recipe {recipe})".replace("$", r"\$")


def spectrum_figure(
    deviations: np.ndarray, *, title: str, pca: np.ndarray | None = None, whitened: bool = False
) -> Figure:
    """Plot the sorted standard deviations of the components, linearly and logarithmically (NICE App. A).

    Next to them: those of a PCA of the data or, if the data are whitened, 1.
    """
    figure, ranks = _blank(figsize=(9, 3.6)), np.arange(1, len(deviations) + 1)
    for ax, scale in zip(figure.subplots(1, 2), ("linear", "log"), strict=True):
        ax.plot(ranks, deviations, color=INK, linewidth=1.8, label="NICE, of each component")
        if pca is not None:
            ax.plot(ranks, pca, color=ACCENT, linewidth=1.4, linestyle="--", label="PCA of the data")
        if whitened:
            ax.axhline(1, color=ACCENT, linewidth=1.4, linestyle="--", label="whitened data")
        ax.legend(frameon=False, fontsize=9)
        ax.set(xlabel="component d, sorted", ylabel="standard deviation", yscale=scale)
        ax.grid(alpha=0.25)
    figure.suptitle(title, wrap=True)
    return figure


def sphere_figure(grid: Image.Image, n: int, *, title: str) -> Figure:
    """Draw images of an n x n grid of points of a sphere as a map: longitude to the right, north at the top."""
    width = 6.2
    figure = _blank(figsize=(width + 0.5, width * grid.height / grid.width + 0.4))
    ax = _show_grid(figure.subplots(), grid)
    marks = range(0, n, math.ceil(n / 12))
    latitudes = [math.degrees(math.asin(1 - (2 * i + 1) / n)) for i in range(n)]
    ax.set_xticks([grid.width * (k + 0.5) / n for k in marks], [f"{360 * k / n:.0f}°" for k in marks])
    ax.set_yticks([grid.height * (k + 0.5) / n for k in marks], [f"{latitudes[k]:+.0f}°" for k in marks])
    ax.set(xlabel="longitude", ylabel="latitude")
    figure.suptitle(title, fontsize=11, wrap=True)
    return figure


def truncation_figure(
    kept: Sequence[int], errors: Mapping[str, Sequence[float]], grids: Mapping[str, Image.Image], *, title: str
) -> Figure:
    """Draw images of two models by the number of components kept, one panel each, and the mean errors."""
    height = 3.8
    widths = [height * grid.width / grid.height for grid in grids.values()] + [4.6]
    figure = _blank(figsize=(sum(widths) + 0.6, height + 0.9))
    *panels, ax = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    marks = [str(k) for k in kept]
    for panel, (name, grid) in zip(panels, grids.items(), strict=True):
        _show_grid(panel, grid).set(title=name, xlabel="components kept, k")
        panel.set_xticks([grid.width * (k + 0.5) / len(kept) for k in range(len(kept))], marks)
    for (name, values), colour, line in zip(errors.items(), (INK, ACCENT), ("-", "--"), strict=True):
        ax.plot(range(len(kept)), values, color=colour, linestyle=line, marker="o", markersize=4, label=name)
    ax.set_xticks(range(len(kept)), marks, fontsize=8)
    ax.set(xlabel="components kept, k", ylabel="mean squared error")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False)
    ax.grid(alpha=0.25)
    figure.suptitle(title, wrap=True)
    return figure


def _show_grid(ax: Axes, grid: Image.Image) -> Axes:
    """Draw a picture of images as it is, without a frame."""
    ax.imshow(np.asarray(grid), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, labelsize=8)
    return ax


def likelihood_figure(
    metrics: Sequence[Mapping[str, Any]], *, title: str, baselines: Mapping[str, float] | None = None
) -> Figure:
    """Plot training and validation nats over the epochs, with the test metrics of linear models as levels.

    The axis leaves out where training comes from, its lowest twentieth, and levels far below everything else.
    """
    figure = _blank(figsize=(8, 4.2))
    ax = figure.subplots()
    columns = [[row[key] for row in metrics] for key in ("epoch", "train_nats", "valid_nats")]
    epochs, train, valid = np.array(columns, dtype=float)  # None, where there is no number, is a hole
    ax.plot(epochs, train, color=QUIET, label="training")
    ax.plot(epochs, valid, color=ACCENT, linewidth=2, label="validation")
    bottom, top = np.nanpercentile([train, valid], (5, 100))
    span = max(top - bottom, 1.0)
    levels = {name: nats for name, nats in (baselines or {}).items() if nats > bottom - span / 2}
    bottom, top = min([bottom, *levels.values()]), max([top, *levels.values()])
    span = max(top - bottom, 1.0)
    ax.set_ylim(bottom - 0.08 * span, top + 0.05 * span)
    free = top + span  # labels stand beside their levels, or lower where that place is taken
    for name, nats in sorted(levels.items(), key=lambda level: -level[1]):
        ax.axhline(nats, color=INK, linewidth=0.8, linestyle=":")
        free = min(nats, free - 0.05 * span)
        label = f" {name.replace('_', ' ')} {nats:.1f}"
        ax.text(1, free, label, transform=ax.get_yaxis_transform(), va="center", fontsize=8, color=INK)
    ax.set(xlabel="epoch", ylabel="log-likelihood, nats", title=title)
    ax.legend(loc="best", frameon=False)
    ax.grid(alpha=0.25)
    return figure


def contact_sheet(pictures: Mapping[str, Path], *, title: str) -> Figure:
    """Draw pictures on disk in two columns, each under its name."""
    figure = _blank(figsize=(13, 4.6 * math.ceil(len(pictures) / 2)))
    figure.suptitle(title, fontsize=14)
    for ax, (name, path) in zip(_panels(figure, len(pictures), 2), pictures.items(), strict=True):
        ax.imshow(np.asarray(Image.open(path)), cmap="gray", interpolation="antialiased")
        ax.set_axis_off()
        ax.set_title(name)
    return figure


def _panels(figure: Figure, n: int, columns: int) -> list[Axes]:
    """Return n panels in rows of `columns`; the rest of the last row stays empty."""
    axes = figure.subplots(math.ceil(n / columns), columns, squeeze=False).ravel().tolist()
    for ax in axes[n:]:
        ax.set_axis_off()
    return axes[:n]


def picture_kind(path: Path) -> str:
    """Return the format of a picture by its name; refuse other names."""
    kind = path.suffix.lstrip(".").lower() or "png"
    if kind not in _blank().canvas.get_supported_filetypes():
        raise NicestError(f"expected a picture such as .png, .svg or .pdf, got {str(path)!r}")
    return kind


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure, whole or not at all."""
    buffer, kind = io.BytesIO(), picture_kind(path)
    figure.savefig(buffer, format=kind, dpi=_whole_pixels(figure, DPI))
    write_bytes(path, buffer.getvalue())


def _whole_pixels(figure: Figure, dpi: float) -> float:
    """Resize grids so that every pixel is a whole number of pixels of the picture; return its resolution."""
    grids = [ax for ax in figure.axes if any(image.get_interpolation() == "nearest" for image in ax.images)]
    if not grids:
        return dpi
    figure.set_dpi(dpi)
    figure.draw_without_rendering()
    sizes = [np.array(ax.images[0].get_size()[::-1]) for ax in grids]
    zoom = min(ax.bbox.width / size[0] for ax, size in zip(grids, sizes, strict=True))
    figure.set_dpi(1.02 * dpi * math.ceil(zoom) / zoom)  # a little more, as letters do not grow evenly
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    figure.set_size_inches(*((np.ceil(figure.bbox.size) + 1e-3) / figure.dpi))  # else it is cut off
    for ax, size in zip(grids, sizes, strict=True):
        corner, side = ax.bbox.p0.round(), size * max(1, math.floor(ax.bbox.width / size[0] + 1e-6))
        ax.set_position((*(corner / figure.bbox.size), *(side / figure.bbox.size)))
    return figure.dpi


def panel_figure(panels: Mapping[str, Image.Image], rows: Sequence[str], *, title: str) -> Figure:
    """Draw grids of images, each under its title, with the names of their rows at the left; flat ones in one column."""
    tall = max(grid.height / grid.width for grid in panels.values())
    columns = 1 if tall < 0.35 else len(panels) if len(panels) < 4 else math.ceil(len(panels) / 2)
    lines = math.ceil(len(panels) / columns)
    height = 4.2 * min(tall, 2.5)
    width = height / tall * (2 if columns == 1 else 1)
    figure = _blank(figsize=(width * columns + 1.4, (width * tall + 0.5) * lines + 0.6))
    step = next(iter(panels.values())).height / len(rows)
    axes = _panels(figure, len(panels), columns)
    for ax, (name, grid) in zip(axes, panels.items(), strict=True):
        _show_grid(ax, grid).set(title=name)
    for ax in axes[::columns]:
        ax.set_yticks([step * (k + 0.5) for k in range(len(rows))], rows, parse_math=False)
    figure.suptitle(title, wrap=True)
    return figure


def calibration_figure(
    levels: np.ndarray,
    curves: Mapping[str, np.ndarray],
    band: tuple[np.ndarray, np.ndarray],
    marked: Sequence[tuple[float, float]],
    pits: Mapping[str, np.ndarray],
    *,
    independent: int,
    title: str,
) -> Figure:
    """Plot the fraction of cells inside intervals of every level, with a band of chance, and a histogram of each PIT.

    There are curves for all cells and for the worst column. PITs are as certain as `independent` draws.
    """
    figure = _blank(figsize=(4.2 * len(pits) + 4.6, 4.6))
    figure.suptitle(title.replace("$", r"\$"), wrap=True)
    ax, *axes = figure.subplots(1, len(pits) + 1)
    ax.plot([0, 1], [0, 1], color=QUIET, linewidth=1, linestyle="--")
    ax.fill_between(levels, *band, color=QUIET, alpha=0.3, linewidth=0, label="chance allows")
    for (name, shares), colour in zip(curves.items(), (INK, ACCENT), strict=True):
        ax.plot(levels, shares, color=colour, linewidth=2 if colour == INK else 1.2, label=name.replace("$", r"\$"))
    for level, share in marked:
        ax.plot(level, share, "o", color=INK)
        beside = {"textcoords": "offset points", "fontsize": 8, "color": INK, "bbox": {"color": "w", "pad": 0.5}}
        if level != marked[-1][0]:  # where there is no room
            ax.annotate(f"{level:.0%}: {share:.0%}", (level, share), (-8, 4), ha="right", **beside)
    ax.text(0.97, 0.05, "overconfident:\nintervals too narrow", ha="right", color=QUIET, fontsize=9)
    ax.text(0.03, 0.72, "underconfident:\nintervals too wide", color=QUIET, fontsize=9)
    ax.set(xlabel="credible intervals of this level ...", ylabel="... hold this share of the cells")
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.legend(frameon=False, fontsize=8, loc="upper left")
    bins = 20 if independent >= 500 else 10
    spread = 3 * math.sqrt((bins - 1) / independent)  # of three standard deviations of a bin
    for ax, (name, pit) in zip(axes, pits.items(), strict=True):
        ax.axhspan(max(0, 1 - spread), 1 + spread, color=QUIET, alpha=0.3, linewidth=0, zorder=0)
        ax.hist(pit, bins=bins, range=(0, 1), weights=np.full(len(pit), bins / len(pit)), color=INK, rwidth=0.9)
        for end in (1 - spread, 1 + spread):
            ax.axhline(end, color=ACCENT, linewidth=1, linestyle="--")
        ax.set_title(name.replace("$", r"\$"), fontsize=10)
        ax.set(xlabel="share of the model's samples that are lower", xlim=(0, 1), ylim=(0, None))
    axes[0].set_ylabel("rows, 1 is what the model expects")
    return figure


def prediction_figure(
    median: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    *,
    name: str,
    level: float,
    observed: np.ndarray | None = None,
    pit: np.ndarray | None = None,
    title: str,
) -> Figure:
    """Plot intervals, medians and observed values of rows sorted by median, and a histogram of the PIT."""
    figure, order = _blank(figsize=(9, 3.6)), np.argsort(median)
    axes = figure.subplots(1, 2, width_ratios=(2, 1)) if pit is not None else [figure.subplots()]
    ranks = np.arange(len(order))
    ax = axes[0]
    ax.fill_between(ranks, low[order], high[order], color=QUIET, alpha=0.35, linewidth=0, label=f"{level:.0%} interval")
    if observed is not None:
        ax.plot(ranks, observed[order], ".", color=ACCENT, markersize=3, alpha=0.7, label="observed")
    ax.plot(ranks, median[order], color=INK, linewidth=1.6, label="median")
    ax.set(xlabel="rows, sorted by the predicted median", ylabel=name.replace("$", r"\$"))
    ax.legend(frameon=False)
    if pit is not None:
        axes[1].hist(pit, bins=10, range=(0, 1), color=QUIET)
        even = len(pit) / 10
        spread = 2 * math.sqrt(even * 0.9)
        axes[1].axhspan(even - spread, even + spread, color=INK, alpha=0.15, linewidth=0)
        axes[1].axhline(even, color=INK, linewidth=1)
        axes[1].set(xlabel="share below the observed (PIT)", ylabel="rows", xlim=(0, 1))
    figure.suptitle(title, fontsize=11)
    return figure


def classification_figure(
    confusion: np.ndarray, confidence: np.ndarray, right: np.ndarray, share: np.ndarray, *, title: str
) -> Figure:
    """Draw the confusion of labels, and accuracy by the probability of the answer, in bins."""
    figure, n = _blank(figsize=(9, 4.2)), len(confusion)
    left, ax = figure.subplots(1, 2)
    shares = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    left.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for i, j in zip(*np.nonzero(confusion), strict=True):
        colour = "white" if shares[i, j] > 0.5 else INK
        left.text(j, i, str(confusion[i, j]), ha="center", va="center", color=colour, fontsize=8 if n <= 10 else 5)
    left.set(xlabel="most probable label", ylabel="label")
    if n <= 10:
        left.set(xticks=range(n), yticks=range(n))
    ax.plot([0, 1], [0, 1], color=QUIET, linewidth=1)
    ax.scatter(confidence, right, s=20 + 400 * share, color=ACCENT, alpha=0.8, label="area: images")
    ax.set(
        xlabel="probability of the most probable label", ylabel="how often it is right", xlim=(0, 1.05), ylim=(0, 1.05)
    )
    ax.grid(alpha=0.25)
    figure.suptitle(title, fontsize=11)
    return figure


def save_animation(frames: Sequence[Image.Image], path: Path) -> None:
    """Write pictures of one size as a GIF."""
    write_bytes(path, animation(frames))


def animation(frames: Sequence[Image.Image], *, milliseconds: int = 80) -> bytes:
    """Return pictures of one size as a GIF that loops, and holds its last picture a while."""
    durations = [milliseconds] * (len(frames) - 1) + [1500]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
    return buffer.getvalue()
