"""NICE inside a VAE, as its posterior or its prior, and the plain VAE (NICE App. C and §6)."""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from nicest.errors import NicestError
from nicest.flows import MLP, VAE, Additive, Chain, Coupling, DiagonalScaling, Units, odd_even
from nicest.progress import Bar
from nicest.recipes import load_recipe
from nicest.recipes.build import units_of
from nicest.recipes.recipe import TrainSettings
from nicest.recipes.splits import describe, load_splits
from nicest.runs.runtime import choose_device, describe_device, rows_to
from nicest.train.callbacks import Callback
from nicest.train.fit import fit

Model = Literal["plain", "wider", "posterior", "prior"]
CONTEXT = 64  # size of the summary of x that conditions the posterior
ROWS = 2000  # per batch when scoring
FLOOR = -2.0  # lower bound of the log-scale of a pixel, on the interval of the recipe


def study(
    recipe: str = "mnist",
    *,
    models: Sequence[Model] = get_args(Model),
    seeds: Sequence[int] = (0, 1, 2),
    steps: int = 10_000,
    batch: int = 500,
    lr: float = 2e-3,
    latent_dim: int = 32,
    width: int = 320,
    draws: int = 8,
    importance_draws: int = 64,
    device: str = "auto",
) -> dict[str, Any]:
    """Train a plain VAE, one with a NICE posterior and one with a NICE prior, and compare their bounds.

    All have the same data, steps, batches, learning rates, encoder and decoder. `wider` is a plain VAE with as many
    parameters as the largest model, to show what parameters alone gain. Nats are on the recipe's interval of pixel
    values, means over `draws` draws of both noises. `importance_nats` is the bound with `importance_draws` draws, which
    is closer to the log-likelihood. `gain_nats` is the difference to the plain VAE of the same seed.
    """
    place = choose_device(device)
    chosen = load_recipe(recipe)
    splits = load_splits(chosen)
    data = describe(chosen, splits).data
    if not data.levels:
        raise NicestError(f"{data.name} is continuous: the study is of pixels, which have grey levels")
    rows = {part: rows_to(splits.split(part), place) for part in ("train", "valid", "test")}
    scored = rows | {"train": rows["train"][: len(rows["test"])]}
    batch = min(batch, len(rows["train"]))
    per_epoch = len(rows["train"]) // batch
    epochs = max(1, round(steps / per_epoch))
    steps = epochs * per_epoch

    richest = max(size(model, data.dim, latent_dim, width) for model in get_args(Model))
    widths = dict.fromkeys(models, width) | {"wider": widest(data.dim, latent_dim, richest)}
    runs: list[dict[str, Any]] = []
    with Bar("VAE", steps * len(models) * len(seeds)) as bar:
        for seed in seeds:
            settings = TrainSettings(
                epochs=epochs,
                batch=batch,
                lr=lr,
                eps=1e-8,
                schedule="cosine",
                warmup=min(100, steps - 1),
                precision="float32",
                evaluate_every=epochs,  # keep the last weights of every model
                seed=seed,
            )
            for model in models:
                torch.manual_seed(seed)
                vae = build(model, units_of(data), latent_dim, widths[model])
                watch = Watch(bar, len(runs) * steps, f"{model}, seed {seed}")
                start = time.perf_counter()
                try:
                    fit(vae, splits.train, valid=splits.valid, settings=settings, callbacks=[watch], device=device)
                except NicestError as error:
                    raise NicestError(f"the {model} VAE of seed {seed} diverged: {error}") from error
                seconds = time.perf_counter() - start
                run = {"model": model, "seed": seed, "parameters": count(vae), "seconds": seconds}
                run |= {f"{part}_nats": mean_nats(vae, each, draws) for part, each in scored.items()}
                run["importance_nats"] = mean_nats(vae, rows["test"], 1, importance_draws)
                runs.append(run)
                bar.note(f"{model}, seed {seed}: test bound {run['test_nats']:.1f} nats in {seconds:.0f} s")
    return {
        "dataset": data.name,
        "interval": list(data.interval),
        "n": len(rows["test"]),
        "dim": data.dim,
        "latent_dim": latent_dim,
        "steps": steps,
        "batch": batch,
        "lr": lr,
        "weight_decay": settings.weight_decay,
        "width": width,
        "floor": FLOOR,
        "draws": draws,
        "importance_draws": importance_draws,
        "device": describe_device(place),
        "rows": [summary(model, runs) for model in models],
        "runs": runs,
    }


def build(model: Model, units: Units, latent_dim: int, width: int) -> VAE:
    """Build a VAE whose encoder and decoder have two hidden layers of `width`; NICE starts as the identity."""
    return VAE(units, latent_dim, **parts(model, units.dim, latent_dim, width), floor=FLOOR)


def parts(model: Model, dim: int, latent_dim: int, width: int) -> dict[str, Any]:
    """Build the modules of a VAE, which hold all its parameters."""
    found: dict[str, Any] = {
        "encoder": MLP(dim, 2 * latent_dim, (width, width)),
        "decoder": MLP(latent_dim, 2 * dim, (width, width)),
    }
    if model == "posterior":
        found |= {"posterior": nice(latent_dim, CONTEXT), "summary": MLP(dim, CONTEXT, (2 * CONTEXT,))}
    elif model == "prior":
        found |= {"prior": Chain(nice(latent_dim), DiagonalScaling(latent_dim))}
    return found


def nice(dim: int, context_dim: int = 0, couplings: int = 4, width: int = 128) -> Chain:
    """Build additive couplings that alternate between the two halves (NICE §3.2)."""
    parts = [odd_even(dim), odd_even(dim).swap()] * couplings
    networks = [
        MLP(len(part.i1), len(part.i2), (width,), context_dim=context_dim, initialisation="zero-last")
        for part in parts[:couplings]
    ]
    return Chain(*(Coupling(part, Additive(), m) for part, m in zip(parts, networks, strict=False)))


def size(model: Model, dim: int, latent_dim: int, width: int) -> int:
    """Return the number of parameters of a VAE, without allocating them."""
    with torch.device("meta"):
        return sum(count(part) for part in parts(model, dim, latent_dim, width).values())


def widest(dim: int, latent_dim: int, parameters: int) -> int:
    """Return the width of the widest plain VAE with at most this many parameters."""
    return bisect_right(range(1, 100_000), parameters, key=lambda width: size("plain", dim, latent_dim, width))


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
