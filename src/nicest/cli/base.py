"""Make commands of tasks: their signatures become options, and their results are printed."""

from __future__ import annotations

import ast
import collections.abc
import functools
import importlib
import inspect
import os
import re
import sys
import time
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from nicest.messages import printable
from nicest.tasks import options
from nicest.tasks.results import Result

BY_NAME = inspect.Parameter.KEYWORD_ONLY
SCOPE = {**vars(options), "Sequence": collections.abc.Sequence}  # names that the signatures of tasks use


def task_command(group: typer.Typer, module: str, function: str, name: str, *more: str) -> None:
    """Register a task as a command, without importing its module, which may import torch.

    Parameters
    ----------
    group
        The application, or a group of commands.
    module, function
        The task: a function that returns a `Result`.
    name
        The name of the command.
    more
        Options of the command that the task does not have itself: "data" and "label", with which the run is opened.
        "labels" allows models of images given labels without a label.
    """
    outline = _outline(module, function)

    @functools.wraps(outline)
    def call(**given: Any) -> Result:
        found: Result = getattr(importlib.import_module(module), function)(**given)
        return found

    command(group, name, *more)(call)


def command(group: typer.Typer, name: str, *more: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Return a decorator that registers a function whose result is printed: as JSON with --json, else for people.

    A parameter `run` becomes a run folder with --device and --verify; the function gets the opened run.
    """

    def register(function: Callable[..., Result]) -> Callable[..., Result]:
        own = dict(inspect.signature(function, eval_str=True).parameters)
        added: dict[str, tuple[Any, Any]] = {"as_json": (options.Json, False)}
        if opens := own.get("run") is not None and own["run"].default is inspect.Parameter.empty:
            wanted = {"label": (options.Label, None), "data": (options.Moved, None)}
            added |= {each: wanted[each] for each in more if each in wanted}
            added |= {"device": (options.Device, "auto"), "verify": (options.Verify, None)}
        for each, (kind, default) in added.items():
            own.setdefault(each, inspect.Parameter(each, BY_NAME, default=default, annotation=kind))

        def call(*, as_json: bool, **given: Any) -> None:
            if opens:
                how = {each: given.pop(each) for each in added if each in given and each != "as_json"}
                given["run"] = opened(given["run"], **how)
                given["run"].require_whole_rows(but=more)
            result = function(**given)
            emit(result, as_json=as_json)
            raise typer.Exit(result.exit_code)

        paragraphs = (inspect.getdoc(function) or "").split("\n\n")
        call.__doc__ = "\n\n".join(" ".join(each.split()) for each in paragraphs)
        parameters = [_for_typer(each) for each in own.values()]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in parameters}
        group.command(name)(call)
        return function

    return register


def _outline(module: str, function: str) -> Callable[..., Any]:
    """Return a function with the signature and the docstring of a task, and no body."""
    path = Path(__file__).parents[1].joinpath(*module.split(".")[1:]).with_suffix(".py")
    sources = path.read_text("utf-8").split("\n\n\n")  # one definition each: parsing all of them takes a while
    node = ast.parse(next(each for each in sources if each.startswith(f"def {function}("))).body[0]
    assert isinstance(node, ast.FunctionDef)
    node.body, node.returns = node.body[:1], None
    scope = dict(SCOPE)
    exec(compile(ast.Module([node], []), module, "exec", dont_inherit=True), scope)
    found = scope[function]
    assert callable(found)
    return found


def _for_typer(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter of a task with a type and a default that typer takes."""
    kind, default = _plain(parameter.annotation), parameter.default
    if isinstance(default, str) and typing.get_origin(typing.get_args(kind)[0]) is list:
        default = [default]
    return parameter.replace(kind=BY_NAME, annotation=kind, default=default)


def _plain(kind: Any) -> Any:
    """Return a type that typer knows for one of a task: lists for sequences, paths for paths or texts."""
    if typing.get_origin(kind) is Annotated:
        inner, *more = typing.get_args(kind)
        return Annotated[(_plain(inner), *more)]
    if typing.get_origin(kind) is collections.abc.Sequence:
        (each,) = typing.get_args(kind)
        return list[_plain(each)]  # type: ignore[misc]
    if isinstance(kind, types.UnionType):
        among = typing.get_args(kind)
        if several := [each for each in among if typing.get_origin(each) is collections.abc.Sequence]:
            return _plain(several[0])
        one = Path if Path in among else next(each for each in among if each is not type(None))
        return one | None if type(None) in among else one
    return str if kind is Any else kind


def opened(
    run: Path, device: str, verify: bool | None = None, data: str | None = None, label: int | None = None
) -> Any:
    """Open a run folder on a device. Under torchrun each process of a machine gets its own GPU."""
    import torch

    from nicest.runs.run import Run
    from nicest.tasks.training import located

    if device == "auto" and "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        device = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
    return Run(run, device=device, verify=verify, data=data if data is None else located(data), label=label)


def is_first(variable: str) -> bool:
    """Return True if this is the only process, or the first of those that torchrun counts by a variable."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get(variable, "0") == "0"


def emit(result: Result, *, as_json: bool) -> None:
    """Print a result, in the first process alone."""
    if not is_first("RANK"):
        return
    if as_json:
        print(result.to_json(), end="")
    else:
        result.show()


def with_options(message: str) -> str:
    """Rewrite advice of the library to set something as the option that sets it."""
    return re.sub(r"\bset (?='?(?:data|model|table|train|augment)\.\w+=)", "--set ", message)


def fail(message: str, code: int = 1) -> NoReturn:
    """Print an error as one line on standard error, and exit."""
    print(f"error: {printable(message)}", file=sys.stderr)
    if not is_first("LOCAL_RANK") and sys.stderr is not sys.__stderr__:
        time.sleep(3)  # this process was silent: torchrun must not end the one that reports before it has reported
    raise SystemExit(code)
