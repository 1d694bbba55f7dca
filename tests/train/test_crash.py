"""The crash test, in short: real trainings are killed three times and end as if nothing had happened."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import crash
from crash import (
    CASES,
    SETTINGS,
    Case,
    Lost,
    Reference,
    Results,
    Tally,
    crash_test,
    ending,
    main,
    survived,
    undisturbed,
)
from nicest.runs.folder import LAST, MODEL, read_tensors, write_tensors
from small_runs import digits_file, people, run

SECONDS = 4.0  # that a process of it takes, more or less
SEED = 1699  # by which the first run is killed inside a write, the second one inside its first write and after another


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Case:
    rows = digits_file(tmp_path_factory.mktemp("digits") / "rows.npy")
    return Case("digits", (*SETTINGS, f"data.name={rows}", "data.levels=17", "train.epochs=10"))


@pytest.fixture(scope="module")
def straight(short: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    run(out, settings=short.settings)
    return out


def test_no_run_is_lost(short: Case, straight: Path, tmp_path: Path):
    """Nor by two sittings, the second of which adds to what the first has left in a file."""
    people(tmp_path / "people.csv")
    table = replace(CASES["table"], settings=(*CASES["table"].settings, "train.epochs=10"))
    references = {"images": Reference(short, straight, SECONDS), "table": undisturbed(table, tmp_path / "reference")}
    for kills in (1, 3):
        crash_test(tmp_path, references, Results(tmp_path / "results.json", seed=SEED), kills)
    results = Results(tmp_path / "results.json", seed=SEED)
    tally = results.total
    assert tally.well(), str(tally)
    assert tally.kills == sum(tally.ways.values()) == sum(each["kills"] for each in results.sittings) == 3
    assert tally.inside >= tally.ways["write"] >= 1
    assert tally.resumes >= 1
    assert tally.identical == tally.runs >= 2
    assert all(results.cases[name].runs for name in references)
    assert not list(tmp_path.glob("images-*")) + list(tmp_path.glob("table-*"))


class TestSittings:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        """The results of a sitting."""
        results = Results(tmp_path / "results.json", seed=3)
        results.begin_sitting()
        results.runs = 2
        results.cases["table"] += Tally(kills=5, ways={"write": 5}, resumes=4, runs=2, identical=2)
        results.save()
        return tmp_path / "results.json"

    def test_what_was_done_is_not_done_again(self, file: Path, capsys: pytest.CaptureFixture[str]):
        assert main(["--kills", "5", "--seed", "3", "--out", str(file)]) == 0
        assert "kills 5, inside a write 0" in capsys.readouterr().out

    def test_a_loss_of_before_counts(self, file: Path):
        results = Results(file, seed=3)
        results.cases["images"] += Tally(kills=1, runs=1, lost=["images-1: the state is gone"])
        results.save()
        assert main(["--kills", "6", "--seed", "3", "--out", str(file)]) == 1

    def test_another_seed_or_other_settings_do_not_add_up(
        self, file: Path, short: Case, monkeypatch: pytest.MonkeyPatch
    ):
        with pytest.raises(SystemExit, match="another crash test"):
            Results(file, seed=4)
        monkeypatch.setitem(crash.CASES, "images", short)
        with pytest.raises(SystemExit, match="another crash test"):
            Results(file, seed=3)

    def test_the_file_says_what_is_in_it(self, file: Path):
        found = json.loads(file.read_text())
        assert found == json.loads(json.dumps(Results(file, seed=3).report()))
        assert (found["kills"], found["kills_by_aim"], found["runs"], found["lost_runs"]) == (5, {"write": 5}, 2, 0)


class TestLossesAreSeen:
    @pytest.fixture
    def damaged(self, straight: Path, tmp_path: Path) -> Path:
        """A copy to be damaged."""
        return Path(shutil.copytree(straight, tmp_path / "run"))

    def test_but_not_where_there_are_none(self, straight: Path, damaged: Path):
        assert survived(damaged, 140) == 140
        assert ending(damaged) == ending(straight)

    @pytest.mark.parametrize("name", [LAST, MODEL])
    def test_a_truncated_file(self, damaged: Path, name: str):
        content = (damaged / name).read_bytes()
        (damaged / name).write_bytes(content[: len(content) // 2])
        for look in (lambda: survived(damaged, 0), lambda: ending(damaged)):
            with pytest.raises(Lost, match="truncated or damaged"):
                look()

    @pytest.mark.parametrize("name", [LAST, MODEL])
    def test_a_file_whose_digest_is_not_kept(self, damaged: Path, name: str):
        content = bytearray((damaged / name).read_bytes())
        content[-1] ^= 1
        (damaged / name).write_bytes(content)
        with pytest.raises(Lost, match=f"{name} has changed since it was written"):
            survived(damaged, 0)

    def test_a_state_that_is_gone(self, damaged: Path):
        (damaged / LAST).unlink()
        with pytest.raises(Lost, match="the state is gone"):
            survived(damaged, -1)

    def test_a_state_that_went_back(self, damaged: Path):
        with pytest.raises(Lost, match="from step 141 to 140"):
            survived(damaged, 141)

    def test_a_torn_row(self, damaged: Path):
        rows = (damaged / "metrics.jsonl").read_text()
        (damaged / "metrics.jsonl").write_text(rows[: -len(rows) // 20])
        with pytest.raises(Lost, match="the metrics are torn"):
            ending(damaged)

    @pytest.mark.parametrize(("name", "part"), [(LAST, "the state"), (MODEL, "the model")])
    def test_a_bit_that_differs(self, straight: Path, damaged: Path, name: str, part: str):
        saved = read_tensors(damaged / name)
        weight = next(tensor for tensor in saved.tensors.values() if tensor.ndim == 2)
        weight.view(torch.uint8)[0, 0] ^= 1
        write_tensors(damaged / name, saved)
        before, after = ending(straight), ending(damaged)
        assert [each for each in after if after[each] != before[each]] == [part]

    def test_a_refusal(self, short: Case, damaged: Path):
        with pytest.raises(Lost, match="holds a run already"):
            crash.Training(short, damaged).finish()
