"""The model: density, sampling, ledger, and its clothes of torch.distributions (NICE eq. 1 and 2)."""

import copy
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.distributions import Distribution
from zoo import LAWS, correlated, coupling, couplings, inputs, jacobian, randomised, rescale

from nicest.flows import (
    MLP,
    ZCA,
    Additive,
    Affine,
    Chain,
    Coupling,
    Dequantize,
    DiagonalScaling,
    Flow,
    Gaussian,
    Logistic,
    Logit,
    Rescale,
    checkerboard,
    halves,
    odd_even,
)

PRIORS = {"gaussian": Gaussian, "logistic": Logistic}
priors = pytest.mark.parametrize("prior", PRIORS)
laws = pytest.mark.parametrize("law", LAWS)


def make(dim: int, law: str = "affine", prior: str = "logistic", **options: int) -> Flow:
    """The paper's architecture with random parameters and a learned prior, in float64."""
    chain = Chain(*couplings(dim, LAWS[law], 4, **options), randomised(DiagonalScaling(dim)))
    return Flow(chain, randomised(PRIORS[prior](dim, learned=True)))


def pixels(dim: int) -> Flow:
    """A flow of 256 grey levels, with every constant a layer."""
    first = Chain(Dequantize(), Rescale(-1.0, 2.0, dim), ZCA(dim).double().fit(correlated(99, dim)))
    return Flow(Chain(*first, *couplings(dim, Affine(), 3)), Logistic(dim)).double()


class TestDensity:
    @laws
    @priors
    @pytest.mark.parametrize("dim", [2, 3, 17])
    def test_log_prob_is_prior_plus_log_det_of_the_jacobian(self, law: str, prior: str, dim: int):
        flow, x = make(dim, law, prior), inputs("", 3, dim)
        expected = flow.prior.log_prob(flow.encode(x)) + torch.linalg.slogdet(jacobian(flow.chain, x)).logabsdet
        torch.testing.assert_close(flow.log_prob(x), expected, rtol=0, atol=1e-9)

    def test_standard_gaussian_by_hand(self):
        flow, x = Flow(Chain(), Gaussian(3)), torch.tensor([[1.0, 2.0, 3.0]])
        assert flow.log_prob(x).item() == pytest.approx(-0.5 * (14 + 3 * math.log(2 * math.pi)))

    def test_scaled_logistic_is_scipys(self):
        flow, x = Flow(DiagonalScaling(2).double(), Logistic(2).double()), inputs("", 9, 2)
        flow.chain.layers["0_diagonalscaling"].s.data = torch.tensor([0.5, -1.0], dtype=torch.float64)
        expected = stats.logistic.logpdf(x.numpy(), scale=np.exp([-0.5, 1.0])).sum(1)
        np.testing.assert_allclose(flow.log_prob(x).detach(), expected, rtol=1e-12)

    def test_forward_is_log_prob(self):
        flow, x = make(3, context_dim=2), inputs("", 4, 3)
        context = torch.randn(4, 2, dtype=torch.float64)
        assert torch.equal(flow(x, context), flow.log_prob(x, context))

    @pytest.mark.parametrize("law", ["additive", "affine", "multiplicative"])
    @priors
    def test_density_of_the_plane_integrates_to_one(self, law: str, prior: str):
        part, size = odd_even(2), LAWS[law].size
        smooth = [nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, size)) for _ in range(3)]
        networks = [randomised(network) for network in smooth]
        layers = [Coupling(part if k % 2 else part.swap(), LAWS[law], m) for k, m in enumerate(networks)]
        flow = Flow(Chain(*layers, randomised(DiagonalScaling(2))), randomised(PRIORS[prior](2, learned=True)))
        t = torch.linspace(-6, 6, 601, dtype=torch.float64)  # trapezia in x = sinh t: dense inside, far out, smooth
        with torch.no_grad():
            log_density = flow.log_prob(torch.cartesian_prod(t.sinh(), t.sinh())).view(601, 601)
        mass = (log_density.exp() * torch.outer(t.cosh(), t.cosh())).sum() * (t[1] - t[0]) ** 2
        assert mass.item() == pytest.approx(1, abs=1e-6)

    def test_interval_changes_the_log_likelihood_by_d_ln_2(self):
        symmetric, x = make(6), torch.rand(5, 6, dtype=torch.float64)
        unit = Flow(Chain(Rescale(-1.0, 2.0, 6).double(), *symmetric.chain), symmetric.prior)
        difference = unit.log_prob(x) - symmetric.log_prob(2 * x - 1)
        torch.testing.assert_close(difference, torch.full_like(difference, 6 * math.log(2)), rtol=1e-13, atol=0)

    def test_prior_of_another_dimension_is_refused(self):
        flow = Flow(rescale(5), Gaussian(4).double())
        with pytest.raises((ValueError, RuntimeError), match=r"4.*5|5.*4"):
            flow.log_prob(inputs("", 3, 5))

    def test_empty_batch(self):
        assert make(3).log_prob(inputs("", 0, 3)).shape == (0,)

    def test_state_dict_round_trip_is_exact(self):
        flow, other, x = make(5), make(5), inputs("", 4, 5)
        assert not torch.equal(other.log_prob(x), flow.log_prob(x))
        other.load_state_dict(flow.state_dict())
        assert torch.equal(other.log_prob(x), flow.log_prob(x))
        assert torch.equal(copy.deepcopy(flow).log_prob(x), flow.log_prob(x))


