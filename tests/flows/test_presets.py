"""Flows in one line: they are densities, and their context and units are those that were asked for."""

import pytest
import torch
from quadrature import reals, total
from zoo import jacobian, randomised

import nicest
from nicest import flows
from nicest.flows import Flow, Gaussian, OneHot, Units

FLOWS = {
    "nice": lambda **options: flows.nice(2, hidden=(8, 8), **options),
    "nice-affine": lambda **options: flows.nice(2, hidden=(8, 8), law=flows.Affine(), prior=Gaussian(2), **options),
    "spline": lambda **options: flows.spline(2, couplings=3, width=8, bins=4, **options),
    "spline of one": lambda **options: flows.spline(1, couplings=3, width=8, bins=4, **options),
}


def random_flow(flow: Flow) -> Flow:
    return randomised(flow, std=0.2).eval()


@pytest.mark.parametrize("kind", FLOWS)
@pytest.mark.parametrize("labels", [0, 3])
def test_integrates_to_1(kind: str, labels: int):
    flow = random_flow(FLOWS[kind](context=labels, embedding=OneHot(labels) if labels else None))
    context = torch.tensor([1]) if labels else None
    assert total(flow, *[reals(301, 5.5)] * flow.dim, context=context) == pytest.approx(1, abs=2e-3)
    if labels:
        x = torch.zeros(3, flow.dim, dtype=torch.float64)
        assert len(flow.log_prob(x, torch.arange(3)[:, None]).unique()) == 3


@pytest.mark.parametrize("labels", [0, 3])
def test_glow_is_a_flow_of_levels(labels: int):
    made = flows.glow(
        (1, 4, 4), levels=5, scales=2, steps=2, width=4, context=labels, embedding=OneHot(labels) if labels else None
    )
    flow, x = random_flow(made), torch.randint(5, (3, 16))
    context = torch.arange(3)[:, None] if labels else None
    y, given = flow.units.enter(x), flow.embed(context)
    h, log_det = flow.bijection(y, given)
    torch.testing.assert_close(log_det, torch.linalg.slogdet(jacobian(flow.bijection, y, given)).logabsdet)
    torch.testing.assert_close(flow.decode(h, context), x.double())
    assert (flow.log_prob(torch.full_like(x, 5), context) == -torch.inf).all()
    assert flow.units.contains(flow.sample(4, None if context is None else context[:1])).all()


def test_units_of_the_caller_are_used():
    units = Units.columns([1.0, 0.0])
    assert flows.nice(2, hidden=(4,), units=units).units is flows.spline(2, units=units).units is units
    assert flows.spline(2, first=[flows.Bounded([2, 0])]).bijection[0].ends.tolist() == [2, 0]


def test_contexts_that_do_not_fit_are_refused_in_words():
    flow = flows.spline(2, context=3, couplings=3, width=8)
    x, c = torch.randn(50, 2), torch.randn(50, 3)
    with pytest.raises(ValueError, match=r"expected a context for each row, got rows \(50,\) and contexts \(4,\)"):
        flow.log_prob(x, c[:4])
    with pytest.raises(ValueError, match="expected a context of 3 numbers, got 2"):
        nicest.fit(flow, x, c[:, :2], settings=nicest.TrainSettings(epochs=1, batch=10), callbacks=[])
    with pytest.raises(nicest.NicestError, match=r"pass valid=\(rows, context\)"):
        nicest.fit(flow, x, c, valid=x[:5], callbacks=[])
