"""Results as people read them."""

from __future__ import annotations

import math
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

from nicest.messages import listed, printable

NUMBERS = {"nats", "this model is ahead by", "D", "examples", "paper, nats", "measured, nats"}
NUMBERS |= {"start, nats", "end, nats", "truth, nats", "gain, nats", "above truth", "kept", "NICE", "PCA"}


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in NUMBERS else "left")
    return table


def _print(*items: Any) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for item in items:
        console.print(item)


def training(result: dict[str, Any], *, last: bool = True) -> None:
    if not result["finished"]:
        return print(f"stopped at step {result['step']}, all saved in {result['run']}: --resume continues it")
    best = f"{result['best_nats']:.2f} nats on validation, epoch {result['best_epoch']} of {result['epochs']}"
    print(f"{result['run']}: best {best}, {result['seconds']:.0f} s")
    return print(f"next: nicest evaluate {shlex.quote(result['run'])}") if last else None


def models(result: dict[str, Any]) -> None:
    if result["whole"]:
        for name, value in result["models"][0].items():
            print(f"{name.replace('_', ' ')}: {value}")
        return
    table = _table("model", "test nats", "bits/dim", "MB", "what it is")
    for row in result["models"]:
        nats = f"{row['test_nats']:.2f} ± {row['test_stderr']:.2f}"
        table.add_row(row["name"], nats, f"{row['bits_per_dim']:.3f}", f"{row['bytes'] / 1e6:.1f}", row["about"])
    _print(table)
    print("nicest models NAME prints the card of one; nicest sample NAME, studio NAME and the others take the name")


def packed(result: dict[str, Any]) -> None:
    nats = f"{result['test_nats']:.2f} ± {result['test_stderr']:.2f} nats on {result['test_rows']:,} test rows"
    print(f"{result['out']}: {result['bytes'] / 1e6:.1f} MB, {nats}")


def pushed(result: dict[str, Any]) -> None:
    nats = f"{result['test_nats']:.2f} ± {result['test_stderr']:.2f} nats on {result['test_rows']:,} test rows"
    print(f"{result['repo']}, revision {result['revision']}: {result['bytes'] / 1e6:.1f} MB, {nats}")


def pulled(result: dict[str, Any]) -> None:
    print(f"{result['out']}: {result['about']}")
    pushed(result)


def exported(result: dict[str, Any]) -> None:
    for name, each in result["graphs"].items():
        error = f"differs from the flow by {each['largest_error']:.1e} at most"
        print(f"{Path(result['out'], each['file'])}: {name}({', '.join(each['inputs'])}), {error}")


def scores(result: dict[str, Any]) -> None:
    without = result["missing"] + result["unknown"]
    of = f" of {result['rows'] - without:,} rows" if without else ""
    mean = "" if result["mean_nats"] is None else f"; mean log-density{of}: {result['mean_nats']:.3f} nats"
    rows = "1 row" if result["rows"] == 1 else f"{result['rows']:,} rows"
    print(f"{rows} scored in {result['out']}{mean}")
    if result["missing"]:
        print(f"{result['missing']:,} rows have missing cells and no score: `nicest impute` fills them in")
    if result["unknown"]:
        print(
            f"{result['unknown']:,} rows hold a value that training never saw, or one far out of range: they score -inf"
        )
    print(result["caveat"])


def compressed(result: dict[str, Any]) -> None:
    if "bits_per_dim" in result:
        rows, each = "images", f"{result['bits_per_dim']:.3f} bits/dim"
    else:
        rows, each = "rows", f"{result['bytes_per_row'] or 0:.2f} bytes a row"
    size = f"{result['bytes']:,} bytes, {each}, from {result['raw_bytes']:,} bytes"
    print(f"{result['rows']:,} {rows} in {result['out']}: {size}")
    if result.get("stored_rows"):
        print(f"{result['stored_rows']:,} rows hold what the model has no code for; they are stored as they are")
    print(f"to decompress, keep the model: {result['model_bytes'] / 1e6:.1f} MB")


