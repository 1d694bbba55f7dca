"""Compress files of images and tables with a trained model, and decompress them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nicest.codec import tables
from nicest.codec.codec import Codec
from nicest.codec.container import CompressedFile, write_blocks, write_rows
from nicest.data.reading import read_bytes
from nicest.data.tables import SUFFIXES, is_table
from nicest.errors import NicestError
from nicest.files import replacing
from nicest.flows import Flow
from nicest.inference.workers import mapped, workers_for
from nicest.messages import listed, shown
from nicest.progress import Bar
from nicest.runs.folder import require_own_file
from nicest.runs.run import Run
from nicest.runs.shipped import fetched, shipped
from nicest.tasks.score import model_rows


def compress_files(
    run: Run, files: Sequence[str | Path], *, out: str | Path = "packed.nicest", jobs: int = 1
) -> dict[str, Any]:
    """Compress images or a table into one file, without loss.

    Every block is decoded and compared before it is written. The model is not in the file, only its SHA-256.

    Parameters
    ----------
    run : Run
        A model without labels.
    files : sequence of paths
        Arrays, idx files and folders of images, or one table.
    out : path
        The compressed file.
    jobs : int
        Worker processes, 0 for one per core. The file does not depend on it.

    Returns
    -------
    dict
        Metrics: rows, sizes in bytes, bits per dimension or bytes per row.

    Raises
    ------
    NicestError
        If the model cannot compress, or the files do not fit it.
    """
    paths, out = [Path(file) for file in files], Path(out)
    if run.recipe.data.classes:
        raise NicestError(f"{run.path} is a model given labels, which cannot compress: train one without labels")
    require_own_file(out, run.recipe, *paths)
    result = (_compress_table if run.columns else _compress_images)(run, paths, out, jobs)
    size = out.stat().st_size
    return {"out": str(out), "bytes": size, **result, "model_bytes": run.folder.model.stat().st_size}


def _compress_images(run: Run, paths: Sequence[Path], out: Path, jobs: int) -> dict[str, Any]:
    codec = Codec(_exact_flow(run))
    # images are compressed as they are: cropped or resized, they would not come back
    recipe = replace(run.recipe, data=replace(run.recipe.data, crop=(), resize=()))
    parts = [model_rows(path, recipe) for path in paths]
    rows = np.concatenate(parts)
    files = [{"name": path.name, "rows": len(part)} for path, part in zip(paths, parts, strict=True)]
    header = {"run": _name(run), "files": files}
    with replacing(out) as temporary, temporary.open("wb") as file, Bar("compressing", len(rows)) as bar:
        write_rows(file, codec, rows, shape=recipe.data.shape, header=header, progress=bar.update, jobs=jobs)
    bits = 8 * out.stat().st_size / rows.size
    return {"rows": len(rows), "raw_bytes": rows.nbytes, "bits_per_dim": bits, "model": codec.digest}


def _compress_table(run: Run, paths: Sequence[Path], out: Path, jobs: int) -> dict[str, Any]:
    if len(paths) != 1 or not is_table(paths[0]):
        found = listed([path.name for path in paths])
        raise NicestError(f"the model is of a table: expected one file ({', '.join(SUFFIXES)}), got {found}")
    format, rows, values, store = tables.read_table(paths[0], run.columns)
    codec, count, size = tables.TableCodec(_exact_flow(run), run.columns, format), len(values), tables.BLOCK
    parts = [np.arange(first, min(first + size, count)) for first in range(0, count, size)]
    inputs = ((format.take(rows, part), values[part], store[part]) for part in parts)
    blocks = mapped(tables.TableCodec.encode, codec, inputs, workers_for(jobs, len(parts), codec.device))
    header = {
        "run": _name(run),
        "files": [{"name": paths[0].name, "rows": count}],
        "table": tables.format_header(format, paths[0].suffix.lower()),
        "model": codec.digest,
        "shape": [len(format.columns)],
        "rows": count,
        "block": size,
    }
    raw_bytes, stored = paths[0].stat().st_size, int(store.sum())
    with replacing(out) as temporary, temporary.open("wb") as file, Bar("compressing", count) as bar:
        write_blocks(file, header, blocks, bar.update)
    each = out.stat().st_size / count if count else None
    return {"rows": count, "raw_bytes": raw_bytes, "bytes_per_row": each, "stored_rows": stored, "model": codec.digest}


def decompress_file(
    path: str | Path, *, out: str | Path, run: Run | str | Path | None = None, device: str = "cpu", jobs: int = 1
) -> dict[str, Any]:
    """Decompress a file of `compress_files`.

    Rows of damaged blocks are left out, and named in the result.

    Parameters
    ----------
    path : path
        The compressed file.
    out : path
        Where to write images, as an array (.npy), or the table, in its own format.
    run : Run or path, optional
        The model that compressed the file; by default the one that the file names.
    device : str
        Device of the model. A CPU decodes what a GPU encoded, and the reverse.
    jobs : int
        Worker processes, 0 for one per core.

    Returns
    -------
    dict
        Numbers of rows and of lost rows, the names of the files, and the damage if there is any.

    Raises
    ------
    NicestError
        If the file cannot be read, or the model did not compress it.
    """
    path, out = Path(path), Path(out)
    packed = CompressedFile(read_bytes(path), source=str(path))
    table = packed.header.get("table")
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
        format = tables.restore_format(table, model.columns)
        codec: Any = tables.TableCodec(_exact_flow(model), model.columns, format)
    else:
        codec = Codec(_exact_flow(model))
    parts = []
    with Bar("decompressing", packed.rows) as bar:
        for k, rows in enumerate(packed.blocks(codec, jobs)):
            parts += [] if rows is None else [rows]
            bar.update(k * packed.block + packed.row_count(k))
    if packed.table and not parts:
        raise NicestError(f"{path}: {packed.damage()}: get the file again")
    if table:
        format.write(out, format.concat(parts))
    else:
        with replacing(out) as temporary, temporary.open("wb") as file:
            np.save(file, packed.joined(codec, parts))
    lost = sum(map(packed.row_count, packed.lost))
    result = {"out": str(out), "rows": packed.rows - lost, "lost_rows": lost, "files": packed.header.get("files")}
    return result | ({"failed": packed.damage(), "lost_blocks": packed.lost} if packed.lost else {})


def _exact_flow(run: Run) -> Flow:
    """Return the flow with the stored weights, which are the same on every machine, in float64."""
    return run.flow if run.dtype == torch.float64 else run.flow_in(torch.float64)


def _model(packed: CompressedFile, path: Path, run: str | Path | None) -> str | Path:
    """Return the run that compressed a file: the one given, or the one that the file names."""
    named = run or packed.header.get("run")
    if not isinstance(named, str | Path):
        raise NicestError(f"{path} does not say which model compressed it: name it by --run")
    if run is None and named not in shipped() and not os.path.exists(named):  # noqa: PTH110 - accepts any text
        raise NicestError(f"{path} was compressed by {shown(named)}, which is not here: name the model by --run")
    return named


def _name(run: Run) -> str:
    """Return the name of the run for the header: that of a shipped model, or the path as typed, if relative."""
    asked = run.folder.asked
    own = asked.name in shipped() and fetched(asked.name) == asked
    return asked.name if own or asked.is_absolute() else str(asked)
