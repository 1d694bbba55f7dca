"""Data frames with categories, spikes and bounds: into `NICE`, and back out of it."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from nicest import NICE, NICEClassifier

N = 600


def people(n: int = N) -> pa.Table:
    """Wages go with the job, gains are mostly 0, shares lie in [0, 1]; some cells are missing."""
    rng = np.random.default_rng(0)
    job = rng.choice(["nurse", "baker", "judge"], n, p=[0.6, 0.3, 0.1])
    wage = np.select([job == "nurse", job == "baker"], [3.0, 2.0], 8.0) + 0.2 * rng.standard_normal(n)
    gain = np.where(rng.random(n) < 0.6, 0.0, rng.exponential(100, n))
    jobs = [None if i % 40 == 3 else each for i, each in enumerate(job.tolist())]
    return pa.table({"job": jobs, "wage": wage, "gain": gain, "member": rng.random(n) < 0.3, "share": rng.random(n)})


@pytest.fixture(scope="module")
def model() -> NICE:
    small = {"epochs": 150, "couplings": 4, "width": 32, "law": "spline", "bins": 8}
    return NICE(effort="low", discrete="values", random_state=0, **small).fit(people())


def test_samples_are_a_frame_of_the_values_there_are(model: NICE):
    drawn = model.sample(2000, random_state=1)
    assert isinstance(drawn, pa.Table)
    assert drawn.schema == people().schema
    columns = {name: np.array(drawn[name].to_pylist()) for name in drawn.column_names}
    assert set(columns["job"]) == {"nurse", "baker", "judge"}
    assert set(columns["member"]) == {True, False}
    assert abs((columns["job"] == "judge").mean() - 0.1) < 0.04
    assert abs((columns["gain"] == 0).mean() - 0.6) < 0.06
    assert columns["gain"].min() == 0
    assert 0 <= columns["share"].min() < columns["share"].max() <= 1
    wage = {job: columns["wage"][columns["job"] == job].mean() for job in ("nurse", "baker", "judge")}
    assert wage["judge"] > wage["nurse"] + 2 > wage["baker"] + 2


def test_missing_cells_are_filled_in_with_what_goes_with_the_rest(model: NICE):
    table = people(60)
    filled = model.impute(table, draws=40, steps=300)
    assert filled.schema == table.schema
    for before, after in zip(table.to_pylist(), filled.to_pylist(), strict=True):
        if before["job"] is None:
            expected = "judge" if before["wage"] > 5 else "nurse" if before["wage"] > 2.5 else "baker"
            assert after == before | {"job": expected}
        else:
            assert after == before


def test_scores_are_of_the_row(model: NICE):
    table = people(60)
    nats = model.score_samples(table)
    assert np.isnan(nats).tolist() == [each is None for each in table["job"].to_pylist()]
    odd = table.set_column(1, "wage", pa.array([20.0] * 60))
    assert np.nanmax(model.score_samples(odd)) < np.nanmin(nats)
    unseen = table.set_column(0, "job", pa.array(["king"] * 60))
    assert (model.score_samples(unseen) == -math.inf).all()
    broken = table.set_column(4, "share", pa.array([1.5] * 60))
    assert (model.score_samples(broken)[~np.isnan(nats)] == -math.inf).all()


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_other_frames_are_the_same(library: str, model: NICE):
    pytest.importorskip(library)
    table: Any = people(60)
    if library == "pandas":
        frame = table.to_pandas()
    else:
        import polars

        frame = polars.from_arrow(table)
    np.testing.assert_array_equal(model.score_samples(frame), model.score_samples(table))
    filled = model.impute(frame, draws=40, steps=300)
    assert type(filled) is type(frame)


def test_it_is_the_same_when_it_comes_back_from_disk(model: NICE, tmp_path: Path):
    model.save(tmp_path / "run")
    back = NICE.load(tmp_path / "run")
    np.testing.assert_allclose(back.score_samples(people(60)), model.score_samples(people(60)), rtol=1e-4)
    assert back.sample(3, random_state=0).to_pylist() == model.sample(3, random_state=0).to_pylist()


def test_wrong_input_is_told_in_one_line(model: NICE):
    with pytest.raises(ValueError, match="expected a data frame with the columns of training, got ndarray"):
        model.score_samples(np.zeros((3, 5)))
    with pytest.raises(ValueError, match="got none called 'wage'"):
        model.score_samples(people(60).drop_columns(["wage"]))
    many = pa.table({"a": [f"name {i}" for i in range(N)], "b": np.arange(N) + 0.5})
    with pytest.raises(ValueError, match=r"more than 100 different strings.*leave it out") as error:
        NICE().fit(many)
    assert "--set" not in str(error.value)
    with pytest.raises(ValueError, match="is constant"):
        NICE().fit(pa.table({"a": ["x", "y"] * 50, "b": [1.5] * 100}))
    with pytest.raises(ValueError, match="or a data frame with columns of strings"):
        NICE().fit([["x", 1], ["y", 2]] * 50)
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ValueError, match=r"expected columns of one type each: .*column a"):
        NICE().fit(pandas.DataFrame({"a": [1, "x"] * 50}))


SMALL = {"epochs": 3, "couplings": 4, "width": 8, "law": "spline", "bins": 8, "random_state": 0}


class TestConstantColumns:
    @pytest.mark.parametrize("constant", ["k", True, 5])
    def test_add_nothing_to_a_log_density(self, constant: object, tmp_path: Path):
        plain = people(200).select(["job", "wage", "member"])
        table = plain.add_column(1, "c", pa.array([constant] * 200))
        expected, model = NICE(**SMALL).fit(plain), NICE(**SMALL).fit(table)
        np.testing.assert_array_equal(model.score_samples(table), expected.score_samples(plain))
        np.testing.assert_array_equal(model.transform(table), expected.transform(plain))
        assert model.inverse_transform(model.transform(table)[5:8])["c"].to_pylist() == [constant] * 3
        drawn = model.sample(20, random_state=0)
        assert drawn.schema == table.schema
        assert drawn.drop_columns(["c"]).equals(expected.sample(20, random_state=0))
        assert set(drawn["c"].to_pylist()) == {constant}
        other = plain.add_column(1, "c", pa.array([{"k": "z", True: False, 5: 6}[constant]] * 200))
        assert np.isneginf(model.score_samples(other)[5:20]).all()
        holes = table.slice(0, 9).set_column(1, "c", pa.array([None, *[constant] * 8]))
        assert model.impute(holes, draws=40, steps=100)["c"].to_pylist() == [constant] * 9
        model.save(tmp_path / "run")
        back = NICE.load(tmp_path / "run")
        np.testing.assert_allclose(back.score_samples(table), model.score_samples(table), rtol=1e-4)
        assert back.sample(3, random_state=0).to_pylist() == model.sample(3, random_state=0).to_pylist()

    def test_of_numbers_beside_others(self):
        pandas = pytest.importorskip("pandas")
        x = np.random.default_rng(0).normal(size=(200, 2))
        frame = pandas.DataFrame({"a": x[:, 0], "yes": [True] * 200, "b": x[:, 1]})
        model = NICE(**SMALL).fit(frame)
        expected = NICE(**SMALL).fit(frame[["a", "b"]])
        np.testing.assert_array_equal(model.score_samples(frame), expected.score_samples(frame[["a", "b"]]))
        assert set(model.sample(9, random_state=0)[:, 1]) == {1.0}

    def test_add_nothing_to_a_classifier(self):
        table = people(200).select(["job", "wage", "member"]).drop_null()
        y = np.random.default_rng(0).integers(0, 2, len(table))
        more = table.add_column(1, "c", pa.array(["k"] * len(table)))
        small = {"epochs": 3, "couplings": 2, "width": 8, "random_state": 0}
        expected, model = NICEClassifier(**small).fit(table, y), NICEClassifier(**small).fit(more, y)
        np.testing.assert_array_equal(model.log_likelihood(more), expected.log_likelihood(table))

    def test_alone_are_refused(self):
        only = pa.table({"a": ["x"] * 60, "b": [3] * 60})
        with pytest.raises(ValueError, match="expected a column that varies, got 2 constant ones"):
            NICE().fit(only)
        with pytest.raises(ValueError, match="expected a column of X that varies, got 2 constant ones"):
            NICEClassifier().fit(only, [0, 1] * 30)


class TestBounds:
    def test_hold_for_samples_and_scores(self):
        rng = np.random.default_rng(0)
        X = np.column_stack([rng.exponential(2, 400), rng.random(400), rng.standard_normal(400)])
        small = {"epochs": 20, "couplings": 4, "width": 8, "random_state": 0}
        model = NICE(bounds={0: (0, None), "x1": (0, 1)}, **small).fit(X)
        drawn = model.sample(2000, random_state=0)
        assert drawn[:, 0].min() >= 0
        assert 0 <= drawn[:, 1].min() < drawn[:, 1].max() <= 1
        outside = np.array([[-0.1, 0.5, 0.0], [1.0, 1.1, 0.0], [1.0, 0.5, 0.0]])
        assert np.isneginf(model.score_samples(outside)).tolist() == [True, True, False]
        # a density: near that of the law the rows are of, without mass beyond the bounds
        truth = -X[:, 0] / 2 - np.log(2) - 0.5 * X[:, 2] ** 2 - 0.5 * np.log(2 * np.pi)
        assert model.score(X) == pytest.approx(truth.mean(), abs=0.25)

    def test_that_the_data_breaks_are_refused(self):
        X = np.random.default_rng(0).standard_normal((60, 2))
        with pytest.raises(ValueError, match="beyond its bounds 0 and inf"):
            NICE(bounds={1: (0, None)}).fit(X)

    @pytest.mark.parametrize(
        ("bounds", "why"),
        [
            ({7: (0, 1)}, "expected columns 0 to 1, or their names, got 7"),
            ({0: 5}, r"expected \(low, high\) for column 0, got 5"),
            ({"x1": ("a", 1)}, r"expected \(low, high\) for column 'x1', got \('a', 1\)"),
            ([(0, 1), (0, 1)], "expected bounds as a mapping of columns"),
        ],
    )
    def test_that_cannot_be_are_refused_in_one_line(self, bounds: Any, why: str):
        with pytest.raises(ValueError, match=why):
            NICE(bounds=bounds).fit(np.random.default_rng(0).random((60, 2)))
