"""From a recipe to a flow: which layers, in which order, and what is fitted to the data."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nicest.flows import (
    ZCA,
    Additive,
    Affine,
    Bijection,
    Coupling,
    DiagonalScaling,
    Flow,
    Gaussian,
    Logistic,
    Logit,
    Multiplicative,
    TriangularAffine,
)
from nicest.recipes import Recipe, load_recipe
from nicest.recipes.build import build, units_of
from nicest.recipes.recipe import DataSettings, ModelSettings

Refusal = Callable[..., str]
SMALL = ("model.width=8", "model.hidden_layers=1")
FOUR = [f"coupling{k}" for k in (1, 2, 3, 4)]


def on(name: str, *overrides: str, shape: tuple[int, ...] = (4, 4), levels: int = 256) -> Recipe:
    """A recipe that knows the shape and the levels of its data."""
    recipe = load_recipe(name).override(*overrides)
    return replace(recipe, data=replace(recipe.data, shape=shape, levels=levels))


def couplings(flow: Flow) -> list[Coupling]:
    return [layer for layer in flow.bijection if isinstance(layer, Coupling)]


def linears(coupling: Coupling) -> list[nn.Linear]:
    return [layer for layer in coupling.network.modules() if isinstance(layer, nn.Linear)]


@pytest.mark.parametrize(
    ("name", "shape", "millions", "half_a_digit"),
    [
        ("mnist", (28, 28), 19.16, 0.005),
        ("tfd", (48, 48), 346, 0.5),
        ("svhn", (3, 32, 32), 72.6, 0.05),
        ("cifar10", (3, 32, 32), 72.6, 0.05),
    ],
)
def test_couplings_and_scaling_have_the_papers_number_of_parameters(
    name: str, shape: tuple[int, ...], millions: float, half_a_digit: float, monkeypatch: pytest.MonkeyPatch
):
    recipe = on(name, shape=shape)
    units = units_of(recipe.data)  # constructing them needs values
    monkeypatch.setattr("nicest.recipes.build.units_of", lambda *_: units)
    with torch.device("meta"):  # no memory
        flow = build(recipe)
    counted = [layer for layer in flow.bijection if isinstance(layer, Coupling | DiagonalScaling)]
    assert sum(p.numel() for layer in counted for p in layer.parameters()) / 1e6 == pytest.approx(
        millions, abs=half_a_digit
    )


class TestLayers:
    @pytest.mark.parametrize(
        ("name", "levels", "before"),
        [
            ("mnist", 256, {}),
            ("tfd", 256, {"whitening": TriangularAffine}),
            ("svhn", 256, {"zca": ZCA}),
            ("mnist", 0, {}),
            ("cifar10", 0, {"zca": ZCA}),
        ],
    )
    def test_names_and_order(self, name: str, levels: int, before: dict[str, type]):
        layers = build(on(name, *SMALL, levels=levels)).bijection.layers
        assert list(layers) == [*before, *FOUR, "scaling"]
        expected = [*before.values(), *[Coupling] * 4, DiagonalScaling]
        assert [type(layer) for layer in layers.values()] == expected

    def test_logit_comes_before_the_couplings(self):
        layers = build(on("mnist", *SMALL, "model.preprocess=logit")).bijection.layers
        assert list(layers) == ["logit", *FOUR, "scaling"]
        assert isinstance(layers["logit"], Logit)

    def test_units_have_the_levels_of_the_data_and_its_interval(self):
        units = build(on("digits", *SMALL, "data.interval=[-3, 5]", levels=17)).units
        assert (units.levels, units.interval, units.standardise) == (17, (-3.0, 5.0), False)
        assert units.place(torch.tensor([[0.0, 17.0] * 8])).tolist() == [[-3.0, 5.0] * 8]

    def test_whitening_is_held_while_the_couplings_learn(self):
        flow = build(on("tfd", *SMALL))
        held = {name for name, p in flow.named_parameters() if not p.requires_grad}
        assert held == {f"bijection.layers.whitening.{part}" for part in ("below", "log_diagonal", "b")}


class TestPartitions:
    @pytest.mark.parametrize("dim", [2, 5, 6])
    def test_layers_1_and_3_change_the_papers_even_components(self, dim: int):
        odd, even = tuple(range(0, dim, 2)), tuple(range(1, dim, 2))  # as the paper counts, from 1
        for k, layer in enumerate(couplings(build(on("mnist", *SMALL, shape=(dim,)))), start=1):
            read, changed = (odd, even) if k % 2 else (even, odd)
            assert (layer.partition.i1, layer.partition.i2) == (read, changed)

    def test_halves_are_of_the_channel_planar_vector(self):
        first, second, *_ = couplings(build(on("svhn-released", *SMALL, shape=(3, 2, 2))))
        assert first.partition.i1 == second.partition.i2 == (0, 1, 2, 3, 4, 5)

    @pytest.mark.parametrize(("shape", "white"), [((2, 3), (0, 2, 4)), ((3, 2, 2), (0, 3, 4, 7, 8, 11))])
    def test_checkerboards_are_of_rows_and_columns(self, shape: tuple[int, ...], white: tuple[int, ...]):
        first, second, *_ = couplings(build(on("mnist", *SMALL, "model.partition=checkerboard", shape=shape)))
        assert first.partition.i1 == second.partition.i2 == white

    def test_a_checkerboard_of_plain_rows_is_refused(self, refusal: Refusal):
        message = refusal(build, on("mnist", *SMALL, "model.partition=checkerboard", shape=(16,)))
        assert "a checkerboard is for images, (H, W) or (C, H, W); these examples are (16,)" in message


class TestCouplingFunctions:
    @pytest.mark.parametrize(
        ("law", "kind", "outputs"),
        [("additive", Additive(), 8), ("multiplicative", Multiplicative(1.5), 8), ("affine", Affine(1.5), 16)],
    )
    def test_laws_with_their_bound_and_outputs(self, law: str, kind: object, outputs: int):
        for layer in couplings(build(on("mnist", *SMALL, f"model.law={law}", "model.bound=1.5"))):
            assert layer.law == kind
            assert linears(layer)[-1].out_features == outputs

    @pytest.mark.parametrize("name", ["mnist", "tfd-released", "cifar10-released", "svhn-released"])
    def test_each_has_its_own_depth_and_all_have_the_width(self, name: str):
        recipe = on(name, "model.width=7")
        depths = recipe.model.hidden_layers
        layers = couplings(build(recipe))
        assert len(layers) == recipe.model.couplings
        for k, layer in enumerate(layers):
            depth = depths[k] if len(depths) > 1 else depths[0]
            assert [linear.out_features for linear in linears(layer)] == [7] * depth + [8]


@pytest.mark.parametrize(("name", "kind"), [("mnist", Logistic), ("tfd", Gaussian)])
@pytest.mark.parametrize("learned", [False, True])
def test_prior_fixed_or_learned(name: str, kind: type, learned: bool):
    flow = build(on(name, *SMALL, f"model.learned_prior={str(learned).lower()}"))
    assert isinstance(flow.prior, kind)
    assert len(list(flow.prior.parameters())) == 2 * learned


class TestFittedConstants:
    def rows(self) -> Tensor:
        """Levels 0..16 of seven dependent pixels, one of which never varies."""
        rng = np.random.default_rng(5)
        rows = np.clip(8 + rng.normal(size=(300, 7)) @ rng.normal(size=(7, 7)) * 2, 0, 16).round()
        rows[:, 3] = 2
        return torch.from_numpy(rows.astype(np.uint8))

    def whitened(self, preprocess: str, interval: str) -> tuple[Flow, Bijection]:
        """A fitted flow in float64, and its whitening."""
        recipe = on(
            "digits", *SMALL, f"model.preprocess={preprocess}", f"data.interval={interval}", shape=(7,), levels=17
        )
        flow = build(recipe).double()
        flow.initialise(self.rows())
        return flow, next(iter(flow.bijection))

    @pytest.mark.parametrize("preprocess", ["zca", "triangular"])
    @pytest.mark.parametrize("interval", ["[0, 1]", "[-1, 1]", "[2, 5]"])
    def test_noisy_training_data_is_white_in_expectation(self, preprocess: str, interval: str):
        flow, layer = self.whitened(preprocess, interval)
        levels = self.rows().numpy().astype(float)
        mean, covariance = levels.mean(0) + 0.5, np.cov(levels.T, bias=True) + np.eye(7) / 12
        # from noisy levels to white noise is one affine map, x A + b
        b = layer(flow.units.place(torch.zeros(1, 7, dtype=torch.float64)))[0].numpy()
        a = layer(flow.units.place(torch.eye(7, dtype=torch.float64)))[0].numpy() - b
        np.testing.assert_allclose(mean @ a + b[0], 0, atol=1e-9)
        np.testing.assert_allclose(a.T @ covariance @ a, np.eye(7), atol=1e-9)

    def test_the_fit_is_in_float64(self):
        _, zca = self.whitened("zca", "[0, 1]")
        assert isinstance(zca, ZCA)
        assert zca.whiten.dtype == torch.float64
        assert not torch.equal(zca.whiten, zca.whiten.float().double())

    @pytest.mark.parametrize("preprocess", ["none", "zca", "triangular"])
    def test_continuous_columns_are_standardised_first(self, preprocess: str):
        scale = torch.logspace(-3, 3, 5)
        x = (torch.randn(400, 5) @ torch.randn(5, 5)) * scale + 10 * scale
        flow = build(on("digits", *SMALL, f"model.preprocess={preprocess}", shape=(5,), levels=0)).double()
        flow.initialise(x)
        standard = flow.units.enter(x.double())
        torch.testing.assert_close(standard.mean(0), torch.zeros(5, dtype=torch.float64), atol=1e-9, rtol=0)
        torch.testing.assert_close(standard.std(0, correction=0), torch.ones(5, dtype=torch.float64))
        if preprocess != "none":
            white = next(iter(flow.bijection))(standard)[0]
            torch.testing.assert_close(white.T.cov(correction=0), torch.eye(5, dtype=torch.float64))

    @pytest.mark.parametrize(
        ("name", "levels", "fitted"),
        [
            ("mnist", 256, set()),
            ("cifar10-released", 256, set()),
            ("cifar10", 256, {"zca"}),
            ("tfd", 256, {"whitening"}),
            ("mnist", 0, {"units"}),
        ],
    )
    def test_nothing_else_is_fitted(self, name: str, levels: int, fitted: set[str]):
        flow = build(on(name, *SMALL[:1], levels=levels))
        before = {key: value.clone() for key, value in flow.state_dict().items()}
        flow.initialise(torch.randint(0, 9, (50, 16)))
        changed = {key for key, value in flow.state_dict().items() if not torch.equal(before[key], value)}
        assert {key.removeprefix("bijection.layers.").split(".")[0] for key in changed} == fitted

    def test_logit_of_continuous_data_is_refused(self, refusal: Refusal):
        message = refusal(build, on("digits", *SMALL, "model.preprocess=logit", shape=(5,), levels=0))
        assert "preprocess = logit is for pixels in [0, 1]; this data is continuous" in message


class TestUnit:
    def test_interval_nats_of_the_papers_intervals(self):
        assert units_of(on("mnist", shape=(28, 28)).data).interval_nats == pytest.approx(784 * math.log(256))
        assert units_of(on("cifar10", shape=(3, 32, 32)).data).interval_nats == pytest.approx(3072 * math.log(128))
        assert units_of(on("mnist", shape=(5,), levels=0).data).interval_nats == 0


def test_whitening_of_very_many_columns_is_refused_with_the_remedy(refusal: Callable[..., str]):
    recipe = Recipe(data=DataSettings(name="x", shape=(10_000,)), model=ModelSettings(preprocess="zca"))
    assert "set model.preprocess=none" in refusal(build, recipe)