class TestLedger:
    @laws
    def test_terms_sum_to_log_prob(self, law: str):
        flow, x = make(5, law), inputs("", 4, 5)
        terms = flow.terms(x)
        assert list(terms) == [*(f"{k}_coupling" for k in range(4)), "4_diagonalscaling", "prior"]
        assert all(term.shape == (4,) for term in terms.values())
        torch.testing.assert_close(sum(terms.values()), flow.log_prob(x))

    def test_each_term_is_that_of_its_layer(self, monkeypatch):
        monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.full(shape, 0.5, **options))
        flow, x = pixels(4), torch.randint(256, (3, 4))
        terms = flow.terms(x)
        torch.testing.assert_close(terms["0_dequantize"], torch.full((3,), -4 * math.log(256), dtype=torch.float64))
        torch.testing.assert_close(terms["1_rescale"], torch.full((3,), 4 * math.log(2), dtype=torch.float64))
        torch.testing.assert_close(terms["2_zca"], list(flow.chain)[2].log_det.expand(3))
        torch.testing.assert_close(terms["prior"], flow.prior.log_prob(flow.encode(x)))
        torch.testing.assert_close(sum(terms.values()), flow.log_prob(x))

    def test_context_reaches_the_terms(self):
        flow, x = make(5, context_dim=2), inputs("", 4, 5)
        context = torch.randn(4, 2, dtype=torch.float64)
        torch.testing.assert_close(sum(flow.terms(x, context).values()), flow.log_prob(x, context))

    def test_a_layer_cannot_take_the_place_of_the_prior(self):
        with pytest.raises(ValueError, match="prior"):
            Flow(Chain({"prior": Rescale(0.0, 2.0, 3)}), Gaussian(3)).terms(torch.zeros(2, 3))


class TestSampling:
    @laws
    @pytest.mark.parametrize("context_dim", [0, 2])
    def test_decode_undoes_encode(self, law: str, context_dim: int):
        flow, x = make(5, law, context_dim=context_dim), inputs("", 4, 5)
        context = (torch.randn(4, context_dim, dtype=torch.float64),) if context_dim else ()
        assert (flow.decode(flow.encode(x, *context), *context) - x).abs().max() < 1e-10
        assert (flow.encode(flow.decode(x, *context), *context) - x).abs().max() < 1e-10

    @priors
    def test_samples_come_from_the_prior_that_was_trained(self, prior: str):
        flow = make(3, prior=prior)
        h = flow.encode(flow.sample(5000, generator=torch.Generator().manual_seed(1))).detach().numpy()
        loc, scale = flow.prior.loc.detach().numpy(), flow.prior.log_scale.exp().detach().numpy()
        law = {"gaussian": stats.norm, "logistic": stats.logistic}[prior]
        for d in range(3):
            assert stats.kstest(h[:, d], law.cdf, args=(loc[d], scale[d])).pvalue > 0.005

    def test_samples_follow_the_density(self):
        flow = Flow(randomised(DiagonalScaling(2)), randomised(Logistic(2, learned=True)))
        x, sigma = flow.sample(10_000).numpy(), next(iter(flow.chain)).sigma
        loc, scale = (sigma * flow.prior.loc).detach(), (sigma * flow.prior.log_scale.exp()).detach()
        for d in range(2):
            assert stats.kstest(x[:, d], stats.logistic.cdf, args=(loc[d].item(), scale[d].item())).pvalue > 0.005

    def test_generator_makes_sampling_reproducible(self):
        flow = make(3)
        one, same, other = (flow.sample(5, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)
        x, _ = flow.sample_and_log_prob(5, generator=torch.Generator().manual_seed(1))
        assert torch.equal(x, one)

    def test_temperature_zero_is_the_decoded_mode(self):
        flow = make(3)
        torch.testing.assert_close(flow.sample(2, temperature=0.0), flow.decode(flow.prior.mode.expand(2, 3)).detach())

    def test_temperature_reaches_the_prior(self):
        flow = Flow(Chain(), Gaussian(3))
        hot, cold = (flow.sample(4, temperature=t, generator=torch.Generator().manual_seed(1)) for t in (1.0, 0.5))
        torch.testing.assert_close(cold, hot / 2)

    def test_sample_has_no_gradient_and_rsample_has(self):
        flow = make(3)
        assert not flow.sample(4).requires_grad
        flow.rsample(4).square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in flow.parameters())

    def test_gradient_of_rsample_by_hand(self):
        """x = e^-s (loc + scale e): dx/dloc = e^-s and dx/ds = -x."""
        flow = Flow(randomised(DiagonalScaling(3)), randomised(Logistic(3, learned=True)))
        scaling = next(iter(flow.chain))
        x = flow.rsample(7)
        x.sum().backward()
        torch.testing.assert_close(flow.prior.loc.grad, 7 * scaling.sigma)
        torch.testing.assert_close(scaling.s.grad, -x.detach().sum(0))

    @pytest.mark.parametrize("context_dim", [0, 2])
    def test_sample_and_log_prob_agrees_with_log_prob(self, context_dim: int):
        flow = make(5, context_dim=context_dim)
        context = (torch.randn(6, context_dim, dtype=torch.float64),) if context_dim else ()
        x, log_prob = flow.sample_and_log_prob(6, *context)
        assert x.shape == (6, 5)
        assert x.requires_grad
        torch.testing.assert_close(log_prob, flow.log_prob(x, *context), rtol=0, atol=1e-9)

    def test_context_steers_the_samples(self):
        flow, contexts = make(3, context_dim=2), torch.randn(2, 4, 2, dtype=torch.float64)
        one, two = (flow.sample(4, c, generator=torch.Generator().manual_seed(0)) for c in contexts)
        assert (one - two).abs().max() > 1e-3

    def test_zero_samples(self):
        assert make(3).sample(0).shape == (0, 3)

    def test_a_flow_of_pixels_gives_whole_levels(self):
        x = pixels(4).sample(50)
        assert torch.equal(x, x.round())
        assert 0 <= x.min() <= x.max() <= 255


