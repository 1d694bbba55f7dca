"""How cost grows: a training step by dimension, width, depth and batch size, scoring by rows, the paper's trainings."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import torch
import typer

from benchmarks.bench import begin, measure, noise, our_runs, recipe_of, wait
from benchmarks.report import Out, Report, Seconds, Windows, origin
from nicest.inference.engine import Engine
from nicest.progress import track
from nicest.recipes import Recipe, load_recipe
from nicest.runs.runtime import choose_device, rows_to
from nicest.tasks import options

AXES = {
    "D": (98, 196, 392, 784, 1568, 3136, 6272),
    "width": (125, 250, 500, 1000, 2000, 4000),
    "depth": (1, 2, 3, 5, 8, 12),
    "batch": (25, 50, 100, 200, 400, 800, 1600, 3200, 6400),
}
ROWS = (100, 1_000, 10_000, 100_000, 1_000_000)
# training rows and shape of the paper's four data sets: TFD's unlabelled faces, nine tenths of SVHN's training file
PAPER = {"mnist": (50_000, (28, 28)), "tfd": (98_058, (48, 48)), "svhn": (65_932, (3, 32, 32))}
PAPER |= {"cifar10": (40_000, (3, 32, 32))}


def cost(
    small: Annotated[bool, typer.Option("--small", help="Start from a small net, for a CPU.")] = False,
    windows: Windows = 5,
    seconds: Seconds = 0.3,
    device: options.Device = "auto",
    out: Out = None,
) -> Report:
    """Measure how the cost of a training step grows with each size of the net, and of scoring with the rows.

    One size of the MNIST net varies at a time. `utilisation` is the time that the step's matrix products would take at
    the measured speed of one large product, divided by the time of the step.

    Example: python -m benchmarks cost --small --device cpu
    """
    place = choose_device(device)
    speed = peak(place, windows, seconds)
    base = recipe_of("small" if small else "mnist", 200)
    points = [(axis, value) for axis, values in AXES.items() for value in values]
    if small:
        points = [(axis, value) for axis, value in points if value <= (250 if axis in ("D", "width") else 800)]
    steps = []
    for axis, value in track(points, "cost", len(points)):
        recipe = varied(base, axis, value)
        took, flops = step_microseconds(recipe, place, windows, seconds), step_flops(recipe)
        times = {"microseconds": took, "flops": flops, "utilisation": flops / (took * 1e-6) / speed}
        steps.append({"axis": axis, "value": value} | times)
    result = origin(place) | {
        "peak_flops": speed,
        "steps": steps,
        "rows": list(scoring(base, place, ROWS[:3] if small else ROWS)),
        "trainings": [] if small else [projected(name, place, windows, seconds) for name in PAPER],
    }
    return Report(found=result, out=out)


def varied(base: Recipe, axis: str, value: int) -> Recipe:
    """Return the base recipe with one size changed."""
    if axis == "D":
        return replace(base, data=replace(base.data, shape=(value,)))
    name = {"width": "model.width", "depth": "model.hidden_layers", "batch": "train.batch"}[axis]
    return base.override(f"{name}={value}")


def step_flops(recipe: Recipe) -> int:
    """Return the operations of a step's matrix products: forward, and gradients of weights and inputs, not of data."""
    half, model = recipe.data.dim // 2, recipe.model
    sizes = [a * b for a, b in pairwise([half, *[model.width] * model.hidden_layers[0], half])]
    return 2 * recipe.train.batch * (3 * model.couplings * sum(sizes) - sizes[0])


def peak(device: torch.device, windows: int, seconds: float) -> float:
    """Return the operations per second of one large matrix product, in training precision."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / (measure([lambda: a @ b], device, windows, seconds)[0] * 1e-6)


def step_microseconds(recipe: Recipe, device: torch.device, windows: int, seconds: float) -> float:
    """Return the time of a training step."""
    return measure([our_runs(recipe, device)["training step"]], device, windows, seconds)[0]


def scoring(recipe: Recipe, device: torch.device, sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yield the seconds, and the memory on a GPU, to score and to sample n rows, for each n."""
    levels = noise(recipe, 1000)
    state = begin(recipe, levels, device)
    engine = Engine(state.flow, precision=state.precision)
    for n in sizes:
        rows = rows_to(levels[:1], device).repeat(n, 1)
        for what, run in (
            ("log_prob", partial(engine.log_prob, rows)),
            ("sample", lambda n=n: deque(engine.draws(n), 0)),
        ):
            run()
            wait(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            before, began = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0, time.perf_counter()
            run()
            wait(device)
            row: dict[str, Any] = {"what": what, "n": n, "seconds": time.perf_counter() - began}
            if device.type == "cuda":
                row["bytes"] = torch.cuda.max_memory_allocated(device) - before
            yield row


def projected(name: str, device: torch.device, windows: int, seconds: float) -> dict[str, Any]:
    """Return the duration of a training of the paper at the speed of its step here, whitening included."""
    (rows, shape), recipe = PAPER[name], load_recipe(name)
    recipe = replace(recipe, data=replace(recipe.data, shape=shape, levels=256))
    took = step_microseconds(recipe, device, windows, seconds)
    steps = rows // recipe.train.batch * recipe.train.epochs
    sizes = {"recipe": name, "rows": rows, "batch": recipe.train.batch, "steps": steps}
    return sizes | {"microseconds": took, "hours": took * 1e-6 * steps / 3600, "flops": step_flops(recipe) * steps}
