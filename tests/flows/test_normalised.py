"""Every kind of flow is a density: its integrals and sums, by quadrature in float64, are 1.

A missing term of a log-determinant, of the units or of the prior changes them. So does a density that is positive where
there is no data.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from quadrature import Nodes, above, between, reals, steps, total, values
from scipy import stats
from torch import Tensor, nn
from zoo import randomised

from nicest.flows import (
    VAE,
    Affine,
    AffineSpline,
    Bijection,
    Bounded,
    Chain,
    Coupling,
    Density,
    DiagonalScaling,
    Elementwise,
    Flow,
    Gaussian,
    Law,
    Logistic,
    Logit,
    Mixture,
    OneHot,
    Partition,
    Prior,
    SinhArcsinh,
    Spline,
    Units,
)

PRIORS = {"gaussian": Gaussian, "logistic": Logistic}
priors = pytest.mark.parametrize("prior", PRIORS)


class Column(NamedTuple):
    """A kind of column: the step of its numbers, its number of bounds (from 0 on), and nodes that cover its support."""

    step: float
    ends: int
    nodes: Callable[[], Nodes]


COLUMNS = {
    "real": Column(0, 0, reals),
    "integer": Column(1, 0, lambda: steps(range(-90, 90))),
    "positive": Column(0, 1, lambda: above(0)),
    "fraction": Column(0, 2, lambda: between(0, 1)),
}
TOLERANCE = {"real": 1e-5, "integer": 1e-5}
NEAR_BOUNDS = 2e-3  # at most; mass that lies closer to a bound than float64 numbers do


def columns(*kinds: str) -> tuple[Units, dict[str, Bijection]]:
    """Units of columns of these kinds, and the layers that a chain must begin with."""
    found = [COLUMNS[kind] for kind in kinds]
    units = fitted(Units.columns([each.step for each in found]))
    ends = torch.tensor([each.ends for each in found])
    units.loc.copy_(torch.where(ends > 0, 0.0, units.loc))
    units.scale.copy_(torch.where(ends > 0, 1.0, units.scale))
    return units, {"bounds": Bounded(ends)} if ends.any() else {}


def fitted(units: Units) -> Units:
    units = units.double()
    units.fit(torch.full((units.dim,), 1.5), torch.full((units.dim,), 4.0))
    return units


def smooth(inputs: int, outputs: int) -> nn.Module:
    return randomised(nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)), std=0.2)


class Smooth(nn.Module):
    """A smooth coupling network of x_I1 and the context."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.both = smooth(inputs, outputs)

    def forward(self, x1: Tensor, context: Tensor | None = None) -> Tensor:
        return self.both(x1 if context is None else torch.cat((x1, context.to(x1)), 1))


def couplings(law: Law, context_dim: int) -> Chain:
    """Three couplings of the plane."""
    parts = [Partition([k], 2) for k in (0, 1, 0)]
    return Chain(*(Coupling(part, law, Smooth(1 + context_dim, law.size)) for part in parts))


def sinh_arcsinh(dim: int) -> SinhArcsinh:
    layer = SinhArcsinh(dim)
    for name, value in {"loc": 0.2, "log_scale": -0.1, "skew": 0.3, "log_tail": 0.2}.items():
        getattr(layer, name).fill_(value)
    return layer


def elementwise(dim: int, context_dim: int) -> Elementwise:
    law = AffineSpline(bins=4)
    return randomised(Elementwise(law, dim, smooth(context_dim, dim * law.size) if context_dim else None), std=0.2)


CHAINS: dict[str, Callable[[int, int], Bijection]] = {
    "identity": lambda dim, context_dim: Chain(),
    "sinh-arcsinh": lambda dim, context_dim: sinh_arcsinh(dim),
    "elementwise": elementwise,
}
PLANE: dict[str, Callable[[int], Bijection]] = {
    "affine": lambda context_dim: couplings(Affine(), context_dim),
    "spline": lambda context_dim: couplings(Spline(bins=4), context_dim),
    "all": lambda context_dim: Chain(
        sinh_arcsinh(2), couplings(AffineSpline(bins=4), context_dim), elementwise(2, context_dim), DiagonalScaling(2)
    ),
}


