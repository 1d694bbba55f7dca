"""sample: the right numbers from the right law, in the right shape, in the file that was asked for."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from nicest import Run
from nicest.errors import NicestError
from nicest.flows import Flow, Units
from nicest.tasks.sample import draw, sample, save_grid


def array(run: Run, path: Path, n: int = 12, **options: object) -> np.ndarray:
    sample(run, n, out=path, **options)
    return np.load(path)


class TestArrays:
    def test_of_grey_images_hold_levels_that_exist(self, digits_run: Run, tmp_path: Path):
        drawn = array(digits_run, tmp_path / "a.npy")
        assert (drawn.dtype, drawn.shape) == (np.uint8, (12, 8, 8))
        assert 0 <= drawn.min() < drawn.max() <= 16

    def test_of_colour_images_are_planar(self, colour_run: Run, tmp_path: Path):
        drawn = array(colour_run, tmp_path / "a.npy", n=300).astype(float).mean(0)
        assert drawn.shape == (3, 4, 6)
        assert (np.diff(drawn[0].mean(0)) > 10).all()  # red grows to the right
        assert (np.diff(drawn[1].mean(1)) > 20).all()  # green grows downwards
        assert np.abs(np.diff(drawn[2].mean(0))).max() < 10  # blue is noise

    def test_of_rows_are_real_numbers(self, rows_run: Run, tmp_path: Path):
        drawn = array(rows_run, tmp_path / "a.npy")
        assert (drawn.dtype, drawn.shape) == (np.float32, (12, 5))
        assert np.isfinite(drawn).all()

    def test_are_the_same_in_both_formats(self, digits_run: Run, tmp_path: Path):
        sample(digits_run, 12, out=tmp_path / "a.npz")
        with np.load(tmp_path / "a.npz") as archive:
            assert list(archive) == ["samples"]
            assert np.array_equal(archive["samples"], array(digits_run, tmp_path / "a.npy"))

    def test_of_sixteen_bit_levels_are_sixteen_bit(self, make: Callable, save_run: Callable):
        flow, recipe = make(np.zeros((20, 6), np.uint8))
        recipe = replace(recipe, data=replace(recipe.data, levels=65536))
        flow = Flow(Units.pixels(6, 65536), flow.bijection, flow.prior)
        drawn = draw(save_run("run", flow, recipe), 500)
        assert drawn.dtype == np.uint16
        assert drawn.max() == 65535


class TestSeed:
    def test_gives_the_same_samples_again_and_another_seed_others(self, any_run: Run, tmp_path: Path):
        first, again, other = (array(any_run, tmp_path / "a.npy", seed=seed) for seed in (3, 3, 4))
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other)


class TestTemperature:
    def test_zero_gives_the_mode_of_the_prior_every_time(self, in_float64: Run, tmp_path: Path):
        drawn, flow = array(in_float64, tmp_path / "a.npy", n=5, temperature=0.0), in_float64.flow
        with torch.no_grad():
            mode = flow.decode(flow.prior.mode[None]).numpy().reshape(drawn.shape[1:])
        np.testing.assert_allclose(drawn, np.broadcast_to(mode, drawn.shape), rtol=0, atol=1e-9)

    def test_scales_the_spread(self, make: Callable, save_run: Callable, tmp_path: Path):
        flow, recipe = make(np.zeros((9, 4), np.float32), "model.initialisation=zero-last")
        run = save_run("run", flow, recipe)
        cold, warm = (array(run, tmp_path / "a.npy", n=50, temperature=t) for t in (0.5, 2.0))
        np.testing.assert_allclose(warm, 4 * cold, rtol=1e-5)


@pytest.mark.parametrize(("prior", "law"), [("logistic", stats.logistic), ("gaussian", stats.norm)])
def test_samples_follow_the_prior_that_was_trained(
    make: Callable, save_run: Callable, tmp_path: Path, prior: str, law: stats.rv_continuous
):
    """Identity couplings: x = centre + size exp(-s) (loc + scale e), e of the prior's law, in closed form."""
    own = ("model.initialisation=zero-last", "model.learned_prior=true", f"model.prior={prior}")
    flow, recipe = make(np.zeros((9, 3), np.float32), *own)
    s, loc, log_scale = torch.tensor([0.5, -1.0, 0.0]), torch.tensor([1.0, 0.0, -2.0]), torch.tensor([0.0, 0.7, -0.7])
    centre, size = torch.tensor([3.0, 0.0, 1.0]), torch.tensor([2.0, 1.0, 0.1])
    with torch.no_grad():
        for parameter, value in (
            (flow.bijection.layers["scaling"].s, s),
            (flow.prior.loc, loc),
            (flow.prior.log_scale, log_scale),
            (flow.units.loc, centre),
            (flow.units.scale, size),
        ):
            parameter.copy_(value)
    drawn = array(save_run("run", flow, recipe), tmp_path / "a.npy", n=4000)
    for d in range(3):
        middle = float(centre[d] + size[d] * loc[d] * torch.exp(-s[d]))
        spread = float(size[d] * torch.exp(log_scale[d] - s[d]))
        assert stats.kstest(drawn[:, d], law(middle, spread).cdf).pvalue > 1e-3
    assert np.abs(np.corrcoef(drawn.T) - np.eye(3)).max() < 0.06


