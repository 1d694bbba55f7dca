"""Export a flow as graphs that run without nicest: ONNX files for onnxruntime, or programs of torch.export."""

from __future__ import annotations

import io
import logging
import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

import nicest
from nicest.errors import NicestError, needing
from nicest.fast import lower
from nicest.files import to_json, write_bytes, write_text
from nicest.flows import Mixture, members
from nicest.messages import brief
from nicest.recipes.recipe import DataSettings
from nicest.runs.run import Run
from nicest.tasks.options import option, out_folder
from nicest.tasks.results import Result
from nicest.tasks.rows import require_flow

To = Literal["onnx", "torch-export"]
SUFFIXES: dict[str, str] = {"onnx": ".onnx", "torch-export": ".pt2"}
CARD = "graphs.json"  # written last: the inputs and outputs of the graphs
ROWS = 64  # on which a graph is compared with the flow
LARGEST_ERROR = 1e-5  # of a graph, relative to numbers beyond 1
TIMES_OWN = 4  # or this many times the error of the flow in float32, if that is larger
CROSSED = 1e-3  # fraction of pixels that rounding may take across the edge of a level
aten: Any = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Exported(Result):
    """The graphs that were written: their files, inputs, and largest errors; the same as in graphs.json."""

    out: str | None = None
    nicest: str
    format: str
    dim: int
    prior: str
    members: int
    shares: list[float] | None = None
    graphs: dict[str, dict[str, Any]]

    def lines(self) -> Iterator[Any]:
        for name, each in self.graphs.items():
            error = f"differs from the flow by {each['largest_error']:.1e} at most"
            yield f"{Path(self.out or '', each['file'])}: {name}({', '.join(each['inputs'])}), {error}"


def export(
    run: Run,
    to: Annotated[Literal["onnx", "torch-export"], option(help="For onnxruntime, or for torch.")] = "onnx",
    out: Annotated[
        str | Path | None, out_folder("The folder of the graphs.", show_default="RUN/onnx or RUN/torch-export")
    ] = None,
) -> Exported:
    """Write a flow as graphs that run without nicest: score, sample and encode, for any number of rows.

    Each graph is run on rows of the model and compared with the flow. Inputs are in graphs.json: `noise`, (B, D), is
    uniform on [0, 1), for grey levels; `e`, (B, D), are draws from the standard distribution of the prior; conditional
    models take `context`, (B, C); mixtures of flows have no encode graph, and their sample graph takes `member`.

    Example: nicest export runs/demo --to onnx
    """
    require_flow(run, "export")
    folder, flow = Path(out or run.path / to), run.flow_in(torch.float32).cpu().requires_grad_(False)
    if to == "onnx":
        with needing("export"):
            import onnxruntime  # noqa: F401
            import onnxscript  # noqa: F401
    (folder / CARD).unlink(missing_ok=True)
    data = run.recipe.data
    how: dict[str, Any] = {"conditional": data.conditional}
    found, rows, exact = {}, examples(flow, data), graphs(run.flow_in(torch.float64).cpu(), **how)
    for name, module in graphs(lower(flow), **how).items():
        inputs = {each: rows[each] for each in module.inputs}
        with quiet():
            try:
                content = written(module, inputs, to)
            except Exception as failure:
                reason = failure
                while isinstance(reason.__cause__, Exception):  # the last one names the operation
                    reason = reason.__cause__
                raise NicestError(f"{run.path}: no {to} graph of {name}: {brief(reason)}") from failure
            error = largest_error(module, exact[name], inputs, content, to)
        write_bytes(folder / f"{name}{SUFFIXES[to]}", content)
        found[name] = {
            "file": f"{name}{SUFFIXES[to]}",
            "inputs": {key: [str(each.dtype).removeprefix("torch."), *each.shape[1:]] for key, each in inputs.items()},
            "largest_error": error,
            "bytes": len(content),
        }
    card = Exported(
        nicest=nicest.__version__,
        format=to,
        dim=flow.dim,
        prior=type(flow.prior).__name__.lower(),
        members=len(members(flow)),
        shares=flow.weights.tolist() if isinstance(flow, Mixture) else None,
        graphs=found,
    )
    write_text(folder / CARD, to_json(card.to_dict()))
    return replace(card, out=str(folder))


class Score(nn.Module):
    """log p of stored rows, (B,)."""

    inputs: tuple[str, ...]

    def __init__(self, flow: Any, *, conditional: bool) -> None:
        super().__init__()
        self.flow = flow
        self.inputs = ("x", *(("context",) if conditional else ()), *(("noise",) if flow.units.discrete else ()))

    def forward(self, x: Tensor, context: Tensor | None = None, noise: Any = False) -> Tensor:
        return self.flow.log_prob(x, context, noise=noise)


class Encode(Score):
    """h = f(y) of stored rows, (B, D)."""

    def forward(self, x: Tensor, context: Tensor | None = None, noise: Any = False) -> Tensor:
        return self.flow.encode(x, context, noise=noise)


class Sample(Score):
    """Stored rows of draws e from the standard law of the prior."""

    def __init__(self, flow: Any, *, conditional: bool) -> None:
        super().__init__(flow, conditional=conditional)
        several = isinstance(flow, Mixture)
        self.inputs = ("e", *(("context",) if conditional else ()), *(("member",) if several else ()))

    def forward(self, e: Tensor, context: Tensor | None = None, member: Tensor | None = None) -> Tensor:
        flow, prior = self.flow, self.flow.prior
        h = prior.loc + prior.log_scale.exp() * e
        if member is None:
            return flow.decode(h, context)
        return flow.units.leave(flow.invert_members(h, member, context))


