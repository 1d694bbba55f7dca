"""The mean of several densities (Lakshminarayanan et al. 2017), each a flow."""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from zoo import couplings, features, inputs, jacobian, randomised

from nicest.fast import lower
from nicest.flows import (
    MLP,
    Affine,
    Chain,
    DiagonalScaling,
    Flow,
    Gaussian,
    Logistic,
    Mixture,
    Partition,
    PartPrior,
    Units,
    Within,
)
from nicest.flows.priors import Prior


def plain(members: int = 3) -> Mixture:
    """A mixture of flows of the plane."""
    chains = [Chain(*couplings(2, Affine(), 3), randomised(DiagonalScaling(2))) for _ in range(members)]
    units = Units.continuous(2)
    units.fit(torch.tensor([1.0, -2.0]), torch.tensor([4.0, 0.5]))
    return Mixture(units, chains, Gaussian(2)).double().eval()


def given(members: int = 3, prior: type[Prior] = Logistic) -> Mixture:
    """A mixture of p(x | c), c a number and a category of three, of which no other layer knows."""
    part = Partition(range(2), 3)

    def chain() -> Chain:
        scaling = Within(part, randomised(DiagonalScaling(1)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Chain(features(3, lambda i, o: MLP(i, o, (8, 8), dropout=0.5)), scaling)

    units = Units.columns([0.0] * 3, as_they_are=[1])
    units.fit(torch.tensor([3.0, 9.0, 1.0]), torch.tensor([4.0, 9.0, 0.25]))
    return Mixture(units, [chain() for _ in range(members)], PartPrior(prior(1), part)).double().eval()


def members(flow: Mixture) -> list[Flow]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [Flow(flow.units, chain, flow.prior).eval() for chain in flow.chains]


def test_the_density_of_a_code_has_no_log_det_and_is_the_mean_over_the_flows():
    flow, y = plain(), torch.randn(5, 2, generator=torch.Generator().manual_seed(0)).double()
    each = []
    for one in members(flow):
        each.append(one.log_density(y) - torch.linalg.slogdet(jacobian(one.chain, y))[1])
        torch.testing.assert_close(one.code_density(y), each[-1])
    torch.testing.assert_close(flow.code_density(y), torch.stack(each).mean(0))
    torch.testing.assert_close(lower(flow, torch.float64).code_density(y), flow.code_density(y))


CONDITIONS = torch.tensor([[0.5, 0.0], [-4.0, 2.0], [math.nan, 1.0], [3.0, math.nan]], dtype=torch.float64)


class TestDensity:
    @pytest.mark.parametrize("make", [plain, given])
    @pytest.mark.parametrize("lowered", [False, True])
    def test_is_the_mean_of_those_of_the_members(self, make, lowered: bool):
        flow = make()
        x = inputs("", 7, flow.dim)
        each = torch.stack([one.log_prob(x) for one in members(flow)])
        assert (each[0] - each[1]).abs().max() > 1e-3
        found = (lower(flow) if lowered else flow).log_prob(x)
        torch.testing.assert_close(found, each.exp().mean(0).log())

    @pytest.mark.parametrize("lowered", [False, True])
    def test_in_training_it_is_the_mean_of_the_logarithms(self, lowered: bool):
        """So each member learns as if it were alone; a lowered flow follows the mode of the plain one."""
        flow = plain()
        x = inputs("", 7, 2)
        logs = torch.stack([one.log_prob(x) for one in members(flow)])
        fast = lower(flow) if lowered else flow
        for training in (True, False, True):
            flow.train(training)
            expected = logs.mean(0) if training else logs.exp().mean(0).log()
            torch.testing.assert_close(fast.log_prob(x), expected)

    def test_a_member_gets_the_gradient_it_has_alone(self):
        flow, x = plain().train(), inputs("", 7, 2)
        found = torch.autograd.grad(flow(x).sum(), list(flow.chains[1].parameters()))
        alone = torch.autograd.grad(members(flow)[1](x).sum(), list(flow.chains[1].parameters()))
        for one, other in zip(found, alone, strict=True):
            torch.testing.assert_close(3 * one, other)

    @pytest.mark.parametrize("prior", [Gaussian, Logistic])
    @torch.no_grad()
    def test_integrates_to_one_for_every_condition(self, prior: type[Prior]):
        flow = given(3, prior)
        t = torch.linspace(-6, 6, 4001, dtype=torch.float64)
        for c in CONDITIONS:
            density = flow.log_prob(t.sinh()[:, None], given=c).exp()
            assert float(torch.trapezoid(density * t.cosh(), t)) == pytest.approx(1, abs=1e-5)

    @torch.no_grad()
    def test_of_the_plane_integrates_to_one(self):
        t = torch.linspace(-5, 5, 401, dtype=torch.float64)
        density = plain().log_prob(torch.cartesian_prod(t.sinh(), t.sinh())).exp().view(401, 401)
        mass = torch.trapezoid(torch.trapezoid(density * torch.outer(t.cosh(), t.cosh()), t), t)
        assert float(mass) == pytest.approx(1, abs=1e-4)

    def test_one_member_is_the_flow(self):
        flow, x = given(1), inputs("", 5, 3)
        torch.testing.assert_close(flow.log_prob(x), members(flow)[0].log_prob(x))

    @pytest.mark.parametrize("make", [plain, given])
    @pytest.mark.parametrize("lowered", [False, True])
    def test_the_ledger_sums_to_the_density(self, make, lowered: bool):
        flow = make()
        x = inputs("", 7, flow.dim)
        terms = (lower(flow) if lowered else flow).terms(x)
        assert list(terms) == ["standardise", "mixture"]
        torch.testing.assert_close(sum(terms.values()), flow.log_prob(x))


class TestDraws:
    def test_follow_the_density(self):
        flow = given()
        t = torch.linspace(-6, 6, 4001, dtype=torch.float64)
        for c in CONDITIONS:
            with torch.no_grad():
                density = flow.log_prob(t.sinh()[:, None], given=c).exp() * t.cosh()
            cdf = torch.cumulative_trapezoid(density, t)
            x = flow.sample(4000, given=c, generator=torch.Generator().manual_seed(1))[:, 0]
            share = np.interp(x.numpy(), t[1:].sinh().numpy(), cdf.numpy())
            assert stats.kstest(share, "uniform").pvalue > 0.005

    @pytest.mark.parametrize("lowered", [False, True])
    def test_the_generator_decides(self, lowered: bool):
        flow = plain()
        fast = lower(flow) if lowered else flow
        one, same, other = (fast.sample(50, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, flow.sample(50, generator=torch.Generator().manual_seed(1)))

    def test_a_row_comes_from_one_member(self):
        flow = plain()
        code = flow.draw_latent(200, generator=torch.Generator().manual_seed(0))
        x, again = flow.decode(code), flow.decode(code)
        assert torch.equal(x, again)
        each = torch.stack([one.decode(code[:, :2]) for one in members(flow)])
        of = (x == each).all(-1)
        assert torch.equal(of.sum(0), torch.ones(200, dtype=torch.long))
        assert (of.double().mean(1) - 1 / 3).abs().max() < 0.12

    @pytest.mark.parametrize("lowered", [False, True])
    def test_codes_have_a_density_and_one_number_more(self, lowered: bool):
        flow = lower(plain()) if lowered else plain()
        code = flow.draw_latent(50)
        assert code.shape == (50, flow.code_dim) == (50, 3)
        torch.testing.assert_close(flow.code_log_prob(code), torch.distributions.Normal(0, 1).log_prob(code).sum(1))
        with pytest.raises(ValueError, match="expected 3 features, got 2"):
            flow.decode(code[:, :2])

    def test_a_code_of_y_is_that_of_a_member_as_often_as_it_is_its(self):
        flow, n = plain(), 4000
        with torch.no_grad():
            y = flow.invert(flow.draw_latent(1)).expand(n, -1)
            code = flow.code_of(y, torch.Generator().manual_seed(0))
            torch.testing.assert_close(flow.invert(code), y)
            own = [Flow.log_density(one, y[:1]) for one in members(flow)]
        h = torch.stack([one.chain(y[:1])[0][0] for one in members(flow)])
        of = ((code[:, None, :2] - h).abs().amax(-1) < 1e-9).double().mean(0)
        torch.testing.assert_close(of, torch.cat(own).softmax(0), rtol=0, atol=0.035)

    def test_codes_of_draws_have_the_law_of_codes(self):
        flow = plain()
        with torch.no_grad():
            y = flow.invert(flow.draw_latent(4000, generator=torch.Generator().manual_seed(1)))
            code = flow.code_of(y, torch.Generator().manual_seed(2))
        for each in code.T:
            assert stats.kstest(each.numpy(), stats.norm.cdf).pvalue > 0.005

    def test_have_gradients(self):
        flow = plain()
        flow.rsample(60).square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in flow.parameters())


class TestParts:
    def test_latent_coordinates_are_refused(self):
        with pytest.raises(ValueError, match="a mixture of 3 flows has no latent coordinates"):
            plain().encode(torch.zeros(2, 2))

    def test_state_round_trip(self):
        one, other, x = plain(), plain(), inputs("", 5, 2)
        other.load_state_dict(one.state_dict())
        assert torch.equal(one.log_prob(x), other.log_prob(x))

    def test_constants_are_fitted_in_every_member(self):
        class Counted(DiagonalScaling):
            rows: Tensor

            def initialise(self, x: Tensor, context: Tensor | None = None) -> None:
                self.rows = x.clone()

        part = Partition([0], 2)
        chains = [Chain(Within(part, DiagonalScaling(1)), Within(part, Counted(1))) for _ in range(3)]
        for k, chain in enumerate(chains):
            next(iter(chain)).inner.s.data.fill_(float(k))
        flow = Mixture(Units.columns([0.0, 0.0]), chains, PartPrior(Gaussian(1), part)).double()
        rows = torch.randn(50, 2, dtype=torch.float64) + 5
        rows[::3, 0] = math.nan  # given cells may be missing
        flow.initialise(rows)
        standard = (rows[:, 1:] - rows[:, 1:].mean(0)) / rows[:, 1:].std(0, correction=0)
        for k, chain in enumerate(chains):
            torch.testing.assert_close(list(chain)[1].inner.rows, standard * math.exp(k))
