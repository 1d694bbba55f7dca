"""The command line of the benchmarks: `python -m benchmarks --help`, from the top of the repository."""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from types import ModuleType
from typing import Any

import typer

from benchmarks import bench, compare, cost, table_speed, vae
from benchmarks.report import Report
from nicest import cli
from nicest.cli.base import command
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


def comparison(module: ModuleType) -> Any:
    """Return the command of a module `compare_NAME`: its options are those of `compare` and of `module.comparison`."""
    general, own = (inspect.signature(each, eval_str=True).parameters for each in (compare.compare, module.comparison))

    def run(**given: Any) -> Result:
        chosen = module.comparison(**{name: given.pop(name) for name in own})
        return Report(found=compare.compare(chosen, **given), text=compare.markdown)

    parameters = [*list(general.values())[1:], *own.values()]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    )
    run.__doc__ = module.__doc__
    return run


for _name in compare.NAMES:
    command(compare_app, _name)(comparison(importlib.import_module(f"benchmarks.compare_{_name}")))
command(app, "bench")(bench.bench)
command(app, "cost")(cost.cost)
command(app, "table-speed")(table_speed.study)
command(app, "vae")(vae.study)

if __name__ == "__main__":
    cli.main(app, PROGRAM)
