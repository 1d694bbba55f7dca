"""Draws by chains, compared with closed forms and quadrature; the observed stay as they are."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nicest.flows import MLP, Additive, Affine, Chain, Coupling, DiagonalScaling, Flow, Gaussian, Units, odd_even
from nicest.flows import TriangularAffine as Triangular
from nicest.inference import langevin
from nicest.inference.langevin import Box, Chains, Drawn, conditional, draw, gaussian, split_r_hat

FAST = {"steps": 100, "warmup": 60, "keep": 20}
LONG = {"steps": 600, "warmup": 300, "keep": 100}


def real(chain: Chain, dim: int) -> Flow:
    """A flow of real numbers as they are."""
    return Flow(Units.continuous(dim, standardise=False), chain, Gaussian(dim)).double()


def whitening(mean: Tensor, covariance: Tensor) -> Triangular:
    """The layer that makes a Gaussian of this mean and covariance standard."""
    layer = Triangular(len(mean)).double()
    layer.fit_moments(mean, covariance)
    return layer


def gaussian_flow(dim: int) -> tuple[Flow, Tensor, Tensor]:
    """A full Gaussian of columns of very different sizes, with its mean and covariance."""
    mean = torch.linspace(-20, 5, dim, dtype=torch.float64)
    root = torch.randn(dim, dim, dtype=torch.float64) * torch.logspace(-1, 1, dim, dtype=torch.float64)[:, None]
    return real(Chain(whitening(mean, root @ root.mT)), dim), mean, root @ root.mT


def truth(mean: Tensor, covariance: Tensor, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the hidden numbers of one row given the observed, by the textbook."""
    o, h = ~hidden, hidden
    gain = torch.linalg.solve(covariance[o][:, o], covariance[o][:, h]).mT
    return mean[h] + gain @ (x[o] - mean[o]), covariance[h][:, h] - gain @ covariance[o][:, h]


