"""The common part of the comparisons: jobs in worker processes, results written as they arrive, rankings."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata
from threadpoolctl import threadpool_limits

from benchmarks.datasets import Read, Table, read_file, tables_in
from benchmarks.report import header, line
from nicest.errors import NicestError
from nicest.files import require_writable, to_json, write_text
from nicest.inference.workers import end_with_parent
from nicest.messages import nearest, one_line
from nicest.progress import Bar
from nicest.runs.runtime import choose_device, environment

Figures = dict[str, float]
Key = tuple[str, int, str]  # table, seed, method
Run = Callable[[Table, int], Mapping[str, Figures]]
NONE: Mapping[str, Any] = MappingProxyType({})
PRELOADED = (
    "torch._dynamo",
    *(
        f"benchmarks.compare_{name}"
        for name in ("density", "outliers", "imputation", "posteriors", "regression", "synthesis")
    ),
)
QUIET = 30  # seconds between two lines of progress if there is no terminal


class Comparison(NamedTuple):
    """Methods, tables, and `trial(method, table, seed)`, which returns the metrics of each score of a method.

    `figures` maps the metrics to their digits; the first one decides which method is best. `absent` maps methods that
    cannot run here to the reason. `about` goes into the results. `read` reads a file. Everything must be picklable,
    because trials run in other processes.
    """

    name: str
    unit: str
    figures: Mapping[str, int]
    highest: bool
    tables: Mapping[str, Callable[[np.random.Generator], Any]]  # their results have `rows` and `left_out`
    methods: Mapping[str, Any]
    trial: Callable[[Any, Any, int], Mapping[str, Figures]]
    absent: Mapping[str, str] = NONE
    about: Mapping[str, Any] = NONE
    read: Callable[[Path], Table] = read_file


def compare(
    comparison: Comparison,
    *,
    data: Path | None = None,
    tables: Sequence[str] = (),
    methods: Sequence[str] = (),
    seeds: int = 2,
    jobs: int = 0,
    out: Path | None = None,
) -> dict[str, Any]:
    """Run every method on `seeds` splits of every table, `jobs` at a time, and rank the methods.

    `data` is a folder of tables. `out` is written after every job; a later run with the same `out` keeps its trials
    and runs the rest. A failed job is recorded as a trial with the reason.
    """
    files = tables_in(data) if data else {}
    names = _chosen(tables, files or comparison.tables, "table")
    for name in methods:
        if name in comparison.absent:
            raise NicestError(f"cannot run {name}: {comparison.absent[name]}")
    chosen = _chosen(methods, comparison.methods, "method")
    digests = {name: hashlib.sha256(files[name].read_bytes()).hexdigest() for name in names if data}
    keys = [(name, seed, method) for name in names for seed in range(seeds) for method in chosen]
    known = {} if out is None else _known(out, comparison, digests)
    trials = {key: known[key] for key in keys if key in known}
    left = [key for key in keys if key not in trials]
    if data:  # the largest tables first, so that nothing waits for a long job at the end
        left.sort(key=lambda key: -files[key[0]].stat().st_size)
    work = {
        key: (
            partial(_read, comparison.read, files[key[0]]) if data else comparison.tables[key[0]],
            partial(comparison.trial, comparison.methods[key[2]]),
        )
        for key in left
    }
    result = environment(choose_device("cpu")) | {
        "comparison": comparison.name,
        "unit": comparison.unit,
        "figures": dict(comparison.figures),
        "highest_is_best": comparison.highest,
        "seeds": seeds,
        "data": data,
        "digests": digests,
        "absent": dict(comparison.absent),
        **comparison.about,
    }

    def so_far(**more: Any) -> dict[str, Any]:
        found = [trial for key in keys for trial in trials.get(key, ())]
        told = result | summary(found, comparison.figures, comparison.highest) | {"trials": found} | more
        if out is not None:
            write_text(out, to_json(told))
        return told

    with Bar(f"comparing {comparison.name}", len(keys), len(trials)) as bar:
        if out is not None:
            require_writable(out)
        for name, why in ({} if methods else comparison.absent).items():
            bar.note(f"without {name}: {why}")
        if trials:
            kept = f"{out} already holds {len(trials)} of {len(keys)} results"
            bar.note(f"{kept}: {len(left)} left to run; remove the file to run all of them again")
        began = last = time.perf_counter()
        try:
            for done, (key, found) in enumerate(run_jobs(work, jobs or os.cpu_count() or 1), start=1):
                trials[key] = found
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


def _read(read: Callable[[Path], Table], path: Path, rng: np.random.Generator) -> Table:
    return read(path)


def _chosen(asked: Sequence[str], known: Mapping[str, Any], what: str) -> list[str]:
    for name in asked:
        if name not in known:
            raise NicestError(f"no {what} {name!r}; there are {', '.join(known)}{nearest(name, known)}")
    return list(dict.fromkeys(asked)) or list(known)


def _known(out: Path, comparison: Comparison, digests: Mapping[str, str]) -> dict[Key, list[dict[str, Any]]]:
    """Read the trials in a file, by job, without failed ones and those of tables that have changed."""
    if not out.exists():
        return {}
    found: dict[Key, list[dict[str, Any]]] = {}
    try:
        before = json.loads(out.read_text())
        same = {**comparison.about, "comparison": comparison.name, "unit": comparison.unit}
        own = all(before[key] == value for key, value in same.items())
        for trial in before["trials"] if own else ():
            if "failed" not in trial and before["digests"].get(trial["table"]) == digests.get(trial["table"]):
                found.setdefault((trial["table"], trial["seed"], trial["method"]), []).append(trial)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        own = False
    if not own:
        raise NicestError(f"{out} does not hold results of this comparison: choose another file, or remove this one")
    return found


def run_jobs(jobs: Mapping[Key, tuple[Read, Run]], workers: int) -> Iterator[tuple[Key, list[dict[str, Any]]]]:
    """Run each job in its own process, so that a crash affects no other, and yield its trials when it ends."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))  # then a process starts in milliseconds
    queue, running = list(jobs)[::-1], dict[Any, tuple[Key, Any]]()
    try:
        while queue or running:
            while queue and len(running) < workers:
                key = queue.pop()
                receive, send = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(*jobs[key], key[1], send))
                process.start()
                send.close()  # then the pipe closes when the process ends
                running[receive] = key, process
            ready: Any
            for ready in connection.wait(list(running)):
                key, process = running.pop(ready)
                try:
                    answer = ready.recv()
                except EOFError:
                    answer = []
                process.join()
                code = process.exitcode
                why = (
                    f"its process was killed by signal {-code}, perhaps for want of memory" if code < 0 else "no answer"
                )
                about = dict(zip(("table", "seed", "method"), key, strict=True))
                yield key, [about | each for each in answer or [{"failed": why}]]
    finally:
        for _, process in running.values():
            process.kill()


