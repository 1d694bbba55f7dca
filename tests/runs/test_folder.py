"""What is saved is what is loaded, to the bit; what cannot be loaded says why in one line, and executes nothing."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import nicest
from nicest.cli import explained
from nicest.errors import NicestError
from nicest.flows import ZCA, Flow, TriangularAffine
from nicest.recipes import Recipe, load_recipe
from nicest.recipes.build import build
from nicest.runs.digests import ENVIRONMENT
from nicest.runs.folder import COLUMNS, LAST, MODEL, RunFolder, read_tensors, write_tensors
from nicest.runs.formats import FORMAT
from nicest.runs.sinks import Saved
from nicest.train.state import State
from small_runs import SMALL, metrics, resume, run

Refusal = Callable[..., str]
NEWER = f"written by a newer nicest (this one reads up to format {FORMAT}); upgrade nicest"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    run(out, "train.epochs=1")
    return out


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """A run folder to damage."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def fitted(preprocess: str) -> tuple[Recipe, Flow]:
    """A flow of continuous data with random weights, whitened in float64."""
    recipe = load_recipe("digits").override(*SMALL, f"model.preprocess={preprocess}", "data.shape=[5]")
    flow = build(recipe).double()
    flow.initialise(torch.randn(200, 5) @ torch.randn(5, 5) + 3)
    return recipe, flow


def saved(out: Path, recipe: Recipe, flow: Flow) -> Flow:
    """Save a flow as training does; it is float32 then."""
    state = State(recipe, flow, torch.device("cpu"))
    with RunFolder(out).open_for_writing():
        RunFolder(out).save_model(Saved(state.average.state_dict() | state.constants, recipe, {"epoch": 3}))
    return state.flow.eval()


class TestExact:
    @pytest.mark.parametrize("preprocess", ["none", "zca", "triangular"])
    def test_a_loaded_flow_gives_the_same_bits(self, tmp_path: Path, preprocess: str):
        flow = saved(tmp_path, *fitted(preprocess))
        loaded, x = nicest.load(tmp_path), torch.randn(50, 5)
        assert torch.equal(loaded(x), flow(x))
        assert torch.equal(loaded.decode(x), flow.decode(x))
        assert not loaded.training

    @pytest.mark.parametrize(
        ("preprocess", "layer", "kind"), [("zca", "zca", ZCA), ("triangular", "whitening", TriangularAffine)]
    )
    def test_loading_in_float64_gives_the_float64_whitening(
        self, tmp_path: Path, preprocess: str, layer: str, kind: type
    ):
        recipe, flow = fitted(preprocess)
        constants = {
            name: tensor.clone()
            for name, tensor in flow.state_dict().items()
            if name.startswith((f"bijection.layers.{layer}.", "units."))
        }
        assert any(not torch.equal(tensor, tensor.float().double()) for tensor in constants.values())
        saved(tmp_path, recipe, flow)
        loaded = nicest.load(tmp_path, dtype=torch.float64)
        assert isinstance(loaded.bijection.layers[layer], kind)
        for name, tensor in constants.items():
            assert torch.equal(loaded.state_dict()[name], tensor), name
        assert loaded(torch.randn(2, 5).double()).dtype == torch.float64

    def test_a_folder_and_its_model_file_are_the_same_model(self, trained: Path, tmp_path: Path):
        moved = tmp_path / "elsewhere.safetensors"  # the file stands alone
        shutil.copy(trained / MODEL, moved)
        weights = nicest.load(trained).state_dict()
        for path in (trained / MODEL, str(trained), moved):
            assert all(torch.equal(weights[name], tensor) for name, tensor in nicest.load(path).state_dict().items())

    def test_recipe_and_figures_come_with_the_model(self, trained: Path):
        opened = nicest.open(trained)
        recipe, figures = opened.recipe, opened.figures
        assert recipe == load_recipe(str(trained / "recipe.toml"))
        assert {key: value for key, value in figures.items() if key != "seconds"} == metrics(trained)[0]

    def test_loading_leaves_the_random_state_alone(self, trained: Path):
        before = torch.get_rng_state()
        nicest.load(trained)
        assert torch.equal(torch.get_rng_state(), before)

    def test_tensors_and_figures_of_any_kind_come_back(self, tmp_path: Path):
        tensors = {
            "f64": torch.randn(3, 2, dtype=torch.float64),
            "bytes": torch.get_rng_state(),
            "scalar": torch.tensor(7.0),
            "empty": torch.zeros(0),
            "transposed": torch.randn(3, 2).T,
        }
        write_tensors(
            tmp_path / "x.safetensors", Saved(tensors, Recipe(name="x"), {"step": 3, "best": -1.5, "no": None})
        )
        found, recipe, figures, _ = read_tensors(tmp_path / "x.safetensors")
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor)
            assert found[name].dtype == tensor.dtype
        assert (recipe, figures) == (Recipe(name="x"), {"step": 3, "best": -1.5, "no": None})

    def test_files_have_the_usual_mode_of_new_files(self, tmp_path: Path):
        before = os.umask(0o027)
        try:
            write_tensors(tmp_path / "x.safetensors", Saved({"a": torch.zeros(3)}, Recipe(), {}))
        finally:
            os.umask(before)
        assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == 0o640


