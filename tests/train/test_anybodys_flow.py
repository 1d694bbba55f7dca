"""Flows that others build, each through `fit`, a run folder, `open` and the engine: what is claimed is what is kept."""

import math
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nicest
from nicest import flows
from nicest.train.callbacks import Callback

RNG = np.random.default_rng(0)
ROWS = RNG.gamma(2.0, size=(400, 4)) + RNG.normal(size=(400, 1))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS = nicest.TrainSettings(epochs=6, batch=50, lr=1e-2, ema=0.5)


def network(inputs: int = 2, outputs: int = 4) -> flows.MLP:
    return flows.MLP(inputs, outputs, (16,))


def couplings(*networks: nn.Module, law: flows.Law = flows.Affine()) -> list[flows.Coupling]:  # noqa: B008
    parts = [flows.odd_even(4), flows.odd_even(4).swap()] * len(networks)
    return [flows.Coupling(part, law, m) for part, m in zip(parts, networks, strict=False)]


def flow(*layers: flows.Bijection, kind: type[nicest.Flow] = nicest.Flow, units: nicest.Units | None = None) -> Any:
    return kind(units or nicest.Units.continuous(4), nicest.Chain(*layers), nicest.Gaussian(4))


class Permutation(flows.Bijection):
    """With an index among its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x[:, self.order], x.new_zeros(len(x))

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return y[:, self.order.argsort()], y.new_zeros(len(y))


class Norm(flows.Bijection):
    """With running statistics, which training moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean + 3, x.new_zeros(len(x))

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return y + self.mean - 3, y.new_zeros(len(y))


class Twice(nicest.Flow):
    """A flow with its own objective, the mean of two."""

    calls = 0

    def forward(self, x: Tensor, context: Tensor | None = None, **options: Any) -> Tensor:
        Twice.calls += torch.is_grad_enabled()
        return (super().forward(x, context, **options) + super().forward(x, context, **options)) / 2


class Halved(nicest.Units):
    """Units of one's own: half of what is stored."""

    def enter(self, x: Tensor, *, noise: bool = True, generator: torch.Generator | None = None) -> Tensor:
        return super().enter(x / 2, noise=noise, generator=generator)

    def leave(self, y: Tensor) -> Tensor:
        return super().leave(y) * 2

    def terms(self) -> dict[str, Any]:
        return super().terms() | {"half": -4 * math.log(2)}


def tied() -> nicest.Flow:
    one = network()
    return flow(*couplings(one, one, one))


def frozen() -> nicest.Flow:
    layers = couplings(network(), network(), network())
    layers[1].requires_grad_(False)
    return flow(*layers)


FLOWS: dict[str, Callable[[], nicest.Flow]] = {
    "tied networks": tied,
    "one layer twice": lambda: (lambda c: flow(c[0], c[1], c[0]))(couplings(network(), network())),
    "an index among the buffers": lambda: flow(*couplings(network(), network(), network()), Permutation()),
    "running statistics": lambda: flow(Norm(), *couplings(network(), network(), network())),
    "frozen layers": frozen,
    "its own objective": lambda: flow(*couplings(network(), network(), network()), kind=Twice),
    "units of its own": lambda: flow(*couplings(network(), network(), network()), units=Halved([0.0] * 4)),
    "chains in chains": lambda: flow(nicest.Chain(flows.ZCA(4), nicest.Chain(*couplings(*(network(),) * 3)))),
    "a single layer": lambda: nicest.Flow(nicest.Units.continuous(4), flows.DiagonalScaling(4), nicest.Gaussian(4)),
}


def fitted(made: nicest.Flow, **options: Any) -> Any:
    asked = {"valid": ROWS[:100], "settings": SETTINGS, "callbacks": (), "device": DEVICE} | options
    return nicest.fit(made, asked.pop("rows", ROWS[100:]), **asked)


@torch.no_grad()
def mean_nats(made: nicest.Flow) -> float:
    return float(made.eval().log_prob(torch.from_numpy(ROWS[:100]).to(made.units.scale)).mean())


