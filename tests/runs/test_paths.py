"""A run folder names no user and leads nowhere but from itself; what it keeps of paths still finds the data."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import nicest
from nicest.data import load
from nicest.recipes import Recipe, load_recipe
from nicest.runs.folder import RunFolder
from nicest.runs.paths import command_line, recorded
from nicest.tasks.evaluate import evaluate
from nicest.train.fit import train
from small_runs import people

TINY = ("table.width=6", "table.members=1", "train.epochs=2", "train.evaluate_every=1")


@pytest.fixture
def alice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a user, who works in it."""
    home = tmp_path / "alice"
    home.mkdir()
    for variable, value in {"HOME": home, "LOGNAME": "alice", "USER": "alice"}.items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.chdir(home)
    return home


def trained(out: Path, data: Path, monkeypatch: pytest.MonkeyPatch, *, private: bool = False) -> Path:
    """A run of a table, as the command line makes it."""
    monkeypatch.setattr("sys.argv", ["/usr/bin/nicest", "train", "table", "--data", str(data), "--out", str(out)])
    overrides = (f"data.name={data}", *TINY)
    train(load_recipe("table"), out, overrides=overrides, device="cpu", callbacks=(), private=private)
    return out


def leaks(folder: Path, *words: str) -> list[str]:
    """The files that hold one of these words."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 6
    return [path.name for path in files if any(word.encode() in path.read_bytes() for word in words)]


@pytest.mark.parametrize("private", [False, True])
def test_no_file_names_the_user_and_the_data_is_found_from_anywhere(
    alice: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private: bool
):
    data = people(alice / "people.csv")
    out = trained(alice / "runs" / "a", data, monkeypatch, private=private)
    assert leaks(out, "alice", str(tmp_path)) == []
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    opened = nicest.open(out)
    assert opened.recipe.data.name == str(data)
    assert opened.recipe == load_recipe(str(out / "recipe.toml"))
    assert evaluate(opened, baselines=False).n == len(load(str(data)).test)
    assert train(load_recipe("table"), out, overrides=("train.epochs=3",), resume=True, device="cpu")["finished"]
    again = train(load_recipe(str(out / "recipe.toml")), tmp_path / "again", device="cpu", callbacks=())
    assert again["finished"]
    alice.rename(tmp_path / "bob")  # all of it moved
    assert len(nicest.open(tmp_path / "bob" / "runs" / "a").splits.test) == len(opened.splits.test)


def test_a_private_run_records_no_command_and_stays_private(
    alice: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
):
    data = people(tmp_path / "people.csv")
    out = trained(tmp_path / "a", data, monkeypatch, private=True)
    assert leaks(out, "nicest train", str(tmp_path)) == []
    moved = data.rename(alice / "people.csv")
    assert f"found no {data}, which the run was trained on: put it back, or give its new path as data" in refusal(
        lambda: nicest.open(out).splits
    )
    changes = (f"data.name={moved}", "train.epochs=3")
    assert train(load_recipe("table"), out, overrides=changes, resume=True, device="cpu", callbacks=())["finished"]
    assert leaks(out, "nicest train", str(tmp_path)) == []
    assert (saved := RunFolder(out).read_state())
    assert saved.recipe.data.name == "~/people.csv"


def test_a_run_that_is_not_private_records_the_command(alice: Path, monkeypatch: pytest.MonkeyPatch):
    out = trained(alice / "a", people(alice / "people.csv"), monkeypatch)
    assert '"command": "nicest train table --data people.csv --out a"' in (out / "environment.json").read_text()


@pytest.mark.parametrize(
    ("data", "folder", "public", "private"),
    [
        ("/home/alice/t.csv", "/home/alice/runs/a", "../../t.csv", "../../t.csv"),
        ("/home/alice/a/t.csv", "/home/alice/a", "./t.csv", "./t.csv"),
        ("/home/alice/p/t.csv", "/scratch/runs/a", "~/p/t.csv", "~/p/t.csv"),
        ("~/t.csv", "/home/alice/a", "../t.csv", "../t.csv"),
        ("/data/t.csv", "/home/alice/a", "/data/t.csv", "./t.csv"),
        ("/scratch/alice/t.csv", "/scratch/a", "../alice/t.csv", "./t.csv"),
        ("digits", "/home/alice/a", "digits", "digits"),
        ("rows in memory", "/home/alice/a", "rows in memory", "rows in memory"),
    ],
)
def test_what_is_kept_of_a_path(monkeypatch: pytest.MonkeyPatch, data: str, folder: str, public: str, private: str):
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("LOGNAME", "alice")
    recipe = Recipe()
    recipe = replace(recipe, data=replace(recipe.data, name=data))
    for hides, name in ((False, public), (True, private)):
        assert recorded(recipe, Path(folder), private=hides).data.name == name
    back = recorded(recipe, Path(folder), private=False).located(Path(folder)).data.name
    assert Path(back).expanduser() == Path(data).expanduser()


def test_a_path_from_the_working_directory_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As in recipes that people write, and in runs of before."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").touch()
    (tmp_path / "own.toml").write_text('[data]\nname = "./t.csv"\n')
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "own.toml").write_text('[data]\nname = "./t.csv"\n')
    assert load_recipe("own.toml").data.name == str(tmp_path / "t.csv")
    assert load_recipe("recipes/own.toml").data.name == "./t.csv"


def test_a_command_can_be_given_again(alice: Path):
    words = ["nicest", "train", f"{alice}/a b.csv", f"{alice.parent}/c", f"--out={alice}/runs/x"]
    assert command_line(words) == f"nicest train 'a b.csv' {alice.parent}/c --out=runs/x"


def test_a_command_from_elsewhere_can_be_given_again(alice: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert command_line(["nicest", f"{alice}/a b.csv"]) == "nicest ~/'a b.csv'"
