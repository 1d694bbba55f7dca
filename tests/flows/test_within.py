"""Bijections at a fixed context; that bijections of some components invert is in `test_bijections.py`."""

import pytest
import torch
from torch import nn
from zoo import couplings, inputs, randomised

from nicest.flows import Affine, AffineSpline, Chain, DiagonalScaling, Elementwise, at_context


def chain() -> Chain:
    """Couplings, and a law of a conditioner that reads nothing but the context."""
    conditioned = Elementwise(AffineSpline(bins=4), 3, nn.Linear(2, 3 * AffineSpline(bins=4).size))
    return Chain(couplings(3, Affine(), 2, context_dim=2), randomised(conditioned), randomised(DiagonalScaling(3)))


class TestAtContext:
    @pytest.mark.parametrize("contexts", [1, 3, 6])
    def test_is_the_bijection_with_each_context_for_consecutive_rows(self, contexts: int):
        layer, x, context = chain(), inputs("", 6, 3), inputs("", contexts, 2)
        fixed, rows = at_context(layer, context), context.repeat_interleave(6 // contexts, 0)
        y, log_det = layer(x, rows)
        for found, expected in (
            (fixed(x), (y, log_det)),
            (fixed.inverse(y), layer.inverse(y, rows)),
            (fixed.ledger(x)[1].values(), layer.ledger(x, rows)[1].values()),
        ):
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other)
        assert list(fixed.ledger(x)[1]) == list(layer.ledger(x, rows)[1])

    def test_conditioners_of_the_context_alone_are_evaluated_once(self):
        layer, calls = chain(), []
        layer[1].conditioner.register_forward_hook(lambda *_: calls.append(1))
        fixed = at_context(layer, inputs("", 2, 2))
        for _ in range(3):
            fixed.inverse(fixed(inputs("", 4, 3))[0])
        assert calls == [1]

    def test_a_number_of_rows_that_is_no_multiple_is_refused(self):
        with pytest.raises(ValueError, match="a multiple of 4 rows, one for each context, got 6"):
            at_context(chain(), inputs("", 4, 2))(inputs("", 6, 3))
