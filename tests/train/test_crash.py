"""The crash test, in short: a real training is killed three times and ends as if nothing had happened."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from crash import SETTINGS, Lost, Reference, crash_test, ending, finish, survived
from nicest.runs.folder import LAST, MODEL, read_tensors, write_tensors
from nicest.runs.sinks import Saved
from small_runs import run

SHORT = (*SETTINGS, "train.epochs=10")
SECONDS = 4.0  # that a process of it takes, more or less


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    run(out, settings=SHORT)
    return out


def test_no_run_is_lost(straight: Path, tmp_path: Path):
    tally = crash_test(tmp_path, Reference(straight, SHORT, SECONDS), kills=3, seed=5)
    assert tally.well(), str(tally)
    assert tally.kills == 3
    assert tally.inside.total() >= tally.ways["write"] >= 1
    assert tally.resumes >= 1
    assert tally.identical == tally.runs >= 1


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
        tensors, recipe, figures = read_tensors(damaged / name)
        weight = next(tensor for tensor in tensors.values() if tensor.ndim == 2)
        weight.view(torch.uint8)[0, 0] ^= 1
        write_tensors(damaged / name, Saved(tensors, recipe, figures))
        before, after = ending(straight), ending(damaged)
        assert [each for each in after if after[each] != before[each]] == [part]

    def test_a_refusal(self):
        process = subprocess.Popen([sys.executable, "-c", "exit('error: no')"], stderr=subprocess.PIPE, text=True)
        with pytest.raises(Lost, match="refused: error: no"):
            finish(process)
