"""The common part of the comparisons: trials in processes of their own, results written as they arrive, rankings."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from scipy.stats import rankdata
from threadpoolctl import threadpool_limits

from benchmarks.datasets import read_numbers, tables_in
from benchmarks.report import origin, table
from nicest.errors import NicestError
from nicest.files import require_writable, to_json, write_text
from nicest.inference.workers import cores, end_with_parent
from nicest.messages import nearest, one_line
from nicest.progress import Bar
from nicest.tasks import options

Figures = dict[str, float]
Trial = dict[str, Any]
Key = tuple[str, int, str]  # table, seed, method
NONE: Mapping[str, Any] = MappingProxyType({})
NAMES = ("classification", "density", "imputation", "known", "outliers", "posteriors", "regression", "synthesis")
PRELOADED = ("torch._dynamo", *(f"benchmarks.compare_{name}" for name in NAMES))
QUIET = 30  # seconds between two lines of progress if there is no terminal


class Comparison(NamedTuple):
    """Methods, tables, and `trial(method, table, seed)`, which returns the metrics of each score of a method.

    `figures` maps the metrics to their digits; the first one decides which method is best. `needs` are packages that
    some methods need. `about` goes into the results. `tables` are built in, `read` reads one of a file; both give
    something with `rows` (N, D) and `left_out`. All must be picklable, because trials run in other processes.
    """

    name: str
    unit: str
    figures: Mapping[str, int]
    highest: bool
    tables: Mapping[str, Callable[[np.random.Generator], Any]]
    methods: Mapping[str, Any]
    trial: Callable[[Any, Any, int], Mapping[str, Figures]]
    needs: Mapping[str, str] = NONE
    about: Mapping[str, Any] = NONE
    read: Callable[[Path], Any] = read_numbers


def compare(
    comparison: Comparison,
    *,
    tables: Annotated[Sequence[str], typer.Argument(help="Which tables.", show_default="all")] = (),
    data: Annotated[
        Path | None,
        typer.Option(help="A folder of your own tables (.csv, .csv.gz, .parquet, .arrow, .npy, .npz).", parser=Path),
    ] = None,
    methods: Annotated[
        Sequence[str], typer.Option("--method", help="Only this method; repeatable.", show_default="all")
    ] = (),
    seeds: Annotated[int, options.integer(1, 1000, "Random splits per table.")] = 2,
    jobs: options.Jobs = 0,
    out: Annotated[
        Path | None, options.out_file("A JSON file, written after every trial; the same command resumes.")
    ] = None,
) -> dict[str, Any]:
    """Run every method on `seeds` splits of every table, `jobs` at a time, and rank the methods.

    `data` is a folder of tables. `out` is written after every trial; a later run with the same `out` keeps its trials
    and runs the rest. A failed trial is recorded with the reason.
    """
    files = tables_in(data) if data else {}
    names = _chosen(tables, files or comparison.tables, "table")
    absent = {
        name: f"it needs {each}: pip install {each}" for name, each in comparison.needs.items() if not find_spec(each)
    }
    for name in methods:
        if name in absent:
            raise NicestError(f"cannot run {name}: {absent[name]}")
    chosen = _chosen(methods, {name: 0 for name in comparison.methods if name not in absent}, "method")
    digests = {name: hashlib.sha256(files[name].read_bytes()).hexdigest() for name in names if data}
    keys = [(name, seed, method) for name in names for seed in range(seeds) for method in chosen]
    known = {} if out is None else _known(out, comparison, digests)
    trials = {key: known[key] for key in keys if key in known}
    left = [key for key in keys if key not in trials]
    if data:  # the largest tables first, so that nothing waits for a long trial at the end
        left.sort(key=lambda key: -files[key[0]].stat().st_size)
    work = {
        key: partial(
            _trial,
            partial(_read, comparison.read, files[key[0]]) if data else comparison.tables[key[0]],
            partial(comparison.trial, comparison.methods[key[2]]),
            key[1],
        )
        for key in left
    }
    same = {"comparison": comparison.name, "unit": comparison.unit, **comparison.about}
    about = {"figures": dict(comparison.figures), "highest_is_best": comparison.highest, "seeds": seeds, "data": data}
    result = origin(torch.device("cpu")) | same | about | {"digests": digests, "absent": absent}

    def so_far(**more: Any) -> dict[str, Any]:
        found = [trial for key in keys for trial in trials.get(key, ())]
        told = result | summary(found, comparison.figures, comparison.highest) | {"trials": found} | more
        if out is not None:
            write_text(out, to_json(told))
        return told

    with Bar(f"comparing {comparison.name}", len(keys), len(trials)) as bar:
        if out is not None:
            require_writable(out)
        for name, why in ({} if methods else absent).items():
            bar.note(f"without {name}: {why}")
        if trials:
            kept = f"{out} already holds {len(trials)} of {len(keys)} results"
            bar.note(f"{kept}: {len(left)} left to run; remove the file to run all of them again")
        began = last = time.perf_counter()
        try:
            for done, (key, found) in enumerate(run_jobs(work, jobs or cores()), start=1):
                trials[key] = [dict(zip(("table", "seed", "method"), key, strict=True)) | each for each in found]
                so_far()
                now = time.perf_counter()
                ahead = timedelta(seconds=round((now - began) / done * (len(left) - done)))
                text = f"{len(trials)} of {len(keys)} done, about {ahead} left"
                bar.update(len(trials), text)
                if not bar.console.is_terminal and now - last > QUIET:
                    last = now
                    bar.note(text)
        except KeyboardInterrupt:
            kept = f", kept in {out}: the same command resumes" if out else ""
            return so_far(unfinished=f"stopped after {len(trials)} of {len(keys)} results{kept}")
    failed = sorted({f"{name}: {method}" for (name, _, method), found in trials.items() if "failed" in found[0]})
    return so_far(failed=failed) if failed else so_far()


def _read(read: Callable[[Path], Any], path: Path, rng: np.random.Generator) -> Any:
    return read(path)


def _chosen(asked: Sequence[str], known: Mapping[str, Any], what: str) -> list[str]:
    for name in asked:
        if name not in known:
            raise NicestError(f"no {what} {name!r}; there are {', '.join(known)}{nearest(name, known)}")
    return list(dict.fromkeys(asked)) or list(known)


def _known(out: Path, comparison: Comparison, digests: Mapping[str, str]) -> dict[Key, list[Trial]]:
    """Read the trials in a file, without failed ones and those of tables that have changed."""
    found: dict[Key, list[Trial]] = {}
    if not out.exists():
        return found
    try:
        before = json.loads(out.read_text())
        same = {"comparison": comparison.name, "unit": comparison.unit, **comparison.about}
        own = all(before[key] == value for key, value in same.items())
        for trial in before["trials"] if own else ():
            if "failed" not in trial and before["digests"].get(trial["table"]) == digests.get(trial["table"]):
                found.setdefault((trial["table"], trial["seed"], trial["method"]), []).append(trial)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        own = False
    if not own:
        raise NicestError(f"{out} does not hold results of this comparison: choose another file, or remove this one")
    return found


def run_jobs(jobs: Mapping[Key, Callable[[], list[Trial]]], workers: int) -> Iterator[tuple[Key, list[Trial]]]:
    """Run each job in its own process, so that a crash affects no other, and yield its trials when it ends."""
    pool = ThreadPoolExecutor(workers)
    futures = {pool.submit(in_process, job): key for key, job in jobs.items()}
    try:
        for future in as_completed(futures):
            answer, why = future.result()
            yield futures[future], [{"failed": why}] if why else answer
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.kill()


def in_process(function: Callable[[], Any], threads: int | None = 1) -> tuple[Any, str]:
    """Call a function in a new process with this number of threads; return its answer, or the reason of its failure."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))  # then a process starts in milliseconds
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(function, threads, send))
    process.start()
    send.close()  # then the pipe closes when the process ends
    try:
        answer: tuple[Any, str] | None = receive.recv()
    except EOFError:
        answer = None
    process.join()
    code = process.exitcode or 0
    killed = f"its process was killed by signal {-code}, perhaps for want of memory" if code < 0 else "no answer"
    return answer or (None, killed)


