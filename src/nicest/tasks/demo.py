"""The demonstration: the embedded digits from nothing to figures, on any machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nicest.errors import NicestError
from nicest.plots import contact_sheet, likelihood_figure, save_figure
from nicest.recipes import load_recipe
from nicest.runs.folder import LAST, RunFolder, read_tensors
from nicest.runs.run import Run
from nicest.runs.shipped import shipped
from nicest.tasks.certify import certify
from nicest.tasks.evaluate import evaluate
from nicest.tasks.inpaint import inpaint
from nicest.tasks.latent import spectrum
from nicest.tasks.sample import draw, save_grid
from nicest.train.fit import train

SAMPLES, STEPS = 100, 1000


def demo(out: str | Path = "runs/demo", *, device: str = "auto") -> dict[str, Any]:
    """Train `digits` into `out` (or go on with what is there), evaluate it, certify it, draw every figure.

    Beside them are samples and inpainting of MNIST by models that come with nicest.
    """
    run = RunFolder(out)
    resume = (run.path / LAST).exists()
    if resume and (name := read_tensors(run.path / LAST)[1].data.name) != "digits":
        raise NicestError(f"expected a run on digits in {run.path}, got one on {name}: choose another folder")
    training = train(load_recipe("digits"), out, resume=resume, device=device)
    if not training["finished"]:
        return {"training": training}
    opened = Run(out, device=device)
    evaluation = evaluate(opened)
    return {
        "training": training,
        "evaluation": evaluation,
        "certificate": certify(opened),
        "figures": [*draw_figures(opened, evaluation), *draw_mnist(opened.path / "figures", device)],
    }


def draw_figures(run: Run, evaluation: dict[str, Any]) -> list[str]:
    """Samples beside data, spectrum, likelihood curve, and all of them on one sheet."""
    folder = run.path / "figures"
    recipe, test = run.recipe, run.splits.test
    chosen = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[:100].numpy()
    pictures = {
        "Held-out data": folder / "data.png",
        "Samples of the model": folder / "samples.png",
        "Log-likelihood": folder / "likelihood.png",
        "Spectrum": folder / "spectrum.png",
    }
    save_grid(pictures["Held-out data"], test[chosen].reshape(-1, *recipe.data.shape), recipe.data)
    save_grid(pictures["Samples of the model"], draw(run, 100), recipe.data)
    spectrum(run, out=pictures["Spectrum"])
    title = f"{recipe.name}: {evaluation['mean_nats']:.1f} nats, {evaluation['bits_per_dim']:.3f} bits/dim on test"
    curve = likelihood_figure(run.metrics, title=title, baselines=evaluation["baselines"])
    save_figure(curve, pictures["Log-likelihood"])
    save_figure(contact_sheet(pictures, title=f"NICE on {recipe.data.name}"), folder / "contact-sheet.png")
    return [str(path) for path in (*pictures.values(), folder / "contact-sheet.png")]


def draw_mnist(folder: Path, device: str) -> list[str]:
    """Samples of a convolutional model, and samples of one as in the paper, half hidden and filled in."""
    convolutional, dense = (Run(shipped()[name], device=device) for name in ("mnist-conv", "mnist"))
    samples, filled = folder / "mnist-samples.png", folder / "mnist-inpaint.png"
    save_grid(samples, draw(convolutional, SAMPLES), convolutional.recipe.data)
    inpaint(dense, mask=("top", "left"), n=5, split="samples", steps=STEPS, out=filled)
    return [str(samples), str(filled)]
