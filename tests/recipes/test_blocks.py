"""`[[model.blocks]]`: what a recipe may list as its layers, how it is written and built, and what is refused."""

import re
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nicest
from nicest.flows import LAWS, Affine, Coupling, DiagonalScaling, Flow, Law
from nicest.flows.noise import Dropout
from nicest.recipes import Recipe, load_recipe, names, parse
from nicest.recipes.blocks import LAYERS, NETWORKS, Block, layer_of, network_of
from nicest.recipes.build import build
from nicest.recipes.checks import defaults_of
from nicest.recipes.defaults import settings_given
from nicest.recipes.recipe import ModelSettings
from nicest.tasks.evaluate import evaluate
from nicest.train.fit import train
from small_runs import equal, last, model

Refusal = Callable[..., str]
PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
MNIST = """
[[model.blocks]]
kind = "coupling"
repeat = 4
partition = "odd-even"
law = { kind = "additive" }
network = { kind = "mlp", hidden_layers = 5, width = 1000, dropout = 0.0, initialisation = "torch" }
[[model.blocks]]
kind = "scaling"
"""
AFFINE = """
[data]
name = "digits"
[[model.blocks]]
kind = "zca"
shrinkage = 0.1
[[model.blocks]]
kind = "coupling"
repeat = 2
law = { kind = "affine", bound = 1.5 }
network = { kind = "mlp", hidden_layers = 3, width = 8 }
[[model.blocks]]
kind = "coupling"
repeat = 2
partition = "checkerboard"
network = { kind = "mlp", hidden_layers = 3, width = 8, dropout = 0.1 }
[[model.blocks]]
kind = "scaling"
[train]
epochs = 2
batch = 100
lr = 1e-2
"""

SMALL: dict[str, Any] = {"kind": "mlp", "hidden_layers": 1, "width": 4}


def listed(*layers: Block, shape: tuple[int, ...] = (4, 4), levels: int = 17) -> Recipe:
    """A recipe of these layers that knows its data."""
    recipe = Recipe(model=ModelSettings(blocks=layers))
    return replace(recipe, data=replace(recipe.data, shape=shape, levels=levels))


def shapes(flow: Flow) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in flow.state_dict().items()}


def couplings(flow: Flow) -> list[Coupling]:
    return [layer for layer in flow.bijection if isinstance(layer, Coupling)]


def coupling(repeat: int = 1, partition: str = "odd-even", **network: Any) -> Block:
    small = network_of(**SMALL | network)
    return layer_of("coupling", repeat=repeat, partition=partition, network=small)


