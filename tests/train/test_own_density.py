"""A density that is not a flow, with missing cells and an objective of its own: trained, killed, resumed, reloaded."""

import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nicest
from nicest.flows import Density

HERE = Path(__file__).parent
SETTINGS = nicest.TrainSettings(epochs=60, batch=50, lr=3e-2, ema=0.9)
MEAN = np.array([1.0, -2.0, 5.0])


class Normals(Density):
    """Independent normals; missing cells, NaN, are ignored, and training sees a random half of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.dim = 3
        self.loc, self.log_scale = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def cells(self, x: Tensor) -> Tensor:
        e = (x.nan_to_num() - self.loc) * torch.exp(-self.log_scale)
        nats = -0.5 * e.square() - self.log_scale - 0.5 * math.log(2 * math.pi)
        return torch.where(x.isnan(), 0.0, nats)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return 2 * (self.cells(x) * (torch.rand(x.shape, device=x.device) < 0.5)).sum(-1)

    def log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.cells(x).sum(-1)

    def sample(self, n: int, context: Tensor | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        e = torch.randn(n, 3, generator=generator, device=self.device, dtype=self.dtype)
        return (self.loc + self.log_scale.exp() * e).detach()

    @torch.no_grad()
    def initialise(self, rows: Tensor, context: Tensor | None = None) -> None:
        self.seen.fill_(len(rows))


class Offset(Normals):
    """Validated by another number than log p."""

    def validation_log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.log_prob(x) + 100


def rows(n: int = 600) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = MEAN + rng.normal(size=(n, 3)) * [1, 2, 0.5]
    return np.where(rng.random(x.shape) < 0.2, np.nan, x)


def train(path: str | Path, density: Density | None = None) -> Density:
    torch.manual_seed(0)
    x = rows()
    how = {"settings": SETTINGS, "sink": path, "callbacks": (), "device": "cpu"}
    return nicest.fit(density or Normals(), x[100:], valid=x[:100], **how).flow


def test_it_is_killed_resumes_to_the_bit_and_is_reloaded(tmp_path: Path):
    code = f"import test_own_density as t; t.train('{tmp_path}')"
    with subprocess.Popen([sys.executable, "-c", code], cwd=HERE) as run:
        while len(nicest.RunFolder(tmp_path).metrics()) < 5:
            assert run.poll() is None
            time.sleep(0.01)
        run.kill()
    whole, cut = train(tmp_path / "whole"), train(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), cut.parameters(), strict=True))
    steps = [nicest.RunFolder(path).metrics()[-1]["step"] for path in (tmp_path, tmp_path / "whole")]
    assert steps[0] == steps[1]
    opened = nicest.open(tmp_path, flow=Normals())
    x = torch.from_numpy(rows()).float()
    assert torch.equal(opened.flow.log_prob(x), cut.log_prob(x))
    assert opened.draws() == 1
    torch.testing.assert_close(opened.nats(x), cut.log_prob(x).double().detach())


def test_it_learns_by_its_objective_and_keeps_its_dtype():
    density = nicest.fit(Normals().double(), rows(), settings=SETTINGS, callbacks=(), device="cpu").flow
    assert density.dtype == torch.float64
    np.testing.assert_allclose(density.loc.detach(), MEAN, atol=0.25)
    assert int(density.seen) == 600


def test_validation_is_by_its_own_score(tmp_path: Path):
    found = nicest.fit(Offset(), rows(), settings=SETTINGS, callbacks=(), device="cpu")
    x = torch.from_numpy(rows()).float()
    assert found.figures["valid_nats"] == pytest.approx(found.flow.log_prob(x).mean().item() + 100, abs=1e-3)


def test_an_engine_scores_and_samples_it():
    engine = nicest.Engine(Normals(), batch=100)
    x = torch.from_numpy(rows(250)).float()
    torch.testing.assert_close(engine.log_prob(x), engine.flow.log_prob(x).detach())
    assert engine.sample(250, generator=torch.Generator().manual_seed(0)).shape == (250, 3)
    assert engine.sample(0).shape == (0, 3)
    assert nicest.lower(engine.flow) is engine.flow


def test_it_is_saved_with_the_function_that_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(HERE)
    density = Normals()
    nn.init.normal_(density.loc)
    nicest.save(density, tmp_path / "own.safetensors", factory="test_own_density:Normals")
    loaded = nicest.load(tmp_path / "own.safetensors", trust="test_own_density:Normals")
    assert torch.equal(loaded.loc, density.loc)


def test_what_cannot_be_trained_is_refused(refusal: Callable[..., str]):
    assert "expected rows of 3 numbers, as the model has, got 2" in refusal(nicest.fit, Normals(), rows()[:, :2])
    assert "got inf" in refusal(nicest.fit, Normals(), np.where(np.isnan(rows()), np.inf, rows()))
    assert "expected a nicest.flows.Density to train, such as a Flow, got 'Linear'" in refusal(
        nicest.fit, nn.Linear(3, 3), rows()
    )


def test_weights_that_are_not_finite_are_named(refusal: Callable[..., str]):
    class Diverging(Normals):
        def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
            return self.log_prob(x) + self.loc.sum() * math.nan

    said = refusal(nicest.fit, Diverging(), rows(), settings=SETTINGS, callbacks=(), device="cpu")
    assert "non-finite loss at step" in said
