"""How the weights of a flow lie side by side for one kernel, padded; what is computed with them stays the same."""

from pathlib import Path

import pytest
import torch

from nicest.data import load
from nicest.fast import LoweredChain, lower
from nicest.fast.lower import FastMLP
from nicest.fast.rectified import rectified
from nicest.flows import MLP, Flow
from nicest.recipes import load_recipe
from nicest.runs.folder import RunFolder
from nicest.runs.runtime import rows_to
from nicest.train.fit import start
from nicest.train.fused import FusedUpdate, side_by_side
from nicest.train.state import State
from small_runs import SMALL, equal, last

DIGITS = load("digits")
OVERRIDES = (*SMALL, "train.precision=bfloat16", "model.dropout=0", "model.hidden_layers=3", "model.width=13")


pytestmark = pytest.mark.usefixtures("_without_onednn")


def state(*overrides: str) -> State:
    return start(load_recipe("digits").override(*OVERRIDES, *overrides), DIGITS, torch.device("cpu"))


def lowered(state: State) -> tuple[Flow, LoweredChain]:
    fast = lower(state.flow, state.precision)
    assert isinstance(fast.bijection, LoweredChain)
    return fast, fast.bijection


def loss(flow: Flow) -> torch.Tensor:
    torch.manual_seed(5)
    return -flow(rows_to(DIGITS.train[:50])).mean()


def test_hidden_widths_are_padded_and_the_ends_are_not():
    cases = {
        (392, 391, (1000, 1000)): [(1024, 392), (1024, 1024), (391, 1024)],
        (3, 5, (13,)): [(16, 3), (5, 16)],
        (3, 5, ()): [(5, 3)],
    }
    for made, shapes in cases.items():
        assert FastMLP(MLP(*made), torch.bfloat16).shapes == shapes


def test_padded_copies_are_the_same_network():
    network, x = MLP(5, 3, (13, 13)).double(), torch.randn(7, 5, dtype=torch.float64)
    fast = FastMLP(network, torch.float64)
    fast.copy_weights()
    _, b = rectified(x, *fast.weights(), torch.float64, buffers=fast.buffers)
    torch.testing.assert_close(b, network(x), rtol=0, atol=1e-12)


def test_tensors_move_into_one_block_and_keep_their_values():
    tensors = [torch.randn(2, 3), torch.randn(4), torch.randn(())]
    values = [tensor.clone() for tensor in tensors]
    block = side_by_side(tensors, [(4, 4), (6,), (1,)])
    assert block.shape == (23,)
    for tensor, value in zip(tensors, values, strict=True):
        assert torch.equal(tensor, value)
        assert tensor.untyped_storage().data_ptr() == block.untyped_storage().data_ptr()
    assert block.count_nonzero() == 11
    block.zero_()
    assert not any(tensor.any() for tensor in tensors)


@pytest.mark.parametrize(
    "case", [(), ("train.optimizer=rmsprop", "train.weight_decay=0"), ("model.learned_prior=true",)]
)
def test_gradients_land_where_the_update_finds_them(case: tuple[str, ...]):
    plain, fused = state(*case), state(*case)
    expected = loss(lowered(plain)[0])
    expected.backward()
    fast, chain = lowered(fused)
    update = FusedUpdate(fused, chain)
    for _ in range(2):  # the second pass overwrites
        update.zero_grad()
        found = loss(fast)
        found.backward()
    torch.testing.assert_close(found, expected)
    places = [(block.weights.untyped_storage().data_ptr(), block) for block in update.blocks]
    total = 0
    for p, q in zip(plain.flow.parameters(), fused.flow.parameters(), strict=True):
        assert torch.equal(p, q)
        block = next(block for pointer, block in places if pointer == q.untyped_storage().data_ptr())
        gradient = block.gradient.as_strided(q.shape, q.stride(), q.storage_offset())
        torch.testing.assert_close(gradient.float(), p.grad, rtol=1e-2, atol=1e-4)
        copy = block.copy.as_strided(q.shape, q.stride(), q.storage_offset())
        assert torch.equal(copy, q.bfloat16())
        total += int(gradient.count_nonzero())
    assert sum(int(block.gradient.count_nonzero()) for block in update.blocks) == total  # what is padded gets none


def test_moments_and_averages_move_along_and_are_saved_as_they_were(tmp_path: Path):
    made = state()
    for _ in range(3):
        made.optimizer.zero_grad()
        loss(made.flow).backward()
        made.optimizer.step()
    with torch.no_grad():
        for p in made.average.parameters():
            p.add_(1.0)
    before, after = RunFolder(tmp_path / "before"), RunFolder(tmp_path / "after")
    for each in (before, after):
        each.path.mkdir()
    made.save(before)
    FusedUpdate(made, lowered(made)[1])
    assert len({id(values["step"]) for values in made.optimizer.state.values()}) == 1
    for values in made.optimizer.state.values():
        values["step"] = values["step"].clone()  # as leaving a GPU does
    made.save(after)
    tensors = last(after.path)
    assert equal(last(before.path), tensors)
    assert any(name.endswith("exp_avg_sq") and tensor.any() for name, tensor in tensors.items())
