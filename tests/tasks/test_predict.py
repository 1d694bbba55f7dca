"""Predictions of columns of a table from the others: what is written, for every kind of target, and what is refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyarrow import feather, parquet
from typer.testing import CliRunner

import nicest
from nicest import Run
from nicest.cli import app
from nicest.inference.predictive import Predictive
from nicest.recipes import load_recipe
from nicest.tasks import predict as task
from nicest.tasks.predict import predict
from nicest.train.fit import train

Refusal = Callable[..., str]
SMALL = (
    "train.effort=low",
    "train.epochs=3",
    "train.evaluate_every=1",
    "train.lr=0.01",
    "train.warmup=0",
    "model.width=8",
    "model.members=2",
)
TARGETS = {"price": ["price"], "rooms": ["rooms"], "kind": ["kind"], "sold": ["sold"], "day": ["day"]}
TARGETS |= {"several": ["price", "rooms", "kind"]}


def houses(n: int, seed: int = 0) -> pd.DataFrame:
    """Prices go with the size and the kind; rooms with the size; texts and booleans, dates."""
    rng = np.random.default_rng(seed)
    size, kind = rng.gamma(9, 12, n), rng.choice(["flat", "house", "villa"], n, p=[0.5, 0.4, 0.1])
    price = 3 * size * np.select([kind == "flat", kind == "house"], [1.0, 1.3], 2.0) * np.exp(0.1 * rng.normal(size=n))
    return pd.DataFrame(
        {
            "size": size,
            "price": price,
            "kind": kind,
            "rooms": np.clip(np.round(size / 25 + rng.normal(size=n) * 0.5), 1, None).astype(int),
            "sold": rng.random(n) < 0.3,
            "day": np.datetime64("2024-01-01") + (size * 2).astype(int).astype("timedelta64[D]"),
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    rows = houses(300).assign(day=houses(300)["day"].dt.date)
    rows.to_parquet(folder / "houses.parquet")
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> Callable[[str], Run]:
    """A run for each of the TARGETS, trained when it is first asked for."""
    made: dict[str, Run] = {}

    def run(name: str) -> Run:
        if name not in made:
            settings = (f"data.name={folder / 'houses.parquet'}", f"data.target={json.dumps(TARGETS[name])}", *SMALL)
            train(load_recipe("table"), folder / name, overrides=settings, device="cpu", callbacks=[])
            made[name] = nicest.open(folder / name)
        return made[name]

    return run


def write(path: Path, rows: pd.DataFrame) -> Path:
    if path.suffix == ".csv":
        rows.to_csv(path, index=False)
    else:
        table = pa.Table.from_pandas(rows, preserve_index=False)
        parquet.write_table(table, path) if path.suffix == ".parquet" else feather.write_feather(table, path)
    return path


def read(path: Path) -> pd.DataFrame:
    by = {".csv": pd.read_csv, ".parquet": pd.read_parquet}
    return by.get(path.suffix, lambda path: feather.read_table(path).to_pandas())(path)


class TestNumbers:
    def test_are_those_of_the_distribution(self, runs: Callable[[str], Run], tmp_path: Path):
        run, new = runs("price"), houses(50, 1)
        result = predict(run, write(tmp_path / "new.parquet", new), out=tmp_path / "p.parquet", level=0.8)
        found = read(tmp_path / "p.parquet")
        assert list(found) == ["row", "price_mean", "price_median", "price_low", "price_high", "log_density"]
        assert found["row"].tolist() == list(range(50))
        given, _ = task.given_codes(pa.Table.from_pandas(new), [c for c in run.columns if c.name != "price"], "new")
        ahead, off = Predictive(run.flow, torch.from_numpy(given)), run.columns[1].taken_off
        np.testing.assert_allclose(found["price_mean"], ahead.mean() + off, rtol=1e-5)
        ends = ahead.quantile(torch.tensor([0.1, 0.5, 0.9])).double().numpy() + off
        np.testing.assert_allclose(found[["price_low", "price_median", "price_high"]], ends, rtol=1e-5)
        codes = torch.from_numpy((new["price"].to_numpy() - off).astype(np.float32))
        np.testing.assert_allclose(found["log_density"], ahead.log_prob(codes), rtol=1e-4, atol=1e-4)
        inside = new["price"].between(found["price_low"], found["price_high"])
        assert result.targets["price"]["coverage"] == pytest.approx(inside.mean())
        rmse = math.sqrt(((found["price_mean"] - new["price"]) ** 2).mean())
        assert result.targets["price"]["rmse"] == pytest.approx(rmse)
        assert result.mean_nats == pytest.approx(found["log_density"].mean())
        assert (result.rows, result.unknown, result.level) == (50, 0, 0.8)

    def test_of_integers_have_whole_ends(self, runs: Callable[[str], Run], tmp_path: Path):
        new = houses(40, 1)
        new.loc[0, "rooms"] = 60  # beyond all of training
        result = predict(runs("rooms"), write(tmp_path / "new.csv", new), out=tmp_path / "p.csv")
        found = read(tmp_path / "p.csv")
        ends = found[["rooms_median", "rooms_low", "rooms_high"]].to_numpy()
        assert np.array_equal(ends, ends.round())
        assert (found["log_density"] < 0).all()  # of probabilities
        assert (found["rooms_mean"] % 1 != 0).any()
        rmse = math.sqrt(((found["rooms_mean"] - new["rooms"]) ** 2).mean())
        assert result.targets["rooms"]["rmse"] == pytest.approx(rmse)
        assert rmse > 5

    def test_of_dates_are_dates(self, runs: Callable[[str], Run], tmp_path: Path):
        new = houses(30, 1)
        predict(runs("day"), write(tmp_path / "new.parquet", new), out=tmp_path / "p.parquet", draws=2)
        found = parquet.read_table(tmp_path / "p.parquet")
        for name in ("mean", "median", "low", "high", "draw1", "draw2"):
            assert found.schema.field(f"day_{name}").type == pa.date32()
        days = found.to_pandas()
        assert (days["day_low"] <= days["day_median"]).all()
        assert (days["day_median"] <= days["day_high"]).all()
        assert str(days["day_mean"].min()) > "2023-06-01"


class TestCategories:
    @pytest.mark.parametrize(("name", "values"), [("kind", ["flat", "house", "villa"]), ("sold", [False, True])])
    def test_have_their_probabilities(self, runs: Callable[[str], Run], tmp_path: Path, name: str, values: list):
        new = houses(60, 1)
        result = predict(runs(name), write(tmp_path / "new.parquet", new), out=tmp_path / "p.parquet", draws=2)
        found = read(tmp_path / "p.parquet")
        shares = found[[f"{name}={value}" for value in values]].to_numpy()
        np.testing.assert_allclose(shares.sum(1), 1, atol=1e-5)
        assert found[name].tolist() == [values[i] for i in shares.argmax(1)]
        assert set(found[f"{name}_draw1"]) <= set(values)
        assert result.targets[name]["accuracy"] == pytest.approx((found[name] == new[name]).mean())
        places = [values.index(each) for each in new[name]]
        np.testing.assert_allclose(found["log_density"], np.log(shares[np.arange(60), places]), atol=1e-4)

    def test_one_that_training_never_saw_is_no_hit_and_has_no_density(self, runs: Callable[[str], Run], tmp_path: Path):
        run, new = runs("kind"), houses(10, 1).assign(kind="castle")
        new.loc[0, "kind"] = None
        result = predict(run, write(tmp_path / "new.csv", new), out=tmp_path / "p.csv")
        found = read(tmp_path / "p.csv")
        assert np.isneginf(found["log_density"][1:]).all()
        assert np.isnan(found["log_density"][0])
        assert result.targets["kind"] == {"accuracy": 0.0}
        assert (result.mean_nats, result.unknown) == (None, 9)


class TestSeveral:
    def test_have_a_joint_distribution(self, runs: Callable[[str], Run], tmp_path: Path):
        run, new = runs("several"), houses(12, 1)
        path = write(tmp_path / "new.parquet", new)
        result = predict(run, path, out=tmp_path / "p.parquet", draws=300)
        found = read(tmp_path / "p.parquet")
        draws = found[[f"price_draw{i}" for i in range(1, 301)]].to_numpy()
        assert np.abs(draws.mean(1) / found["price_mean"] - 1).max() < 0.15
        assert found["rooms_draw1"].dtype == np.int64
        assert found["rooms_median"].tolist() == found["rooms_median"].round().tolist()
        np.testing.assert_allclose(found[["kind=flat", "kind=house", "kind=villa"]].sum(axis=1), 1)
        assert found["log_density"].notna().all()
        assert set(result.targets) == {"price", "rooms", "kind"}
        assert set(result.targets["kind"]) == {"accuracy"}
        predict(run, path, out=tmp_path / "q.parquet", draws=300)
        pd.testing.assert_frame_equal(read(tmp_path / "q.parquet"), found)  # the density has noise, of the seed
        predict(run, path, out=tmp_path / "q.parquet", draws=300, seed=1)
        assert not read(tmp_path / "q.parquet")["price_draw1"].equals(found["price_draw1"])

    def test_are_drawn_some_at_a_time(
        self, runs: Callable[[str], Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        path, most = write(tmp_path / "new.parquet", houses(12, 1)), []
        joint = task._joint

        def counted(flow: nicest.Flow, given: torch.Tensor, draws: int, generator: torch.Generator) -> torch.Tensor:
            most.append(len(given) * draws)
            return joint(flow, given, draws, generator)

        monkeypatch.setattr(task, "_joint", counted)
        monkeypatch.setattr(task, "JOINT_ROWS", 2000)
        predict(runs("several"), path, out=tmp_path / "p.parquet")
        assert most == [2000, 2000, 2000]

    def test_a_part_of_the_targets_is_not_observed(self, runs: Callable[[str], Run], tmp_path: Path):
        path = write(tmp_path / "new.csv", houses(5, 1).drop(columns="kind"))
        result = predict(runs("several"), path, out=tmp_path / "p.csv")
        assert "log_density" not in read(tmp_path / "p.csv")
        assert result.mean_nats is None
        assert result.targets == {"price": {}, "kind": {}, "rooms": {}}


class TestGiven:
    def test_targets_need_not_be_there_and_change_nothing(self, runs: Callable[[str], Run], tmp_path: Path):
        new = houses(20, 1)
        for name, rows in (("with", new), ("without", new.drop(columns="price"))):
            predict(runs("price"), write(tmp_path / f"{name}.parquet", rows), out=tmp_path / f"p-{name}.parquet")
        told = read(tmp_path / "p-with.parquet")
        pd.testing.assert_frame_equal(read(tmp_path / "p-without.parquet"), told.drop(columns="log_density"))

    def test_an_unknown_category_counts_as_missing(self, runs: Callable[[str], Run], tmp_path: Path):
        new, found = houses(20, 1), {}
        for name, kind in (("missing", None), ("unknown", "castle"), ("known", "villa")):
            path = write(tmp_path / f"{name}.csv", new.assign(kind=kind))
            predict(runs("price"), path, out=tmp_path / f"p-{name}.csv")
            found[name] = read(tmp_path / f"p-{name}.csv")
        pd.testing.assert_frame_equal(found["missing"], found["unknown"])
        assert not found["missing"].equals(found["known"])

    def test_all_cells_may_be_missing(self, runs: Callable[[str], Run], tmp_path: Path):
        (tmp_path / "new.csv").write_text("size,kind,rooms,sold,day\n" + ",,,,\n" * 3)
        predict(runs("price"), tmp_path / "new.csv", out=tmp_path / "p.csv")
        found = read(tmp_path / "p.csv")
        assert np.isfinite(found["price_mean"]).all()
        np.testing.assert_allclose(found["price_mean"], found["price_mean"][0], rtol=1e-5)

    def test_missing_targets_have_no_density(self, runs: Callable[[str], Run], tmp_path: Path):
        new = houses(20, 1)
        new.loc[:4, "price"] = np.nan
        result = predict(runs("price"), write(tmp_path / "new.csv", new), out=tmp_path / "p.csv")
        found = read(tmp_path / "p.csv")
        assert found["log_density"].isna().tolist() == [True] * 5 + [False] * 15
        off = found["price_mean"][5:] - new["price"][5:]
        assert result.targets["price"]["rmse"] == pytest.approx(math.sqrt((off**2).mean()))

    def test_columns_in_another_order_and_more_of_them(self, runs: Callable[[str], Run], tmp_path: Path):
        new, found = houses(20, 1), []
        for i, rows in enumerate((new, new[list(new)[::-1]].assign(note="x"))):
            predict(runs("price"), write(tmp_path / f"{i}.csv", rows), out=tmp_path / f"p{i}.csv")
            found.append(read(tmp_path / f"p{i}.csv"))
        pd.testing.assert_frame_equal(*found)


class TestFiles:
    def test_of_all_formats_give_the_same(self, runs: Callable[[str], Run], tmp_path: Path):
        new = houses(20, 1)
        found = []
        for suffix in (".csv", ".parquet", ".arrow", ".feather"):
            path = write(tmp_path / f"new{suffix}", new)
            predict(runs("price"), path, out=tmp_path / f"p{suffix}", draws=3)
            found.append(read(tmp_path / f"p{suffix}"))
        for other in found[1:]:
            pd.testing.assert_frame_equal(other, found[0])

    @pytest.mark.parametrize("name", ["price", "several"])
    def test_batches_and_row_groups_change_nothing(
        self, runs: Callable[[str], Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ):
        monkeypatch.setattr(task, "ROWS", 16)
        table, found = pa.Table.from_pandas(houses(40, 1)), []
        for rows in (40, 7, 16):
            parquet.write_table(table, tmp_path / "new.parquet", row_group_size=rows)
            predict(runs(name), tmp_path / "new.parquet", out=tmp_path / "p.parquet", draws=2)
            found.append(read(tmp_path / "p.parquet"))
        pd.testing.assert_frame_equal(found[0], found[1])
        pd.testing.assert_frame_equal(found[0], found[2])

    def test_the_batch_does_not_change_the_predictions(
        self, runs: Callable[[str], Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        path, found = write(tmp_path / "new.csv", houses(50, 1)), []
        for rows in (4096, 9):
            monkeypatch.setattr(task, "ROWS", rows)
            predict(runs("rooms"), path, out=tmp_path / "p.csv")
            found.append(read(tmp_path / "p.csv"))
        pd.testing.assert_frame_equal(*found, rtol=1e-5)

    def test_a_picture(self, runs: Callable[[str], Run], tmp_path: Path):
        new = houses(30, 1)
        new.loc[:4, "price"] = np.nan
        path, picture = write(tmp_path / "new.csv", new), tmp_path / "p.png"
        assert predict(runs("price"), path, out=tmp_path / "p.csv", picture=picture).picture == str(picture)
        assert picture.read_bytes().startswith(b"\x89PNG")
        path = write(tmp_path / "new.csv", new.drop(columns="price"))
        predict(runs("price"), path, out=tmp_path / "p.csv", picture=tmp_path / "q.png")
        assert (tmp_path / "q.png").exists()


class TestRefused:
    def test_files(self, runs: Callable[[str], Run], folder: Path, tmp_path: Path, refusal: Refusal):
        run, path = runs("price"), write(tmp_path / "new.csv", houses(5, 1))
        before = path.read_bytes()
        for table, out, said in [
            (path, path, "expected a separate file for the result"),
            (path, folder / "houses.parquet", "on which the run was trained"),
            (path, tmp_path / "p.png", "a file that ends in .csv, .parquet"),
            (tmp_path / "x.npy", tmp_path / "p.csv", "expected a table, a file that ends in .csv"),
            (tmp_path / "absent.csv", tmp_path / "p.csv", "absent.csv"),
        ]:
            assert said in refusal(predict, run, table, out=out)
        assert path.read_bytes() == before
        assert not (tmp_path / "p.csv").exists()

    def test_a_picture_in_the_place_of_the_table(self, runs: Callable[[str], Run], tmp_path: Path, refusal: Refusal):
        path = write(tmp_path / "new.csv", houses(5, 1))
        assert "expected a picture such as .png" in refusal(
            predict, runs("price"), path, out=tmp_path / "p.csv", picture=tmp_path / "p.txt"
        )
        assert not (tmp_path / "p.csv").exists()
        said = refusal(predict, runs("price"), path, out=tmp_path / "p.csv", picture=path)
        assert "expected a separate file for the result" in said

    def test_an_empty_table_leaves_no_predictions(self, runs: Callable[[str], Run], tmp_path: Path, refusal: Refusal):
        (tmp_path / "new.csv").write_text("size,kind,rooms,sold,day\n")
        (tmp_path / "p.csv").write_text("precious")
        said = refusal(predict, runs("price"), tmp_path / "new.csv", out=tmp_path / "p.csv")
        assert "expected rows to predict, got only column names" in said
        assert (tmp_path / "p.csv").read_text() == "precious"

    def test_columns_that_are_not_there(self, runs: Callable[[str], Run], tmp_path: Path, refusal: Refusal):
        path = write(tmp_path / "new.csv", houses(5, 1).drop(columns=["size", "kind"]))
        assert "lacks 'size', 'kind', which training had" in refusal(predict, runs("price"), path)

    def test_cells_of_another_kind(self, runs: Callable[[str], Run], tmp_path: Path, refusal: Refusal):
        path = write(tmp_path / "new.csv", houses(5, 1).assign(size="large"))
        assert "expected numbers in column 'size'" in refusal(predict, runs("price"), path, out=tmp_path / "p.csv")

    @pytest.mark.parametrize("level", [0, 1, -1, math.nan])
    def test_a_level_that_is_no_probability(
        self, runs: Callable[[str], Run], tmp_path: Path, refusal: Refusal, level: float
    ):
        path = write(tmp_path / "new.csv", houses(5, 1))
        assert "expected a probability between 0 and 1" in refusal(predict, runs("price"), path, level=level)

    @pytest.mark.parametrize("name", ["kind", "day", "several"])
    def test_a_picture_of_what_is_no_number(
        self, runs: Callable[[str], Run], tmp_path: Path, refusal: Refusal, name: str
    ):
        path = write(tmp_path / "new.csv", houses(5, 1))
        assert "a picture shows one target that is a number" in refusal(predict, runs(name), path, picture="p.png")

    def test_a_model_without_targets(self, table_run: Run, tmp_path: Path, refusal: Refusal):
        assert "has no target to predict: train a model with --target" in refusal(predict, table_run, "new.csv")

    def test_two_columns_of_one_name(self, folder: Path, tmp_path: Path, refusal: Refusal):
        rows = houses(60).rename(columns={"kind": "row"})[["size", "row"]]
        path = write(tmp_path / "houses.csv", rows)
        settings = (f"data.name={path}", 'data.target=["row"]', *SMALL)
        train(load_recipe("table"), tmp_path / "run", overrides=settings, device="cpu", callbacks=[])
        said = refusal(predict, nicest.open(tmp_path / "run"), path, out=tmp_path / "p.csv")
        assert "the predictions would have two columns called 'row': rename the target" in said


class TestCommand:
    def test_prints_and_gives_json(self, runs: Callable[[str], Run], tmp_path: Path):
        new = houses(20, 1)
        new.loc[0, "kind"] = "castle"
        path, out = write(tmp_path / "new.csv", new), tmp_path / "p.csv"
        asked = ["predict", str(runs("kind").path), str(path), "--out", str(out)]
        printed = CliRunner().invoke(app, asked)
        assert printed.exit_code == 0
        lines = printed.stdout.splitlines()
        assert lines[0] == f"20 rows predicted in {out}: kind"
        assert lines[1].startswith("observed targets: mean log-density -")
        assert lines[2].startswith("1 rows hold a target value that training never saw")
        assert lines[3].startswith("kind: the most probable value is right in ")
        result = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
        assert (result["rows"], result["unknown"], result["out"]) == (20, 1, str(out))
        assert 0 <= result["targets"]["kind"]["accuracy"] <= 1

    def test_of_numbers(self, runs: Callable[[str], Run], tmp_path: Path):
        path, out = write(tmp_path / "new.csv", houses(20, 1)), tmp_path / "p.csv"
        asked = ["predict", str(runs("price").path), str(path), "--out", str(out), "--interval", "0.5"]
        printed = CliRunner().invoke(app, [*asked, "--draws", "2", "--seed", "3"])
        assert "price: RMSE of the mean " in printed.stdout
        assert "50% intervals hold " in printed.stdout
        assert "price_draw2" in read(out)
        assert "never saw" not in printed.stdout

    def test_says_that_given_values_were_never_seen(self, runs: Callable[[str], Run], tmp_path: Path):
        path, out = write(tmp_path / "new.csv", houses(20, 1).assign(kind="castle")), tmp_path / "p.csv"
        asked = ["predict", str(runs("price").path), str(path), "--out", str(out)]
        lines = CliRunner().invoke(app, asked).stdout.splitlines()
        assert "20 given cells hold a value that training never saw: they count as missing" in lines
