"""On a GPU the step is one captured graph; it does what the same lines do one by one."""

import json
import signal
from pathlib import Path

import pytest
import torch

from nicest.data import load
from nicest.fast import LoweredChain
from nicest.fast.lower import LoweredUnits
from nicest.flows import MLP, Additive, Coupling, Flow, Partition, Units
from nicest.inference.engine import Engine
from nicest.recipes import load_recipe
from nicest.runs.run import load as load_model
from nicest.runs.runtime import rows_to
from nicest.train.fit import start, train
from nicest.train.optim import set_rates
from nicest.train.step import TrainingStep
from small_runs import SMALL, interrupt_at, metrics, people, run, same_run

if torch.cuda.is_available():
    from nicest.fast import kernels
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
CASES = {
    "adam": ("train.precision=float32", "train.weight_decay=0.1"),
    "rmsprop": ("train.precision=float32", "train.optimizer=rmsprop", "train.weight_decay=0"),
    "clipped": ("train.precision=float32", "train.clip=0.5", "train.ema=0"),
    "whitened": ("train.precision=float32", "model.preprocess=zca", "model.law=affine"),
    "bf16": ("train.precision=bfloat16", "train.weight_decay=0.1"),
    "bf16 rmsprop": ("train.precision=bfloat16", "train.optimizer=rmsprop", "train.weight_decay=0"),
    "bf16 clipped": ("train.precision=bfloat16", "train.clip=0.5", "train.ema=0", "model.learned_prior=true"),
    "bf16 checkerboard": ("train.precision=bfloat16", "model.partition=checkerboard"),
    "bf16 linear": ("train.precision=bfloat16", "model.hidden_layers=0"),
    "labels": ("train.precision=float32", "data.labels=true", "train.label_weight=2"),
    "bf16 labels": ("train.precision=bfloat16", "data.labels=true", "train.label_weight=2"),
    "warped": ("augment.share=0.8", "augment.rotation=0.1", "augment.elastic=0.3"),
    "bf16 affine": ("train.precision=bfloat16", "model.law=affine", "model.hidden_layers=3", "model.dropout=0"),
}


