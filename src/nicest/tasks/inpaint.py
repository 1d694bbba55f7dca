"""Inpainting: fill in hidden parts of images, as a figure, an animation and arrays (NICE §5.2)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from nicest.errors import NicestError
from nicest.flows import Flow
from nicest.inference.fill import PRESETS, Filled, Schedule, fill
from nicest.inference.langevin import draw as draw_hidden
from nicest.plots import heading, image_grid, panel_figure, save_animation, save_figure
from nicest.progress import Bar
from nicest.recipes.recipe import DataSettings
from nicest.runs.run import Run
from nicest.runs.runtime import rows_to
from nicest.tasks.masks import hidden_by, mask_list, mask_name
from nicest.tasks.options import Seed, integer, option, out_file, real, to_read
from nicest.tasks.results import Result, cell, columns
from nicest.tasks.rows import require_flow, require_outputs
from nicest.tasks.sample import as_images, brightest, draw, save_arrays

SUFFIXES = (".png", ".svg", ".pdf", ".gif", ".npz")
FRAMES = 40  # of an animation
DRAWING = 500  # moves of a chain that draws
MOST_SAMPLES = 10_000  # drawn to be inpainted
LARGEST = 1 << 30  # numbers of the states that are kept


@dataclass(frozen=True, kw_only=True)
class Inpainting(Result):
    """Log-likelihoods of inpainted images, on the recipe's interval, without noise; one entry of `masks` per mask.

    A truth is evaluated at the middle of its levels, which is higher than the mean over the noise. An image is above
    its truth if its likeliest chain ends there. With `draws`, masks have the acceptance and R-hat of each image.
    """

    out: list[str]
    dataset: str
    split: str
    shape: list[int]
    n: int
    chains: int
    seed: int
    draws: bool
    steps: int
    direction: str | None = None
    gradient_scale: float | None = None
    noise: float | None = None
    seconds: float
    masks: list[dict[str, Any]]

    def lines(self) -> Iterator[Any]:
        source = "samples" if self.split == "samples" else f"{self.split} split"
        noise = "" if self.noise is None else f", noise {self.noise:g}"
        what = f"{self.n} images under each mask, chains {self.chains}; {self.steps} steps{noise}"
        yield f"{Path(self.dataset).name}, {source}: {what}"
        if self.draws:
            table = columns("mask", "draws, nats", ">truth, nats", "moves taken", "largest R-hat")
        else:
            table = columns("mask", ">start, nats", ">end, nats", ">truth, nats", ">gain, nats", ">above truth")
        for row in self.masks:
            keys = [f"mean_{name}_nats" for name in ("start", "end", "truth")]
            means = [f"{row[key]:.2f}" for key in keys if key in row]
            if self.draws:
                last = f"{statistics.fmean(row['acceptance']):.0%}", f"{max(row['r_hat']):.2f}"
            else:
                last = f"{row['mean_gain_nats']:+.2f}", f"{row['images_above_truth']} of {len(row['images'])}"
            table.add_row(cell(row["mask"]), *means, *last)
        yield table
        agree = "R-hat near 1: the chains of an image agree, and draws are of the whole density."
        above = "Above truth: the best chain ends with a higher log-likelihood than the original."
        yield f"Nats are means. {agree if self.draws else above}"
        yield f"written in {self.seconds:.1f} s: {' '.join(self.out)}"


def inpaint(
    run: Run,
    *,
    mask: Annotated[
        Sequence[Any],
        option(
            parser=to_read,
            help="What to hide: top, left, middle-rows, random:75, rows:0-14, box:7-21,7-21, several of them"
            " joined by +, an image or an .npy file; repeatable.",
            show_default="paper, the ten masks of its figure",
        ),
    ] = ("paper",),
    n: Annotated[int, integer(1, 100_000, "Images per mask.", "-n")] = 10,
    chains: Annotated[int, integer(1, 100, "Fillings of each image, each from its own start.")] = 1,
    draws: Annotated[
        bool, option("--draws", help="Draw fillings from the model's density given the rest, by MCMC chains.")
    ] = False,
    preset: Annotated[
        Literal["ours", "authors"], option(help="The schedule of the ascent: ours, or that of the authors' code.")
    ] = "ours",
    steps: Annotated[int | None, integer(1, 1_000_000, "Iterations.", show_default="the preset's")] = None,
    direction: Annotated[
        Literal["adam", "gradient"] | None,
        option(help="Follow the gradient, or Adam's direction.", show_default="the preset's"),
    ] = None,
    gradient_scale: Annotated[
        float | None, real(0, 1000, "Multiplies the direction.", show_default="the preset's")
    ] = None,
    noise: Annotated[
        float | None, real(0, 1000, "Multiplies the noise; 0 for none.", show_default="the preset's")
    ] = None,
    split: Annotated[
        Literal["train", "valid", "test", "samples"],
        option(help="Which split of the data, or samples of the model, which need no data."),
    ] = "test",
    seed: Seed = 0,
    out: Annotated[
        str | Path | Sequence[str | Path],
        out_file(
            "The figure (.png, .svg, .pdf), an animation (.gif) or arrays (.npz); repeatable.",
            show_default="inpaint.png",
        ),
    ] = "inpaint.png",
) -> Inpainting:
    """Hide part of each image and fill it in, by maximising the log-likelihood (NICE §5.2) or by draws.

    --draws runs MCMC chains instead of the ascent. Each chain starts at the part of a sample that fits the observed
    pixels well, and takes `steps` Langevin moves (500 by default) after a warm-up. R-hat says how far the chains agree.

    Example: nicest inpaint runs/demo --mask left --mask random:75 --chains 4 --out a.png --out a.gif

    Example: nicest inpaint digits-conv --mask bottom --draws --chains 4
    """
    require_flow(run, "inpainting")
    began = time.perf_counter()
    paths = [Path(each) for each in ([out] if isinstance(out, str | Path) else out)]
    kinds = {path.suffix.lower() for path in paths}
    if not kinds <= set(SUFFIXES):
        raise NicestError(f"expected files that end in {', '.join(SUFFIXES)}, got {', '.join(map(str, paths))}")
    chosen = {"direction": direction, "gradient_scale": gradient_scale, "noise": noise}
    if draws and (preset != "ours" or any(value is not None for value in chosen.values())):
        raise NicestError(
            "preset, direction, gradient scale and noise apply to the ascent only: leave them out to draw"
        )
    schedule = choose_schedule(preset, steps=DRAWING if draws and steps is None else steps, **chosen)
    flow, recipe = run.flow, run.recipe
    data, masks, unit = recipe.data, mask_list(mask), flow.units.interval_nats
    if len(data.shape) == 1 and kinds != {".npz"}:
        raise NicestError(f"rows of {data.dim} numbers are not images: write arrays, to inpaint.npz")
    require_outputs(run, *paths)
    if split == "samples":
        source = draw(run, min(n * len(masks), MOST_SAMPLES), seed=seed).reshape(-1, data.dim)
    else:
        source = run.splits.split(split)
    if not 1 <= n <= len(source):
        raise NicestError(f"expected 1 to {len(source)} {_images_of(split)} under each mask, got {n}")
    index = np.arange(len(masks) * n) % len(source)
    hidden = np.concatenate([hidden_by(each, data.shape, n, seed=seed + k) for k, each in enumerate(masks)])
    x = rows_to(source[index], run.device)
    looks = spread(schedule.steps) if kinds & {".gif", ".npz"} else ()
    if (numbers := len(x) * chains * data.dim * (2 + len(looks))) > LARGEST:
        raise NicestError(f"expected at most {LARGEST:,} numbers to keep, got {numbers:,}: use fewer images or chains")
    where = torch.from_numpy(hidden.reshape(len(x), -1)).to(run.device)
    quality: dict[str, Tensor] = {}
    with Bar("inpainting", 1000) as bar:
        if draws:
            filled, quality = drawn(flow, x, where, chains, schedule.steps, seed, bar)
        else:
            watch = lambda share, nats: bar.update(int(1000 * share), f"{nats + unit:.1f} nats")  # noqa: E731
            filled = fill(flow, x, where, schedule=schedule, chains=chains, looks=looks, seed=seed, watch=watch)
    with torch.no_grad():
        truth_nats = flow.log_prob(x, noise=False).double().cpu().numpy()
    arrays = {
        "truth": as_images(source[index], data),
        "hidden": hidden,
        "states": as_images(filled.states.cpu().numpy(), data),
        "nats": filled.nats.cpu().numpy() + unit,
        "truth_nats": truth_nats + unit,
        "looks": np.array(filled.looks),
    }
    names = [mask_name(each) for each in masks]
    title = f"{heading(data.name, recipe.name)}: hidden parts of {_images_of(split)}, filled in"
    for path in paths:
        _write(path, arrays, names, data, title, draws=draws)
    start, end, truth = arrays["nats"][0], arrays["nats"][-1], arrays["truth_nats"]
    summaries = []
    for name, each in zip(names, np.split(np.arange(len(index)), len(masks)), strict=True):
        nats = {"truth": truth[each], "end": end[:, each]} | ({} if draws else {"start": start[:, each]})
        found: dict[str, Any] = {"mask": name, "images": index[each].tolist()}
        found |= {f"{of}_nats": values.tolist() for of, values in nats.items()}
        found |= {f"mean_{of}_nats": float(values.mean()) for of, values in nats.items()}
        found["images_above_truth"] = int((end.max(0) > truth)[each].sum())
        found |= {of: values[each].tolist() for of, values in quality.items()}
        found |= {} if draws else {"mean_gain_nats": float((end - start)[:, each].mean())}
        summaries.append(found)
    told: dict[str, Any] = {"dataset": data.name, "split": split, "shape": list(data.shape), "n": n, "seed": seed}
    told |= {"steps": schedule.steps} if draws else asdict(schedule)
    told |= {"out": list(map(str, paths)), "seconds": time.perf_counter() - began}
    return Inpainting(chains=chains, draws=draws, masks=summaries, **told)


def drawn(
    flow: Flow, x: Tensor, hidden: Tensor, chains: int, steps: int, seed: int, bar: Bar
) -> tuple[Filled, dict[str, Tensor]]:
    """Return states of the chains, and for each image the fraction of accepted moves and R-hat."""
    rows = x if x.is_floating_point() else x.float()
    found = draw_hidden(
        flow,
        rows,
        hidden,
        steps=steps,
        warmup=max(1, steps // 3),
        keep=min(FRAMES, steps),
        chains=chains,
        seed=seed,
        watch=lambda fraction: bar.update(int(1000 * fraction)),
    )
    with torch.no_grad():
        nats = torch.stack(
            [flow.log_prob(each.flatten(0, 1), noise=False).unflatten(0, (chains, -1)) for each in found.states]
        )
    quality = {"acceptance": found.acceptance.cpu(), "r_hat": found.r_hat.cpu()}
    return Filled(found.looks, found.states.to(x.dtype), nats), quality


def _images_of(split: str) -> str:
    """Describe the images of a split."""
    return "samples of the model" if split == "samples" else f"images of the {split} split"


def choose_schedule(preset: str = "ours", **changes: float | str | None) -> Schedule:
    """Return a preset with some of its settings changed."""
    if preset not in PRESETS:
        raise NicestError(f"expected a preset of {', '.join(PRESETS)}, got {preset!r}")
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(PRESETS[preset], **given)  # type: ignore[arg-type]


def spread(steps: int, count: int = FRAMES) -> tuple[int, ...]:
    """Return iterations to keep, evenly spaced in log(1 + i/100), as the length of the path grows."""
    return tuple(round(100 * ((1 + steps / 100) ** (k / count) - 1)) for k in range(1, count))


def _write(
    path: Path, arrays: dict[str, np.ndarray], names: Sequence[str], data: DataSettings, title: str, *, draws: bool
) -> None:
    if path.suffix.lower() == ".npz":
        ends = {"start": arrays["states"][0], "result": arrays["states"][-1], "masks": np.array(names)}
        save_arrays(path, **{name: array for name, array in arrays.items() if name != "states"}, **ends)
        return
    truth, states = arrays["truth"], arrays["states"]
    per_row, rows = len(truth) // len(names), np.arange(len(truth))
    white = brightest(truth, data)
    order = arrays["nats"][-1].argsort(0)[::-1]  # the likeliest chain first
    if path.suffix.lower() == ".gif":
        frames = [image_grid(state[order[0], rows], brightest=white, columns=per_row, size=240) for state in states]
        save_animation(frames, path)
        return
    panels = {"truth": truth}
    if draws:
        panels["observed"] = np.where(arrays["hidden"], 0, truth)
        order = order * 0 + np.arange(len(order))[:, None]  # a draw is not better for being likely
    else:
        panels["start"] = states[0][order[0], rows]
    for k, chain in enumerate(order):
        name = "draw" if draws else "result"
        panels[name if len(order) == 1 else f"{name} {k + 1}"] = states[-1][chain, rows]
    grids = {name: image_grid(images, brightest=white, columns=per_row, size=1) for name, images in panels.items()}
    save_figure(panel_figure(grids, names, title=title), path)
