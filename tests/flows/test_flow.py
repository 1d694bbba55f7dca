"""Flows: density, sampling, context, ledger, and as distributions of torch (NICE eq. 1 and 2)."""

import math
import re
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.distributions import (
    AffineTransform,
    Categorical,
    Distribution,
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    TransformedDistribution,
    kl_divergence,
)
from zoo import LAWS, correlated, couplings, initialised, inputs, jacobian, randomised

from nicest.flows import (
    MLP,
    VAE,
    ZCA,
    Additive,
    Affine,
    Bijection,
    Chain,
    Coupling,
    DiagonalScaling,
    Elementwise,
    Flow,
    Gaussian,
    Logistic,
    OneHot,
    Partition,
    Prior,
    SinhArcsinh,
    TriangularAffine,
    Units,
    Within,
    moments,
    odd_even,
)

PRIORS = {"gaussian": Gaussian, "logistic": Logistic}
priors = pytest.mark.parametrize("prior", PRIORS)
laws = pytest.mark.parametrize("law", LAWS)


def make(dim: int, law: str = "affine", prior: str = "logistic", **options: int) -> Flow:
    """The paper's architecture with random parameters and a learned prior, in float64."""
    chain = Chain(*couplings(dim, LAWS[law], 4, **options), randomised(DiagonalScaling(dim)))
    return real(chain, randomised(PRIORS[prior](dim, learned=True)))


def real(chain: Bijection, prior: Prior) -> Flow:
    """A flow of real numbers as they are, in float64."""
    return Flow(Units.continuous(prior.dim, standardise=False), chain, prior).double()


def pixels(dim: int) -> Flow:
    """A flow of 256 grey levels on [-1, 1]."""
    whitening = initialised(ZCA(dim).double(), correlated(99, dim))
    chain = Chain(whitening, *couplings(dim, Affine(), 3))
    return Flow(Units.pixels(dim, 256, (-1.0, 1.0)), chain, Logistic(dim)).double()


class TestDensity:
    @laws
    @priors
    @pytest.mark.parametrize("dim", [2, 3, 17])
    def test_log_prob_is_prior_plus_log_det_of_the_jacobian(self, law: str, prior: str, dim: int):
        flow, x = make(dim, law, prior), inputs("", 3, dim)
        expected = flow.prior.log_prob(flow.encode(x)) + torch.linalg.slogdet(jacobian(flow.bijection, x)).logabsdet
        torch.testing.assert_close(flow.log_prob(x), expected, rtol=0, atol=1e-9)

    def test_scaled_logistic_is_scipys(self):
        flow, x = real(DiagonalScaling(2), Logistic(2)), inputs("", 9, 2)
        flow.bijection.s.data = torch.tensor([0.5, -1.0], dtype=torch.float64)
        expected = stats.logistic.logpdf(x.numpy(), scale=np.exp([-0.5, 1.0])).sum(1)
        np.testing.assert_allclose(flow.log_prob(x).detach(), expected, rtol=1e-12)

    def test_forward_is_log_prob(self):
        flow, x = make(3, context_dim=2), inputs("", 4, 3)
        context = torch.randn(4, 2, dtype=torch.float64)
        assert torch.equal(flow(x, context), flow.log_prob(x, context))

    @pytest.mark.parametrize("got", [1, 4, 6])
    def test_prior_of_another_size_is_refused(self, got: int):
        with pytest.raises(ValueError, match=f"5 dimensions.*got {got}"):
            Flow(Units.continuous(5), DiagonalScaling(5), Gaussian(got))

    def test_standardisation_keeps_the_units_of_the_data(self):
        """N(3, 2²) and N(-1, ½²), standardised: the density is that of the data, not of what the chain sees."""
        flow = Flow(Units.continuous(2), Chain(), Gaussian(2)).double()
        flow.units.fit(torch.tensor([3.0, -1.0]), torch.tensor([4.0, 0.25]))
        x = inputs("", 9, 2)
        expected = stats.norm.logpdf(x.numpy(), [3.0, -1.0], [2.0, 0.5]).sum(1)
        np.testing.assert_allclose(flow.log_prob(x), expected, rtol=1e-12)

    @pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 0, 3)])
    def test_leading_dimensions(self, shape: tuple[int, ...]):
        flow, n = make(5, context_dim=2), math.prod(shape)
        x, context = inputs("", n, 5), torch.randn(n, 2, dtype=torch.float64)
        found = flow.log_prob(x.view(*shape, 5), context.view(*shape, 2))
        torch.testing.assert_close(found, flow.log_prob(x, context).view(shape))
        torch.testing.assert_close(
            flow.log_prob(x.view(*shape, 5), context[:1].sum(0)),
            flow.log_prob(x, context[:1].sum(0).expand(n, 2)).view(shape),
        )
        with pytest.raises(ValueError, match="expected x of 5 numbers, got a scalar"):
            flow.log_prob(torch.tensor(1.0))


