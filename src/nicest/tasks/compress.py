"""Files of images, compressed without loss by a trained model, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nicest.data.reading import read_bytes
from nicest.errors import NicestError
from nicest.files import replacing
from nicest.flows import Flow
from nicest.inference.codec import Codec
from nicest.inference.packed import Packed, joined, pack
from nicest.messages import shown
from nicest.progress import Bar
from nicest.runs.folder import require_own_file
from nicest.runs.run import Run
from nicest.runs.shipped import fetched, shipped
from nicest.tasks.score import model_rows


def compress(run: Run, files: Sequence[str | Path], *, out: str | Path = "packed.nicest") -> dict[str, Any]:
    """Write the images of arrays, idx files and folders to one file, without loss.

    Every block is decoded and compared before it is kept. The model is not in the file, only its SHA-256.
    """
    codec, paths, out = Codec(exact(run)), [Path(file) for file in files], Path(out)
    require_own_file(out, run.recipe, *paths)
    # images are taken as they are: cropped or resized, they would not come back
    recipe = replace(run.recipe, data=replace(run.recipe.data, crop=(), resize=()))
    parts = [model_rows(path, recipe) for path in paths]
    rows = np.concatenate(parts)
    says = {
        "run": _name(run),
        "files": [{"name": path.name, "rows": len(part)} for path, part in zip(paths, parts, strict=True)],
    }
    with replacing(out) as temporary, temporary.open("wb") as file, Bar("compressing", len(rows)) as bar:
        pack(codec, rows, file, shape=recipe.data.shape, says=says, done=bar.update)
    size = out.stat().st_size
    return {
        "out": str(out),
        "rows": len(rows),
        "bytes": size,
        "raw_bytes": rows.nbytes,
        "bits_per_dim": 8 * size / rows.size,
        "model": codec.digest,
        "model_bytes": run.folder.model.stat().st_size,
    }


def decompress(path: str | Path, *, out: str | Path, run: str | Path | None = None) -> dict[str, Any]:
    """Write the images of a compressed file as an array, .npy; those of damaged blocks are left out, and named."""
    path, out = Path(path), Path(out)
    if out.suffix != ".npy":
        raise NicestError(f"expected an array to write to, .npy, got {str(out)!r}")
    packed = Packed(read_bytes(path), source=str(path))
    named = run or packed.says.get("run")
    if not isinstance(named, str | Path):
        raise NicestError(f"{path} does not say which model compressed it: name it by --run")
    if run is None and not Path(named).exists() and named not in shipped():
        raise NicestError(f"{path} was compressed by {shown(named)}, which is not here: name the model by --run")
    codec = Codec(exact(Run(named, dtype=torch.float64)))
    packed.open(codec)
    with Bar("decompressing", packed.count) as bar:
        parts = []
        for block in packed.blocks():
            parts += [] if block.rows is None else [block.rows]
            bar.update(min(block.first + packed.size, packed.count))
    if packed.table and not parts:
        raise NicestError(f"{path}: {packed.missing()}: get the file again")
    kept = joined(packed, codec, parts)
    with replacing(out) as temporary, temporary.open("wb") as file:
        np.save(file, kept)
    result = {"out": str(out), "rows": len(kept), "lost_rows": packed.count - len(kept), "files": packed.says["files"]}
    if packed.lost:
        result |= {"failed": packed.missing(), "lost_blocks": [k for k, _ in packed.lost]}
    return result


def exact(run: Run) -> Flow:
    """The flow of a run from the numbers that were stored, which are the same on every machine."""
    return run.flow_in(torch.float64)


def _name(run: Run) -> str:
    """What the run is called in the file: the name of a model that comes with nicest, or a path that tells no more of
    this machine than was typed."""
    asked = run.folder.asked
    own = asked.name in shipped() and fetched(asked.name) == asked
    return asked.name if own or asked.is_absolute() else str(asked)
