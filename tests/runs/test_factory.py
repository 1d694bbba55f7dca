"""Flows of one's own in a file: built again by a function that the caller names, and by no other."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nicest
from nicest import Flow, NicestError
from nicest.flows import LAWS, MLP, Chain, Coupling, Gaussian, Units, odd_even
from nicest.runs.folder import RunFolder, write_tensors

MODULE = """
from nicest.flows import MLP, Affine, Chain, Coupling, Flow, Gaussian, Units, odd_even
print("imported")
calls = []

def affine(dim, width=8, steps=()):
    calls.append((dim, width, steps))
    parts = [odd_even(dim), odd_even(dim).swap()] * 2
    layers = [Coupling(p, Affine(), MLP(len(p.i1), 2 * len(p.i2), (width,))) for p in parts]
    return Flow(Units.columns(steps or [0.0] * dim), Chain(*layers), Gaussian(dim, learned=True))

def nothing(**arguments):
    return arguments
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of one's own, that can be imported for as long as the test runs."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own_flows_of_a_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "code")
    yield "own_flows_of_a_test"
    sys.modules.pop("own_flows_of_a_test", None)


def made(module: str, **arguments: object) -> Flow:
    """A flow of that module whose weights and constants are its own."""
    flow: Flow = __import__(module).affine(**arguments)
    torch.manual_seed(5)
    for tensor in [*flow.parameters(), flow.units.loc]:
        tensor.data.normal_()
    return flow.eval()


@pytest.mark.parametrize("name", ["flow.safetensors", "a/folder"])
@pytest.mark.parametrize("allowed", ["the name", "all"])
def test_a_saved_flow_is_loaded(module: str, tmp_path: Path, name: str, allowed: str):
    flow, factory = made(module, dim=3, width=5, steps=[0.0, 1.0, 0.5]), f"{module}:affine"
    nicest.save(flow, tmp_path / name, factory=factory, arguments={"dim": 3, "width": 5, "steps": (0.0, 1.0, 0.5)})
    again = nicest.load(tmp_path / name, trust=factory if allowed == "the name" else True)
    x = torch.tensor([[0.3, 2.0, 1.5], [-1.0, 0.0, 0.5]])
    assert torch.equal(again.log_prob(x, noise=False), flow.log_prob(x, noise=False))
    assert sys.modules[module].calls[-1] == (3, 5, [0.0, 1.0, 0.5])  # as JSON has them
    run = nicest.open(tmp_path / name, trust=factory, dtype=torch.float64)
    assert run.engine.sample(4).dtype == torch.float64


def test_another_process_loads_it_and_imports_nothing_before_it_may(module: str, tmp_path: Path):
    flow = made(module, dim=2)
    nicest.save(flow, tmp_path / "flow.safetensors", factory=f"{module}:affine", arguments={"dim": 2})
    script = (
        "import nicest, sys, torch\n"
        "try:\n    nicest.load('flow.safetensors')\n"
        "except nicest.NicestError as error:\n    print('refused', len(str(error).splitlines()))\n"
        f"flow = nicest.load('flow.safetensors', trust='{module}:affine')\n"
        "print(flow.log_prob(torch.ones(1, 2)).item())\n"
    )
    asked = [sys.executable, "-c", f"import sys; sys.path.insert(0, 'code')\n{script}"]
    done = subprocess.run(asked, cwd=tmp_path, check=True, capture_output=True, text=True)
    refused, imported, nats = done.stdout.splitlines()
    assert (refused, imported) == ("refused 1", "imported")
    assert float(nats) == pytest.approx(flow.log_prob(torch.ones(1, 2)).item())


@pytest.mark.parametrize("trust", [False, "other.module:affine", "", "os:system"])
def test_without_trust_no_function_is_called(module: str, tmp_path: Path, trust: object):
    nicest.save(made(module, dim=2), tmp_path / "flow", factory=f"{module}:affine", arguments={"dim": 2})
    before = list(sys.modules[module].calls)
    with pytest.raises(NicestError, match=rf"the function '{module}:affine' builds: .*trust='{module}:affine'"):
        nicest.load(tmp_path / "flow", trust=trust)
    assert sys.modules[module].calls == before
    with pytest.raises(NicestError, match="trust="):
        nicest.open(tmp_path / "flow")
    assert nicest.open(tmp_path / "flow", flow=made(module, dim=2)).flow.dim == 2  # one that is given needs none


