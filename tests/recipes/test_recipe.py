"""What the recipes say is what the paper and the authors' code say, and what they may not say is refused."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nicest.recipes import Recipe, load_recipe, names, parse
from nicest.recipes.recipe import DataSettings, ModelSettings, TrainSettings

Refusal = Callable[..., str]


class Column(NamedTuple):
    """One column of the paper's table (§5.1), or of the table of the authors' released code."""

    depths: list[int]  # hidden layers of each coupling function
    width: int
    prior: str
    preprocess: str
    interval: tuple[float, float]
    partition: str
    batch: int
    lr: float
    floor: float
    nats: float


COLUMNS = {
    "mnist": Column([5] * 4, 1000, "logistic", "none", (0, 1), "odd-even", 200, 1e-3, 0, 1980.50),
    "tfd": Column([4] * 4, 5000, "gaussian", "triangular", (0, 1), "odd-even", 128, 1e-3, 0, 5514.71),
    "svhn": Column([4] * 4, 2000, "logistic", "zca", (0, 1), "odd-even", 200, 1e-3, 0, 11496.55),
    "cifar10": Column([4] * 4, 2000, "logistic", "zca", (-1, 1), "odd-even", 200, 1e-3, 0, 5371.78),
    "mnist-released": Column([5] * 4, 1000, "logistic", "none", (0, 1), "odd-even", 200, 1e-3, 1e-4, 1980.50),
    "tfd-released": Column(
        [3, 3, 2, 2, 1, 1, 1, 1], 2000, "logistic", "none", (0, 1), "odd-even", 128, 1e-3, 1e-4, 5514.71
    ),
    "svhn-released": Column([3] * 4, 2000, "gaussian", "none", (0, 1), "halves", 200, 1e-3, 1e-4, 11496.55),
    "cifar10-released": Column(
        [1, 1, 3, 3, 2, 2, 1, 1], 2400, "gaussian", "none", (-1, 1), "halves", 200, 2e-4, 1e-5, 5371.78
    ),
}
TEXT = [name for name in COLUMNS if not name.endswith("-released")]
RELEASED = [name for name in COLUMNS if name.endswith("-released")]


LABELLED = ("digits-labels", "mnist-labels")
CONVOLUTIONAL = ("cifar10-conv", "digits-conv", "mnist-conv", "svhn-conv")
BEST = (
    "cifar10-best",
    "fer2013",
    "fer2013-tfd",
    "mnist-affine",
    "mnist-best",
    "mnist-fast",
    "mnist-plain",
    "svhn-best",
)


class TestShipped:
    def test_there_are_two_readings_of_four_columns_ours_and_digits(self):
        assert set(names()) == {*COLUMNS, *BEST, *CONVOLUTIONAL, *LABELLED, "digits", "images", "rows", "table"}

    @pytest.mark.parametrize("name", sorted({*BEST} - {"fer2013", "fer2013-tfd"}))
    def test_better_training_keeps_the_papers_data_and_architecture(self, name: str):
        best, text = load_recipe(name), load_recipe(name.partition("-")[0])
        assert (best.reading, best.data, best.paper_nats) == ("best", text.data, text.paper_nats)
        law = "affine" if name == "mnist-affine" else "additive"
        assert replace(best.model, dropout=0.0) == replace(text.model, law=law)
        assert bool(best.augment.share) == (name in ("mnist-best", "mnist-affine", "cifar10-best", "svhn-best"))

    @pytest.mark.parametrize("name", CONVOLUTIONAL)
    def test_convolutional_recipes_keep_the_data_and_the_unit(self, name: str):
        recipe, text = load_recipe(name), load_recipe(name.removesuffix("-conv"))
        assert (recipe.data, recipe.paper_nats) == (text.data, text.paper_nats)
        assert {block.kind for block in recipe.model.blocks} - {"logit"} == {"coupling", "squeeze", "factor-out"}
        assert all(block["network"].kind == "conv" for block in recipe.model.blocks if block.kind == "coupling")
        assert recipe.augment.flip == (name == "cifar10-conv") == ("mirrored" in recipe.title)

    def test_labelled_recipes_are_of_known_architectures(self):
        for name, like in (("digits-labels", "digits"), ("mnist-labels", "mnist-conv")):
            recipe, plain = load_recipe(name), load_recipe(like)
            assert recipe.data == replace(plain.data, labels=True)
            assert replace(recipe.model, blocks=()) == replace(plain.model, blocks=())
            kinds, expected = ([block.kind for block in each.model.blocks] for each in (recipe, plain))
            assert [kind for kind in kinds if kind != "elementwise"] == expected
            assert (recipe.reading, recipe.paper_nats) == ("ours", None)

    def test_fer2013_is_the_tfd_columns_architecture_on_other_faces(self):
        recipe, tfd = load_recipe("fer2013-tfd"), load_recipe("tfd")
        assert (recipe.reading, recipe.paper_nats) == ("best", None)
        assert "not TFD" in recipe.title
        assert recipe.data == replace(tfd.data, name="fer2013")
        assert recipe.model == replace(tfd.model, dropout=0.1)
        assert recipe.train.batch == tfd.train.batch

    def test_fer2013_differs_from_that_by_its_prior(self):
        logistic, gaussian = load_recipe("fer2013"), load_recipe("fer2013-tfd")
        assert logistic.model == replace(gaussian.model, prior="logistic")
        assert (logistic.data, logistic.train, logistic.augment) == (gaussian.data, gaussian.train, gaussian.augment)

    def test_fer2013_is_trained_as_cifar10_best(self):
        recipe, best = load_recipe("fer2013"), load_recipe("cifar10-best")
        assert recipe.augment == best.augment
        assert recipe.model.dropout == best.model.dropout
        assert recipe.train == replace(best.train, epochs=30, batch=128, evaluate_every=3)

    @pytest.mark.parametrize("name", sorted({*COLUMNS, "digits"}))
    def test_parses_under_its_own_name_with_a_title(self, name: str):
        recipe = load_recipe(name)
        assert recipe.name == name
        assert recipe.title
        assert recipe.data.name == name.removesuffix("-released")

    @pytest.mark.parametrize("name", COLUMNS)
    def test_says_what_its_column_says(self, name: str):
        recipe = load_recipe(name)
        data, model, train = recipe.data, recipe.model, recipe.train
        depths = list(model.hidden_layers)
        assert model.couplings == len(COLUMNS[name].depths)
        assert (
            Column(
                depths * model.couplings if len(depths) == 1 else depths,
                model.width,
                model.prior,
                model.preprocess,
                data.interval,
                model.partition,
                train.batch,
                train.lr,
                train.lr_floor,
                recipe.paper_nats,
            )
            == COLUMNS[name]
        )
        assert (model.law, model.learned_prior, model.dropout) == ("additive", False, 0)
        assert (train.epochs, train.evaluate_every, train.loss) == (1500, 1, "nats")
        assert (train.ema, train.clip, train.weight_decay, train.warmup) == (0, 0, 0, 0)

    @pytest.mark.parametrize("name", TEXT)
    def test_the_text_trains_by_adam_in_todays_notation(self, name: str):
        recipe = load_recipe(name)
        assert recipe.reading == "text"
        assert (recipe.train.optimizer, recipe.train.schedule) == ("adam", "constant")
        assert (recipe.train.betas, recipe.train.eps) == ((0.9, 0.99), 1e-4)
        assert recipe.model.initialisation == "torch"

    @pytest.mark.parametrize("name", TEXT)
    def test_the_text_recipes_explain_beta2(self, name: str):
        comment = (Path(sys.modules[Recipe.__module__].__file__ or "").parent / f"{name}.toml").read_text()
        assert "beta2 = 0.01" in comment
        assert "(0.9, 0.99)" in comment

    @pytest.mark.parametrize("name", RELEASED)
    def test_the_released_code_trains_by_rmsprop_with_a_falling_rate(self, name: str):
        recipe = load_recipe(name)
        assert recipe.reading == "released"
        assert (recipe.train.optimizer, recipe.train.schedule, recipe.train.lr_decay) == (
            "rmsprop",
            "exponential",
            1.0005,
        )
        assert recipe.model.initialisation == "uniform"


class TestToml:
    @pytest.mark.parametrize("name", sorted({*COLUMNS, "digits"}))
    def test_round_trip(self, name: str):
        recipe = load_recipe(name)
        assert parse(recipe.to_toml(), "elsewhere.toml") == recipe

    def test_round_trip_of_what_training_adds(self):
        recipe = load_recipe("mnist").override("expected_nats=2000", "model.learned_prior=true")
        recipe = replace(recipe, data=replace(recipe.data, shape=(28, 28), levels=256))
        assert parse(recipe.to_toml(), "elsewhere.toml") == recipe

    @pytest.mark.parametrize("title", ['"quoted" \\ slashed', "two\nlines\tand a tab", "ünï ≠ 数", "# no comment", ""])
    def test_round_trip_of_any_text(self, title: str):
        assert parse(replace(Recipe(name="x"), title=title).to_toml(), "x.toml").title == title

    @pytest.mark.parametrize("settings", [Recipe, DataSettings, ModelSettings, TrainSettings])
    def test_every_field_is_written_with_its_help(self, settings: type):
        text = Recipe(paper_nats=1.0, expected_nats=1.0).to_toml()
        for each in fields(settings):
            if not is_dataclass(getattr(settings(), each.name)):
                assert f"# {each.metadata['help']}\n" in text
                assert f"\n{each.name} = " in f"\n{text}"

    def test_a_file_is_named_by_itself_and_a_single_depth_is_for_all(self, tmp_path: Path):
        (tmp_path / "mine.toml").write_text("[model]\nhidden_layers = 2\n")
        recipe = load_recipe(str(tmp_path / "mine.toml"))
        assert (recipe.name, recipe.model.hidden_layers, recipe.reading) == ("mine", (2,), "ours")

    def test_recipes_need_no_torch(self):
        code = "import sys, nicest.recipes as r; r.load_recipe('mnist'); sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


class TestRefused:
    """Each in one line that names the culprit."""

    def test_unknown_recipe(self, refusal: Refusal):
        message = refusal(load_recipe, "mnst")
        assert "no recipe 'mnst' (did you mean 'mnist'?)" in message
        assert "tfd-released" in message

    def test_no_such_file(self, refusal: Refusal):
        assert "no recipe file absent.toml" in refusal(load_recipe, "absent.toml")

    def test_invalid_toml(self, refusal: Refusal, tmp_path: Path):
        (tmp_path / "bad.toml").write_text("[train]\nepochs = = 3\n")
        assert "bad.toml is not valid TOML" in (message := refusal(load_recipe, str(tmp_path / "bad.toml")))
        assert "line 2" in message

    def test_a_file_that_is_no_text(self, refusal: Refusal, tmp_path: Path):
        (tmp_path / "bad.toml").write_bytes(b"\xff\xfe\x00")
        assert "bad.toml cannot be read as a recipe" in refusal(load_recipe, str(tmp_path / "bad.toml"))

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("[train]\nepoch = 3", "unknown key 'train.epoch' (did you mean 'train.epochs'?)"),
            ("titel = 'x'", "unknown key 'titel' (did you mean 'title'?)"),
            ("[modle]\nwidth = 3", "unknown key 'modle' (did you mean 'model'?)"),
            ("[train]\nxyzzy = 3", "unknown key 'train.xyzzy'"),
            ("train = 3", "'train' is a table of settings, got 3"),
            ("[train]\nepochs = 'many'", "train.epochs is of type int; got 'many'"),
            ("[train]\nepochs = 1.5", "train.epochs is of type int; got 1.5"),
            ("[train]\nepochs = true", "train.epochs is of type int; got True"),
            ("[train]\nlr = false", "train.lr is of type float; got False"),
            ("[model]\nlearned_prior = 1", "model.learned_prior is of type bool; got 1"),
            ("[model]\nhidden_layers = [1, 'two']", "model.hidden_layers is of type int; got 'two'"),
            ("[model]\nprior = 'logistc'", "model.prior is one of logistic, gaussian; got 'logistc' (did you mean"),
            ("[model]\nprior = 3", "model.prior is one of logistic, gaussian; got 3"),
            ("reading = 'mine'", "reading is one of text, released, best, ours; got 'mine'"),
        ],
    )
    def test_wrong_keys_types_and_choices(self, refusal: Refusal, text: str, words: str):
        assert refusal(parse, text, "mine.toml").startswith(f"mine.toml: {words}")

    @pytest.mark.parametrize(
        "setting",
        [
            "data.interval=[1, 0]",
            "data.interval=[0, 0]",
            "data.interval=[0]",
            "data.interval=[0, 1, 2]",
            "data.interval=[0, inf]",
            "data.valid=0",
            "data.valid=1",
            "data.test=0",
            "data.test=0.9",
            "model.couplings=-1",
            "model.shrinkage=1.1",
            "model.hidden_layers=[1, 2]",
            "model.hidden_layers=[1, 2, 3, -1]",
            "model.hidden_layers=[]",
            "model.width=0",
            "model.bound=0",
            "model.bound=inf",
            "model.dropout=1",
            "model.dropout=-0.1",
            "train.epochs=0",
            "train.batch=0",
            "train.lr=0",
            "train.lr=-1e-3",
            "train.lr=inf",
            "train.lr=nan",
            "train.eps=0",
            "train.betas=[0.9]",
            "train.betas=[0.9, 1.0]",
            "train.betas=[-0.1, 0.9]",
            "train.weight_decay=-1",
            "train.warmup=-1",
            "train.lr_decay=0.999",
            "train.lr_floor=-1",
            "train.lr_floor=1",
            "train.clip=-1",
            "train.ema=1",
            "train.ema=-0.5",
            "train.evaluate_every=0",
            "train.seed=-1",
            "train.seed=99999999999999999999",
        ],
    )
    def test_values_without_meaning(self, refusal: Refusal, setting: str):
        message = refusal(load_recipe("digits").override, setting)
        assert f"{setting.partition('=')[0]} must be" in message

    @pytest.mark.parametrize(("key", "meant"), [("epochs", "train.epochs"), ("model.widht", "model.width")])
    def test_a_key_without_its_table_or_misspelt_is_told_the_right_one(self, refusal: Refusal, key: str, meant: str):
        message = refusal(load_recipe("digits").override, f"{key}=3")
        assert f"unknown key '{key}' (did you mean '{meant}'?)" in message

    def test_the_texts_beta2_taken_literally(self, refusal: Refusal):
        assert "today's 0.99" in refusal(load_recipe("mnist").override, "train.betas=[0.9, 0.01]")

    def test_decay_that_the_optimizer_would_ignore(self, refusal: Refusal):
        message = refusal(load_recipe("mnist-released").override, "train.weight_decay=0.1")
        assert "must be 0 for rmsprop, which has no decay" in message

    def test_logit_of_another_interval(self, refusal: Refusal):
        message = refusal(load_recipe("cifar10").override, "model.preprocess=logit")
        assert "model.preprocess must be not logit unless data.interval is [0, 1]" in message

    def test_a_beta_of_one_is_told_of_the_papers_notation(self, refusal: Refusal):
        message = refusal(load_recipe("mnist").override, "train.betas=[0.9, 1.0]")
        assert "beta2 = 0.01 weighs the new gradient: today's 0.99" in message

    def test_a_refused_recipe_is_refused_however_it_is_made(self, refusal: Refusal):
        assert "train.epochs must be at least 1; got 0" in refusal(Recipe, train=TrainSettings(epochs=0))


class TestOverride:
    @pytest.mark.parametrize(
        ("assignment", "value"),
        [
            ("train.epochs=50", 50),
            (" train.epochs = 50 ", 50),
            ("train.lr=3e-4", 3e-4),
            ("train.lr=1", 1.0),
            ("train.betas=[0.5, 0.9]", (0.5, 0.9)),
            ("model.hidden_layers=[1, 2, 3, 4]", (1, 2, 3, 4)),
            ("model.hidden_layers=2", (2,)),
            ("train.schedule=constant", "constant"),
            ('train.schedule="constant"', "constant"),
            ("model.learned_prior=true", True),
            ("data.name=/folder with/an = sign.npy", "/folder with/an = sign.npy"),
            ("title=in plain words", "in plain words"),
        ],
    )
    def test_numbers_lists_and_words(self, assignment: str, value: Any):
        changed: Any = load_recipe("digits").override(assignment)
        for part in assignment.partition("=")[0].strip().split("."):
            changed = getattr(changed, part)
        assert changed == value
        assert type(changed) is type(value)

    @pytest.mark.parametrize("changed", ["data.name=mine.npy", "data.interval=[-1, 1]"])
    def test_other_data_or_another_unit_leaves_the_papers_figure_behind(self, changed: str):
        recipe = load_recipe("mnist").override(changed)
        assert (recipe.paper_nats, recipe.expected_nats, recipe.reading) == (None, None, "ours")
        assert recipe.title.startswith("recipe mnist on ")
        assert load_recipe("mnist").override("train.epochs=2").paper_nats == 1980.50

    def test_many_at_once_the_last_one_counts_and_the_rest_stays(self):
        recipe = load_recipe("digits")
        changed = recipe.override("train.epochs=1", "model.width=8", "train.batch=3", "train.epochs=2")
        assert (changed.train.epochs, changed.model.width, changed.train.batch) == (2, 8, 3)
        assert changed == replace(
            recipe,
            model=replace(recipe.model, width=8),
            train=replace(recipe.train, epochs=2, batch=3),
        )

    def test_none_changes_nothing(self):
        assert load_recipe("mnist").override() == load_recipe("mnist")

    @pytest.mark.parametrize(
        ("assignments", "words"),
        [
            (["train.epochs"], "expected KEY=VALUE, such as train.epochs=50, got 'train.epochs'"),
            (["train.epoch=3"], "unknown key 'train.epoch' (did you mean 'train.epochs'?)"),
            (["=3"], "unknown key ''"),
            (["train.=3"], "unknown key 'train.'"),
            (["train=3"], "'train' is a table of settings, got 3"),
            (["train=3", "train.epochs=3"], "'train' is set twice, once as a table"),
            (["train.epochs.more=3"], "train.epochs is of type int"),
            (["train.epochs="], "train.epochs is of type int; got ''"),
            (["train.betas=[0.9, x]"], "train.betas is of type float; got '[0.9, x]'"),
            (["data.resize=(12,12)"], "data.resize is of type int; got '(12,12)'; several are written as [1,2]"),
            (["data.name=17"], "data.name is of type str; got 17"),
        ],
    )
    def test_bad_grammar(self, refusal: Refusal, assignments: list[str], words: str):
        assert words in refusal(load_recipe("digits").override, *assignments)
