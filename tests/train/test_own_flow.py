"""A flow of one's own: bijection, law and network are trained, killed, resumed to the bit, scored and sampled."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import nicest
from nicest import flows

HERE = Path(__file__).parent
SETTINGS = nicest.TrainSettings(epochs=60, batch=50, ema=0.9)


class Shift(flows.Bijection):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.zeros(4))

    def forward(self, x, context=None):
        return x + self.by, x.new_zeros(len(x))

    def inverse(self, y, context=None):
        return y - self.by, y.new_zeros(len(y))


class Softer(flows.Law):
    def forward(self, a, b):
        return a * b[..., 0].tanh().exp(), b[..., 0].tanh()

    def inverse(self, y, b):
        return y * torch.exp(-b[..., 0].tanh()), -b[..., 0].tanh()


def train(path):
    torch.manual_seed(0)
    parts = [flows.halves(4), flows.halves(4).swap(), flows.halves(4)]
    made = [flows.Coupling(p, Softer(), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))) for p in parts]
    flow = nicest.Flow(nicest.Units.continuous(4), nicest.Chain(Shift(), *made), nicest.Gaussian(4))
    x, run = np.random.default_rng(0).gamma(2.0, size=(600, 4)), nicest.RunFolder(path)
    return nicest.fit(flow, x[100:], valid=x[:100], settings=SETTINGS, sink=run, callbacks=(), device="cpu").flow


def test_it_is_killed_resumes_to_the_bit_and_is_scored_and_sampled(tmp_path):
    with subprocess.Popen([sys.executable, "-c", f"import test_own_flow as t; t.train('{tmp_path}')"], cwd=HERE) as run:
        while len(nicest.RunFolder(tmp_path).metrics()) < 5:
            assert run.poll() is None
            time.sleep(0.01)
        run.kill()
    whole, cut = train(tmp_path / "whole"), train(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), cut.parameters(), strict=True))
    x = nicest.open(tmp_path, flow=cut).engine.sample(100)
    for fast in (nicest.Engine(cut), nicest.lower(cut)):
        torch.testing.assert_close(fast.log_prob(x), cut.log_prob(x))
