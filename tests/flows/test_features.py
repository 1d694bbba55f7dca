"""Columns of a table as coupling functions read them: numbers, categories, missing cells."""

import math

import pytest
import torch
from torch import Tensor
from zoo import randomised

from nicest.flows import MLP, FeatureNetwork, Features, ResidualMLP, Standardiser
from nicest.flows.features import HIDDEN_CELLS, HIDDEN_ROWS, SIZE

COLUMNS = [0, 3, 0, 2]  # two numbers and two categories, in turn
ROWS = torch.tensor([[0.5, 0, -1.0, 1], [2.0, 2, 0.0, 0], [-3.0, 1, 7.0, 1]], dtype=torch.float64)


def features(categories: list[int] = COLUMNS, may_miss: tuple[bool, ...] = ()) -> Features:
    return randomised(Features(categories, may_miss), std=1.0).eval()


def by_hand(of: Features, row: Tensor, categories: list[int] = COLUMNS) -> Tensor:
    """The features of one row, a cell at a time."""
    numbers, vectors, first = [], [], 0
    for cell, count in zip(row, categories, strict=True):
        if count:
            vectors.append(of.vectors[first + (count if math.isnan(cell) else int(cell))])
            first += count + 1
            continue
        i = len(numbers)
        turns = 2 * math.pi * cell * of.frequency[i]
        waves = torch.cat((turns.sin(), turns.cos()))
        read = torch.cat((cell[None], (waves @ of.mixture[i]).relu()))
        numbers.append(of.missing[i] if math.isnan(cell) else read)
    return torch.cat(numbers + vectors)


class TestValues:
    @pytest.mark.parametrize("categories", [COLUMNS, [0, 0, 0, 0], [4, 3, 8, 2]], ids=["both", "numbers", "categories"])
    def test_are_those_by_hand(self, categories: list[int]):
        of, rows = features(categories), ROWS.abs()
        rows = torch.cat((rows, torch.where(torch.rand(20, 1, 4) < 0.4, math.nan, rows).flatten(0, 1)))
        found = of(rows)
        assert found.shape == (len(rows), of.outputs)
        torch.testing.assert_close(found, torch.stack([by_hand(of, row, categories) for row in rows]))

    def test_there_is_a_number_more_for_a_number(self):
        assert features().outputs == 2 * (1 + SIZE) + 2 * SIZE
        assert str(features()) == "Features(2 numbers, 2 categories)"

    def test_a_missing_cell_is_nothing_but_missing(self):
        of, one = features(), ROWS.clone()
        one[:, 0] = math.nan
        found = of(one)[:, : 1 + SIZE]
        assert torch.equal(found, of.missing[0].expand(3, -1))

    @pytest.mark.parametrize(("code", "like"), [(7.0, 2.0), (3.0, 2.0), (-1.0, 0.0)])
    def test_a_code_out_of_range_is_the_nearest_and_never_the_missing_one(self, code: float, like: float):
        rows = ROWS[:1].repeat(2, 1)
        rows[:, 1] = torch.tensor([code, like])
        one, other = features()(rows)
        assert torch.equal(one, other)

    def test_no_rows(self):
        assert features()(ROWS[:0]).shape == (0, features().outputs)

    def test_float32_agrees_and_stays(self):
        of = features()
        expected = of(ROWS)
        found = of.float()(ROWS.float())
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)

    def test_all_parameters_learn_and_nan_does_not_spread(self):
        of, rows = features(), ROWS.clone()
        rows[0, 0] = rows[1, 1] = rows[2, 2] = math.nan
        rows.requires_grad_()
        of(rows).square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in of.parameters())
        assert rows.grad.isfinite().all()
        assert rows.grad[0, 0] == 0


class TestHidden:
    def test_evaluation_hides_nothing(self):
        of = features()
        assert torch.equal(of(ROWS), of(ROWS))
        state = torch.get_rng_state()
        of(ROWS)
        assert torch.equal(torch.get_rng_state(), state)

    def test_training_hides_a_share_of_the_cells_of_a_share_of_the_rows(self):
        of, rows = features([0, 0, 0]).train(), torch.ones(40_000, 3, dtype=torch.float64)
        hidden = (of(rows).unflatten(1, (3, 1 + SIZE)) == of.missing).all(-1)
        touched = hidden.any(1).double().mean()
        expected = HIDDEN_ROWS * (1 - (1 - HIDDEN_CELLS) ** 3)
        assert float(touched) == pytest.approx(expected, rel=0.1)
        assert float(hidden.double().mean()) == pytest.approx(HIDDEN_ROWS * HIDDEN_CELLS, rel=0.1)

    def test_columns_that_may_not_miss_are_never_hidden(self):
        of, rows = features([0, 0], (True, False)).train(), torch.ones(4000, 2, dtype=torch.float64)
        hidden = (of(rows).unflatten(1, (2, 1 + SIZE)) == of.missing).all(-1).any(0)
        assert hidden.tolist() == [True, False]

    def test_the_seed_decides(self):
        of, rows, found = features().train(), ROWS.repeat(50, 1), []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(of(rows))
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])


class TestNetwork:
    @pytest.mark.parametrize("kind", [MLP, ResidualMLP])
    def test_is_the_network_of_the_features(self, kind: type):
        m = randomised(FeatureNetwork(Features(COLUMNS), lambda inputs: kind(inputs, 5))).eval()
        assert torch.equal(m(ROWS), m.network(m.features(ROWS)))

    def test_reads_the_context_before_x1(self):
        m = randomised(FeatureNetwork(Features(COLUMNS), lambda inputs: MLP(inputs, 5, (4,)))).eval()
        assert torch.equal(m(ROWS[:, 2:], ROWS[:, :2].float()), m.network(m.features(ROWS)))


class TestStandardiser:
    def test_numbers_have_mean_0_and_variance_1_and_categories_stay(self):
        c = torch.tensor([[1.0, 2.0], [math.nan, 0.0], [5.0, 1.0]], dtype=torch.float64)
        embedding = Standardiser([0, 3]).double()
        embedding.fit(c)
        expected = torch.tensor([[-1.0, 2.0], [math.nan, 0.0], [1.0, 1.0]], dtype=torch.float64)
        torch.testing.assert_close(embedding(c), expected, equal_nan=True)

    def test_a_constant_column_is_centred_only(self):
        embedding = Standardiser([0])
        embedding.fit(torch.full((4, 1), 7.0))
        assert embedding(torch.tensor([[7.0], [9.0]])).tolist() == [[0.0], [2.0]]

    def test_rescaled_it_takes_numbers_in_another_unit(self):
        c, unit = torch.randn(20, 2), torch.tensor([60.0, 1.0])
        one, other = Standardiser([0, 0]), Standardiser([0, 0])
        one.fit(c)
        other.fit(c)
        other.rescale(unit)
        torch.testing.assert_close(other(c * unit), one(c))
