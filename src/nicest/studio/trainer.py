"""Training from the page: uploaded data, what is in it, and `nicest train` in a process of its own.

The process survives the page and the server. Its state is in its run folder, so that the next server finds it.
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

import numpy as np

from nicest.data.loading import read_rows
from nicest.data.tables import TableFile, read_table
from nicest.errors import NicestError
from nicest.files import lock, write_text, writing
from nicest.runs.folder import COLUMNS, METRICS, MODEL, RECIPE
from nicest.studio import limits
from nicest.studio.api import Json
from nicest.studio.messages import Begin
from nicest.studio.tables import described, in_json

DATA = "data"  # folder of the uploaded data, next to the run folders
PROCESS, LOG = "studio.json", "train.log"  # files in a run folder: the process that trains, and its output

STARTED: list[subprocess.Popen[bytes]] = []  # trainings of this process, which must reap them


class Trainer:
    """Trainings in the subfolders of one folder, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder.resolve(), threading.Lock()
        self.staged: dict[str, Path] = {}  # data that waits for its training, the newest last

    def runs(self) -> list[Path]:
        """Return the run folders of trainings that this server or an earlier one started here."""
        return sorted(path.parent for path in self.folder.glob(f"*/{PROCESS}"))

    def stage(self, content: bytes, name: str, kind: str) -> Json:
        """Store data for a training and describe it; data that cannot be trained on is refused and deleted."""
        id = secrets.token_hex(8)
        path = self.folder / DATA / f".{id}.{kind}"
        with writing(f"in {self.folder}", "; start the studio with another --folder"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        try:
            with self.lock:
                found = self.look(path, plain(name))
        except BaseException as error:
            path.unlink()
            if isinstance(error, NicestError):
                raise NicestError(str(error).replace(str(path), name[:80])) from error
            raise
        with self.lock:
            self.staged[id] = path
            for old in list(self.staged)[: -limits.STAGED]:
                self.staged.pop(old).unlink(missing_ok=True)
        return found | {"id": id}

    def look(self, path: Path, name: str) -> Json:
        """Describe a file, whose size is checked before its rows are read."""
        found: Json
        notes: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
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
                count, found = len(rows.values), {"kind": "images", "shape": list(rows.shape)}
            else:
                table = TableFile(path, most=8 * limits.CELLS)
                if (table.count or 0) * len(table.names) > limits.CELLS:
                    raise NicestError(
                        f"{path}: expected at most {limits.CELLS} cells, got {table.count} rows of {len(table.names)}"
                        " columns: use `nicest train`"
                    )
                schema, values, notes = read_table(path)
                count = len(values)
                found = {
                    "kind": "table",
                    "incomplete": int(np.isnan(values).any(1).sum()),
                    "columns": [described(column) for column in schema],
                    "preview": in_json(next(iter(table.batches(schema.names))).slice(0, 5), schema.names),
                }
        if count < limits.FEWEST:
            raise NicestError(f"{path}: expected at least {limits.FEWEST} rows, got {count}")
        notes = [each.replace(str(path), name) for each in (*notes, *(str(each.message) for each in caught))]
        return {"name": name, "rows": count, "warnings": notes[:5]} | found

    def begin(self, ask: Begin) -> Path:
        """Start `nicest train` on staged data; return its run folder."""
        with self.lock:
            if going := next((run.name for run in self.runs() if self.state(run)["running"]), None):
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
                lock(log)  # the child inherits the lock, and holds it until it ends
                child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, child.pid, 10)  # requests come first
            STARTED[:] = [each for each in STARTED if each.poll() is None] + [child]
            write_text(out / PROCESS, json.dumps({"pid": child.pid, "data": kept.name}))
            return out

    def state(self, run: Path) -> Json:
        """Return whether a training started `here` is `running`, whether it `failed`, and its last line of output."""
        here, running, lines = (run / PROCESS).is_file(), self.pid(run) is not None, last_lines(run / LOG)
        failed = here and not running and any(line.startswith("error:") for line in lines[-3:])
        return {"here": here, "running": running, "failed": failed, "said": lines[-1] if here and lines else ""}

    def stop(self, run: Path) -> None:
        """Tell a training to save and end; its best model stays."""
        if (pid := self.pid(run)) is None:
            raise NicestError(f"{run.name} is not being trained here now")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)

    def pid(self, run: Path) -> int | None:
        """Return the process that trains a run; None unless it holds the lock of its log."""
        try:
            with (run / LOG).open("rb") as log:
                lock(log)
        except BlockingIOError:
            with suppress(OSError, ValueError, KeyError, TypeError):
                return int(json.loads((run / PROCESS).read_text())["pid"])
        except OSError:
            pass
        return None


def packed(run: Path) -> bytes:
    """Return a run as a .zip file that `nicest.open` reads once it is unpacked."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name in (MODEL, RECIPE, COLUMNS, METRICS, "environment.json"):
            if (run / name).is_file():
                file.write(run / name, f"{run.name}/{name}")
    return buffer.getvalue()


def plain(name: str) -> str:
    """Return a name that is safe for a folder and in an address."""
    stem = re.sub(r"\.(csv|parquet|arrow|feather|npy)$", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:40].strip("-") or "run"


def last_lines(path: Path, most: int = 4096) -> list[str]:
    """Return the last lines of a log, as a terminal would show them."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.strip()[:300] for line in re.split(r"[\r\n]+", text) if line.strip()]
