"""On a GPU the step is one captured graph; it does what the same lines do one by one."""

import json
import signal
from pathlib import Path

import pytest
import torch
from runs import SMALL, interrupt_at, metrics, run, same_run

from nicest.data import load
from nicest.flows import MLP, Partition
from nicest.recipes import load_recipe
from nicest.train.engine import Engine
from nicest.train.loop import start, train
from nicest.train.optim import set_rates
from nicest.train.runtime import rows_to
from nicest.train.step import TrainingStep

if torch.cuda.is_available():
    from nicest import kernels
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
CASES = {
    "adam": ("train.weight_decay=0.1",),
    "rmsprop": ("train.optimizer=rmsprop", "train.weight_decay=0"),
    "clipped": ("train.clip=0.5", "train.ema=0"),
    "whitened": ("model.preprocess=zca", "model.law=affine"),
    "bf16": ("train.precision=bfloat16", "train.weight_decay=0.1"),
    "bf16 rmsprop": ("train.precision=bfloat16", "train.optimizer=rmsprop", "train.weight_decay=0"),
    "bf16 clipped": ("train.precision=bfloat16", "train.clip=0.5", "train.ema=0", "model.learned_prior=true"),
    "bf16 affine": ("train.precision=bfloat16", "model.law=affine", "model.hidden_layers=3", "model.dropout=0"),
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


BF16 = (*SMALL, "train.precision=bfloat16", "model.dropout=0", "model.hidden_layers=3", "model.width=40")


@pytest.mark.parametrize(
    "case", [(), ("train.optimizer=rmsprop", "train.weight_decay=0"), ("train.clip=0.5",)], ids=str
)
def test_the_fused_update_is_the_optimisers_own(case: tuple[str, ...]):
    recipe, splits = load_recipe("digits").override(*BF16, *case), load("digits")
    device, ends = torch.device("cuda"), []
    for fused in (True, False):
        state = start(recipe, splits, device)
        step = TrainingStep(state, rows_to(splits.train, device), 100, captured=False)
        if not fused:
            step.fused = None
            for network in (m for m in state.flow.modules() if isinstance(m, MLP)):
                network.buffers_in_use = None
            for p in state.flow.parameters():
                p.grad = None
            for values in state.optimizer.state.values():
                values |= {"step": values["step"].clone()} if "step" in values else {}
        for i in range(30):
            set_rates(state.optimizer, recipe.train, i, i // 4, 30)
            step(torch.arange(i, i + 100, device=device))
            state.counters.step += 1
        ends.append({name: p.detach().cpu() for name, p in state.average.named_parameters()})
        steps_taken = [values["step"].item() for values in state.optimizer.state.values() if "step" in values]
        assert set(steps_taken) <= {30.0}
    for name, weights in ends[0].items():
        torch.testing.assert_close(weights, ends[1][name], rtol=1e-2, atol=2e-4)


class TestKernels:
    """Each beside the same in torch."""

    @pytest.mark.parametrize("i1", [range(0, 64, 2), range(1, 64, 2), range(20), range(20, 64)], ids=str)
    def test_read_shift_and_add(self, i1: range):
        partition = Partition(i1, 64)
        x = torch.randn(37, 64, device="cuda")
        x1, x2 = partition.split(x)
        assert torch.equal(kernels.part(x, partition.layout, 1), x1)
        assert torch.equal(kernels.part(x, partition.layout, 2), x2)
        settled = (x1 + 96.0) - 96.0
        assert torch.equal(kernels.read(x, partition.layout, 96.0, torch.bfloat16), settled.bfloat16())
        b = torch.randn(37, len(partition.i2), device="cuda", dtype=torch.bfloat16)
        for sign in (1, -1):
            expected = partition.merge(settled, x2 + sign * ((b.float() + 96.0) - 96.0))
            assert torch.equal(kernels.shift(x, b, partition.layout, sign, 96.0), expected)
        b = torch.randn(37, len(partition.i1), device="cuda", dtype=torch.bfloat16)
        assert torch.equal(kernels.add_to_read(x, b, partition.layout), partition.merge(x1 + b, x2))

    @pytest.mark.parametrize("levels", [2, 17, 256, 65536])
    def test_dequantize(self, levels: int):
        x = torch.randint(levels, (50, 30), device="cuda", dtype=torch.int32)
        for u in (torch.rand(50, 30, device="cuda"), torch.full((50, 30), 1 - 2**-24, device="cuda")):
            count = torch.tensor(levels, device="cuda")  # torch divides by a number as it multiplies by its inverse
            limit = torch.nextafter((x + 1.0) / count, torch.zeros((), device="cuda"))
            assert torch.equal(kernels.dequantize(x, u, levels), torch.minimum((x + u) / count, limit))

    @pytest.mark.parametrize(("rows", "columns"), [(1, 1), (33, 129), (200, 1000)])
    def test_rectified_gradient(self, rows: int, columns: int):
        gradient = torch.randn(rows, 2 * columns, device="cuda")[:, ::2]
        active = torch.randn(rows, columns, device="cuda").relu().bfloat16()
        out = torch.empty_like(active)
        for mask in (active, None):
            sums = torch.full((kernels.sum_rows(rows), columns + 50), torch.nan, device="cuda")
            kernels.rectified_gradient(gradient, mask, 1.25, out, sums)
            expected = 1.25 * gradient if mask is None else torch.where(active > 0, 1.25 * gradient, 0)
            assert torch.equal(out, expected.bfloat16())
            torch.testing.assert_close(sums[:, :columns].sum(0), out.float().sum(0), rtol=1e-4, atol=1e-3)
            assert sums[:, columns:].eq(0).all()


def test_an_engine_in_graphs_gives_what_the_flow_gives():
    recipe, splits = load_recipe("digits").override(*SMALL), load("digits")
    state = start(recipe, splits, torch.device("cuda"))
    flow, rows = state.flow.eval().continuous(), rows_to(splits.train, torch.device("cuda")).float() / 17
    for precision, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.5)):
        engine = Engine(flow, batch=1000, precision=precision)
        for n in (1437, 1000, 1):
            torch.testing.assert_close(engine.log_prob(rows[:n]), flow(rows[:n]).detach(), rtol=1e-5, atol=tolerance)
        drawn = engine.sample(2500, generator=torch.Generator("cuda").manual_seed(1))
        assert len(drawn.unique(dim=0)) == 2500
        torch.testing.assert_close(
            drawn[:1000], flow.sample(1000, generator=torch.Generator("cuda").manual_seed(1)), rtol=1e-2, atol=2e-2
        )
    with torch.no_grad():
        list(flow.parameters())[-1].add_(1.0)
    exact = Engine(flow, batch=1000)
    torch.testing.assert_close(exact.log_prob(rows), flow(rows).detach(), rtol=1e-5, atol=1e-4)


def test_noise_is_fresh_in_every_replay():
    state = start(load_recipe("digits").override(*SMALL), load("digits"), torch.device("cuda"))
    engine, rows = Engine(state.flow.eval()), rows_to(load("digits").test, torch.device("cuda"))
    assert not torch.equal(engine.log_prob(rows), engine.log_prob(rows))
