"""The command line of the benchmarks: `python -m benchmarks --help`, from the top of the repository."""

from __future__ import annotations

import importlib
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import report
from nicest import cli
from nicest.cli import options
from nicest.cli.base import Result, command

PROGRAM = "python -m benchmarks"
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure nicest: its speed, and its results next to those of other methods.",
    epilog="Every command takes --debug, which shows a traceback instead of a one-line error.",
)
compare_app = typer.Typer(no_args_is_help=True, help="Compare NICE with other methods for tables.")
app.add_typer(compare_app, name="compare")

Tables = Annotated[list[str] | None, typer.Argument(help="Which tables.", show_default="all")]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--data",
        parser=lambda text: Path(options.to_read(text)),
        help="A folder of your own tables (.csv, .csv.gz, .parquet, .arrow, .npy, .npz).",
    ),
]
Methods = Annotated[list[str] | None, typer.Option(help="Only this method; repeatable.", show_default="all")]
Splits = Annotated[int, options.integer(1, 1000, "Random splits per table.")]
Record = Annotated[
    Path | None,
    options.out_file(
        "A JSON file, written after every job; run the command again to compute only what is missing.",
        show_default=False,
    ),
]
Windows = Annotated[int, options.integer(1, 1000, "Number of time windows; the median is reported.")]
Seconds = Annotated[float, options.real(0, 60, "Length of a window in seconds.")]
Picture = Annotated[Path | None, options.out_file("A figure of the results.")]
SIMPLE = {  # comparisons without options of their own; each has a module `benchmarks.compare_NAME`
    "density": """Compare the log-density of held-out rows: NICE, a mixture, kernels, zuko's NSF and MAF if installed.

    Nats are in units of columns standardised by the training rows.

    Example: python -m benchmarks compare density --data my-tables --out density.json
    """,
    "outliers": """Compare outlier detection by ROC AUC: NICE, KNN, LOF, IsolationForest and a mixture.

    Every method is trained on half of the inliers. Your tables hold labels: `y` in a .npz file, or a column
    `outlier` or `y`; 1 is an outlier.

    Example: python -m benchmarks compare outliers wine moons
    """,
    "regression": """Compare predictive distributions of the last column: NICE, NGBoost, quantile boosting and a forest.

    Log-density, CRPS, RMSE and the coverage of 90% intervals on held-out rows. NGBoost needs the package ngboost.

    Example: python -m benchmarks compare regression --data my-tables --out regression.json
    """,
    "synthesis": """Compare synthetic rows by how well trees tell them from real ones: NICE, a mixture, a copula, ctgan.

    The metric is the ROC AUC of the trees; 0.5 is perfect. CTGAN and TVAE need the package ctgan.

    Example: python -m benchmarks compare synthesis --data my-tables --out synthesis.json
    """,
}


def show_comparison(result: Result) -> None:
    """Print a comparison as Markdown, with its caveat if it has one."""
    from benchmarks.compare import markdown

    print(markdown(result), *filter(None, [result.get("caveat")]), sep="\n\n")


def run_comparison(
    comparison: Any, tables: Tables, method: Methods, seeds: int, jobs: int, out: Record, data: Folder = None
) -> Result:
    """Run a comparison with the options of its command."""
    from benchmarks.compare import compare

    return compare(comparison, tables=tables or (), methods=method or (), seeds=seeds, jobs=jobs, out=out, data=data)


def add_comparison(name: str, help: str) -> None:
    """Add the command `compare NAME`."""

    def run(
        tables: Tables = None,
        data: Folder = None,
        method: Methods = None,
        seeds: Splits = 2,
        jobs: options.Jobs = 0,
        out: Record = None,
    ) -> Result:
        comparison = importlib.import_module(f"benchmarks.compare_{name}").COMPARISON
        return run_comparison(comparison, tables, method, seeds, jobs, out, data)

    run.__doc__ = help
    command(compare_app, show_comparison, name)(run)


for _name, _help in SIMPLE.items():
    add_comparison(_name, _help)


