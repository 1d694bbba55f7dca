"""The command line, called in this process for speed or as a process of its own, and a run trained through it."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import small_runs
from nicest.cli import main

TINY = [
    *("--set=model.width=8", "--set=model.hidden_layers=1", "--set=train.epochs=2", "--set=train.batch=40"),
    *("--set=train.evaluate_every=1", "--set=train.warmup=0"),
]

TABLE = [
    *("--set=table.width=16", "--set=table.depth=1", "--set=table.components=2", "--set=train.epochs=5"),
    *("--set=train.batch=40", "--set=train.lr=0.01", "--set=train.evaluate_every=1"),
]


class Outcome(NamedTuple):
    """What a command gave back."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        """The one object on standard output."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    @property
    def refusal(self) -> str:
        """The one line of a command that failed, on standard error."""
        assert (self.code, self.out) == (1, ""), self
        (line,) = self.err.splitlines()
        assert line.startswith("error: ")
        assert "a bug in nicest" not in line
        return line.removeprefix("error: ")

    @property
    def misuse(self) -> str:
        """The one line of a usage error, on standard error, which says where the help is."""
        assert (self.code, self.out) == (2, ""), self
        (line,) = self.err.splitlines()
        said, _, where = line.removeprefix("error: ").rpartition("; see ")
        assert where.startswith("nicest")
        assert where.endswith(" --help")
        return said


def call(*arguments: object) -> int:
    """Run `nicest ARGUMENTS` in this process and return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["nicest", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            main()
    assert isinstance(exit.value.code, int | None)
    return exit.value.code or 0


@pytest.fixture
def nicest(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """`nicest(...)` runs the command line in this process."""

    def nicest(*arguments: object) -> Outcome:
        capfd.readouterr()
        return Outcome(call(*arguments), *capfd.readouterr())

    return nicest


@pytest.fixture(scope="session")
def process() -> Callable[..., Outcome]:
    """`process(...)` runs the command line as a process of its own, after the Python code `first` where given."""

    def process(*arguments: object, first: str | None = None) -> Outcome:
        start = ["-m", "nicest"] if first is None else ["-c", f"{first}; from nicest.cli import main; main()"]
        done = subprocess.run(
            [sys.executable, *start, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return process


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the digits; for reading only."""
    out = tmp_path_factory.mktemp("cli") / "digits"
    assert call("train", "digits", "--out", out, "--device", "cpu", *TINY) == 0
    return out


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on rows of numbers, in a folder beside its data; for reading only."""
    folder = tmp_path_factory.mktemp("cli")
    rng = np.random.default_rng(0)
    np.save(folder / "rows.npy", rng.standard_normal((80, 4)) @ rng.standard_normal((4, 4)))
    assert call("train", "digits", "--data", folder / "rows.npy", "--out", folder / "run", *TINY) == 0
    return folder / "run"


@pytest.fixture(scope="session")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table with texts and missing values; for reading only."""
    folder = tmp_path_factory.mktemp("cli")
    data = small_runs.people(folder / "people.csv")
    assert call("train", data, "--target", "height", "--out", folder / "run", "--device", "cpu", *TABLE) == 0
    return folder / "run"


@pytest.fixture
def own_table(table: Path, tmp_path: Path, nicest: Callable[..., Outcome]) -> Path:
    """A run whose data and files the test may change: run/ and rows.npy in one folder."""
    shutil.copy(table.parent / "rows.npy", tmp_path)
    assert nicest("train", "digits", "--data", tmp_path / "rows.npy", "--out", tmp_path / "run", *TINY).code == 0
    return tmp_path / "run"


@pytest.fixture
def untouched() -> Callable[[Path], contextlib.AbstractContextManager[None]]:
    """`with untouched(folder)`: not one file in the folder is added, removed or changed."""

    def contents(folder: Path) -> dict[str, bytes]:
        return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    @contextlib.contextmanager
    def untouched(folder: Path) -> Iterator[None]:
        before = contents(folder)
        yield
        after = contents(folder)
        assert after.keys() == before.keys()
        assert after == before

    return untouched
