"""What every bijection promises, for the whole zoo (NICE §3.1)."""

import copy
import inspect
import itertools
import re
from collections.abc import Iterator

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import DIMS, ZOO, inputs, jacobian

import nicest.flows
from nicest.flows import LAWS, Bijection, Chain, DiagonalScaling, Law, Logit, Partition
from nicest.flows.chain import ledger

whole_zoo = pytest.mark.parametrize("name", ZOO)


def dims() -> Iterator[int]:
    """The dimensions, each with the random numbers of a test of its own."""
    for dim in DIMS:
        torch.manual_seed(0)
        yield dim


def concrete(kind: type) -> set[type]:
    exported = (getattr(nicest.flows, name) for name in nicest.flows.__all__)
    return {c for c in exported if inspect.isclass(c) and issubclass(c, kind) and not inspect.isabstract(c)}


def test_every_exported_bijection_and_law_is_in_the_zoo():
    modules = [module for make in ZOO.values() for module in make(6).modules()]
    assert concrete(Bijection) == {type(m) for m in modules if isinstance(m, Bijection)}
    assert concrete(Law) == {type(m.law) for m in modules if hasattr(m, "law")}


@pytest.mark.parametrize("law", sorted({*LAWS.values(), *concrete(Law)}, key=lambda law: law.__name__))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_law_of_zeros_is_the_identity(law: type[Law], dtype: torch.dtype):
    a = torch.randn(4, 3, dtype=dtype)
    b = a.new_zeros(4, 3, law().size)
    y, log_slope = law().forward(a, b)
    assert y.shape == log_slope.shape == a.shape
    assert y.dtype == log_slope.dtype == dtype
    limit = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(y, a, rtol=limit, atol=0)
    torch.testing.assert_close(law().inverse(a, b)[0], a, rtol=limit, atol=0)
    torch.testing.assert_close(log_slope, torch.zeros_like(a), rtol=0, atol=3 * limit)


@whole_zoo
def test_inverse_undoes_forward(name: str):
    for dim in dims():
        layer, x = ZOO[name](dim), inputs(name, 7, dim)
        assert (layer.inverse(layer(x)[0])[0] - x).abs().max() < 1e-10, dim


@whole_zoo
def test_forward_undoes_inverse(name: str):
    for dim in dims():
        layer, y = ZOO[name](dim), torch.randn(7, dim, dtype=torch.float64)
        assert (layer(layer.inverse(y)[0])[0] - y).abs().max() < 1e-10, dim


@whole_zoo
def test_log_det_is_that_of_the_jacobian(name: str):
    for dim in dims():
        layer, x = ZOO[name](dim), inputs(name, 3, dim)
        expected = torch.linalg.slogdet(jacobian(layer, x)).logabsdet
        assert (layer(x)[1] - expected).abs().max() < 1e-9, dim


@whole_zoo
def test_the_log_det_of_the_inverse_is_minus_that_of_forward(name: str):
    for dim in dims():
        layer, y = ZOO[name](dim), torch.randn(7, dim, dtype=torch.float64)
        x, log_det = layer.inverse(y)
        torch.testing.assert_close(log_det, -layer(x)[1], rtol=0, atol=1e-9)


@whole_zoo
def test_the_terms_of_the_ledger_sum_to_the_log_det(name: str):
    layer, x = ZOO[name](5), inputs(name, 4, 5)
    y, log_det = layer(x)
    found, terms = ledger(layer, x)
    assert torch.equal(found, y)
    assert all(term.shape == (4,) for term in terms.values())
    torch.testing.assert_close(sum(terms.values(), torch.zeros(4, dtype=torch.float64)), log_det, rtol=0, atol=1e-10)


@whole_zoo
def test_shapes_and_dtype_for_batches_of_none_one_and_more(name: str):
    for dim in dims():
        layer = ZOO[name](dim)
        for batch in (0, 1, 4):
            y, log_det = layer(inputs(name, batch, dim))
            assert y.shape == layer.inverse(y)[0].shape == (batch, dim)
            assert log_det.shape == (batch,)
            assert y.dtype == log_det.dtype == layer.inverse(y)[0].dtype == torch.float64