def decompressed(result: dict[str, Any]) -> None:
    print(f"{result['rows']:,} rows in {result['out']}")
    if "failed" in result:
        print(f"{result['lost_rows']:,} rows are lost: {result['failed']}")


def samples(result: dict[str, Any]) -> None:
    print(f"{result['n']} samples in {result['out']}")
    if result.get("share") is not None:
        print(f"{result['share']:.2g} of the model's rows meet the conditions")
    if "r_hat" in result and not result["mixed"]:
        print(f"the chains do not agree (R-hat {result['r_hat']:.2f}): groups of rows may be too frequent or too rare")


def imputation(result: dict[str, Any]) -> None:
    print(f"{result['filled']:,} cells of {result['rows_filled']:,} rows imputed in {result['out']}")
    if result["unknown"]:
        print(f"{result['unknown']:,} rows hold a value that training never saw, and were left as they are")
    if result["not_mixed"]:
        print(f"the chains of {result['not_mixed']:,} rows did not agree (R-hat above 1.1): use more --steps")


def evaluation(result: dict[str, Any]) -> None:
    from nicest.tasks.evaluate import WHY_POSITIVE, WHY_POSITIVE_CONTINUOUS

    unit = f"on {result['interval']}" if result["interval"] else "in the units of the data"
    ledger = _table("", "nats")
    for name, value in result["terms"].items():
        ledger.add_row(name, f"{value:+.2f}")
    error = f" ± {result['stderr_nats']:.2f}" if math.isfinite(result["stderr_nats"]) else ""
    ledger.add_row(f"[bold]log-likelihood {unit}[/]", f"[bold]{result['mean_nats']:.2f}{error}[/]")
    for name, value in result["level_terms"].items():
        ledger.add_row(name, f"{value:+.2f}")
    if result["level_terms"]:
        ledger.add_row("log-likelihood of the levels", f"{result['level_nats']:.2f}")
    ledger.add_row("[bold]bits/dim[/]", f"[bold]{result['bits_per_dim']:.4f}[/]")
    beside = _table("baseline", "nats", "this model is ahead by")
    rows = {name.replace("_", " "): nats for name, nats in result["baselines"].items()}
    if result["paper_nats"] is not None:
        rows["the paper's figure"] = result["paper_nats"]
    for name, nats in rows.items():
        if math.isfinite(nats):
            beside.add_row(name, f"{nats:.2f}", f"{result['mean_nats'] - nats:+.2f}")
        else:
            beside.add_row(name, "–", "dependent columns, or too few rows")
    data = f"{Path(result['dataset']).name}, {result['split']} split"
    noise = f", noise drawn {result['draws']} times" if result["draws"] > 1 else ""
    print(f"{data}: {result['n']} examples{noise}, D = {result['dim']}")
    if result.get("target"):
        print(f"the log-likelihood is that of {listed(result['target'])} given the other columns")
    _print("", ledger, "", *([beside, ""] if rows else []))
    _print(WHY_POSITIVE if result["interval"] else WHY_POSITIVE_CONTINUOUS)
    if result["non_finite"]:
        _print(f"[bold red]{result['non_finite']} examples have a non-finite likelihood, and so has the mean[/]")


def predictions(result: dict[str, Any]) -> None:
    print(f"{result['rows']:,} rows predicted in {result['out']}: {', '.join(map(printable, result['targets']))}")
    if result["unseen"]:
        print(f"{result['unseen']:,} given cells hold a value that training never saw: they count as missing")
    if result["mean_nats"] is not None:
        print(f"observed targets: mean log-density {result['mean_nats']:.3f} nats")
    if result["unknown"]:
        print(f"{result['unknown']:,} rows hold a target value that training never saw, which that mean leaves out")
    for name, row in result["targets"].items():
        if "accuracy" in row:
            print(f"{printable(name)}: the most probable value is right in {row['accuracy']:.1%} of the rows")
        elif row:
            held = f"{result['level']:.0%} intervals hold {row['coverage']:.1%} of the rows"
            print(f"{printable(name)}: RMSE of the mean {row['rmse']:.4g}; {held}")