@pytest.mark.parametrize("name", FLOWS)
def test_what_is_claimed_is_what_is_kept_and_a_folder_gives_it_back(tmp_path: Path, name: str):
    torch.manual_seed(0)
    made = FLOWS[name]()
    before = [p.clone() for p in made.parameters() if p.requires_grad]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fitted(made, sink=tmp_path / "run")
        assert found.flow is made
        assert found.figures["valid_nats"] == pytest.approx(mean_nats(made), abs=1e-4)
        assert found.figures["epoch"] > 0
        after = [p.cpu() for p in made.parameters() if p.requires_grad]
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        engine = nicest.open(tmp_path / "run", flow=FLOWS[name]()).engine
        nats = engine.log_prob(torch.from_numpy(ROWS[:100]).float()).mean()
        assert float(nats) == pytest.approx(found.figures["valid_nats"], abs=1e-4)
        again = fitted(FLOWS[name](), sink=tmp_path / "run")
        assert again.figures == found.figures  # it was finished


def test_a_start_that_is_lost_is_written_again(tmp_path: Path):
    """The first state counts on the flow as it was given, which no later epoch need be better than."""
    settings = replace(SETTINGS, epochs=1, lr=1e-12)
    found = fitted(FLOWS["frozen layers"](), settings=settings, sink=tmp_path / "run", device="cpu")
    assert found.figures["epoch"] == 0
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match="the best model, of epoch 0, is gone"):
        again = fitted(FLOWS["frozen layers"](), settings=settings, sink=tmp_path / "run", device="cpu")
    assert again.figures["valid_nats"] == pytest.approx(found.figures["valid_nats"])


@pytest.mark.skipif(DEVICE == "cuda", reason="a captured step calls it once")
def test_training_maximises_the_objective_of_a_subclass():
    Twice.calls = 0
    fitted(FLOWS["its own objective"]())
    assert Twice.calls == 6 * 6  # steps


@pytest.mark.skipif(DEVICE == "cuda", reason="a graph keeps the memory that it was captured with")
def test_an_engine_that_was_made_before_sees_what_training_did():
    made = FLOWS["a single layer"]()
    engine = nicest.Engine(made)
    fitted(made)
    x = torch.from_numpy(ROWS[:50]).float()
    torch.testing.assert_close(engine.log_prob(x), made.log_prob(x).detach())


def test_a_flow_is_never_handed_back_worse_than_it_was():
    made = fitted(FLOWS["frozen layers"]()).flow
    before = mean_nats(made)
    wild = nicest.TrainSettings(epochs=1, batch=50, lr=3.0)
    found = fitted(made, settings=wild, initialise=False)
    assert found.figures["valid_nats"] == pytest.approx(before, abs=1e-4)
    assert mean_nats(made) == pytest.approx(before, abs=1e-4)


