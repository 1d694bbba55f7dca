"""How results are printed and drawn: Markdown tables, which can be copied into the documentation, and figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nicest.plots import ACCENT, INK, QUIET

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def line(cells: Iterable[object]) -> str:
    """Return one row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def header(cells: Sequence[object]) -> list[str]:
    """Return the header of a Markdown table and the rule below it."""
    return [line(cells), "|---" * len(cells) + "|"]


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table and an empty line."""
    print(*header(columns), *map(line, rows), "", sep="\n")


def show_bench(result: Mapping[str, Any]) -> None:
    """Print the measurements of `bench`."""
    print(f"{result['device']}, {result['precision']}, torch {result['versions']['torch']}\n")
    keys = ("net", "batch", "what", "lib")
    rows = [
        [row[k] for k in keys] + [f"{row['microseconds']:,.0f}", f"{row['floor_ratio']:.2f}"] for row in result["rows"]
    ]
    print_table(["net", "batch", "what", "library", "microseconds", "times the floor"], rows)
    starts = [[row["net"], row["batch"], row["lib"], f"{row['seconds']:.2f}"] for row in result["startup"]]
    print_table(["net", "batch", "library", "seconds to the first step"], starts)
    print(f"`import nicest` adds {result['import_ms']:.1f} ms to importing torch")
    show_out(result)


def show_cost(result: Mapping[str, Any]) -> None:
    """Print the measurements of `cost`."""
    print(f"{result['device']}, large products at {result['peak_flops'] / 1e12:.3g} TFLOP/s\n")
    steps = [
        [row["axis"], f"{row['value']:,}", f"{row['microseconds']:,.0f}", f"{row['utilisation']:.1%}"]
        for row in result["steps"]
    ]
    print_table(["size", "value", "microseconds a step", "of the device's speed"], steps)
    rows = [
        [
            row["what"],
            f"{row['n']:,}",
            f"{row['seconds']:.4f}",
            f"{row['bytes'] / 2**20:,.0f}" if "bytes" in row else "–",
        ]
        for row in result["rows"]
    ]
    print_table(["what", "rows", "seconds", "additional MiB"], rows)
    trainings = [
        [row["recipe"], f"{row['steps']:,}", f"{row['microseconds']:,.0f}", f"{row['hours']:.2f}"]
        for row in result["trainings"]
    ]
    print_table(["the paper's training", "steps", "microseconds a step", "hours"], trainings)
    show_out(result)


def show_vae(result: Mapping[str, Any]) -> None:
    """Print the bounds of the VAEs."""
    rows = [
        [
            row["model"],
            f"{row['parameters']:,}",
            with_deviation(row["test_nats"], row["test_sd"], ".1f"),
            "–" if row["model"] == "plain" else with_deviation(row["gain_nats"], row["gain_sd"], "+.1f"),
            f"{row['seconds']:.0f}",
        ]
        for row in result["rows"]
    ]
    print_table(["model", "parameters", "test bound, nats", "gain over plain", "seconds"], rows)
    show_out(result)


def with_deviation(mean: float, sd: float | None, format: str) -> str:
    """Return a mean and, if there is one, its standard deviation."""
    return f"{mean:{format}}" + ("" if sd is None else f" ± {sd:.1f}")


def show_out(result: Mapping[str, Any]) -> None:
    """Print the name of the file that was written, if any."""
    if "out" in result:
        print(f"written in {result['out']}")


def bench_figure(rows: Sequence[Mapping[str, Any]], *, title: str) -> Figure:
    """Draw the microseconds of every library, a panel for each kind of work, net and batch size."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row["what"], row["net"], row["batch"]) for row in rows))
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.6 * columns, 2.9 * lines), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    for ax, panel in zip(axes, panels, strict=False):
        chosen = [row for row in rows if (row["what"], row["net"], row["batch"]) == panel]
        floor = next(row["microseconds"] for row in chosen if row["lib"] == "floor")
        bars = sorted((row for row in chosen if row["lib"] != "floor"), key=lambda row: -row["microseconds"])
        colours = [ACCENT if row["lib"].startswith("nicest") else QUIET for row in bars]
        drawn = ax.barh([row["lib"] for row in bars], [row["microseconds"] for row in bars], color=colours)
        ax.bar_label(drawn, [f"{row['microseconds']:,.0f}" for row in bars], fontsize=8, padding=2)
        ax.axvline(floor, color=INK, linewidth=1, linestyle=":")
        ax.margins(x=0.18)
        ax.set_title(f"{panel[0]}, {panel[1]} net, batch {panel[2]}; floor {floor:,.0f}", fontsize=9)
    return figure


def cost_figure(result: Mapping[str, Any]) -> Figure:
    """Draw the time of a training step by each size, and of scoring and sampling by rows, on logarithmic axes."""
    from matplotlib.figure import Figure

    axes_of = list(dict.fromkeys(row["axis"] for row in result["steps"]))
    figure = Figure(figsize=(4.2 * (len(axes_of) + 1), 3.4), layout="constrained")
    figure.suptitle(f"{result['device']}: how cost grows")
    panels = figure.subplots(1, len(axes_of) + 1)
    for ax, axis in zip(panels, axes_of, strict=False):
        rows = [row for row in result["steps"] if row["axis"] == axis]
        values = [row["value"] for row in rows]
        ax.loglog(values, [row["microseconds"] for row in rows], "o-", color=ACCENT, label="training step")
        ideal = [row["flops"] / result["peak_flops"] * 1e6 for row in rows]
        ax.loglog(values, ideal, ":", color=INK, label="its products at full speed")
        for row in rows:
            place = (row["value"], row["microseconds"])
            ax.annotate(f"{row['utilisation']:.0%}", place, (0, 6), textcoords="offset points", fontsize=7, ha="center")
        ax.set(xlabel=axis, title=f"by {axis}", ylabel="microseconds" if axis == axes_of[0] else "")
        ax.set_xticks(values, [str(value) for value in values], fontsize=7)
        ax.minorticks_off()
        ax.margins(y=0.15)
    panels[0].legend(fontsize=8)
    for what, style in (("log_prob", "o-"), ("sample", "s--")):
        rows = [row for row in result["rows"] if row["what"] == what]
        panels[-1].loglog([row["n"] for row in rows], [row["seconds"] for row in rows], style, label=what)
    panels[-1].set(xlabel="rows", title="scoring and sampling", ylabel="seconds")
    panels[-1].legend(fontsize=8)
    return figure
