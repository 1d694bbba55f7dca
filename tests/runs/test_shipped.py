"""Small copies of models, and those that come with nicest."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

import nicest
from nicest.cli import app
from nicest.errors import NicestError
from nicest.runs import shipped
from nicest.runs.folder import MODEL
from nicest.tasks.evaluate import evaluate
from nicest.tasks.hub import pack
from small_runs import run as train_small

LARGEST = 6_000_000  # bytes


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "run"
    train_small(out, "model.width=64", "model.preprocess=zca")
    return out


@pytest.fixture(scope="module")
def packed(run: Path) -> Path:
    pack(nicest.open(run), run.parent / "small", about="a small one")
    return run.parent / "small"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("NICEST_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


class TestPack:
    def test_networks_are_rounded_and_nothing_else_is(self, run: Path, packed: Path):
        with safe_open(packed / MODEL, "pt") as file:
            kinds = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
        weights = {name for name in kinds if ".network." in name and name.endswith("weight")}
        assert weights
        assert {name for name, kind in kinds.items() if kind == torch.bfloat16} == weights
        assert (packed / MODEL).stat().st_size < 0.8 * (run / MODEL).stat().st_size

    def test_the_copy_is_nearly_as_good_and_its_card_tells_how_good(self, run: Path, packed: Path):
        before, after = (evaluate(nicest.open(each), baselines=False).mean_nats for each in (run, packed))
        card = shipped.card(packed)
        assert after == pytest.approx(before, abs=0.2)
        assert card["test_nats"] == after
        assert card["about"] == "a small one"
        assert card["licence"].startswith("CC BY 4.0")
        assert card["bytes"] == (packed / MODEL).stat().st_size

    def test_the_copy_inverts(self, packed: Path):
        flow = nicest.open(packed, dtype=torch.float64).flow
        y = flow.units.enter(torch.from_numpy(nicest.open(packed).splits.test[:20]).double())
        assert float((flow.bijection.inverse(flow.bijection(y)[0])[0] - y).detach().abs().max()) < 1e-9

    def test_it_holds_no_state_and_no_trace_of_the_machine(self, packed: Path):
        names = {path.name for path in packed.iterdir()}
        assert names == {MODEL, "card.json", "environment.json", "metrics.jsonl", "recipe.toml"}
        told = "".join((packed / name).read_text() for name in names - {MODEL})
        assert Path.home() == Path("/") or str(Path.home()) not in told
        assert str(packed.parent) not in told
        assert "hostname" not in told

    def test_without_the_data_nothing_is_written_until_it_is_named(self, run: Path, tmp_path: Path):
        digits = nicest.open(run).splits
        rows = np.concatenate([digits.train, digits.valid, digits.test]).reshape(-1, 8, 8)
        np.save(tmp_path / "rows.npy", rows)
        train_small(tmp_path / "run", f"data.name={tmp_path / 'rows.npy'}", "data.levels=17", "train.epochs=1")
        (tmp_path / "rows.npy").rename(tmp_path / "moved.npy")
        with pytest.raises(NicestError, match="found no"):
            pack(nicest.open(tmp_path / "run"), tmp_path / "small")
        assert not (tmp_path / "small").exists()
        asked = [str(tmp_path / "run"), "--data", str(tmp_path / "moved.npy"), "--out", str(tmp_path / "small")]
        assert CliRunner().invoke(app, ["pack", *asked, "--device", "cpu"]).exit_code == 0
        assert shipped.card(tmp_path / "small")["data"] == "moved.npy"

    def test_a_run_is_not_overwritten(self, run: Path, packed: Path):
        with pytest.raises(NicestError, match="holds a run already"):
            pack(nicest.open(run), packed)


class TestShipped:
    @pytest.mark.parametrize("name", shipped.shipped())
    def test_it_opens_by_name_samples_and_is_as_good_as_its_card_says(self, name: str, home: Path):
        run = nicest.open(name, label=3 if "labels" in name else None)
        card = shipped.card(run.path)
        assert run.path == home / "models" / name
        assert (run.path / MODEL).stat().st_size <= LARGEST
        assert len(run.engine.sample(5)) == 5
        assert all(card[key] for key in ("about", "data", "licence", "limits", "recipe"))
        if run.recipe.data.name == "digits":
            found = evaluate(run, baselines=False)
            assert found.mean_nats == pytest.approx(card["test_nats"], abs=1e-2)

    def test_a_folder_of_that_name_comes_first(self, packed: Path, home: Path, monkeypatch: pytest.MonkeyPatch):
        name = next(iter(shipped.shipped()))
        monkeypatch.chdir(home.parent)
        shutil.copytree(packed, name)
        assert nicest.open(name).path == Path(name)

    def test_a_damaged_copy_is_mended(self, home: Path):
        name = next(iter(shipped.shipped()))
        copy = nicest.open(name).path / MODEL
        copy.write_bytes(copy.read_bytes()[:1000])
        assert len(nicest.open(name).engine.sample(2)) == 2

    def test_without_a_place_for_a_copy_it_opens_all_the_same(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("NICEST_DATA", str(tmp_path / "file"))
        name, folder = next(iter(shipped.shipped().items()))
        assert nicest.open(name).path == folder

    def test_an_unknown_name_says_so(self, home: Path):
        with pytest.raises(NicestError, match="but nosuch does not exist"):
            nicest.open("nosuch")


def test_cards_are_plain_json():
    for folder in shipped.shipped().values():
        card = json.loads((folder / shipped.CARD).read_text())
        assert np.isfinite(card["test_nats"])
