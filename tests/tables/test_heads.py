"""Distributions of single cells against quadrature, scipy and mpmath."""

import math

import mpmath
import numpy as np
import pytest
import torch
from exact import column, grid, nodes, number_head
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from nicest.tables.heads import Categories, Numbers, log_mass, truncated_quantile
from nicest.tables.model import FAR

# atoms, low, high, step
KINDS = {
    "density": ((), -FAR, FAR, 0.0),
    "above": ((), -0.5, FAR, 0.0),
    "between": ((), -0.5, 2.0, 0.0),
    "atoms": ((-1.0, 0.25), -FAR, FAR, 0.0),
    "atom at a bound": ((0.0, 1.5), 0.0, FAR, 0.0),
    "atoms at both bounds": ((0.0, 1.0), 0.0, 1.0, 0.0),
    "padded atoms": ((-1.0, math.nan), -FAR, 3.0, 0.0),
    "grid": ((), -FAR, FAR, 0.25),
    "bounded grid": ((), -0.3, 2.1, 0.3),
    "grid with atoms": ((0.1 * 3, 0.1 * 6), 0.0, FAR, 0.1),
}
SHARES = np.array([1e-9, 1e-3, 0.05, 0.3, 0.5, 0.77, 0.99, 1 - 1e-6])


@st.composite
def heads(draw: st.DrawFn, kinds: tuple[str, ...] = tuple(KINDS)) -> Numbers:
    atoms, low, high, step = KINDS[draw(st.sampled_from(kinds))]
    n = draw(st.integers(1, 3))

    def several(a: float, b: float, n: int = n) -> list[float]:
        return draw(st.lists(st.floats(a, b), min_size=n, max_size=n))

    logits = [-1e4 if math.isnan(each) else draw(st.floats(-3, 3)) for each in atoms] + several(-3, 3)
    return number_head(several(-3, 3), several(-2.5, 0.4), logits, atoms=atoms, low=low, high=high, step=step)


