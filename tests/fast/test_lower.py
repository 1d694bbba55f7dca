"""The fast twin of every flow computes the same function, with the same gradients."""

import functools
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parity import ROUNDING, assert_close_in_bfloat16, assert_parity, gradients
from torch import Tensor, nn
from torch.testing import assert_close
from zoo import LAWS, PARTITIONS, ZOO, coupling, couplings, inputs, randomised, scaling

from nicest.fast import LoweredChain, lower
from nicest.fast.networks import FastMLP, FastResidual
from nicest.flows import (
    MLP,
    Additive,
    Affine,
    Bijection,
    Chain,
    Coupling,
    DiagonalScaling,
    Elementwise,
    Flow,
    Gaussian,
    ResidualMLP,
    Spline,
    TriangularAffine,
    Units,
    Within,
    checkerboard,
    halves,
    odd_even,
)

whole_zoo = pytest.mark.parametrize("name", ZOO)
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


def flow_of(chain: Bijection, dim: int, units: Units | None = None) -> Flow:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few couplings
        flow = Flow(units or Units.continuous(dim, standardise=False), chain, Gaussian(dim))
    return flow.to(next((p.dtype for p in chain.parameters()), torch.float64))


class TestZoo:
    @whole_zoo
    @pytest.mark.parametrize("dim", [6, 17])
    @dtypes
    def test_agrees_to_rounding(self, name: str, dim: int, dtype: torch.dtype):
        assert_parity(ZOO[name](dim).to(dtype), inputs(name, 7, dim).to(dtype))

    @whole_zoo
    @pytest.mark.parametrize("dim", [3, 6])
    def test_agrees_in_bfloat16_within_its_precision(self, name: str, dim: int):
        assert_close_in_bfloat16(ZOO[name](dim).float(), inputs(name, 20, dim).float())

    @whole_zoo
    @dtypes
    def test_a_lowered_flow_scores_samples_and_learns_as_the_flow(self, name: str, dtype: torch.dtype):
        chain, x = ZOO[name](6).to(dtype), inputs(name, 5, 6).to(dtype)
        flow = flow_of(chain, 6).to(dtype)
        fast, limit = lower(flow), ROUNDING[dtype]
        assert_close(fast.log_prob(x), flow.log_prob(x), **limit)
        assert list(fast.terms(x)) == list(flow.terms(x))
        drawn, plain = (each.sample(4, generator=torch.Generator().manual_seed(1)) for each in (fast, flow))
        assert_close(drawn, plain, **limit)
        assert {id(p) for p in fast.parameters()} == {id(p) for p in flow.parameters()}
        if parameters := list(flow.parameters()):
            found, expected = (torch.autograd.grad(each(x).sum(), parameters) for each in (fast, flow))
            assert all(a is not None for a in found)
            for one, other in zip(found, expected, strict=True):
                assert_close(one, other, **limit)

    @whole_zoo
    def test_batches_of_none_and_one(self, name: str):
        fast = LoweredChain(ZOO[name](6), torch.float64)
        for batch in (0, 1):
            y, log_det = fast(inputs(name, batch, 6))
            assert (y.shape, log_det.shape, fast.inverse(y)[0].shape) == ((batch, 6), (batch,), (batch, 6))
        assert_parity(ZOO[name](6), inputs(name, 1, 6))

    @whole_zoo
    def test_the_plain_layer_is_left_as_it_was(self, name: str):
        layer, x = ZOO[name](6), inputs(name, 4, 6)
        before, keys = layer(x)[0].detach().clone(), list(layer.state_dict())
        LoweredChain(layer, torch.float32)(x)
        assert list(layer.state_dict()) == keys
        assert torch.equal(layer(x)[0], before)


