"""One loop: it learns, with fresh noise, keeps the best averaged model, and is the same twice."""

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import nicest
from nicest.data import load as load_data
from nicest.flows import MLP, Additive, Chain, Coupling, Flow, Gaussian, Units, odd_even
from nicest.inference.engine import Engine
from nicest.recipes import load_recipe
from nicest.recipes.build import build
from nicest.runs.folder import LAST, MODEL, read_tensors
from nicest.runs.run import Run, load
from nicest.train import loop
from nicest.train.loop import enough_threads
from nicest.train.state import State
from small_runs import PER_EPOCH, PLAIN, equal, last, metrics, model, resume, run, same_run

SCALING = "bijection.layers.scaling.s"


@pytest.fixture
def norms() -> Iterator[list[float]]:
    """The norm of the gradient at every step that is taken."""
    seen: list[float] = []

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        seen.append(float(torch.nn.utils.get_total_norm(gradients)))

    with register_optimizer_step_pre_hook(look):
        yield seen


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """The levels of every training batch, and the noise that was added to them."""
    seen: list[tuple[Tensor, Tensor]] = []
    enter = Units.enter

    def look(units: Units, x: Tensor, **options: Any) -> Tensor:
        y = enter(units, x, **options)
        if torch.is_grad_enabled():  # not in a validation
            seen.append((x, y.detach().double() * units.levels - x))
        return y

    monkeypatch.setattr(Units, "enter", look)
    return seen


class TestLearning:
    def test_the_likelihood_of_training_and_validation_data_rises(self, tmp_path: Path):
        run(tmp_path)
        rows = metrics(tmp_path)
        for key in ("train_nats", "valid_nats"):
            first, second, third = (row[key] for row in rows)
            assert first < second < third

    def test_noise_is_fresh_for_every_pixel_row_and_pass(self, tmp_path: Path, batches: list[tuple[Tensor, Tensor]]):
        run(tmp_path, "train.batch=2000", "train.epochs=2", settings=PLAIN)  # a batch of everything
        noise = [u for _, u in batches]
        assert [len(u) for u in noise] == [1437, 1437]
        both = torch.cat(noise)
        assert len(both.unique(dim=0)) == len(both)
        assert both.min() > -1e-5
        assert both.max() < 1 + 1e-5
        assert abs(float(both.mean()) - 0.5) < 0.01
        assert float(both.T.corrcoef().fill_diagonal_(0).abs().max()) < 0.1

    def test_every_epoch_visits_each_example_once_in_a_new_order(
        self, tmp_path: Path, batches: list[tuple[Tensor, Tensor]]
    ):
        run(tmp_path, "train.batch=479", "train.epochs=2", settings=PLAIN)  # 3 x 479 = 1437
        levels = [x for x, _ in batches]
        first, second = torch.cat(levels[:3]), torch.cat(levels[3:])
        assert not torch.equal(first, second)
        everything = sorted(row.tobytes() for row in load_data("digits").train)
        for epoch in (first, second):
            assert sorted(row.tobytes() for row in epoch.numpy()) == everything

    def test_the_gradient_is_clipped_to_its_norm(self, tmp_path: Path, norms: list[float]):
        run(tmp_path / "free", "train.epochs=1", settings=PLAIN)
        free, norms[:] = list(norms), []
        run(tmp_path / "clipped", "train.epochs=1", f"train.clip={min(free) / 2}", settings=PLAIN)
        assert len(norms) == PER_EPOCH
        assert norms == pytest.approx([min(free) / 2] * PER_EPOCH, rel=1e-4)

    def test_the_loss_is_in_its_unit_and_the_figures_are_in_nats(self, tmp_path: Path, norms: list[float]):
        for loss in ("nats", "nats-per-dim"):
            run(tmp_path / loss, "train.epochs=1", "train.batch=2000", f"train.loss={loss}", settings=PLAIN)
        assert norms[0] == pytest.approx(64 * norms[1], rel=1e-4)
        nats, per_dim = (metrics(tmp_path / loss)[0]["train_nats"] for loss in ("nats", "nats-per-dim"))
        assert nats == pytest.approx(per_dim, rel=1e-6)

    def test_held_whitening_stays_as_it_was_fitted(self, tmp_path: Path):
        run(tmp_path, "model.preprocess=triangular", "train.epochs=1", "train.weight_decay=0.5")
        tensors, recipe, *_ = read_tensors(tmp_path / LAST)
        flow = build(recipe).double()
        flow.initialise(torch.from_numpy(load_data("digits").train))
        for part in ("below", "log_diagonal", "b"):
            name = f"bijection.layers.whitening.{part}"
            assert torch.equal(tensors[f"flow.{name}"], flow.state_dict()[name])


