"""NICE inside a VAE, as its posterior or its prior, and the plain VAE (NICE App. C and §6)."""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import typer
from torch import Tensor, nn

from benchmarks.report import Report, origin
from nicest.errors import NicestError
from nicest.flows import MLP, VAE, Additive, Chain, Coupling, DiagonalScaling, odd_even
from nicest.progress import Bar
from nicest.recipes import load_recipe
from nicest.recipes.build import units_of
from nicest.recipes.recipe import TrainSettings
from nicest.recipes.splits import describe, load_splits
from nicest.runs.runtime import choose_device, rows_to
from nicest.tasks import options
from nicest.train.callbacks import Callback
from nicest.train.fit import fit

Model = Literal["plain", "wider", "posterior", "prior"]
MODELS: tuple[Model, ...] = get_args(Model)
BATCH, LATENT, WIDTH = 500, 32, 320  # batch size, latent dimension, width of encoder and decoder
DRAWS, IMPORTANCE_DRAWS = 8, 64  # of both noises, per row
CONTEXT = 64  # size of the summary of x that conditions the posterior
ROWS = 2000  # per batch when scoring
FLOOR = -2.0  # lower bound of the log-scale of a pixel, on the interval of the recipe


def study(
    recipe: Annotated[str, typer.Option(help="The recipe whose data to use.")] = "mnist",
    seeds: Annotated[int, options.integer(1, 100, "Seeds per model.")] = 3,
    steps: Annotated[int, options.integer(1, 10_000_000, "Training steps.")] = 10_000,
    out: Annotated[Path | None, options.out_file("The results, as JSON.")] = Path("results/vae.json"),
    device: options.Device = "auto",
) -> Report:
    """Compare the bounds of VAEs (App. C of the paper): plain, with a NICE posterior, with a NICE prior.

    All have the same data, steps, batches, learning rates, encoder and decoder. `wider` is a plain VAE with as many
    parameters as the largest model, to show what parameters alone gain. Nats are on the recipe's interval of pixel
    values. `importance_nats` is a bound that is closer to the log-likelihood. `gain_nats` is the difference to the
    plain VAE of the same seed.

    Example: python -m benchmarks vae --recipe digits --seeds 1
    """
    place, chosen = choose_device(device), load_recipe(recipe)
    splits = load_splits(chosen)
    data = describe(chosen, splits).data
    if not data.levels:
        raise NicestError(f"{data.name} is continuous: the study is of pixels, which have grey levels")
    rows = {part: rows_to(splits.split(part), place) for part in ("train", "valid", "test")}
    scored = rows | {"train": rows["train"][: len(rows["test"])]}
    batch = min(BATCH, len(rows["train"]))
    per_epoch = len(rows["train"]) // batch
    epochs = max(1, round(steps / per_epoch))
    steps = epochs * per_epoch
    widths = dict.fromkeys(MODELS, WIDTH)
    widths["wider"] = widest(data.dim, max(size(model, data.dim, WIDTH) for model in MODELS))
    runs: list[dict[str, Any]] = []
    with Bar("VAE", steps * len(MODELS) * seeds) as bar:
        for seed in range(seeds):
            settings = TrainSettings(lr=2e-3, eps=1e-8, schedule="cosine", precision="float32", batch=batch, seed=seed)
            warmup = min(100, steps - 1)
            # a single validation keeps the last weights of every model
            settings = replace(settings, epochs=epochs, evaluate_every=epochs, warmup=warmup)
            for model in MODELS:
                torch.manual_seed(seed)
                vae = VAE(units_of(data), LATENT, **parts(model, data.dim, widths[model]), floor=FLOOR)
                watch = Watch(bar, len(runs) * steps, f"{model}, seed {seed}")
                start = time.perf_counter()
                try:
                    fit(vae, splits.train, valid=splits.valid, settings=settings, callbacks=[watch], device=device)
                except NicestError as error:
                    raise NicestError(f"the {model} VAE of seed {seed} diverged: {error}") from error
                run = {"model": model, "seed": seed, "parameters": count(vae), "seconds": time.perf_counter() - start}
                run |= {f"{part}_nats": mean_nats(vae, each, DRAWS) for part, each in scored.items()}
                run["importance_nats"] = mean_nats(vae, rows["test"], 1, IMPORTANCE_DRAWS)
                runs.append(run)
                bar.note(f"{model}, seed {seed}: test bound {run['test_nats']:.1f} nats in {run['seconds']:.0f} s")
    about = {"dataset": data.name, "interval": list(data.interval), "n": len(rows["test"]), "dim": data.dim}
    about |= {"steps": steps, "batch": batch, "latent_dim": LATENT, "width": WIDTH, "draws": DRAWS, "floor": FLOOR}
    found = origin(place) | about | {"rows": [summary(model, runs) for model in MODELS], "runs": runs}
    return Report(found=found, out=out)


