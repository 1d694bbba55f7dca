"""Commands in groups: inside a model, beside others, the paper, the data; and the benchmark."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nicest.cli.base import (
    Basis,
    Device,
    Folder,
    Jobs,
    Json,
    Methods,
    Moved,
    Results,
    Run,
    Seed,
    Set,
    Split,
    Splittings,
    Tables,
    Verify,
    Way,
    app,
    compare_app,
    data_app,
    emit,
    figure,
    latent_app,
    leave_unfinished,
    opened,
    reproduce_app,
)
from nicest.cli.show import (
    show_bench,
    show_check,
    show_figures,
    show_results,
    show_sets,
    show_study,
    show_truncation,
    show_vae,
)
from nicest.errors import NicestError


@latent_app.command()
def spectrum(
    run: Run,
    pca: Annotated[bool, typer.Option(help="The spectrum of a PCA of the training data beside it.")] = True,
    data: Moved = None,
    out: Annotated[Path | None, figure("spectrum")] = None,
    device: Device = "cpu",
    verify: Verify = None,
    as_json: Json = False,
) -> None:
    """The sorted sigma_d of the scaling layer: how much each component may vary.

    Example: nicest latent spectrum runs/demo
    """
    from nicest.tasks.latent import spectrum as run_spectrum

    result = run_spectrum(opened(run, device, verify, data), pca=pca, out=out)
    emit(result, as_json, lambda result: print(f"spectrum in {result['out']}"))


@latent_app.command()
def sphere(
    run: Run,
    basis: Annotated[
        Basis, typer.Option(help="Around which axes: random ones, or the components of largest sigma_d.")
    ] = Basis.random,
    radius: Annotated[
        float | None, typer.Option(help="In units of the prior.", show_default="the typical norm of its draws")
    ] = None,
    grid: Annotated[int, typer.Option(min=1, help="Images a side.")] = 10,
    seed: Seed = 0,
    out: Annotated[Path | None, figure("sphere")] = None,
    device: Device = "auto",
    verify: Verify = None,
    as_json: Json = False,
) -> None:
    """A sphere of three dimensions in latent space, decoded: neighbours on it are neighbours in the picture.

    Example: nicest latent sphere runs/demo --basis top
    """
    from nicest.tasks.latent import sphere as run_sphere

    result = run_sphere(opened(run, device, verify), basis=basis, radius=radius, grid=grid, seed=seed, out=out)
    emit(result, as_json, lambda result: print(f"sphere of radius {result['radius']:.2f} in {result['out']}"))


@latent_app.command()
def interpolate(
    run: Run,
    start: Annotated[
        list[int] | None,
        typer.Option("--from", help="An image by its place in the split; repeatable.", show_default="0, 2, 4, 6, 8"),
    ] = None,
    end: Annotated[
        list[int] | None,
        typer.Option("--to", help="Where the way from it ends; as often.", show_default="1, 3, 5, 7, 9"),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Images of a way, both ends among them.")] = 10,
    way: Annotated[
        Way, typer.Option(help="A straight line of codes, or one that turns around the prior's mode.")
    ] = Way.straight,
    split: Annotated[Split, typer.Option(help="Which examples.")] = Split.test,
    data: Moved = None,
    out: Annotated[Path | None, figure("interpolate")] = None,
    device: Device = "auto",
    verify: Verify = None,
    as_json: Json = False,
) -> None:
    """From one image to another through latent space, and beside it through pixels.

    Example: nicest latent interpolate runs/demo --from 3 --to 8 --from 4 --to 5
    """
    from nicest.tasks.latent import interpolate as run_interpolation

    if len(start or []) != len(end or []):
        raise NicestError(f"expected as many --to as --from, got {len(end or [])} and {len(start or [])}")
    pairs = list(zip(start or [], end or [], strict=True)) or None
    result = run_interpolation(
        opened(run, device, verify, data), pairs=pairs, steps=steps, way=way, split=split, out=out
    )
    emit(result, as_json, lambda result: print(f"{len(result['pairs'])} ways in {result['out']}"))


@latent_app.command()
def truncate(
    run: Run,
    n: Annotated[int, typer.Option("-n", min=1, help="Images in the picture.")] = 8,
    keep: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Components to keep, repeatable.", show_default="0, 1, 2, 5, 10, ... 200, all"),
    ] = None,
    split: Annotated[Split, typer.Option(help="Which examples.")] = Split.test,
    data: Moved = None,
    out: Annotated[Path | None, figure("truncate")] = None,
    device: Device = "auto",
    verify: Verify = None,
    as_json: Json = False,
) -> None:
    """What is left of images when only the components of largest sigma_d are kept, beside a PCA's.

    Example: nicest latent truncate runs/demo -n 8
    """
    from nicest.tasks.latent import truncate as run_truncation

    emit(
        run_truncation(opened(run, device, verify, data), n=n, kept=keep, split=split, out=out),
        as_json,
        show_truncation,
    )


@app.command()
def bench(
    net: Annotated[list[str] | None, typer.Option(help="mnist (the default), cifar10 or small; repeatable.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Batch size, 200 by default; repeatable.")] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows whose median is taken.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.0, help="Length of a window.")] = 0.3,
    study: Annotated[bool, typer.Option("--study", help="How cost grows with each size, instead.")] = False,
    out: Annotated[Path | None, typer.Option(help="A picture of it.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Time this library, the installed peers (nicest[bench]) and the floor of the hardware, in one run.

    Example: nicest bench --net mnist --batch 200 --batch 2048
    """
    from nicest.studies.bench import bench as run_bench

    asked = {"windows": windows, "seconds": seconds, "device": device, "out": out}
    if study:
        from nicest.studies.cost import study as run_study

        small = net == ["small"]
        emit(run_study(**asked, small=small), as_json, show_study)  # type: ignore[arg-type]
        return
    emit(run_bench(net or ["mnist"], batch or [200], **asked), as_json, show_bench)  # type: ignore[arg-type]


