"""certify: what it measures on sound models, and that it catches models that are not."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import nicest
from nicest import Run
from nicest.data import load as load_data
from nicest.flows import Chain, DiagonalScaling, TriangularAffine
from nicest.recipes import load_recipe
from nicest.tasks.certify import certify, examples, log_det_error
from nicest.train.fit import train


def test_a_sound_model_inverts_and_counts_its_volume_to_rounding(any_run: Run, copy_of: Callable[[Run], Run]):
    result = certify(copy_of(any_run), n=40)
    dim = any_run.flow.dim
    assert result.dtype == ["float64", "float32"]
    assert result.max_roundtrip[0] < 1e-10
    assert result.max_logdet_error[0] < 1e-8 * dim
    assert result.max_roundtrip[1] < 1e-3
    assert result.max_logdet_error[1] < 1e-3 * dim
    double, single = result.max_roundtrip
    assert 0 < double < 1e-6 * single
    assert all(0 < mean < 0.5 * worst for mean, worst in zip(result.mean_roundtrip, (double, single), strict=True))


@pytest.fixture
def without_onednn() -> Iterator[None]:
    """Its bfloat16 kernels use instructions that some virtual machines announce and refuse."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
@pytest.mark.usefixtures("without_onednn")
def test_a_run_in_bfloat16_is_certified_in_it_too(tmp_path: Path):
    few = ("model.width=16", "model.hidden_layers=1", "train.epochs=1", "train.precision=bfloat16")
    train(load_recipe("digits"), tmp_path / "run", overrides=few, device="cpu")
    result = certify(nicest.open(tmp_path / "run"), n=20, jacobians=2)
    assert result.dtype == ["float64", "float32", "bfloat16"]
    assert [len(result.max_roundtrip), len(result.max_logdet_error)] == [3, 3]
    assert result.max_roundtrip[2] < 1e-5  # inside the coupling functions alone: the stream stays float32


@pytest.mark.parametrize("n", [2, 300])
def test_n_examples_are_used_whatever_the_test_set_has(digits_run: Run, copy_of: Callable[[Run], Run], n: int):
    result = certify(copy_of(digits_run), n=n, jacobians=1)
    assert result.n == n


def test_the_same_seed_gives_the_same_certificate(digits_run: Run, copy_of: Callable[[Run], Run]):
    run = copy_of(digits_run)
    first, again, other = (certify(run, n=20, jacobians=2, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.mean_roundtrip != other.mean_roundtrip


class TestExamples:
    def test_half_are_dequantised_rows_and_half_are_samples(self, digits_run: Run):
        flow = digits_run.flow_in(torch.float64)
        rows = torch.from_numpy(load_data("digits").test[:5])
        points, _ = examples(flow, rows, None, 12)
        assert points.shape == (12, 64)
        assert torch.equal((points[:5] * 17).floor(), rows.double())
        assert not torch.equal((points[5:10] * 17).floor(), rows.double())

    def test_of_continuous_data_are_the_rows_standardised(self, rows_run: Run, correlated: np.ndarray):
        train, rows = rows_run.splits.train.astype(np.float64), correlated[:4].astype(np.float64)
        points, _ = examples(rows_run.flow_in(torch.float64), torch.from_numpy(correlated[:4]), None, 8)
        assert points.shape == (8, 5)
        np.testing.assert_allclose(points[:4], (rows - train.mean(0)) / train.std(0), rtol=1e-9)


class TestBrokenModels:
    def test_a_log_det_that_is_wrong_at_some_points_only(
        self, rows_run: Run, copy_of: Callable[[Run], Run], monkeypatch: pytest.MonkeyPatch
    ):
        sound = DiagonalScaling.forward

        def forward(self: DiagonalScaling, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            y, log_det = sound(self, x)
            return y, log_det + 0.1 * (y[:, 0].detach() > 0)

        monkeypatch.setattr(DiagonalScaling, "forward", forward)
        result = certify(copy_of(rows_run), n=30, jacobians=16)
        assert result.max_logdet_error[0] == pytest.approx(0.1, abs=1e-8)
        assert result.max_roundtrip[0] < 1e-10

    def test_an_inverse_that_is_off_by_a_hundredth(
        self, digits_run: Run, copy_of: Callable[[Run], Run], monkeypatch: pytest.MonkeyPatch
    ):
        sound = DiagonalScaling.inverse

        def inverse(self: DiagonalScaling, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            x, log_det = sound(self, y)
            return x + 1e-2, log_det

        monkeypatch.setattr(DiagonalScaling, "inverse", inverse)
        result = certify(copy_of(digits_run), n=10)
        assert min(result.max_roundtrip) > 1e-2
        assert result.max_logdet_error[0] < 1e-8

    def test_a_nan_at_one_point_is_not_lost_among_the_others(
        self, digits_run: Run, copy_of: Callable[[Run], Run], monkeypatch: pytest.MonkeyPatch
    ):
        errors = iter([0.1, math.nan, 0.2] * 2)
        monkeypatch.setattr("nicest.tasks.certify.log_det_error", lambda flow, x: next(errors))
        result = certify(copy_of(digits_run), n=6, jacobians=3)
        assert all(math.isnan(error) for error in result.max_logdet_error)


class TestLogDetError:
    def test_is_the_difference_from_numpy_s_determinant(self, monkeypatch: pytest.MonkeyPatch):
        layer = TriangularAffine(4).double()
        layer.initialise(torch.randn(50, 4, dtype=torch.float64) * 7 + 3)
        true = np.linalg.slogdet(layer.lower.detach().numpy()).logabsdet
        monkeypatch.setattr(
            TriangularAffine, "forward", lambda self, x, context=None: (x @ self.lower.mT + self.b, x.new_zeros(len(x)))
        )
        error = log_det_error(Chain(layer), torch.randn(4, dtype=torch.float64))
        assert error == pytest.approx(abs(true), abs=1e-12)
        assert error > 1
