"""The VAE as NICE (NICE App. C), and NICE as its posterior and its prior (NICE §6).

The SGVB estimate is written out with torch.distributions, from the networks alone: no law, chain or flow of ours.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Independent, Normal, kl_divergence
from zoo import LAWS, couplings, jacobian, randomised

from nicest.data import load
from nicest.flows import MLP, VAE, Additive, Bijection, Chain, Coupling, DiagonalScaling, Units, odd_even

BOUND, FLOOR = 8.0, -3.0
KINDS = ("plain", "posterior", "prior", "both")
kinds = pytest.mark.parametrize("kind", KINDS)


class OneSigma(nn.Module):
    """A decoder as the paper has it: f(z), and one σ for all of x."""

    def __init__(self, mean: nn.Module, dim: int) -> None:
        super().__init__()
        self.mean, self.dim, self.b1 = mean, dim, nn.Parameter(torch.zeros(()))

    def forward(self, z: Tensor) -> Tensor:
        return torch.stack((self.b1.expand(len(z), self.dim), self.mean(z)), -1).flatten(1)


def make(kind: str = "plain", dim: int = 5, latent_dim: int = 4, law: str = "affine") -> VAE:
    """A VAE with random networks, in float64."""
    inside: dict[str, Bijection | nn.Module] = {}
    if kind in ("posterior", "both"):
        inside["posterior"] = couplings(latent_dim, LAWS[law], 3, context_dim=2)
        inside["summary"] = MLP(dim, 2, (8,))
    if kind in ("prior", "both"):
        inside["prior"] = Chain(couplings(latent_dim, LAWS[law], 3), DiagonalScaling(latent_dim))
    encoder, decoder = MLP(dim, 2 * latent_dim, (16, 16)), MLP(latent_dim, 2 * dim, (16, 16))
    return randomised(
        VAE(Units.continuous(dim, standardise=False), latent_dim, encoder, decoder, floor=FLOOR, **inside)
    )


def pair(vae: VAE, batch: int = 3) -> tuple[Tensor, Tensor]:
    """Random x and ε."""
    x = torch.randn(batch, vae.dim, dtype=torch.float64)
    return x, torch.randn(batch, vae.latent_dim, dtype=torch.float64)


def normal(mean: Tensor, scale: Tensor) -> Independent:
    return Independent(Normal(mean, scale), 1)


def standard(latent_dim: int) -> Independent:
    return normal(torch.zeros(latent_dim).double(), torch.ones(latent_dim).double())


def sgvb(vae: VAE, x: Tensor, noise: Tensor) -> Tensor:
    """log p(x|z) + log p(z) - log q(z|x) at z = g(ε|x), as Kingma and Welling have it."""
    layers = vae.bijection.layers
    s, mean = layers["encoder"].network(x).unflatten(-1, (-1, 2)).unbind(-1)
    q = normal(mean, torch.exp(BOUND * torch.tanh(s / BOUND)))
    z = q.base_dist.loc + q.base_dist.scale * noise
    log_q = q.log_prob(z)
    if "posterior" in layers:
        f, context = layers["posterior"].inner, layers["posterior"].network(x)
        log_q = log_q - torch.linalg.slogdet(jacobian(f, z, context)).logabsdet
        z = f(z, context)[0]
    log_p = standard(vae.latent_dim).log_prob(z)
    if "latent_prior" in layers:
        g = layers["latent_prior"].inner
        log_p = standard(vae.latent_dim).log_prob(g(z)[0]) + torch.linalg.slogdet(jacobian(g, z)).logabsdet
    b1, mean = layers["decoder"].network(z).unflatten(-1, (-1, 2)).unbind(-1)
    least = math.exp(FLOOR)
    sigma = least + (1 - least) * b1.exp()  # above the floor, and 1 where the decoder gives 0
    return normal(mean, sigma).log_prob(x) + log_p - log_q


class TestIdentity:
    @settings(max_examples=30, deadline=None, derandomize=True)
    @given(st.integers(1, 12), st.integers(1, 9), st.integers(0, 2**31), st.floats(0.05, 0.3))
    def test_joint_log_likelihood_less_that_of_the_noise_is_the_sgvb_estimate(
        self, dim: int, latent_dim: int, seed: int, std: float
    ):
        torch.manual_seed(seed)
        vae = randomised(make(dim=dim, latent_dim=latent_dim), std)
        x, noise = pair(vae)
        joint = vae.joint.log_prob(torch.cat((x, noise), -1)) - standard(latent_dim).log_prob(noise)
        torch.testing.assert_close(joint, sgvb(vae, x, noise), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(vae.bound(x, noise), joint, rtol=1e-13, atol=1e-13)

    @kinds
    @pytest.mark.parametrize("law", ["additive", "affine"])
    def test_holds_with_nice_as_posterior_and_as_prior(self, kind: str, law: str):
        vae = make(kind, law=law)
        x, noise = pair(vae)
        torch.testing.assert_close(vae.bound(x, noise), sgvb(vae, x, noise), rtol=1e-13, atol=1e-13)

    def test_cost_of_the_paper_by_hand(self):
        """log p_H(z, ξ) - D_X log σ + log |det dg/dε|, with one σ."""
        decoder = OneSigma(MLP(2, 3, (8,)), 3)
        vae = randomised(VAE(Units.continuous(3, standardise=False), 2, MLP(3, 4, (8,)), decoder, floor=-30.0))
        x, noise = pair(vae)
        s, mean = vae.bijection.layers["encoder"].network(x).unflatten(-1, (-1, 2)).unbind(-1)
        s = 8 * torch.tanh(s / 8)
        z, log_sigma = mean + s.exp() * noise, decoder.b1
        xi = (x - decoder.mean(z)) / log_sigma.exp()
        log_prior = -0.5 * (z.square().sum(-1) + xi.square().sum(-1) + 5 * math.log(2 * math.pi))
        expected = log_prior - 3 * log_sigma + s.sum(-1)
        torch.testing.assert_close(vae.joint.log_prob(torch.cat((x, noise), -1)), expected, rtol=1e-12, atol=1e-11)

    @kinds
    def test_gradients_are_those_of_sgvb(self, kind: str):
        vae = make(kind)
        x, noise = pair(vae)
        names, parameters = zip(*vae.named_parameters(), strict=True)
        ours = torch.autograd.grad(vae.bound(x, noise).sum(), parameters)
        theirs = torch.autograd.grad(_differentiable_sgvb(vae, x, noise).sum(), parameters)
        for name, one, other in zip(names, ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10, msg=name)


def _differentiable_sgvb(vae: VAE, x: Tensor, noise: Tensor) -> Tensor:
    """`sgvb` with Jacobians that keep their graph."""
    original = torch.autograd.functional.jacobian
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.functional, "jacobian", lambda f, row: original(f, row, create_graph=True))
        return sgvb(vae, x, noise)


class TestJoint:
    @kinds
    @pytest.mark.parametrize(("dim", "latent_dim"), [(2, 2), (3, 5), (6, 3)])
    def test_log_det_is_that_of_the_jacobian(self, kind: str, dim: int, latent_dim: int):
        vae = make(kind, dim, latent_dim)
        both = torch.cat(pair(vae), -1)
        expected = torch.linalg.slogdet(jacobian(vae.bijection, both)).logabsdet
        torch.testing.assert_close(vae.bijection(both)[1], expected, rtol=0, atol=1e-9)

    @kinds
    def test_decode_undoes_encode(self, kind: str):
        vae = make(kind)
        both = torch.cat(pair(vae), -1)
        torch.testing.assert_close(vae.joint.decode(vae.joint.encode(both)), both, rtol=0, atol=1e-9)
        torch.testing.assert_close(vae.joint.encode(vae.joint.decode(both)), both, rtol=0, atol=1e-9)

    def test_ledger_names_the_parts(self):
        vae = make("both")
        x, noise = pair(vae)
        terms = vae.joint.terms(torch.cat((x, noise), -1))
        posterior = [f"posterior_{k}_coupling" for k in range(3)]
        latent = [*(f"latent_prior_0_chain_{k}_coupling" for k in range(3)), "latent_prior_1_diagonalscaling"]
        assert list(terms) == ["encoder", *posterior, "decoder", *latent, "prior"]
        torch.testing.assert_close(sum(terms.values()), vae.joint.log_prob(torch.cat((x, noise), -1)))

    def test_sigma_stays_above_the_floor(self):
        vae = make()
        law = vae.bijection.layers["decoder"].law
        b1 = torch.tensor([-1e6, -50.0, -3.0, 0.0, 5.0], dtype=torch.float64)
        assert (law.log_scale(b1) >= FLOOR).all()
        torch.testing.assert_close(law.log_scale(b1).exp(), math.exp(FLOOR) + (1 - math.exp(FLOOR)) * b1.exp())


class TestInside:
    """NICE as posterior and as prior."""

    def nice(self, context_dim: int = 0) -> Chain:
        part = odd_even(4)
        m = [MLP(2, 2, (8,), context_dim=context_dim, initialisation="zero-last") for _ in range(4)]
        return Chain(*(Coupling(p, Additive(), each) for p, each in zip([part, part.swap()] * 2, m, strict=True)))

    def test_identity_couplings_leave_the_plain_vae(self):
        plain = make()
        layers = plain.bijection.layers
        networks = (layers["encoder"].network, layers["decoder"].network)
        richer = {"posterior": self.nice(2), "summary": MLP(5, 2, (8,))}, {"prior": self.nice()}
        x, noise = pair(plain)
        for inside in richer:
            vae = VAE(Units.continuous(5, standardise=False), 4, *networks, floor=FLOOR, **inside).double()
            torch.testing.assert_close(vae.bound(x, noise), plain.bound(x, noise), rtol=0, atol=1e-12)

    def test_summary_without_posterior_is_refused(self):
        with pytest.raises(ValueError, match="posterior"):
            VAE(Units.continuous(5, standardise=False), 4, MLP(5, 8, ()), MLP(4, 10, ()), summary=MLP(5, 2, ()))

    def test_posterior_depends_on_x_and_prior_does_not(self):
        vae = make("both")
        x, noise = pair(vae, 1)
        posterior, prior = (vae.bijection.layers[name] for name in ("posterior", "latent_prior"))

        def moved(layer: nn.Module) -> Tensor:
            here, there = (layer(torch.cat((at, noise), -1))[0][:, vae.dim :] for at in (x, x + 1))
            return (here - there).abs().max()

        assert moved(posterior) > 1e-3
        assert moved(prior) == 0

    def test_same_couplings_for_every_x_are_a_prior_before_another_decoder(self):
        """z = f(z0) for all x: the bound is that of a plain posterior, prior flow f and decoder of f(z0)."""
        plain, f = make(), couplings(4, LAWS["affine"], 3)
        encoder, decoder = (plain.bijection.layers[name].network for name in ("encoder", "decoder"))

        class Through(nn.Module):
            def forward(self, z: Tensor) -> Tensor:
                return decoder(f(z)[0])

        x, noise = pair(plain)
        one = VAE(Units.continuous(5, standardise=False), 4, encoder, decoder, posterior=f).double()
        other = VAE(Units.continuous(5, standardise=False), 4, encoder, Through(), prior=f).double()
        torch.testing.assert_close(one.bound(x, noise), other.bound(x, noise), rtol=1e-13, atol=1e-13)


class TestBounds:
    def linear(self) -> tuple[VAE, Tensor, Tensor]:
        """x = W z + σ ξ with an encoder that is not the posterior: log p(x) and its bound are known."""
        encoder, decoder = nn.Linear(3, 4), nn.Linear(2, 6)
        vae = randomised(VAE(Units.continuous(3, standardise=False), 2, encoder, decoder, floor=-30.0))
        for network in (encoder, decoder):
            network.weight.data[::2] = 0  # scales that depend on nothing
            network.bias.data[1::2] = 0
        x = torch.randn(4, 3, dtype=torch.float64)
        w, sigma = decoder.weight.data[1::2], decoder.bias.data[::2].exp()
        covariance = w @ w.mT + sigma.square().diag()
        exact = torch.distributions.MultivariateNormal(torch.zeros(3).double(), covariance).log_prob(x)
        precision = torch.eye(2).double() + w.mT @ (w / sigma.square()[:, None])
        mean = (x / sigma.square()) @ w @ precision.inverse()
        posterior = torch.distributions.MultivariateNormal(mean, precision_matrix=precision)
        q = encoder(x).detach()
        scale = (8 * torch.tanh(q[:, ::2] / 8)).exp()
        gap = kl_divergence(torch.distributions.MultivariateNormal(q[:, 1::2], torch.diag_embed(scale**2)), posterior)
        return vae, x, torch.stack((exact, gap))

    @torch.no_grad()
    def test_bound_is_the_log_likelihood_less_the_divergence_of_the_posterior(self):
        vae, x, (exact, gap) = self.linear()
        bounds = vae.bound(x.repeat(50_000, 1)).view(-1, 4)
        error = bounds.std(0) / math.sqrt(len(bounds))
        assert (((bounds.mean(0) - (exact - gap)) / error).abs() < 4).all()

    @torch.no_grad()
    def test_importance_bound_rises_to_the_log_likelihood(self):
        vae, x, (exact, gap) = self.linear()
        assert (gap > 0.05).all()
        bounds = vae.importance_bound(x.repeat(100, 1), 2000).view(100, 4).mean(0)
        torch.testing.assert_close(bounds, exact, rtol=0, atol=0.02)


class TestSampling:
    def test_samples_have_the_moments_of_the_model(self):
        vae, *_ = TestBounds().linear()
        decoder = vae.bijection.layers["decoder"].network
        w, sigma = decoder.weight.data[1::2], decoder.bias.data[::2].exp()
        x = vae.sample(50_000, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(x.mean(0), torch.zeros(3).double(), rtol=0, atol=0.03)
        torch.testing.assert_close(x.mT.cov(), w @ w.mT + sigma.square().diag(), rtol=0.05, atol=0.03)

    @kinds
    def test_without_noise_they_are_the_means(self, kind: str):
        vae = make(kind)
        x = vae.means(6, generator=torch.Generator().manual_seed(1))
        h = vae.joint.prior.rsample(6, generator=torch.Generator().manual_seed(1))[:, 5:]
        z = vae.bijection.layers["latent_prior"].inner.inverse(h)[0] if "latent_prior" in vae.bijection.layers else h
        expected = vae.bijection.layers["decoder"].network(z)[:, 1::2]
        torch.testing.assert_close(x, expected.detach(), rtol=0, atol=1e-10)


def test_trains_on_digits_by_the_joint_criterion():
    """Test bounds on [0, 1]; a full Gaussian has 48.7 nats of log-likelihood, a diagonal one 28.4."""
    splits = load("digits")
    rows, test = torch.from_numpy(splits.train), torch.from_numpy(splits.test)
    vae = VAE(Units.pixels(64, splits.levels), 10, MLP(64, 20, (128,)), MLP(10, 128, (128,)))
    optimizer = torch.optim.Adam(vae.parameters(), lr=3e-3, fused=True)

    def score() -> float:
        with torch.no_grad():
            return float(torch.stack([vae(test) for _ in range(8)]).mean()) + vae.units.interval_nats

    before = score()
    for _ in range(300):
        optimizer.zero_grad()
        loss = -vae(rows[torch.randint(len(rows), (100,))]).mean()
        loss.backward()
        optimizer.step()
    assert before < -60
    assert score() > 45