def classification(result: dict[str, Any]) -> None:
    print(f"{result['n']:,} images classified in {result['out']}")
    if "accuracy" in result:
        figures = f"negative log-likelihood {result['nll']:.3f} nats, calibration error {result['ece']:.3f}"
        print(f"accuracy {result['accuracy']:.2%}, {figures} ({result['split']} split)")


def calibration(result: dict[str, Any]) -> None:
    from rich.markup import escape

    print(result["verdict"])
    levels = _table("intervals", "cells inside", "chance allows")
    for row in result["coverage"]:
        levels.add_row(f"{row['level']:.0%}", f"{row['share']:.1%}", f"{row['low']:.1%} to {row['high']:.1%}")
    pits = _table("PIT of", "KS distance", "chance allows", "p-value")
    parts = {"log-density": result["log_density"], f"latent coordinates, worst of {result['dim']}": result["codes"]}
    for name, row in (parts | dict(list(result["columns"].items())[:5])).items():
        pits.add_row(escape(printable(name)), f"{row['ks']:.3f}", f"{row['limit']:.3f}", f"{row['p']:.2g}")
    _print("", *([levels, ""] if result["coverage"] else []), pits, "")
    rest = len(result["columns"]) - 5
    of = f"{result['rows']:,} rows of {Path(result['data']).name}, {result['samples']:,} samples of the model"
    print(of + (f", {result['cells']:,} cells" if result["cells"] else ""))
    if rest > 0:
        print(f"the other columns ({rest}) are closer to uniform")
    if result["missing"]:
        print(f"{result['missing']:,} rows have missing cells, and were left out")
    if result["unknown"]:
        print(f"{result['unknown']:,} rows hold a value that training never saw, and were left out")
    if result["not_mixed"]:
        print(f"the chains of {result['not_mixed']:,} cells did not agree (R-hat above 1.1): use more --steps")
    print("written:", *result["out"])


def certificate(result: dict[str, Any]) -> None:
    table = _table("precision", "round trip, worst", "round trip, mean", "log-det error, nats")
    columns = (result[name] for name in ("dtype", "max_roundtrip", "mean_roundtrip", "max_logdet_error"))
    for precision, *errors in zip(*columns, strict=True):
        table.add_row(precision, *(f"{each:.1e}" for each in errors))
    data = Path(result["dataset"]).name
    print(f"{data}: round trip of {result['n']} examples, half data, half samples; {result['jacobians']} Jacobians")
    _print("", table, "")


def inpainting(result: dict[str, Any]) -> None:
    from rich.markup import escape

    if result["draws"]:
        drawn_fillings(result)
        return
    table = _table("mask", "start, nats", "end, nats", "truth, nats", "gain, nats", "above truth")
    for row in result["masks"]:
        means = (f"{row[f'mean_{name}_nats']:.2f}" for name in ("start", "end", "truth"))
        count = f"{row['images_above_truth']} of {len(row['images'])}"
        table.add_row(escape(row["mask"]), *means, f"{row['mean_gain_nats']:+.2f}", count)
    print(f"{_inpainted(result)}, noise {result['noise']:g}")
    _print("", table, "")
    print("Nats are means. Above truth: the best chain ends with a higher log-likelihood than the original.")
    print(f"written in {result['seconds']:.1f} s:", *result["out"])