def rewrite(path: Path, **metadata: str) -> None:
    """Write the tensors of a file again, under other metadata."""
    with safe_open(path, framework="pt") as file:
        old, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, old | metadata)


class TestRefused:
    """Each in one line."""

    @pytest.mark.parametrize("keep", [0, 5, 100, -1])
    @pytest.mark.parametrize("name", [MODEL, LAST])
    def test_truncated_files(self, refusal: Refusal, copy: Path, name: str, keep: int):
        (copy / name).write_bytes((copy / name).read_bytes()[:keep])
        attempt = nicest.load if name == MODEL else resume
        assert f"{copy / name} is truncated or damaged" in refusal(attempt, copy)

    def test_a_pickle_executes_nothing(self, refusal: Refusal, copy: Path, tmp_path: Path):
        class Attack:
            def __reduce__(self) -> tuple[object, ...]:
                return (Path.touch, (tmp_path / "executed",))

        (copy / MODEL).write_bytes(pickle.dumps(Attack()))
        refusal(nicest.load, copy)
        torch.save({"weights": Attack()}, copy / MODEL)
        refusal(nicest.load, copy)
        assert not (tmp_path / "executed").exists()
        pickle.loads(pickle.dumps(Attack()))
        assert (tmp_path / "executed").exists()  # it would have

    def test_safetensors_of_others(self, refusal: Refusal, copy: Path):
        expected = f"was not written by nicest: expected a format such as 'nicest {FORMAT}', got"
        save_file({"a": torch.zeros(3)}, copy / MODEL)
        assert f"{expected} ''" in refusal(nicest.load, copy)
        save_file({"a": torch.zeros(3)}, copy / MODEL, {"format": "pt"})
        assert f"{expected} 'pt'" in refusal(nicest.load, copy)

    def test_a_newer_format(self, refusal: Refusal, copy: Path):
        rewrite(copy / MODEL, format="nicest 99")
        newer = f"written by a newer nicest (format 99; this one reads up to {FORMAT}); upgrade nicest"
        assert f"{copy / MODEL}: {newer}" in refusal(nicest.load, copy)

    def test_a_folder_of_a_newer_format(self, refusal: Refusal, copy: Path):
        """environment.json holds the format of all JSON files, whose content may be anything."""
        (copy / ENVIRONMENT).write_text(json.dumps({"format": f"nicest {FORMAT + 1}"}))
        (copy / COLUMNS).write_text('{"of another": "kind"}')
        said = refusal(RunFolder(copy).schema)
        assert said == refusal(RunFolder(copy).metrics)
        assert said.startswith(f"{copy / ENVIRONMENT}: written by a newer nicest (format {FORMAT + 1}; this one reads")

    def test_every_folder_has_its_format(self, trained: Path):
        assert json.loads((trained / ENVIRONMENT).read_text())["format"] == f"nicest {FORMAT}"

    def test_columns_that_are_something_else(self, refusal: Refusal, copy: Path):
        for text in ("3", "null", "true", '"text"', "[3]", '[{"name": "a", "type": "double", "kind": "odd"}]'):
            (copy / COLUMNS).write_text(text)
            assert "expected the columns of a table" in refusal(RunFolder(copy).schema)

    def test_an_unknown_counter_of_the_state(self, refusal: Refusal, copy: Path):
        saved = read_tensors(copy / LAST)
        write_tensors(copy / LAST, saved._replace(figures=saved.figures | {"phase": 3}))
        newer = f"unknown counter 'phase': {NEWER}"
        assert refusal(resume, copy, "train.epochs=3") == f"{copy}: {newer}"

    def test_weights_that_do_not_fit_the_recipe(self, refusal: Refusal, copy: Path):
        recipe = load_recipe(str(copy / "recipe.toml")).override("model.width=9")
        rewrite(copy / MODEL, recipe=recipe.to_toml())
        message = refusal(nicest.load, copy, verify=False)
        assert "the weights do not fit the recipe" in message
        assert "layers.0.weight' is (9, 32) in the flow and (8, 32) in the file" in message

    def test_a_state_is_no_model(self, refusal: Refusal, trained: Path):
        assert "the weights do not fit the recipe" in refusal(nicest.load, trained / LAST)

    def test_no_folder_and_an_empty_folder(self, refusal: Refusal, tmp_path: Path):
        missing = refusal(nicest.load, tmp_path / "none")
        assert f"expected a run folder with {MODEL}, but {tmp_path / 'none'} does not exist: train one with" in missing
        assert f"but {tmp_path} is no run folder" in refusal(nicest.load, tmp_path)
        assert "does not exist" in refusal(nicest.load, tmp_path / "none.safetensors")

    def test_a_run_without_a_model_yet(self, refusal: Refusal, copy: Path):
        (copy / MODEL).unlink()
        rewrite(copy / LAST, figures='{"best_nats": -Infinity}')
        assert "has no model yet, training stopped before its first validation" in refusal(nicest.load, copy)

    @pytest.mark.parametrize("own_flow", ["false", "true"])
    def test_a_model_that_was_deleted_can_be_written_again(self, refusal: Refusal, copy: Path, own_flow: str):
        (copy / MODEL).unlink()
        text = (copy / "recipe.toml").read_text()
        (copy / "recipe.toml").write_text(text.replace("own_flow = false", f"own_flow = {own_flow}"))
        said = f"{copy / MODEL} is missing: to write the model again, resume the training"
        assert refusal(nicest.load, copy) == said
        with pytest.raises(NicestError) as caught:
            nicest.load(copy)
        command = f" with `nicest train {copy}/recipe.toml --out {copy} --resume`"  # it knows no flow built by hand
        assert explained(caught.value) == said + (command if own_flow == "false" else "")

    def test_a_recipe_of_a_later_nicest_in_the_file(self, refusal: Refusal, copy: Path):
        rewrite(copy / MODEL, recipe="[model]\nspline_bins = 3\n")
        assert f"{copy / MODEL}: unknown key 'model.spline_bins'" in (message := refusal(nicest.load, copy))
        assert message.endswith(f": {NEWER}")
        rewrite(copy / MODEL, recipe='[model]\nblocks = [{kind = "attention"}]\n')
        assert "kind is one of logit, " in (message := refusal(nicest.load, copy))
        assert message.endswith(f"got 'attention': {NEWER}")
        rewrite(copy / MODEL, recipe="[model\n")
        assert "is not valid TOML" in (message := refusal(nicest.load, copy))
        assert "newer" not in message