def test_what_is_fitted_in_closed_form_needs_no_training():
    whitening = flows.TriangularAffine(4).requires_grad_(False)
    found = fitted(nicest.Flow(nicest.Units.continuous(4), whitening, nicest.Gaussian(4)))
    covariance = np.cov(ROWS[100:].T, bias=True)
    away = ROWS[:100] - ROWS[100:].mean(0)
    gaussian = -0.5 * (np.einsum("ni,ij,nj->n", away, np.linalg.inv(covariance), away))
    expected = gaussian.mean() - 0.5 * np.linalg.slogdet(2 * np.pi * covariance)[1]
    assert found.figures["valid_nats"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_after_ctrl_c_the_flow_has_its_dtype_and_the_best_weights_so_far(dtype: torch.dtype):
    seen: list[float] = []

    class Stop(Callback):
        def validated(self, row: Any) -> None:
            seen.append(row["valid_nats"])
            if row["epoch"] == 3:
                signal.raise_signal(signal.SIGINT)

    made = FLOWS["frozen layers"]().to(dtype)
    with pytest.raises(KeyboardInterrupt):
        fitted(made, callbacks=[Stop()])
    assert made.units.scale.dtype == dtype
    assert mean_nats(made) == pytest.approx(max(seen), abs=1e-4)
    assert len(seen) == 3


@pytest.mark.parametrize("in_folder", [False, True])
def test_only_a_run_folder_handles_signals_and_gives_them_back_after_an_error(tmp_path: Path, in_folder: bool):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    during: list[Any] = []

    class Fail(Callback):
        def validated(self, row: Any) -> None:
            during.extend(signal.getsignal(number) for number in numbers)
            raise RuntimeError

    try:
        with pytest.raises(RuntimeError):
            fitted(FLOWS["frozen layers"](), callbacks=[Fail()], sink=tmp_path if in_folder else None)
        assert [each == signal.default_int_handler for each in during] == [not in_folder] * 4
        assert [signal.getsignal(number) for number in numbers] == [signal.default_int_handler] * 4
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class TestRefused:
    """One line each, before anything is trained."""

    @pytest.mark.parametrize(
        ("rows", "words"),
        [
            (ROWS[:, :3], "expected rows of 4 numbers, as the model has, got 3"),
            (np.where(np.arange(4) == 2, 5.0, ROWS), "1 of 4 columns are constant"),
            (np.where(np.arange(4) == 2, np.inf, ROWS), "expected finite numbers in the training rows"),
            (ROWS + 1e6, "float32 has too few digits"),
            (ROWS[:0], "expected at least 1 row"),
            (np.where(np.arange(4) == 2, np.nan, ROWS), "NICETable for rows with missing cells"),
        ],
        ids=["width", "constant", "inf", "far", "none", "empty"],
    )
    def test_rows(self, rows: np.ndarray, words: str, refusal: Callable[..., str]):
        valid = None if rows.shape[1] == 3 else ROWS[:100]
        assert words in refusal(fitted, FLOWS["frozen layers"](), rows=rows, valid=valid)

    def test_a_loader_of_batches(self, refusal: Callable[..., str]):
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.as_tensor(ROWS)), batch_size=50)
        said = refusal(fitted, FLOWS["frozen layers"](), rows=loader, valid=None)
        assert "expected rows (N, ...) as one array or tensor, got 'DataLoader'" in said
        fitted(FLOWS["frozen layers"](), rows=torch.cat([x for x, *_ in loader]), valid=None)  # as the message advises

    def test_a_run_that_is_opened_without_its_flow(self, tmp_path: Path, refusal: Callable[..., str]):
        fitted(FLOWS["frozen layers"](), sink=tmp_path)
        said = refusal(nicest.open, tmp_path)
        assert f"{tmp_path} holds a density built by hand: build it again, then nicest.open(path, flow=it)" in said

    def test_validation_rows_with_nan(self, refusal: Callable[..., str]):
        valid = np.where(np.arange(4) == 1, np.nan, ROWS[:100])
        assert "expected numbers in the validation rows, got NaN" in refusal(
            fitted, FLOWS["tied networks"](), valid=valid
        )

    @pytest.mark.parametrize("rows", [np.random.default_rng(0).random((50, 4)), np.full((50, 4), 16)])
    def test_pixels_that_are_no_levels(self, rows: np.ndarray, refusal: Callable[..., str]):
        made = flow(*couplings(network(), network(), network()), units=nicest.Units.pixels(4, 16))
        assert "expected whole levels 0 to 15" in refusal(fitted, made, rows=rows, valid=None)

    def test_columns_that_are_no_steps(self, refusal: Callable[..., str]):
        made = flow(*couplings(network(), network(), network()), units=nicest.Units.columns([0.0, 1.0, 0.0, 0.0]))
        assert "expected multiples of 1 in column 1" in refusal(fitted, made)

    def test_another_flow_in_the_same_folder(self, tmp_path: Path, refusal: Callable[..., str]):
        fitted(FLOWS["frozen layers"](), sink=tmp_path / "run")
        free = flow(*couplings(network(), network(), network()))
        assert "holds a run of another flow" in refusal(fitted, free, sink=tmp_path / "run")

    def test_a_model_that_is_there_is_not_written_over(self, tmp_path: Path, refusal: Callable[..., str]):
        nicest.NICE(law="additive", epochs=1, random_state=0).fit(ROWS).save(tmp_path / "run")
        before = (tmp_path / "run" / "model.safetensors").read_bytes()
        assert "holds a run already" in refusal(fitted, FLOWS["frozen layers"](), sink=tmp_path / "run")
        assert (tmp_path / "run" / "model.safetensors").read_bytes() == before

    def test_a_file_as_a_folder(self, tmp_path: Path, refusal: Callable[..., str]):
        line = refusal(fitted, FLOWS["frozen layers"](), sink=tmp_path / "mine.safetensors")
        assert "expected a folder to train in" in line


def test_numbers_of_numpy_are_settings_too(tmp_path: Path):
    settings = nicest.TrainSettings(epochs=np.int64(2), batch=50, lr=np.float64(1e-2), seed=np.int64(3))  # type: ignore[arg-type]
    fitted(FLOWS["frozen layers"](), settings=settings, sink=tmp_path / "run")
    assert nicest.open(tmp_path / "run", flow=FLOWS["frozen layers"]()).recipe.train.epochs == 2


def test_rows_of_images_train():
    images = np.random.default_rng(0).integers(0, 16, (200, 2, 2), dtype=np.uint8)
    made = flow(*couplings(network(), network(), network()), units=nicest.Units.pixels(4, 16))
    assert fitted(made, rows=images, valid=images[:50]).figures["valid_nats"] < 0