def changed(path: Path, **figures: object) -> None:
    """Change the metrics that a file holds."""
    saved = RunFolder(path).read_model()
    write_tensors(path, saved._replace(figures=saved.figures | figures))


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"factory": "gone.module:f"}, "cannot import the factory gone.module:f .No module named 'gone'.: install it"),
        ({"factory": "own_flows_of_a_test:gone"}, "cannot import the factory own_flows_of_a_test:gone"),
        ({"factory": "own_flows_of_a_test:nothing"}, "own_flows_of_a_test:nothing to return a Density, got 'dict'"),
        ({"factory": "no name at all"}, "such as 'package.module:function', got 'no name at all'"),
        ({"factory": "a:b.c"}, "such as 'package.module:function', got 'a:b.c'"),
        ({"arguments": "[1]"}, "the arguments of 'own_flows_of_a_test:affine' in JSON"),
        ({"arguments": "{"}, "the arguments of 'own_flows_of_a_test:affine' in JSON"),
        ({"arguments": '{"dim": 4}'}, "the weights do not fit the flow: .* in the flow and .* in the file"),
    ],
)
def test_files_that_name_something_else_are_refused_in_a_line(
    module: str, tmp_path: Path, figures: dict[str, str], words: str
):
    path = tmp_path / "flow.safetensors"
    nicest.save(made(module, dim=2), path, factory=f"{module}:affine", arguments={"dim": 2})
    changed(path, **figures)
    with pytest.raises(NicestError, match=words) as refused:
        nicest.load(path, trust=True)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("factory", "arguments", "words"),
    [
        ("own_flows_of_a_test:affine", {"dim": 3}, "builds another flow than this one"),
        ("own_flows_of_a_test:affine", {"dim": {1, 2}}, "expected arguments that JSON can hold"),
        ("own_flows_of_a_test:affine", {"dim": float("nan")}, "expected arguments that JSON can hold"),
        ("own_flows_of_a_test:gone", {}, "cannot import the factory own_flows_of_a_test:gone"),
        ("__main__:affine", {}, "put the function in a module"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(module: str, tmp_path: Path, factory: str, arguments: dict, words: str):
    with pytest.raises(NicestError, match=words):
        nicest.save(made(module, dim=2), tmp_path / "flow", factory=factory, arguments=arguments)
    assert not (tmp_path / "flow").exists()


def test_nothing_is_written_over(module: str, tmp_path: Path):
    for times in range(2):
        with pytest.raises(NicestError, match="is there already") if times else torch.no_grad():
            nicest.save(made(module, dim=2), tmp_path / "flow", factory=f"{module}:affine", arguments={"dim": 2})


def test_random_numbers_stay_as_they_were(module: str, tmp_path: Path):
    flow = made(module, dim=2)
    before = torch.get_rng_state()
    nicest.save(flow, tmp_path / "flow", factory=f"{module}:affine", arguments={"dim": 2})
    nicest.load(tmp_path / "flow", trust=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_flow_of_pixels_keeps_its_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def pixels(dim: int) -> Flow:
        parts = [odd_even(dim), odd_even(dim).swap()] * 2
        layers = [Coupling(p, LAWS["additive"](), MLP(len(p.i1), len(p.i2), (4,))) for p in parts]
        return Flow(Units.pixels(dim, 17), Chain(*layers), Gaussian(dim))

    monkeypatch.setattr("nicest.flows.pixels", pixels, raising=False)
    flow = pixels(4)
    nicest.save(flow, tmp_path / "flow", factory="nicest.flows:pixels", arguments={"dim": 4})
    run = nicest.open(tmp_path / "flow", trust="nicest.flows:pixels")
    assert (run.recipe.data.levels, run.recipe.own_flow) == (17, True)
    x = torch.randint(17, (3, 4))
    assert torch.equal(run.flow.log_prob(x, noise=False), flow.log_prob(x, noise=False))