def graphs(flow: Any, *, conditional: bool) -> dict[str, Any]:
    """Return the modules that are exported, by name."""
    kinds = {"score": Score, "sample": Sample, "encode": Encode}
    if isinstance(flow, Mixture):
        del kinds["encode"]  # each of the flows has latent coordinates of its own
    return {name: kind(flow, conditional=conditional).eval() for name, kind in kinds.items()}


@torch.no_grad()
def examples(flow: Any, data: DataSettings) -> dict[str, Tensor]:
    """Return inputs of every graph, by name."""
    generator = torch.Generator().manual_seed(0)
    units, context = flow.units, torch.randn(ROWS, data.context, generator=generator)
    if data.classes:
        context = torch.randint(len(data.classes), (ROWS, 1), generator=generator).float()
    rows = flow.sample(ROWS, context if data.conditional else None, generator=generator)
    return {
        "x": rows.to(torch.uint8 if units.levels <= 256 else torch.int32) if units.levels else rows,
        "context": context,
        "noise": torch.rand(ROWS, flow.dim, generator=generator),
        "e": flow.prior.standard_sample((ROWS, flow.dim), generator),
        "member": torch.randint(len(members(flow)), (ROWS,), generator=generator),
    }


def written(module: Any, inputs: dict[str, Tensor], to: To) -> bytes:
    """Export a module to the content of a file."""
    program, file = graph(module, inputs), io.BytesIO()
    if to == "onnx":
        names: dict[str, Any] = {"input_names": list(inputs), "output_names": ["out"]}
        made: Any = torch.onnx.export(program, kwargs=inputs, **names, dynamo=True, verbose=False)
        return made.model_proto.SerializeToString()
    torch.export.save(program, file)
    return file.getvalue()


@torch.no_grad()
def largest_error(module: Any, exact: Any, inputs: dict[str, Tensor], content: bytes, to: To) -> float:
    """Return how far a graph is from the flow in float32, but for values at the edge of a level.

    An error far beyond the difference between the flow in float32 and in float64 is refused.
    """
    expected = module(**inputs)
    truth = exact(**{name: each.double() if each.is_floating_point() else each for name, each in inputs.items()})
    if to == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        (got,) = session.run(None, {name: each.numpy() for name, each in inputs.items()})
        found = torch.from_numpy(got)
    else:
        found = torch.export.load(io.BytesIO(content)).module()(**inputs)
    error, own = relative(found, expected), relative(expected, truth)
    edges = CROSSED if isinstance(module, Sample) and module.flow.units.discrete else 0.0
    allowed = max(LARGEST_ERROR, TIMES_OWN * float(own.flatten().quantile(1 - edges)))
    far = ~(error <= allowed)
    if float(far.double().mean()) > edges:
        raise NicestError(
            f"the graph differs from the flow by up to {float(error.max()):.1e}, where float32 explains {allowed:.1e}:"
            " nothing is written; please report it"
        )
    return float(error[~far].max())


def relative(found: Tensor, expected: Tensor) -> Tensor:
    """Return |found - expected|, relative to numbers beyond 1; 0 where both are infinite or NaN."""
    error = (found.double() - expected.double()).abs() / expected.double().abs().clamp_min(1)
    same = (found == expected) | (found.isnan() & expected.isnan())
    return torch.where(same, 0.0, error)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the logs and warnings of the exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def graph(module: nn.Module, inputs: dict[str, Tensor]) -> Any:
    """Return the program of a module for any number of rows; what does not depend on the rows is computed now."""
    rows = {0: torch.export.Dim("rows", min=1, max=2**31 - 1)}
    how: dict[str, Any] = {"kwargs": inputs, "dynamic_shapes": dict.fromkeys(inputs, rows)}
    with torch.no_grad():
        program = torch.export.export(module, (), **how, strict=True)
        plain = folded(program.run_decompositions(DECOMPOSED).module())
        return torch.export.export(plain, (), **how)


def folded(module: Any) -> Any:
    """Replace every operation on parameters and constants alone by its result."""
    known: dict[Any, Any] = {}
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            known[node] = operator.attrgetter(node.target)(module)
        elif node.op == "call_function" and all(each in known for each in node.all_input_nodes):
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                continue
            args, kwargs = (torch.fx.node.map_arg(each, known.__getitem__) for each in (node.args, node.kwargs))
            known[node] = node.target(*args, **kwargs)
    for i, (node, value) in enumerate(known.items()):
        needed = any(user not in known for user in node.users)
        if node.op == "get_attr" or not needed or not isinstance(value, Tensor):
            continue
        module.register_buffer(f"folded_{i}", value.detach().clone())
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.get_attr(f"folded_{i}"))
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


# Operations that ONNX lacks, by ones that it has. Triangular matrices are parameters: their inverses are folded.
def _solve(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    part = a.triu() if upper else a.tril()
    if unitriangular:
        part = part - part.diagonal().diag() + torch.eye(len(a), dtype=a.dtype)
    inverse = torch.linalg.inv(part.double()).to(a.dtype)
    return inverse @ b if left else b @ inverse


def _search(edges: Tensor, values: Tensor, **_: Any) -> Tensor:
    """Count the edges, increasing in rows (D, A), below each value (D, B)."""
    return (edges[:, None, :] < values[..., None]).sum(-1)


def _next_below(x: Tensor, other: Tensor) -> Tensor:
    """Return the largest float32 number below x; `other` is always -inf here."""
    near = 1 - 2.0**-24
    return torch.where(x > 0, x * near, torch.where(x < 0, x / near, torch.full_like(x, -(2.0**-149))))


DECOMPOSED: dict[Any, Callable[..., Tensor]] = {
    aten.linalg_solve_triangular.default: _solve,
    aten.searchsorted.Tensor: _search,
    aten.nextafter.default: _next_below,
}
