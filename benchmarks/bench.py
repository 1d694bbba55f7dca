"""Speed of nicest, of the installed flow libraries, and of the matrix products alone."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight

from benchmarks.peers import BLOCKS, GLOWS, PEERS, SCALES, SPLINES, STEPS, WIDTH, build_glow, build_peer, installed
from benchmarks.report import Out, Report, Seconds, Windows, origin
from nicest.data import Splits
from nicest.errors import NicestError
from nicest.fast import capture
from nicest.flows import ConvNet, Spline
from nicest.inference.engine import Engine
from nicest.progress import track
from nicest.recipes import Recipe, load_recipe
from nicest.recipes.blocks import Block, layer_of, network_of
from nicest.recipes.build import build
from nicest.recipes.recipe import ModelSettings
from nicest.runs.runtime import choose_device, rows_to
from nicest.tasks import options
from nicest.train.fit import start
from nicest.train.state import State
from nicest.train.step import TrainingStep

NETS: dict[str, tuple[str, ...]] = {  # changes to the paper's recipe of that name, or to MNIST's
    "mnist": (),
    "cifar10": (),
    "small": ("model.hidden_layers=2", "model.width=64"),
    "spline": ("model.hidden_layers=2", "model.width=128", "model.couplings=8", "model.law=spline"),
    "glow": (),
}
SHAPES = {"mnist": (28, 28), "cifar10": (3, 32, 32), "small": (8,), "spline": (16,), "glow": (3, 32, 32)}
WARPS = ("share=0.8", "rotation=0.1", "scale=0.08", "shear=0.1", "shift=0.5", "elastic=0.5", "contrast=1.2")
Runs = dict[str, Callable[[], object]]  # "training step", "log_prob", "sample"
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
Group = list[tuple[str, str, Callable[[], object]]]  # work, library, function


def bench(
    net: Annotated[Sequence[str], typer.Option(help="mnist, cifar10, small, spline or glow; repeatable.")] = ("mnist",),
    batch: Annotated[Sequence[int], options.integer(1, 100_000, "Batch size; repeatable.")] = (200,),
    windows: Windows = 5,
    seconds: Seconds = 0.3,
    device: options.Device = "auto",
    out: Out = None,
) -> Report:
    """Measure the speed of nicest, of the installed flow libraries, and of the matrix products alone, the floor.

    Microseconds of a training step, log_prob and sample, and relative to the floor: the matrix products in the
    precision that nicest trains in, and a fused Adam for the training step. The other libraries run eagerly in float32,
    as their users run them. Each number is the median of several windows after a warm-up.

    Example: python -m benchmarks bench --net mnist --batch 200 --batch 2048
    """
    place = choose_device(device)
    unknown = [each for each in net if each not in NETS]
    if unknown:
        raise NicestError(f"expected nets of {', '.join(NETS)}, got {', '.join(unknown)}")
    rows, startup = list[dict[str, Any]](), list[dict[str, Any]]()
    cases = [(name, size) for name in net for size in batch]
    for name, size in track(cases, "bench", len(cases)):
        recipe, case = recipe_of(name, size), {"net": name, "batch": size}
        products, training, adam = measure(list(floor_runs(recipe, place).values()), place, windows, seconds)
        floors = {"training step": training + adam, "log_prob": products, "sample": products}
        groups = contestants(recipe, place, startup)
        if place.type == "cpu":  # its speed varies with other load, so all take turns
            groups = iter([[run for group in groups for run in group]])
        for group in chain(groups, variants(recipe, place)):
            took_each = measure([run for *_, run in group], place, windows, seconds)
            for (what, library, _), took in zip(group, took_each, strict=True):
                times = {"microseconds": took, "floor_ratio": took / floors[what]}
                rows.append(case | {"what": what, "lib": library} | times)
        for what, took in floors.items():
            rows.append(case | {"what": what, "lib": "floor", "microseconds": took, "floor_ratio": 1.0})
    precision = "bfloat16 inside m" if place.type == "cuda" else "float32"
    about = {"import_ms": import_milliseconds(), "precision": precision}
    return Report(found=origin(place) | about | {"rows": rows, "startup": startup}, out=out)


def recipe_of(net: str, batch: int) -> Recipe:
    """Return the recipe of a net with this batch size, without whitening."""
    recipe = load_recipe(net if net == "cifar10" else "mnist")
    recipe = recipe.override(*NETS[net], "model.preprocess=none", f"train.batch={batch}")
    if net == "glow":
        recipe = replace(recipe, model=ModelSettings(blocks=glow(), prior="gaussian"))
    return replace(recipe, name=net, data=replace(recipe.data, shape=SHAPES[net], levels=256))


def glow() -> tuple[Block, ...]:
    """Return the blocks of the same Glow that `build_glow` builds with other libraries."""
    network = network_of("conv", blocks=BLOCKS, width=WIDTH)
    options = {"repeat": STEPS, "partition": "channels", "network": network, "mixing": True}
    scale = layer_of("squeeze"), layer_of("coupling", law={"kind": "affine"}, **options)
    return (*scale, layer_of("factor-out")) * (SCALES - 1) + scale


def contestants(recipe: Recipe, device: torch.device, startup: list[dict[str, Any]]) -> Iterator[Group]:
    """Yield the runs of one library at a time, to save GPU memory; append the time of its first step to `startup`."""
    peers = GLOWS if recipe.model.blocks else SPLINES if recipe.model.law == "spline" else PEERS
    for library in ("nicest", *installed(peers)):
        began = time.perf_counter()
        runs = our_runs(recipe, device) if library == "nicest" else peer_runs(library, recipe, device)
        runs["training step"]()
        wait(device)
        case = {"lib": library, "net": recipe.name, "batch": recipe.train.batch}
        startup.append(case | {"seconds": time.perf_counter() - began})
        yield [(what, library, run) for what, run in runs.items()]


def noise(recipe: Recipe, rows: int = 0) -> np.ndarray:
    """Return random grey levels: `rows` rows, or four batches."""
    size = rows or 4 * recipe.train.batch, recipe.data.dim
    return np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)


def begin(recipe: Recipe, levels: np.ndarray, device: torch.device) -> State:
    """Return the state at the start of a training."""
    return start(recipe, Splits("noise", levels, levels, levels, recipe.data.shape, 256), device)


def our_runs(recipe: Recipe, device: torch.device, *, precision: torch.dtype | None = None) -> Runs:
    """Return a training step of the loop, and log_prob and sample of the engine, by default in training precision."""
    batch, levels = recipe.train.batch, noise(recipe)
    state, rows = begin(recipe, levels, device), rows_to(levels, device)
    step, index = TrainingStep(state, rows, batch), torch.arange(batch, device=device)
    engine = Engine(state.flow, batch=batch, precision=precision or state.precision)
    return {
        "training step": lambda: step(index),
        "log_prob": lambda: engine.log_prob(rows[:batch]),
        "sample": lambda: engine.sample(batch),
    }


def variants(recipe: Recipe, device: torch.device) -> Iterator[Group]:
    """Yield variants of nicest: with weight averages and warps, and inference in float32."""
    averaged = recipe.override("train.ema=0.999")
    yield [("training step", "nicest + average", our_runs(averaged, device)["training step"])]
    if len(recipe.data.shape) > 1:
        warped = averaged.override(*(f"augment.{each}" for each in WARPS))
        yield [("training step", "nicest + average, warps", our_runs(warped, device)["training step"])]
    if device.type == "cuda":
        runs = our_runs(recipe, device, precision=torch.float32)
        yield [(what, "nicest, float32", runs[what]) for what in ("log_prob", "sample")]


def import_milliseconds(processes: int = 5) -> float:
    """Return the time that `import nicest` adds to importing torch, the median over fresh processes."""
    code = "import torch, time; a = time.perf_counter(); import nicest; print(time.perf_counter() - a)"
    command = [sys.executable, "-c", code]
    done = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(processes)]
    return statistics.median(float(each.stdout) * 1e3 for each in done)


def peer_runs(library: str, recipe: Recipe, device: torch.device) -> Runs:
    """Return the same work in another library: dequantise, forward, backward, Adam; inference without gradients."""
    batch, model, data = recipe.train.batch, recipe.model, recipe.data
    bins = model.bins if model.law == "spline" else 0
    hidden = (model.width,) * model.hidden_layers[0]
    peer = build_glow(library, data.shape) if model.blocks else build_peer(library, data.dim, hidden, bins=bins)
    optimizer = torch.optim.Adam(peer.flow.to(device).parameters(), lr=1e-3)
    rows = rows_to(noise(recipe)[:batch], device)

    def dequantised() -> Tensor:
        return (rows + torch.rand(rows.shape, device=device)) / 256

    def step() -> None:
        optimizer.zero_grad()
        (-peer.log_prob(dequantised()).mean()).backward()
        optimizer.step()

    inference = torch.no_grad()
    return {
        "training step": step,
        "log_prob": inference(lambda: peer.log_prob(dequantised())),
        "sample": inference(lambda: peer.sample(batch)),
    }


def floor_runs(recipe: Recipe, device: torch.device) -> Runs:
    """Return the matrix products or convolutions of a forward pass and of a step, and a fused Adam of the same size."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layers = list(convolutions(recipe) if recipe.model.blocks else products(recipe))
    shapes = zip(*((w, (recipe.train.batch, *x), (recipe.train.batch, *y)) for w, x, y in layers), strict=True)
    weights, inputs, gradients = ([torch.randn(each, device=device, dtype=dtype) for each in some] for some in shapes)
    if recipe.model.blocks:
        last = torch.channels_last
        inputs, gradients = ([x.contiguous(memory_format=last) for x in each] for each in (inputs, gradients))

    def forward() -> None:
        for w, a in zip(weights, inputs, strict=True):
            functional.conv2d(a, w, padding=w.shape[-1] // 2) if a.ndim > 2 else a @ w.t()

    def forward_and_backward() -> None:
        forward()
        for k, (w, a, g) in enumerate(zip(weights, inputs, gradients, strict=True)):
            if a.ndim > 2:
                pad = w.shape[-1] // 2
                conv2d_weight(a, w.shape, g, padding=pad)
                conv2d_input(a.shape, w, g, padding=pad)
                continue
            g.t() @ a
            if k:  # the data needs no gradient
                g @ w

    parameters = [torch.randn(w.numel() + len(w), device=device, requires_grad=True) for w in weights]
    for p in parameters:
        p.grad = torch.randn_like(p)
    adam = torch.optim.Adam(parameters, lr=1e-3, fused=True, capturable=device.type == "cuda")
    runs: Runs = {"products": forward, "training products": forward_and_backward, "adam": adam.step}
    return {what: capture(run, device)[0].replay for what, run in runs.items()} if device.type == "cuda" else runs


def products(recipe: Recipe) -> Iterator[Shapes]:
    """Yield the shapes of the weight, input and output of every matrix product in the conditioners."""
    half, model = recipe.data.dim // 2, recipe.model
    outputs = half * (Spline(model.bins).size if model.law == "spline" else 1)
    for _ in range(model.couplings):
        for i, o in pairwise([half, *[model.width] * model.hidden_layers[0], outputs]):
            yield (o, i), (i,), (o,)


def convolutions(recipe: Recipe) -> Iterator[Shapes]:
    """Yield the shapes of the weight, input and output of every convolution."""
    for network in build(recipe).modules():
        if isinstance(network, ConvNet):
            for each in network.modules():
                if isinstance(each, nn.Conv2d):
                    inputs, outputs = ((c, *network.inputs[1:]) for c in (each.in_channels, each.out_channels))
                    yield tuple(each.weight.shape), inputs, outputs


def measure(runs: Sequence[Callable[[], object]], device: torch.device, windows: int, seconds: float) -> list[float]:
    """Return the microseconds of each run: the median over windows, in which the runs take turns.

    A warm-up determines how many calls fill a window.
    """

    def timed(run: Callable[[], object], count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            run()
        wait(device)
        return (time.perf_counter() - began) / count

    for run in runs:
        timed(run, 1)
    repeats = [max(1, round(seconds / timed(run, 3))) for run in runs]
    took = [[timed(run, n) for run, n in zip(runs, repeats, strict=True)] for _ in range(windows)]
    return [statistics.median(times) * 1e6 for times in zip(*took, strict=True)]


def wait(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
