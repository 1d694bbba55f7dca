"""Bijections at a fixed context; that bijections of some components invert is in `test_bijections.py`."""

import torch
from torch import nn
from zoo import couplings, inputs, randomised

from nicest.flows import Affine, AffineSpline, AtContext, Chain, DiagonalScaling, Elementwise


def test_it_is_the_bijection_with_that_context_for_every_row():
    conditioned = Elementwise(AffineSpline(bins=4), 3, nn.Linear(2, 3 * AffineSpline(bins=4).size))
    layer = Chain(couplings(3, Affine(), 2, context_dim=2), randomised(conditioned), randomised(DiagonalScaling(3)))
    x, context = inputs("", 6, 3), inputs("", 1, 2)
    fixed, rows = AtContext(layer.double(), context), context.expand(6, -1)
    y, log_det = layer(x, rows)
    for found, expected in (
        (fixed(x), (y, log_det)),
        (fixed.inverse(y), layer.inverse(y, rows)),
        (fixed.ledger(x)[1].values(), layer.ledger(x, rows)[1].values()),
    ):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    assert list(fixed.ledger(x)[1]) == list(layer.ledger(x, rows)[1])
