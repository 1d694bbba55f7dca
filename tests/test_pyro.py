"""A flow in Pyro: its terms in a trace, in plates, and as a guide, against closed forms."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

from nicest.flows import Affine, Chain, Elementwise, Flow, Gaussian, TriangularAffine, Units


@pytest.fixture(scope="module")
def pyro() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that Pyro imports
        return pytest.importorskip("pyro")


@pytest.fixture
def flow() -> Flow:
    """A correlated Gaussian: x = L⁻¹ (h - b)."""
    layer = TriangularAffine(3)
    with torch.no_grad():
        for each in layer.parameters():
            each.normal_(0, 0.3)
    return Flow(Units.continuous(3, standardise=False), Chain(layer), Gaussian(3))


def gaussian(flow: Flow) -> MultivariateNormal:
    (layer,) = flow.bijection
    inverse = torch.linalg.inv(layer.lower.detach())
    return MultivariateNormal(-inverse @ layer.b.detach(), scale_tril=inverse)


def test_the_density_in_a_trace_is_that_of_the_flow_in_plates_too(pyro: Any, flow: Flow):
    from nicest.pyro import PyroFlow

    def model() -> None:
        pyro.sample("one", PyroFlow(flow))
        with pyro.plate("outer", 4, dim=-2), pyro.plate("inner", 5, dim=-1):
            pyro.sample("many", PyroFlow(flow))

    trace = pyro.poutine.trace(model).get_trace()
    trace.compute_log_prob()
    many = trace.nodes["many"]["value"]
    assert many.shape == (4, 5, 3)
    assert len(many.reshape(-1, 3).unique(dim=0)) == 20
    exact = gaussian(flow)
    torch.testing.assert_close(trace.nodes["many"]["log_prob"], exact.log_prob(many), atol=1e-4, rtol=1e-4)
    one = trace.nodes["one"]["value"]
    torch.testing.assert_close(trace.nodes["one"]["log_prob"], exact.log_prob(one), atol=1e-4, rtol=1e-4)


def test_observed_rows_have_their_contexts(pyro: Any):
    from nicest.pyro import PyroFlow

    shift = nn.Linear(1, 2)
    with torch.no_grad():
        shift.weight.copy_(torch.tensor([[0.0], [3.0]]))  # y + 3 c is a standard Gaussian
        shift.bias.zero_()
    flow = Flow(Units.continuous(1, standardise=False), Elementwise(Affine(), 1, shift), Gaussian(1))
    c, y = torch.randn(6, 1), torch.randn(6, 1)

    def model() -> None:
        with pyro.plate("rows", 6):
            pyro.sample("y", PyroFlow(flow, c), obs=y)

    trace = pyro.poutine.trace(model).get_trace()
    expected = -0.5 * ((y + 3 * c).square().sum() + 6 * math.log(2 * math.pi))
    assert float(trace.log_prob_sum().detach()) == pytest.approx(float(expected), rel=1e-5)


def test_as_a_guide_its_elbo_is_minus_the_divergence_and_it_learns(pyro: Any, flow: Flow):
    from nicest.pyro import PyroFlow

    target = torch.distributions.Normal(torch.tensor([1.0, -1.0, 0.5]), torch.tensor([0.5, 1.0, 2.0]))

    def model() -> None:
        pyro.sample("x", pyro.distributions.Normal(target.loc, target.scale).to_event(1))

    def guide() -> None:
        pyro.module("flow", flow)
        pyro.sample("x", PyroFlow(flow))

    elbo = pyro.infer.Trace_ELBO(num_particles=20_000, vectorize_particles=True)
    exact = MultivariateNormal(target.loc, scale_tril=target.scale.diag())
    before = float(kl_divergence(gaussian(flow), exact))
    assert elbo.loss(model, guide) == pytest.approx(before, rel=0.05)
    small = pyro.infer.Trace_ELBO(num_particles=20, vectorize_particles=True)
    learner = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), small)
    for _ in range(300):
        learner.step()
    assert float(kl_divergence(gaussian(flow), exact)) < 0.05 < before
    pyro.clear_param_store()