class TestContinuous:
    def test_is_the_same_model_after_the_noise(self, monkeypatch):
        monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.full(shape, 0.25, **options))
        flow, x = pixels(4), torch.randint(256, (3, 4))
        expected = flow.continuous().log_prob((x.double() + 0.25) / 256) - 4 * math.log(256)
        torch.testing.assert_close(flow.log_prob(x), expected)

    def test_shares_weights_and_names(self):
        flow = pixels(4)
        continuous = flow.continuous()
        assert list(continuous.chain.layers) == list(flow.chain.layers)[1:]
        assert all(a is b for a, b in zip(flow.parameters(), continuous.parameters(), strict=True))

    def test_of_a_continuous_flow_is_itself(self):
        flow, empty = make(3), Flow(Chain(), Gaussian(3))
        assert flow.continuous() is flow
        assert empty.continuous() is empty

    def test_finds_the_dequantisation_in_a_nested_chain(self):
        flow = Flow(Chain(Chain(Dequantize(), Rescale(-1.0, 2.0, 4)), DiagonalScaling(4)), Logistic(4))
        assert not any(isinstance(module, Dequantize) for module in flow.continuous().modules())
        assert not flow.to_distribution().has_rsample


class TestDistribution:
    @pytest.mark.parametrize("shape", [(), (7,), (2, 3)])
    def test_shapes(self, shape: tuple[int, ...]):
        p = make(5).to_distribution()
        assert (p.event_shape, p.batch_shape, p.has_rsample) == ((5,), (), True)
        assert p.sample(shape).shape == p.rsample(torch.Size(shape)).shape == (*shape, 5)
        assert p.log_prob(p.sample(shape)).shape == shape

    @pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
    def test_no_samples_have_a_shape_too(self, shape: tuple[int, ...]):
        p = make(5).to_distribution()
        assert p.sample(shape).shape == p.rsample(shape).shape == (*shape, 5)

    def test_log_prob_is_that_of_the_flow(self):
        flow, x = make(5), inputs("", 6, 5)
        assert isinstance(flow.to_distribution(), Distribution)
        torch.testing.assert_close(flow.to_distribution().log_prob(x.view(2, 3, 5)), flow.log_prob(x).view(2, 3))

    def test_sample_is_that_of_the_flow_and_has_no_gradient(self):
        flow = make(5)
        torch.manual_seed(1)
        expected = flow.sample(4)
        torch.manual_seed(1)
        sample = flow.to_distribution().sample((2, 2))
        assert torch.equal(sample.view(4, 5), expected)
        assert not sample.requires_grad

    def test_rsample_has_gradients(self):
        flow = make(5)
        flow.to_distribution().rsample((4,)).square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in flow.prior.parameters())

    @pytest.mark.parametrize("value", [torch.zeros(4), torch.zeros(2, 1), torch.zeros(()), torch.full((5,), math.nan)])
    @pytest.mark.parametrize("validate_by_default", [True, False])
    def test_wrong_shapes_and_nan_are_refused_always(self, value: Tensor, validate_by_default: bool):
        Distribution.set_default_validate_args(validate_by_default)  # zuko turns it off for everybody
        try:
            with pytest.raises(ValueError, match=r"shape|support"):
                make(5).to_distribution().log_prob(value)
        finally:
            Distribution.set_default_validate_args(True)

    @pytest.mark.parametrize("rows", [1, 6])
    def test_context(self, rows: int):
        flow, x, context = make(5, context_dim=2), inputs("", 6, 5), torch.randn(rows, 2, dtype=torch.float64)
        p = flow.to_distribution(context)
        torch.testing.assert_close(p.log_prob(x), flow.log_prob(x, context.expand(6, 2)))
        torch.manual_seed(1)
        sample = p.sample((6,))
        torch.manual_seed(1)
        assert torch.equal(sample, flow.sample(6, context.expand(6, 2)))

    def test_of_pixels_has_whole_levels_as_support_and_no_rsample(self):
        p = pixels(4).to_distribution()
        assert p.log_prob(p.sample((3,)).to(torch.uint8)).shape == (3,)
        for value in (-1.0, 0.5, 256.0):
            with pytest.raises(ValueError, match="support"):
                p.log_prob(torch.full((4,), value))
        assert not p.has_rsample
        with pytest.raises(NotImplementedError, match="continuous"):
            p.rsample()
        assert pixels(4).continuous().to_distribution().rsample((2,)).requires_grad