class Parabola(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square() - 2


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def two_hills() -> Flow:
    """x1 ~ N(0, 1), x2 = 2 - x1² + N(0, 1): given x2 = 0, x1 is near √1.5 or near -√1.5."""
    i1 = odd_even(2)
    layers = [Coupling(part, Additive(), m) for part, m in ((i1, Parabola()), (i1.swap(), Nothing()), (i1, Nothing()))]
    return real(Chain(*layers), 2)


def bent(dim: int) -> Flow:
    """A random flow of affine couplings of standardised columns, far from Gaussian."""
    partition, layers = odd_even(dim), []
    for _ in range(4):
        layers.append(Coupling(partition, Affine(1.0), MLP(len(partition.i1), 2 * len(partition.i2), (8,))))
        partition = partition.swap()
    flow = Flow(Units.continuous(dim), Chain(*layers, DiagonalScaling(dim)), Gaussian(dim)).double()
    flow.units.fit(torch.full((dim,), -0.25), torch.full((dim,), 0.25))
    for parameter in flow.parameters():
        nn.init.normal_(parameter, std=0.4)
    return flow


def chains_of(flow: Flow, count: int = 1) -> Chains:
    return Chains(flow, flow.sample(1000), torch.Generator().manual_seed(0), count)


class TestAgainstTheTruth:
    def test_a_gaussian_has_its_conditional_moments(self):
        flow, mean, covariance = gaussian_flow(5)
        x = flow.sample(60)
        hidden = torch.rand(60, 5) < 0.5
        hidden[0] = True
        found = draw(flow, x.masked_fill(hidden, math.nan), hidden, **LONG)
        assert bool((found.r_hat < 1.1).all())
        scaled = []
        for i in hidden.any(1).nonzero().flatten():
            middle, covered = truth(mean, covariance, x[i], hidden[i])
            away = found.states[:, :, i, hidden[i]].flatten(0, 1) - middle
            scaled.append(away @ torch.linalg.inv(torch.linalg.cholesky(covered)).mT)
        pooled = torch.cat([each.flatten() for each in scaled])
        at = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95]).double()
        expected = torch.distributions.Normal(0.0, 1.0).icdf(at)
        torch.testing.assert_close(pooled.quantile(at), expected, rtol=0, atol=0.04)
        cross = torch.cat([each.mT.cov().flatten()[1:2] for each in scaled if each.shape[1] > 1])
        assert cross.mean().abs() < 0.02

    def test_two_hills_have_their_probabilities(self):
        flow, n = two_hills(), 40
        x = torch.stack([torch.full((n,), math.nan), torch.linspace(-2, 1, n)], 1).double()
        draws = draw(flow, x, x.isnan(), **LONG).states[..., 0].flatten(0, 1)
        grid = torch.linspace(-6, 6, 2001).double()
        points = torch.stack([grid.expand(n, -1), x[:, 1:].expand(-1, 2001)], -1)
        density = flow.log_prob(points.flatten(0, 1)).reshape(n, -1).softmax(1)
        edges = torch.tensor([-1.5, -0.5, 0.0, 0.5, 1.5]).double()
        below = (draws[:, :, None] < edges).double().mean((0, 1))
        cut = torch.stack([density[:, grid < edge].sum(1).mean() for edge in edges])
        torch.testing.assert_close(below, cut, rtol=0, atol=0.02)

    def test_rows_of_which_all_is_hidden_are_samples(self):
        flow = bent(3)
        hidden = torch.ones(50, 3, dtype=torch.bool)
        found = draw(flow, torch.full((50, 3), math.nan).double(), hidden, steps=200, warmup=100, keep=20)
        at = torch.tensor([0.1, 0.5, 0.9]).double()
        expected = flow.sample(20_000).quantile(at, 0)
        torch.testing.assert_close(found.states.flatten(0, 2).quantile(at, 0), expected, rtol=0, atol=0.12)

    def test_a_pixel_has_the_probabilities_of_its_levels(self):
        """Given the level of y1, y2 is a mixture over y1 in that level, by quadrature; both on [0, 1)."""
        levels, mean = 4, torch.full((2,), 0.5).double()
        covariance = 0.05 * torch.tensor([[1.0, 0.9], [0.9, 1.0]]).double()
        flow = Flow(Units.pixels(2, levels), Chain(whitening(mean, covariance)), Gaussian(2)).double()
        x = torch.tensor([[1.0, 0.0]] * 100).double()
        hidden = torch.tensor([[False, True]]).expand(100, 2)
        states = draw(flow, x, hidden, **LONG).states
        assert torch.equal(states[..., 0], torch.ones(100, 4, 100).double())
        fine = (torch.arange(400).double() + 0.5) / 400
        density = torch.distributions.MultivariateNormal(mean, covariance).log_prob(torch.cartesian_prod(fine, fine))
        mass = density.exp().view(4, 100, 4, 100).sum((1, 3))[1]
        counts = torch.bincount(states[..., 1].flatten().long(), minlength=levels).double()
        torch.testing.assert_close(counts / counts.sum(), mass / mass.sum(), rtol=0, atol=0.012)

    @pytest.mark.parametrize("move", ["langevin", "jump", "line"])
    def test_each_move_alone_leaves_the_model_as_it_is(self, move: str):
        """Chains that start at exact draws stay exact draws, however wrong the step and the Gaussian are."""
        flow, n = bent(3), 20_000
        walk = chains_of(flow)
        walk.place(torch.zeros(n, 3).double(), torch.ones(n, 3, dtype=torch.bool))
        y = flow.units.enter(flow.sample(n))
        w = torch.linalg.solve(walk.factor, (y - walk.centre[:, 0])[..., None])[:, None, :, 0]
        before = at = walk.at(w)
        for _ in range(6):
            if move == "line":
                at = walk.line(at, walk.next_coordinate())
            else:
                step = [torch.full((n,), 1.2).double()] if move == "langevin" else []
                at, chance = getattr(walk, move)(at, *step)
                assert 0.05 < chance.mean() < 0.95
        assert (at.w != before.w).any(-1).double().mean() > 0.3
        for f in (lambda p: p.y.tanh(), lambda p: p.y.abs().tanh(), lambda p: (p.nats / 10).tanh()):
            old, new = f(before).double().reshape(n, -1), f(at).double().reshape(n, -1)
            z = (new.mean(0) - old.mean(0)) / ((old.var(0) + new.var(0)) / n).sqrt()
            assert z.abs().max() < 3.5

    def test_a_line_moves_one_hidden_coordinate_in_turn_and_often(self):
        flow, _, _ = gaussian_flow(3)
        walk, n = chains_of(flow), 20_000
        walk.place(flow.sample(1).repeat(n, 1), torch.tensor([[True, False, True]]).repeat(n, 1))
        at = walk.at(walk.noise())
        for moved in (0, 2, 0):
            to = walk.line(at, walk.next_coordinate())
            changed = (to.w != at.w)[:, 0]
            assert not changed[:, [d for d in range(3) if d != moved]].any()
            assert changed[:, moved].double().mean() == pytest.approx(0.72, abs=0.03)  # at most 3 in 4
            torch.testing.assert_close(to.nats, walk.at(to.w).nats, rtol=0, atol=1e-3)
            at = to