def steps(*overrides: str, captured: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of 30 steps, and the weights after them."""
    recipe, device = load_recipe("digits").override(*SMALL, *overrides), torch.device("cuda")
    splits = load("digits", labels=recipe.data.labels)
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
    assert len(set(graph)) > 25  # fresh noise and new weights in every step
    for name, weights in graph_weights.items():
        torch.testing.assert_close(weights, lines_weights[name], rtol=1e-3, atol=1e-5)


def test_a_run_on_the_gpu_learns_like_one_on_the_cpu(tmp_path: Path):
    train(load_recipe("digits"), tmp_path / "gpu", overrides=SMALL, device="cuda")
    run(tmp_path / "cpu")
    gpu, cpu = metrics(tmp_path / "gpu")[-1], metrics(tmp_path / "cpu")[-1]
    assert gpu["valid_nats"] == pytest.approx(cpu["valid_nats"], abs=1.0)
    assert "command" in json.loads((tmp_path / "gpu" / "environment.json").read_text())


def test_a_table_trains_on_the_gpu_and_a_stopped_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = f'data.name="{people(tmp_path / "people.csv")}"'
    table = (data, "table.members=1", "train.epochs=4", "train.batch=50", "train.evaluate_every=1")

    def on(out: str, *, resume: bool = False) -> None:
        train(load_recipe("table"), tmp_path / out, overrides=() if resume else table, resume=resume, device="cuda")

    on("straight")
    with monkeypatch.context() as patch:
        interrupt_at(10, signal.SIGTERM, patch)
        on("stopped")
    on("stopped", resume=True)
    assert same_run(tmp_path / "stopped", tmp_path / "straight")


both = pytest.mark.parametrize("precision", ["float32", "bfloat16"])


@both
@pytest.mark.parametrize("name", ["digits", "digits-conv"])
def test_resume_on_the_gpu_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, precision: str):
    of = tuple(each for each in SMALL if name == "digits" or each.startswith("train."))
    recipe, settings = load_recipe(name), (*of, f"train.precision={precision}")
    train(recipe, tmp_path / "straight", overrides=settings, device="cuda")
    interrupt_at(20, signal.SIGINT, monkeypatch)
    assert not train(recipe, tmp_path / "stopped", overrides=settings, device="cuda")["finished"]
    monkeypatch.undo()
    torch.manual_seed(99)
    train(recipe, tmp_path / "stopped", resume=True, device="cuda")
    assert same_run(tmp_path / "stopped", tmp_path / "straight")


@both
def test_a_non_finite_loss_goes_back_and_goes_on_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
):
    calls: list[int] = []
    call = TrainingStep.__call__

    def sick(step: TrainingStep, index: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        loss = call(step, index)
        return loss * float("nan") if len(calls) == 20 else loss

    monkeypatch.setattr(TrainingStep, "__call__", sick)
    settings = (*SMALL, f"train.precision={precision}")
    result = train(load_recipe("digits"), tmp_path, overrides=settings, device="cuda")
    assert result["finished"]
    assert result["rolled_back"]
    valid = rows_to(load("digits").valid, torch.device("cuda"))
    flow = load_model(tmp_path, device="cuda")
    kept = Engine(flow).log_prob(valid).mean().item()
    assert kept + flow.units.interval_nats == (
        pytest.approx(result["best_nats"], abs=0.5)  # other noise; what was validated is what was kept
    )


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
            for network in step.flow.bijection.networks:
                network.buffers = None
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


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("i1", [range(0, 64, 2), range(1, 64, 2), range(20, 64)], ids=str)
def test_a_whole_coupling_at_once_has_the_gradients_of_its_parts(sign: int, i1: range):
    torch.manual_seed(0)
    layer = Coupling(Partition(i1, 64), Additive(), MLP(len(i1), 64 - len(i1), (40, 40, 40))).cuda()
    fast = LoweredChain(layer, torch.bfloat16)
    weights, ends = torch.randn(50, 64, device="cuda"), []
    for at_once in (True, False):
        x = torch.linspace(-2, 2, 3200, device="cuda").view(50, 64).requires_grad_()
        if not at_once:
            fast.fast[0][1].at_once = lambda *_: False  # type: ignore[union-attr, method-assign]
        y = fast(x)[0] if sign == 1 else fast.inverse(x)[0]
        ends.append((y, *torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()])))
    assert torch.equal(ends[0][0], ends[1][0])
    for some, other in zip(*ends, strict=True):
        torch.testing.assert_close(some, other, rtol=1e-2, atol=1e-2)


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
            assert torch.equal(kernels.couple(x, b, partition.layout, sign, 96.0), expected)
        b = torch.randn(37, len(partition.i1), device="cuda", dtype=torch.bfloat16)
        assert torch.equal(kernels.add_to_read(x, b, partition.layout), partition.merge(x1 + b, x2))

    @pytest.mark.parametrize("levels", [2, 17, 256, 65536])
    def test_dequantize(self, levels: int):
        x = torch.randint(levels, (50, 30), device="cuda", dtype=torch.int32)
        for u in (torch.rand(50, 30, device="cuda"), torch.full((50, 30), 1 - 2**-24, device="cuda")):
            count = torch.tensor(levels, device="cuda")  # torch divides by a number as it multiplies by its inverse
            limit = torch.nextafter((x + 1.0) / count, torch.zeros((), device="cuda"))
            assert torch.equal(
                kernels.dequantize(x, u, torch.zeros(30, device="cuda"), count.float().expand(30).contiguous()),
                torch.minimum((x + u) / count, limit),
            )

    @pytest.mark.parametrize("interval", [(0.0, 1.0), (-1.0, 1.0), (0.3, 0.7)])
    @pytest.mark.parametrize("levels", [2, 17, 256, 65536])
    def test_units_of_pixels_enter_and_leave_exactly(self, levels: int, interval: tuple[float, float]):
        plain = Units.pixels(30, levels, interval).cuda()
        fast = LoweredUnits(plain)
        x = torch.randint(levels, (500, 30), device="cuda", dtype=torch.int32)
        assert torch.equal(fast.leave(fast.enter(x)), x.float())
        y = torch.randn(500, 30, device="cuda") * (interval[1] - interval[0])
        y[0, 0] = torch.nan
        torch.testing.assert_close(fast.leave(y), plain.leave(y), equal_nan=True, rtol=0, atol=0)

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
    recipe, splits = load_recipe("digits").override(*SMALL, "train.precision=float32"), load("digits")
    state = start(recipe, splits, torch.device("cuda"))
    units = Units.continuous(64, standardise=False).cuda()
    flow = Flow(units, state.flow.eval().bijection, state.flow.prior)
    rows = rows_to(splits.train, torch.device("cuda")).float() / 17
    for precision, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.5)):
        engine = Engine(flow, batch=1000, precision=precision)
        for n in (1437, 1000, 1):
            torch.testing.assert_close(engine.log_prob(rows[:n]), flow(rows[:n]).detach(), rtol=1e-5, atol=tolerance)
        drawn = engine.sample(2500, generator=torch.Generator("cuda").manual_seed(1))
        assert len(drawn.unique(dim=0)) == 2500
        torch.testing.assert_close(
            drawn[:1000], flow.sample(1000, generator=torch.Generator("cuda").manual_seed(1)), rtol=1e-2, atol=2e-2
        )
    exact, reduced = (Engine(flow, batch=1000, precision=each) for each in (torch.float32, torch.bfloat16))
    before = [each.log_prob(rows) for each in (exact, reduced)]
    with torch.no_grad():
        next(iter(flow.parameters())).mul_(1.5)
    torch.testing.assert_close(exact.log_prob(rows), flow(rows).detach(), rtol=1e-5, atol=1e-4)  # reads what is there
    torch.testing.assert_close(reduced.log_prob(rows), before[1])  # keeps what it found
    reduced.refresh()
    torch.testing.assert_close(reduced.log_prob(rows), flow(rows).detach(), rtol=1e-5, atol=0.5)
    assert not torch.allclose(before[0], exact.log_prob(rows), rtol=1e-3)


def test_an_engine_has_few_graphs_and_takes_no_other_shape():
    state = start(load_recipe("digits").override(*SMALL), load("digits"), torch.device("cuda"))
    engine, rows = Engine(state.flow.eval(), batch=256), rows_to(load("digits").train, torch.device("cuda"))
    assert [len(engine.log_prob(rows[:n])) for n in (0, 1, 3, 5, 100, 200, 300)] == [0, 1, 3, 5, 100, 200, 300]
    assert engine.sample(0).shape == (0, 64)
    assert len(engine.graphs) == 5  # 1, 4, 8, 128, 256
    with pytest.raises(ValueError, match="expected 64 features"):
        engine.log_prob(rows[:5, :1])


def test_noise_is_fresh_in_every_replay():
    state = start(load_recipe("digits").override(*SMALL), load("digits"), torch.device("cuda"))
    engine, rows = Engine(state.flow.eval()), rows_to(load("digits").test, torch.device("cuda"))
    assert not torch.equal(engine.log_prob(rows), engine.log_prob(rows))
