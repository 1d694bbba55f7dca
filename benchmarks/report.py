"""Results of benchmarks: where they were made, as JSON, and as Markdown tables that fit into the documentation."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from nicest.files import to_json, write_text
from nicest.inference.workers import cores
from nicest.runs.runtime import environment
from nicest.tasks import options
from nicest.tasks.results import Result

Found = Mapping[str, Any]
Out = Annotated[Path | None, options.out_file("A JSON file of the results.", show_default=False)]
Windows = Annotated[int, options.integer(1, 1000, "Number of time windows; the median is reported.")]
Seconds = Annotated[float, options.real(0, 60, "Length of a window in seconds.")]


def tables(found: Found) -> str:
    """Return all lists of dictionaries as Markdown tables."""
    rows = [value for value in found.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    each = [list(dict.fromkeys(key for row in some for key in row)) for some in rows]
    return "\n".join(
        table(keys, [[cell(row.get(key, "")) for key in keys] for row in some])
        for keys, some in zip(each, rows, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class Report(Result):
    """What a benchmark found, where it was made, and how it is printed; written as JSON to `out` if there is one."""

    found: Found
    text: Callable[[Found], str] = tables
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.out is not None:
            write_text(self.out, to_json(self.to_dict()))

    @property
    def exit_code(self) -> int:
        return 130 if "unfinished" in self.found else int("failed" in self.found)

    def lines(self) -> Iterator[Any]:
        yield from (f"{self.found['device']}, torch {self.found['versions']['torch']}", "")
        yield from self.text(self.found).splitlines()
        yield from (self.found[key] for key in ("caveat", "unfinished") if key in self.found)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.found)


def origin(device: torch.device) -> dict[str, Any]:
    """Describe the command, the commit, the date, the machine and the versions."""
    program = Path(sys.argv[0])
    module = "benchmarks" if program.stem == "__main__" else f"benchmarks.{program.stem}"
    command = f"python -m {module} {shlex.join(sys.argv[1:])}" if program.parent.name == "benchmarks" else None
    info = Path("/proc/cpuinfo")
    names = [each for each in info.read_text().splitlines() if "model name" in each] if info.exists() else []
    cpu = names[0].partition(":")[2].strip() if names else None
    return environment(device) | {"command": command, "cores": cores(), "cpu": cpu}


def table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table and an empty line."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join([*(f"| {' | '.join(map(str, cells))} |" for cells in lines), ""]).replace("| --- ", "|---")


def cell(value: object) -> str:
    """Return a number with few digits, or anything else as it is."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