class Context(NamedTuple):
    embedding: nn.Module | None
    size: int
    example: Tensor | None


def context_of(kind: str) -> Context:
    if kind == "label":
        return Context(OneHot(3), 3, torch.tensor([2]))
    if kind == "numbers":
        return Context(None, 2, torch.tensor([0.3, -0.2], dtype=torch.float64))
    return Context(None, 0, None)


couplings_and_contexts = pytest.mark.parametrize(
    ("chain", "context"), [("affine", "none"), ("spline", "none"), ("all", "label"), ("all", "numbers")]
)


def flow_of(units: Units, first: dict[str, Bijection], bijection: Bijection, prior: str, context: Context) -> Flow:
    return Flow(units, Chain(first, bijection), PRIORS[prior](units.dim), context.embedding).double()


class TestOneColumn:
    @pytest.mark.parametrize("kind", COLUMNS)
    @pytest.mark.parametrize(
        ("chain", "context"),
        [*((chain, "none") for chain in CHAINS), ("elementwise", "label"), ("elementwise", "numbers")],
    )
    @priors
    def test_integrates_to_1(self, kind: str, chain: str, prior: str, context: str):
        (units, first), given = columns(kind), context_of(context)
        flow = flow_of(units, first, CHAINS[chain](1, given.size), prior, given)
        found = total(flow, COLUMNS[kind].nodes(), context=given.example)
        assert found == pytest.approx(1, abs=TOLERANCE.get(kind, NEAR_BOUNDS))
        assert found < 1 + 1e-5

    @pytest.mark.parametrize("chain", CHAINS)
    @priors
    def test_of_plain_units(self, chain: str, prior: str):
        for units, nodes in (
            (Units.continuous(1, standardise=False), reals()),
            (fitted(Units.continuous(1)), reals()),
            (fitted(Units.columns([1.0])), COLUMNS["integer"].nodes()),
            (fitted(Units.columns([0.25])), steps([k / 4 for k in range(-360, 360)])),
        ):
            flow = flow_of(units, {}, CHAINS[chain](1, 0), prior, context_of("none"))
            assert total(flow, nodes) == pytest.approx(1, abs=1e-5)

    @pytest.mark.parametrize("chain", CHAINS)
    @priors
    @pytest.mark.parametrize("levels", [2, 5])
    def test_of_pixels_by_their_logit(self, chain: str, prior: str, levels: int):
        units = Units.pixels(1, levels)
        flow = flow_of(units, {"logit": Logit()}, CHAINS[chain](1, 0), prior, context_of("none"))
        assert total(flow, values(range(levels))) == pytest.approx(1, abs=1e-4)

    @pytest.mark.parametrize("interval", [(0.0, 1.0), (-1.0, 1.0)], ids=str)
    def test_pixels_have_the_mass_in_their_interval(self, interval: tuple[float, float]):
        """Without a logit, the flow has mass outside the interval, which belongs to no level."""
        flow = Flow(Units.pixels(1, 5, interval), Chain(), Gaussian(1)).double()
        expected = stats.norm.cdf(interval[1]) - stats.norm.cdf(interval[0])
        assert total(flow, steps(range(5))) == pytest.approx(expected, abs=1e-5)

    @torch.no_grad()
    def test_the_mean_over_the_noise_is_a_bound(self):
        """A sum of exp of the mean log-probability is below 1: nobody gains by more noise."""
        units = Units.pixels(1, 3)
        flow = flow_of(units, {"logit": Logit()}, elementwise(1, 0), "logistic", context_of("none"))
        u = (torch.arange(2000, dtype=torch.float64) + 0.5)[:, None] / 2000
        means = [flow.log_prob(torch.full_like(u, level), noise=u).mean() for level in range(3)]
        assert 0.8 < float(torch.stack(means).exp().sum()) < 1


THINNER = {
    "real": lambda: reals(301, 5.0),
    "integer": lambda: steps(range(-40, 41), 12),
    "fraction": lambda: between(0, 1, 301, reach=25),
    "positive": lambda: above(0, 301, reach=25),
}  # nodes for integrals over two columns