class TestRows:
    @settings(max_examples=15, deadline=None)
    @given(st.integers(0, 2**32), st.sampled_from([torch.float32, torch.float64]), st.floats(0, 1), st.booleans())
    def test_the_observed_come_back_bit_for_bit(self, seed: int, dtype: torch.dtype, share: float, pixels: bool):
        torch.manual_seed(seed)
        flow = bent(3).to(dtype)
        flow.units = Units.pixels(3, 17).to(dtype) if pixels else flow.units
        x = torch.randint(17, (5, 3)).to(dtype)
        hidden = torch.rand(5, 3) < share
        found = draw(flow, x.masked_fill(hidden, math.nan), hidden, steps=8, warmup=2, keep=4, chains=2)
        assert (found.states.shape, found.states.dtype, found.looks) == ((4, 2, 5, 3), dtype, (2, 4, 6, 8))
        assert found.states.isfinite().all()
        assert (found.states[..., ~hidden] == x[~hidden]).all()
        if pixels:
            assert ((found.states == found.states.round()) & (found.states >= 0) & (found.states < 17)).all()
        complete = ~hidden.any(1)
        assert torch.equal(found.r_hat[complete], torch.ones(int(complete.sum())).double())

    def test_the_seed_decides_and_parts_are_of_bounded_size(self, monkeypatch: pytest.MonkeyPatch):
        flow, x = bent(3), torch.randn(9, 3).double()
        hidden, random, done = torch.rand(9, 3) < 0.6, torch.get_rng_state(), list[float]()
        monkeypatch.setattr(langevin, "ROWS", 12)
        first, again = (draw(flow, x, hidden, **FAST, seed=1) for _ in range(2))
        other = draw(flow, x, hidden, **FAST, seed=2, watch=done.append)
        assert all(torch.equal(getattr(first, each), getattr(again, each)) for each in Drawn._fields[1:])
        assert not torch.equal(first.states, other.states)
        assert torch.equal(torch.get_rng_state(), random)
        assert done[-1] == 1
        assert done == sorted(done)

    def test_the_flow_is_as_before(self):
        flow, x = bent(3).train(), torch.randn(2, 3).double()
        seen: list[bool] = []
        draw(flow, x, x > 0, **FAST, watch=lambda share: seen.extend(p.requires_grad for p in flow.parameters()))
        assert not any(seen)
        assert all(p.requires_grad and p.grad is None for p in flow.parameters())
        assert flow.training

    def test_steps_are_fitted_row_by_row_in_the_warm_up_and_then_stay(self, monkeypatch: pytest.MonkeyPatch):
        heard: list[Tensor] = []
        move = Chains.langevin
        monkeypatch.setattr(Chains, "langevin", lambda walk, at, step: (heard.append(step), move(walk, at, step))[1])
        monkeypatch.setattr(langevin, "JUMP_EVERY", 10**9)
        monkeypatch.setattr(langevin, "LINE_AT", ())
        found = draw(bent(3), torch.randn(6, 3).double(), torch.ones(6, 3, dtype=torch.bool), **FAST)
        warm, frozen = heard[: FAST["warmup"]], heard[FAST["warmup"] :]
        assert len({tuple(step.tolist()) for step in warm}) == FAST["warmup"]
        assert all(torch.equal(step, frozen[0]) for step in frozen)
        assert len(frozen[0].unique()) == 6
        assert found.acceptance.mean() == pytest.approx(0.574, abs=0.15)

    def test_chains_that_do_not_agree_have_a_large_r_hat(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(langevin, "JUMP_EVERY", 10**9)
        monkeypatch.setattr(langevin, "LINE_AT", ())
        x = torch.tensor([[math.nan, -9.0]] * 40 + [[0.0, 0.0]]).double()  # hills at ±√11, and nothing between
        found = draw(two_hills(), x, x.isnan(), **FAST, seed=1)
        assert found.r_hat[-1] == 1
        assert (found.r_hat > 1.1).double().mean() > 0.5

    def test_refusals(self, refusal: Callable[..., str]):
        flow, x = bent(3), torch.zeros(2, 3).double()
        assert "(N, 3)" in refusal(draw, flow, x[:, :2], x[:, :2] == 0, **FAST)
        assert "torch.float64" in refusal(draw, flow, x, x, **FAST)
        assert "4 draws or more" in refusal(draw, flow, x, x == 0, steps=3, warmup=1, keep=3)
        x = torch.tensor([[math.nan, 1e300, 0]]).double()
        assert "finite nowhere" in refusal(draw, flow, x, x.isnan(), **FAST)


class TestParts:
    def test_a_chain_starts_at_the_part_of_a_sample_that_is_likeliest_among_the_most_alike(self):
        flow = two_hills()
        walk = chains_of(flow, 2)
        y, hidden = torch.tensor([[0.0, -1.0], [0.0, 1.5]]).double(), torch.tensor([[True, False]]).expand(2, 2)
        walk.place(y, hidden)
        at = walk.patched(16)
        for i in range(2):
            near = (walk.samples[:, 1] - y[i, 1]).abs().topk(16, largest=False).indices
            patches = torch.stack([walk.samples[near, 0], y[i, 1].expand(16)], 1)
            best = patches[flow.log_prob(patches).topk(2).indices]
            torch.testing.assert_close(at.y[i], best, rtol=0, atol=1e-9)

    @settings(max_examples=20, deadline=None)
    @given(st.integers(0, 2**32), st.integers(2, 7))
    def test_the_conditional_gaussian_is_the_textbooks(self, seed: int, dim: int):
        torch.manual_seed(seed)
        root = torch.randn(dim, dim + 2).double()
        covariance, mean, x = root @ root.mT, torch.randn(dim).double(), torch.randn(6, dim).double()
        hidden = torch.rand(6, dim) < 0.5
        means, factors = conditional(mean, torch.linalg.inv(covariance), x, hidden)
        for i, h in enumerate(hidden):
            middle, covered = truth(mean, covariance, x[i], h)
            torch.testing.assert_close(means[i, h], middle, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close((factors[i] @ factors[i].mT)[h][:, h], covered, rtol=1e-6, atol=1e-6)
            assert torch.equal(factors[i][~h], torch.eye(dim).double()[~h])

    @settings(max_examples=30, deadline=None)
    @given(st.floats(-5, 5), st.floats(0.1, 5), st.floats(-4, 4))
    def test_the_box_and_its_slope(self, lower: float, width: float, number: float):
        for low, high in ((lower, lower + width), (-math.inf, math.inf)):
            box = Box(torch.tensor([[low]]).double(), torch.tensor([[high]]).double())
            z = torch.tensor([[number]]).double().requires_grad_()
            y, log_slope = box.leave(z)
            assert low <= y <= high
            (slope,) = torch.autograd.grad(y.sum(), z)
            torch.testing.assert_close(slope.log(), log_slope.detach(), rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(box.enter(y), z, rtol=1e-6, atol=1e-6)

    def test_outliers_and_infinities_do_not_make_the_gaussian(self):
        z = torch.randn(4000, 2)
        z[0], z[1] = 1e20, math.nan
        mean, precision = gaussian(z)
        torch.testing.assert_close(mean.float(), torch.zeros(2), rtol=0, atol=0.06)
        torch.testing.assert_close(precision.float(), torch.eye(2), rtol=0, atol=0.12)

    def test_r_hat(self):
        chains = torch.randn(3, 4, 200, 2).double()
        assert (split_r_hat(chains) - 1).abs().max() < 0.03
        assert (split_r_hat(chains + torch.arange(4)[:, None, None]) > 1.3).all()
        assert (split_r_hat(chains + torch.linspace(0, 4, 200)[:, None]) > 1.3).all()
        assert (split_r_hat(torch.ones(1, 4, 8, 1)) == 1).all()
        assert split_r_hat(torch.arange(4.0)[None, :, None, None].expand(1, 4, 8, 1)).isinf().all()
