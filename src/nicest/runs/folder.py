"""The run folder: recipe, weights, state and metrics on disk, written whole or not at all; no pickle anywhere."""

from __future__ import annotations

import fcntl
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nicest.data.columns import Column, columns_from_json
from nicest.errors import NicestError
from nicest.files import flush, replacing, write_text
from nicest.flows import Flow
from nicest.messages import brief, shown
from nicest.recipes import Recipe, parse
from nicest.recipes.build import build
from nicest.runs.digests import keeping_digest, verify

FORMAT = 1
MODEL, LAST, COLUMNS = "model.safetensors", "last.safetensors", "columns.json"
SLACK = 100_000  # weights that may be wanting, for torch to say which


def write_tensors(path: Path, tensors: Mapping[str, Tensor], recipe: Recipe, figures: Mapping[str, Any]) -> None:
    """Tensors as safetensors, with the format version, the recipe and figures as metadata."""
    metadata = {"format": f"nicest {FORMAT}", "recipe": recipe.to_toml(), "figures": json.dumps(dict(figures))}
    with keeping_digest(path) as whole, replacing(path) as temporary:
        temporary.touch()  # the usual mode of a new file: safetensors would let its owner alone read it
        mode = temporary.stat().st_mode
        try:
            save_file({name: t.detach().contiguous().cpu() for name, t in tensors.items()}, temporary, metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        temporary.chmod(mode)
        whole(temporary)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Recipe, dict[str, Any]]:
    """What `write_tensors` wrote; nothing in the file is executed."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            check_format(path, metadata.get("format", ""))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except NicestError:
        raise
    except Exception as error:  # broken bytes lead safetensors and torch to errors of every kind
        raise NicestError(
            f"{path} is truncated or damaged: take a copy of it, or train again ({brief(error)})"
        ) from error
    if not {"recipe", "figures"} <= metadata.keys():
        raise NicestError(f"{path} lacks the recipe or the figures that nicest writes beside the weights")
    return tensors, parse(metadata["recipe"], str(path)), _figures(metadata["figures"], path)


def _figures(text: str, path: Path) -> dict[str, Any]:
    """The figures of a file: a table of numbers, words and nothing."""
    try:
        figures = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NicestError(f"{path}: expected figures in JSON, got {shown(text)}: take a copy of it") from error
    if not isinstance(figures, dict) or any(isinstance(each, list | dict) for each in figures.values()):
        raise NicestError(f"{path}: expected a table of figures, got {shown(text)}: take a copy of it")
    return figures


def check_format(path: Path, found: str) -> None:
    name, _, version = found.partition(" ")
    if name != "nicest" or not (version.isascii() and version.isdigit() and len(version) < 10):
        raise NicestError(
            f"{path} was not written by nicest: expected a format such as 'nicest {FORMAT}', got {shown(found)}"
        )
    if int(version) > FORMAT:
        raise NicestError(f"{path} is of format {version}, this nicest reads up to {FORMAT}: upgrade nicest")


class RunFolder:
    """One training run on disk."""

    def __init__(self, path: str | Path) -> None:
        self.asked = Path(path)
        self.model = self.asked if self.asked.suffix == ".safetensors" else self.asked / MODEL  # it stands alone, too
        self.path = self.model.parent

    @contextmanager
    def open_for_writing(self) -> Iterator[None]:
        """Make the folder if need be, and hold its lock: one process writes at a time."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise NicestError(f"cannot write in {self.path}: {error.strerror}; choose another --out") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise NicestError(f"{self.path} is being written by another process; wait, or choose --out") from error
            for left_over in self.path.glob(".*.[0-9]*.tmp"):
                left_over.unlink(missing_ok=True)  # of a process that was killed while it wrote
            yield

    def refuse_existing(self) -> None:
        """A run is never overwritten."""
        if (self.path / LAST).exists() or (self.path / MODEL).exists():
            raise NicestError(f"{self.path} holds a run already: --resume goes on with it, --out chooses another")

    def write(self, name: str, text: str) -> None:
        write_text(self.path / name, text)

    def save_model(
        self, tensors: Mapping[str, Tensor], constants: Mapping[str, Tensor], recipe: Recipe, figures: dict[str, Any]
    ) -> None:
        """The model that is kept; `constants`, its fitted buffers in float64, stand in for their rounded copies."""
        write_tensors(self.path / MODEL, dict(tensors) | dict(constants), recipe, figures)

    def read_model(self) -> tuple[dict[str, Tensor], Recipe, dict[str, Any]]:
        if not self.model.is_file():
            raise NicestError(self._absent())
        return read_tensors(self.model)

    def verify(self, *names: str) -> None:
        """Refuse files, the model where none is named, that are not those training wrote."""
        for path in [self.path / name for name in names] or [self.model]:
            if path.is_file():
                verify(path)

    def columns(self) -> tuple[Column, ...]:
        """The columns of the table that the model is of; none where it is of something else."""
        path = self.path / COLUMNS
        if not path.is_file():
            return ()
        try:
            return columns_from_json(json.loads(path.read_bytes()), str(path))
        except (OSError, ValueError, RecursionError) as error:
            raise NicestError(f"{path} cannot be read: take a copy of it, or train again ({brief(error)})") from error

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        try:
            with (self.path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(dict(row)) + "\n")
        except OSError as error:
            raise NicestError(f"cannot write {self.path / 'metrics.jsonl'}: {error.strerror}") from error

    def flush_metrics(self) -> None:
        """Rows are on the disk before a state that counts on them; a power cut keeps no order of its own."""
        try:
            flush(self.path / "metrics.jsonl")
        except FileNotFoundError:
            pass  # stopped before the first validation
        except OSError as error:
            raise NicestError(f"cannot write {self.path / 'metrics.jsonl'}: {error.strerror}") from error

    def metrics(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        try:
            lines = path.read_bytes().splitlines() if path.exists() else []
        except OSError as error:
            raise NicestError(f"cannot read {path}: {error.strerror}") from error
        return [_row(line, f"{path}, line {i}") for i, line in enumerate(lines, start=1) if line.endswith(b"}")]

    def drop_metrics_after(self, step: int) -> None:
        """Forget rows beyond the state that training goes on from."""
        rows = [row for row in self.metrics() if row["step"] <= step]
        write_text(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def _absent(self) -> str:
        if (self.path / LAST).exists():
            return f"{self.path} has no model yet, training stopped before its first validation: go on with --resume"
        there = "is no run folder" if self.asked.exists() else "does not exist"
        return f"expected a run folder with {MODEL}, but {self.asked} {there}: train one with `nicest train`"


class WatchedFolder(RunFolder):
    """A run folder that another process writes: nothing is read of it here, and nothing written."""

    @contextmanager
    def open_for_writing(self) -> Iterator[None]:
        yield

    def refuse_existing(self) -> None:
        pass

    def write(self, name: str, text: str) -> None:
        pass

    def save_model(self, *_: object) -> None:
        pass

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        pass

    def flush_metrics(self) -> None:
        pass

    def drop_metrics_after(self, step: int) -> None:
        pass


def _row(line: bytes, where: str) -> dict[str, Any]:
    """A row of metrics, which has its step."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise NicestError(f"{where}: expected a row of metrics in JSON with its step, got {shown(line)}: remove it")
    return row


def load(
    run: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    verify: bool = False,
) -> Flow:
    """The trained flow of a run folder, ready for `log_prob` and `sample`; loading never executes code.

    With `verify` its file must be the one that training wrote, by its SHA-256 in environment.json.
    """
    if verify:
        RunFolder(run).verify()
    return load_with_recipe(run, dtype=dtype, device=device)[0]


def load_with_recipe(
    run: str | Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[Flow, Recipe, dict[str, Any]]:
    """The trained flow of a run folder, its recipe, and the figures it was chosen by."""
    tensors, recipe, figures = RunFolder(run).read_model()
    return restore_flow(recipe, tensors, str(run)).to(device=device, dtype=dtype).eval(), recipe, figures


def restore_flow(recipe: Recipe, tensors: Mapping[str, Tensor], source: str) -> Flow:
    """The flow of a recipe with these weights, in float64: fitted constants were stored in it."""
    _require_weights(recipe, tensors, source)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whoever trained it was warned then
            flow = build(recipe).double()
            flow.load_state_dict(dict(tensors))
    except (RuntimeError, ValueError) as error:
        reason = brief(str(error).strip().rpartition("\n")[2])
        raise NicestError(f"{source}: the weights do not fit the recipe ({reason})") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.float64):
            raise NicestError(f"{source}: expected weights of float32 or float64, got {shown(name)} of {tensor.dtype}")
    return flow


def _require_weights(recipe: Recipe, tensors: Mapping[str, Tensor], source: str) -> None:
    """Refuse weights that are far too few for the recipe, before a flow of its size is built."""
    dim, model = recipe.data.dim, recipe.model
    if not recipe.data.shape:
        raise NicestError(f"{source}: expected a recipe with the shape of its data, got {recipe.data.shape}")
    half, width, depths = dim // 2, model.width, model.hidden_layers
    times = model.couplings if len(depths) == 1 else 1
    layers = times * sum(depth + 1 for depth in depths)
    needed = times * sum(2 * half * width + (depth - 1) * width**2 if depth else half**2 for depth in depths)
    needed += dim + (dim**2 if model.preprocess in ("zca", "triangular") else 0)
    found = sum(tensor.numel() for tensor in tensors.values())
    if needed > found + SLACK or layers > len(tensors) + SLACK // 1000:
        raise NicestError(
            f"{source}: the weights do not fit the recipe: at least {needed} in {layers} layers, got {found}"
        )


def require_own_file(out: Path, recipe: Recipe, *asked: Path) -> None:
    """Refuse to write a result over what was asked about, or over the data that a run was trained on."""
    trained = Path(recipe.data.name)
    for other in (*asked, trained):
        if out.is_file() and other.is_file() and out.samefile(other):
            what = "on which the run was trained" if other is trained else "which was asked about"
            raise NicestError(f"expected a file of its own for the result, got {out}, {what}")
