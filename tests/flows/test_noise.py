"""Rows meet the same random numbers however a batch is divided."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from nicest.fast.networks import FastMLP
from nicest.flows import MLP, Units
from nicest.flows.noise import batch_size, dropout, select
from nicest.inference.engine import Share
from nicest.recipes.recipe import AugmentSettings
from nicest.train.augment import Warp

ROWS = torch.randint(17, (7, 64), generator=torch.Generator().manual_seed(0))
NETWORK = MLP(64, 64, (16, 16), dropout=0.3)
WARP = Warp((8, 8), 17, AugmentSettings(share=0.3, rotation=0.3, elastic=0.5))
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "noise": Units.pixels(64, 17).enter,
    "dropout": lambda rows: NETWORK(rows.float()),
    "dropout in place": lambda rows: FastMLP(NETWORK, torch.float32).read(rows.float(), None)[1],
    "warps": WARP,
}


@pytest.mark.parametrize("size", [2, 3, 7, 9])  # 9: some have no rows
@pytest.mark.parametrize("draw", DRAWS)
def test_each_share_meets_what_its_rows_meet_in_the_whole(draw: str, size: int):
    torch.manual_seed(1)
    expected, after = DRAWS[draw](ROWS), torch.get_rng_state()
    for rank in range(size):
        share = Share(rank, size)
        torch.manual_seed(1)
        with share.of(len(ROWS)):
            found = DRAWS[draw](share.rows(ROWS))
        torch.testing.assert_close(found, share.rows(expected))
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("draw", [each for each in DRAWS if each != "warps"])
def test_copies_of_a_share_meet_the_same(draw: str, size: int):
    torch.manual_seed(1)
    expected, after = DRAWS[draw](ROWS), torch.get_rng_state()
    for rank in range(size):
        share = Share(rank, size)
        torch.manual_seed(1)
        with share.of(len(ROWS), copies=2):
            found = DRAWS[draw](share.rows(ROWS).repeat(2, 1))
        torch.testing.assert_close(found, share.rows(expected).repeat(2, 1))
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.999])
def test_dropout_on_a_cpu_drops_its_share_independently(p: float):
    """Four numbers share 64 random bits: none says anything about the others."""
    n = 400_000
    found = dropout(torch.ones(n // 8, 8).double(), p)
    kept = found > 0
    rounded = round(p * 2**16) / 2**16
    torch.testing.assert_close(found[kept], torch.full_like(found[kept], 1 / (1 - rounded)))
    deviation = (p * (1 - p) / (n / 8)) ** 0.5
    torch.testing.assert_close(
        kept.double().mean(0), torch.full((8,), 1 - p).double(), rtol=0, atol=4 * deviation + 2**-16
    )
    assert (kept.double().T.corrcoef() - torch.eye(8).double()).abs().max() < 5 / (n / 8) ** 0.5


@pytest.mark.parametrize("p", [0.9999, 0.999999])
def test_dropout_of_nearly_all_keeps_the_mean(p: float):
    """Of a million numbers some stay, each times what makes up for the others."""
    found = dropout(torch.ones(20_000_000), p)
    least = 2**-16  # of the numbers are kept
    assert found.mean() == pytest.approx(1, abs=5 / (20_000_000 * max(1 - p, least)) ** 0.5)


@pytest.mark.parametrize(("p", "kept"), [(0.0, 1.0), (1.0, 0.0)])
def test_dropout_of_nothing_and_of_all(p: float, kept: float):
    before = torch.get_rng_state()
    assert (dropout(torch.ones(1000, 3), p) == kept).all()
    assert p or torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shares_make_up_the_batch(size: int):
    rows = torch.arange(10)
    parts = [Share(rank, size).rows(rows) for rank in range(size)]
    assert sorted(torch.cat(parts).tolist()) == rows.tolist()


def test_a_share_is_held_inside_alone():
    with Share(1, 2).of(10):
        assert batch_size(5) == 10
        assert select(torch.arange(10)).tolist() == [1, 3, 5, 7, 9]
    assert batch_size(5) == 5
    with Share().of(10):  # all of it
        assert select(torch.arange(3)).tolist() == [0, 1, 2]


def test_contexts_may_end_in_any_order_and_threads_do_not_see_each_other():
    first, second = Share(0, 2).of(10), Share(1, 2).of(20)
    first.__enter__()
    second.__enter__()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(batch_size, 5).result() == 5
    first.__exit__(None, None, None)
    assert batch_size(5) == 20
    second.__exit__(None, None, None)
    assert batch_size(5) == 5