def _work(function: Callable[[], Any], threads: int | None, send: Any) -> None:
    """Send the answer of a function; exit if the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    threading.Thread(target=end_with_parent, daemon=True).start()
    if threads:
        torch.set_num_threads(threads)
    with threadpool_limits(threads):
        try:
            send.send((function(), ""))
        except NicestError as error:
            send.send((None, one_line(error)))
        except Exception as error:
            send.send((None, f"{type(error).__name__}: {one_line(error)}"))


def _trial(
    read: Callable[[np.random.Generator], Any], run: Callable[[Any, int], Mapping[str, Figures]], seed: int
) -> list[Trial]:
    """Read a table and run a method on it; return the metrics of each of its scores."""
    torch.manual_seed(seed)
    table = read(np.random.default_rng(seed))
    about = {"n": len(table.rows), "dim": table.rows.shape[1], "left_out": list(table.left_out)}
    began = time.perf_counter()
    scores = run(table, seed)
    about["seconds"] = time.perf_counter() - began
    trials: list[Trial] = []
    for score, figures in scores.items():
        wrong = "; ".join(f"its {name} is {value}" for name, value in figures.items() if not np.isfinite(value))
        trials.append(({"score": score} if score else {}) | ({"failed": wrong} if wrong else about | figures))
    return trials


def summary(trials: Sequence[Trial], figures: Mapping[str, int], highest: bool) -> dict[str, Any]:
    """Return the means over the seeds for each table and method (`rows`), and the ranking (`standings`)."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        if "failed" not in trial:
            name = ", ".join(filter(None, (trial["method"], trial.get("score"))))
            groups.setdefault((trial["table"], name), []).append(trial)
    rows, first = [], next(iter(figures))
    for (name, method), group in groups.items():
        means = {key: float(np.mean([each[key] for each in group])) for key in figures if key in group[0]}
        deviation = float(np.std([each[first] for each in group], ddof=1)) if len(group) > 1 else None
        size = {"n": group[0]["n"], "dim": group[0]["dim"], "seeds": len(group)}
        rows.append({"table": name, "method": method, **size, **means, "sd": deviation})
    return {"rows": rows, "standings": standings(rows, first, figures[first], highest)}


