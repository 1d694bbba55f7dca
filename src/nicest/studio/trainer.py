"""Training from the page: data that was sent, looked at, and `nicest train` on it, in a process of its own.

The process belongs to nobody: it goes on when the page is closed and when the server ends. What is known of it lies in
its run folder, so that the next server finds it again.
"""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from nicest.data.cells import is_moment
from nicest.data.scan import read_table
from nicest.data.splits import read_rows
from nicest.data.tables import TableFile
from nicest.errors import NicestError
from nicest.files import write_text, writing
from nicest.runs.folder import COLUMNS, METRICS, MODEL, RECIPE
from nicest.studio import limits
from nicest.studio.messages import Begin, ColumnKind, Found, FoundColumn, Process
from nicest.studio.rows import _ends, _rows_of

DATA = "data"  # where the data lies, beside the run folders
PROCESS, LOG = "studio.json", "train.log"  # of a run folder: what process trains, and what it says
KINDS: dict[str, ColumnKind] = {"real": "real", "steps": "integer", "values": "categorical"}


class Trainer:
    """Trainings in the sub-folders of one folder, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder.resolve(), threading.Lock()
        self.staged: dict[str, Path] = {}  # data that was looked at, the newest last
        self.children: dict[Path, subprocess.Popen[bytes]] = {}

    def runs(self) -> list[Path]:
        """The run folders of trainings that were begun here, by this server or by one before it."""
        return sorted(path.parent for path in self.folder.glob(f"*/{PROCESS}"))

    def stage(self, content: bytes, name: str, kind: str) -> Found:
        """Keep data for a training, and say what it is; what cannot be trained on is refused, and nothing is left."""
        id = secrets.token_hex(8)
        path = self.folder / DATA / f".{id}.{kind}"
        with writing(f"in {self.folder}", "; start the studio with another --folder"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        try:
            found = self.look(path, plain(name))
        except NicestError as error:
            path.unlink()
            raise NicestError(str(error).replace(str(path), name[:80])) from error
        except BaseException:
            path.unlink()
            raise
        with self.lock:
            self.staged[id] = path
            for old in list(self.staged)[: -limits.STAGED]:
                self.staged.pop(old).unlink(missing_ok=True)
        return found.model_copy(update={"id": id})

    def look(self, path: Path, name: str) -> Found:
        """What a file holds. Its size is checked before its rows are read."""
        with self.lock, warnings.catch_warnings(record=True) as heard:  # which are the process's
            warnings.simplefilter("always")
            if path.suffix == ".npy":
                rows = read_rows(path)
                if len(rows.shape) == 1 or rows.levels is None:
                    raise NicestError(f"{path}: expected images, whole numbers of shape (N, H, W) or (N, H, W, 3)")
                if rows.values.shape[1] > limits.TRAIN_DIM:
                    raise NicestError(
                        f"{path}: expected images of at most {limits.TRAIN_DIM} numbers, got {rows.values.shape[1]}:"
                        " choose a smaller size"
                    )
                found = Found(kind="images", name=name, rows=len(rows.values), shape=list(rows.shape))
            else:
                table = TableFile(path, most=8 * limits.CELLS)
                if (table.count or 0) * len(table.names) > limits.CELLS:
                    raise NicestError(
                        f"{path}: expected at most {limits.CELLS} cells, got {table.count} rows of {len(table.names)}"
                        " columns: use `nicest train`"
                    )
                complete, incomplete, columns = read_table(path)
                first = next(iter(table.batches([column.name for column in columns])))
                found = Found(
                    kind="table",
                    name=name,
                    rows=len(complete) + len(incomplete),
                    incomplete=len(incomplete),
                    shape=[len(columns)],
                    columns=[_described(column) for column in columns],
                    preview=_rows_of(first.slice(0, 5)),
                )
            if found.rows < limits.FEWEST:
                raise NicestError(f"{path}: expected at least {limits.FEWEST} rows, got {found.rows}")
        said = [str(each.message).replace(str(path), name) for each in heard]
        return found.model_copy(update={"warnings": said[:5]})

    def begin(self, ask: Begin) -> Path:
        """Start `nicest train` on staged data; its run folder."""
        with self.lock:
            if going := next((run.name for run in self.runs() if self.state(run).running), None):
                raise NicestError(f"{going} is being trained: one at a time; stop it, or wait")
            if len(self.runs()) >= limits.RUNS:
                raise NicestError(f"{self.folder} holds {limits.RUNS} runs already: move some of them away")
            if ask.id not in self.staged:
                raise NicestError("this data is not kept any more: send it again")
            data = self.staged.pop(ask.id)
            name = base = plain(ask.name)
            for number in range(2, limits.RUNS + 2):
                if not (self.folder / name).exists():
                    break
                name = f"{base}-{number}"
            out, kept = self.folder / name, data.with_name(f"{name}{data.suffix}")
            with writing(f"in {self.folder}", "; start the studio with another --folder"):
                data.replace(kept)
                out.mkdir()
                log = (out / LOG).open("wb")
            recipe = "images" if kept.suffix == ".npy" else "table"
            command = [sys.executable, "-m", "nicest", "train", recipe, "--data", str(kept), "--out", str(out)]
            command += ["--set", f"train.effort={ask.effort}"]
            command += ["--set", f"train.epochs={ask.epochs}"] if ask.epochs else []
            with log:
                child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, child.pid, 10)  # those who look at models come first
            self.children[out] = child
            write_text(out / PROCESS, json.dumps({"pid": child.pid, "data": kept.name}))
            return out

    def state(self, run: Path) -> Process:
        """Whether a training goes on, and what it said last where it failed."""
        if not (run / PROCESS).is_file():
            return Process()
        child = self.children.get(run)
        if child and child.poll() is not None:  # and is no zombie any more
            del self.children[run]
        running = self.pid(run) is not None
        lines = _last_lines(run / LOG)
        failed = not running and any(line.startswith("error:") for line in lines[-3:])
        return Process(here=True, running=running, failed=failed, said=lines[-1] if lines else "")

    def stop(self, run: Path) -> None:
        """Tell a training to save what it has and end; its best model stays."""
        if (pid := self.pid(run)) is None:
            raise NicestError(f"{run.name} is not being trained here now")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)

    def pid(self, run: Path) -> int | None:
        """The process that trains a run, while it does; a number that another process has now is not one."""
        try:
            pid = int(json.loads((run / PROCESS).read_text())["pid"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        child = self.children.get(run)
        if child and child.pid == pid:
            return pid if child.poll() is None else None
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") if Path("/proc/self").exists() else _ps(pid)
        except OSError:
            return None
        return pid if str(run).encode() in words else None


def packed(run: Path) -> bytes:
    """A run as a .zip file that `nicest.open` reads once it is unpacked: model, recipe, columns, metrics."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name in (MODEL, RECIPE, COLUMNS, METRICS, "environment.json"):
            if (run / name).is_file():
                file.write(run / name, f"{run.name}/{name}")
    return buffer.getvalue()


def plain(name: str) -> str:
    """A name that is safe as that of a folder and in an address."""
    stem = re.sub(r"\.(csv|parquet|arrow|feather|npy)$", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:40].strip("-") or "run"


def _described(column: Any) -> FoundColumn:
    low, high = (None, None) if column.kind == "values" else _ends(column)
    return FoundColumn(
        name=column.name,
        kind="date or time" if is_moment(column) else KINDS[column.kind],
        low=low,
        high=high,
        values=[str(each)[:40] for each in column.values[:8]],
        distinct=len(column.values),
    )


def _last_lines(path: Path, most: int = 4096) -> list[str]:
    """The last lines of a log, as a terminal would show them."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.strip()[:300] for line in re.split(r"[\r\n]+", text) if line.strip()]


def _ps(pid: int) -> list[bytes]:
    found = subprocess.run(["ps", "-o", "args=", "-p", str(pid)], capture_output=True, check=False)
    return found.stdout.split()