def run_comparison(comparison: Any, as_json: bool, **asked: Any) -> None:
    from nicest.studies.compare import compare, markdown

    result = compare(comparison, **{name: value for name, value in asked.items() if value is not None})
    emit(result, as_json, lambda result: print(markdown(result), *filter(None, [result.get("caveat")]), sep="\n\n"))
    leave_unfinished(result)


@compare_app.command("density")
def compare_density(
    tables: Tables = None,
    data: Folder = None,
    method: Methods = None,
    seeds: Splittings = 2,
    jobs: Jobs = 0,
    out: Results = None,
    as_json: Json = False,
) -> None:
    """Log-density of held-out rows: NICE, mixtures, kernels, and zuko's NSF and MAF if it is installed.

    Nats are of columns standardised by the training rows.

    Example: nicest compare density --data my-tables --out density.json
    """
    from nicest.studies.compare_density import DENSITY

    run_comparison(DENSITY, as_json, tables=tables, data=data, methods=method, seeds=seeds, jobs=jobs, out=out)


@compare_app.command("imputation")
def compare_imputation(
    tables: Tables = None,
    data: Folder = None,
    method: Methods = None,
    seeds: Splittings = 2,
    holes: Annotated[bool, typer.Option("--holes", help="Cells are missing in the training rows, too.")] = False,
    jobs: Jobs = 0,
    out: Results = None,
    as_json: Json = False,
) -> None:
    """Missing cells found again: NICE, means, neighbours, chained regressions and forests. It takes minutes.

    Example: nicest compare imputation wine --seeds 1 --holes
    """
    from nicest.studies.compare_imputation import imputation

    asked = {"tables": tables, "data": data, "methods": method, "seeds": seeds, "jobs": jobs, "out": out}
    run_comparison(imputation(holes=holes), as_json, **asked)


@compare_app.command("outliers")
def compare_outliers(
    tables: Tables = None,
    data: Folder = None,
    method: Methods = None,
    seeds: Splittings = 2,
    jobs: Jobs = 0,
    out: Results = None,
    as_json: Json = False,
) -> None:
    """Outliers found, as ROC AUC: NICE's density and typicality, KNN, LOF, IsolationForest and a mixture.

    Every method is trained on half of the inliers. Your tables hold labels: `y` in a .npz file, or a column
    `outlier` or `y`; 1 is an outlier.

    Example: nicest compare outliers wine moons
    """
    from nicest.studies.compare_outliers import OUTLIERS

    run_comparison(OUTLIERS, as_json, tables=tables, data=data, methods=method, seeds=seeds, jobs=jobs, out=out)