def standings(rows: Sequence[Mapping[str, Any]], figure: str, digits: int, highest: bool) -> list[dict[str, Any]]:
    """Return the mean rank, wins, largest gap to the best and mean of each method over all tables.

    Values that are printed alike are ties. A method that failed on a table ranks last there and has no gap. The mean
    is over the tables on which no method failed.
    """
    tables, methods = (list(dict.fromkeys(row[key] for row in rows)) for key in ("table", "method"))
    values, sign = np.full((len(tables), len(methods)), -np.inf), 1 if highest else -1
    for row in rows:
        values[tables.index(row["table"]), methods.index(row["method"])] = sign * round(row[figure], digits)
    done = np.isfinite(values)
    best, ranks, common = values.max(1, initial=-np.inf), rankdata(-values, axis=1), values[done.all(1)]
    gaps = np.where(done, best[:, None] - values, 0)
    return [
        {
            "method": method,
            "mean_rank": float(ranks[:, i].mean()),
            "wins": int((values[:, i] == best).sum()),
            "worst_gap": float(gaps[:, i].max()),
            "worst_table": tables[int(gaps[:, i].argmax())],
            "mean": sign * float(common[:, i].mean()) if len(common) else None,
        }
        for i, method in enumerate(methods)
    ]


def markdown(result: Mapping[str, Any]) -> str:
    """Return Markdown tables of every metric, with the best of the first in bold, the ranking, and the failures."""
    places, unit = result["standings"], result["unit"]
    methods, first = [each["method"] for each in places], next(iter(result["figures"]))
    tables = dict.fromkeys(trial["table"] for trial in result["trials"])
    found = {(row["table"], row["method"]): row for row in result["rows"]}
    parts = [f"{unit}. The best is in bold; ± is the standard deviation over the seeds.\n"]
    for figure, digits in result["figures"].items():
        rows = []
        for name in tables:
            cells = [found.get((name, method), {}) for method in methods]
            sizes = [f"{cell['n']} x {cell['dim']}" for cell in cells if cell]
            texts = [_cell(cell, figure, digits) for cell in cells]
            if figure == first and sizes:
                best = (max if result["highest_is_best"] else min)(cell[figure] for cell in cells if cell)
                texts = [f"**{text}**" if text == f"{best:.{digits}f}" else text for text in texts]
                spreads = [cell.get("sd") for cell in cells]
                texts = [t if s is None else f"{t} ± {s:.{digits}f}" for t, s in zip(texts, spreads, strict=True)]
            rows.append([name, sizes[0] if sizes else "failed", *texts])
        parts.append(table([figure, "rows x columns", *methods], rows))
    digits = result["figures"][first]
    rows = [
        ["mean rank", *(f"{each['mean_rank']:.2f}" for each in places)],
        ["first places", *(f"{each['wins']} of {len(tables)}" for each in places)],
        ["largest gap to the best", *(f"{each['worst_gap']:.{digits}f} ({each['worst_table']})" for each in places)],
        [f"mean {first}", *("–" if each["mean"] is None else f"{each['mean']:.{digits}f}" for each in places)],
    ]
    parts.append(table(["over all tables", *methods], rows))
    failures: dict[str, list[str]] = {}
    for trial in result["trials"]:
        if "failed" in trial:
            text = f"Failed on {trial['table']}: {trial['failed']}"
            failures.setdefault(text, []).append(f"{trial['method']}, seed {trial['seed']}")
    return "\n".join([*parts, *(f"{why} ({'; '.join(who)})" for why, who in failures.items())]).rstrip("\n")


def _cell(cell: Mapping[str, Any], figure: str, digits: int) -> str:
    if figure not in cell:
        return "" if cell else "–"
    return f"{cell[figure]:.2g}" if figure == "seconds" and cell[figure] < 1 else f"{cell[figure]:.{digits}f}"
