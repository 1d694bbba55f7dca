"""The demonstration: train on the bundled digits, and draw every figure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from nicest.errors import NicestError
from nicest.plots import contact_sheet, likelihood_figure, save_figure
from nicest.recipes import load_recipe
from nicest.runs.folder import LAST, RunFolder, read_tensors
from nicest.runs.run import Run
from nicest.runs.shipped import shipped
from nicest.tasks.certify import Certificate, certify
from nicest.tasks.evaluate import Evaluation, evaluate
from nicest.tasks.inpaint import inpaint
from nicest.tasks.latent import spectrum
from nicest.tasks.options import Device, out_folder
from nicest.tasks.results import Result
from nicest.tasks.sample import draw, save_grid
from nicest.tasks.training import Training
from nicest.train.fit import train

SAMPLES, STEPS = 100, 1000


@dataclass(frozen=True, kw_only=True)
class Demo(Result):
    """What the demonstration made; only `training` if it was interrupted."""

    training: Training
    evaluation: Evaluation | None = None
    certificate: Certificate | None = None
    figures: list[str] | None = None

    @property
    def exit_code(self) -> int:
        return self.training.exit_code

    def lines(self) -> Iterator[Any]:
        if self.evaluation is None or self.certificate is None:
            yield from self.training.lines()
            return
        yield next(self.training.lines())
        yield from self.evaluation.lines()
        yield from self.certificate.lines()
        yield "figures:"
        yield from (f"  {path}" for path in self.figures or ())
        yield "(mnist-*.png are drawn by two models of MNIST that come with nicest)"
        yield f"next: nicest studio {shlex.quote(self.training.run)} --open"


def demo(out: Annotated[str | Path, out_folder("The run folder.")] = "runs/demo", *, device: Device = "auto") -> Demo:
    """Train on the bundled 8 x 8 digits, evaluate, certify and draw the figures.

    Example: nicest demo
    """
    run = RunFolder(out)
    resume = (run.path / LAST).exists()
    if resume and (name := read_tensors(run.path / LAST)[1].data.name) != "digits":
        raise NicestError(f"expected a run on digits in {run.path}, got one on {name}: choose another folder")
    training = Training(**train(load_recipe("digits"), out, resume=resume, device=device))
    if not training.finished:
        return Demo(training=training)
    opened = Run(out, device=device)
    evaluation = evaluate(opened)
    figures = [*draw_figures(opened, evaluation), *draw_mnist(opened.path / "figures", device)]
    return Demo(training=training, evaluation=evaluation, certificate=certify(opened), figures=figures)


def draw_figures(run: Run, evaluation: Evaluation) -> list[str]:
    """Draw samples, held-out data, spectrum and likelihood curve, and all of them on one sheet."""
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
    title = f"{recipe.name}: {evaluation.mean_nats:.1f} nats, {evaluation.bits_per_dim:.3f} bits/dim on test"
    curve = likelihood_figure(run.metrics, title=title, baselines=evaluation.baselines)
    save_figure(curve, pictures["Log-likelihood"])
    save_figure(contact_sheet(pictures, title=f"NICE on {recipe.data.name}"), folder / "contact-sheet.png")
    return [str(path) for path in (*pictures.values(), folder / "contact-sheet.png")]


def draw_mnist(folder: Path, device: str) -> list[str]:
    """Draw samples of a convolutional model of MNIST, and inpaint samples of one as in the paper."""
    convolutional, dense = (Run(shipped()[name], device=device) for name in ("mnist-conv", "mnist"))
    samples, filled = folder / "mnist-samples.png", folder / "mnist-inpaint.png"
    save_grid(samples, draw(convolutional, SAMPLES), convolutional.recipe.data)
    inpaint(dense, mask=("top", "left"), n=5, split="samples", steps=STEPS, out=[filled])
    return [str(samples), str(filled)]