@whole_zoo
def test_float32_stays_float32_and_agrees_with_float64(name: str):
    for dim in dims():
        layer, x = ZOO[name](dim), inputs(name, 5, dim)
        expected, expected_log_det = layer(x)
        layer, x = layer.float(), x.float()
        y, log_det = layer(x)
        assert y.dtype == log_det.dtype == layer.inverse(y)[0].dtype == torch.float32
        torch.testing.assert_close(y.double(), expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(log_det.double(), expected_log_det, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer.inverse(y)[0], x, rtol=1e-3, atol=1e-3)


@whole_zoo
def test_all_tensors_are_made_on_the_device_of_the_input(name: str):
    layer, x = ZOO[name](5).to("meta"), inputs(name, 4, 5).to("meta")  # the meta device refuses tensors of the CPU
    y, log_det = layer(x)
    assert y.device == log_det.device == layer.inverse(y)[0].device == x.device


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_gpu_agrees_with_cpu():
    for name, make in ZOO.items():
        layer, x = make(17), inputs(name, 8, 17)
        expected, expected_log_det = layer(x)
        y, log_det = layer.cuda()(x.cuda())
        torch.testing.assert_close(y.cpu(), expected, rtol=1e-10, atol=1e-10, msg=name)
        torch.testing.assert_close(log_det.cpu(), expected_log_det, rtol=1e-10, atol=1e-10, msg=name)


@whole_zoo
def test_input_and_state_are_not_mutated(name: str):
    layer, x = ZOO[name](5), inputs(name, 4, 5)
    before_x, before_state = x.clone(), copy.deepcopy(layer.state_dict())
    y, _ = layer(x)
    before_y = y.clone()
    layer.inverse(y)
    assert torch.equal(x, before_x)
    assert torch.equal(y, before_y)
    assert all(torch.equal(value, before_state[key]) for key, value in layer.state_dict().items())


@whole_zoo
@torch.no_grad()
def test_a_caller_may_change_the_log_det_it_was_given(name: str):
    for batch in (1, 3):
        layer, x = ZOO[name](5), inputs(name, batch, 5)
        log_det = layer(x)[1]
        before = log_det.clone()
        log_det += 1
        assert torch.equal(layer(x)[1], before)


@whole_zoo
def test_rows_are_independent(name: str):
    layer, x = ZOO[name](5), inputs(name, 4, 5)
    y, log_det = layer(x)
    for i in range(4):
        torch.testing.assert_close(layer(x[i : i + 1])[0][0], y[i], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(layer(x[i : i + 1])[1][0], log_det[i], rtol=1e-12, atol=1e-12)


@whole_zoo
def test_gradients_reach_everything_and_are_finite(name: str):
    layer, x = ZOO[name](5), inputs(name, 4, 5).requires_grad_()
    y, log_det = layer(x)
    (y.square().sum() + log_det.sum()).backward()
    for tensor in (x, *layer.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
    assert x.grad.abs().sum() > 0


@whole_zoo
def test_deep_copy_is_exact_and_separate(name: str):
    layer, x = ZOO[name](5), inputs(name, 4, 5)
    twin, before = copy.deepcopy(layer), layer(x)[0].detach().clone()
    assert all(torch.equal(a, b) for a, b in zip(twin(x), layer(x), strict=True))
    for parameter in twin.parameters():
        parameter.data += 1
    assert torch.equal(layer(x)[0], before)


@whole_zoo
def test_state_dict_round_trip_is_exact(name: str):
    layer, other, x = ZOO[name](5), ZOO[name](5), inputs(name, 4, 5)
    drawn = bool(layer.state_dict()) and name not in zoo.FIXED
    assert torch.equal(layer(x)[0], other(x)[0]) != drawn  # else the round trip says nothing
    other.load_state_dict(layer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(other(x), layer(x), strict=True))
    assert torch.equal(other.inverse(x.sigmoid())[0], layer.inverse(x.sigmoid())[0])


@pytest.mark.parametrize("name", sorted(ZOO.keys() - zoo.ANY_DIM))
def test_wrong_number_of_features_is_refused_with_both_numbers(name: str):
    layer = ZOO[name](5)
    for got, called in itertools.product((1, 6), (layer.forward, layer.inverse)):
        with pytest.raises((ValueError, RuntimeError)) as error:
            called(inputs(name, 23, got))
        assert {5, got} <= {int(number) for number in re.findall(r"\d+", str(error.value))}


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data())
def test_any_coupling_of_any_partition_is_a_bijection(data: st.DataObject):
    dim = data.draw(st.integers(2, 12))
    i1 = data.draw(st.sets(st.integers(0, dim - 1), min_size=1, max_size=dim - 1))
    law = data.draw(st.sampled_from(list(zoo.LAWS.values())))
    batch = data.draw(st.integers(0, 3))
    layer, x = zoo.coupling(Partition(i1, dim), law), inputs("", batch, dim)
    y, log_det = layer(x)
    torch.testing.assert_close(layer.inverse(y)[0], x, rtol=0, atol=1e-10)
    assert torch.equal(y[:, sorted(i1)], x[:, sorted(i1)])
    if batch:
        torch.testing.assert_close(log_det, torch.linalg.slogdet(jacobian(layer, x)).logabsdet, rtol=0, atol=1e-9)


class TestChain:
    def test_log_dets_add_up_in_the_order_data_meets_the_layers(self):
        first, second = ZOO["logit"](3), ZOO["affine-halves"](3)
        x = torch.rand(4, 3, dtype=torch.float64)
        h1, log_det1 = first(x)
        h2, log_det2 = second(h1)
        y, log_det = Chain(first, second)(x)
        assert torch.equal(y, h2)
        torch.testing.assert_close(log_det, log_det1 + log_det2)

    def test_layers_are_named_by_position_and_class_or_by_the_caller(self):
        scaling = DiagonalScaling(3)
        scaling.s.data.fill_(2.0)
        chain = Chain(Logit(), {"squeeze": scaling}, Logit())
        assert list(chain.layers) == ["0_logit", "squeeze", "2_logit"]
        terms = chain.ledger(torch.rand(4, 3))[1]
        assert list(terms) == ["0_logit", "squeeze", "2_logit"]
        torch.testing.assert_close(terms["squeeze"], torch.full((4,), 6.0))

    def test_chains_within_chains_stay_and_their_terms_have_joined_names(self):
        inner = Chain(Logit(), Chain({"scale": DiagonalScaling(3)}))
        chain = Chain(inner, {"top": Chain(Logit())}, Chain())
        assert list(chain) == [inner, chain.layers["top"], chain.layers["2_chain"]]
        assert list(chain.state_dict()) == ["layers.0_chain.layers.1_chain.layers.scale.s"]
        terms = chain.ledger(torch.rand(4, 3))[1]
        assert list(terms) == ["0_chain_0_logit", "0_chain_1_chain_scale", "top_0_logit"]

    def test_only_bijections_are_accepted(self):
        with pytest.raises(TypeError, match="Linear"):
            Chain(Logit(), torch.nn.Linear(3, 3))

    def test_two_layers_of_one_name_are_refused(self):
        with pytest.raises(ValueError, match="top"):
            Chain({"top": Logit()}, {"top": DiagonalScaling(3)})
