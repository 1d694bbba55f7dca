"""A flow of one's own: bijection, law and network, trained, killed, resumed to the bit, scored and sampled."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import nicest
from nicest import flows
from small_runs import metrics, wait_for

SETTINGS = nicest.TrainSettings(epochs=60, batch=50, ema=0.9)


class Shear(flows.Bijection):
    """y_1 = x_1 + a x_0³, and the other components as they are."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x, context=None):
        return torch.cat((x[:, :1], x[:, 1:2] + self.a * x[:, :1] ** 3, x[:, 2:]), 1), x.new_zeros(len(x))

    def inverse(self, y, context=None):
        return torch.cat((y[:, :1], y[:, 1:2] - self.a * y[:, :1] ** 3, y[:, 2:]), 1)


@dataclass(frozen=True)
class Softer(flows.Law):
    """g(a; b) = a exp(b / (1 + |b|))."""

    def forward(self, a, b):
        return a * (b / (1 + b.abs())).exp(), (b / (1 + b.abs())).sum(-1)

    def inverse(self, y, b):
        return y * torch.exp(-b / (1 + b.abs()))


def own_flow():
    torch.manual_seed(0)
    networks = [torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)) for _ in range(3)]
    parts = [flows.odd_even(4), flows.odd_even(4).swap(), flows.odd_even(4)]
    couplings = [flows.Coupling(part, Softer(), m) for part, m in zip(parts, networks, strict=True)]
    return nicest.Flow(nicest.Units.continuous(4), nicest.Chain(Shear(), *couplings), nicest.Gaussian(4))


def train(path):
    rows = np.random.default_rng(0).gamma(2.0, size=(600, 4))
    sink = nicest.RunFolder(path) if path else None
    return nicest.fit(
        own_flow(), rows[100:], valid=rows[:100], settings=SETTINGS, sink=sink, callbacks=(), device="cpu"
    )


def test_it_is_killed_resumes_to_the_bit_and_is_scored_and_sampled(tmp_path):
    whole = train(tmp_path / "whole")
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; import test_own_flow; test_own_flow.train({str(tmp_path / 'cut')!r})"
    )
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True)
        before = len(metrics(tmp_path / "cut"))
        wait_for(lambda before=before: len(metrics(tmp_path / "cut")) > before + 3, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    cut = train(tmp_path / "cut")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert all(
        torch.equal(a, b) for a, b in zip(cut.flow.state_dict().values(), whole.flow.state_dict().values(), strict=True)
    )
    run = nicest.open(tmp_path / "cut", flow=own_flow())
    x = run.engine.sample(2000)
    lowered = nicest.lower(run.flow)
    torch.testing.assert_close(run.engine.log_prob(x), run.flow.log_prob(x))
    torch.testing.assert_close(lowered.log_prob(x), run.flow.log_prob(x))
    torch.testing.assert_close(x.mean(0), torch.full((4,), 2.0), atol=0.3, rtol=0)
    assert Path(tmp_path / "cut" / "recipe.toml").exists()