words = st.text(string.ascii_letters + "_", min_size=1, max_size=8).filter(lambda word: word != "kind")
scalars = st.one_of(
    st.booleans(),
    st.integers(1 - 2**63, 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
)
share = st.floats(0, 1)
laws = st.builds(
    lambda kind, settings: Block(kind, tuple(sorted(settings.items()))),
    st.sampled_from(sorted(LAWS)) | st.text(max_size=12),
    st.dictionaries(words, scalars | st.lists(scalars, max_size=3).map(tuple), max_size=3),
)
depth, width, below_one = st.integers(0, 9), st.integers(1, 2_000), st.floats(0, 1, exclude_max=True)
starts = st.sampled_from(["torch", "uniform", "zero-last"])


def some(make: Callable[..., Block], kind: str, **settings: Any) -> st.SearchStrategy[Block]:
    return st.builds(make, st.just(kind), **settings)


networks = st.one_of(
    some(network_of, "mlp", hidden_layers=depth, width=width, dropout=below_one, initialisation=starts),
    some(network_of, "conv", blocks=depth, width=width, dropout=below_one),
)
partitions = st.sampled_from(["odd-even", "halves", "checkerboard", "channels"])
any_block = st.one_of(
    some(layer_of, "sinh-arcsinh"),
    some(layer_of, "zca", shrinkage=share),
    some(layer_of, "triangular", shrinkage=share),
    some(
        layer_of,
        "coupling",
        repeat=st.integers(1, 10),
        partition=partitions,
        law=laws,
        network=networks,
        mixing=st.booleans(),
    ),
    some(layer_of, "squeeze", by=st.integers(2, 9)),
    some(layer_of, "factor-out"),
    some(layer_of, "scaling", initialisation=st.sampled_from(["identity", "prior"])),
)
any_blocks = st.tuples(st.lists(some(layer_of, "logit"), max_size=1), st.lists(any_block, max_size=6)).map(
    lambda both: tuple(both[0] + both[1])
)


class TestToml:
    @given(any_blocks, st.sampled_from(["logistic", "gaussian"]), st.booleans())
    def test_what_is_written_is_what_is_read(self, layers: tuple[Block, ...], prior: Any, learned: bool):
        recipe = Recipe(name="x", model=ModelSettings(prior=prior, learned_prior=learned, blocks=layers))
        again = parse(recipe.to_toml(), "x.toml")
        assert again == recipe
        assert hash(again) == hash(recipe)

    def test_settings_that_blocks_replace_are_not_written(self):
        text = parse(MNIST, "x.toml").to_toml()
        assert text.count("[[model.blocks]]") == 2
        assert "\ncouplings = " not in text
        assert "\nblocks = " not in text
        assert "\nprior = " in text
        assert 'network = { kind = "mlp", hidden_layers = 5, width = 1000, dropout = 0.0' in text

    def test_set_lists_blocks_in_place_of_the_settings_of_the_recipe(self):
        recipe = load_recipe("tfd").override('model.blocks=[{kind="zca"}, {kind="coupling", repeat=3}]')
        assert recipe.model == ModelSettings(prior="gaussian", blocks=(layer_of("zca"), layer_of("coupling", repeat=3)))
        assert recipe.override("model.prior=logistic").model.blocks == recipe.model.blocks
        assert recipe.override("model.blocks=[]", "model.width=8").model == ModelSettings(prior="gaussian", width=8)

    def test_a_single_block_needs_no_list(self):
        assert Recipe().override('model.blocks={kind="scaling"}').model.blocks == (layer_of("scaling"),)


class TestSettingsAreShortForBlocks:
    def test_mnist_as_blocks(self):
        flat, own = load_recipe("mnist"), parse(MNIST, "x.toml")
        assert own.model.layers == flat.model.layers
        data = replace(flat.data, shape=(28, 28), levels=256)
        flat, own = replace(flat, data=data), replace(own, data=data)
        assert shapes(build(flat)) == shapes(build(own))
        assert own.model.n_layers == flat.model.n_layers == 24

    @pytest.mark.parametrize(
        "name", [name for name in names() if not load_recipe(name).model.blocks and name != "table"]
    )
    def test_every_recipe_written_as_blocks_gives_the_same_weights(self, name: str):
        flat = load_recipe(name).override("model.width=5", "data.shape=[4, 4]", "data.levels=17")
        own = replace(flat, model=flat.model.changed({"blocks": flat.model.layers}))
        built = []
        for recipe in (flat, own):
            torch.manual_seed(1)
            built.append(build(recipe).state_dict())
        assert list(built[0]) == list(built[1])
        assert all(torch.equal(tensor, built[1][key]) for key, tensor in built[0].items())
        assert own.model.n_layers == flat.model.n_layers

    def test_whitened_starts_the_scaling_by_the_prior(self):
        model = ModelSettings(preprocess="zca", shrinkage=0.2, initialisation="whitened", hidden_layers=(1,))
        zca, pair, scaling = model.layers
        assert (zca, scaling) == (layer_of("zca", shrinkage=0.2), layer_of("scaling", initialisation="prior"))
        assert pair["network"] == network_of("mlp", hidden_layers=1, initialisation="zero-last")

    @pytest.mark.parametrize(
        ("settings", "n"),
        [
            ({}, 24),
            ({"couplings": 0}, 0),
            ({"couplings": 1000, "hidden_layers": (1000,)}, 1_001_000),
            ({"couplings": 3, "hidden_layers": (1, 0, 2)}, 6),
            ({"blocks": (layer_of("scaling"),)}, 0),
            ({"blocks": (layer_of("coupling", repeat=1000), coupling(2, hidden_layers=0))}, 6002),
            ({"blocks": (layer_of("coupling", network={"kind": "conv"}),)}, 6),
        ],
    )
    def test_linear_layers_are_counted_and_not_built(self, settings: dict[str, Any], n: int):
        assert ModelSettings(**settings).n_layers == n


class TestLayers:
    def test_names_are_numbered_from_the_second_of_a_kind_and_couplings_through_the_chain(self):
        names = ["logit", "sinh-arcsinh", "zca", "coupling", "zca", "coupling", "triangular"]
        flow = build(listed(*(coupling(2) if name == "coupling" else layer_of(name) for name in names)))
        assert list(flow.bijection.layers) == [
            *("logit", "marginals", "zca", "coupling1", "coupling2", "zca2", "coupling3", "coupling4", "whitening")
        ]

    @pytest.mark.parametrize("kind", LAYERS)
    def test_every_kind_builds_a_layer(self, kind: str):
        made = coupling(3) if kind == "coupling" else layer_of(kind)
        assert len(build(listed(made, shape=(2, 2, 4))).bijection) == (3 if kind == "coupling" else 1)

    def test_roles_alternate_from_block_to_block_in_every_partition(self):
        one, other = coupling(), coupling(3, "halves")
        flow = build(listed(one, other, one, one, shape=(4,)))
        changed = [layer.partition.i2 for layer in couplings(flow)]
        assert changed == [(1, 3), (2, 3), (0, 1), (2, 3), (0, 2), (1, 3)]

    def test_laws_and_networks_have_their_settings(self):
        first = layer_of("coupling", law={"kind": "affine", "bound": 3}, network=network_of(**SMALL, dropout=0.25))
        flow = build(listed(first, coupling(2, hidden_layers=2)))
        first, second, _ = couplings(flow)
        assert (first.law, second.law) == (Affine(3.0), LAWS["additive"]())
        assert isinstance(first.law.bound, float)
        assert [m.p for m in first.network.modules() if isinstance(m, Dropout)] == [0.25]
        linears = [[m for m in each.network.modules() if isinstance(m, torch.nn.Linear)] for each in (first, second)]
        assert [[m.out_features for m in each] for each in linears] == [[4, 16], [4, 4, 8]]

    def test_the_scaling_starts_at_one_or_by_the_prior(self):
        flow = build(listed(layer_of("scaling"), layer_of("scaling", initialisation="prior")))
        one, by_prior = flow.bijection
        assert isinstance(one, DiagonalScaling)
        assert isinstance(by_prior, DiagonalScaling)
        assert one.s.eq(0).all()
        assert float(by_prior.s.detach().exp().mean()) == pytest.approx(flow.prior.standard_deviation)

    def test_a_law_of_ones_own_is_one_line_in_the_registry(self, monkeypatch: pytest.MonkeyPatch):
        @dataclass(frozen=True)
        class Shift(Law):
            steps: tuple[int, ...] = (1,)

            def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                return a + b[..., 0], torch.zeros_like(a)

            def inverse(self, y: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                return y - b[..., 0], torch.zeros_like(y)

        monkeypatch.setitem(LAWS, "shift", Shift)
        text = '[[model.blocks]]\nkind = "coupling"\nrepeat = 3\nlaw = { kind = "shift", steps = [1, 2] }\n'
        recipe = parse(text + "network = { kind = 'mlp', width = 4 }", "x.toml").override("data.shape=[6]")
        assert couplings(build(recipe))[0].law == Shift((1, 2))


def test_a_recipe_of_blocks_trains_resumes_and_is_evaluated(tmp_path: Path):
    (tmp_path / "mine.toml").write_text(AFFINE)
    recipe = load_recipe(str(tmp_path / "mine.toml"))
    out, straight = tmp_path / "out", tmp_path / "straight"
    train(recipe, straight, device="cpu", callbacks=())
    train(recipe, out, overrides=("train.epochs=1",), device="cpu", callbacks=())
    torch.manual_seed(99)
    train(recipe, out, overrides=("train.epochs=2",), resume=True, device="cpu", callbacks=())
    assert equal(last(out), last(straight))
    assert equal(model(out), model(straight))
    run = nicest.open(out)
    assert load_recipe(str(out / "recipe.toml")).model == run.recipe.model == recipe.model
    result = evaluate(run, draws=1, baselines=False)
    assert {"zca", "coupling1", "coupling4", "scaling"} <= result.terms.keys()
    assert result.mean_nats == pytest.approx(sum(result.terms.values()))


class TestRefused:
    """Each in one line that names the block and the culprit."""

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ('[{kind="zca"}, {kind="zcaa"}]', "model.blocks, block 2: kind is one of logit, sinh-arcsinh, zca, tri"),
            ('[{kind="zcaa"}]', "got 'zcaa' (did you mean 'zca'?)"),
            ("[{kind=3}]", "block 1: kind is one of logit"),
            ("[{kind=[1]}]", "block 1: kind is one of logit"),
            ("[{shrinkage=0.1}]", "block 1 is a table with a kind, one of logit, sinh-arcsinh"),
            ("3", "block 1 is a table with a kind"),
            ("[[{kind='zca'}]]", "block 1 is a table with a kind"),
            ("[{kind=zca}]", "block 1 is a table with a kind, one of logit, sinh"),
            (
                '[{kind="coupling", repeats=3}]',
                "block 1: unknown key 'repeats' of kind coupling (did you mean 'repeat'?",
            ),
            ('[{kind="logit", shrinkage=0.1}]', "block 1: unknown key 'shrinkage' of kind logit"),
            ('[{kind="zca", shrinkage=2}]', "model.blocks, block 1: shrinkage must be from 0 to 1; got 2.0"),
            ('[{kind="zca", shrinkage=nan}]', "block 1: shrinkage must be a finite number"),
            ('[{kind="zca", shrinkage="x"}]', "block 1: shrinkage is of type float; got 'x'"),
            ('[{kind="coupling", repeat=0}]', "block 1: repeat must be from 1 to 1000; got 0"),
            ('[{kind="coupling", repeat=0xffffffffffffffff}]', "block 1: repeat must be a number below 2^63"),
            (
                '[{kind="coupling", partition="even-odd"}]',
                "block 1: partition is one of odd-even, halves, checkerboard",
            ),
            ('[{kind="coupling", law="affine"}]', 'law is a table with a kind, such as { kind = "affine" }; got'),
            ('[{kind="coupling", law={bound=1}}]', "law is a table with a kind"),
            ('[{kind="coupling", law={kind=1}}]', "block 1: law.kind is of type str; got 1"),
            ('[{kind="coupling", law={kind="affine", bound=inf}}]', "law.bound must be a finite number"),
            (
                '[{kind="coupling", law={kind="affine", bound={a=1}}}]',
                "law.bound is of type bool or int or float or str",
            ),
            ('[{kind="coupling", law={kind="affine", bound=[[1]]}}]', "law.bound is of type bool or int"),
            ('[{kind="coupling", law={kind="affine", "a b"=1}}]', "block 1: law: unknown key 'a b'"),
            ('[{kind="coupling", law={kind="affine", "é"=1}}]', "block 1: law: unknown key 'é'"),
            (
                '[{kind="coupling", network="mlp"}]',
                "block 1: network is a table with a kind, one of mlp, residual, conv; got 'mlp'",
            ),
            (
                '[{kind="coupling", network={kind="mpl"}}]',
                "network.kind is one of mlp, residual, conv; got 'mpl' (did you mean 'mlp'?)",
            ),
            (
                '[{kind="coupling", network={kind="mlp", widht=3}}]',
                "block 1: network: unknown key 'widht' of kind mlp (did you mean 'width'?)",
            ),
            (
                '[{kind="coupling", network={kind="mlp", width=0}}]',
                "block 1: network.width must be from 1 to 100000; got 0",
            ),
            ('[{kind="coupling", network={kind="mlp", hidden_layers=[1]}}]', "network.hidden_layers is of type int"),
            (
                '[{kind="coupling", network={kind="mlp", hidden_layers=-1}}]',
                "network.hidden_layers must be from 0 to 1000",
            ),
            ('[{kind="coupling", network={kind="mlp", dropout=1}}]', "network.dropout must be in [0, 1); got 1.0"),
            ('[{kind="zca"}, {kind="logit"}]', "model.blocks must be free of logit after the first block"),
        ],
    )
    def test_kinds_keys_types_and_values(self, refusal: Refusal, value: str, words: str):
        message = refusal(Recipe(name="mine").override, f"model.blocks={value}")
        assert words in message
        assert len(message) < 300

    @pytest.mark.parametrize("key", ["cls", "self", "kind_", "settings"])
    def test_keys_of_laws_that_python_knows(self, refusal: Refusal, key: str):
        recipe = Recipe().override(
            f'model.blocks=[{{kind="coupling", law={{kind="affine", {key}=1}}}}]', "data.shape=[6]"
        )
        assert f"block 1: law: unknown key '{key}' of kind affine" in refusal(build, recipe)

    @pytest.mark.parametrize(
        ("law", "words"),
        [
            (
                {"kind": "afine"},
                "law.kind is one of additive, multiplicative, affine, spline, affine-spline; got 'afine'"
                " (did you mean 'affine'?)",
            ),
            ({"kind": "affine", "bond": 1.0}, "law: unknown key 'bond' of kind affine (did you mean 'bound'?)"),
            ({"kind": "additive", "bound": 1.0}, "law: unknown key 'bound' of kind additive"),
            ({"kind": "affine", "bound": "x"}, "law.bound is of type float; got 'x'"),
            ({"kind": "affine", "bound": 0}, "law: expected a positive bound, got 0.0"),
            ({"kind": "multiplicative", "bound": -1.0}, "law: expected a positive bound, got -1.0"),
        ],
    )
    def test_laws_before_anything_is_trained(self, refusal: Refusal, law: dict[str, Any], words: str):
        own = {"blocks": [{"kind": "scaling"}, {"kind": "coupling", "law": law}]}
        recipe = Recipe().changed({"model": own, "data": {"shape": [6]}}, "mine.toml")
        assert f"model.blocks, block 2: {words}" in refusal(build, recipe)

    def test_characters_that_cannot_be_written(self, refusal: Refusal):
        override = Recipe().override
        assert "UTF-8" in refusal(override, 'model.blocks=[{kind="coupling", law={kind="\udcff"}}]')
        assert "unknown key" in refusal(override, 'model.blocks=[{kind="coupling", law={kind="affine", "\udcff"=1}}]')
        assert refusal(override, 'model.blocks=[{kind="\udcff"}]').isprintable()

    @pytest.mark.parametrize("name", ["width", "preprocess", "couplings", "hidden_layers", "initialisation"])
    def test_settings_that_blocks_replace(self, refusal: Refusal, name: str):
        value = {"width": 8, "preprocess": "zca", "couplings": 2, "hidden_layers": 1, "initialisation": "uniform"}[name]
        recipe = parse(MNIST, "x.toml")
        message = refusal(recipe.override, f"model.{name}={value}")
        assert f"model.{name} must be left out where model.blocks lists the layers; got " in message

    def test_a_misspelt_list_of_blocks(self, refusal: Refusal):
        message = refusal(parse, '[[model.block]]\nkind = "zca"', "x.toml")
        assert message == "x.toml: unknown key 'model.block' (did you mean 'model.blocks'?)"

    def test_blocks_are_checked_however_they_are_made(self, refusal: Refusal):
        assert refusal(coupling, width=0) == "mlp: width must be from 1 to 100000; got 0"

    def test_logit_of_another_interval(self, refusal: Refusal):
        message = refusal(load_recipe("cifar10").override, 'model.blocks=[{kind="logit"}]')
        assert "model.blocks must be free of logit unless data.interval is [0, 1]" in message

    @pytest.mark.parametrize(
        ("block", "shape", "words"),
        [
            (layer_of("logit"), (5,), "block 1: logit is for pixels in [0, 1]; this data is continuous"),
            (layer_of("zca"), (10_000,), "leave out block 1"),
            (coupling(), (1,), "a coupling needs two parts, and this data has one column: leave out block 1"),
            (coupling(partition="checkerboard"), (6,), "a checkerboard is for images"),
        ],
    )
    def test_blocks_that_do_not_fit_the_data(self, refusal: Refusal, block: Block, shape: tuple[int, ...], words: str):
        assert words in refusal(build, listed(block, shape=shape, levels=0))

    def test_a_model_that_is_chosen_for_the_data(self, refusal: Refusal):
        recipe = load_recipe("rows").override('model.blocks=[{kind="scaling"}]')
        assert recipe.sized
        assert "set sized=false" in refusal(settings_given, recipe, ())

    def test_more_blocks_than_a_recipe_may_hold(self, refusal: Refusal):
        assert "characters" in refusal(Recipe, model=ModelSettings(blocks=(layer_of("coupling"),) * 1000))


class TestPage:
    def test_its_examples_build(self):
        texts = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.S)
        recipes = [parse(text, "mine.toml").override("data.shape=[4, 4]", "data.levels=17") for text in texts]
        names, of_images = (list(build(recipe).bijection.layers) for recipe in recipes)
        assert names == ["zca", *(f"coupling{k}" for k in range(1, 7)), "scaling"]
        assert (of_images[0], of_images[5], of_images[-1]) == ("logit", "squeeze", "rest")

    def test_it_has_every_kind_and_setting(self):
        rows = dict(re.findall(r"^\| `([^`]+)` \|(.*)$", PAGE.read_text(), re.M))
        kinds = LAYERS | NETWORKS | LAWS
        assert rows.keys() == kinds.keys()
        for kind, made in kinds.items():
            assert all(f"`{name}`" in rows[kind] for name in defaults_of(made))