def _work(read: Read, run: Run, seed: int, send: Any) -> None:
    """Run a job on one thread and send its trials; exit if the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    with threadpool_limits(1):
        try:
            table = read(np.random.default_rng(seed))
            about: dict[str, Any] = {"n": len(table.rows), "dim": table.rows.shape[1], "left_out": list(table.left_out)}
            began = time.perf_counter()
            scores = run(table, seed)
            about["seconds"] = time.perf_counter() - began
            send.send([_trial(name, about, figures) for name, figures in scores.items()])
        except NicestError as error:
            send.send([{"failed": one_line(error)}])
        except Exception as error:
            send.send([{"failed": f"{type(error).__name__}: {one_line(error)}"}])


def _trial(score: str, about: Mapping[str, Any], figures: Figures) -> dict[str, Any]:
    wrong = [f"its {name} is {value}" for name, value in figures.items() if not np.isfinite(value)]
    return ({"score": score} if score else {}) | ({"failed": "; ".join(wrong)} if wrong else {**about, **figures})


def summary(trials: Sequence[Mapping[str, Any]], figures: Mapping[str, int], highest: bool) -> dict[str, Any]:
    """Return the means over the seeds for each table and method (`rows`), and the ranking (`standings`)."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for trial in trials:
        if "failed" not in trial:
            name = ", ".join(filter(None, (trial["method"], trial.get("score"))))
            groups.setdefault((trial["table"], name), []).append(trial)
    rows, first = [], next(iter(figures))
    for (table, method), group in groups.items():
        means = {key: float(np.mean([each[key] for each in group])) for key in figures if key in group[0]}
        spread = float(np.std([each[first] for each in group], ddof=1)) if len(group) > 1 else None
        size = {"n": group[0]["n"], "dim": group[0]["dim"], "seeds": len(group)}
        rows.append({"table": table, "method": method, **size, **means, "sd": spread})
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
    places = result["standings"]
    methods, first = [each["method"] for each in places], next(iter(result["figures"]))
    tables = dict.fromkeys(trial["table"] for trial in result["trials"])
    found = {(row["table"], row["method"]): row for row in result["rows"]}
    lines = [f"{result['unit']}. The best is in bold; ± is the standard deviation over the seeds."]
    for figure, digits in result["figures"].items():
        lines += ["", *header([figure, "rows x columns", *methods])]
        for table in tables:
            cells = [found.get((table, method), {}) for method in methods]
            sizes = [f"{cell['n']} x {cell['dim']}" for cell in cells if cell]
            texts = [_cell(cell, figure, digits) for cell in cells]
            if figure == first and sizes:
                best = (max if result["highest_is_best"] else min)(cell[figure] for cell in cells if cell)
                texts = [f"**{text}**" if text == f"{best:.{digits}f}" else text for text in texts]
                spreads = [cell.get("sd") for cell in cells]
                texts = [t if s is None else f"{t} ± {s:.{digits}f}" for t, s in zip(texts, spreads, strict=True)]
            lines.append(line([table, sizes[0] if sizes else "failed", *texts]))
    digits = result["figures"][first]
    lines += ["", *header(["over all tables", *methods])]
    lines.append(line(["mean rank", *(f"{each['mean_rank']:.2f}" for each in places)]))
    lines.append(line(["first places", *(f"{each['wins']} of {len(tables)}" for each in places)]))
    gaps = (f"{each['worst_gap']:.{digits}f} ({each['worst_table']})" for each in places)
    lines.append(line(["largest gap to the best", *gaps]))
    lines.append(
        line([f"mean {first}", *(_cell({} if each["mean"] is None else each, "mean", digits) for each in places)])
    )
    failures: dict[str, list[str]] = {}
    for trial in result["trials"]:
        if "failed" in trial:
            text = f"Failed on {trial['table']}: {trial['failed']}"
            failures.setdefault(text, []).append(f"{trial['method']}, seed {trial['seed']}")
    return "\n".join(
        [*lines, *([""] if failures else []), *(f"{why} ({'; '.join(who)})" for why, who in failures.items())]
    )


def _cell(cell: Mapping[str, Any], figure: str, digits: int) -> str:
    if figure not in cell:
        return "" if cell else "–"
    return f"{cell[figure]:.2g}" if figure == "seconds" and cell[figure] < 1 else f"{cell[figure]:.{digits}f}"