class TestChains:
    @pytest.mark.parametrize("law", LAWS)
    @pytest.mark.parametrize("partition", PARTITIONS)
    @dtypes
    def test_stacks_of_couplings(self, law: str, partition: str, dtype: torch.dtype):
        assert_parity(couplings(6, LAWS[law], 4, PARTITIONS[partition]).to(dtype), inputs("", 7, 6).to(dtype))

    def test_several_partitions_in_a_row(self):
        partitions = [odd_even(8), odd_even(8).swap(), halves(8), checkerboard(2, 4), checkerboard(2, 4), halves(8)]
        assert_parity(Chain(*(coupling(each, Affine()) for each in partitions)), inputs("", 5, 8))

    def test_one_partition_object_twice_in_a_row(self):
        part = odd_even(6)
        assert_parity(Chain(coupling(part, Affine()), coupling(part, Additive()), scaling(6)), inputs("", 5, 6))

    def test_couplings_in_chains_within_chains_are_fast(self):
        inner = Chain(couplings(6, Additive(), 2), {"top": scaling(6)})
        chain = Chain({"block": inner}, Chain(coupling(halves(6), Affine())))
        assert_parity(chain, inputs("", 5, 6))
        fast = LoweredChain(chain, torch.float64)
        assert len(fast.networks) == 3
        assert fast.plain_layers == []

    @dtypes
    @pytest.mark.parametrize("law", LAWS)
    def test_contexts(self, dtype: torch.dtype, law: str):
        chain = Chain(couplings(5, LAWS[law], 3, context_dim=2), scaling(5)).to(dtype)
        assert_parity(chain, inputs("", 7, 5).to(dtype), torch.randn(7, 2).to(dtype))
        assert_parity(chain, inputs("", 7, 5).to(dtype), torch.randint(2, (7, 2)))

    def test_contexts_in_bfloat16(self):
        chain = couplings(6, Affine(), 3, context_dim=2).float()
        assert_close_in_bfloat16(chain, torch.randn(20, 6), torch.randn(20, 2))

    def test_a_network_of_two_couplings_gets_both_gradients(self):
        network = randomised(MLP(3, 3, (8, 8)))
        part = odd_even(6)
        chain = Chain(Coupling(part, Additive(), network), Coupling(part.swap(), Additive(), network), scaling(6))
        assert_parity(chain, inputs("", 5, 6))
        assert not LoweredChain(chain, torch.float64).exclusive

    @pytest.mark.parametrize("where", ["wrapped", "hooked"])
    def test_a_network_that_plain_layers_share_is_not_exclusive(self, where: str):
        network, part = randomised(MLP(3, 3, (8, 8))), odd_even(6)
        first, second = Coupling(part, Additive(), network), Coupling(part.swap(), Additive(), network)
        if where == "wrapped":
            second.network = nn.Sequential(network)
        else:
            second.register_forward_hook(lambda *_: None)
        assert len(LoweredChain(Chain(first, second), torch.float64).networks) == 1
        assert not LoweredChain(Chain(first, second), torch.float64).exclusive
        other = Coupling(part.swap(), Additive(), randomised(MLP(3, 3, (8, 8))))
        assert LoweredChain(Chain(first, other), torch.float64).exclusive


