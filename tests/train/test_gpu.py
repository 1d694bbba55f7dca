"""On a GPU the step is one captured graph; it does what the same lines do one by one."""

import json
import signal
from pathlib import Path

import pytest
import torch
from runs import SMALL, interrupt_at, metrics, run, same_run

from nicest.data import load
from nicest.recipes import load_recipe
from nicest.train.loop import start, train
from nicest.train.optim import set_rates
from nicest.train.runtime import rows_to
from nicest.train.step import TrainingStep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
CASES = {
    "adam": ("train.weight_decay=0.1",),
    "rmsprop": ("train.optimizer=rmsprop", "train.weight_decay=0"),
    "clipped": ("train.clip=0.5", "train.ema=0"),
    "whitened": ("model.preprocess=zca", "model.law=affine"),
}


def steps(*overrides: str, captured: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of 30 steps, and the weights after them."""
    recipe, splits = load_recipe("digits").override(*SMALL, *overrides), load("digits")
    device = torch.device("cuda")
    state = start(recipe, splits, device)
    rows = rows_to(splits.train, device)
    step, losses = TrainingStep(state, rows, 100, captured=captured), []
    for i in range(30):
        set_rates(state.optimizer, recipe.train, i, i // 4, 30)  # RMSProp's momentum sets in
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(i))[:100].to(device)
        losses.append(float(step(order)))
        state.counters.step += 1
    return losses, {name: p.detach().cpu() for name, p in state.average.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_graph_and_lines_agree_step_by_step(case: str):
    (graph, graph_weights), (lines, lines_weights) = (steps(*CASES[case], captured=each) for each in (True, False))
    assert graph == pytest.approx(lines, rel=1e-5)
    assert len(set(graph)) == 30
    for name, weights in graph_weights.items():
        torch.testing.assert_close(weights, lines_weights[name], rtol=1e-3, atol=1e-5)


def test_a_run_on_the_gpu_learns_like_one_on_the_cpu(tmp_path: Path):
    train(load_recipe("digits"), tmp_path / "gpu", overrides=SMALL, device="cuda")
    run(tmp_path / "cpu")
    gpu, cpu = metrics(tmp_path / "gpu")[-1], metrics(tmp_path / "cpu")[-1]
    assert gpu["valid_nats"] == pytest.approx(cpu["valid_nats"], abs=1.0)
    assert "command" in json.loads((tmp_path / "gpu" / "environment.json").read_text())


def test_resume_on_the_gpu_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = load_recipe("digits")
    train(recipe, tmp_path / "straight", overrides=SMALL, device="cuda")
    interrupt_at(20, signal.SIGINT, monkeypatch)
    assert not train(recipe, tmp_path / "stopped", overrides=SMALL, device="cuda")["finished"]
    monkeypatch.undo()
    torch.manual_seed(99)
    train(recipe, tmp_path / "stopped", resume=True, device="cuda")
    assert same_run(tmp_path / "stopped", tmp_path / "straight")


def test_a_non_finite_loss_goes_back_and_goes_on_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    call = TrainingStep.__call__

    def sick(step: TrainingStep, index: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        loss = call(step, index)
        return loss * float("nan") if len(calls) == 20 else loss

    monkeypatch.setattr(TrainingStep, "__call__", sick)
    result = train(load_recipe("digits"), tmp_path, overrides=SMALL, device="cuda")
    assert result["finished"]
    assert result["rolled_back"]