class TestTwoColumns:
    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("real", "real"),
            ("fraction", "integer"),
            ("fraction", "positive"),
        ],
    )
    @couplings_and_contexts
    @priors
    def test_integrate_to_1(self, first: str, second: str, chain: str, prior: str, context: str):
        (units, layers), given = columns(first, second), context_of(context)
        flow = flow_of(units, layers, PLANE[chain](given.size), prior, given)
        found = total(flow, *(THINNER[kind]() for kind in (first, second)), context=given.example)
        assert found == pytest.approx(1, abs=5e-4 if first == second == "real" else 2 * NEAR_BOUNDS)

    @couplings_and_contexts
    def test_pixels_by_their_logit(self, chain: str, context: str):
        given = context_of(context)
        flow = flow_of(Units.pixels(2, 3), {"logit": Logit()}, PLANE[chain](given.size), "logistic", given)
        nodes = values(range(3), 121, reach=20)
        assert total(flow, nodes, nodes, context=given.example) == pytest.approx(1, abs=1e-3)

    @torch.no_grad()
    def test_a_context_changes_the_density(self):
        for kind in ("label", "numbers"):
            given = context_of(kind)
            flow = flow_of(Units.continuous(2), {}, PLANE["affine"](given.size), "gaussian", given)
            x = torch.zeros(1, 2, dtype=torch.float64)
            assert abs(float(flow.log_prob(x, given.example) - flow.log_prob(x, 0 * given.example))) > 1e-3


class TestMixture:
    @pytest.mark.parametrize("kind", ["shared units", "separate units", "with a context"])
    @pytest.mark.parametrize("training", [False, True])
    def test_integrates_to_1_in_both_modes(self, kind: str, training: bool):
        given = context_of("label" if kind == "with a context" else "none")
        made = [columns("positive")] * 3 if kind == "shared units" else [columns("positive") for _ in range(3)]
        flows = [
            flow_of(units, first, elementwise(1, given.size), prior, given)
            for (units, first), prior in zip(made, ("gaussian", "logistic", "gaussian"), strict=True)
        ]
        mixture = Mixture(flows, (0.5, 0.2, 0.3)).double().train(training)
        found = total(mixture, COLUMNS["positive"].nodes(), context=given.example)
        assert found == pytest.approx(1, abs=NEAR_BOUNDS)


class TestVAE:
    @staticmethod
    def of_table() -> VAE:
        units = columns("integer", "real")[0]
        encoder, decoder = smooth(2, 2), smooth(1, 4)
        decoder[-1].bias.data = torch.tensor([-1.0, 0.5, 0.0, 0.0], dtype=torch.float64)  # means inside the data
        return VAE(units, 1, encoder, decoder).double()

    @torch.no_grad()
    def test_the_sum_of_its_bounds_is_at_most_1(self):
        """The mean over ε of p(x, ε) / p(ε) is p(x), which sums to at most 1; the mean of its log is less."""
        vae = self.of_table()
        nodes = steps(range(-40, 41), 8), reals(301)
        x, u, weight = (torch.cartesian_prod(*each) for each in zip(*nodes, strict=True))
        y, weight = vae.units.enter(x, noise=u), weight.prod(1)
        e, w = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(40))
        w = w / w.sum()
        bounds = torch.stack([vae.bound(y, each.expand(len(y), 1)) for each in e]) + vae.units.log_det(y)
        exact = float((bounds.exp() * w[:, None]).sum(0) @ weight)
        bound = float((bounds * w[:, None]).sum(0).exp() @ weight)
        assert 0.5 < bound < exact < 1 + 1e-4

    @torch.no_grad()
    def test_log_prob_is_a_draw_of_that_bound(self):
        vae, n = self.of_table(), 20_000
        x, u = torch.tensor([[1.0, 0.3]], dtype=torch.float64), torch.full((n, 2), 0.5, dtype=torch.float64)
        e, w = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(40))
        y = vae.units.enter(x, noise=u[:1]).expand(40, 2)
        expected = (vae.bound(y, e[:, None]) + vae.units.log_det(y)) @ (w / w.sum())
        drawn = vae.log_prob(x.expand(n, 2), noise=u)
        assert float(drawn.mean()) == pytest.approx(float(expected), abs=5 * float(drawn.std()) / math.sqrt(n))