@reproduce_app.command("table")
def reproduce_table(
    recipe: Annotated[list[str] | None, typer.Option(help="One row of the table; repeatable. All by default.")] = None,
    seeds: Annotated[int, typer.Option(min=0, help="Seeds of every row; 0 for the plan's own numbers.")] = 0,
    runs: Annotated[Path, typer.Option(help="Where the runs are, or will be.")] = Path("runs/reproduce"),
    overrides: Set = None,
    out: Annotated[Path, typer.Option(help="The figures, as JSON.")] = Path("results/table.json"),
    page: Annotated[Path | None, typer.Option(help="A page of them, in Markdown.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train and evaluate every row of the paper's tables, in the text's reading, the released code's and ours.

    What is there is kept, what was cut off goes on, and what cannot be made here is named.

    Example: nicest reproduce table --recipe mnist-best --page docs/results.md
    """
    from nicest.studies.reproduce import table

    asked = {"seeds": seeds, "runs": runs, "out": out, "page": page, "device": device}
    result = table(recipe or [], overrides=tuple(overrides or ()), **asked)  # type: ignore[arg-type]
    emit(result, as_json, show_results)
    leave_unfinished(result)


@reproduce_app.command("figures")
def reproduce_figures(
    recipe: Annotated[list[str] | None, typer.Option(help="Whose figures; repeatable. Ours by default.")] = None,
    runs: Annotated[Path, typer.Option(help="Where the runs are, or will be.")] = Path("runs/reproduce"),
    overrides: Set = None,
    out: Annotated[Path, typer.Option(help="A folder for the pictures.")] = Path("results/figures"),
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Draw every figure of the paper: samples, inpainting, spheres, spectra; and interpolation, truncation, curves.

    Example: nicest reproduce figures --recipe digits
    """
    from nicest.studies.reproduce import figures

    asked = {"runs": runs, "out": out, "device": device}
    result = figures(recipe or [], overrides=tuple(overrides or ()), **asked)  # type: ignore[arg-type]
    emit(result, as_json, show_figures)
    leave_unfinished(result)


@reproduce_app.command("vae")
def reproduce_vae(
    recipe: Annotated[str, typer.Option(help="Whose data.")] = "mnist",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each model.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each training.")] = 10_000,
    out: Annotated[Path, typer.Option(help="The figures, as JSON.")] = Path("results/vae.json"),
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train a VAE as NICE (App. C), and with a NICE posterior or prior, alike, and compare their bounds.

    Example: nicest reproduce vae --recipe digits --seeds 1
    """
    from nicest.files import require_writable, to_json, write_text
    from nicest.studies.vae import study

    require_writable(out)  # before anything is trained
    result = study(recipe, seeds=range(seeds), steps=steps, device=device)
    write_text(out, to_json({"command": shlex.join(["nicest", *sys.argv[1:]])} | result))
    emit(result | {"out": str(out)}, as_json, show_vae)


@data_app.command("list")
def data_list(as_json: Json = False) -> None:
    """The data sets by name, and which are here."""
    from nicest.data.download import list_sets

    emit({"sets": [row._asdict() for row in list_sets()]}, as_json, show_sets)


@data_app.command("get")
def data_get(name: Annotated[str, typer.Argument(help="A data set by name.")], as_json: Json = False) -> None:
    """Fetch a data set and check it against its published checksums.

    Example: nicest data get mnist
    """
    from nicest.data.download import get

    emit({"name": name, "folder": str(get(name))}, as_json, lambda result: print(f"{name} in {result['folder']}"))


@data_app.command("check")
def data_check(name: Annotated[str, typer.Argument(help="A data set by name.")], as_json: Json = False) -> None:
    """Check the files of a data set against their published checksums."""
    from nicest.data.download import check

    files = [{"file": file, "status": status} for file, status in check(name)]
    emit({"name": name, "files": files}, as_json, show_check)
    if any(each["status"] != "ok" for each in files):
        raise typer.Exit(1)
