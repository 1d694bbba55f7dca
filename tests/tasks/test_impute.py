"""impute: missing cells are filled from the model, everything else stays."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nicest import Run
from nicest.tasks.impute import impute


@pytest.fixture
def holes(tmp_path: Path) -> Path:
    """Five rows with holes, an additional column, and a value that training never saw."""
    path = tmp_path / "holes.csv"
    lines = ["key,half,third,x,count", "k1,,a,2.5,2", "k2,low,,,1", "k3,high,c,10.25,", "k4,low,a,1.5,1", "k5,odd,b,,5"]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_missing_cells_are_filled_and_all_others_stay(table_run: Run, holes: Path, tmp_path: Path):
    result = impute(table_run, holes, out=tmp_path / "whole.csv")
    before, after = pd.read_csv(holes), pd.read_csv(tmp_path / "whole.csv")
    assert list(after) == list(before)
    assert after.notna().all().all()
    assert ((before == after) | before.isna()).all().all()
    assert (result.rows, result.filled, result.rows_filled, result.unknown) == (5, 5, 4, 1)
    # the columns go together: count < 6 is low, thirds are ranges of four, and x is near count
    assert list(after["half"][:1]) == ["low"]
    assert after["third"][1] == "a"
    assert after["x"][1] == pytest.approx(1, abs=2)
    assert after["count"][2] == pytest.approx(10, abs=2)


def test_the_cells_file_has_a_line_for_each_with_its_interval(table_run: Run, holes: Path, tmp_path: Path):
    impute(table_run, holes, out=tmp_path / "whole.csv", cells=tmp_path / "cells.csv", interval=0.8)
    cells, whole = pd.read_csv(tmp_path / "cells.csv"), pd.read_csv(tmp_path / "whole.csv", dtype=str)
    assert list(cells) == ["row", "column", "value", "low", "high", "probability"]
    assert list(zip(cells["row"], cells["column"], strict=True)) == [
        *((0, "half"), (1, "x"), (1, "third"), (2, "count"), (4, "x"))
    ]
    for row in cells.itertuples():
        assert str(row.value) == whole[row.column][row.row]
        if row.column in ("x", "count"):
            assert float(row.low) <= float(row.value) <= float(row.high)
        else:
            assert np.isnan(row.low)
            assert np.isnan(row.high)
        assert np.isnan(row.probability) if row.column == "x" else 0 < row.probability <= 1
    wide = tmp_path / "wide.csv"
    impute(table_run, holes, out=tmp_path / "whole.csv", cells=wide, interval=0.98)
    widths = [(t["high"].astype(float) - t["low"].astype(float))[1] for t in (cells, pd.read_csv(wide))]
    assert widths[0] < widths[1]


def test_draws_are_joint(table_run: Run, tmp_path: Path):
    """`half` and `third` are functions of the count: drawn together they agree, though each is uncertain alone."""
    path = tmp_path / "empty.csv"
    path.write_text("x,count,half,third\n" + ",,,\n" * 100)
    result = impute(table_run, path, out=tmp_path / "draws.csv", draws=3, seed=1)
    drawn = pd.read_csv(tmp_path / "draws.csv")
    assert result.draws == 3
    assert list(drawn) == ["row", "draw", "x", "count", "half", "third"]
    assert sorted(zip(drawn["row"], drawn["draw"], strict=True)) == [(i, k) for i in range(100) for k in (1, 2, 3)]
    assert ((drawn["count"] < 6) == (drawn["half"] == "low")).mean() > 0.9
    assert drawn["half"].value_counts(normalize=True)["low"] == pytest.approx(0.5, abs=0.15)
    assert (drawn["x"] - drawn["count"]).std() < 2


def test_a_seed_decides_the_draws(table_run: Run, holes: Path, tmp_path: Path):
    texts = []
    for seed in (1, 1, 2):
        impute(table_run, holes, out=tmp_path / "d.csv", draws=2, seed=seed)
        texts.append((tmp_path / "d.csv").read_text())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        ("x,count,half,third\n", {}, "expected rows to impute"),
        ("x,count,half\n1,2,low\n", {}, "lacks 'third'"),
        ("x,count,half,third\na,2,low,b\n", {}, "expected numbers in column 'x'"),
        ("x,count,half,third\n,2,low,b\n", {"interval": 1.0}, "between 0 and 1"),
        ("x,count,half,third\n,2,low,b\n", {"out": "whole.txt"}, "expected a table"),
        ("x,count,half,third\n,2,low,b\n", {"cells": "w.csv"}, "two files"),
        ("x,count,half,third\n,2,low,b\n", {"cells": "c.csv", "draws": 2}, "leave out one of them"),
    ],
)
def test_refusals_leave_nothing_behind(
    table_run: Run, tmp_path: Path, refusal: Callable[..., str], content: str, options: dict, says: str
):
    path = tmp_path / "t.csv"
    path.write_text(content)
    named = {key: tmp_path / value if key in ("out", "cells") else value for key, value in options.items()}
    assert says in refusal(impute, table_run, path, **({"out": tmp_path / "w.csv"} | named))
    assert list(tmp_path.iterdir()) == [path]


def test_images_are_no_table(digits_run: Run, holes: Path, tmp_path: Path, refusal: Callable[..., str]):
    assert "not a model of a table" in refusal(impute, digits_run, holes, out=tmp_path / "w.csv")
