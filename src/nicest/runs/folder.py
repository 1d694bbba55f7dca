"""The run folder: recipe, weights, state and metrics on disk, written atomically; no pickle anywhere."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nicest.data.images import IMAGE_SUFFIXES
from nicest.errors import NicestError, Resumable
from nicest.files import flush, lock, replacing, write_text, writing
from nicest.messages import brief, listed, shown
from nicest.recipes import Recipe, parse
from nicest.recipes.build import build
from nicest.recipes.recipe import DataSettings
from nicest.remote import place
from nicest.runs.digests import ENVIRONMENT, begins_as_written, expect, read_environment, settle, verify
from nicest.runs.formats import FORMAT, NAMES_OF_TODAY, convert, refuse_table, upgraded
from nicest.runs.paths import recorded
from nicest.runs.sinks import Memory, Saved

if TYPE_CHECKING:
    from nicest.data.columns import Schema

MODEL, LAST = "model.safetensors", "last.safetensors"
RECIPE, COLUMNS, METRICS = "recipe.toml", "columns.json", "metrics.jsonl"
UNKNOWN = ("unknown key", "is one of")  # parts of the errors of recipes with unknown settings or values


def write_tensors(path: Path, saved: Saved, *appended: Path) -> None:
    """Write tensors as safetensors, with the format version, the recipe and metrics as metadata.

    The digests of `appended` files of the folder, which only grow, are recorded in the same step.
    """
    tensors, recipe, figures, _ = saved
    kept = kept_recipe(recipe, path.parent)
    metadata = {"format": f"nicest {FORMAT}", "recipe": kept.to_toml(), "figures": json.dumps(figures)}
    with replacing(path) as temporary:
        temporary.touch()  # the usual mode of a new file: safetensors would let its owner alone read it
        mode = temporary.stat().st_mode
        try:
            save_file(_apart(tensors), temporary, metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        temporary.chmod(mode)
        expect(path, temporary, *appended)
    settle(path, *appended)


def kept_recipe(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe as a run folder keeps it: without the parts of the data's path that are private."""
    return recorded(recipe, folder, private=bool(read_environment(folder).get("private")))


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, each into its own memory: layers may share theirs."""
    found: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        each = tensor.detach().contiguous().cpu()
        found[name] = each.clone() if each.data_ptr() in taken else each
        taken.add(each.data_ptr())
    return found


def read_tensors(path: Path) -> Saved:
    """Read what `write_tensors` wrote; nothing in the file is executed."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            version = check_format(path, metadata.get("format", ""))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except NicestError:
        raise
    except Exception as error:  # broken bytes lead safetensors and torch to errors of every kind
        raise NicestError(
            f"{path} is truncated or damaged: restore a copy of it, or train again ({brief(error)})"
        ) from error
    if not {"recipe", "figures"} <= metadata.keys():
        raise NicestError(f"{path} lacks the recipe or the figures that nicest writes beside the weights")
    refuse_table(metadata["recipe"], version, path)
    try:
        recipe = parse(metadata["recipe"], str(path)).located(path.parent)
    except NicestError as error:
        if any(word in str(error) for word in UNKNOWN):
            raise newer(str(error)) from error
        raise
    tensors = {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in tensors.items()}  # some are packed
    if version == 1:
        tensors = upgraded(tensors)
    return Saved(tensors, recipe, _figures(metadata["figures"], path), version)


def _figures(text: str, path: Path) -> dict[str, Any]:
    """Parse the metrics stored in the metadata of a file."""
    try:
        figures = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NicestError(f"{path}: expected figures in JSON, got {shown(text)}: restore a copy of it") from error
    if not isinstance(figures, dict) or any(isinstance(each, list | dict) for each in figures.values()):
        raise NicestError(f"{path}: expected a table of figures, got {shown(text)}: restore a copy of it")
    return figures


def check_format(path: Path, found: str) -> int:
    """Return the version of a file's format; raise a NicestError if it cannot be read."""
    name, _, version = found.partition(" ")
    if name != "nicest" or not (version.isascii() and version.isdigit() and len(version) < 10):
        raise NicestError(
            f"{path} was not written by nicest: expected a format such as 'nicest {FORMAT}', got {shown(found)}"
        )
    if int(version) > FORMAT:
        raise NicestError(
            f"{path}: written by a newer nicest (format {version}; this one reads up to {FORMAT}); upgrade nicest"
        )
    return int(version)


def newer(found: str) -> NicestError:
    """Return the error for a file with settings or counters that are not known."""
    return NicestError(f"{found}: written by a newer nicest (this one reads up to format {FORMAT}); upgrade nicest")


