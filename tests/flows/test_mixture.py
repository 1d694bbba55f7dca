"""Mixtures of densities (Lakshminarayanan et al. 2017); that they integrate to 1 is in `test_normalised.py`."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from zoo import couplings, inputs, randomised

from nicest.fast import lower
from nicest.flows import (
    MLP,
    VAE,
    Affine,
    AffineSpline,
    Chain,
    DiagonalScaling,
    Elementwise,
    Flow,
    Gaussian,
    Logistic,
    Mixture,
    Units,
    members,
)
from nicest.inference.engine import Engine

WEIGHTS = (0.5, 0.2, 0.3)


def plain() -> Mixture:
    """A mixture of three flows of the plane with the same units and prior."""
    units, prior = Units.continuous(2), Gaussian(2)
    units.fit(torch.tensor([1.0, -2.0]), torch.tensor([4.0, 0.5]))
    chains = [Chain(*couplings(2, Affine(), 3), randomised(DiagonalScaling(2))) for _ in range(3)]
    return Mixture([Flow(units, chain, prior) for chain in chains], WEIGHTS).double().eval()


def conditional() -> Mixture:
    """A mixture of p(x | c), c two numbers."""
    law = AffineSpline(bins=4)
    units, embedding = Units.continuous(1), nn.Tanh()
    units.fit(torch.tensor([1.0]), torch.tensor([0.25]))

    def chain() -> Chain:
        network = MLP(2, law.size, (8, 8), dropout=0.5)
        return Chain(randomised(Elementwise(law, 1, network), std=0.1), randomised(DiagonalScaling(1)))

    return Mixture([Flow(units, chain(), Logistic(1), embedding) for _ in range(3)], WEIGHTS).double().eval()


def separate() -> Mixture:
    """A mixture of flows whose units differ."""
    flows = [Flow(Units.continuous(1), randomised(DiagonalScaling(1)), prior(1)) for prior in (Gaussian, Logistic)]
    flows[1].units.fit(torch.tensor([1.0]), torch.tensor([9.0]))
    return Mixture(flows, (0.25, 0.75)).double().eval()


CONTEXTS = torch.tensor([[0.5, 0.0], [-4.0, 2.0], [0.1, 1.0], [3.0, -1.0]], dtype=torch.float64)
KINDS = {"plain": plain, "conditional": conditional, "separate units": separate}
kinds = pytest.mark.parametrize("kind", KINDS)
lowered_too = pytest.mark.parametrize("lowered", [False, True])


def example(kind: str) -> tuple[Mixture, Tensor, Tensor | None]:
    """Return a mixture, with rows and their context."""
    mixture = KINDS[kind]()
    context = CONTEXTS.repeat(2, 1) if kind == "conditional" else None
    return mixture, inputs("", 8, mixture.dim), context


class TestDensity:
    @kinds
    @lowered_too
    def test_is_the_weighted_mean_of_those_of_the_members(self, kind: str, lowered: bool):
        mixture, x, context = example(kind)
        each = torch.stack([one.log_prob(x, context) for one in members(mixture)])
        assert (each[0] - each[1]).abs().max() > 1e-3
        expected = (mixture.weights[:, None] * each.exp()).sum(0).log()
        torch.testing.assert_close((lower(mixture) if lowered else mixture).log_prob(x, context), expected)

    @pytest.mark.parametrize("kind", ["plain", "separate units"])
    @lowered_too
    def test_the_objective_is_the_mean_of_those_of_the_members_in_both_modes(self, kind: str, lowered: bool):
        """So each member learns as if it were alone, and `log_prob` is the mixture in training too."""
        mixture, x, _ = example(kind)
        each = torch.stack([one.log_prob(x) for one in members(mixture)])
        fast = lower(mixture) if lowered else mixture
        for training in (True, False):
            mixture.train(training)
            torch.testing.assert_close(fast(x), each.mean(0))
            torch.testing.assert_close(fast.log_prob(x), (mixture.weights[:, None] * each.exp()).sum(0).log())

    def test_a_member_gets_the_gradient_it_has_alone(self):
        mixture, x = plain().train(), inputs("", 7, 2)
        one = mixture.members[1]
        parameters = list(one.parameters())
        found = torch.autograd.grad(mixture(x).sum(), parameters)
        alone = torch.autograd.grad(one(x).sum(), parameters)
        for ours, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(3 * ours, expected)

    def test_members_without_trainable_parameters_are_left_out_of_the_objective(self):
        mixture, x = plain(), inputs("", 7, 2)
        mixture.members[0].requires_grad_(False)
        each = torch.stack([one(x) for one in members(mixture)])
        torch.testing.assert_close(mixture(x), each[1:].mean(0))
        mixture.requires_grad_(False)
        torch.testing.assert_close(mixture(x), each.mean(0))

    @pytest.mark.parametrize("kind", ["plain", "conditional"])
    @lowered_too
    def test_the_ledger_sums_to_the_density(self, kind: str, lowered: bool):
        mixture, x, context = example(kind)
        terms = (lower(mixture) if lowered else mixture).terms(x, context)
        assert list(terms) == ["standardise", "mixture"]
        torch.testing.assert_close(sum(terms.values()), mixture.log_prob(x, context))

    def test_any_densities_can_be_mixed(self):
        flow = Flow(Units.continuous(2, standardise=False), DiagonalScaling(2), Gaussian(2))
        vae = VAE(Units.continuous(2, standardise=False), 1, nn.Linear(2, 2), nn.Linear(1, 4))
        inner = Mixture([flow, flow])
        mixture, x = Mixture([flow, vae, inner], (0.5, 0.25, 0.25)), torch.randn(6, 2)
        found = mixture.log_prob(x, generator=torch.Generator().manual_seed(0)).exp()
        bound = vae.log_prob(x, generator=torch.Generator().manual_seed(0)).exp()
        torch.testing.assert_close(found, 0.75 * flow.log_prob(x).exp() + 0.25 * bound)
        assert mixture.sample(5).shape == (5, 2)
        with pytest.raises(ValueError, match="do not share units"):
            mixture.terms(x)

    @pytest.mark.parametrize("weights", [(0.5, 0.5), (0.5, 0.2, 0.2), (1.5, -0.5, 0.0)], ids=str)
    def test_other_weights_are_refused(self, weights: tuple[float, ...]):
        with pytest.raises(ValueError, match="expected 3 weights of sum 1"):
            Mixture(list(plain().members), weights)

    def test_members_of_several_dimensions_are_refused(self):
        flows = [Flow(Units.continuous(dim), DiagonalScaling(dim), Gaussian(dim)) for dim in (1, 2)]
        with pytest.raises(ValueError, match=r"members of one dimension, got \[1, 2\]"):
            Mixture(flows)


class TestDraws:
    @pytest.mark.parametrize("kind", ["conditional", "separate units"])
    def test_follow_the_density(self, kind: str):
        mixture = KINDS[kind]()
        t = torch.linspace(-6, 6, 4001, dtype=torch.float64)
        for context in CONTEXTS if kind == "conditional" else [None]:
            with torch.no_grad():
                density = mixture.log_prob(t.sinh()[:, None], context).exp() * t.cosh()
            x = mixture.sample(4000, context, generator=torch.Generator().manual_seed(1))
            cdf = np.interp(x[:, 0], t[1:].sinh(), torch.cumulative_trapezoid(density, t))
            assert stats.kstest(cdf, "uniform").pvalue > 0.005

    @lowered_too
    def test_the_generator_decides(self, lowered: bool):
        mixture = plain()
        fast = lower(mixture) if lowered else mixture
        one, same, other = (fast.sample(50, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, mixture.sample(50, generator=torch.Generator().manual_seed(1)))

    @torch.no_grad()
    def test_a_row_comes_from_one_member_as_often_as_its_weight(self):
        mixture = plain()
        latent = mixture.sample_latent(500, generator=torch.Generator().manual_seed(0))
        x = mixture.decode(latent)
        each = torch.stack([one.decode(latent[:, :2]) for one in members(mixture)])
        of = (x == each).all(-1)
        assert torch.equal(of.sum(0), torch.ones(500, dtype=torch.long))
        assert (of.double().mean(1) - mixture.weights).abs().max() < 0.08

    def test_have_gradients(self):
        mixture = plain()
        mixture.rsample(60).square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in mixture.parameters())


def test_every_member_is_initialised():
    class Seen(DiagonalScaling):
        rows: Tensor

        def initialise(self, x: Tensor, context: Tensor | None = None) -> None:
            self.rows = x.clone()

    units, chains = Units.continuous(1), [Chain(DiagonalScaling(1), Seen(1)) for _ in range(3)]
    for k, chain in enumerate(chains):
        chain[0].s.data.fill_(float(k))
    rows = torch.randn(50, 1, dtype=torch.float64) + 5
    Mixture([Flow(units, chain, Gaussian(1)) for chain in chains]).double().initialise(rows)
    standard = (rows - rows.mean(0)) / rows.std(0, correction=0)
    for k, chain in enumerate(chains):
        torch.testing.assert_close(chain[1].rows, standard * math.exp(k))


def test_members_with_different_priors_are_drawn_from_their_own():
    """N(-4, 1) and a logistic around 4, with weights 0.25 and 0.75."""
    units = Units.continuous(1, standardise=False)
    priors = Gaussian(1, learned=True), Logistic(1, learned=True)
    for prior, loc in zip(priors, (-4.0, 4.0), strict=True):
        prior.loc.data.fill_(loc)
    mixture = Mixture([Flow(units, Chain(), prior) for prior in priors], [0.25, 0.75]).double()
    drawn = mixture.sample(20_000, generator=torch.Generator().manual_seed(0))[:, 0].numpy()

    def cdf(x: np.ndarray) -> np.ndarray:
        return 0.25 * stats.norm.cdf(x, -4) + 0.75 * stats.logistic.cdf(x, 4)

    assert stats.kstest(drawn, cdf).pvalue > 0.005


def test_an_engine_scores_and_draws_a_mixture_of_pixels():
    units, prior = Units.pixels(2, 4), Gaussian(2)
    chains = [randomised(Chain(DiagonalScaling(2))) for _ in range(2)]
    mixture = Mixture([Flow(units, chain, prior) for chain in chains]).double()
    engine, x = Engine(mixture), torch.tensor([[0, 3], [2, 1]])
    torch.testing.assert_close(
        engine.log_prob(x, generator=torch.Generator().manual_seed(0)),
        mixture.log_prob(x, generator=torch.Generator().manual_seed(0)).detach(),
    )
    assert engine.sample(50).unique().tolist() == [0, 1, 2, 3]
