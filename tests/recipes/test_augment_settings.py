"""The table [augment] of a recipe: read, written, overridden and checked as the others are."""

from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from nicest.recipes import Recipe, load_recipe, names, parse
from nicest.recipes.recipe import AugmentSettings

Refusal = Callable[..., str]
TEXT = """
[augment]
share = 0.8
rotation = 0.1
scale = 0.08
shear = 0.1
shift = 0.5
elastic = 0.5
grid = 6
flip = true
contrast = 1.2
padding = "reflection"
"""
SETTINGS = AugmentSettings(0.8, 0.1, 0.08, 0.1, 0.5, 0.5, 6, True, 1.2, "reflection")


def test_nothing_is_varied_unless_asked():
    assert Recipe().augment.share == 0
    neutral = AugmentSettings()
    assert (neutral.rotation, neutral.scale, neutral.shear, neutral.shift, neutral.elastic) == (0, 0, 0, 0, 0)
    assert (neutral.contrast, neutral.flip) == (1, False)


@pytest.mark.parametrize("name", [name for name in names() if load_recipe(name).reading in ("text", "released")])
def test_the_papers_recipes_vary_nothing(name: str):
    assert load_recipe(name).augment == AugmentSettings()


def test_round_trip():
    recipe = parse(TEXT, "mine.toml")
    assert recipe.augment == SETTINGS
    assert parse(recipe.to_toml(), "elsewhere.toml") == recipe


def test_every_field_is_written_with_its_help():
    table = Recipe().to_toml().partition("[augment]\n")[2].partition("\n[")[0]
    for each in fields(AugmentSettings):
        assert f"# {each.metadata['help']}\n" in table
        assert f"\n{each.name} = " in f"\n{table}"


def test_a_recipe_written_before_there_was_augmentation_is_still_read():
    text = load_recipe("mnist").to_toml()
    before, _, rest = text.partition("[augment]\n")
    assert parse(before + rest[rest.index("[") :], "mnist.toml") == load_recipe("mnist")


def test_override_changes_what_it_names():
    recipe = load_recipe("mnist")
    changed = recipe.override("augment.share=0.8", "augment.flip=true", "augment.padding=border", "augment.shift=1")
    expected = replace(recipe.augment, share=0.8, flip=True, padding="border", shift=1.0)
    assert changed == replace(recipe, augment=expected)
    assert type(changed.augment.shift) is float


@pytest.mark.parametrize(
    "setting",
    [
        "augment.share=-0.1",
        "augment.share=1.1",
        "augment.share=nan",
        "augment.rotation=-0.1",
        "augment.rotation=3.2",
        "augment.scale=-0.1",
        "augment.scale=3",
        "augment.shear=-1",
        "augment.shift=-1",
        "augment.elastic=-1",
        "augment.elastic=inf",
        "augment.grid=1",
        "augment.grid=65",
        "augment.contrast=0",
    ],
)
def test_values_without_meaning(refusal: Refusal, setting: str):
    assert f"{setting.partition('=')[0]} must be" in refusal(load_recipe("digits").override, setting)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("augment.padding=mirror", "augment.padding is one of zeros, border, reflection; got 'mirror'"),
        ("augment.grid=2.5", "augment.grid is of type int; got 2.5"),
        ("augment.flip=1", "augment.flip is of type bool; got 1"),
        ("augment=0.8", "'augment' is a table of settings, got 0.8"),
        ("rotation=0.1", "unknown key 'rotation' (did you mean 'augment.rotation'?)"),
        ("augment.elastc=0.1", "unknown key 'augment.elastc' (did you mean 'augment.elastic'?)"),
        ("augmnt.share=0.1", "unknown key 'augmnt' (did you mean 'augment'?)"),
    ],
)
def test_wrong_keys_types_and_choices(refusal: Refusal, assignment: str, words: str):
    assert words in refusal(load_recipe("digits").override, assignment)