@command(compare_app, show_comparison, "imputation")
def imputation(
    tables: Tables = None,
    data: Folder = None,
    method: Methods = None,
    seeds: Splits = 2,
    holes: Annotated[bool, typer.Option("--holes", help="Remove cells from the training rows, too.")] = False,
    jobs: options.Jobs = 0,
    out: Record = None,
) -> Result:
    """Compare imputation errors: NICE, column means, KNN, chained regressions and forests. Takes minutes.

    Example: python -m benchmarks compare imputation wine --seeds 1 --holes
    """
    from benchmarks.compare_imputation import imputation

    return run_comparison(imputation(holes=holes), tables, method, seeds, jobs, out, data)


@command(compare_app, show_comparison, "posteriors")
def posteriors(
    tasks: Annotated[list[str] | None, typer.Argument(help="Which simulators.", show_default="all")] = None,
    method: Methods = None,
    seeds: Annotated[int, options.integer(1, 1000, "Trainings per simulator, each on its own simulations.")] = 1,
    jobs: options.Jobs = 0,
    out: Record = None,
) -> Result:
    """Compare posteriors of simulators: NICE and sbi's own estimators, trained by its NPE. Takes an hour.

    Every method gets 10,000 simulations. The metric is the accuracy of a classifier that separates its draws from
    those of the true posterior, averaged over ten observations; 0.5 is perfect. Needs the packages sbi and sbibm.

    Example: python -m benchmarks compare posteriors two_moons --method NICE --out posteriors.json
    """
    from benchmarks.compare_posteriors import posteriors

    return run_comparison(posteriors(), tasks, method, seeds, jobs, out)


@command(app, report.show_bench)
def bench(
    net: Annotated[
        list[str] | None, typer.Option(help="mnist (default), cifar10, small, spline or glow; repeatable.")
    ] = None,
    batch: Annotated[
        list[int] | None, options.integer(1, 100_000, "Batch size; repeatable.", show_default="200")
    ] = None,
    windows: Windows = 5,
    seconds: Seconds = 0.3,
    out: Picture = None,
    device: options.Device = "auto",
) -> Result:
    """Measure the speed of nicest, of the installed flow libraries, and of the matrix products alone (a lower bound).

    Example: python -m benchmarks bench --net mnist --batch 200 --batch 2048
    """
    from benchmarks.bench import bench

    return bench(net or ["mnist"], batch or [200], windows=windows, seconds=seconds, device=device, out=out)


@command(app, report.show_cost)
def cost(
    small: Annotated[bool, typer.Option("--small", help="Start from a small net, for a CPU.")] = False,
    windows: Windows = 5,
    seconds: Seconds = 0.3,
    out: Picture = None,
    device: options.Device = "auto",
) -> Result:
    """Measure how the cost of a training step grows with each size of the net, and of scoring with the rows.

    Example: python -m benchmarks cost --small --device cpu
    """
    from benchmarks.cost import study

    return study(small=small, windows=windows, seconds=seconds, device=device, out=out)


@command(app, report.show_vae)
def vae(
    recipe: Annotated[str, typer.Option(help="The recipe whose data to use.")] = "mnist",
    seeds: Annotated[int, options.integer(1, 100, "Seeds per model.")] = 3,
    steps: Annotated[int, options.integer(1, 10_000_000, "Training steps.")] = 10_000,
    out: Annotated[Path, options.out_file("The results, as JSON.")] = Path("results/vae.json"),
    device: options.Device = "auto",
) -> Result:
    """Compare VAEs (App. C of the paper): plain, with a NICE posterior, with a NICE prior.

    Example: python -m benchmarks vae --recipe digits --seeds 1
    """
    from benchmarks.vae import study
    from nicest.files import to_json, write_text

    result = study(recipe, seeds=range(seeds), steps=steps, device=device)
    write_text(out, to_json({"command": f"{PROGRAM} {shlex.join(sys.argv[1:])}"} | result))
    return result | {"out": str(out)}


if __name__ == "__main__":
    cli.main(app, PROGRAM)
