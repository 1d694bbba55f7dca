"""Features of numbers for networks that read them."""

import math

import torch
from torch import Tensor
from zoo import randomised

from nicest.flows import Features
from nicest.flows.features import SIZE

ROWS = torch.tensor([[0.5, -1.0], [2.0, 0.0], [-3.0, 7.0]], dtype=torch.float64)


def features() -> Features:
    return randomised(Features(2), std=1.0).eval()


def by_hand(of: Features, row: Tensor) -> Tensor:
    """The features of one row, a number at a time."""
    found = []
    for i, z in enumerate(row):
        turns = 2 * math.pi * z * of.frequency[i]
        waves = torch.cat((turns.sin(), turns.cos()))
        found.append(torch.cat((z[None], (waves @ of.mixture[i]).relu())))
    return torch.cat(found)


def test_values_are_those_by_hand():
    of = features()
    assert of(ROWS).shape == (3, of.outputs) == (3, 2 * (1 + SIZE))
    torch.testing.assert_close(of(ROWS), torch.stack([by_hand(of, row) for row in ROWS]))
    assert of(ROWS[:0]).shape == (0, of.outputs)
    assert str(of) == "Features(2 numbers)"


def test_float32_agrees_and_stays():
    of = features()
    expected = of(ROWS)
    found = of.float()(ROWS.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_all_parameters_learn():
    of = features()
    of(ROWS).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in of.parameters())