def drawn_fillings(result: dict[str, Any]) -> None:
    from rich.markup import escape

    table = _table("mask", "draws, nats", "truth, nats", "moves taken", "largest R-hat")
    for row in result["masks"]:
        taken = statistics.fmean(row["acceptance"])
        means = (f"{row[f'mean_{name}_nats']:.2f}" for name in ("end", "truth"))
        table.add_row(escape(row["mask"]), *means, f"{taken:.0%}", f"{max(row['r_hat']):.2f}")
    print(_inpainted(result))
    _print("", table, "")
    print("Nats are means. R-hat near 1: the chains of every image agree, and their draws are of the whole density.")
    print(f"written in {result['seconds']:.1f} s:", *result["out"])


def _inpainted(result: dict[str, Any]) -> str:
    source = "samples" if result["split"] == "samples" else f"{result['split']} split"
    many = f"{result['n']} images under each mask, chains {result['chains']}; {result['steps']} steps"
    return f"{Path(result['dataset']).name}, {source}: {many}"


def truncation(result: dict[str, Any]) -> None:
    table = _table("kept", "NICE", "PCA")
    for k, *errors in zip(result["kept"], result["nice_errors"], result["pca_errors"], strict=True):
        table.add_row(str(k), *(f"{error:.5f}" for error in errors))
    print(f"mean squared error of {result['examples']} images of the {result['split']} split")
    _print("", table, "")
    print(f"truncate in {result['out']}")


def demo(result: dict[str, Any]) -> None:
    if "training" not in result:  # it was interrupted
        return training(result)
    training(result["training"], last=False)
    evaluation(result["evaluation"])
    certificate(result["certificate"])
    print("figures:", *result["figures"], sep="\n  ")
    print("(mnist-*.png are drawn by two models of MNIST that come with nicest)")
    return print(f"next: nicest studio {shlex.quote(result['training']['run'])} --open")


def results(result: dict[str, Any]) -> None:
    from nicest.tasks.reproduce import why

    rows = _table("recipe", "settings", "paper, nats", "ours, nats", "bits/dim", "seeds", "minutes each")
    for row in result["rows"]:
        paper = f"{row['paper_nats']:.2f}" if row["paper_nats"] else "–"
        if "runs" not in row:
            rows.add_row(row["recipe"], row["reading"], paper, why(row), "", "", "")
            continue
        spread = row["test_stderr"] if row["test_sd"] is None else row["test_sd"]
        minutes = row["train_seconds"] / 60
        figures = f"{row['test_mean_nats']:.1f} ± {spread:.1f}", f"{row['bits_per_dim']:.4f}", str(row["seeds"])
        name = row["recipe"] + (" (augmented)" if row["augmented"] else "")
        rows.add_row(name, row["reading"], paper, *figures, f"{minutes:.1f}")
    _print(rows)
    print(f"results in {result['out']}")
    for name, reason in result.get("failed", {}).items():
        print(f"{name} failed: {reason}", file=sys.stderr)


def figures(result: dict[str, Any]) -> None:
    for row in result["recipes"]:
        print(f"{row['recipe']}:", *row.get("figures", [row.get("missing") or row.get("unfinished")]), sep="\n  ")


def recipes(result: dict[str, Any]) -> None:
    if "toml" in result:
        return print(result["toml"], end="")
    table = _table("recipe", "reading", "paper, nats", "measured, nats", "what it is")
    for row in result["recipes"]:
        figures = [f"{row[key]:.2f}" if row[key] is not None else "–" for key in ("paper_nats", "expected_nats")]
        table.add_row(row["name"], row["reading"], *figures, row["title"])
    return _print(table)


def sets(result: dict[str, Any]) -> None:
    table = _table("data set", "D", "examples", "here", "what it is")
    for row in result["sets"]:
        table.add_row(row["name"], str(row["dim"]), str(row["n"]), "yes" if row["present"] else "no", row["title"])
    _print(table)


def check(result: dict[str, Any]) -> None:
    for row in result["files"]:
        print(f"{row['status']:8} {row['file']}")
    if any(row["status"] == "rebuilt" for row in result["files"]):
        print("rebuilt: the same images, cut anew from the originals; not the published bytes")
    if not result["files"]:
        print(f"{result['name']} comes with nicest: nothing to check")
