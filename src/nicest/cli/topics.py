"""Grouped commands (latent, compare, reproduce, data) and the benchmark."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nicest.cli import options, show
from nicest.cli.base import Result, app, command, compare_app, data_app, latent_app, reproduce_app
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


@command(app, lambda result: show.study(result) if "trainings" in result else show.bench(result))
def bench(
    net: Annotated[
        list[str] | None, typer.Option(help="mnist (default), cifar10, small, spline or glow; repeatable.")
    ] = None,
    batch: Annotated[
        list[int] | None, options.integer(1, 100_000, "Batch size; repeatable.", show_default="200")
    ] = None,
    windows: Annotated[int, options.integer(1, 1000, "Number of time windows; the median is reported.")] = 5,
    seconds: Annotated[float, options.real(0, 60, "Length of a window in seconds.")] = 0.3,
    study: Annotated[bool, typer.Option("--study", help="Measure how cost grows with each size instead.")] = False,
    out: Annotated[Path | None, options.out_file("A figure of the results.")] = None,
    device: options.Device = "auto",
) -> Result:
    """Benchmark nicest against installed flow libraries and a hardware lower bound.

    Example: nicest bench --net mnist --batch 200 --batch 2048
    """
    from nicest.studies.bench import bench as run_bench
    from nicest.studies.cost import study as run_study

    asked: dict[str, Any] = {"windows": windows, "seconds": seconds, "device": device, "out": out}
    if study:
        return run_study(**asked, small=net == ["small"])
    return run_bench(net or ["mnist"], batch or [200], **asked)


@command(compare_app, show.comparison, "density")
def compare_density(
    tables: options.Tables = None,
    data: options.Folder = None,
    method: options.Methods = None,
    seeds: options.Splittings = 2,
    jobs: options.Jobs = 0,
    out: options.Record = None,
) -> Result:
    """Compare the log-density of held-out rows: NICE, a mixture, kernels, and zuko's NSF and MAF if installed.

    Nats are in units of columns standardised by the training rows.

    Example: nicest compare density --data my-tables --out density.json
    """
    from nicest.studies.compare import compare
    from nicest.studies.compare_density import DENSITY

    asked = {"tables": tables or (), "data": data, "methods": method or (), "seeds": seeds, "jobs": jobs, "out": out}
    return compare(DENSITY, **asked)  # type: ignore[arg-type]


@command(compare_app, show.comparison, "imputation")
def compare_imputation(
    tables: options.Tables = None,
    data: options.Folder = None,
    method: options.Methods = None,
    seeds: options.Splittings = 2,
    holes: Annotated[bool, typer.Option("--holes", help="Remove cells from the training rows, too.")] = False,
    jobs: options.Jobs = 0,
    out: options.Record = None,
) -> Result:
    """Compare imputation errors: NICE, column means, KNN, chained regressions and forests. Takes minutes.

    Example: nicest compare imputation wine --seeds 1 --holes
    """
    from nicest.studies.compare import compare
    from nicest.studies.compare_imputation import imputation

    asked = {"tables": tables or (), "data": data, "methods": method or (), "seeds": seeds, "jobs": jobs, "out": out}
    return compare(imputation(holes=holes), **asked)  # type: ignore[arg-type]


@command(compare_app, show.comparison, "outliers")
def compare_outliers(
    tables: options.Tables = None,
    data: options.Folder = None,
    method: options.Methods = None,
    seeds: options.Splittings = 2,
    jobs: options.Jobs = 0,
    out: options.Record = None,
) -> Result:
    """Compare outlier detection by ROC AUC: NICE, KNN, LOF, IsolationForest and a mixture.

    Every method is trained on half of the inliers. Your tables hold labels: `y` in a .npz file, or a column
    `outlier` or `y`; 1 is an outlier.

    Example: nicest compare outliers wine moons
    """
    from nicest.studies.compare import compare
    from nicest.studies.compare_outliers import OUTLIERS

    asked = {"tables": tables or (), "data": data, "methods": method or (), "seeds": seeds, "jobs": jobs, "out": out}
    return compare(OUTLIERS, **asked)  # type: ignore[arg-type]


@command(compare_app, show.comparison, "posteriors")
def compare_posteriors(
    tasks: Annotated[list[str] | None, typer.Argument(help="Which simulators.", show_default="all")] = None,
    method: options.Methods = None,
    seeds: Annotated[int, options.integer(1, 1000, "Trainings per simulator, each on its own simulations.")] = 1,
    jobs: options.Jobs = 0,
    out: options.Record = None,
) -> Result:
    """Compare posteriors of simulators: NICE and sbi's own estimators, trained by its NPE. Takes an hour.

    Every method gets 10,000 simulations. The figure is the accuracy of a classifier that separates its draws from
    those of the true posterior, averaged over ten observations; 0.5 is perfect. Needs the packages sbi and sbibm.

    Example: nicest compare posteriors two_moons --method NICE --out posteriors.json
    """
    from nicest.studies.compare import compare
    from nicest.studies.compare_posteriors import posteriors

    return compare(posteriors(), tables=tasks or (), methods=method or (), seeds=seeds, jobs=jobs, out=out)


@command(compare_app, show.comparison, "regression")
def compare_regression(
    tables: options.Tables = None,
    data: options.Folder = None,
    method: options.Methods = None,
    seeds: options.Splittings = 2,
    jobs: options.Jobs = 0,
    out: options.Record = None,
) -> Result:
    """Compare predictive distributions of the last column: NICE, NGBoost, quantile boosting and a forest.

    Log-density, CRPS, RMSE and the coverage of 90% intervals on held-out rows. NGBoost needs the package ngboost.

    Example: nicest compare regression --data my-tables --out regression.json
    """
    from nicest.studies.compare import compare
    from nicest.studies.compare_regression import REGRESSION

    asked = {"tables": tables or (), "data": data, "methods": method or (), "seeds": seeds, "jobs": jobs, "out": out}
    return compare(REGRESSION, **asked)  # type: ignore[arg-type]


@command(compare_app, show.comparison, "synthesis")
def compare_synthesis(
    tables: options.Tables = None,
    data: options.Folder = None,
    method: options.Methods = None,
    seeds: options.Splittings = 2,
    jobs: options.Jobs = 0,
    out: options.Record = None,
) -> Result:
    """Compare synthetic rows by how well trees tell them from real ones: NICE, a mixture, a copula, CTGAN, TVAE.

    The figure is the ROC AUC of the trees; 0.5 is perfect. CTGAN and TVAE need the package ctgan.

    Example: nicest compare synthesis --data my-tables --out synthesis.json
    """
    from nicest.studies.compare import compare
    from nicest.studies.compare_synthesis import SYNTHESIS

    asked = {"tables": tables or (), "data": data, "methods": method or (), "seeds": seeds, "jobs": jobs, "out": out}
    return compare(SYNTHESIS, **asked)  # type: ignore[arg-type]


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
    from nicest.studies.reproduce import table

    choose_device(device)  # else every row would fail by it
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
    from nicest.studies.reproduce import figures

    return figures(recipe or [], overrides=tuple(overrides or ()), runs=runs, out=out, device=device)


@command(reproduce_app, show.vae, "vae")
def reproduce_vae(
    recipe: Annotated[str, typer.Option(help="The recipe whose data to use.")] = "mnist",
    seeds: Annotated[int, options.integer(1, 100, "Seeds per model.")] = 3,
    steps: Annotated[int, options.integer(1, 10_000_000, "Training steps.")] = 10_000,
    out: Annotated[Path, options.out_file("The results, as JSON.")] = Path("results/vae.json"),
    device: options.Device = "auto",
) -> Result:
    """Compare VAEs (App. C): plain, with a NICE posterior, with a NICE prior.

    Example: nicest reproduce vae --recipe digits --seeds 1
    """
    from nicest.files import to_json, write_text
    from nicest.studies.vae import study

    result = study(recipe, seeds=range(seeds), steps=steps, device=device)
    write_text(out, to_json({"command": shlex.join(["nicest", *sys.argv[1:]])} | result))
    return result | {"out": str(out)}


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