class TestMaximumLikelihood:
    """A correct density never beats the truth on held-out data; a missing term of the log-det would."""

    @staticmethod
    def banana(n: int) -> tuple[Tensor, Tensor]:
        """Rows (a, ½a² + ½e) of standard normal a and e, with their log-density."""
        a, e = torch.randn(2, n, dtype=torch.float64)
        x = torch.stack((a, a.square() / 2 + e / 2), 1)
        return x, -0.5 * (a.square() + e.square()) - math.log(2 * math.pi) + math.log(2)

    @pytest.mark.parametrize(("law", "prior"), [("additive", Gaussian), ("affine", Logistic)])
    def test_fitted_flow_approaches_the_truth_from_below(self, law: str, prior: type):
        part, size = odd_even(2), LAWS[law].size
        layers = [Coupling(part if k % 2 else part.swap(), LAWS[law], MLP(1, size, (32, 32))) for k in range(4)]
        flow = Flow(Chain(*layers, DiagonalScaling(2)), prior(2)).double()
        optimiser = torch.optim.Adam(flow.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 400)
        for _ in range(400):
            optimiser.zero_grad()
            loss = -flow(self.banana(256)[0]).mean()
            loss.backward()
            optimiser.step()
            schedule.step()
        x, truth = self.banana(20_000)
        gap = truth - flow(x).detach()
        error = gap.std() / math.sqrt(len(gap))
        assert gap.mean() > -3 * error
        assert gap.mean() < 0.05


def test_logit_flow_is_a_density_on_the_interval():
    flow = Flow(Chain(Logit(0.0), *(coupling(odd_even(2), Additive()) for _ in range(3))), Logistic(2)).double()
    line = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    with torch.no_grad():
        assert flow.log_prob(torch.cartesian_prod(line, line)).exp().mean().item() == pytest.approx(1, abs=1e-3)


def test_a_chain_calls_what_a_subclass_of_a_coupling_defines():
    class Doubled(Coupling):
        def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            y, log_det = super().forward(x, context)
            return 2 * y, log_det + x.shape[-1] * math.log(2)

        def inverse(self, y: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
            return super().inverse(y / 2, context)

    layers = [Doubled(odd_even(4), Additive(), MLP(2, 2, (5,))) for _ in range(3)]
    chain, x = Chain(*layers), torch.randn(3, 4)
    y, log_det = chain(x)
    torch.testing.assert_close(log_det, torch.full((3,), 12 * math.log(2)))
    torch.testing.assert_close(chain.inverse(y), x)


def test_couplings_of_several_partitions_in_a_row_agree_with_their_own_layers():
    torch.manual_seed(0)
    partitions = [odd_even(8), odd_even(8).swap(), halves(8), checkerboard(2, 4), checkerboard(2, 4), halves(8).swap()]
    layers = [Coupling(each, Affine(), MLP(4, 8, (5,))).double() for each in partitions]
    x = torch.randn(3, 8, dtype=torch.float64)
    expected, total = x, torch.zeros(3, dtype=torch.float64)
    for layer in layers:
        expected, log_det = layer(expected)
        total = total + log_det
    y, log_det = Chain(*layers)(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(log_det, total)
    torch.testing.assert_close(Chain(*layers).inverse(y), x)