def trained(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is trained, without the units, which are kept in float64."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("units.")}


class TestAverage:
    def test_is_of_the_weights_of_every_step_from_the_first_ones(self, tmp_path: Path):
        weights: list[Tensor] = []

        def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
            weights.append(optimizer.param_groups[1]["params"][-1].detach().double())

        with register_optimizer_step_post_hook(look):
            run(tmp_path, "train.ema=0.5", settings=PLAIN)
        expected = torch.zeros(64).double()  # where s starts
        for step, s in enumerate(weights):
            decay = min(0.5, (1 + step) / (10 + step))
            expected = decay * expected + (1 - decay) * s
        tensors = last(tmp_path)
        assert torch.equal(tensors[f"flow.{SCALING}"].double(), weights[-1])
        torch.testing.assert_close(tensors[f"average.{SCALING}"].double(), expected, rtol=1e-4, atol=1e-7)

    def test_is_what_is_validated_and_the_best_by_validation_is_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        scored: list[dict[str, Tensor]] = []
        nats = iter([-3.0, -1.0, -2.0])

        def score(engine: Engine, rows: Tensor, _: Tensor | None) -> Tensor:
            assert not engine.flow.training
            scored.append({name: tensor.clone() for name, tensor in engine.flow.state_dict().items()})
            return torch.full((len(rows),), next(nats))

        monkeypatch.setattr(Engine, "validation_log_prob", score)
        result = run(tmp_path, "train.ema=0.9")
        assert result["best_epoch"] == 2
        assert equal(trained(model(tmp_path)), trained(scored[1]))
        averages = {name: last(tmp_path)[f"average.{name}"] for name in trained(scored[2])}
        assert equal(averages, trained(scored[2]))
        weights = {name: last(tmp_path)[f"flow.{name}"] for name in scored[2]}
        assert not equal(weights, scored[2])

    def test_an_overfitted_end_is_not_what_is_kept(self, tmp_path: Path):
        rows = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
        np.save(tmp_path / "few.npy", rows)
        more = (f"data.name={tmp_path}/few.npy", "model.width=64", "train.epochs=80")
        result = run(tmp_path / "run", *more, settings=PLAIN)
        nats = [row["valid_nats"] for row in metrics(tmp_path / "run")]
        best = int(np.argmax(nats))
        assert 0 < best < 79
        assert nats[best] > nats[-1] + 0.5
        opened = Run(tmp_path / "run")
        assert result["best_epoch"] == opened.figures["epoch"] == best + 1
        assert result["best_nats"] == nats[best]
        valid = torch.from_numpy(load_data(opened.recipe.data.name).valid)
        assert float(opened.engine.log_prob(valid).mean()) == pytest.approx(nats[best], rel=1e-6)


class TestRecord:
    def test_one_row_for_every_validation_and_one_at_the_end(self, tmp_path: Path):
        run(tmp_path, "train.epochs=5", "train.evaluate_every=2")
        assert [row["epoch"] for row in metrics(tmp_path)] == [2, 4, 5]
        assert [row["step"] for row in metrics(tmp_path)] == [28, 56, 70]

    def test_a_row_says_where_and_how_well_and_how_long(self, tmp_path: Path):
        run(tmp_path, "train.schedule=exponential", "train.lr_decay=1.1")
        rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            assert set(row) == {*("epoch", "step", "train_nats", "valid_nats", "valid_bits_per_dim", "lr", "seconds")}
            assert row["lr"] == pytest.approx(1e-2 * 1.1 ** -(row["step"] - 1))
            level_nats = row["valid_nats"] - 64 * math.log(17)
            assert row["valid_bits_per_dim"] == pytest.approx(-level_nats / (64 * math.log(2)))
        assert 0 < rows[0]["seconds"] < rows[1]["seconds"] < rows[2]["seconds"]

    def test_figures_are_on_the_interval_and_bits_are_not(self, tmp_path: Path):
        flat = ("model.initialisation=zero-last", "train.lr=1e-12", "train.epochs=1", "train.batch=2000")
        for interval in ("[0, 1]", "[0, 4]"):
            run(tmp_path / interval, *flat, f"data.interval={interval}", settings=PLAIN)
        (unit,), (wide,) = metrics(tmp_path / "[0, 1]"), metrics(tmp_path / "[0, 4]")
        for row, interval in ((unit, (0, 1)), (wide, (0, 4))):
            rows = load_data("digits").valid
            x = interval[0] + (interval[1] - interval[0]) * (rows[None] + np.linspace(0, 1, 21)[:, None, None]) / 17
            expected = -(np.logaddexp(0, x) + np.logaddexp(0, -x)).sum(-1).mean()  # the prior alone
            assert row["valid_nats"] == pytest.approx(expected, abs=0.1)
            level_nats = expected - 64 * math.log(17 / interval[1])
            assert row["valid_bits_per_dim"] == pytest.approx(-level_nats / 64 / math.log(2), abs=0.01)

    def test_the_folder_holds_recipe_model_state_metrics_and_environment(self, tmp_path: Path):
        result = run(tmp_path / "deep" / "run")
        files = {path.name for path in (tmp_path / "deep" / "run").iterdir()}
        assert files - {".lock"} == {"recipe.toml", MODEL, LAST, "metrics.jsonl", "environment.json"}
        recipe = load_recipe(str(tmp_path / "deep" / "run" / "recipe.toml"))
        assert (recipe.data.shape, recipe.data.levels, recipe.model.width) == ((8, 8), 17, 8)
        versions = json.loads((tmp_path / "deep" / "run" / "environment.json").read_text())["versions"]
        assert versions["torch"] == torch.__version__
        assert result | {"seconds": 0, "best_nats": 0} == {
            "step": 42,
            "best_nats": 0,
            "best_epoch": 3,
            "seconds": 0,
            "rolled_back": False,
            "unscored": False,
            "run": str(tmp_path / "deep" / "run"),
            "epochs": 3,
            "finished": True,
        }


class TestSeed:
    def test_one_seed_is_one_result_to_the_bit(self, tmp_path: Path):
        run(tmp_path / "a")
        torch.rand(7)  # whatever random numbers were drawn before
        run(tmp_path / "b")
        assert same_run(tmp_path / "a", tmp_path / "b")

    @pytest.mark.parametrize("changed", ["train.seed=1", "data.seed=1"])
    def test_another_seed_is_another_result(self, tmp_path: Path, changed: str):
        run(tmp_path / "a", "train.epochs=1")
        run(tmp_path / "b", "train.epochs=1", changed)
        assert not torch.equal(last(tmp_path / "a")[f"flow.{SCALING}"], last(tmp_path / "b")[f"flow.{SCALING}"])
        assert metrics(tmp_path / "a") != metrics(tmp_path / "b")


class TestPrecision:
    @pytest.mark.usefixtures("_without_onednn")
    def test_bfloat16_trains_and_the_model_is_float32(self, tmp_path: Path):
        run(tmp_path / "a", "train.precision=bfloat16", settings=PLAIN)
        rows = metrics(tmp_path / "a")
        assert rows[-1]["train_nats"] > rows[0]["train_nats"]
        assert {tensor.dtype for tensor in trained(model(tmp_path / "a")).values()} == {torch.float32}
        assert load(tmp_path / "a")(torch.zeros(2, 64)).dtype == torch.float32
        run(tmp_path / "b", settings=PLAIN)
        assert metrics(tmp_path / "b") != rows  # it did compute in another precision
        assert metrics(tmp_path / "b")[-1]["valid_nats"] == pytest.approx(rows[-1]["valid_nats"], abs=1)

    def test_whitening_is_saved_in_float64_and_weights_in_float32(self, tmp_path: Path):
        run(tmp_path, "model.preprocess=zca", "train.epochs=1")
        for tensors in (model(tmp_path), last(tmp_path)):
            for name, tensor in tensors.items():
                if "zca" in name or "coupling" in name:
                    assert tensor.dtype == (torch.float64 if "zca" in name else torch.float32), name


class TestSaver:
    def test_a_cheap_state_is_saved_at_every_validation_and_a_dear_one_seldom(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        saved: list[int] = []
        save = State.save

        def spy(state: State, path: Path) -> None:
            saved.append(state.counters.step)
            save(state, path)

        monkeypatch.setattr(State, "save", spy)
        monkeypatch.setattr(loop, "CHEAP", 60.0)  # however slow the disk is
        run(tmp_path / "cheap")
        assert saved == [0, 14, 28, 42]
        saved.clear()
        monkeypatch.setattr(loop, "CHEAP", -1.0)
        monkeypatch.setattr(loop.Saver, "due", lambda saver: False)
        run(tmp_path / "dear")
        assert saved == [0, 42]
        assert equal(model(tmp_path / "cheap"), model(tmp_path / "dear"))
        assert metrics(tmp_path / "cheap") == metrics(tmp_path / "dear")

    def test_is_due_when_saving_would_take_less_than_a_hundredth(self, monkeypatch: pytest.MonkeyPatch):
        now = [100.0]
        monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
        saver = loop.Saver(None, None)  # type: ignore[arg-type]
        saver.took = saver.spent = 1.0
        now[0] = 199.0
        assert not saver.due()
        now[0] = 201.0
        assert saver.due()

    @pytest.mark.parametrize("cost", [0.01, 0.2, 3.0])
    def test_saving_takes_less_than_a_hundredth_of_the_time_beyond_its_start(
        self, monkeypatch: pytest.MonkeyPatch, cost: float
    ):
        """Validations every 50 ms, for half an hour of a clock of our own, and a state that takes `cost` to write."""
        clock = Clock(cost)
        monkeypatch.setattr(loop.time, "perf_counter", lambda: clock.now)
        saver = loop.Saver(clock, clock)  # type: ignore[arg-type]
        while clock.now < 1800:
            clock.now += 0.05
            if saver.due():
                saver.save()
        assert clock.saves > 5
        assert clock.saves * cost < loop.CHEAP + cost + 1800 / 100


class Clock:
    """Stands for the state and the run folder: saving makes it later."""

    path = Path()

    def __init__(self, cost: float) -> None:
        self.now, self.cost, self.saves = 0.0, cost, 0

    def save(self, sink: object) -> None:
        self.now += self.cost
        self.saves += 1


class TestPatience:
    def test_training_stops_when_validation_has_not_improved_for_so_many_epochs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        nats = iter([1.0, 3.0, 2.0, 2.5, 2.9, 2.0, 9.0])
        monkeypatch.setattr(Engine, "validation_log_prob", lambda _, rows, __: torch.full((len(rows),), next(nats)))
        result = run(tmp_path, "train.epochs=20", "train.patience=3")
        assert result["finished"]
        assert (result["best_epoch"], result["step"]) == (2, 5 * PER_EPOCH)
        assert [row["epoch"] for row in metrics(tmp_path)] == [1, 2, 3, 4, 5]
        monkeypatch.undo()
        again = resume(tmp_path)
        assert (again["finished"], again["step"]) == (True, 5 * PER_EPOCH)  # there is nothing to go on with
        assert resume(tmp_path, "train.patience=0", "train.epochs=6")["step"] == 6 * PER_EPOCH

    def test_is_asked_at_validations_only(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        nats = iter([3.0, 2.0, 1.0, 0.0])
        monkeypatch.setattr(Engine, "validation_log_prob", lambda _, rows, __: torch.full((len(rows),), next(nats)))
        result = run(tmp_path, "train.epochs=20", "train.patience=3", "train.evaluate_every=2")
        assert result["step"] == 6 * PER_EPOCH


def test_a_long_epoch_is_saved_in_its_middle_and_resumes_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run(tmp_path / "straight")
    monkeypatch.setattr(loop, "CHECK_EVERY", 5)
    monkeypatch.setattr(loop.Saver, "late", lambda saver: saver.state.counters.step == 20)
    saved: list[int] = []
    save = State.save

    def killed_after(state: State, path: Path) -> None:
        save(state, path)
        saved.append(state.counters.step)
        if state.counters.step == 20:
            raise KeyboardInterrupt  # as good as dead

    monkeypatch.setattr(State, "save", killed_after)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed")
    assert saved == [0, 14, 20]
    monkeypatch.undo()
    resume(tmp_path / "killed")
    assert same_run(tmp_path / "killed", tmp_path / "straight")


def wide(width: int) -> Flow:
    part = odd_even(4)
    layers = [Coupling(p, Additive(), MLP(2, 2, (width,))) for p in (part, part.swap(), part)]
    return Flow(Units.continuous(4), Chain(*layers), Gaussian(4))


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
class TestThreads:
    def test_small_layers_get_one_and_the_others_come_back_after_an_error(self):
        def fails() -> None:
            with enough_threads(wide(8), 100):
                assert torch.get_num_threads() == 1
                raise KeyError

        with pytest.raises(KeyError):
            fails()
        assert torch.get_num_threads() == 2

    @pytest.mark.parametrize(("width", "batch"), [(8, 1_000_000), (70_000, 100)])
    def test_large_products_get_all(self, monkeypatch: pytest.MonkeyPatch, width: int, batch: int):
        monkeypatch.setattr(nicest, "_spins", False)
        with enough_threads(wide(width), batch):
            assert torch.get_num_threads() == 2

    @pytest.mark.parametrize(("spins", "load", "threads"), [(True, 9e9, 1), (True, 0.0, 2), (False, 9e9, 2)])
    def test_large_products_get_one_if_threads_spin_on_busy_cores(
        self, monkeypatch: pytest.MonkeyPatch, spins: bool, load: float, threads: int
    ):
        monkeypatch.setattr(nicest, "_spins", spins)
        monkeypatch.setattr(loop.os, "getloadavg", lambda: (load, load, load))
        with enough_threads(wide(70_000), 100):
            assert torch.get_num_threads() == threads

    @pytest.mark.parametrize(("before", "spins"), [("", "False"), ("import torch; ", "True")])
    def test_threads_of_torch_sleep_while_they_wait(self, before: str, spins: str):
        """The setting counts if it is made before torch is imported."""
        code = f"{before}import nicest, os; print(nicest._spins, os.environ['OMP_WAIT_POLICY'])"
        environment = {name: each for name, each in os.environ.items() if name != "OMP_WAIT_POLICY"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.stdout.split() == [spins, "passive"]

    def test_a_training_uses_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        seen = set()
        step = loop.TrainingStep.__call__

        def watched(self: Any, index: Tensor) -> Tensor:
            seen.add(torch.get_num_threads())
            return step(self, index)

        monkeypatch.setattr(loop.TrainingStep, "__call__", watched)
        run(tmp_path)
        assert seen == {1}
        assert torch.get_num_threads() == 2

    def test_a_fit_inside_a_fit(self):
        with enough_threads(wide(8), 100):
            with enough_threads(wide(8), 100):
                pass
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2

    def test_fits_that_overlap_leave_the_number_as_it_was(self):
        first, second, found = threading.Event(), threading.Event(), []

        def one() -> None:
            with enough_threads(wide(8), 100):
                first.set()
                second.wait(10)

        def other() -> None:
            first.wait(10)
            with enough_threads(wide(8), 100):
                second.set()
                threads[0].join()

        threads = [threading.Thread(target=each) for each in (one, other)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        last = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        last.start()
        last.join()
        assert found == [2]
