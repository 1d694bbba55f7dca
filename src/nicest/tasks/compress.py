"""Files of images and tables, compressed without loss by a trained model, and back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nicest.data.reading import read_bytes
from nicest.data.tables import SUFFIXES, is_table
from nicest.errors import NicestError
from nicest.files import replacing
from nicest.inference.codec import Codec
from nicest.inference.packed import Packed, joined, pack, write
from nicest.inference.workers import mapped, workers_for
from nicest.messages import listed, shown
from nicest.progress import Bar
from nicest.runs.folder import require_own_file
from nicest.runs.run import Run
from nicest.runs.shipped import fetched, shipped
from nicest.tasks import compress_table as tables
from nicest.tasks.score import model_rows


def compress(
    run: Run, files: Sequence[str | Path], *, out: str | Path = "packed.nicest", jobs: int = 1
) -> dict[str, Any]:
    """Write the images of arrays, idx files and folders, or a table, to one file, without loss.

    Every block is decoded and compared before it is kept. The model is not in the file, only its SHA-256. `jobs`
    processes code blocks side by side, 0 for one per core; the file is the same.
    """
    paths, out = [Path(file) for file in files], Path(out)
    if run.recipe.data.classes:
        raise NicestError(f"{run.path} is a model given labels, which cannot compress: train one without labels")
    require_own_file(out, run.recipe, *paths)
    made = _table(run, paths, out, jobs) if run.columns else _images(run, paths, out, jobs)
    size = out.stat().st_size
    return {"out": str(out), "bytes": size, **made, "model_bytes": run.folder.model.stat().st_size}


def _images(run: Run, paths: Sequence[Path], out: Path, jobs: int) -> dict[str, Any]:
    codec = Codec(tables.exact(run))
    # images are taken as they are: cropped or resized, they would not come back
    recipe = replace(run.recipe, data=replace(run.recipe.data, crop=(), resize=()))
    parts = [model_rows(path, recipe) for path in paths]
    rows = np.concatenate(parts)
    says = {
        "run": _name(run),
        "files": [{"name": path.name, "rows": len(part)} for path, part in zip(paths, parts, strict=True)],
    }
    with replacing(out) as temporary, temporary.open("wb") as file, Bar("compressing", len(rows)) as bar:
        pack(codec, rows, file, shape=recipe.data.shape, says=says, done=bar.update, jobs=jobs)
    bits = 8 * out.stat().st_size / rows.size
    return {"rows": len(rows), "raw_bytes": rows.nbytes, "bits_per_dim": bits, "model": codec.digest}


def _table(run: Run, paths: Sequence[Path], out: Path, jobs: int) -> dict[str, Any]:
    if len(paths) != 1 or not is_table(paths[0]):
        found = listed([path.name for path in paths])
        raise NicestError(f"the model is of a table: expected one file ({', '.join(SUFFIXES)}), got {found}")
    form, rows, places, odd = tables.opened(run, paths[0])
    codec, count = tables.TableCodec(run, form), len(places)
    suffix, raw_bytes = paths[0].suffix.lower(), paths[0].stat().st_size

    blocks = [np.arange(first, min(first + tables.BLOCK, count)) for first in range(0, count, tables.BLOCK)]
    inputs = ((form.chosen(rows, some), places[some], odd[some]) for some in blocks)
    encoded = mapped(tables.TableCodec.encode, codec, inputs, workers_for(jobs, len(blocks), codec.device))
    header = {
        "run": _name(run),
        "files": [{"name": paths[0].name, "rows": count}],
        "table": tables.header(form, suffix),
        "model": codec.digest,
        "shape": [len(form.columns)],
        "rows": count,
        "block": tables.BLOCK,
    }
    with replacing(out) as temporary, temporary.open("wb") as file, Bar("compressing", count) as bar:
        write(file, header, encoded, bar.update)
    size = out.stat().st_size
    stored = int(odd.sum())
    each = size / count if count else None
    return {"rows": count, "raw_bytes": raw_bytes, "bytes_per_row": each, "stored_rows": stored, "model": codec.digest}


def decompress(
    path: str | Path, *, out: str | Path, run: Run | str | Path | None = None, device: str = "cpu", jobs: int = 1
) -> dict[str, Any]:
    """Write what a compressed file holds: images as an array, .npy, a table as it was; rows of damaged blocks are left
    out, and named. `run` is the one that compressed it, if not the one that the file names; a GPU may have compressed
    what a CPU decompresses. `jobs` processes decode blocks side by side, 0 for one per core."""
    path, out = Path(path), Path(out)
    packed = Packed(read_bytes(path), source=str(path))
    table = packed.says.get("table")
    suffix = table.get("suffix") if isinstance(table, dict) else ".npy"
    if suffix not in (".npy", *SUFFIXES):
        raise NicestError(f"{path}: expected a table ({', '.join(SUFFIXES)}), its header says {shown(suffix)}")
    if out.suffix.lower() != suffix:
        what = "a table" if table else "an array"
        raise NicestError(f"{path} holds {what}: expected a file to write to that ends in {suffix}, got {str(out)!r}")
    model = run if isinstance(run, Run) else Run(_model(packed, path, run), dtype=torch.float64, device=device)
    if bool(table) != bool(model.columns):
        kinds = ("a table", "images") if table else ("images", "a table")
        raise NicestError(f"{path} holds {kinds[0]}, but {model.path} is a model of {kinds[1]}: name its own by --run")
    if table:
        form = tables.restored(table, model.columns)
        packed.open(tables.TableCodec(model, form))
    else:
        codec = Codec(tables.exact(model))
        packed.open(codec)
    with Bar("decompressing", packed.count) as bar:
        parts = []
        for block in packed.blocks(jobs):
            parts += [] if block.rows is None else [block.rows]
            bar.update(min(block.first + packed.size, packed.count))
    if packed.table and not parts:
        raise NicestError(f"{path}: {packed.missing()}: get the file again")
    if table:
        form.write(out, form.joined(parts))
    else:
        with replacing(out) as temporary, temporary.open("wb") as file:
            np.save(file, joined(packed, codec, parts))
    lost = sum(min(packed.size, packed.count - first) for _, first in packed.lost)
    result = {"out": str(out), "rows": packed.count - lost, "lost_rows": lost, "files": packed.says.get("files")}
    if packed.lost:
        result |= {"failed": packed.missing(), "lost_blocks": [k for k, _ in packed.lost]}
    return result


def _model(packed: Packed, path: Path, run: str | Path | None) -> str | Path:
    """The run that compressed a file: the one asked for, or the one that the file names."""
    named = run or packed.says.get("run")
    if not isinstance(named, str | Path):
        raise NicestError(f"{path} does not say which model compressed it: name it by --run")
    if run is None and named not in shipped() and not os.path.exists(named):  # noqa: PTH110 - of any text at all
        raise NicestError(f"{path} was compressed by {shown(named)}, which is not here: name the model by --run")
    return named


def _name(run: Run) -> str:
    """What the run is called in the file: the name of a model that comes with nicest, or a path that tells no more of
    this machine than was typed."""
    asked = run.folder.asked
    own = asked.name in shipped() and fetched(asked.name) == asked
    return asked.name if own or asked.is_absolute() else str(asked)
