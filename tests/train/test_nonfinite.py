"""A non-finite number: back to the last good state, once; the second time, one line that says where."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nicest.flows import DiagonalScaling
from nicest.recipes import Recipe
from nicest.recipes.build import build
from nicest.runs.run import load
from nicest.train import loop
from small_runs import PLAIN, counters, last, metrics, model, resume, run

Refusal = Callable[..., str]
Sicken = Callable[..., list[int]]


@pytest.fixture
def sicken(monkeypatch: pytest.MonkeyPatch) -> Sicken:
    """Let the scaling layer give NaN at these of its passes, counted over the whole training."""

    def at(*passes: int) -> list[int]:
        forward, counted = DiagonalScaling.forward, []

        def sick(layer: DiagonalScaling, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            y, log_det = forward(layer, x, context)
            if layer.training:
                counted.append(len(counted))
                y = y * float("nan") if counted[-1] in passes else y
            return y, log_det

        monkeypatch.setattr(DiagonalScaling, "forward", sick)
        return counted

    return at


def all_finite(out: Path) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in last(out).values())


class TestOnce:
    def test_goes_back_says_so_and_goes_on(self, tmp_path: Path, sicken: Sicken, capsys: pytest.CaptureFixture[str]):
        passes = sicken(20)  # in the second epoch of 14 steps
        result = run(tmp_path)
        assert result["finished"]
        assert result["rolled_back"]
        assert len(passes) == 3 * 14 + 14  # the second epoch twice
        note = next(line for line in capsys.readouterr().err.splitlines() if "non-finite" in line)
        assert "non-finite loss at step 20: back to step 14, with new noise" in note
        assert [row["epoch"] for row in metrics(tmp_path)] == [1, 2, 3]
        assert all_finite(tmp_path)

    def test_the_noise_after_it_is_new(self, tmp_path: Path, sicken: Sicken):
        run(tmp_path / "well", settings=PLAIN)
        sicken(20)
        run(tmp_path / "sick", settings=PLAIN)
        first, second, _ = zip(metrics(tmp_path / "well"), metrics(tmp_path / "sick"), strict=True)
        assert first[0] == first[1]
        assert second[0] != second[1]

    def test_before_the_first_validation_it_goes_back_to_the_start(self, tmp_path: Path, sicken: Sicken):
        sicken(3)
        assert run(tmp_path)["finished"]
        assert all_finite(tmp_path)

    def test_weights_that_the_last_step_of_an_epoch_ruined_are_not_saved(self, tmp_path: Path):
        """Every loss of the epoch was finite; the validation is not."""
        steps: list[int] = []

        def ruin(optimizer: torch.optim.Optimizer, *_: object) -> None:
            steps.append(len(steps))
            if steps[-1] == 13:
                optimizer.param_groups[0]["params"][0].grad.fill_(float("nan"))

        with register_optimizer_step_pre_hook(ruin):
            result = run(tmp_path)
        assert result["finished"]
        assert result["rolled_back"]
        assert [row["epoch"] for row in metrics(tmp_path)] == [1, 2, 3]
        assert all_finite(tmp_path)

    @pytest.mark.parametrize("sick", ["loss", "weights"])
    def test_an_interrupted_run_saves_no_sick_state(
        self, tmp_path: Path, sicken: Sicken, monkeypatch: pytest.MonkeyPatch, sick: str
    ):
        """NaN at step 20, or in the weights after it, and Ctrl-C at once."""
        sicken(*([20] if sick == "loss" else []))
        set_rates = loop.set_rates

        def interrupt(optimizer: torch.optim.Optimizer, settings: object, step: int, *rest: int) -> float:
            if step == 20:
                os.kill(os.getpid(), signal.SIGINT)
            return set_rates(optimizer, settings, step, *rest)

        def ruin(optimizer: torch.optim.Optimizer, *_: object) -> None:
            p = optimizer.param_groups[0]["params"][0]
            if sick == "weights" and optimizer.state[p].get("step", 0) == 20:
                p.grad.fill_(float("nan"))

        monkeypatch.setattr(loop, "set_rates", interrupt)
        with register_optimizer_step_pre_hook(ruin):
            result = run(tmp_path)
        assert (result["step"], result["finished"], result["rolled_back"]) == (14, False, True)
        assert counters(tmp_path)["step"] == 14
        assert all_finite(tmp_path)
        monkeypatch.undo()
        assert resume(tmp_path)["finished"]


class TestTwice:
    def test_a_learning_rate_far_too_high_stops_with_one_line(
        self, refusal: Refusal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        message = refusal(run, tmp_path, "train.lr=1e30")
        assert "non-finite loss at step 1, for the second time, first in the output of layer 'coupling1'" in message
        assert "lower train.lr (now 1e+30) or set train.clip (now 0)" in message
        assert f"the last good state is kept in {tmp_path}" in message
        assert capsys.readouterr().err.count("back to step 0") == 1
        assert all_finite(tmp_path)

    def test_the_last_good_state_and_the_best_model_remain(self, refusal: Refusal, tmp_path: Path, sicken: Sicken):
        sicken(20, 30, 31)  # pass 30 is step 16, the second time round; pass 31 looks which layer it was
        assert "at step 16, for the second time, first in the output of layer 'scaling'" in refusal(run, tmp_path)
        assert counters(tmp_path)["step"] == 14
        assert all_finite(tmp_path)
        assert load(tmp_path)(torch.zeros(3, 64)).isfinite().all()
        assert all(tensor.isfinite().all() for tensor in model(tmp_path).values())

    def test_what_was_stopped_can_be_resumed_with_a_remedy(self, refusal: Refusal, tmp_path: Path):
        refusal(run, tmp_path, "train.lr=1e30")
        assert resume(tmp_path, "train.lr=1e-3")["finished"]
        assert all_finite(tmp_path)

    @pytest.mark.parametrize("layer", ["coupling3", "scaling"])
    def test_a_layer_with_nonfinite_weights_is_named(self, layer: str):
        flow = build(Recipe().override("model.width=4", "data.shape=[6]"))
        x = torch.randn(5, 6)
        assert loop.first_nonfinite_layer(flow, x, None) == "the prior or the gradient"
        with torch.no_grad():
            next(flow.bijection.layers[layer].parameters()).view(-1)[0] = float("inf")
        assert loop.first_nonfinite_layer(flow, x, None) == f"the weights of layer '{layer}'"

    def test_a_layer_with_a_nonfinite_output_is_named(self):
        flow = build(Recipe().override("model.width=4", "data.shape=[6]"))
        x = torch.randn(5, 6)
        x[2, 3] = float("nan")
        assert loop.first_nonfinite_layer(flow, x, None) == "the output of layer 'coupling1'"
