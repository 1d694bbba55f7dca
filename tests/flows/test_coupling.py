"""Partitions, laws, the coupling layer, and how many of them connect all dimensions (NICE §3.2)."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from zoo import LAWS, PARTITIONS, coupling, couplings, inputs, jacobian

from nicest.flows import (
    Additive,
    Affine,
    Bijection,
    Chain,
    Coupling,
    DiagonalScaling,
    Flow,
    Gaussian,
    Multiplicative,
    Partition,
    Units,
    checkerboard,
    halves,
    odd_even,
)

all_laws = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)


def flow_of(chain: Bijection) -> Flow:
    return Flow(Units.continuous(4, standardise=False), chain, Gaussian(4))


class TestPartition:
    def test_odd_even_reads_the_papers_odd_components(self):
        assert (odd_even(5).i1, odd_even(5).i2) == ((0, 2, 4), (1, 3))

    def test_halves_gives_the_larger_half_to_i1(self):
        assert (halves(5).i1, halves(5).i2) == ((0, 1, 2), (3, 4))

    def test_checkerboard_colours_every_channel_alike(self):
        board = torch.zeros(2 * 3 * 3)
        board[list(checkerboard(3, 3, channels=2).i1)] = 1
        pattern = torch.tensor([[1.0, 0, 1], [0, 1, 0], [1, 0, 1]])
        assert torch.equal(board.view(2, 3, 3), pattern.expand(2, 3, 3))

    @pytest.mark.parametrize("name", PARTITIONS)
    @pytest.mark.parametrize("dim", [2, 3, 5, 6, 17])
    def test_split_and_merge_are_inverse_and_swap_exchanges_the_roles(self, name: str, dim: int):
        partition, x = PARTITIONS[name](dim), torch.randn(4, dim)
        x1, x2 = partition.split(x)
        assert torch.equal(x1, x[:, list(partition.i1)])
        assert torch.equal(x2, x[:, list(partition.i2)])
        assert torch.equal(partition.merge(x1, x2), x)
        assert (partition.swap().i1, partition.swap().i2) == (partition.i2, partition.i1)
        assert sorted(partition.i1 + partition.i2) == list(range(dim))

    def test_regular_sets_are_views_and_any_other_an_index(self):
        x = torch.randn(2, 7)
        assert halves(7).split(x)[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert not PARTITIONS["irregular"](7).regular

    @pytest.mark.parametrize("i1", [[], [0, 1, 2], [0, 0], [-1], [3]], ids=str)
    def test_what_is_not_a_partition_is_refused(self, i1: list[int]):
        with pytest.raises(ValueError, match="non-empty"):
            Partition(i1, 3)


class TestLaws:
    a, b1, b2 = (torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) for k in range(3))

    def test_additive(self):
        y, log_slope = Additive().forward(self.a, self.b1[..., None])
        assert torch.equal(y, self.a + self.b1)
        assert torch.equal(log_slope, torch.zeros(4, 3, dtype=torch.float64))

    def test_multiplicative(self):
        y, log_slope = Multiplicative(bound=3.0).forward(self.a, self.b1[..., None])
        factor = torch.exp(3 * torch.tanh(self.b1 / 3))
        torch.testing.assert_close(y, self.a * factor)
        torch.testing.assert_close(log_slope, factor.log())

    def test_affine_takes_the_log_scale_first_and_the_shift_second(self):
        y, log_slope = Affine(bound=3.0).forward(self.a, torch.stack((self.b1, self.b2), -1))
        factor = torch.exp(3 * torch.tanh(self.b1 / 3))
        torch.testing.assert_close(y, self.a * factor + self.b2)
        torch.testing.assert_close(log_slope, factor.log())

    @pytest.mark.parametrize("law", [Multiplicative, Affine])
    @pytest.mark.parametrize("b", [-1e30, 1e30])
    def test_one_layer_scales_by_at_most_e_to_the_bound(self, law: type, b: float):
        a, b1 = torch.ones(1, 1), torch.tensor([[[b] + [0.0] * (law.size - 1)]])
        y, log_det = law(bound=1.5).forward(a, b1)
        torch.testing.assert_close(log_det, torch.tensor([[1.5 if b > 0 else -1.5]]))
        torch.testing.assert_close(law(bound=1.5).inverse(y, b1)[0], a)


class TestCoupling:
    @all_laws
    @pytest.mark.parametrize("partition", PARTITIONS)
    def test_i1_passes_and_i2_is_the_law_of_m(self, law, partition: str):
        layer, x = coupling(PARTITIONS[partition](6), law), inputs("", 4, 6)
        i1, i2 = list(layer.partition.i1), list(layer.partition.i2)
        y, log_det = layer(x)
        expected, log_slope = law.forward(x[:, i2], layer.network(x[:, i1]).unflatten(1, (3, law.size)))
        assert torch.equal(y[:, i1], x[:, i1])
        assert torch.equal(y[:, i2], expected)
        assert torch.equal(log_det, log_slope.sum(1))

    @pytest.mark.parametrize(("law", "outputs"), [(Additive(), 6), (Affine(), 3), (Multiplicative(), 1)], ids=str)
    def test_network_of_the_wrong_output_size_is_refused(self, law, outputs: int):
        layer = Coupling(odd_even(6), law, nn.Linear(3, outputs))
        with pytest.raises(ValueError, match=rf"\(2, {3 * law.size}\), got \(2, {outputs}\)"):
            layer(torch.zeros(2, 6))
        with pytest.raises(ValueError, match=rf"\(2, {3 * law.size}\), got \(2, {outputs}\)"):
            layer.inverse(torch.zeros(2, 6))

    def test_network_is_called_without_context_where_none_is_given(self):
        layer = Coupling(halves(4), Additive(), nn.Linear(2, 2))  # a Linear takes one argument
        assert layer(torch.zeros(3, 4))[0].shape == (3, 4)


class TestContext:
    @all_laws
    def test_reaches_the_network_and_keeps_the_bijection(self, law):
        layer, x = couplings(5, law, 3, context_dim=2), inputs("", 4, 5)
        one, two = torch.randn(2, 4, 2, dtype=torch.float64)
        y, log_det = layer(x, one)
        assert (y - layer(x, two)[0]).abs().max() > 1e-3
        assert (layer.inverse(y, one)[0] - x).abs().max() < 1e-10
        assert (layer.inverse(y, two)[0] - x).abs().max() > 1e-3
        assert (log_det - torch.linalg.slogdet(jacobian(layer, x, one)).logabsdet).abs().max() < 1e-9

    @pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
    def test_may_have_another_dtype_than_x(self, dtype: torch.dtype):
        layer, x = coupling(halves(4), Affine(), context_dim=2).float(), torch.randn(3, 4)
        labels = torch.eye(2)[[0, 1, 0]]
        y, log_det = layer(x, labels.to(dtype))
        assert y.dtype == log_det.dtype == torch.float32
        assert torch.equal(y, layer(x, labels)[0])

    def test_of_one_row_changes_that_row_alone(self):
        layer, x = coupling(halves(4), Affine(), context_dim=2), inputs("", 3, 4)
        context = torch.zeros(3, 2, dtype=torch.float64)
        changed = context.clone()
        changed[1] = 1
        assert ((layer(x, context)[0] != layer(x, changed)[0]).any(1)).tolist() == [False, True, False]


class TestConnectivity:
    """At least three coupling layers are necessary to allow all dimensions to influence one another (NICE §3.2)."""

    @staticmethod
    def connected(dim: int, law, n: int, partition: str) -> Tensor:
        """Where dy/dx is not zero, with dense smooth networks."""
        layers, part = [], PARTITIONS[partition](dim)
        for _ in range(n):
            dense = nn.Sequential(nn.Linear(len(part.i1), 16), nn.Tanh(), nn.Linear(16, law.size * len(part.i2)))
            layers.append(Coupling(part, law, dense))
            part = part.swap()
        return jacobian(Chain(*layers).double(), inputs("", 1, dim))[0] != 0

    @all_laws
    @pytest.mark.parametrize("partition", PARTITIONS)
    @pytest.mark.parametrize("dim", [5, 6, 17])
    def test_two_alternating_couplings_leave_zeros_and_three_leave_none(self, law, partition: str, dim: int):
        i1, i2 = (torch.tensor(i) for i in (PARTITIONS[partition](dim).i1, PARTITIONS[partition](dim).i2))
        one, two, three = (self.connected(dim, law, n, partition) for n in (1, 2, 3))
        assert torch.equal(one[i1], torch.eye(dim, dtype=torch.bool)[i1])
        assert torch.equal(two[i2][:, i2], torch.eye(len(i2), dtype=torch.bool))
        assert two[i1].all()
        assert two[i2][:, i1].all()
        assert three.all()

    @pytest.mark.parametrize("n", [1, 2])
    def test_a_flow_of_fewer_than_three_warns(self, n: int):
        with pytest.warns(UserWarning, match=rf"^{n} coupling.* three "):
            flow_of(couplings(4, Additive(), n))

    @pytest.mark.parametrize("n", [0, 3, 4])
    def test_a_flow_of_none_or_of_three_does_not_warn(self, n: int):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            flow_of(Chain(*couplings(4, Additive(), n), DiagonalScaling(4)))
        assert caught == []

    def test_couplings_in_a_nested_chain_count(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            flow_of(Chain(coupling(odd_even(4), Additive()), couplings(4, Additive(), 3)))
        with pytest.warns(UserWarning, match="three"):
            flow_of(Chain(couplings(4, Additive(), 2), DiagonalScaling(4)))