def steps_of(head: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """Grid points of a head and their probabilities."""
    x = grid(float(head.step), float(head.low), float(head.high))
    return x, head.log_prob(column(x)).exp()[:, 0].numpy()


def density_of(head: Numbers, low: float = -FAR, high: float = FAR) -> tuple[np.ndarray, np.ndarray]:
    """Nodes between two ends and the probability of each."""
    x, weight = nodes(max(low, float(head.low)), min(high, float(head.high)))
    return x, weight * head.log_prob(column(x)).exp()[:, 0].numpy()


def atoms_of(head: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """Atoms and their probabilities; none on grids, where atoms are grid points."""
    x = head.atoms[0].numpy()
    x = x[~np.isnan(x)] if not head.step else x[:0]
    return x, head.log_prob(column(x)).exp()[:, 0].numpy()


def points_of(head: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """Everything that has probability, up to the error of quadrature."""
    parts = [steps_of(head)] if head.step else [density_of(head), atoms_of(head)]
    return np.concatenate([x for x, _ in parts]), np.concatenate([p for _, p in parts])


class TestNumbers:
    @settings(max_examples=60, deadline=None)
    @given(heads())
    def test_probabilities_sum_to_one(self, head: Numbers):
        assert points_of(head)[1].sum() == pytest.approx(1, abs=1e-12 if head.step else 1e-9)

    @settings(max_examples=30, deadline=None)
    @given(heads(), st.floats(-3, 3))
    def test_cdf_is_the_sum_of_what_lies_below(self, head: Numbers, at: float):
        for x in (at, *(each for each in head.atoms[0].tolist() if not math.isnan(each))):
            if head.step:
                x = (at > 0) * float(head.step) / 2 + round(x / float(head.step)) * float(head.step)
                values, p = steps_of(head)
                below, strictly = p[values <= x + 1e-9].sum(), p[values < x - 1e-9].sum()
            else:
                smooth = density_of(head, high=x)[1].sum() if x > float(head.low) else 0.0
                values, p = atoms_of(head)
                below, strictly = smooth + p[values <= x].sum(), smooth + p[values < x].sum()
            assert float(head.cdf(column([x]))) == pytest.approx(below, abs=1e-9)
            assert float(head.cdf(column([x]), strict=True)) == pytest.approx(strictly, abs=1e-9)

    @settings(max_examples=40, deadline=None)
    @given(heads())
    def test_quantile_is_the_smallest_number_that_reaches_the_share(self, head: Numbers):
        x = head.quantile(column(SHARES))
        reached = head.cdf(x + 1e-12 * (1 + x.abs()))[:, 0].numpy()
        before = head.cdf(x - (head.step / 2 if head.step else 1e-7 * (1 + x.abs())))[:, 0].numpy()
        assert (reached >= SHARES * (1 - 1e-7) - 1e-15).all()
        assert (before <= SHARES).all()
        assert ((x >= head.low) & (x <= head.high)).all()
        if head.step:
            np.testing.assert_allclose(x, torch.round(x / head.step) * head.step, atol=1e-12)

    def test_quantiles_reach_atoms_far_from_narrow_components(self):
        head = number_head([0.0], [-8.0], [3.0, 0.0], atoms=(40.0,))
        assert float(head.quantile(column([0.5]))) == 40

    @pytest.mark.parametrize("kind", KINDS)
    @settings(max_examples=5, deadline=None)
    @given(data=st.data())
    def test_moments_and_crps(self, kind: str, data: st.DataObject):
        head = data.draw(heads((kind,)))
        x, p = points_of(head)
        mean = (x * p).sum()
        deviation = math.sqrt(((x - mean) ** 2 * p).sum())
        found, variance = (float(each) for each in head.moments())
        slack = 0.005 * deviation + 0.25 * float(head.step)
        assert found == pytest.approx(mean, abs=slack)
        assert math.sqrt(variance) == pytest.approx(deviation, abs=2 * slack)
        order = np.argsort(x, kind="stable")
        x, p = x[order], p[order]
        for y in (x[np.searchsorted(p.cumsum(), 0.3)], x[np.searchsorted(p.cumsum(), 0.999)]):
            # E|X - y| - E|X - X'| / 2, the second by sorted values
            spread = (p * (2 * p.cumsum() - p - 1) * x).sum()
            score = (p * np.abs(x - y)).sum() - spread
            assert float(head.crps(column([y]))) == pytest.approx(
                score, rel=0.01, abs=0.02 * deviation + 0.2 * float(head.step)
            )

    def test_moments_of_one_grid_point(self):
        head = number_head([0.8], [-4.0], [0.0], step=2.0)
        assert [float(each) for each in head.moments()] == pytest.approx([0, 0], abs=1e-9)
        assert float(head.crps(column([4.0]))) == pytest.approx(4, abs=1e-4)

    @settings(max_examples=15, deadline=None)
    @given(heads())
    def test_samples_follow_the_cdf(self, head: Numbers):
        head = head.rows(torch.zeros(4_000, dtype=torch.long))
        x = head.sample(torch.Generator().manual_seed(0))
        one = head.rows(slice(0, 1))
        rng = np.random.default_rng(0)
        low, high = (head.cdf(x, strict=strict)[:, 0].numpy() for strict in (True, False))
        assert stats.kstest(low + rng.random(len(low)) * (high - low), "uniform").pvalue > 1e-6
        assert torch.isfinite(one.log_prob(x)).all()

    @settings(max_examples=40, deadline=None)
    @given(heads(), st.lists(st.floats(-4, 4), min_size=4, max_size=4, unique_by=lambda x: round(x, 1)))
    def test_intervals(self, head: Numbers, ends: list[float]):
        """Their probability is what has probability inside; samples lie inside, in the right shares."""
        a, b, c, d = sorted(ends)
        intervals = [(a, b), (c, d)]
        if head.step:
            x, p = steps_of(head)
            inside = [
                ((x >= low - 1e-6 * head.step.item()) & (x <= high + 1e-6 * head.step.item()))
                for low, high in intervals
            ]
            masses = [p[each].sum() for each in inside]
        else:
            atoms, p = atoms_of(head)
            masses = [
                (
                    density_of(head, low, high)[1].sum()
                    if min(high, head.high.item()) > max(low, head.low.item())
                    else 0.0
                )
                + p[(atoms >= low) & (atoms <= high)].sum()
                for low, high in intervals
            ]
        total = sum(masses)
        assert float(head.log_probability(intervals).exp()) == pytest.approx(total, abs=1e-9)
        if total < 1e-12:
            return
        x = head.rows(torch.zeros(1_000, dtype=torch.long)).sample(torch.Generator().manual_seed(1), intervals)[:, 0]
        slack = 1e-6 * float(head.step)
        first = ((x >= a - slack) & (x <= b + slack)).double().mean().item()
        second = ((x >= c - slack) & (x <= d + slack)).double().mean().item()
        assert first + second == 1 if b < c else first <= 1
        assert first == pytest.approx(masses[0] / total, abs=6 * math.sqrt(0.25 / 1_000))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("x", [0.0, 1.0, -1e3, 1e3, 3e38, math.inf])
    def test_gradients_are_finite(self, kind: str, x: float):
        atoms, low, high, step = KINDS[kind]
        parameters = [torch.randn(1, 1, 2, dtype=torch.float32, requires_grad=True) for _ in range(2)]
        logits = torch.zeros(1, 1, len(atoms) + 2, requires_grad=True)
        log_p = logits.log_softmax(-1)
        constants = (torch.tensor([each]) for each in (low, high, step, 0.0))
        places = torch.tensor([atoms]).reshape(1, -1)
        head = Numbers(
            log_p[..., : len(atoms)], log_p[..., len(atoms) :], *parameters, places, *constants, True, step > 0
        )
        nats = head.log_prob(torch.tensor([[x]]))
        assert not nats.isnan().any()
        torch.where(torch.isneginf(nats), 0.0, nats).sum().backward()
        assert all(torch.isfinite(each.grad).all() for each in (*parameters, logits))


class TestTails:
    @pytest.mark.parametrize(("a", "b"), [(-1000, -999.5), (40, 41), (700, 1e9), (-3, -3 + 1e-12), (-1e9, 800)])
    def test_log_mass(self, a: float, b: float):
        with mpmath.workdps(900):
            cdf = [1 / (1 + mpmath.exp(-mpmath.mpf(each))) for each in (a, b)]
            exact = float(mpmath.log(cdf[1] - cdf[0]))
        found = float(log_mass(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)))
        assert found == pytest.approx(exact, rel=1e-4 if b - a < 1e-9 else 1e-13)

    @pytest.mark.parametrize(("a", "b"), [(-1000, -999), (-1000, 1000), (40, 41), (700, 1e9), (-2, 3), (-1e9, -700)])
    @pytest.mark.parametrize("share", [1e-12, 0.2, 0.5, 0.999])
    def test_truncated_quantile(self, a: float, b: float, share: float):
        with mpmath.workdps(900):
            low, high = (1 / (1 + mpmath.exp(-mpmath.mpf(each))) for each in (a, b))
            level = low + mpmath.mpf(share) * (high - low)
            exact = float(mpmath.log(level) - mpmath.log(1 - level))
        found = truncated_quantile(*(torch.tensor(each, dtype=torch.float64) for each in (a, b, share)))
        assert float(found) == pytest.approx(exact, rel=1e-12, abs=1e-12)

    @pytest.mark.parametrize("share", [0.0, 1.0])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_ends_of_uniform_numbers(self, share: float, dtype: torch.dtype):
        ends = torch.tensor([[-2.0, 3.0], [30.0, 31.0], [-1e9, 9.0]], dtype=dtype)
        found = truncated_quantile(ends[:, 0], ends[:, 1], torch.full((3,), share, dtype=dtype))
        torch.testing.assert_close(found, ends[:, int(share)])


class TestCategories:
    @settings(max_examples=20, deadline=None)
    @given(st.lists(st.floats(-300, 300), min_size=2, max_size=6))
    def test_probabilities(self, logits: list[float]):
        head = Categories(torch.tensor([logits], dtype=torch.float64).log_softmax(-1))
        n = len(logits)
        p = head.log_prob(torch.arange(n, dtype=torch.float64)[:, None]).exp()[:, 0]
        assert float(p.sum()) == pytest.approx(1, abs=1e-12)
        assert torch.isneginf(head.log_prob(torch.tensor([[-1.0], [n], [0.5], [math.inf]]))).all()
        assert float(head.log_probability([(1.0, math.inf)]).exp()) == pytest.approx(float(p[1:].sum()), abs=1e-12)

    def test_samples(self):
        head = Categories(torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(20_000, 4))
        x = head.sample(torch.Generator().manual_seed(0))
        counts = torch.bincount(x.long(), minlength=4).numpy()
        assert stats.chisquare(counts, np.array([0.1, 0.2, 0.3, 0.4]) * 20_000).pvalue > 1e-4
        some = head.sample(torch.Generator().manual_seed(0), [(0.0, 0.0), (2.0, 2.5)])
        counts = torch.bincount(some.long(), minlength=4).numpy()
        assert counts[1] == counts[3] == 0
        assert counts[0] / 20_000 == pytest.approx(0.25, abs=0.015)