class TestDropout:
    @staticmethod
    def chain(dropout: float = 0.4, law: Affine | Spline | None = None) -> Chain:
        part, law = odd_even(6), law or Affine()
        parts = (part, part.swap(), part)
        return Chain(*(Coupling(p, law, MLP(3, 3 * law.size, (32, 16), dropout=dropout)) for p in parts))

    @staticmethod
    def residual_chain(law: Affine | Spline) -> Chain:
        part = odd_even(6)
        networks = (ResidualMLP(3, 3 * law.size, 16, 2, dropout=0.4) for _ in range(2))
        return Chain(
            *(randomised(Coupling(p, law, f), 0.15) for p, f in zip((part, part.swap()), networks, strict=True))
        )

    @dtypes
    @pytest.mark.parametrize("law", [Affine(), Spline(4)])
    @pytest.mark.parametrize("residual", [False, True])
    def test_the_same_seed_drops_the_same_units_as_plain(
        self, dtype: torch.dtype, residual: bool, law: Affine | Spline
    ):
        chain = self.residual_chain(law) if residual else self.chain(law=law)
        chain, x = chain.to(dtype).train(), torch.randn(9, 6, dtype=dtype)
        found = []
        for layer in (chain, LoweredChain(chain, dtype)):
            torch.manual_seed(3)
            y, log_det = layer(x)
            found.append((y, log_det, *gradients(layer, chain, x), torch.get_rng_state()))
        for one, other in zip(*found, strict=True):
            assert_close(one, other, **ROUNDING[dtype])
        fast = LoweredChain(chain, dtype)
        assert not torch.equal(fast(x)[0], fast(x)[0])

    def test_drops_nothing_in_evaluation(self):
        chain, x = self.chain().double().eval(), inputs("", 9, 6)
        assert_parity(chain, x)

    def test_dropout_switched_on_by_itself_is_on(self):
        """As for Monte-Carlo dropout: the flow in evaluation mode, its dropout in training mode."""
        chain, x = self.chain().double().eval(), inputs("", 9, 6)
        for module in chain.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        found = []
        for layer in (chain, LoweredChain(chain, torch.float64)):
            torch.manual_seed(3)
            found.append(layer(x)[0])
        assert_close(*found)
        assert not torch.equal(chain(x)[0], chain(x)[0])

    def test_rates_that_differ_run_plain(self):
        chain, x = self.chain().double(), inputs("", 9, 6)
        next(iter(chain)).network.layers[2].p = 0.9
        fast = LoweredChain(chain, torch.float64)
        assert fast.plain_layers == ["0_coupling"]
        found = []
        for layer in (chain, fast):
            torch.manual_seed(3)
            found.append(layer(x)[0])
        assert_close(*found)


