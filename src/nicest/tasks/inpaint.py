"""Filling in what is missing of the images of a run, as figure, film and arrays (NICE §5.2)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nicest.errors import NicestError
from nicest.files import require_writable
from nicest.flows import Flow
from nicest.flows.units import Bounds
from nicest.inference.fill import PRESETS, Filled, Schedule, fill
from nicest.inference.impute import impute_rows
from nicest.inference.langevin import ALIKE
from nicest.plots import heading, image_grid, panel_figure, save_animation, save_figure
from nicest.progress import Bar
from nicest.recipes.recipe import DataSettings
from nicest.runs.folder import require_own_file
from nicest.runs.run import Run
from nicest.runs.runtime import rows_to
from nicest.tasks.masks import Mask, hidden_by, mask_list, mask_name
from nicest.tasks.pictures import as_images, brightest, save_arrays
from nicest.tasks.sample import draw

SUFFIXES = (".png", ".svg", ".pdf", ".gif", ".npz")
FRAMES = 40  # of an animation
DRAWING = 500  # moves of a chain that draws
MOST_SAMPLES = 10_000  # that are drawn to be filled in
LARGEST = 1 << 30  # numbers of the images that are kept on their way


def inpaint(
    run: Run,
    *,
    mask: Mask | Sequence[Mask] = "paper",
    n: int = 10,
    split: str = "test",
    preset: str = "ours",
    steps: int | None = None,
    direction: str | None = None,
    gradient_scale: float | None = None,
    noise: float | None = None,
    chains: int = 1,
    draws: bool = False,
    seed: int = 0,
    out: str | Path | Sequence[str | Path] = "inpaint.png",
) -> dict[str, Any]:
    """Hide a part of n images under each mask, and find it again by climbing the log-likelihood (NICE §5.2).

    The images are of a `split` of the data, or "samples" of the model itself, which need no data.

    Every file in `out` is written by its ending: the figure's panels (.png, .svg, .pdf), an animation of the ascent
    (.gif), arrays (.npz). The masks take their images from the split one after the other, as the figure does. Nats
    are on the recipe's interval, the units of `evaluate`, but without its noise: a truth is scored at the middle of
    its levels, which is higher than the mean over the noise. An image is above its truth where its likeliest chain
    ends so.

    With `draws` nothing climbs: each chain draws the hidden from the model's density given the observed. It starts at
    the part of a sample of the model that goes well with the observed, and goes on by Langevin moves that are exact in
    the long run, `steps` of them (500, unless told) after a warm-up. What is written are states of the chains on their
    way, and `r_hat` says how far those of an image agree.
    """
    began = time.perf_counter()
    paths = _outputs(out)
    options = {"direction": direction, "gradient_scale": gradient_scale, "noise": noise}
    if draws and (preset != "ours" or any(value is not None for value in options.values())):
        raise NicestError(
            "preset, direction, gradient scale and noise apply to the ascent only: leave them out to draw"
        )
    schedule = choose_schedule(preset, steps=DRAWING if draws and steps is None else steps, **options)
    flow, recipe = run.flow, run.recipe
    data, masks, unit = recipe.data, mask_list(mask), flow.units.interval_nats
    if len(data.shape) == 1 and any(path.suffix.lower() != ".npz" for path in paths):
        raise NicestError(f"rows of {data.dim} numbers are not images: write arrays, to inpaint.npz")
    for path in paths:
        require_own_file(path, recipe)
        require_writable(path)  # before the ascent
    if split == "samples":
        source = draw(run, min(max(n, 1) * len(masks), MOST_SAMPLES), seed=seed).reshape(-1, data.dim)
    else:
        source = run.splits.split(split)
    if not 1 <= n <= len(source):
        raise NicestError(f"expected 1 to {len(source)} {_images_of(split)} under each mask, got {n}")
    index = np.arange(len(masks) * n) % len(source)
    hidden = np.concatenate([hidden_by(each, data.shape, n, seed=seed + k) for k, each in enumerate(masks)])
    x = rows_to(source[index], run.device)
    bounds = None
    if run.columns:
        lower, upper = torch.tensor([column.bounds for column in run.columns]).unbind(1)
        bounds = (lower, upper)
    looks = spread(schedule.steps) if any(path.suffix.lower() in (".gif", ".npz") for path in paths) else ()
    if (numbers := len(x) * chains * data.dim * (2 + len(looks))) > LARGEST:
        raise NicestError(f"expected at most {LARGEST:,} numbers to keep, got {numbers:,}: use fewer images or chains")
    where = torch.from_numpy(hidden.reshape(len(x), -1)).to(run.device)
    quality: dict[str, Tensor] = {}
    with Bar("inpainting", 1000) as bar:
        if draws:
            filled, quality = drawn(flow, x, where, chains, schedule.steps, bounds, seed, bar)
        else:
            filled = fill(
                flow,
                x,
                where,
                schedule=schedule,
                chains=chains,
                bounds=bounds,
                looks=looks,
                seed=seed,
                watch=lambda share, nats: bar.update(int(1000 * share), f"{nats + unit:.1f} nats"),
            )
    with torch.no_grad():
        truth_nats = flow.log_prob(x, noise=False).double() + unit
    arrays = {
        "truth": as_images(source[index], data),
        "hidden": hidden,
        "states": as_images(filled.states.cpu().numpy(), data),
        "nats": filled.nats.cpu().numpy() + unit,
        "truth_nats": truth_nats.cpu().numpy(),
        "looks": np.array(filled.looks),
    }
    names = [mask_name(each) for each in masks]
    title = f"{heading(data.name, recipe.name)}: hidden parts of {_images_of(split)}, filled in"
    for path in paths:
        _write(path, arrays, names, data, title, draws=draws)
    start, end, truth = arrays["nats"][0], arrays["nats"][-1], arrays["truth_nats"]
    return {
        "out": [str(path) for path in paths],
        "dataset": data.name,
        "split": split,
        "shape": list(data.shape),
        "n": n,
        "chains": chains,
        "seed": seed,
        "draws": draws,
        **({"steps": schedule.steps} if draws else asdict(schedule)),
        "seconds": time.perf_counter() - began,
        "masks": [
            {
                "mask": name,
                "images": index[each].tolist(),
                "truth_nats": truth[each].tolist(),
                "end_nats": end[:, each].tolist(),
                "mean_end_nats": float(end[:, each].mean()),
                "mean_truth_nats": float(truth[each].mean()),
                "images_above_truth": int((end.max(0) > truth)[each].sum()),
            }
            | (
                {of: values[each].tolist() for of, values in quality.items()}
                if draws
                else {
                    "start_nats": start[:, each].tolist(),
                    "mean_start_nats": float(start[:, each].mean()),
                    "mean_gain_nats": float((end - start)[:, each].mean()),
                }
            )
            for name, each in zip(names, np.split(np.arange(len(index)), len(masks)), strict=True)
        ],
    }


def drawn(
    flow: Flow, x: Tensor, hidden: Tensor, chains: int, steps: int, bounds: Bounds | None, seed: int, bar: Bar
) -> tuple[Filled, dict[str, Tensor]]:
    """States of chains on their way, and by image the share of moves that they took and R-hat."""
    keep = min(FRAMES, steps)
    rows = x if x.is_floating_point() else x.float()
    found = impute_rows(
        flow,
        rows,
        hidden,
        draws=chains * keep,
        steps=steps,
        warmup=max(1, steps // 3),
        rounds=1,  # the states of all images are of the same iterations
        chains=chains,
        ascent=0,
        alike=ALIKE,
        bounds=bounds,
        seed=seed,
        watch=lambda share: bar.update(int(1000 * share)),
    )
    states = found.draws.unflatten(0, (chains, keep)).transpose(0, 1)
    with torch.no_grad():
        nats = torch.stack(
            [flow.log_prob(each.flatten(0, 1), noise=False).unflatten(0, (chains, -1)) for each in states]
        )
    looks = tuple(round((k + 1) * steps / keep) for k in range(keep))
    quality = {"acceptance": found.acceptance.cpu(), "r_hat": found.r_hat.cpu()}
    return Filled(looks, states.to(x.dtype), nats), quality


def _images_of(split: str) -> str:
    return "samples of the model" if split == "samples" else f"images of the {split} split"


def choose_schedule(preset: str = "ours", **changes: float | str | None) -> Schedule:
    """A preset, with what was asked for in place of its own."""
    if preset not in PRESETS:
        raise NicestError(f"expected a preset of {', '.join(PRESETS)}, got {preset!r}")
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(PRESETS[preset], **given)  # type: ignore[arg-type]


def spread(steps: int, count: int = FRAMES) -> tuple[int, ...]:
    """Iterations to look at, evenly spaced in the length of the way, which grows as log(1 + i/100)."""
    return tuple(round(100 * ((1 + steps / 100) ** (k / count) - 1)) for k in range(1, count))


def _outputs(out: str | Path | Sequence[str | Path]) -> list[Path]:
    paths = [Path(each) for each in ([out] if isinstance(out, str | Path) else out)]
    for path in paths:
        if path.suffix.lower() not in SUFFIXES:
            raise NicestError(f"expected a file that ends in {', '.join(SUFFIXES)}, got {str(path)!r}")
    return paths


def _write(
    path: Path, arrays: dict[str, np.ndarray], names: Sequence[str], data: DataSettings, title: str, *, draws: bool
) -> None:
    if path.suffix.lower() == ".npz":
        ends = {"start": arrays["states"][0], "result": arrays["states"][-1], "masks": np.array(names)}
        save_arrays(path, **{name: array for name, array in arrays.items() if name != "states"}, **ends)
        return
    truth, states = arrays["truth"], arrays["states"]
    columns, rows = len(truth) // len(names), np.arange(len(truth))
    white = brightest(truth, data)
    order = arrays["nats"][-1].argsort(0)[::-1]  # the likeliest chain first
    if path.suffix.lower() == ".gif":
        frames = [image_grid(state[order[0], rows], brightest=white, columns=columns, size=240) for state in states]
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
    grids = {name: image_grid(images, brightest=white, columns=columns, size=1) for name, images in panels.items()}
    save_figure(panel_figure(grids, names, title=title), path)
