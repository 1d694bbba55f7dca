"""Results of benchmarks: where they were made, as JSON, and as Markdown tables that fit into the documentation."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nicest.files import to_json, write_text
from nicest.inference.workers import cores
from nicest.runs.runtime import environment
from nicest.tasks.results import Result

Found = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Report(Result):
    """What a benchmark found, and how to print it."""

    found: Found
    text: Callable[[Found], str]

    @property
    def exit_code(self) -> int:
        return 130 if "unfinished" in self.found else int("failed" in self.found)

    def lines(self) -> Iterator[Any]:
        yield self.text(self.found)
        yield from (self.found[key] for key in ("caveat", "unfinished") if key in self.found)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.found)


def report(found: Found, text: Callable[[Found], str], out: Path | None) -> Report:
    """Return a report, written as JSON to `out` if there is one."""
    if out is not None:
        write_text(out, to_json(found))
    return Report(found=found, text=text)


def origin(device: torch.device) -> dict[str, Any]:
    """Describe the command, the commit, the date, the machine and the versions."""
    command = f"python -m benchmarks {shlex.join(sys.argv[1:])}" if sys.argv[0].endswith("__main__.py") else None
    return environment(device) | {"command": command, "cores": cores(), "cpu": processor()}


def processor() -> str | None:
    """Return the name of the processor, where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((each.partition(":")[2].strip() for each in lines if each.startswith("model name")), None)


def line(cells: Iterable[object]) -> str:
    """Return one row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table and an empty line."""
    return "\n".join([line(columns), "|---" * len(columns) + "|", *map(line, rows), ""])


def bench_text(found: Found) -> str:
    """Return the measurements of `bench` as text."""
    keys = ("net", "batch", "what", "lib")
    rows = [[*(row[k] for k in keys), f"{row['microseconds']:,.0f}", f"{row['floor_ratio']:.2f}"] for row in found["rows"]]
    starts = [[row["net"], row["batch"], row["lib"], f"{row['seconds']:.2f}"] for row in found["startup"]]
    return "\n".join(
        [
            f"{found['device']}, {found['precision']}, torch {found['versions']['torch']}\n",
            table(["net", "batch", "what", "library", "microseconds", "times the floor"], rows),
            table(["net", "batch", "library", "seconds to the first step"], starts),
            f"`import nicest` adds {found['import_ms']:.1f} ms to importing torch",
        ]
    )


def cost_text(found: Found) -> str:
    """Return the measurements of `cost` as text."""
    steps = [
        [row["axis"], f"{row['value']:,}", f"{row['microseconds']:,.0f}", f"{row['utilisation']:.1%}"]
        for row in found["steps"]
    ]
    rows = [
        [row["what"], f"{row['n']:,}", f"{row['seconds']:.4f}", f"{row.get('bytes', math.nan) / 2**20:,.0f}"]
        for row in found["rows"]
    ]
    trainings = [
        [row["recipe"], f"{row['steps']:,}", f"{row['microseconds']:,.0f}", f"{row['hours']:.2f}"]
        for row in found["trainings"]
    ]
    return "\n".join(
        [
            f"{found['device']}, large products at {found['peak_flops'] / 1e12:.3g} TFLOP/s\n",
            table(["size", "value", "microseconds a step", "of the device's speed"], steps),
            table(["what", "rows", "seconds", "additional MiB"], rows),
            table(["the paper's training", "steps", "microseconds a step", "hours"], trainings),
        ]
    )


def vae_text(found: Found) -> str:
    """Return the bounds of the VAEs as text."""

    def mean(row: Found, name: str, form: str) -> str:
        sd = "" if row[f"{name}_sd"] is None else f" ± {row[f'{name}_sd']:.1f}"
        return "–" if row[f"{name}_nats"] is None else f"{row[f'{name}_nats']:{form}}{sd}"

    rows = [
        [row["model"], f"{row['parameters']:,}", mean(row, "test", ".1f"), mean(row, "gain", "+.1f"), f"{row['seconds']:.0f}"]
        for row in found["rows"]
    ]
    return table(["model", "parameters", "test bound, nats", "gain over plain", "seconds"], rows)


def speed_text(found: Found) -> str:
    """Return the measurements of `table-speed` as text."""
    keys = [key for key in found["rows"][0] if key not in ("rows", "case")]
    rows = [[row["case"], f"{row['rows']:,}", *(f"{row[key]:.1f}" for key in keys)] for row in found["rows"]]
    return table(["threads", "training rows", *keys], rows)