class LowRank(nn.Module):
    """A linear layer with a trainable update of rank 1."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 1, bias=False), nn.Linear(1, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Doubled(MLP):
    def forward(self, x1: Tensor, context: Tensor | None = None) -> Tensor:
        return 2 * super().forward(x1, context)


def unbiased(network: MLP) -> None:
    network.layers[0] = nn.Linear(3, 16, bias=False)


def tanh(network: MLP) -> None:
    network.layers[1] = nn.Tanh()


def low_rank(network: MLP) -> None:
    network.layers[2] = LowRank(network.layers[2])


def longer(network: MLP) -> None:
    network.layers.append(nn.Linear(3, 3))


def parametrised(network: MLP) -> None:
    nn.utils.parametrizations.weight_norm(network.layers[0])


CHANGES: list[Callable[[MLP], None]] = [unbiased, tanh, low_rank, longer, parametrised]


class TestFallBack:
    """What has no fast form runs as it is, and is named."""

    @pytest.mark.parametrize("change", CHANGES)
    def test_a_network_with_other_layers_runs_plain(self, change: Callable[[MLP], None]):
        chain, x = Chain(couplings(6, Additive(), 3), {"top": scaling(6)}), inputs("", 5, 6)
        before = chain(x)[0]
        change(chain.layers["0_chain"].layers["1_coupling"].network)
        chain.double()
        assert (chain(x)[0] - before).abs().max() > 1e-6 or change is parametrised
        assert_parity(chain, x)
        fast = LoweredChain(chain, torch.float64)
        assert fast.plain_layers == ["0_chain_1_coupling"]
        assert len(fast.networks) == 2

    def test_other_networks_and_subclasses_run_plain(self):
        part = odd_even(6)

        class Mine(Coupling):
            pass

        chain = Chain(
            Coupling(part, Additive(), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))),
            Coupling(part.swap(), Additive(), Doubled(3, 3, (8,))),
            Mine(part, Additive(), MLP(3, 3, (8,))),
            Within(part, DiagonalScaling(3), None),
            TriangularAffine(6),
            scaling(6),
        ).double()
        assert_parity(chain, inputs("", 5, 6))
        fast = LoweredChain(chain, torch.float64)
        assert fast.plain_layers == ["0_coupling", "1_coupling", "2_mine", "4_triangularaffine"]

    def test_a_layer_without_a_chain_has_the_name_of_its_class(self):
        layer = Coupling(odd_even(6), Additive(), nn.Linear(3, 3))
        assert LoweredChain(layer, torch.float32).plain_layers == ["Coupling"]
        assert LoweredChain(TriangularAffine(6), torch.float32).plain_layers == ["TriangularAffine"]

    def test_other_networks_compute_in_the_reduced_dtype(self):
        part = odd_even(6)
        smooth = (nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6)) for _ in range(3))
        chain = Chain(*(Coupling(p, Affine(), m) for p, m in zip((part, part.swap(), part), smooth, strict=True)))
        x = torch.randn(20, 6)
        seen: list[torch.dtype] = []
        next(iter(chain)).network[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
        assert_close_in_bfloat16(chain, x)
        assert torch.bfloat16 in seen

    @pytest.mark.parametrize("where", ["chain", "nested chain", "coupling", "network", "linear", "scaling"])
    def test_hooks_run(self, where: str):
        chain, x = Chain({"block": couplings(6, Additive(), 3)}, {"top": scaling(6)}), inputs("", 5, 6)
        block = chain.layers["block"]
        first = next(iter(block))
        watched = {
            "chain": chain,
            "nested chain": block,
            "coupling": first,
            "network": first.network,
            "linear": first.network.layers[2],
            "scaling": chain.layers["top"],
        }[where]
        rows: list[int] = []
        watched.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
        fast = lower(flow_of(chain, 6))
        assert_close(fast.log_prob(x), flow_of(chain, 6).log_prob(x))
        assert rows == [5, 5]
        assert_parity(chain, x)

    def test_a_hook_may_change_the_output(self):
        chain, x = couplings(6, Additive(), 3), inputs("", 5, 6)
        next(iter(chain)).network.layers[0].register_forward_hook(lambda *given: given[2] * 2)
        assert_parity(chain, x)

    def test_a_flow_over_several_processes_comes_back_as_it_is(self):
        flow = flow_of(couplings(6, Additive(), 3), 6)
        next(flow.parameters()).full_tensor = None  # as FSDP's parameters have it
        assert lower(flow) is flow


class TestWeights:
    def test_changes_of_the_weights_are_seen_at_once(self):
        chain, x = couplings(6, Affine(), 3), inputs("", 5, 6)
        fast = LoweredChain(chain, torch.float64)
        randomised(chain)
        assert_close(fast(x), chain(x))

    @pytest.mark.parametrize("width", [5, 64, 600])
    def test_copies_stay_as_they_were_until_taken_again_and_padding_changes_nothing(self, width: int):
        part = odd_even(6)
        chain = Chain(*(Coupling(p, Affine(), MLP(3, 6, (width, width))) for p in (part, part.swap(), part))).double()
        x, fast = inputs("", 5, 6), LoweredChain(chain, torch.float32)  # by hand, under a stream of float64
        assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
        fast.copy_weights()
        before = chain(x)
        assert_close(fast(x), before)
        assert_close(fast.inverse(before[0])[0], x)
        with torch.no_grad():
            for parameter in chain.parameters():
                parameter.add_(0.1)
        assert_close(fast(x), before)
        fast.copy_weights()
        assert_close(fast(x), chain(x))


class TestUnits:
    @pytest.mark.parametrize(
        "units", [Units.pixels(6, 17, (-1.0, 1.0)), Units.columns([1.0, 0, 0.1] * 2), Units.continuous(6)], ids=str
    )
    def test_lowered_units_are_the_units(self, units: Units):
        fast = lower(flow_of(couplings(6, Additive(), 3).float(), 6, units)).units
        if units.standardise:
            units.fit(torch.full((6,), 7.0), torch.full((6,), 3.0))  # seen by both
        x = torch.randint(17, (9, 6)) * torch.where(units.step > 0, units.step, 1.0)
        for noise in (True, False):
            torch.manual_seed(2)
            y = units.enter(x, noise=noise)
            torch.manual_seed(2)
            assert torch.equal(fast.enter(x, noise=noise), y)
            assert torch.equal(fast.leave(y), units.leave(y))
        assert torch.equal(torch.as_tensor(fast.log_det(y)), torch.as_tensor(units.log_det(y)))
        assert (fast.discrete, fast.interval) == (units.discrete, units.interval)

    def test_rows_of_another_size_never_reach_the_kernel(self, monkeypatch: pytest.MonkeyPatch):
        """A kernel would read beyond the rows."""
        fast = lower(flow_of(couplings(6, Additive(), 3).float(), 6, Units.pixels(6, 17))).units
        kernels = SimpleNamespace(dequantize=lambda *_: pytest.fail("the kernel was called"))
        monkeypatch.setattr(sys.modules["nicest.fast.lower"], "kernels_for", lambda x: kernels)
        with pytest.raises(ValueError, match="expected 6 features, got 5"):
            fast.enter(torch.zeros(2, 5))


@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("context_dim", [0, 2])
@pytest.mark.parametrize(("depth", "dropout"), [(0, 0.0), (1, 0.4), (3, 0.0), (3, 0.4)])
@pytest.mark.parametrize("kind", [FastMLP, FastResidual])
def test_a_network_has_the_gradients_of_the_plain_one(
    kind: type[FastMLP | FastResidual], depth: int, dropout: float, context_dim: int, by_columns: bool, rows: int
):
    options: Any = {"dropout": dropout, "context_dim": context_dim, "initialisation": "torch"}
    plain = MLP(3, 5, (16,) * depth, **options) if kind is FastMLP else ResidualMLP(3, 5, 16, depth, **options)
    fast = kind.of(plain.double(), torch.float64)
    assert fast is not None
    fast.by_columns = by_columns
    x = torch.randn(rows, 6, dtype=torch.float64)[:, ::2].requires_grad_()
    context = torch.randn(rows, context_dim, dtype=torch.float64, requires_grad=True) if context_dim else None
    weight, found = torch.randn(rows, 5, dtype=torch.float64), []
    for compute in (plain, lambda x1, given: fast.read(x1, given)[1]):
        torch.manual_seed(1)
        y = compute(x, context)
        wanted = [each for each in (x, context, *plain.parameters()) if each is not None]
        found.append((y, *torch.autograd.grad((y * weight).sum(), wanted)))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=1e-12, atol=1e-12)
    of_parameters = found[1][-len(list(plain.parameters())) :]
    assert [g.stride() for g in of_parameters] == [p.stride() for p in plain.parameters()]  # or processes warn of them


@pytest.mark.parametrize("law", [Affine(), Spline(4)])
def test_second_derivatives_are_refused_rather_than_wrong(law: Affine | Spline):
    part = odd_even(4)
    networks = (ResidualMLP(2, 2 * law.size, 8, 1, initialisation="torch") for _ in range(3))
    layers = [Coupling(p, law, each) for p, each in zip((part, part.swap(), part), networks, strict=True)]
    flow = Flow(Units.continuous(4), Chain(*layers), Gaussian(4)).double()
    x = torch.randn(4).double()
    assert torch.autograd.functional.hessian(lambda y: flow.log_prob(y[None]).sum(), x).isfinite().all()
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.functional.hessian(lambda y: lower(flow).log_prob(y[None]).sum(), x)


def test_frozen_weights_cost_no_products():
    network = ResidualMLP(3, 5, 16, 1).double().requires_grad_(False)
    x = torch.randn(4, 3).double().requires_grad_()
    fast = FastResidual.of(network, torch.float64)
    assert fast is not None
    y = fast.read(x, None)[1]
    with torch.autograd.profiler.profile() as seen:
        torch.autograd.grad(y.sum(), x)
    assert sum(each.name == "aten::mm" for each in seen.function_events or ()) == 4  # a layer each


def test_under_autocast_a_residual_network_runs_layer_by_layer():
    network, x = ResidualMLP(3, 5, 16, 1, initialisation="torch"), torch.randn(4, 3)
    fast = FastResidual.of(network, torch.float32)
    assert fast is not None
    with torch.autocast("cpu", torch.bfloat16):
        y = fast.read(x, None)[1]
    y.sum().backward()
    assert_close(y, network(x), rtol=0.05, atol=0.05)


def test_hooks_on_an_elementwise_layer_are_called():
    layer, seen = Elementwise(Spline(), 3), []
    layer.register_forward_hook(lambda *_: seen.append(1))
    LoweredChain(Chain(layer), torch.float32)(torch.randn(4, 3))
    assert seen == [1]
