"""A certificate that a trained model is invertible and counts its volume right, measured and stored with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nicest.files import to_json, write_text
from nicest.flows import Flow
from nicest.inference.engine import Engine
from nicest.progress import track
from nicest.recipes.defaults import IN_MEMORY
from nicest.recipes.splits import load_splits
from nicest.runs.folder import RunFolder, load_with_recipe
from nicest.runs.runtime import choose_device, rows_to, set_precision, training_precision


def certify(
    run: str | Path, *, n: int = 200, jacobians: int = 4, seed: int = 0, device: str = "auto"
) -> dict[str, Any]:
    """Round trip and log-det of a model on real data and on its own samples, at every precision it is used in.

    `max_roundtrip` is the largest |f⁻¹(f(x)) - x| over n examples, on the [0, 1] scale for images;
    `max_logdet_error` the largest difference, in nats, from the log-det of the Jacobian that automatic
    differentiation gives, over `jacobians` examples. Both are lists beside `dtype`; "bfloat16" means: inside the
    coupling functions alone.
    """
    place = choose_device(device)
    recipe = load_with_recipe(run)[1]
    torch.manual_seed(seed)
    flow = load_with_recipe(run, dtype=torch.float64, device=place)[0]
    if recipe.data.name == IN_MEMORY:  # of which nothing is kept: samples alone
        rows = Engine(flow).sample(1)
    else:
        test = load_splits(recipe).test
        rows = rows_to(test[torch.randperm(len(test))[: max(1, n // 2)].numpy()], place)
    x = examples(flow, rows, n)
    picked = torch.linspace(0, len(x) - 1, jacobians).round().long()  # from the real half and the sampled half

    result: dict[str, Any] = {"dtype": [], "max_roundtrip": [], "max_logdet_error": [], "n": len(x)}
    training = str(training_precision(recipe.train.precision, place)).removeprefix("torch.")
    precisions = dict.fromkeys(("float64", "float32", training))
    for precision in track(precisions, "certifying", len(precisions)):
        flow = load_with_recipe(run, dtype=torch.float64, device=place)[0]
        if precision != "float64":
            flow = flow.float()
            set_precision(flow, getattr(torch, precision))
        flow = flow.continuous()
        points = x.to(flow.prior.loc.dtype)
        with torch.inference_mode():
            roundtrip = (flow.decode(flow.encode(points)) - points).abs().max()
        result["dtype"].append(precision)
        result["max_roundtrip"].append(float(roundtrip))
        errors = torch.tensor([log_det_error(flow, points[i]) for i in picked], dtype=torch.float64)
        result["max_logdet_error"].append(float(errors.max()))  # a NaN among them stays, max() would drop it
    result |= {"jacobians": jacobians, "dataset": recipe.data.name, "recipe": recipe.name}
    write_text(RunFolder(run).path / "certificate.json", to_json(result))
    return result


@torch.inference_mode()
def examples(flow: Flow, rows: Tensor, n: int) -> Tensor:
    """n points in the space of `flow.continuous()`: dequantised rows, then samples."""
    continuous = flow.continuous()
    real = rows.double() if continuous is flow else next(iter(flow.chain))(rows)[0]
    return torch.cat((real, continuous.sample(max(1, n - len(real)))))


def log_det_error(flow: Flow, x: Tensor) -> float:
    """|log det of the chain - log |det| of the Jacobian by automatic differentiation|, at one point, in nats.

    D copies of x go through the chain at once, and copy i asks for the gradient of h_i: the whole Jacobian in one
    pass forward and one back.
    """
    copies = x.expand(len(x), -1).clone().requires_grad_()
    h, log_det = flow.chain(copies)
    (jacobian,) = torch.autograd.grad(h, copies, torch.eye(len(x), dtype=x.dtype, device=x.device))
    return abs(float(log_det[0].detach().double() - torch.linalg.slogdet(jacobian.double()).logabsdet))