def test_an_array_is_refused_with_what_to_do():
    flow = Flow(Units.continuous(2), Chain(DiagonalScaling(2)), Gaussian(2))
    with pytest.raises(TypeError, match=r"expected a tensor, got ndarray: torch\.as_tensor"):
        flow.log_prob(np.zeros((3, 2)))


class TestLedger:
    @laws
    def test_terms_sum_to_log_prob(self, law: str):
        flow, x = make(5, law), inputs("", 4, 5)
        terms = flow.terms(x)
        assert list(terms) == [*(f"{k}_coupling" for k in range(4)), "4_diagonalscaling", "prior"]
        assert all(term.shape == (4,) for term in terms.values())
        torch.testing.assert_close(sum(terms.values()), flow.log_prob(x))

    def test_each_term_is_that_of_its_layer(self, monkeypatch):
        monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.full(shape, 0.5, dtype=torch.float64))
        flow, x = pixels(4), torch.randint(256, (3, 4))
        terms = flow.terms(x)
        assert list(terms) == ["dequantise", "interval", "0_zca", *(f"{k}_coupling" for k in range(1, 4)), "prior"]
        torch.testing.assert_close(terms["dequantise"], torch.full((3,), -4 * math.log(256), dtype=torch.float64))
        torch.testing.assert_close(terms["interval"], torch.full((3,), 4 * math.log(2), dtype=torch.float64))
        torch.testing.assert_close(terms["0_zca"], next(iter(flow.bijection)).log_det.expand(3))
        torch.testing.assert_close(terms["prior"], flow.prior.log_prob(flow.encode(x)))
        torch.testing.assert_close(sum(terms.values()), flow.log_prob(x))

    @pytest.mark.parametrize("name", ["prior", "standardise"])
    def test_a_layer_cannot_have_the_name_of_another_term(self, name: str):
        with pytest.raises(ValueError, match="'prior', or one of the units"):
            Flow(Units.continuous(3), Chain({name: DiagonalScaling(3)}), Gaussian(3)).terms(torch.zeros(2, 3))


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

    def test_generator_makes_sampling_reproducible(self):
        flow = make(3)
        one, same, other = (flow.sample(5, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)

    def test_temperature_zero_is_the_decoded_mode(self):
        flow = make(3)
        torch.testing.assert_close(flow.sample(2, temperature=0.0), flow.decode(flow.prior.mode.expand(2, 3)).detach())

    def test_sample_has_no_gradient_and_rsample_has(self):
        flow = make(3)
        assert not flow.sample(4).requires_grad
        flow.rsample(4).square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in flow.parameters())

    def test_gradient_of_rsample_by_hand(self):
        """x = e^-s (loc + scale e): dx/dloc = e^-s and dx/ds = -x."""
        flow = real(randomised(DiagonalScaling(3)), randomised(Logistic(3, learned=True)))
        scaling = flow.bijection
        x = flow.rsample(7)
        x.sum().backward()
        torch.testing.assert_close(flow.prior.loc.grad, 7 * scaling.sigma)
        torch.testing.assert_close(scaling.s.grad, -x.detach().sum(0))

    def test_context_steers_the_samples(self):
        flow, contexts = make(3, context_dim=2), torch.randn(2, 4, 2, dtype=torch.float64)
        one, two = (flow.sample(4, c, generator=torch.Generator().manual_seed(0)) for c in contexts)
        assert (one - two).abs().max() > 1e-3

    def test_a_flow_of_pixels_gives_whole_levels(self):
        x = pixels(4).sample(50)
        assert torch.equal(x, x.round())
        assert 0 <= x.min() <= x.max() <= 255


