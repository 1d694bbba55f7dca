"""Compress files of images with a trained flow, and decompress them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from nicest.codec.codec import Codec
from nicest.codec.container import CompressedFile, write_rows
from nicest.data.reading import read_bytes
from nicest.errors import NicestError
from nicest.files import replacing
from nicest.flows import Flow
from nicest.messages import shown
from nicest.progress import Bar
from nicest.runs.run import Run
from nicest.runs.shipped import fetched, shipped
from nicest.tasks.options import Device, Jobs, given, option, out_file
from nicest.tasks.results import Result
from nicest.tasks.rows import model_rows, require_flow, require_outputs


@dataclass(frozen=True, kw_only=True)
class Compressed(Result):
    """Sizes in bytes: of the compressed file, of the images, and of the model, which is not in the file."""

    out: str
    bytes: int
    rows: int
    raw_bytes: int
    bits_per_dim: float
    model: str
    model_bytes: int

    def lines(self) -> Iterator[Any]:
        size = f"{self.bytes:,} bytes, {self.bits_per_dim:.3f} bits/dim, from {self.raw_bytes:,} bytes"
        yield f"{self.rows:,} images in {self.out}: {size}"
        yield f"to decompress, keep the model: {self.model_bytes / 1e6:.1f} MB"


@dataclass(frozen=True, kw_only=True)
class Decompressed(Result):
    """Numbers of restored and of lost rows, the names of the files, and the damage if there is any."""

    out: str
    rows: int
    lost_rows: int
    files: Any
    failed: str | None = None
    lost_blocks: list[int] | None = None

    @property
    def exit_code(self) -> int:
        return int(bool(self.failed))

    def lines(self) -> Iterator[Any]:
        yield f"{self.rows:,} rows in {self.out}"
        if self.failed:
            yield f"{self.lost_rows:,} rows are lost: {self.failed}"


def compress(
    run: Run,
    files: Annotated[Sequence[str | Path], given("Arrays, idx files or folders of images.")],
    *,
    out: Annotated[str | Path, out_file("The compressed file.")] = "packed.nicest",
    jobs: Jobs = 0,
) -> Compressed:
    """Compress images without loss. You need the same model to decompress. Needs the extra `codec`.

    Every block is decoded and compared before it is written. The file holds the SHA-256 of the model.

    Example: nicest compress digits-conv images.npy --out packed.nicest
    """
    paths, out = [Path(file) for file in files], Path(out)
    if run.recipe.data.classes:
        raise NicestError(f"{run.path} is a model given labels, which cannot compress: train one without labels")
    require_flow(run, "compression")
    require_outputs(run, out, inputs=paths)
    codec = Codec(_exact_flow(run))
    # images are compressed as they are: cropped or resized, they would not come back
    recipe = replace(run.recipe, data=replace(run.recipe.data, crop=(), resize=()))
    parts = [model_rows(path, recipe) for path in paths]
    rows = np.concatenate(parts)
    names = [{"name": path.name, "rows": len(part)} for path, part in zip(paths, parts, strict=True)]
    asked = run.folder.asked  # the header has the name of a shipped model, or the path as typed if it is relative
    own = asked.name in shipped() and fetched(asked.name) == asked
    header = {"run": asked.name if own or asked.is_absolute() else str(asked), "files": names}
    with replacing(out) as temporary, temporary.open("wb") as file, Bar("compressing", len(rows)) as bar:
        write_rows(file, codec, rows, shape=recipe.data.shape, header=header, progress=bar.update, jobs=jobs)
    size = out.stat().st_size
    return Compressed(
        out=str(out),
        bytes=size,
        rows=len(rows),
        raw_bytes=rows.nbytes,
        bits_per_dim=8 * size / rows.size,
        model=codec.digest,
        model_bytes=run.folder.model.stat().st_size,
    )


def decompress(
    packed: Annotated[str | Path, given("A file of `nicest compress`.")],
    *,
    out: Annotated[str | Path, out_file("The images as an array, .npy.")] = "images.npy",
    run: Annotated[Any, option("--run", help="The run that compressed it.", show_default="as the file says")] = None,
    device: Device = "auto",
    jobs: Jobs = 0,
) -> Decompressed:
    """Decompress a file of `nicest compress`. Rows in damaged blocks are left out, and the rest is written.

    A CPU decodes what a GPU encoded, and the reverse.

    Example: nicest decompress packed.nicest --out images.npy
    """
    path, out = Path(packed), Path(out)
    content = CompressedFile(read_bytes(path), source=str(path))
    if content.header.get("table"):
        raise NicestError(f"{path} holds a table, which nicest no longer compresses: use the version that wrote it")
    if out.suffix.lower() != ".npy":
        raise NicestError(f"{path} holds an array: expected a file to write to that ends in .npy, got {str(out)!r}")
    model = run if isinstance(run, Run) else Run(_model(content, path, run), dtype=torch.float64, device=device)
    require_flow(model, "compression")
    codec, parts = Codec(_exact_flow(model)), []
    with Bar("decompressing", content.rows) as bar:
        for k, rows in enumerate(content.blocks(codec, jobs)):
            parts += [] if rows is None else [rows]
            bar.update(k * content.block + content.row_count(k))
    if content.table and not parts:
        raise NicestError(f"{path}: {content.damage()}: get the file again")
    with replacing(out) as temporary, temporary.open("wb") as file:
        np.save(file, content.joined(codec, parts))
    lost = sum(map(content.row_count, content.lost))
    told: dict[str, Any] = {"failed": content.damage(), "lost_blocks": content.lost} if content.lost else {}
    return Decompressed(
        out=str(out), rows=content.rows - lost, lost_rows=lost, files=content.header.get("files"), **told
    )


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