class TestSupport:
    OUTSIDE = {  # noqa: RUF012
        "pixels": [[300.0, 1.0], [5.0, 1.0], [-1.0, 1.0], [1.5, 1.0]],
        "integers": [[2.5, 1.0], [1.0, 1.0000001], [math.inf, 0.0]],
        "reals": [[math.inf, 0.0], [-math.inf, 0.0]],
    }
    INSIDE = {  # noqa: RUF012
        "pixels": [4.0, 0.0],
        "integers": [-2.0, 1.0],
        "reals": [-3.0, 1e6],
    }

    @staticmethod
    def units(kind: str) -> Units:
        return {
            "pixels": lambda: Units.pixels(2, 5),
            "integers": lambda: fitted(Units.columns([1.0, 1.0])),
            "reals": lambda: fitted(Units.continuous(2)),
        }[kind]()

    @pytest.mark.parametrize("kind", OUTSIDE)
    @pytest.mark.parametrize("density", ["flow", "mixture", "vae"])
    @torch.no_grad()
    def test_the_density_is_0_outside(self, kind: str, density: str):
        units = self.units(kind)
        first = {"logit": Logit()} if kind == "pixels" else {}  # a logit is NaN outside [0, 1]
        flow = flow_of(units, first, couplings(Affine(), 0), "gaussian", context_of("none"))
        made: Density = {
            "flow": lambda: flow,
            "mixture": lambda: Mixture([flow, flow]),
            "vae": lambda: VAE(units, 1, smooth(2, 2), smooth(1, 4)),
        }[density]().double()
        rows = torch.tensor([self.INSIDE[kind], *self.OUTSIDE[kind]], dtype=torch.float64)
        found = made.log_prob(rows)
        assert found[0].isfinite()
        assert (found[1:] == -math.inf).all()
        assert units.contains(rows).tolist() == [True] + [False] * (len(rows) - 1)

    def test_a_missing_number_has_no_density(self):
        flow = flow_of(Units.continuous(1), {}, Chain(), "gaussian", context_of("none"))
        assert flow.log_prob(torch.tensor([[math.nan]])).isnan().all()


class TestShapes:
    """A log-determinant (B, 1) would broadcast to (B, B) and give a wrong density without an error."""

    @pytest.mark.parametrize("method", ["forward", "inverse"])
    @pytest.mark.parametrize("wrong", ["log_det", "value"])
    def test_a_layer_that_returns_other_shapes_is_refused(self, method: str, wrong: str):
        def broken(self: Bijection, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            y, log_det = getattr(DiagonalScaling, method)(self, x, context)
            return (y, log_det[:, None]) if wrong == "log_det" else (y[:, :1], log_det)

        broken.__name__ = method
        layer = type("Broken", (DiagonalScaling,), {method: broken})(2)
        shapes = r"\(4, 2\) and \(4, 1\)" if wrong == "log_det" else r"\(4, 1\) and \(4,\)"
        with pytest.raises(ValueError, match=rf"Broken\.{method} must return .*, got {shapes}"):
            getattr(layer, method)(torch.randn(4, 2))


class Gumbel(Prior):
    """The law of the largest of many values: skewed to the right."""

    def standard_log_prob(self, e: Tensor) -> Tensor:
        return (-e - torch.exp(-e)).sum(-1)

    def standard_sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return -torch.log(-torch.rand(shape, generator=generator, dtype=self.loc.dtype).log())

    def standard_cdf(self, e: Tensor) -> Tensor:
        return torch.exp(-torch.exp(-e))


class TestAsymmetricPrior:
    def test_a_flow_with_it_integrates_to_1_and_its_draws_follow_it(self):
        flow = Flow(fitted(Units.continuous(1)), elementwise(1, 0), Gumbel(1)).double()
        assert total(flow, reals()) == pytest.approx(1, abs=1e-5)
        with torch.no_grad():
            h = flow.encode(flow.sample(4000, generator=torch.Generator().manual_seed(0)))
        assert stats.kstest(h[:, 0].numpy(), stats.gumbel_r.cdf).pvalue > 0.005
