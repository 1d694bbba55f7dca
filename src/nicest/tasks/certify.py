"""A certificate of how exactly a trained flow inverts, and of its log-determinants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from nicest.errors import NicestError
from nicest.fast import lower
from nicest.files import to_json, write_text
from nicest.flows import AtContext, Bijection, members
from nicest.progress import track
from nicest.recipes.defaults import IN_MEMORY
from nicest.runs.folder import kept_recipe
from nicest.runs.run import Run
from nicest.runs.runtime import rows_to, training_precision
from nicest.tasks.options import Seed, integer
from nicest.tasks.results import Result, columns
from nicest.tasks.rows import require_flow, require_outputs

AT_ONCE = 1000  # rows of a Jacobian, which bounds the memory that convolutions take for it


@dataclass(frozen=True, kw_only=True)
class Certificate(Result):
    """Errors of a model at each precision.

    `max_roundtrip` is the largest |f⁻¹(f(y)) - y| over n examples, on the [0, 1] scale for images, `mean_roundtrip`
    the mean; `max_logdet_error` is the largest difference, in nats, from the log-determinant of the Jacobian by
    automatic differentiation, over `jacobians` examples. They are lists, in the order of `dtype`; "bfloat16" is the
    precision inside the coupling functions alone.
    """

    dtype: list[str]
    max_roundtrip: list[float]
    mean_roundtrip: list[float]
    max_logdet_error: list[float]
    n: int
    jacobians: int
    dataset: str
    recipe: str

    def lines(self) -> Iterator[Any]:
        data = Path(self.dataset).name
        yield f"{data}: round trip of {self.n} examples, half data, half samples; {self.jacobians} Jacobians"
        table = columns("precision", "round trip, worst", "round trip, mean", "log-det error, nats")
        errors = (self.max_roundtrip, self.mean_roundtrip, self.max_logdet_error)
        for precision, *each in zip(self.dtype, *errors, strict=True):
            table.add_row(precision, *(f"{error:.1e}" for error in each))
        yield table


def certify(
    run: Run,
    *,
    n: Annotated[int, integer(2, 10_000, "Examples for the round trip: half data, half samples.", "-n")] = 200,
    jacobians: Annotated[int, integer(1, 1000, "Examples whose full Jacobian is computed.")] = 4,
    seed: Seed = 0,
) -> Certificate:
    """Measure how exactly a flow inverts, and the error of its log-determinant, in every precision.

    The certificate is kept in the run folder.

    Example: nicest certify runs/demo
    """
    require_flow(run, "certify")
    recipe, certificate = run.recipe, run.path / "certificate.json"
    if jacobians > n:
        raise NicestError(f"expected at most as many Jacobians as there are examples, {n}, got {jacobians}")
    require_outputs(run, certificate)
    generator = torch.Generator(run.device).manual_seed(seed)
    flow = run.flow_in(torch.float64)
    if recipe.data.name == IN_MEMORY and recipe.data.conditional:
        raise NicestError(f"{run.path} is a conditional model of rows in memory: it keeps no context to certify it at")
    if recipe.data.name == IN_MEMORY:  # nothing of which is kept: samples alone
        x, context = flow.sample(1, generator=generator), None
    else:
        test = run.splits.test
        order = torch.randperm(len(test), generator=torch.Generator().manual_seed(seed))
        rows = rows_to(test[order[: max(1, n // 2)].numpy()], run.device)
        x, context = recipe.data.split(rows)
    y, context = examples(flow, x, context, n, generator)
    picked = torch.linspace(0, len(y) - 1, jacobians).round().long()  # from the real half and the sampled half

    errors = []
    training = str(training_precision(recipe.train.precision, run.device)).removeprefix("torch.")
    flows = {"float64": flow, "float32": run.flow_in(torch.float32)}
    if training not in flows:
        flows[training] = lower(flows["float32"], getattr(torch, training))
    width = flow.units.interval[1] - flow.units.interval[0] if flow.units.levels else 1.0
    for precision, each in track(flows.items(), "certifying", len(flows)):
        points = y.to(each.units.scale.dtype)
        with torch.inference_mode():
            trips = [chain.inverse(chain(points)[0])[0] - points for chain in bijections(each, context)]
            roundtrip = torch.cat(trips).abs() / width
        at = {int(i): None if context is None else context[i : i + 1] for i in picked}
        differences = [log_det_error(chain, points[i]) for i in at for chain in bijections(each, at[i])]
        largest = torch.tensor(differences).max()  # a NaN among them stays, Python's max would drop it
        errors.append((precision, *map(float, (roundtrip.max(), roundtrip.mean(), largest))))
    names = ("dtype", "max_roundtrip", "mean_roundtrip", "max_logdet_error")
    told: dict[str, Any] = {name: list(each) for name, each in zip(names, zip(*errors, strict=True), strict=True)}
    found = Certificate(**told, n=len(y), jacobians=jacobians, recipe=recipe.name, dataset=recipe.data.name)
    write_text(certificate, to_json(found.to_dict() | {"dataset": kept_recipe(recipe, run.path).data.name}))
    return found


@torch.inference_mode()
def examples(
    flow: Any, x: Tensor, context: Tensor | None, n: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return n points y of the space that bijections act on, from rows and then from samples, and their context."""
    more = max(1, n - len(x))
    drawn = None if context is None else context[torch.arange(more) % len(context)]
    samples = flow.sample(more, drawn, generator=generator)
    y = flow.units.enter(torch.cat((x.to(samples), samples)), generator=generator)
    return y, None if context is None or drawn is None else torch.cat((context, drawn)).to(y)


def bijections(flow: Any, context: Tensor | None) -> list[Bijection]:
    """Return the bijections of a flow, or of the members of a mixture, at this context."""
    if context is None:
        return [each.bijection for each in members(flow)]
    return [AtContext(each.bijection, each.embed(context.to(each.units.scale))) for each in members(flow)]


def log_det_error(chain: Bijection, y: Tensor) -> float:
    """Return the difference in nats of a bijection's log-determinant from that of its Jacobian, at one point.

    Copies of y go through the bijection together; copy i gives the gradient of h_i, a row of the Jacobian.
    """
    rows: list[Tensor] = []
    for wanted in torch.eye(len(y), dtype=y.dtype, device=y.device).split(AT_ONCE):
        copies = y.expand(len(wanted), -1).clone().requires_grad_()
        h, log_det = chain(copies)
        rows += torch.autograd.grad(h, copies, wanted)
    jacobian = torch.cat(rows).double()
    return abs(float(log_det[0].detach().double() - torch.linalg.slogdet(jacobian).logabsdet))
