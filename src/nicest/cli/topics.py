"""The grouped commands: latent, reproduce, data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nicest.cli import options, show
from nicest.cli.base import Result, command, data_app, latent_app, reproduce_app
from nicest.errors import NicestError


@command(latent_app, lambda result: print(f"spectrum in {result['out']}"))
def spectrum(
    run: Any,
    label: options.Label = None,
    pca: Annotated[bool, typer.Option(help="Show the spectrum of a PCA of the training data, too.")] = True,
    data: options.Moved = None,
    out: Annotated[Path | None, options.figure("spectrum")] = None,
    device: options.Device = "cpu",
) -> Result:
    """Plot the sorted sigma_d of the scaling layer: how much each component varies.

    Example: nicest latent spectrum runs/demo
    """
    from nicest.tasks.latent import spectrum as run_spectrum

    return run_spectrum(run, pca=pca, out=out)


@command(latent_app, lambda result: print(f"sphere of radius {result['radius']:.2f} in {result['out']}"))
def sphere(
    run: Any,
    label: options.Label = None,
    basis: Annotated[
        options.Basis, typer.Option(help="Random axes, or the three components with the largest sigma_d.")
    ] = "random",
    radius: Annotated[
        float | None, options.real(0, 1_000_000, "In units of the prior.", show_default="the typical norm of a draw")
    ] = None,
    grid: Annotated[int, options.integer(1, 200, "Images per side.")] = 10,
    seed: options.Seed = 0,
    out: Annotated[Path | None, options.figure("sphere")] = None,
) -> Result:
    """Decode a sphere in three dimensions of latent space.

    Example: nicest latent sphere runs/demo --basis top
    """
    from nicest.tasks.latent import sphere as run_sphere

    return run_sphere(run, basis=basis, radius=radius, grid=grid, seed=seed, out=out)


@command(latent_app, lambda result: print(f"{len(result['pairs'])} interpolations in {result['out']}"))
def interpolate(
    run: Any,
    label: options.Label = None,
    start: Annotated[
        list[int] | None,
        options.integer(
            0, 10**9, "The index of the first image in the split; repeatable.", "--from", show_default="0, 2, 4, 6, 8"
        ),
    ] = None,
    end: Annotated[
        list[int] | None,
        options.integer(
            0, 10**9, "The index of the last image; one for each --from.", "--to", show_default="1, 3, 5, 7, 9"
        ),
    ] = None,
    steps: Annotated[int, options.integer(2, 1000, "Images per interpolation, both ends included.")] = 10,
    way: Annotated[
        options.Way, typer.Option(help="Along a straight line, or along an arc around the mode of the prior.")
    ] = "straight",
    split: options.Split = "test",
    data: options.Moved = None,
    out: Annotated[Path | None, options.figure("interpolate")] = None,
) -> Result:
    """Interpolate between images in latent space, and in pixel space for comparison.

    Example: nicest latent interpolate runs/demo --from 3 --to 8 --from 4 --to 5
    """
    from nicest.tasks.latent import interpolate as run_interpolation

    if len(start or []) != len(end or []):
        raise NicestError(f"expected as many --to as --from, got {len(end or [])} and {len(start or [])}")
    pairs = list(zip(start or [], end or [], strict=True)) or None
    return run_interpolation(run, pairs=pairs, steps=steps, way=way, split=split, out=out)


@command(latent_app, show.truncation)
def truncate(
    run: Any,
    label: options.Label = None,
    n: Annotated[int, options.integer(1, 1000, "Images in the figure.", "-n")] = 8,
    keep: Annotated[
        list[int] | None,
        options.integer(
            0, 10**9, "How many components to keep; repeatable.", show_default="0, 1, 2, 5, 10, ... 200, all"
        ),
    ] = None,
    split: options.Split = "test",
    data: options.Moved = None,
    out: Annotated[Path | None, options.figure("truncate")] = None,
) -> Result:
    """Reconstruct images from the components with the largest sigma_d, next to a PCA.

    Example: nicest latent truncate runs/demo -n 8
    """
    from nicest.tasks.latent import truncate as run_truncation

    return run_truncation(run, n=n, kept=keep, split=split, out=out)


@command(reproduce_app, show.results, "table")
def reproduce_table(
    recipe: Annotated[
        list[str] | None, typer.Option(help="A row of the table; repeatable.", show_default="all")
    ] = None,
    seeds: Annotated[int, options.integer(0, 100, "Seeds per row; 0 for the number planned for each row.")] = 0,
    runs: options.Runs = Path("runs/reproduce"),
    overrides: options.Set = None,
    out: Annotated[Path, options.out_file("The results, as JSON.")] = Path("results/table.json"),
    page: Annotated[Path | None, options.out_file("The results as a Markdown page.")] = None,
    device: options.Device = "auto",
) -> Result:
    """Train and evaluate the rows of the paper's tables: as in its text, as in the released code, and our own recipes.

    Finished rows are kept, interrupted ones resume, and rows without data are listed.

    Example: nicest reproduce table --recipe mnist-best --page docs/results.md
    """
    from nicest.runs.runtime import choose_device
    from nicest.tasks.reproduce import table

    choose_device(device)  # otherwise every row would fail
    asked: dict[str, Any] = {"seeds": seeds, "runs": runs, "out": out, "page": page, "device": device}
    return table(recipe or [], overrides=tuple(overrides or ()), **asked)


@command(reproduce_app, show.figures, "figures")
def reproduce_figures(
    recipe: Annotated[
        list[str] | None, typer.Option(help="A recipe; repeatable.", show_default="our own recipes")
    ] = None,
    runs: options.Runs = Path("runs/reproduce"),
    overrides: options.Set = None,
    out: Annotated[Path, options.out_folder("The folder for the figures.")] = Path("results/figures"),
    device: options.Device = "auto",
) -> Result:
    """Draw the figures of the paper (samples, inpainting, spheres, spectra), interpolations, truncations, curves.

    Example: nicest reproduce figures --recipe digits
    """
    from nicest.tasks.reproduce import figures

    return figures(recipe or [], overrides=tuple(overrides or ()), runs=runs, out=out, device=device)


@command(data_app, show.sets, "list")
def data_list() -> Result:
    """List the data sets and whether each is here."""
    from nicest.data.download import list_sets

    return {"sets": [row._asdict() for row in list_sets()]}


@command(data_app, lambda result: print(f"{result['name']} in {result['folder']}"), "get")
def data_get(name: options.DataSet) -> Result:
    """Download a data set and verify its checksums.

    Example: nicest data get mnist
    """
    from nicest.data.download import get

    return {"name": name, "folder": str(get(name))}


@command(data_app, show.check, "check", lambda result: int(not all(each["good"] for each in result["files"])))
def data_check(name: options.DataSet) -> Result:
    """Verify the checksums of a data set."""
    from nicest.data.download import GOOD, check

    files = [{"file": file, "status": status, "good": status in GOOD} for file, status in check(name)]
    return {"name": name, "files": files}
