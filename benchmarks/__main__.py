"""The command line of the benchmarks: `python -m benchmarks --help`, from the top of the repository."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import report
from nicest import cli
from nicest.cli.base import command
from nicest.tasks import options
from nicest.tasks.results import Result

PROGRAM = "python -m benchmarks"
group = partial(typer.Typer, no_args_is_help=True)
app = group(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure nicest: its speed, and its results next to those of other methods.",
    epilog="Every command takes --debug, which shows a traceback instead of a one-line error.",
)
compare_app = group(help="Compare NICE with other methods.")
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
Methods = Annotated[list[str] | None, typer.Option("--method", help="Only this method; repeatable.", show_default="all")]
Splits = Annotated[int, options.integer(1, 1000, "Random splits per table.")]
Record = Annotated[
    Path | None,
    options.out_file(
        "A JSON file, written after every trial; run the command again to compute only what is missing.",
        show_default=False,
    ),
]
Out = Annotated[Path | None, options.out_file("A JSON file of the results.", show_default=False)]
Windows = Annotated[int, options.integer(1, 1000, "Number of time windows; the median is reported.")]
Seconds = Annotated[float, options.real(0, 60, "Length of a window in seconds.")]
COMPARISONS = {  # by module, benchmarks.compare_NAME
    "classification": """Compare probabilities of classes: NICE, boosted trees, a forest and logistic regression.

    Classes are the last column, or `y` in a .npz file; numbers of many values are cut into terciles.

    Example: python -m benchmarks compare classification --data my-tables --out classification.json
    """,
    "density": """Compare the log-density of held-out rows: NICE, a mixture, kernels, zuko's NSF and MAF if installed.

    Nats are in units of columns standardised by the training rows. NICETable takes all columns as densities;
    "NICETable, values" finds discrete columns, whose probabilities cannot be compared with densities.

    Example: python -m benchmarks compare density --data my-tables --out density.json
    """,
    "known": """Compare densities with the true ones: NICE, and a mixture of Gaussians chosen by BIC.

    Example: python -m benchmarks compare known --seeds 5 --out known.json
    """,
    "outliers": """Compare outlier detection by ROC AUC: NICE, KNN, LOF, IsolationForest and a mixture.

    Every method is trained on half of the inliers. Your tables hold labels: `y` in a .npz file, or a column
    `outlier` or `y`; 1 is an outlier.

    Example: python -m benchmarks compare outliers wine moons
    """,
    "posteriors": """Compare posteriors of simulators: NICE and sbi's own estimators, trained by its NPE. Takes an hour.

    Every method gets 10,000 simulations. The metric is the accuracy of a classifier that separates its draws from
    those of the true posterior, averaged over ten observations; 0.5 is perfect. Needs the packages sbi and sbibm.

    Example: python -m benchmarks compare posteriors two_moons --method NICE --seeds 1 --out posteriors.json
    """,
    "regression": """Compare predictive distributions of the last column: NICE, NGBoost, quantile boosting, a forest.

    CRPS, log-density, RMSE and the coverage of 90% intervals on held-out rows. NGBoost needs the package ngboost.

    Example: python -m benchmarks compare regression --data my-tables --out regression.json
    """,
    "synthesis": """Compare synthetic rows by how well trees tell them from real ones: NICE, a mixture, a copula, ctgan.

    The metric is the ROC AUC of the trees; 0.5 is perfect. CTGAN and TVAE need the package ctgan.

    Example: python -m benchmarks compare synthesis --data my-tables --out synthesis.json
    """,
}


def compared(
    name: str, tables: Tables, data: Folder, method: Methods, seeds: int, jobs: int, out: Record, **how: Any
) -> Result:
    """Run a comparison with the options of its command."""
    from benchmarks.compare import compare, markdown

    chosen = importlib.import_module(f"benchmarks.compare_{name}").comparison(**how)
    found = compare(chosen, data=data, tables=tables or (), methods=method or (), seeds=seeds, jobs=jobs, out=out)
    return report.Report(found=found, text=markdown)


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
        return compared(name, tables, data, method, seeds, jobs, out)

    run.__doc__ = help
    command(compare_app, name)(run)


for _name, _help in COMPARISONS.items():
    add_comparison(_name, _help)


@command(compare_app, "imputation")
def imputation(
    tables: Tables = None,
    data: Folder = None,
    method: Methods = None,
    seeds: Splits = 2,
    holes: Annotated[bool, typer.Option("--holes", help="Remove cells from the training rows, too.")] = False,
    hidden: Annotated[float, options.real(0, 1, "Fraction of the cells that is hidden.")] = 0.2,
    jobs: options.Jobs = 0,
    out: Record = None,
) -> Result:
    """Compare imputation errors: NICE, column means, KNN, chained regressions and forests.

    Cells are hidden at random in a fifth of the rows.

    Example: python -m benchmarks compare imputation wine --seeds 1 --holes --hidden 0.5
    """
    return compared("imputation", tables, data, method, seeds, jobs, out, holes=holes, hidden=hidden)


@command(app, "bench")
def bench(
    net: Annotated[
        list[str] | None, typer.Option(help="mnist (default), cifar10, small, spline or glow; repeatable.")
    ] = None,
    batch: Annotated[
        list[int] | None, options.integer(1, 100_000, "Batch size; repeatable.", show_default="200")
    ] = None,
    windows: Windows = 5,
    seconds: Seconds = 0.3,
    out: Out = None,
    device: options.Device = "auto",
) -> Result:
    """Measure the speed of nicest, of the installed flow libraries, and of the matrix products alone (a lower bound).

    Example: python -m benchmarks bench --net mnist --batch 200 --batch 2048
    """
    from benchmarks.bench import bench

    found = bench(net or ["mnist"], batch or [200], windows=windows, seconds=seconds, device=device)
    return report.report(found, report.bench_text, out)


@command(app, "cost")
def cost(
    small: Annotated[bool, typer.Option("--small", help="Start from a small net, for a CPU.")] = False,
    windows: Windows = 5,
    seconds: Seconds = 0.3,
    out: Out = None,
    device: options.Device = "auto",
) -> Result:
    """Measure how the cost of a training step grows with each size of the net, and of scoring with the rows.

    Example: python -m benchmarks cost --small --device cpu
    """
    from benchmarks.cost import study

    found = study(small=small, windows=windows, seconds=seconds, device=device)
    return report.report(found, report.cost_text, out)


@command(app, "table-speed")
def table_speed(
    size: Annotated[
        list[int] | None, options.integer(20, 10**7, "Training rows; repeatable.", show_default="1000 and 16000")
    ] = None,
    rows: Annotated[int, options.integer(1, 10**7, "Rows to score and to sample.")] = 100_000,
    effort: Annotated[str, typer.Option(help="low, medium or high.")] = "medium",
    out: Out = None,
) -> Result:
    """Measure how long a model of a table trains, scores, samples and imputes, and what busy cores cost.

    Example: python -m benchmarks table-speed --size 1000 --rows 10000
    """
    from benchmarks.table_speed import SIZES, study

    return report.report(study(size or SIZES, rows, effort=effort), report.speed_text, out)


@command(app, "vae")
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

    return report.report(study(recipe, seeds=range(seeds), steps=steps, device=device), report.vae_text, out)


if __name__ == "__main__":
    cli.main(app, PROGRAM)
