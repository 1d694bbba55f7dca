"""Hostile recipes and models, in short: `make fuzz` has the long version."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fuzz
import nicest
from nicest.recipes import Recipe, parse
from nicest.recipes.recipe import DOTS, LONGEST
from nicest.runs.folder import read_tensors
from nicest.runs.sinks import Saved

Refusal = Callable[..., str]


@pytest.mark.parametrize("name", ["recipe", "--set", "safetensors", "model", "metrics", "columns"])
def test_hostile_files(name: str) -> None:
    reader = fuzz.READERS[name]()
    some = reader.forged if len(reader.forged) < 500 else reader.forged[::23]
    tally = fuzz.fuzz(name, replace(reader, forged=some), len(some) + len(reader.real) + 50)
    assert tally.said == []
    assert tally.counts["clear"] > 20
    assert tally.counts["right"] >= len(reader.real)


def with_metadata(path: Path, **changes: str) -> Path:
    header, body = fuzz.taken_apart(fuzz.MODELS[0])
    path.write_bytes(fuzz.joined(header | {"__metadata__": header["__metadata__"] | changes}, body))
    return path


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ("", "expected figures in JSON, got ''"),
        ("[" * 100_000, "expected figures in JSON, got '[[["),
        ("9" * 5000, "expected figures in JSON, got '999"),
        ("[1, 2]", "expected a table of figures, got '[1, 2]'"),
        ('{"step": {"a": 1}}', "expected a table of figures"),
        ("__import__('os').abort()", "expected figures in JSON"),
    ],
)
def test_figures(tmp_path: Path, refusal: Refusal, figures: str, words: str) -> None:
    message = refusal(read_tensors, with_metadata(tmp_path / "x.safetensors", figures=figures))
    assert words in message
    assert len(message) < len(str(tmp_path)) + 200


@pytest.mark.parametrize("version", ["nicest ²", "nicest " + "9" * 5000, "nicest -1"])
def test_versions_that_are_no_numbers(tmp_path: Path, refusal: Refusal, version: str) -> None:
    path = with_metadata(tmp_path / "x.safetensors", format=version)
    assert "was not written by nicest" in refusal(read_tensors, path)


@pytest.mark.parametrize("setting", [each for each in fuzz.ABSURD if "000" in each or "9223" in each])
def test_a_flow_beyond_its_weights_is_never_built(tmp_path: Path, refusal: Refusal, setting: str) -> None:
    recipe = fuzz.SMALL.override(setting).to_toml()
    message = refusal(nicest.load, with_metadata(tmp_path / "x.safetensors", recipe=recipe))
    assert "the weights do not fit the recipe" in message


def test_a_model_without_a_shape(tmp_path: Path, refusal: Refusal) -> None:
    recipe = fuzz.SMALL.override("data.shape=[]").to_toml()
    message = refusal(nicest.load, with_metadata(tmp_path / "x.safetensors", recipe=recipe))
    assert "expected a recipe with the shape of its data, got ()" in message


def test_weights_of_another_dtype(tmp_path: Path, refusal: Refusal) -> None:
    recipe, tensors = fuzz.SMALL, fuzz.build(fuzz.SMALL).state_dict()
    for dtype in (torch.int32, torch.float16, torch.complex64):
        odd = tensors | {"bijection.layers.scaling.s": torch.zeros(6, dtype=dtype)}
        fuzz.write_tensors(tmp_path / "x.safetensors", Saved(odd, recipe, {}))
        message = refusal(nicest.load, tmp_path / "x.safetensors")
        assert f"expected weights of float32 or float64, got 'bijection.layers.scaling.s' of {dtype}" in message


def test_names_of_weights_are_no_terminal_codes(tmp_path: Path, refusal: Refusal) -> None:
    tensors = fuzz.build(fuzz.SMALL).state_dict() | {"\x1b[31m": torch.zeros(2)}
    fuzz.write_tensors(tmp_path / "x.safetensors", Saved(tensors, fuzz.SMALL, {}))
    assert refusal(nicest.load, tmp_path / "x.safetensors").isprintable()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data.seed = 0x" + "f" * 5000, "data.seed must be a number below 2^63; got an oversized int"),
        ("train.lr = 0x" + "f" * 500, "train.lr must be a number below 2^63"),
        ("data.seed = " + "9" * 5000, "x is not valid TOML"),
        ("data = " + "[" * 3000, "x is not valid TOML"),
        ("data.name" + ".a" * 1500 + " = 1", "data.name is of type str; got an oversized dict"),
        ("a." * 9000 + "a = 1", f"x: expected a recipe of at most {DOTS} dots in a line, got 9000"),
        ("#" * 70_000, f"x: expected a recipe of at most {LONGEST} characters, got 70000"),
        ("data.shape = [4, -4]", "x: data.shape must be sizes of at least 1; got [4, -4]"),
        ("data.levels = -1", "x: data.levels must be 0, or from 2 to 65536; got -1"),
        ('name = "a\\nb"\ntrain.lr = -1', "a\\nb: train.lr must be positive"),
    ],
)
def test_recipes(refusal: Refusal, text: str, words: str) -> None:
    assert words in refusal(parse, text, "x")


def test_every_recipe_can_be_written_and_read(refusal: Refusal) -> None:
    odd = parse('name = "a\\u007f\\u0000\\n\\"b"', "x")
    assert parse(odd.to_toml(), "x") == odd
    assert "must be of characters that UTF-8 can write" in refusal(odd.override, "data.name=\udcff")
    assert f"at most {LONGEST} characters" in refusal(Recipe, title="x" * LONGEST)
