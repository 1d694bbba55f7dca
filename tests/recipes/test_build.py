"""From a recipe to a flow: which layers, in which order, and what is fitted to the data."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from nicest.recipes.units import interval_nats
from torch import Tensor, nn

from nicest.flows import (
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
    Multiplicative,
    Rescale,
    TriangularAffine,
    moments,
)
from nicest.recipes import Recipe, load_recipe
from nicest.recipes.build import build, fit_constants, input_layers, needs_moments
from nicest.recipes.recipe import DataSettings, ModelSettings

Refusal = Callable[..., str]
SMALL = ("model.width=8", "model.hidden_layers=1")
FOUR = [f"coupling{k}" for k in (1, 2, 3, 4)]


def on(name: str, *overrides: str, shape: tuple[int, ...] = (4, 4), levels: int = 256) -> Recipe:
    """A recipe that knows the shape and the levels of its data."""
    recipe = load_recipe(name).override(*overrides)
    return replace(recipe, data=replace(recipe.data, shape=shape, levels=levels))


def couplings(flow: Flow) -> list[Coupling]:
    return [layer for layer in flow.chain if isinstance(layer, Coupling)]


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
    name: str, shape: tuple[int, ...], millions: float, half_a_digit: float
):
    with torch.device("meta"):  # no memory; the interval layer has no parameters, and looks at its values
        flow = build(on(name, "data.interval=[0, 1]", shape=shape))
    counted = [layer for layer in flow.chain if isinstance(layer, Coupling | DiagonalScaling)]
    assert sum(p.numel() for layer in counted for p in layer.parameters()) / 1e6 == pytest.approx(
        millions, abs=half_a_digit
    )


class TestLayers:
    @pytest.mark.parametrize(
        ("name", "levels", "before"),
        [
            ("mnist", 256, {"dequantise": Dequantize}),
            ("tfd", 256, {"dequantise": Dequantize, "whitening": TriangularAffine}),
            ("svhn", 256, {"dequantise": Dequantize, "zca": ZCA}),
            ("cifar10", 256, {"dequantise": Dequantize, "interval": Rescale, "zca": ZCA}),
            ("mnist", 0, {"standardise": Rescale}),
            ("cifar10", 0, {"standardise": Rescale, "zca": ZCA}),
        ],
    )
    def test_names_and_order(self, name: str, levels: int, before: dict[str, type]):
        layers = build(on(name, *SMALL, levels=levels)).chain.layers
        assert list(layers) == [*before, *FOUR, "scaling"]
        expected = [*before.values(), *[Coupling] * 4, DiagonalScaling]
        assert [type(layer) for layer in layers.values()] == expected

    def test_logit_comes_before_the_couplings(self):
        layers = build(on("mnist", *SMALL, "model.preprocess=logit")).chain.layers
        assert list(layers) == ["dequantise", "logit", *FOUR, "scaling"]
        assert isinstance(layers["logit"], Logit)

    def test_dequantises_by_the_levels_of_the_data(self):
        layer = build(on("digits", *SMALL, levels=17)).chain.layers["dequantise"]
        assert isinstance(layer, Dequantize)
        assert layer.levels == 17

    def test_the_interval_layer_maps_onto_the_interval(self):
        layer = input_layers(on("cifar10", "data.interval=[-3, 5]", shape=(2,)).data)["interval"]
        assert layer(torch.tensor([[0.0, 1.0]]))[0].tolist() == [[-3.0, 5.0]]

    def test_whitening_is_held_while_the_couplings_learn(self):
        flow = build(on("tfd", *SMALL))
        held = {name for name, p in flow.named_parameters() if not p.requires_grad}
        assert held == {f"chain.layers.whitening.{part}" for part in ("below", "log_diagonal", "b")}

    def test_the_scaling_starts_at_one(self):
        layer = build(on("mnist-released", *SMALL)).chain.layers["scaling"]
        assert isinstance(layer, DiagonalScaling)
        assert layer.s.eq(0).all()


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
    @pytest.mark.parametrize(("law", "kind", "outputs"), [("additive", Additive(), 8), ("affine", Affine(1.5), 16)])
    def test_laws_with_their_bound_and_outputs(self, law: str, kind: object, outputs: int):
        for layer in couplings(build(on("mnist", *SMALL, f"model.law={law}", "model.bound=1.5"))):
            assert layer.law == kind
            assert linears(layer)[-1].out_features == outputs

    def test_multiplicative_law(self):
        laws = [layer.law for layer in couplings(build(on("mnist", *SMALL, "model.law=multiplicative")))]
        assert laws == [Multiplicative(2.0)] * 4

    @pytest.mark.parametrize("name", ["mnist", "tfd-released", "cifar10-released", "svhn-released"])
    def test_each_has_its_own_depth_and_all_have_the_width(self, name: str):
        recipe = on(name, "model.width=7")
        depths = recipe.model.hidden_layers
        layers = couplings(build(recipe))
        assert len(layers) == recipe.model.couplings
        for k, layer in enumerate(layers):
            depth = depths[k] if len(depths) > 1 else depths[0]
            assert [linear.out_features for linear in linears(layer)] == [7] * depth + [8]

    def test_dropout_follows_every_rectifier(self):
        for layer in couplings(build(on("digits", "model.width=8", "model.hidden_layers=3", "model.dropout=0.3"))):
            kinds = [type(module) for module in layer.network.modules()]
            assert kinds.count(nn.Dropout) == kinds.count(nn.ReLU) == 3
            assert {m.p for m in layer.network.modules() if isinstance(m, nn.Dropout)} == {0.3}

    def test_uniform_is_within_a_hundredth_with_zero_biases(self):
        for layer in couplings(build(on("mnist-released", "model.width=100"))):
            for linear in linears(layer):
                assert 0.009 < linear.weight.abs().max() <= 0.01
                assert linear.bias.eq(0).all()

    def test_zero_last_starts_as_the_identity(self):
        flow = build(on("mnist", *SMALL, "model.initialisation=zero-last", levels=0))
        x = torch.randn(5, 16)
        assert torch.equal(flow.encode(x), x)
        assert linears(couplings(flow)[0])[0].weight.ne(0).any()

    def test_torchs_own_is_torchs_own(self):
        torch.manual_seed(7)
        expected = nn.Linear(8, 8).weight
        torch.manual_seed(7)
        assert torch.equal(linears(couplings(build(on("mnist", *SMALL)))[0])[0].weight, expected)


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

    def whitened(self, preprocess: str, interval: str) -> tuple[Flow, Chain]:
        """A fitted flow in float64, and the chain up to its whitening."""
        recipe = on(
            "digits", *SMALL, f"model.preprocess={preprocess}", f"data.interval={interval}", shape=(7,), levels=17
        )
        flow = build(recipe).double()
        fit_constants(flow, *moments(self.rows()))
        return flow, flow.chain[: list(flow.chain.layers).index("coupling1")]

    @pytest.mark.parametrize("preprocess", ["zca", "triangular"])
    @pytest.mark.parametrize("interval", ["[0, 1]", "[-1, 1]", "[2, 5]"])
    def test_noisy_training_data_is_white_in_expectation(self, preprocess: str, interval: str):
        _, chain = self.whitened(preprocess, interval)
        levels = self.rows().numpy().astype(float)
        mean = (levels.mean(0) + 0.5) / 17
        covariance = (np.cov(levels.T, bias=True) + np.eye(7) / 12) / 17**2
        after = chain[1:]  # what follows the dequantisation is one affine map, x A + b
        b = after(torch.zeros(1, 7, dtype=torch.float64))[0].numpy()
        a = after(torch.eye(7, dtype=torch.float64))[0].numpy() - b
        np.testing.assert_allclose(mean @ a + b[0], 0, atol=1e-9)
        np.testing.assert_allclose(a.T @ covariance @ a, np.eye(7), atol=1e-9)

    @pytest.mark.parametrize("preprocess", ["zca", "triangular"])
    def test_noisy_training_data_is_white_in_many_draws(self, preprocess: str):
        _, chain = self.whitened(preprocess, "[-1, 1]")
        draws = chain(self.rows().repeat(500, 1))[0]
        assert draws.mean(0).abs().max() < 0.01
        assert (draws.T.cov() - torch.eye(7)).abs().max() < 0.01

    def test_the_fit_is_in_float64(self):
        flow, _ = self.whitened("zca", "[0, 1]")
        zca = flow.chain.layers["zca"]
        assert isinstance(zca, ZCA)
        assert zca.whiten.dtype == torch.float64
        assert not torch.equal(zca.whiten, zca.whiten.float().double())

    @pytest.mark.parametrize("preprocess", ["none", "zca", "triangular"])
    def test_continuous_columns_are_standardised_first(self, preprocess: str):
        scale = torch.logspace(-3, 3, 5)
        x = (torch.randn(400, 5) @ torch.randn(5, 5)) * scale + 10 * scale
        flow = build(on("digits", *SMALL, f"model.preprocess={preprocess}", shape=(5,), levels=0)).double()
        fit_constants(flow, *moments(x))
        standard = flow.chain[:1](x.double())[0]
        torch.testing.assert_close(standard.mean(0), torch.zeros(5, dtype=torch.float64), atol=1e-9, rtol=0)
        torch.testing.assert_close(standard.std(0, correction=0), torch.ones(5, dtype=torch.float64))
        if preprocess != "none":
            white = flow.chain[:2](x.double())[0]
            torch.testing.assert_close(white.T.cov(correction=0), torch.eye(5, dtype=torch.float64))

    def test_dependent_continuous_columns_cannot_be_whitened(self, refusal: Refusal):
        x = torch.randn(50, 3)
        x[:, 2] = x[:, 0]
        flow = build(on("digits", *SMALL, "model.preprocess=zca", shape=(3,), levels=0)).double()
        assert "got rank 2 of 3" in refusal(fit_constants, flow, *moments(x))

    @pytest.mark.parametrize(
        ("name", "levels", "needed"),
        [
            ("mnist", 256, False),
            ("cifar10-released", 256, False),
            ("cifar10", 256, True),
            ("tfd", 256, True),
            ("mnist", 0, True),
        ],
    )
    def test_moments_are_needed_where_something_is_fitted(self, name: str, levels: int, needed: bool):
        flow = build(on(name, *SMALL[:1], levels=levels))
        assert needs_moments(flow) is needed
        before = {key: value.clone() for key, value in flow.state_dict().items()}
        fit_constants(flow, torch.full((16,), 3.0).double(), 2 * torch.eye(16).double())
        assert needed is any(not torch.equal(before[key], value) for key, value in flow.state_dict().items())

    def test_logit_of_continuous_data_is_refused(self, refusal: Refusal):
        message = refusal(build, on("digits", *SMALL, "model.preprocess=logit", shape=(5,), levels=0))
        assert "preprocess = logit is for pixels in [0, 1]; this data is continuous" in message


class TestUnit:
    def test_interval_nats_of_the_papers_intervals(self):
        assert interval_nats(on("mnist", shape=(28, 28)).data) == pytest.approx(784 * math.log(256))
        assert interval_nats(on("cifar10", shape=(3, 32, 32)).data) == pytest.approx(3072 * math.log(128))
        assert interval_nats(on("mnist", shape=(5,), levels=0).data) == 0

    @pytest.mark.parametrize("interval", ["[0, 1]", "[-1, 1]", "[-3, 5]"])
    def test_interval_nats_are_what_the_input_layers_take(self, interval: str):
        data = on("digits", f"data.interval={interval}", levels=17).data
        log_det = Chain(input_layers(data))(torch.zeros(2, 16))[1]
        torch.testing.assert_close(log_det, torch.full((2,), -interval_nats(data)))


def test_whitening_of_very_many_columns_is_refused_with_the_remedy(refusal: Callable[..., str]):
    recipe = Recipe(data=DataSettings(name="x", shape=(10_000,)), model=ModelSettings(preprocess="zca"))
    assert "set model.preprocess=none" in refusal(build, recipe)