def parts(model: Model, dim: int, width: int) -> dict[str, Any]:
    """Build the modules of a VAE, which hold all its parameters."""
    found: dict[str, Any] = {
        "encoder": MLP(dim, 2 * LATENT, (width, width)),
        "decoder": MLP(LATENT, 2 * dim, (width, width)),
    }
    if model == "posterior":
        found |= {"posterior": nice(LATENT, CONTEXT), "summary": MLP(dim, CONTEXT, (2 * CONTEXT,))}
    elif model == "prior":
        found |= {"prior": Chain(nice(LATENT), DiagonalScaling(LATENT))}
    return found


def nice(dim: int, context_dim: int = 0, couplings: int = 4, width: int = 128) -> Chain:
    """Build additive couplings that alternate between the two halves (NICE §3.2)."""
    parts = [odd_even(dim), odd_even(dim).swap()] * couplings
    networks = [
        MLP(len(part.i1), len(part.i2), (width,), context_dim=context_dim, initialisation="zero-last")
        for part in parts[:couplings]
    ]
    return Chain(*(Coupling(part, Additive(), m) for part, m in zip(parts, networks, strict=False)))


def size(model: Model, dim: int, width: int) -> int:
    """Return the number of parameters of a VAE, without allocating them."""
    with torch.device("meta"):
        return sum(count(part) for part in parts(model, dim, width).values())


def widest(dim: int, parameters: int) -> int:
    """Return the width of the widest plain VAE with at most this many parameters."""
    return bisect_right(range(1, 100_000), parameters, key=lambda width: size("plain", dim, width))


def count(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(p.numel() for p in module.parameters())


class Watch(Callback):
    """A callback that advances the progress bar of the whole study."""

    def __init__(self, bar: Bar, before: int, what: str) -> None:
        self.bar, self.before, self.what = bar, before, what

    def stepped(self, row: Mapping[str, Any]) -> None:
        self.bar.update(self.before + row["step"], f"{self.what}: {row['train_nats']:.1f} nats")


@torch.inference_mode()
def mean_nats(vae: VAE, rows: Tensor, draws: int, importance_draws: int = 1) -> float:
    """Return the bound, averaged over rows and draws, on the interval of the pixels."""
    parts = [part for _ in range(draws) for part in rows.split(ROWS)]
    total = sum(vae.importance_bound(vae.units.enter(part), importance_draws).double().sum() for part in parts)
    return float(total) / (draws * len(rows))


def summary(model: Model, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean and standard deviation of a model over its seeds, and its gain over the plain VAE."""
    own = [run for run in runs if run["model"] == model]
    plain = {run["seed"]: run["test_nats"] for run in runs if run["model"] == "plain"}
    gains = [run["test_nats"] - plain[run["seed"]] for run in own if plain]
    figures = ("train_nats", "valid_nats", "test_nats", "importance_nats", "seconds")
    spread = statistics.stdev if len(own) > 1 else lambda _: None
    return {
        "model": model,
        "seeds": len(own),
        "parameters": own[0]["parameters"],
        **{name: statistics.fmean(run[name] for run in own) for name in figures},
        "test_sd": spread([run["test_nats"] for run in own]),
        "gain_nats": statistics.fmean(gains) if gains else None,
        "gain_sd": spread(gains) if gains else None,
    }
