"""impute: draws, mean, interval and mode against closed forms and quadrature; the observed stay as they are."""

import math
from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import truncnorm
from torch import Tensor, nn

from nicest.flows import (
    MLP,
    Additive,
    Affine,
    Chain,
    Coupling,
    DiagonalScaling,
    Flow,
    Gaussian,
    TriangularAffine,
    Units,
    odd_even,
)
from nicest.inference import langevin
from nicest.inference.impute import Imputed, Walk, impute_rows, split_r_hat
from nicest.inference.langevin import Box, conditional, gaussian

LONG = {"draws": 400, "steps": 600, "warmup": 300}
FAST = {"draws": 80, "steps": 100, "warmup": 60, "ascent": 20}


def real(chain: Chain, dim: int) -> Flow:
    """A flow of real numbers as they are."""
    return Flow(Units.continuous(dim, standardise=False), chain, Gaussian(dim)).double()


def gaussian_flow(dim: int) -> tuple[Flow, Tensor, Tensor]:
    """A full Gaussian of columns of very different sizes, with its mean and covariance."""
    mean = torch.linspace(-20, 5, dim, dtype=torch.float64)
    root = torch.randn(dim, dim, dtype=torch.float64) * torch.logspace(-1, 1, dim, dtype=torch.float64)[:, None]
    covariance = root @ root.mT
    return real(Chain(whitening(mean, covariance)), dim), mean, covariance


def whitening(mean: Tensor, covariance: Tensor) -> TriangularAffine:
    """The layer that makes a Gaussian of this mean and covariance standard."""
    layer = TriangularAffine(len(mean)).double()
    layer.fit_moments(mean, covariance)
    return layer


