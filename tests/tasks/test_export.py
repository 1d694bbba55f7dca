"""Graphs of models: what onnxruntime and torch.export give is what the flow gives, for any number of rows."""

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import nicest
from nicest import Run
from nicest.flows import (
    Affine,
    Bijection,
    Chain,
    ChannelMixing,
    ConvNet,
    Coupling,
    DiagonalScaling,
    Elementwise,
    Flow,
    Logistic,
    Mixing,
    Mixture,
    Squeeze,
    Units,
    channels,
)
from nicest.recipes import load_recipe
from nicest.runs.folder import RunFolder
from nicest.runs.sinks import Saved
from nicest.tasks.export import CARD, Sample, export, folded, graph
from nicest.train.fit import train

PAGE = Path(__file__).parent.parent.parent / "docs" / "export.md"
SPLINES = ("model.law=spline", "model.mixing=true", "model.couplings=2", "model.elementwise=8", "model.width=8")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporters


@pytest.fixture(scope="module")
def onnxruntime():
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name)
    return pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, digits_folder: Path) -> Path:
    """With runs/demo, dense and of pixels, and runs/rows, of splines and learned mixing; both small."""
    out = tmp_path_factory.mktemp("exported")
    shutil.copytree(digits_folder, out / "runs" / "demo")
    np.save(out / "rows.npy", np.random.default_rng(0).normal(size=(300, 4)))
    own = (f'data.name="{out / "rows.npy"}"', "train.epochs=1", "train.batch=100", *SPLINES)
    train(load_recipe("digits"), out / "runs" / "rows", overrides=own, device="cpu")
    return out


def check(run: Run, graphs: Path, call: Callable[[str, dict[str, Tensor]], Tensor]) -> None:
    """Compare every graph with the flow, at other rows and other numbers of them than it was made with."""
    card = json.loads((graphs / CARD).read_text())
    assert set(card["graphs"]) == {"score", "sample", "encode"}
    flow, plain = run.flow, run.flow_in(torch.float64)
    for n in (1, 37):
        x = flow.sample(n).to(torch.uint8 if flow.units.levels else torch.float32)
        noise, e = torch.rand(n, flow.dim), flow.prior.standard_sample((n, flow.dim), None)
        given = {"x": x, "noise": noise, "e": e}
        with torch.no_grad():
            score, encode = flow.log_prob(x, noise=noise), flow.encode(x, noise=noise)
            expected = {"score": score, "encode": encode, "sample": Sample(flow, conditional=False)(e)}
            exact = plain.log_prob(x, noise=noise.double())
        for name, each in card["graphs"].items():
            found = call(each["file"], {key: given[key] for key in each["inputs"]})
            assert found.shape == expected[name].shape
            near = (found - expected[name]).abs() <= 1e-5 * expected[name].abs().clamp_min(1)
            assert float(near.double().mean()) > (0.99 if name == "sample" else 1 - 1e-9), name  # but edges of steps
            if name == "score":
                assert torch.allclose(found.double(), exact, rtol=2e-5, atol=2e-4)


def by_onnxruntime(onnxruntime, graphs: Path) -> Callable[[str, dict[str, Tensor]], Tensor]:
    def call(file: str, inputs: dict[str, Tensor]) -> Tensor:
        session = onnxruntime.InferenceSession(graphs / file)
        return torch.from_numpy(session.run(None, {name: each.numpy() for name, each in inputs.items()})[0])

    return call


def opened(folder: Path, flow: Flow | Mixture, context: int = 0) -> Run:
    """Open a run of a flow that was built by hand, conditioned on `context` numbers."""
    recipe = load_recipe("digits").override(f"data.context={context}")
    RunFolder(folder).save_model(Saved(flow.double().state_dict(), recipe, {}))
    return nicest.open(folder, flow=flow)


def test_torch_export_gives_what_the_flow_gives(folder: Path):
    run = nicest.open(folder / "runs" / "demo")
    out = Path(export(run, "torch-export").out)
    check(run, out, lambda file, inputs: torch.export.load(out / file).module()(**inputs))


@pytest.mark.parametrize("name", ["demo", "rows"])
def test_onnxruntime_gives_what_the_flow_gives(name: str, folder: Path, onnxruntime):
    run = nicest.open(folder / "runs" / name)
    out = Path(export(run, "onnx").out)
    check(run, out, by_onnxruntime(onnxruntime, out))