class TestNoise:
    def test_log_prob_is_the_density_of_the_noisy_levels_and_the_change_of_units(self):
        flow, x = pixels(4), torch.randint(256, (3, 4))
        middle = flow.log_density((x.double() + 0.5) / 128 - 1) + 4 * math.log(2 / 256)
        torch.testing.assert_close(flow.log_prob(x, noise=False), middle)
        assert torch.equal(flow.log_prob(x, noise=False), flow.log_prob(x, noise=False))
        assert (flow.log_prob(x) != flow.log_prob(x)).all()
        torch.testing.assert_close(flow.encode(x, noise=False), flow.bijection((x.double() + 0.5) / 128 - 1)[0])


class TestConstants:
    """What `initialise` fits before training."""

    @pytest.mark.parametrize("whitening", [ZCA, TriangularAffine])
    @pytest.mark.parametrize("nested", [False, True])
    def test_whitening_is_fitted_to_the_moments_of_the_noisy_data_wherever_it_stands(self, whitening, nested: bool):
        rows = torch.randint(9, (500, 3)) + torch.arange(500)[:, None] % 5
        layer, expected = whitening(3).double(), whitening(3).double()
        flow = Flow(Units.pixels(3, 17, (-1.0, 1.0)), Chain(Chain(layer)) if nested else layer, Gaussian(3)).double()
        flow.initialise(rows)
        mean, covariance = moments(rows)
        half = 2 / 17
        expected.fit_moments((mean + 0.5) * half - 1, (covariance + torch.eye(3, dtype=torch.float64) / 12) * half**2)
        for name, value in layer.state_dict().items():
            torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-9, atol=1e-9)

    def test_marginals_are_fitted_to_what_reaches_them(self):
        rows = correlated(400, 2).exp()
        flow = Flow(Units.continuous(2), Chain(Chain(SinhArcsinh(2))), Gaussian(2)).double()
        flow.initialise(rows)
        standardised = (rows - rows.mean(0)) / rows.std(0, correction=0)
        expected = initialised(SinhArcsinh(2).double(), standardised).state_dict()
        for name, value in flow.bijection.layers["0_chain"].layers["0_sinharcsinh"].state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("whitening", [ZCA, TriangularAffine])
    @pytest.mark.parametrize("inner", ["alone", "behind marginals", "behind a coupling"])
    def test_layers_within_are_fitted_to_the_part_that_reaches_them(self, whitening, inner: str):
        rows, part = correlated(600, 5).exp(), Partition([0, 3], 5)
        layer = whitening(3)
        given = Coupling(Partition([0], 3), Affine(), randomised(Given(1, 4)))
        before = {"alone": [], "behind marginals": [SinhArcsinh(3)], "behind a coupling": [given]}[inner]
        within = Within(part, Chain(*before, layer), randomised(Smooth(2, 3)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one coupling, of which nothing is asked
            flow = Flow(Units.continuous(5), Chain(ZCA(5), within, ZCA(5)), Gaussian(5)).double()
        flow.initialise(rows)
        first, _, last = flow.bijection
        y = first(flow.units.enter(rows))[0]
        y1, seen = part.split(y)
        context = within.m(y1, None)
        for each in within.inner:
            seen = each(seen, context)[0]
        for white in (seen, last(within(y)[0])[0]):
            assert white.mean(0).abs().max() < 1e-9
            torch.testing.assert_close(
                white.mT.cov(correction=0), torch.eye(white.shape[1]).double(), atol=1e-9, rtol=0
            )

    def test_layers_within_a_vae_are_fitted_to_what_the_encoder_gives(self):
        rows = correlated(400, 3)
        prior = Chain(ZCA(2))
        vae = VAE(Units.continuous(3), 2, randomised(Smooth(3, 4)), randomised(Smooth(2, 6)), prior=prior).double()
        vae.initialise(rows)
        y = vae.units.enter(rows.repeat(200, 1))
        z = vae.bijection[:2](torch.cat((y, torch.randn(len(y), 2).to(y)), 1))[0][:, 3:]
        torch.testing.assert_close(prior(z)[0].mT.cov(), torch.eye(2).double(), atol=0.2, rtol=0)

    def test_rows_far_from_zero_keep_their_digits_on_the_way_to_the_layers(self):
        """Whole seconds since 1970, say: in float32 they are multiples of 128."""
        rows = correlated(500, 2) + 1.6e9
        flow = Flow(Units.continuous(2), Chain(SinhArcsinh(2), ZCA(2)), Gaussian(2))
        flow.initialise(rows)
        y = flow.bijection(flow.units.enter(rows))[0].double()
        torch.testing.assert_close(y.mT.cov(correction=0), torch.eye(2).double(), rtol=0, atol=1e-4)


class Smooth(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


class Given(nn.Module):
    """A smooth network of x and of 3 numbers of context."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.both = Smooth(inputs + 3, outputs)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.both(torch.cat((x, context), -1))


class TestContext:
    """Flows of p(x | context)."""

    @staticmethod
    def of_one_target() -> Flow:
        """A conditional Gaussian: the context gives the log-scale and the shift."""
        layer = Elementwise(Affine(), 1, nn.Linear(2, 2))
        flow = Flow(Units.continuous(1), layer, Gaussian(1), nn.Tanh()).double()
        randomised(layer)
        flow.units.fit(torch.tensor([3.0]), torch.tensor([4.0]))
        return flow

    @torch.no_grad()
    def test_one_target_is_a_conditional_gaussian(self):
        flow = self.of_one_target()
        context, x = torch.tensor([0.5, 5.0], dtype=torch.float64), inputs("", 9, 1)
        log_scale, shift = flow.bijection.conditioner(context.tanh())
        scale = math.exp(-2 * math.tanh(float(log_scale) / 2))
        law = stats.norm(3 - 2 * scale * float(shift), 2 * scale)
        np.testing.assert_allclose(flow.log_prob(x, context).detach(), law.logpdf(x[:, 0]), rtol=1e-10)
        drawn = flow.sample(5000, context, generator=torch.Generator().manual_seed(1))
        assert stats.kstest(drawn[:, 0].numpy(), law.cdf).pvalue > 0.005

    def test_x_and_context_broadcast(self):
        flow, c, x = make(2, context_dim=2), inputs("", 6, 2), inputs("", 7, 2)[1:]
        rows = flow.log_prob(x, c)
        torch.testing.assert_close(flow.log_prob(x.view(2, 3, 2), c.view(2, 3, 2)), rows.view(2, 3))
        table = flow.log_prob(x[:, None], c)
        torch.testing.assert_close(table.diagonal(), rows)
        torch.testing.assert_close(flow.log_prob(x, c[0]), table[:, 0])

    def test_labels_are_embedded_as_unit_vectors(self):
        flow, x = make(3, context_dim=4), inputs("", 4, 3)
        labels = torch.tensor([[2], [0], [3], [2]])
        expected = flow.log_prob(x, torch.eye(4, dtype=torch.float64)[labels[:, 0]])
        flow.embedding = OneHot(4).double()
        for dtype in (torch.int64, torch.float64):
            torch.testing.assert_close(flow.log_prob(x, labels.to(dtype)), expected)
        torch.testing.assert_close(flow.decode(flow.encode(x, labels), labels), x)
        assert flow.sample(4, labels).shape == (4, 3)

    def test_initialise_gives_the_embedded_context_to_the_layers(self):
        class Seen(DiagonalScaling):
            def initialise(self, x: Tensor, context: Tensor | None = None) -> None:
                self.seen = context

        layer = Seen(1)
        flow = Flow(Units.continuous(1), Chain(layer), Gaussian(1), nn.Tanh()).double()
        context = inputs("", 50, 2)
        flow.initialise(inputs("", 50, 1), context)
        assert torch.equal(layer.seen, context.tanh())

    def test_a_missing_or_wrong_context_is_refused_in_a_line(self):
        x, c = inputs("", 4, 3), inputs("", 4, 2)
        for call, words in [
            (lambda: make(3, context_dim=2).log_prob(x), "a context of 2 numbers, got none"),
            (lambda: make(3).log_prob(x, c), "a context of 0 numbers, got 2"),
            (lambda: make(3, context_dim=2).sample(3, c), "one for each of 3 draws; got (4,)"),
            (lambda: self.of_one_target().log_prob(x[:, :1]), "Elementwise: expected a context, got none"),
        ]:
            with pytest.raises(ValueError, match=re.escape(words)) as refused:
                call()
            assert "\n" not in str(refused.value)


class TestDistribution:
    @pytest.mark.parametrize("shape", [(), (7,), (2, 3), (0,), (2, 0)])
    def test_shapes(self, shape: tuple[int, ...]):
        p = make(5).given()
        assert (p.event_shape, p.batch_shape, p.has_rsample) == ((5,), (), True)
        assert p.sample(shape).shape == p.rsample(torch.Size(shape)).shape == (*shape, 5)
        if 0 not in shape:  # torch checks no values without any
            assert p.log_prob(p.sample(shape)).shape == shape

    @pytest.mark.parametrize("value", [torch.zeros(4), torch.zeros(2, 1), torch.zeros(()), torch.full((5,), math.nan)])
    @pytest.mark.parametrize("validate_by_default", [True, False])
    def test_wrong_shapes_and_nan_are_refused_always(self, value: Tensor, validate_by_default: bool):
        Distribution.set_default_validate_args(validate_by_default)  # zuko turns it off for everybody
        try:
            with pytest.raises(ValueError, match=r"shape|support"):
                make(5).given().log_prob(value)
        finally:
            Distribution.set_default_validate_args(True)

    @pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3)])
    def test_the_batch_shape_is_that_of_the_context(self, batch: tuple[int, ...]):
        c = torch.randn(*batch, 2, dtype=torch.float64)
        flow = make(5, context_dim=2)
        p = flow.given(c)
        assert (p.batch_shape, p.event_shape) == (batch, (5,))
        x = p.sample((4,))
        assert x.shape == p.rsample((4,)).shape == (4, *batch, 5)
        assert p.sample().shape == (*batch, 5)
        rows = c.expand(4, *batch, 2).reshape(-1, 2)
        expected = flow.log_prob(x.reshape(-1, 5), rows).view(4, *batch)
        torch.testing.assert_close(p.log_prob(x), expected)
        torch.testing.assert_close(p.log_prob(x[0]), expected[0])
        if batch:  # one x for all contexts
            one = x[..., :1, :]
            torch.testing.assert_close(p.log_prob(one), p.log_prob(one.expand(x.shape)))
        torch.manual_seed(1)
        x = p.sample((4,))
        torch.manual_seed(1)
        assert torch.equal(x.reshape(-1, 5), flow.sample(len(rows), rows))

    def test_expand(self):
        flow, x = make(5), inputs("", 6, 5).view(2, 3, 5)
        assert isinstance(flow.given(), Distribution)
        p = flow.given().expand((2, 3))
        assert (p.batch_shape, p.sample((4,)).shape) == ((2, 3), (4, 2, 3, 5))
        torch.testing.assert_close(p.log_prob(x), flow.log_prob(x))
        torch.testing.assert_close(p.log_prob(x[0, 0]), flow.log_prob(x[0, 0]).expand(2, 3))
        assert not torch.equal(p.sample()[0, 0], p.sample()[0, 1])  # draws, not one draw repeated
        given = make(2, context_dim=2).given(torch.randn(3, 2))
        assert given.expand((4, 3)).batch_shape == (4, 3)
        with pytest.raises(RuntimeError, match="expand"):
            given.expand((4,))

    def test_is_a_component_of_a_mixture(self):
        """p(x) = Σ_k w_k p(x | c_k): its density, and its samples by their mean."""
        flow = make(2, context_dim=2)
        c, weights = torch.randn(3, 2, dtype=torch.float64), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
        mixture = MixtureSameFamily(Categorical(weights), flow.given(c))
        x = mixture.sample((4,))
        assert x.shape == (4, 2)
        expected = sum(w * flow.log_prob(x, each).exp() for w, each in zip(weights, c, strict=True)).log()
        torch.testing.assert_close(mixture.log_prob(x), expected)
        means = torch.stack([flow.sample(20_000, each).median(0).values for each in c])
        plain = MixtureSameFamily(Categorical(weights), make(2).given().expand((3,)))
        assert plain.sample((4,)).shape == (4, 2)
        one = MixtureSameFamily(Categorical(torch.eye(3).double()[1]), flow.given(c))
        torch.testing.assert_close(one.sample((20_000,)).median(0).values, means[1], rtol=0.1, atol=0.1)

    def test_is_the_base_of_a_transformed_and_of_an_independent_distribution(self):
        flow, x = make(3), inputs("", 6, 3).view(2, 3, 3)
        p = flow.given()
        moved = TransformedDistribution(p, [AffineTransform(1.0, 2.0, event_dim=1)])
        assert (moved.event_shape, moved.batch_shape, moved.has_rsample) == ((3,), (), True)
        torch.testing.assert_close(moved.log_prob(x), flow.log_prob((x - 1) / 2) - 3 * math.log(2))
        assert moved.expand((4,)).sample((2,)).shape == (2, 4, 3)
        rows = Independent(p.expand((2, 3)), 1)
        assert (rows.event_shape, rows.batch_shape, rows.support.event_dim) == ((3, 3), (2,), 2)
        torch.testing.assert_close(rows.log_prob(x), flow.log_prob(x).sum(-1))
        assert rows.rsample((5,)).shape == (5, 2, 3, 3)
        assert bool(rows.support.check(rows.sample()).all())

    def test_the_divergence_by_samples_is_that_of_the_closed_form(self):
        """KL(p | q) = E_p [log p - log q], of a flow that is a Gaussian."""
        layer = TriangularAffine(3).double()
        with torch.no_grad():
            for each in layer.parameters():
                each.normal_(0, 0.5)
        flow = real(Chain(layer), Gaussian(3))
        inverse = torch.linalg.inv(layer.lower.detach())
        p, q = flow.given(), MultivariateNormal(torch.zeros(3).double(), torch.eye(3).double())
        exact = kl_divergence(MultivariateNormal(-inverse @ layer.b.detach(), scale_tril=inverse), q)
        x = p.sample((40_000,))
        gaps = (p.log_prob(x) - q.log_prob(x)).detach()
        assert float(gaps.mean()) == pytest.approx(float(exact), abs=5 * float(gaps.std()) / 200)

    def test_samples_of_a_table_lie_in_its_support_and_what_it_never_gives_does_not(self):
        rows = torch.stack((torch.randn(80), torch.randint(0, 5, (80,)), torch.randint(0, 3, (80,))), 1).double()
        flow = Flow(Units.columns([0, 1, 1]), DiagonalScaling(3), Gaussian(3)).double()
        flow.initialise(rows)
        p = flow.given()
        assert bool(p.support.check(p.sample((500,))).all())
        assert bool(p.support.check(rows).all())
        assert (p.support.event_dim, p.support.is_discrete) == (1, False)
        for row in ([0.3, 1.5, 1], [math.nan, 1, 1], [math.inf, 1, 1]):
            with pytest.raises(ValueError, match="support"):
                p.log_prob(torch.tensor(row).double())

    def test_of_pixels_has_whole_levels_as_support_and_no_rsample(self):
        p = pixels(4).given()
        assert p.log_prob(p.sample((3,)).to(torch.uint8)).shape == (3,)
        for value in (-1.0, 0.5, 256.0):
            with pytest.raises(ValueError, match="support"):
                p.log_prob(torch.full((4,), value))
        assert not p.has_rsample
        with pytest.raises(NotImplementedError, match="use sample"):
            p.rsample()


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
        flow = real(Chain(*layers, DiagonalScaling(2)), prior(2))
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


def test_a_chain_calls_what_a_subclass_of_a_coupling_defines():
    class Doubled(Coupling):
        def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            y, log_det = super().forward(x, context)
            return 2 * y, log_det + x.shape[-1] * math.log(2)

        def inverse(self, y: torch.Tensor, context: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            x, log_det = super().inverse(y / 2, context)
            return x, log_det - y.shape[-1] * math.log(2)

    layers = [Doubled(odd_even(4), Additive(), MLP(2, 2, (5,))) for _ in range(3)]
    chain, x = Chain(*layers), torch.randn(3, 4)
    y, log_det = chain(x)
    torch.testing.assert_close(log_det, torch.full((3,), 12 * math.log(2)))
    torch.testing.assert_close(chain.inverse(y)[0], x)