def truth(mean: Tensor, covariance: Tensor, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the hidden cells of one row given the observed, by the textbook."""
    o, h = ~hidden, hidden
    gain = torch.linalg.solve(covariance[o][:, o], covariance[o][:, h]).mT
    return mean[h] + gain @ (x[o] - mean[o]), covariance[h][:, h] - gain @ covariance[o][:, h]


class Parabola(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square() - 2


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class Levels(Gaussian):
    """A density of 0.7, 0.05 and 0.25 on [0, 1), [1, 2) and [2, 3]."""

    def log_prob(self, h: Tensor) -> Tensor:
        heights = torch.tensor([0.7, 0.05, 0.25]).log().to(h)
        return heights[h[:, 0].detach().long().clamp(0, 2)] + 0 * h[:, 0]


def two_hills() -> Flow:
    """x1 ~ N(0, 1), x2 = 2 - x1² + N(0, 1): given x2 = 0, x1 is near √1.5 or near -√1.5."""
    i1 = odd_even(2)
    layers = [Coupling(part, Additive(), m) for part, m in ((i1, Parabola()), (i1.swap(), Nothing()), (i1, Nothing()))]
    return real(Chain(*layers), 2)


def bent(dim: int) -> Flow:
    """A random flow of affine couplings of standardised columns, far from Gaussian."""
    partition, layers = odd_even(dim), []
    for _ in range(4):
        m = MLP(len(partition.i1), 2 * len(partition.i2), (8,))
        layers.append(Coupling(partition, Affine(1.0), m))
        partition = partition.swap()
    flow = Flow(Units.continuous(dim), Chain(*layers, DiagonalScaling(dim)), Gaussian(dim)).double()
    flow.units.fit(torch.full((dim,), -0.25), torch.full((dim,), 0.25))
    for parameter in flow.parameters():
        nn.init.normal_(parameter, std=0.4)
    return flow


class TestAgainstTheTruth:
    def test_a_gaussian_has_its_conditional_mean_variance_quantiles_and_mode(self):
        flow, mean, covariance = gaussian_flow(5)
        x = flow.sample(60)
        hidden = torch.rand(60, 5) < 0.5
        hidden[0], hidden[1] = True, False
        found = impute_rows(flow, x.masked_fill(hidden, math.nan), hidden, **LONG)
        assert bool(found.mixed.all())
        off, scaled, mode = [], [], []
        for i in hidden.any(1).nonzero().flatten():
            h = hidden[i]
            middle, spread = truth(mean, covariance, x[i], h)
            sd = spread.diagonal().sqrt()
            off.append((found.mean[i, h] - middle) / sd)
            mode.append((found.mode[i, h] - middle) / sd)
            scaled.append((found.draws[:, i, h] - middle) @ torch.linalg.inv(torch.linalg.cholesky(spread)).mT)
        pooled = torch.cat([each.flatten() for each in scaled])
        assert torch.cat(off).square().mean().sqrt() < 0.1
        assert torch.cat(mode).abs().max() < 0.1
        assert pooled.mean().abs() < 0.02
        assert pooled.var() == pytest.approx(1, abs=0.03)
        at = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95]).double()
        expected = torch.distributions.Normal(0.0, 1.0).icdf(at)
        torch.testing.assert_close(pooled.quantile(at), expected, rtol=0, atol=0.04)
        cross = torch.cat([each.mT.cov().flatten()[1:2] for each in scaled if each.shape[1] > 1])
        assert cross.mean().abs() < 0.02

    def test_two_hills_have_their_shares_of_the_draws(self):
        flow, n = two_hills(), 40
        x = torch.stack([torch.full((n,), math.nan), torch.linspace(-2, 1, n)], 1).double()
        found = impute_rows(flow, x, x.isnan(), **LONG)
        grid = torch.linspace(-6, 6, 2001).double()
        points = torch.stack([grid.expand(n, -1), x[:, 1:].expand(-1, 2001)], -1)
        density = flow.log_prob(points.flatten(0, 1)).reshape(n, -1).softmax(1)
        draws = found.draws[..., 0]
        assert (draws > 0).double().mean() == pytest.approx(0.5, abs=0.02)
        for power in (2, 4):
            expected = (density * grid**power).sum(1)
            assert (draws**power).mean() == pytest.approx(float(expected.mean()), rel=0.04)
        below = (draws[:, :, None] < torch.tensor([-1.5, -0.5, 0.5, 1.5])).double().mean((0, 1))
        cut = torch.stack([density[:, grid < edge].sum(1).mean() for edge in (-1.5, -0.5, 0.5, 1.5)])
        torch.testing.assert_close(below, cut, rtol=0, atol=0.02)
        top = points[torch.arange(n), density.argmax(1), 0].abs()
        torch.testing.assert_close(found.mode[:, 0].abs(), top, rtol=0, atol=0.02)

    def test_chains_that_start_at_samples_end_at_the_same_law(self):
        flow, mean, covariance = gaussian_flow(3)
        x, hidden = flow.sample(40), torch.tensor([False, True, True]).expand(40, 3)
        found = impute_rows(flow, x.masked_fill(hidden, math.nan), hidden, alike=8, **LONG)
        scaled = []
        for i in range(40):
            middle, spread = truth(mean, covariance, x[i], hidden[i])
            scaled.append((found.draws[:, i, 1:] - middle) @ torch.linalg.inv(torch.linalg.cholesky(spread)).mT)
        pooled = torch.cat(scaled)
        assert pooled.mean(0).abs().max() < 0.03
        torch.testing.assert_close(pooled.T.cov(), torch.eye(2).double(), rtol=0, atol=0.05)

    def test_bounds_cut_the_density_off(self):
        flow = Flow(Units.continuous(3), Chain(), Gaussian(3)).double()
        flow.units.fit(torch.zeros(3), torch.full((3,), 4.0))  # N(0, 2²)
        low, high = torch.tensor([0.0, -math.inf, -2]).double(), torch.tensor([math.inf, 1, 2]).double()
        x, hidden = torch.zeros(60, 3).double(), torch.ones(60, 3, dtype=torch.bool)
        flow.units.box = lambda: (low[None] / 2, high[None] / 2)
        found = impute_rows(flow, x, hidden, **LONG)
        assert ((found.draws >= low) & (found.draws <= high)).all()
        assert found.mode.abs().max() < 0.05
        for k in range(3):
            law = truncnorm(low[k] / 2, high[k] / 2, scale=2)
            at = np.array([0.05, 0.3, 0.7, 0.95])
            assert np.quantile(found.draws[..., k], at) == pytest.approx(law.ppf(at), abs=0.08)

    def test_a_mode_may_lie_on_a_bound(self):
        flow = real(Chain(DiagonalScaling(2)), 2)
        x = torch.tensor([[math.nan, 0.3]]).double()
        flow.units.box = lambda: (torch.tensor([[1.0, -9]]).double(), torch.full((1, 2), 2.0).double())
        found = impute_rows(flow, x, x.isnan(), **FAST)
        assert float(found.mode[0, 0]) == 1

    def test_intervals_hold_what_the_model_itself_drew(self):
        """Simulation-based calibration: the rank of the truth among its draws is uniform."""
        flow = bent(4)
        x = flow.sample(400)
        hidden = torch.rand(400, 4) < 0.5
        found = impute_rows(flow, x, hidden, draws=100, steps=250, warmup=200)
        inside = ((found.low <= x) & (x <= found.high))[hidden].double().mean()
        assert inside == pytest.approx(0.9, abs=0.035)
        ranks = (found.draws < x).double().mean(0)[hidden]
        shares = torch.histc(ranks, 5, 0, 1) / len(ranks)
        torch.testing.assert_close(shares, torch.full_like(shares, 0.2), rtol=0, atol=0.055)

    @pytest.mark.parametrize("move", ["langevin", "jump", "line"])
    def test_each_move_alone_leaves_the_model_as_it_is(self, move: str):
        """Chains that start at exact draws stay exact draws, however wrong the step and the Gaussian are."""
        flow = bent(3)
        walk = Walk(flow, 1, 4, 8, 1, torch.Generator().manual_seed(0))
        n = 20_000
        walk.place(torch.zeros(n, 3).double(), torch.ones(n, 3, dtype=torch.bool))
        y = flow.units.enter(flow.sample(n))
        w = torch.linalg.solve(walk.factor, (y - walk.centre[:, 0])[..., None])[:, None, :, 0]
        before = at = walk.at(w)
        for _ in range(6):
            step = [torch.full((n,), 1.2).double()] if move == "langevin" else []
            if move == "line":
                at = walk.line(at, walk.next_coordinate())
            else:
                at, chance = getattr(walk, move)(at, *step)
                assert 0.05 < chance.mean() < 0.95
        assert (at.w != before.w).any(-1).double().mean() > 0.3
        for f in (lambda p: p.y.tanh(), lambda p: p.y.abs().tanh(), lambda p: (p.nats / 10).tanh()):
            old, new = f(before).double().reshape(n, -1), f(at).double().reshape(n, -1)
            z = (new.mean(0) - old.mean(0)) / ((old.var(0) + new.var(0)) / n).sqrt()
            assert z.abs().max() < 3.5

    def test_a_line_moves_one_hidden_coordinate_in_turn_and_often(self):
        flow, _, _ = gaussian_flow(3)
        walk = Walk(flow, 1, 4, 8, 1, torch.Generator().manual_seed(0))
        n = 20_000
        walk.place(flow.sample(1).repeat(n, 1), torch.tensor([[True, False, True]]).repeat(n, 1))
        at = walk.at(walk.noise())
        for moved in (0, 2, 0):
            to = walk.line(at, walk.next_coordinate())
            changed = (to.w != at.w)[:, 0]
            assert not changed[:, [d for d in range(3) if d != moved]].any()
            assert changed[:, moved].double().mean() == pytest.approx(0.72, abs=0.03)  # at most 3 in 4
            torch.testing.assert_close(to.nats, walk.at(to.w).nats, rtol=0, atol=1e-3)
            at = to

    def test_a_line_goes_from_any_of_its_points_to_another_by_the_law(self):
        """Detailed balance: as many go from one part of the line to another as come back, in shares that are p's."""
        flow = two_hills()
        walk = Walk(flow, 1, 4, 8, 1, torch.Generator().manual_seed(0))
        n = 40_000
        x = torch.tensor([[0.0, -3.0]]).double().repeat(n, 1)
        walk.place(x, torch.tensor([[True, False]]).repeat(n, 1))
        grid = torch.linspace(-6, 6, 4001).double()
        chance = flow.log_prob(torch.stack([grid, torch.full_like(grid, -3.0)], 1)).softmax(0)
        start = grid[torch.multinomial(chance, n, replacement=True)]
        at = walk.at(walk.seen_as(torch.stack([start, x[:, 1]], 1)[:, None]))
        to = walk.line(at, walk.next_coordinate())
        edges = torch.tensor([-2.0, 0.0, 2.0]).double()
        was, came = (torch.bucketize(each.y[:, 0, 0].contiguous(), edges) for each in (at, to))
        flux = torch.zeros(4, 4).double().index_put_((was, came), torch.ones(n).double(), accumulate=True) / n
        torch.testing.assert_close(flux, flux.T, rtol=0, atol=0.008)
        shares = torch.zeros(4).double().index_add_(0, torch.bucketize(grid, edges), chance)
        torch.testing.assert_close(flux.sum(0), shares, rtol=0, atol=0.012)
        assert flux[:2, 2:].sum() > 0.04  # it crosses from one hill to the other

    def test_steps_of_a_density_are_crossed(self):
        """Levels of probability 0.7, 0.05 and 0.25, side by side: a Langevin chain would climb, lines step over."""
        steep = Flow(Units.continuous(1, standardise=False), Chain(), Levels(1)).double()
        x = torch.full((100, 1), math.nan).double()
        steep.units.box = lambda: (torch.zeros(1, 1).double(), torch.full((1, 1), 3.0).double())
        found = impute_rows(steep, x, x.isnan(), draws=400, steps=300, warmup=50, ascent=0)
        shares = torch.bincount(found.draws.flatten().long(), minlength=3) / found.draws.numel()
        assert shares.tolist() == pytest.approx([0.7, 0.05, 0.25], abs=0.015)
        assert found.mixed.double().mean() > 0.95


class TestRows:
    @settings(max_examples=15, deadline=None)
    @given(st.integers(0, 2**32), st.sampled_from([torch.float32, torch.float64]), st.floats(0, 1))
    def test_the_observed_come_back_bit_for_bit(self, seed: int, dtype: torch.dtype, share: float):
        torch.manual_seed(seed)
        flow, x = bent(3).float(), torch.randn(5, 3, dtype=dtype)
        hidden = torch.rand(5, 3) < share
        found = impute_rows(
            flow, x.masked_fill(hidden, math.nan), hidden, draws=8, steps=4, warmup=2, chains=2, ascent=seed % 3
        )
        for values in (found.mode, found.mean, found.low, found.high, *found.draws):
            assert values.dtype == dtype
            assert torch.equal(values[~hidden], x[~hidden])
            assert values.isfinite().all()
        assert found.draws.shape == (8, 5, 3)
        assert (found.low <= found.high).all()
        torch.testing.assert_close(found.nats, flow.log_prob(found.mode.float()).double(), rtol=1e-4, atol=1e-4)

    def test_complete_rows_and_no_rows_pass_through(self):
        flow, x = bent(3), torch.randn(4, 3).double()
        for rows in (x, x[:0]):
            found = impute_rows(flow, rows, torch.zeros(rows.shape, dtype=torch.bool), **FAST)
            assert torch.equal(found.mode, rows)
            assert torch.equal(found.acceptance, torch.ones(len(rows)).double())
            assert bool(found.mixed.all())

    def test_rows_that_miss_everything_are_samples(self):
        flow = bent(3)
        hidden = torch.ones(50, 3, dtype=torch.bool)
        found = impute_rows(
            flow, torch.full((50, 3), math.nan).double(), hidden, draws=80, steps=200, warmup=100, rounds=1
        )
        at = torch.tensor([0.1, 0.5, 0.9]).double()
        expected = flow.sample(20_000).quantile(at, 0)
        torch.testing.assert_close(found.draws.flatten(0, 1).quantile(at, 0), expected, rtol=0, atol=0.12)

    def test_the_seed_decides_and_parts_are_of_bounded_size(self, monkeypatch: pytest.MonkeyPatch):
        flow, x = bent(3), torch.randn(9, 3).double()
        hidden, random = torch.rand(9, 3) < 0.6, torch.get_rng_state()
        done: list[float] = []
        monkeypatch.setattr(langevin, "ROWS", 12)
        first, again = (impute_rows(flow, x, hidden, **FAST, seed=1) for _ in range(2))
        other = impute_rows(flow, x, hidden, **FAST, seed=2, watch=done.append)
        assert all(torch.equal(getattr(first, each.name), getattr(again, each.name)) for each in fields(Imputed))
        assert not torch.equal(first.draws, other.draws)
        assert torch.equal(torch.get_rng_state(), random)
        assert done[-1] == pytest.approx(1)
        assert np.all(np.diff(done) > 0)

    def test_gradients_are_taken_in_x_alone_and_the_flow_is_as_before(self):
        flow, x = bent(3).train(), torch.randn(2, 3).double()
        seen: list[bool] = []
        impute_rows(flow, x, x > 0, **FAST, watch=lambda share: seen.extend(p.requires_grad for p in flow.parameters()))
        assert not any(seen)
        assert all(p.requires_grad and p.grad is None for p in flow.parameters())
        assert flow.training

    def test_steps_are_fitted_row_by_row_in_the_warm_up_and_then_stay(self, monkeypatch: pytest.MonkeyPatch):
        heard: list[Tensor] = []
        langevin = Walk.langevin
        monkeypatch.setattr(Walk, "langevin", lambda walk, at, step: (heard.append(step), langevin(walk, at, step))[1])
        monkeypatch.setattr("nicest.inference.langevin.JUMP_EVERY", 10**9)
        monkeypatch.setattr("nicest.inference.langevin.LINE_AT", ())
        found = impute_rows(bent(3), torch.randn(6, 3).double(), torch.ones(6, 3, dtype=torch.bool), **FAST)
        warm, frozen = heard[: FAST["warmup"]], heard[FAST["warmup"] :]
        assert len({tuple(step.tolist()) for step in warm}) == FAST["warmup"]
        assert all(torch.equal(step, frozen[0]) for step in frozen)
        assert len(frozen[0].unique()) == 6
        assert found.acceptance.mean() == pytest.approx(0.574, abs=0.15)

    def test_rows_whose_chains_agree_stop_early_and_the_others_go_on(self, monkeypatch: pytest.MonkeyPatch):
        """Every row keeps as many draws, evenly spaced over the length of its own chains."""
        monkeypatch.setattr("nicest.inference.langevin.JUMP_EVERY", 10**9)
        monkeypatch.setattr("nicest.inference.langevin.LINE_AT", ())
        walked: list[int] = []
        iteration = Walk.iteration
        monkeypatch.setattr(Walk, "iteration", lambda walk, i: (walked.append(len(walk.x)), iteration(walk, i))[1])
        x = torch.tensor([[math.nan, -9.0], [math.nan, 3.0], [math.nan, 2.5]]).double()  # the first has hills apart
        found = impute_rows(two_hills(), x, x.isnan(), draws=80, steps=400, warmup=50, seed=1)
        assert walked[:100] == [3] * 100
        assert walked[-1] == 1
        assert len(walked) == 450
        assert found.mixed.tolist() == [False, True, True]
        assert found.draws[..., 0].isfinite().all()
        walked.clear()
        impute_rows(two_hills(), x, x.isnan(), draws=80, steps=400, warmup=50, seed=1, rounds=1)
        assert walked == [3] * 450

    def test_rows_without_a_density_are_refused(self, refusal: Callable[..., str]):
        x = torch.tensor([[math.nan, 1e300, 0]], dtype=torch.float64)
        assert "finite nowhere" in refusal(impute_rows, bent(3), x, x.isnan(), **FAST)

    def test_rows_whose_chains_do_not_mix_are_marked(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("nicest.inference.langevin.JUMP_EVERY", 10**9)
        monkeypatch.setattr("nicest.inference.langevin.LINE_AT", ())
        x = torch.tensor([[math.nan, -9.0]] * 40 + [[0.0, 0.0]]).double()  # hills at ±√11, and nothing between
        found = impute_rows(two_hills(), x, x.isnan(), seed=1, **LONG)
        assert found.mixed[-1]
        assert found.mixed[:-1].double().mean() == pytest.approx(1 / 8, abs=0.2)  # all four chains on one hill


class TestDiscrete:
    """Columns of integers, and pixels: rows come and go in the units of the data."""

    @staticmethod
    def flow(steps: tuple[float, ...], mean: Tensor, covariance: Tensor) -> Flow:
        """y ~ N(mean, covariance) for the dequantised y, standardised: each step has the mass of its box."""
        units = Units.columns(steps).double()
        units.fit(mean - units.step / 2, covariance.diagonal() - units.step**2 / 12)
        layer = whitening((mean - units.loc) / units.scale, covariance / (units.scale[:, None] * units.scale))
        return Flow(units, Chain(layer), Gaussian(len(mean))).double()

    def test_an_integer_given_a_real_number_has_the_probabilities_of_its_steps(self):
        """P(x2 = k | x1) = Φ((k + s - m) / σ) - Φ((k - m) / σ), m and σ those of y2 given x1."""
        mean, covariance = torch.tensor([1.0, 4.0]).double(), torch.tensor([[2.0, 2.5], [2.5, 6.0]]).double()
        flow, n, step = self.flow((0.0, 2.0), mean, covariance), 60, 2.0
        x = torch.stack((torch.linspace(-1, 3, n), torch.full((n,), math.nan)), 1).double()
        found = impute_rows(flow, x, x.isnan(), **LONG)
        draws = found.draws[..., 1]
        assert torch.equal(draws % step, torch.zeros_like(draws))
        assert torch.equal(found.mode[:, 1] % step, torch.zeros(n).double())
        assert torch.equal(found.draws[..., 0], x[:, 0].expand(400, n))
        middle = mean[1] + covariance[0, 1] / covariance[0, 0] * (x[:, 0] - mean[0])
        spread = (covariance[1, 1] - covariance[0, 1] ** 2 / covariance[0, 0]).sqrt()
        edges = torch.arange(-12, 22, step).double()
        cdf = torch.special.ndtr((edges - middle[:, None]) / spread)
        for k, edge in enumerate(edges[:-1]):
            share = (draws == edge).double().mean()
            assert share == pytest.approx(float((cdf[:, k + 1] - cdf[:, k]).mean()), abs=0.012)
        torch.testing.assert_close(found.mode[:, 1], (middle / step).floor() * step)  # the step of the density's mode

    def test_an_observed_integer_may_lie_anywhere_in_its_step(self):
        """p(y2 | x1 = 0) is a mixture over y1 in [0, 1), in every row by itself: mean and spread by quadrature."""
        r = 0.95
        flow = self.flow((1.0, 0.0), torch.zeros(2).double(), torch.tensor([[1.0, r], [r, 1.0]]).double())
        x = torch.tensor([[0.0, math.nan]] * 160).double()
        found = impute_rows(flow, x, x.isnan(), draws=400, steps=1500, warmup=300, rounds=1, ascent=0)
        y1 = (torch.arange(1000).double() + 0.5) / 1000
        weight = torch.softmax(-0.5 * y1**2, 0)
        mean = float((weight * r * y1).sum())
        spread = math.sqrt(1 - r**2 + float((weight * (r * y1 - mean) ** 2).sum()))
        draws = found.draws[..., 1]
        assert (draws.mean(0) - mean).abs().max() < 0.35 * spread
        assert draws.mean() == pytest.approx(mean, abs=0.01)
        assert draws.std() == pytest.approx(spread, rel=0.03)
        assert draws.std(0).mean() == pytest.approx(spread, rel=0.03)
        assert torch.equal(found.draws[..., 0], torch.zeros(400, 160).double())
        x = x[:1].expand(200, -1)
        early = impute_rows(flow, x, x.isnan(), draws=400, ascent=0).draws[..., 1].mean(0)  # rows stop when they agree
        assert (early - mean).square().mean().sqrt() < 0.12 * spread

    def test_two_integers_have_their_joint_probabilities_within_bounds(self):
        """Both missing, cut off at 0 and 4: the mass of every square, by quadrature, over that of all."""
        mean, covariance = torch.tensor([2.0, 1.5]).double(), torch.tensor([[3.0, 1.5], [1.5, 2.0]]).double()
        flow = self.flow((1.0, 1.0), mean, covariance)
        x = torch.full((60, 2), math.nan).double()
        flow.units.box = lambda: tuple(flow.units.place(torch.full((1, 2), end).double()) for end in (0, 4 - 1e-6))
        found = impute_rows(flow, x, x.isnan(), **LONG)
        assert sorted(found.draws.unique().tolist()) == [0, 1, 2, 3]
        assert set(found.mode.unique().tolist()) <= {0, 1, 2, 3}
        assert (found.low >= 0).all()
        assert (found.high <= 3).all()
        fine = (torch.arange(400).double() + 0.5) / 100
        density = torch.distributions.MultivariateNormal(mean, covariance).log_prob(torch.cartesian_prod(fine, fine))
        mass = density.exp().view(4, 100, 4, 100).sum((1, 3))
        counts = torch.zeros(4, 4).double()
        a, b = found.draws.flatten(0, 1).long().unbind(1)
        counts.index_put_((a, b), torch.ones(len(a)).double(), accumulate=True)
        torch.testing.assert_close(counts / counts.sum(), mass / mass.sum(), rtol=0, atol=0.012)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_pixels_are_imputed_in_whole_levels(self, dtype: torch.dtype):
        flow = Flow(Units.pixels(4, 17, (-1.0, 1.0)), bent(4).bijection, Gaussian(4)).to(dtype)
        x = torch.randint(17, (6, 4)).to(dtype)
        hidden = torch.rand(6, 4) < 0.5
        found = impute_rows(flow, x.masked_fill(hidden, math.nan), hidden, **FAST)
        for values in (found.mode, *found.draws):
            assert torch.equal(values, values.round())
            assert 0 <= values.min() <= values.max() <= 16
            assert torch.equal(values[~hidden], x[~hidden])
        torch.testing.assert_close(found.nats, flow.log_prob(found.mode, noise=False).double())


class TestParts:
    def test_a_chain_starts_at_the_part_of_a_sample_that_is_likeliest_among_the_most_alike(self):
        flow = two_hills()
        walk = Walk(flow, 2, 4, 8, 1, torch.Generator().manual_seed(0))
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
            middle, spread = truth(mean, covariance, x[i], h)
            torch.testing.assert_close(means[i, h], middle, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close((factors[i] @ factors[i].mT)[h][:, h], spread, rtol=1e-6, atol=1e-6)
            assert torch.equal(factors[i][~h], torch.eye(dim).double()[~h])

    @settings(max_examples=30, deadline=None)
    @given(st.floats(-5, 5), st.floats(0.1, 5), st.floats(-4, 4))
    def test_the_box_and_its_slope(self, lower: float, width: float, number: float):
        ends = [(lower, lower + width), (lower, math.inf), (-math.inf, lower), (-math.inf, math.inf)]
        low, high = (torch.tensor([each]).double() for each in zip(*ends, strict=True))
        box, z = Box(low, high), torch.full((1, 4), number).double().requires_grad_()
        y, log_slope = box.leave(z)
        assert ((low <= y) & (y <= high)).all()
        (slope,) = torch.autograd.grad(y.sum(), z)
        torch.testing.assert_close(slope.abs().log(), log_slope.detach(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(box.enter(y), z, rtol=1e-6, atol=1e-6)

    def test_beyond_a_box_is_a_margin_inside_and_at_its_end_hardly(self):
        box = Box(torch.tensor([[0.0]]).double(), torch.tensor([[10.0]]).double())
        y = torch.tensor([[-3.0], [0.0], [10.0], [99.0]]).double()
        found = box.leave(box.enter(y))[0]
        torch.testing.assert_close(found, torch.tensor([[0.01], [1e-5], [10 - 1e-5], [9.99]]).double())

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


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"chains": 0}, "0 chains"),
            ({"draws": 402}, "a multiple of the 4 chains, got 402"),
            ({"draws": 12}, "12 draws"),
            ({"steps": 50}, "50 steps"),
            ({"warmup": 0}, "0 of warm-up"),
            ({"interval": 1.0}, "between 0 and 1"),
        ],
    )
    def test_of_options(self, refusal: Callable[..., str], options: dict, says: str):
        x = torch.zeros(2, 3).double()
        assert says in refusal(impute_rows, bent(3), x, x == 0, **options)

    def test_of_rows_and_flows(self, refusal: Callable[..., str]):
        flow, x = bent(3), torch.zeros(2, 3).double()
        assert "(N, 3)" in refusal(impute_rows, flow, x[:, :2], x[:, :2] == 0)
        assert "torch.float64" in refusal(impute_rows, flow, x, x)
        assert "floating-point numbers, got torch.uint8" in refusal(impute_rows, flow, x.byte(), x == 0)
        x[1, 2] = math.inf
        assert "row 1" in refusal(impute_rows, flow, x, x == 0)


class TestRounds:
    def test_rows_that_go_on_keep_what_is_theirs(self):
        """Rows that miss different cells, with an integer column: densities, steps and lines stay their own."""
        flow = bent(4)
        flow.units = Units.columns([0.0, 1.0, 0.0, 0.0]).double()
        hidden = torch.tensor([[True, False, False, True], [False, False, True, False], [True] * 4])
        walk = Walk(flow, 2, 4, 40, 5, torch.Generator().manual_seed(0))
        for i, at in walk.walk(torch.zeros(3, 4).double(), hidden, warmup=20, steps=40):
            if i == 10:
                before, steps, taken = at, walk.log_step, walk.taken
                walk.go_on(torch.tensor([False, True, True]))
                for old, new in ((before.y, walk.point.y), (steps, walk.log_step), (taken, walk.taken)):
                    assert torch.equal(old[1:], new)
            if i > 10:
                torch.testing.assert_close(walk.at(at.w).nats, at.nats, rtol=0, atol=1e-3)
                assert not at.w[~walk.hidden.expand_as(at.w)].any()  # no line along an observed cell
                assert (at.y[0, :, [0, 3]] == before.y[1, :, [0, 3]]).all()

    @pytest.mark.parametrize("keep", [4, 5, 7])
    @pytest.mark.parametrize("steps", [40, 57])
    def test_states_are_evenly_spaced_over_all_rounds(self, monkeypatch: pytest.MonkeyPatch, keep: int, steps: int):
        """Chains whose state is the number of the iteration never agree with their first half."""

        def count(walk: Walk, i: int) -> None:
            walk.point = walk.point._replace(y=torch.full_like(walk.point.y, i))

        monkeypatch.setattr(Walk, "iteration", count)
        flow, x = bent(3), torch.full((2, 3), math.nan).double()
        flow.units = Units.continuous(3, standardise=False).double()
        found = impute_rows(flow, x, x.isnan(), draws=2 * keep, chains=2, steps=steps, warmup=3, ascent=0)
        assert found.draws[:, 0, 0].tolist() == [round((k + 1) * steps / keep) for k in range(keep)] * 2
        assert torch.equal(found.draws, found.draws[:, :1, :1].expand_as(found.draws))

    def test_a_flow_of_float64_far_from_zero_keeps_its_digits(self):
        mean, covariance = torch.full((2,), 1e6).double(), torch.tensor([[1.0, 0.9], [0.9, 1.0]]).double()
        flow = real(Chain(whitening(mean, covariance)), 2)
        x = torch.tensor([[1e6 + 1, math.nan]] * 100).double()
        found = impute_rows(flow, x, x.isnan(), draws=80, steps=100, warmup=60, ascent=0)
        assert (found.draws[..., 1] - 1e6).mean() == pytest.approx(0.9, abs=0.03)


def test_no_chain_starts_where_the_model_has_hardly_any_density(monkeypatch: pytest.MonkeyPatch):
    """A wide Gaussian of a narrow model: of draws that are mostly far out, the likeliest is taken."""
    flow, x = real(Chain(), 2), torch.full((200, 2), math.nan).double()
    walk = Walk(flow, 4, 4, 40, 5, torch.Generator().manual_seed(0))
    walk.precision = walk.precision / 100  # ten times as wide
    walk.place(torch.zeros_like(x), x.isnan())
    far = [float((walk.start().y.norm(dim=-1) > 10).double().mean())]
    monkeypatch.setattr(langevin, "STARTS", 1)
    far.append(float((walk.start().y.norm(dim=-1) > 10).double().mean()))
    assert far[1] == pytest.approx(math.exp(-0.5), abs=0.06)
    assert far[0] == pytest.approx(math.exp(-0.5) ** 4, abs=0.05)
