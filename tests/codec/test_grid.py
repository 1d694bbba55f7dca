"""Layers on a grid: near the layer itself, at the cost of its log-determinant, and exactly invertible."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from zoo import ZOO, inputs

import nicest
from nicest.codec import Grid, from_grid, to_grid
from nicest.codec.grid import BITS, split_first
from nicest.codec.stack import Stack
from nicest.flows import Bijection, Chain, DiagonalScaling, Flow, Gaussian, Logit, Mixing, Units

pytest.importorskip("constriction", reason="compression needs constriction: install nicest[codec]")
ROWS = 200
WITHOUT = {"zca": "ZCA", "chain-everything": "ZCA", "at-context": "AtContext"}  # layers that have no exact form


def random_stack() -> Stack:
    return Stack(np.random.default_rng(0).integers(0, 1 << 32, 20_000, dtype=np.uint32), fresh=True)


@pytest.mark.parametrize("name", sorted(ZOO.keys() - WITHOUT))
def test_layers_of_the_zoo(name: str):
    layer, stack = ZOO[name](6).double().eval().requires_grad_(False), random_stack()
    i = (inputs(name, ROWS, 6) * 2.0**BITS).floor().long()
    if name.startswith("logit"):
        i = i.clamp(1 << 7, (1 << BITS) - (1 << 7))  # the slope of a logit has no limit
    words, before = stack.words(fresh=True), stack.bits
    j = to_grid(layer, i, Grid(stack, ROWS, encoding=True))
    y, log_det = layer((i.double() + 0.5) * 2.0**-BITS)
    # a cell is 2^-12 wide, and its image as many times wider as the slope
    assert ((j.double() + 0.5) * 2.0**-BITS - y).abs().median() < 0.01
    assert (stack.bits - before) / ROWS == pytest.approx(-log_det.sum().item() / ROWS / math.log(2), abs=0.1)
    assert torch.equal(from_grid(layer, j, Grid(stack, ROWS, encoding=False)), i)
    assert np.array_equal(stack.words(fresh=True), words)


@pytest.mark.parametrize("name", WITHOUT)
def test_a_layer_without_an_exact_form_is_named(name: str):
    with pytest.raises(NotImplementedError, match=f"{WITHOUT[name]} has no exact form"):
        to_grid(ZOO[name](6), torch.zeros(2, 6, dtype=torch.long), Grid(random_stack(), 2, encoding=True))


class Reversed(Bijection):
    """A layer of the user's own."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x.flip(-1), x.new_zeros(len(x))

    inverse = forward


def test_a_layer_of_your_own_is_registered():
    flow = Flow(Units.pixels(4, 16), Chain(Reversed(), DiagonalScaling(4)), Gaussian(4)).double()
    rows = np.random.default_rng(0).integers(0, 16, (20, 4)).astype(np.uint8)
    with pytest.raises(nicest.NicestError, match="Reversed has no exact form on a grid"):
        nicest.compress(flow, rows)
    for function in (to_grid, from_grid):
        function.register(Reversed, lambda layer, i, grid, context=None: i.flip(-1))
    assert np.array_equal(nicest.decompress(flow, nicest.compress(flow, rows)), rows)


def test_split_first():
    logit, mixing, scaling = Logit(), Mixing(4), DiagonalScaling(4)
    for chain, first, rest in [
        (logit, logit, []),
        (mixing, None, [mixing]),
        (Chain(), None, []),
        (Chain(mixing, logit), None, [mixing, logit]),
        (Chain(Chain(logit, mixing), scaling), logit, [mixing, scaling]),
    ]:
        found, others = split_first(chain)
        assert found is first
        assert [each for each in others.modules() if not isinstance(each, Chain | nn.ModuleDict)] == rest


def test_a_cell_is_found_where_the_inverse_is_far_off():
    grid = Grid(random_stack(), 3, encoding=True)
    i = torch.tensor([[-700, 3], [0, 12345], [5, -6]])
    j = grid.bend(i, lambda a: 0.01 * a)
    assert torch.equal(grid.unbend(j, lambda a: 0.01 * a, lambda y: 100 * y + 1.7), i)