def test_more_than_one_batch_is_drawn_in_parts_that_differ(
    digits_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked, honest = [], Flow.decode

    def spy(self: Flow, h: torch.Tensor) -> torch.Tensor:
        asked.append(len(h))
        return honest(self, h)

    monkeypatch.setattr(Flow, "decode", spy)
    monkeypatch.setattr("nicest.inference.engine.BATCH", 7)
    drawn = array(digits_run, tmp_path / "a.npy", n=24)
    assert asked == [7, 7, 7, 3]
    assert drawn.shape == (24, 8, 8)
    assert len(np.unique(drawn.reshape(24, -1), axis=0)) == 24


def test_what_is_returned_says_what_was_drawn(digits_run: Run, tmp_path: Path):
    result = sample(digits_run, 3, temperature=0.5, seed=9, out=tmp_path / "deep" / "a.npy")
    assert result.to_dict() == {
        "out": str(tmp_path / "deep" / "a.npy"),
        "n": 3,
        "shape": [8, 8],
        "temperature": 0.5,
        "seed": 9,
        "dataset": "digits",
    }


class TestGrid:
    def test_of_grey_images_shows_each_in_its_place(self, digits_run: Run, tmp_path: Path, picture_at: Callable):
        sample(digits_run, 10, out=tmp_path / "a.png")
        picture = picture_at(tmp_path / "a.png")
        assert picture.mode == "L"
        zoom = picture.width // 37  # four columns of 8 and a gap each
        assert picture.size == (37 * zoom, 28 * zoom)
        assert picture.width >= 720
        small = np.asarray(picture)[::zoom, ::zoom]
        levels = array(digits_run, tmp_path / "a.npy", n=10)
        for i, image in enumerate(levels):
            top, left = 1 + i // 4 * 9, 1 + i % 4 * 9
            expected = np.round(image.astype(float) * 255 / 16).astype(np.uint8)
            assert np.array_equal(small[top : top + 8, left : left + 8], expected), i

    def test_of_colour_images_is_rgb_and_upright(self, colour_run: Run, tmp_path: Path, picture_at: Callable):
        sample(colour_run, 4, out=tmp_path / "a.png")
        picture = picture_at(tmp_path / "a.png")
        assert picture.mode == "RGB"
        zoom = picture.width // 15
        assert picture.size == (15 * zoom, 11 * zoom)
        small = np.asarray(picture)[::zoom, ::zoom]
        planar = array(colour_run, tmp_path / "a.npy", n=4)
        assert np.array_equal(small[6:10, 8:14], planar[3].transpose(1, 2, 0))

    def test_makes_white_of_the_brightest_level(self, digits_run: Run, tmp_path: Path, picture_at: Callable):
        save_grid(tmp_path / "a.png", np.full((1, 8, 8), 16, np.uint8), digits_run.recipe.data)
        assert np.asarray(picture_at(tmp_path / "a.png")).max() == 255

    def test_of_continuous_images_spans_their_own_range(
        self, make: Callable, save_run: Callable, tmp_path: Path, picture_at: Callable
    ):
        flow, recipe = make(np.zeros((9, 4, 4), np.float32))
        sample(save_run("run", flow, recipe), 9, out=tmp_path / "a.png")
        pixels = np.asarray(picture_at(tmp_path / "a.png"))
        assert pixels.max() > 200
        assert pixels.min() == 0

    def test_of_rows_is_refused_with_the_way_out(self, rows_run: Run, tmp_path: Path):
        with pytest.raises(NicestError, match=r"rows of 5 numbers.*\.npy"):
            sample(rows_run, 4, out=tmp_path / "a.png")
        assert list(tmp_path.iterdir()) == []


class TestTable:
    @pytest.mark.parametrize("name", ["rows.csv", "rows.parquet", "rows.feather"])
    def test_rows_have_the_types_of_training(self, table_run: Run, tmp_path: Path, name: str):
        result = sample(table_run, 300, out=tmp_path / name)
        rows = getattr(pd, "read_" + name.split(".")[1])(tmp_path / name)
        assert list(rows) == ["x", "count", "half", "third"]
        assert (len(rows), result.n, result.where) == (300, 300, None)
        assert set(rows["count"]) <= set(range(12))
        assert rows["count"].dtype == np.int64
        assert ((rows["count"] < 6) == (rows.half == "low")).mean() > 0.9

    def test_rows_meet_all_conditions(self, table_run: Run, tmp_path: Path):
        text = 'count >= 3 and count < 7 and half = "low" and third in (b, a) and x > 4.5'
        result = sample(table_run, 700, where=text, out=tmp_path / "rows.csv")
        rows = pd.read_csv(tmp_path / "rows.csv")
        assert len(rows) == 700
        assert set(rows["count"]) <= {3, 4, 5, 6}
        assert set(rows["half"]) == {"low"}
        assert set(rows["third"]) <= {"a", "b"}
        assert (rows["x"] > 4.5).all()
        assert (result.where, result.n) == (text, 700)
        assert 0 < result.probability < 1
        assert 0 < result.effective_size <= 700

    def test_a_number_comes_back_as_it_was_written(self, table_run: Run, tmp_path: Path):
        sample(table_run, 50, where="x = 0.1", out=tmp_path / "rows.csv")
        cells = [line.split(",")[0] for line in (tmp_path / "rows.csv").read_text().splitlines()[1:]]
        assert cells == ["0.1"] * 50

    def test_the_probability_is_the_fraction_of_plain_samples(self, table_run: Run, tmp_path: Path):
        sample(table_run, 20_000, out=tmp_path / "all.csv")
        rows = pd.read_csv(tmp_path / "all.csv")
        result = sample(table_run, 500, where="count <= 4 and x > 1", out=tmp_path / "rows.csv")
        assert result.probability == pytest.approx(((rows["count"] <= 4) & (rows["x"] > 1)).mean(), rel=0.1)

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"out": "rows.npy"}, "write samples.csv"),
            ({"temperature": 0.5}, "no temperature"),
            ({"where": "y > 5"}, "found no column 'y'"),
            ({"where": "half = 5"}, "'half'"),
            ({"where": "x >"}, "got 'x >' at character 1"),
            ({"where": "x > 5 and x < 3"}, "contradict"),
            ({"where": "count > 99"}, "'count'"),
        ],
    )
    def test_refusals_leave_nothing_behind(
        self, table_run: Run, tmp_path: Path, refusal: Callable[..., str], options: dict, says: str
    ):
        out = tmp_path / options.pop("out", "rows.csv")
        assert says in refusal(sample, table_run, 5, out=out, **options)
        assert list(tmp_path.iterdir()) == []

    def test_other_models_have_no_columns(self, any_run: Run, tmp_path: Path, refusal: Callable[..., str]):
        assert "the columns of a table" in refusal(sample, any_run, 5, where="x > 5", out=tmp_path / "rows.npy")


@pytest.mark.parametrize("name", ["a.jpg", "a", "a.txt", "npy"])
def test_another_kind_of_file_is_refused_before_anything_is_done(rows_run: Run, tmp_path: Path, name: str):
    with pytest.raises(NicestError, match=r"\.png, \.npy, \.npz"):
        sample(rows_run, 4, out=tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_draw_gives_finite_samples_at_any_temperature(digits_run: Run):
    hot = draw(digits_run, 50, temperature=1e6)
    assert set(np.unique(hot)) <= set(range(17))
    assert {0, 16} <= set(np.unique(hot))
    assert math.isfinite(float(hot.mean()))