def test_convolutions_have_a_graph(tmp_path: Path, onnxruntime):
    half, law = channels(4, 2, 2), Affine()
    network = ConvNet((2, 2, 2), 2, law.size, width=4, blocks=1)
    chain = Chain(Squeeze((1, 4, 4)), ChannelMixing((4, 2, 2)), Coupling(half, law, network))
    flow = Flow(Units.pixels(16), chain, Logistic(16, learned=True))
    with torch.no_grad():
        for p in flow.parameters():
            p.add_(0.1 * torch.randn_like(p))
    export(run := opened(tmp_path, flow), "onnx", tmp_path / "graphs")
    check(run, tmp_path / "graphs", by_onnxruntime(onnxruntime, tmp_path / "graphs"))


def test_the_examples_of_the_page_run_without_nicest(folder: Path, onnxruntime):
    codes = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.S | re.M)
    made = ["demo/onnx", "demo/torch-export"]
    assert len(codes) == len(made)
    for code, name in zip(codes, made, strict=True):
        run, to = name.split("/")
        if not (folder / "runs" / name / CARD).exists():  # by the tests above
            export(nicest.open(folder / "runs" / run), to)
        ends = "\nnats = list(map(float, nats))\nassert sum(nats) > -1e6 and len(set(nats)) == len(nats), nats"
        alone = "import sys; sys.modules['nicest'] = None\n" + code + ends
        done = subprocess.run([sys.executable, "-c", alone], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_a_conditional_mixture_has_graphs(tmp_path: Path):
    units, prior = Units.continuous(2), Logistic(2)
    shifts = [Elementwise(Affine(), 2, torch.nn.Linear(1, 4)) for _ in range(2)]
    flow = Mixture([Flow(units, Chain(DiagonalScaling(2), each), prior) for each in shifts])
    flow.initialise(torch.randn(50, 2), torch.randn(50, 1))
    run = opened(tmp_path, flow, context=1)
    assert list(export(run, "torch-export", tmp_path / "graphs").graphs) == ["score", "sample"]
    score, sample = (torch.export.load(tmp_path / "graphs" / f"{each}.pt2").module() for each in ("score", "sample"))
    e, context, member = torch.randn(9, 2), torch.randn(9, 1), torch.arange(9) % 2
    drawn = sample(e=e, context=context, member=member)
    alone = torch.stack([each.decode(e, context) for each in run.flow.members])
    torch.testing.assert_close(drawn, alone[member, torch.arange(9)])
    torch.testing.assert_close(score(x=drawn, context=context), run.flow.log_prob(drawn, context))


class Branch(Bijection):
    """A layer that no graph can hold: its control flow depends on the numbers."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return (x + 1 if float(x.sum()) > 0 else x + 2), x.new_zeros(len(x))

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return y - 1, y.new_zeros(len(y))


def test_a_model_that_has_no_graph_is_refused(tmp_path: Path, refusal: Callable):
    flow = Flow(Units.continuous(2), Chain(DiagonalScaling(2), {"mine": Branch()}), Logistic(2))
    line = refusal(export, opened(tmp_path, flow), "torch-export", tmp_path / "graphs")
    assert "no torch-export graph of score" in line
    assert not (tmp_path / "graphs").exists()


def test_a_graph_that_differs_from_the_flow_is_not_written(
    rows_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable
):
    def wrong(module):
        module = copy.deepcopy(module)
        for each in module.parameters():
            each.data.mul_(1.01)
        return folded(module)

    monkeypatch.setattr("nicest.tasks.export.folded", wrong)
    (tmp_path / CARD).write_text("of an older export")
    assert "differs from the flow" in refusal(export, rows_run, "torch-export", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_depend_on_the_rows_is_computed_once():
    """A learned linear layer is one product with a constant matrix, either way."""
    mixing = Mixing(5).double()
    with torch.no_grad():
        mixing.lu.normal_()
        mixing.log_diagonal.normal_()

    class Back(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixing = mixing

        def forward(self, y: Tensor) -> Tensor:
            return self.mixing.inverse(y)[0]

    y = torch.randn(7, 5).double()
    program = graph(Back(), {"y": y})
    assert torch.allclose(program.module()(y=y), torch.linalg.solve(mixing.matrix, (y - mixing.b).mT).mT, atol=1e-9)
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert not any(each in name for name in names for each in ("solve", "inv", "exp", "tri"))