class RunFolder:
    """One training run on disk.

    Files must have the SHA-256 that was recorded when they were written. With `verify` True one must be recorded; with
    False nothing is checked.
    """

    handles_signals = True  # a training that can be resumed stops cleanly

    def __init__(self, path: str | Path, *, verify: bool | None = None) -> None:
        self.asked, self.checks = Path(path), verify
        self.model = self.asked if self.asked.suffix == ".safetensors" else self.asked / MODEL  # it stands alone, too
        self.path = self.model.parent

    def __str__(self) -> str:
        return str(self.path)

    @contextmanager
    def open_for_writing(self) -> Iterator[None]:
        """Make the folder if needed and hold its lock, so that one process writes at a time."""
        if self.model != self.path / MODEL:
            raise NicestError(f"expected a folder to train in, got the name of a file, {self.asked}")
        with writing(f"in {self.path}", "; choose another folder"):
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / ".lock").open("w")
        with file:
            try:
                lock(file)
            except OSError as error:
                raise NicestError(
                    f"{self.path} is being written by another process; wait, or choose another folder"
                ) from error
            for pattern in (".*.[0-9]*.tmp", ".tmp??????"):  # ours, and those of safetensors
                for left_over in self.path.glob(pattern):
                    left_over.unlink(missing_ok=True)  # of a process that was killed while it wrote
            yield

    def refuse_existing(self) -> None:
        """Raise a NicestError if the folder holds a run: it is never overwritten."""
        if (self.path / LAST).exists() or (self.path / MODEL).exists():
            raise NicestError(f"{self.path} holds a run already: resume it, or choose another folder")

    def begin(self, recipe: Recipe, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            write_text(self.path / name, text)
        write_text(self.path / RECIPE, kept_recipe(recipe, self.path).to_toml())

    def read_state(self) -> Saved | None:
        return self._read(self.path / LAST) if (self.path / LAST).exists() else None

    def save_state(self, saved: Saved) -> None:
        metrics = [path for path in (self.path / METRICS,) if path.exists()]
        for path in metrics:  # on the disk before a state that counts on it: a power cut keeps no order
            with writing(path):
                flush(path)
        write_tensors(self.path / LAST, saved, *metrics)

    def forget_state(self) -> None:
        (self.path / LAST).unlink(missing_ok=True)

    def save_model(self, saved: Saved) -> None:
        write_tensors(self.path / MODEL, saved)

    def read_model(self) -> Saved:
        if not self.model.is_file():
            raise self._absent()
        return self._read(self.model)

    def _read(self, path: Path) -> Saved:
        saved = read_tensors(path)
        if self.checks is not False:
            verify(path, strict=bool(self.checks))
        return saved

    def schema(self) -> Schema | None:
        """Read the columns of the table that the model is of; None for other data."""
        path = self.path / COLUMNS
        if not path.is_file():
            return None
        from nicest.data.columns import Schema

        self._require_format()
        try:
            return Schema.from_json(json.loads(path.read_bytes()), str(path))
        except (OSError, ValueError, RecursionError) as error:
            raise NicestError(
                f"{path} cannot be read: restore a copy of it, or train again ({brief(error)})"
            ) from error

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        with writing(self.path / METRICS), (self.path / METRICS).open("a") as file:
            file.write(json.dumps(dict(row)) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Parse metrics.jsonl: one row for each validation; a last line that was cut off is ignored."""
        return [row for row, _ in self._metrics()]

    def _metrics(self) -> list[tuple[dict[str, Any], bytes]]:
        """Return the rows of metrics.jsonl, each with its line."""
        path, found = self.path / METRICS, []
        self._require_format()
        try:
            lines = path.read_bytes().splitlines() if path.exists() else []
        except OSError as error:
            raise NicestError(f"cannot read {path}: {error.strerror}") from error
        for i, line in enumerate(lines, start=1):
            if not line.endswith(b"}"):
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                expected = f"expected a row of metrics in JSON with its step, got {shown(line)}: remove it"
                raise NicestError(f"{path}, line {i}: {expected}")
            found.append((row, line + b"\n"))
        return found

    def drop_metrics_after(self, step: int) -> None:
        """Remove the metrics after the step that training continues from; refuse earlier ones that were changed."""
        path, rows = self.path / METRICS, self._metrics()
        if not path.exists():
            return
        if self.checks is not False and not begins_as_written(path, [line for _, line in rows]):
            raise NicestError(f"{path} has changed since it was written: restore a copy of it, or delete it")
        content = b"".join(line for row, line in rows if row["step"] <= step)
        if content != path.read_bytes():
            with replacing(path) as temporary:
                temporary.write_bytes(content)
                expect(path, temporary)

    def _require_format(self) -> None:
        """Refuse JSON files of a newer nicest: environment.json has the format of them all."""
        if found := read_environment(self.path).get("format"):
            check_format(self.path / ENVIRONMENT, str(found))

    def lost_model(self) -> bool:
        """Return True if the state says that there was a model, and it is no longer there."""
        try:
            with safe_open(self.path / LAST, framework="pt") as file:
                best = json.loads((file.metadata() or {})["figures"])["best_nats"]
        except Exception:  # there is no state, or it is damaged
            return False
        return isinstance(best, float) and best > -math.inf and not self.model.is_file()

    def _absent(self) -> NicestError:
        if (self.path / LAST).exists():
            said = f"{self.path} has no model yet, training stopped before its first validation: resume it"
            if self.lost_model():
                said = f"{self.model} is missing: to write the model again, resume the training"
            with suppress(OSError, NicestError):
                if not parse((self.path / RECIPE).read_text(errors="replace"), RECIPE).own_flow:
                    return Resumable(said, self.path)
            return NicestError(said)
        there = "is no run folder" if self.asked.exists() else "does not exist"
        return NicestError(
            f"expected a run folder with {MODEL}, but {self.asked} {there}: train one with `nicest train`"
        )


Sink = RunFolder | Memory  # where a training leaves its metrics, its state and its best model


def restore_flow(
    recipe: Recipe, tensors: Mapping[str, Tensor], source: str, version: int = FORMAT, schema: Schema | None = None
) -> Any:
    """Build the model of a recipe with stored weights, in float64: fitted constants were stored in it."""
    _require_weights(recipe, tensors, source, version, schema)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever trained it was warned then
        return filled(build(recipe, schema).double(), tensors, source, version, recipe.data)


def filled(
    flow: Any, tensors: Mapping[str, Tensor], source: str, version: int = FORMAT, data: DataSettings | None = None
) -> Any:
    """Load stored weights, of any version of the format, into a model; `data` are the settings of an older run."""
    own = flow.state_dict()
    tensors = convert(tensors, flow, data or DataSettings()) if version < NAMES_OF_TODAY else tensors
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.float64) and (name not in own or tensor.dtype != own[name].dtype):
            raise NicestError(f"{source}: expected weights of float32 or float64, got {shown(name)} of {tensor.dtype}")
    try:
        flow.load_state_dict(dict(tensors))
    except RuntimeError as error:
        reason = _difference(own, tensors) or brief(str(error).strip().rpartition("\n")[2])
        raise NicestError(f"{source}: the weights do not fit the flow: {reason}") from error
    return flow


def _difference(own: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> str:
    """Describe how the tensors of a model differ from stored ones."""
    if absent := sorted(own.keys() - stored.keys()):
        return f"the file lacks {listed(absent)}"
    if left := sorted(stored.keys() - own.keys()):
        return f"the flow lacks {listed(left)}"
    for name, tensor in own.items():
        if tensor.shape != stored[name].shape:
            return f"{shown(name)} is {tuple(tensor.shape)} in the flow and {tuple(stored[name].shape)} in the file"
    return ""


def _require_weights(
    recipe: Recipe, tensors: Mapping[str, Tensor], source: str, version: int, schema: Schema | None
) -> None:
    """Refuse weights of other shapes than the recipe's, before a model of its size is built."""
    if recipe.own_flow:
        raise NicestError(f"{source} holds a density built by hand: build it again, then nicest.open(path, flow=it)")
    dim, model = recipe.data.dim, recipe.model
    if not recipe.data.shape:
        raise NicestError(f"{source}: expected a recipe with the shape of its data, got {recipe.data.shape}")
    if schema is not None and len(schema) != dim:
        raise NicestError(f"{source}: {COLUMNS} is not of this model: restore a copy of it, or train again")
    total, n_layers = sum(tensor.numel() for tensor in tensors.values()), 0 if schema else model.n_layers
    if dim > total or n_layers > len(tensors):  # else even a sketch of the model might not fit in memory
        raise NicestError(f"{source}: the weights do not fit the recipe: {total} numbers in {len(tensors)} tensors")
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            sketch = build(recipe, schema)
    except ValueError as error:
        raise NicestError(f"{source}: no model can be built from its recipe ({brief(error)})") from error
    stored = convert(tensors, sketch, recipe.data) if version < NAMES_OF_TODAY else tensors
    if reason := _difference(sketch.state_dict(), stored):
        raise NicestError(f"{source}: the weights do not fit the recipe: {reason}")


def require_own_file(out: Path, recipe: Recipe, *asked: Path) -> None:
    """Refuse to write a result over what was asked about, or over the data that a run was trained on."""
    trained = place(recipe.data.name)
    for other in (*asked, trained):
        if type(out) is type(other) and out.is_file() and other.is_file() and out.samefile(other):
            what = "on which the run was trained" if other is trained else "which was asked about"
            raise NicestError(f"expected a separate file for the result, got {out}, {what}")
        if not (other.is_dir() and (other.is_absolute() or other is not trained)):  # else it may be a data set's name
            continue
        if out.suffix.lower() in IMAGE_SUFFIXES and other.resolve() in out.resolve().parents:
            raise NicestError(f"expected a picture outside the images that are read, in {other}, got {out}")
