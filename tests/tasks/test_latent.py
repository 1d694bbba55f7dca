"""latent: spectrum, sphere, interpolation and truncation, each against what numpy knows of them."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from nicest import Run
from nicest.files import to_json
from nicest.flows import Flow
from nicest.studio.latents import even_points
from nicest.tasks.latent import (
    BASES,
    WAYS,
    interpolate,
    rotation,
    spectrum,
    sphere,
    sphere_points,
    spherical,
    straight,
    truncate,
)

LOOKS = [spectrum, sphere, interpolate, truncate]


def arrays(look: Callable[..., dict], run: Run, folder: Path, **options: object) -> tuple[dict, dict[str, np.ndarray]]:
    """What a look says, and the arrays it writes."""
    result = look(run, out=folder / "a.npz", **options).to_dict()
    assert json.loads(to_json(result)) == result
    with np.load(folder / "a.npz") as archive:
        return result, dict(archive)


def examples(run: Run, split: str = "test") -> np.ndarray:
    return run.splits.split(split)


def on_interval(run: Run, rows: np.ndarray) -> np.ndarray:
    """Rows in the space of the model, in numpy: the middles of levels on the interval, or standardised columns."""
    data = run.recipe.data
    if not data.levels:
        train = examples(run, "train").astype(np.float64)
        return (rows - train.mean(0)) / train.std(0)
    low, high = data.interval
    return low + (high - low) * (rows.astype(np.float64) + 0.5) / data.levels


def numpy_pca(run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, deviations and directions (rows) of the training data by a singular value decomposition."""
    train = on_interval(run, examples(run, "train"))
    _, singular, directions = np.linalg.svd(train - train.mean(0), full_matrices=False)
    return train.mean(0), singular / math.sqrt(len(train)), directions


def codes(run: Run, rows: np.ndarray) -> np.ndarray:
    """h of the middle of every step, or of rows of numbers."""
    with torch.no_grad():
        return run.flow.bijection(run.flow.units.enter(torch.from_numpy(rows), noise=False))[0].numpy()


def decoded(run: Run, h: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        x = run.flow.decode(torch.from_numpy(h.reshape(-1, h.shape[-1])).float())
    return x.numpy().reshape(*h.shape[:-1], *run.recipe.data.shape)


@pytest.fixture
def learned(make: Callable, save_run: Callable) -> tuple[Flow, Run]:
    """A run of rows with identity couplings whose prior has learned its own place and scale."""
    own = ("model.initialisation=zero-last", "model.learned_prior=true", "model.prior=gaussian")
    flow, recipe = make(np.random.default_rng(0).standard_normal((60, 5)).astype(np.float32), *own)
    with torch.no_grad():
        flow.bijection.layers["scaling"].s.copy_(torch.tensor([0.0, -1.0, 2.0, 1.0, -2.0]))
        flow.prior.loc.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
        flow.prior.log_scale.copy_(torch.tensor([0.0, 1.0, 4.0, 0.0, 0.0]))
    return flow, save_run("run", flow, recipe)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Figure]:
    """The figure that a look would write."""

    def draw(look: Callable[..., dict], run: Run, **options: object) -> Figure:
        figures: list[Figure] = []
        monkeypatch.setattr("nicest.plots.save_figure", lambda figure, path: figures.append(figure))
        look(run, **options)
        return figures[0]

    return draw


class TestSpectrum:
    def test_of_the_data_is_what_numpy_finds_with_the_noise(self, any_run: Run, tmp_path: Path):
        data = any_run.recipe.data
        width = (data.interval[1] - data.interval[0]) / data.levels if data.levels else 0.0
        variances = np.zeros(data.dim)
        deviations = numpy_pca(any_run)[1]
        variances[: len(deviations)] = deviations**2
        result, kept = arrays(spectrum, any_run, tmp_path)
        np.testing.assert_allclose(result["pca"], np.sqrt(variances + width**2 / 12), rtol=1e-4, atol=1e-7)
        assert np.array_equal(kept["pca"], result["pca"])

    def test_is_the_sorted_sigma_times_the_scale_of_the_prior(self, learned: tuple[Flow, Run], tmp_path: Path):
        result, kept = arrays(spectrum, learned[1], tmp_path, pca=False)
        np.testing.assert_allclose(result["sigma"], np.exp([2.0, 2.0, 2.0, 0.0, -1.0]), rtol=1e-6)
        assert kept.keys() == {"sigma"}
        assert "pca" not in result

    def test_says_what_makes_a_standard_deviation_of_it(self, digits_run: Run, learned: tuple[Flow, Run]):
        assert spectrum(learned[1], pca=False).deviation == 1
        draws = digits_run.flow.prior.rsample(9000)
        assert spectrum(digits_run, pca=False).deviation == pytest.approx(float(draws.std()), rel=0.01)

    def test_draws_standard_deviations_and_beside_them_those_of_the_data(self, digits_run: Run, drawn: Callable):
        said = spectrum(digits_run)
        for ax in drawn(spectrum, digits_run).axes:
            model, data = ax.lines
            np.testing.assert_allclose(model.get_ydata(), math.pi / math.sqrt(3) * np.array(said.sigma), rtol=1e-6)
            assert np.array_equal(data.get_ydata(), said.pca)
        assert all(len(ax.lines) == 1 for ax in drawn(spectrum, digits_run, pca=False).axes)

    @pytest.mark.parametrize("pca", [True, False])
    def test_of_a_model_that_whitens_stands_beside_1(self, colour_run: Run, drawn: Callable, pca: bool):
        for ax in drawn(spectrum, colour_run, pca=pca).axes:
            assert [set(line.get_ydata()) for line in ax.lines[1:]] == [{1}] * pca


class TestSphere:
    @pytest.mark.parametrize("basis", BASES)
    def test_lies_in_three_dimensions_at_its_radius(self, digits_run: Run, tmp_path: Path, basis: str):
        result, kept = arrays(sphere, digits_run, tmp_path, basis=basis, radius=7.5, grid=6)
        assert kept["h"].shape == (6, 6, 64)
        np.testing.assert_allclose(np.linalg.norm(kept["h"], axis=-1), 7.5, rtol=1e-5)
        assert np.linalg.matrix_rank(kept["h"].reshape(36, 64), tol=1e-3) == 3
        np.testing.assert_allclose(kept["basis"] @ kept["basis"].T, np.eye(3), atol=1e-12)
        assert result["radius"] == 7.5
        assert np.array_equal(kept["images"], decoded(digits_run, kept["h"]))
        assert kept["images"].dtype == np.uint8

    def test_has_the_norm_of_the_priors_draws_unless_told_otherwise(self, digits_run: Run, tmp_path: Path):
        draws = digits_run.flow.prior.rsample(2000, generator=torch.Generator().manual_seed(1))
        result, kept = arrays(sphere, digits_run, tmp_path)
        assert result["radius"] == result["typical_radius"]
        assert result["radius"] == pytest.approx(float(draws.square().sum(1).mean().sqrt()), rel=0.02)
        np.testing.assert_allclose(np.linalg.norm(kept["h"], axis=-1), result["radius"], rtol=1e-5)
        top = sphere(digits_run, basis="top", out=tmp_path / "a.npz").radius
        assert top == pytest.approx(float(draws[:, :3].square().sum(1).mean().sqrt()), rel=0.05)

    def test_of_the_top_moves_the_components_of_largest_sigma_alone(self, digits_run: Run, tmp_path: Path):
        kept = arrays(sphere, digits_run, tmp_path, basis="top")[1]
        s = digits_run.flow.bijection.layers["scaling"].s.detach().numpy()
        moved = np.flatnonzero(np.abs(kept["h"]).max((0, 1)) > 1e-6)
        assert set(moved) == set(np.argsort(s)[:3])

    def test_of_the_top_counts_the_scale_of_the_prior(self, learned: tuple[Flow, Run], tmp_path: Path):
        h = arrays(sphere, learned[1], tmp_path, basis="top")[1]["h"]
        moved = np.abs(h - [1.0, 2.0, 3.0, 4.0, 5.0]).max((0, 1)) > 1e-4
        assert moved.tolist() == [False, True, True, False, True]

    def test_is_around_the_mode_and_in_units_of_the_prior(self, learned: tuple[Flow, Run], tmp_path: Path):
        flow, run = learned
        h = arrays(sphere, run, tmp_path, radius=2.0)[1]["h"]
        e = (h - flow.prior.loc.detach().numpy()) / flow.prior.log_scale.detach().exp().numpy()
        np.testing.assert_allclose(np.linalg.norm(e, axis=-1), 2.0, rtol=1e-4)

    def test_the_seed_decides_its_subspace(self, digits_run: Run, tmp_path: Path):
        first, again, other = (arrays(sphere, digits_run, tmp_path, seed=seed)[1]["h"] for seed in (1, 1, 2))
        assert np.array_equal(first, again)
        assert np.abs(first - other).max() > 1

    def test_points_are_once_around_and_stand_for_equal_areas(self):
        points = sphere_points(40)
        np.testing.assert_allclose(np.linalg.norm(points, axis=-1), 1)
        np.testing.assert_allclose(points.mean((0, 1)), 0, atol=1e-12)
        np.testing.assert_allclose((points**2).mean((0, 1)), 1 / 3, atol=1e-3)
        assert (np.diff(points[:, 0, 2]) < 0).all()
        turns = np.linalg.norm(points - np.roll(points, 1, axis=1), axis=-1)  # the last column is the first's neighbour
        np.testing.assert_allclose(turns, turns[:, :1] * np.ones(40))

    def test_even_points_are_far_from_one_another(self):
        points = even_points(200)
        np.testing.assert_allclose(np.linalg.norm(points, axis=-1), 1)
        np.testing.assert_allclose(points.mean(0), 0, atol=0.01)
        apart = np.linalg.norm(points[:, None] - points, axis=-1) + 9 * np.eye(200)
        assert apart.min() > 0.7 * np.sqrt(4 * np.pi / 200)

    def test_rotations_are_uniform(self):
        axes = np.stack([rotation(4, seed) for seed in range(2000)])
        np.testing.assert_allclose(axes.mean(0), 0, atol=0.05)
        np.testing.assert_allclose((axes**2).mean(0), 1 / 4, atol=0.03)


class TestInterpolate:
    @pytest.mark.parametrize("way", WAYS)
    def test_begins_and_ends_with_the_images_themselves(self, any_run: Run, tmp_path: Path, way: str):
        result, kept = arrays(interpolate, any_run, tmp_path, start=[3, 0, 1], end=[1, 2, 1], steps=4, way=way)
        shape = any_run.recipe.data.shape
        x = examples(any_run).reshape(-1, *shape)
        assert kept["images"].shape == kept["pixels"].shape == (3, 4, *shape)
        same = np.testing.assert_array_equal
        if x.dtype.kind == "f":
            same = lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)  # noqa: E731
        for name in ("images", "pixels"):
            same(kept[name][:, 0], x[[3, 0, 1]])
            same(kept[name][:, -1], x[[1, 2, 1]])
        assert result["pairs"] == [[3, 1], [0, 2], [1, 1]]

    def test_is_straight_in_h_and_decoded(self, digits_run: Run, tmp_path: Path):
        kept = arrays(interpolate, digits_run, tmp_path, start=[3], end=[8], steps=5)[1]
        start, end = codes(digits_run, examples(digits_run)[[3, 8]])
        expected = start + np.linspace(0, 1, 5)[:, None] * (end - start)
        np.testing.assert_allclose(kept["h"][0], expected, rtol=1e-4, atol=1e-4)
        assert np.array_equal(kept["images"], decoded(digits_run, kept["h"]))
        middle = examples(digits_run)[[3, 8]].astype(float).mean(0)
        assert np.abs(kept["pixels"][0, 2].ravel() - middle).max() <= 0.5

    def test_takes_the_first_images_two_by_two_unless_told_otherwise(self, digits_run: Run, colour_run: Run):
        assert interpolate(digits_run).pairs == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
        assert len(examples(colour_run)) < 10
        pairs = interpolate(colour_run).pairs
        assert 1 <= len(pairs) == len(examples(colour_run)) // 2

    def test_is_spherical_around_the_mode_in_units_of_the_prior(self, learned: tuple[Flow, Run], tmp_path: Path):
        flow, run = learned
        h = arrays(interpolate, run, tmp_path, start=[0], end=[1], steps=5, way="spherical")[1]["h"][0]
        np.testing.assert_allclose(h[[0, -1]], codes(run, examples(run)[:2]), rtol=1e-4, atol=1e-4)
        e = (h - flow.prior.loc.detach().numpy()) / flow.prior.log_scale.detach().exp().numpy()
        lengths = np.linalg.norm(e, axis=1)
        np.testing.assert_allclose(lengths, np.linspace(lengths[0], lengths[-1], 5), rtol=1e-4)
        turned = np.arccos(np.clip((e @ e[0]) / (lengths * lengths[0]), -1, 1))
        np.testing.assert_allclose(turned, np.linspace(0, turned[-1], 5), atol=2e-3)

    def test_a_straight_way_is_numpys(self):
        start, end, t = torch.randn(3, 6), torch.randn(3, 6), torch.linspace(0, 1, 7)[:, None]
        expected = np.linspace(start.numpy(), end.numpy(), 7, axis=1)
        np.testing.assert_allclose(straight(start, end, t), expected, atol=1e-6)

    def test_a_spherical_way_turns_evenly_while_its_length_goes_straight(self):
        start, end = 2 * torch.eye(5)[:1], 6 * torch.tensor([[0.6, 0.8, 0.0, 0.0, 0.0]])
        way = spherical(start, end, torch.linspace(0, 1, 5)[:, None])[0]
        torch.testing.assert_close(way.norm(dim=1), torch.tensor([2.0, 3.0, 4.0, 5.0, 6.0]))
        angles = torch.atan2(way[:, 1], way[:, 0])
        torch.testing.assert_close(angles, math.acos(0.6) * torch.linspace(0, 1, 5))

    @pytest.mark.parametrize("factor", [1.0, -2.0, 0.0])
    def test_a_spherical_way_without_a_plane_is_straight(self, factor: float):
        start, t = torch.randn(2, 6), torch.linspace(0, 1, 4)[:, None]
        torch.testing.assert_close(spherical(start, factor * start, t), straight(start, factor * start, t))


class TestTruncate:
    def test_that_keeps_all_gives_the_images_themselves(self, any_run: Run, tmp_path: Path):
        result, kept = arrays(truncate, any_run, tmp_path, n=3)
        assert result["kept"][0] == 0
        assert result["kept"][-1] == any_run.recipe.data.dim
        for name in ("nice", "pca"):
            if kept["truth"].dtype == np.uint8:
                assert np.array_equal(kept[name][:, -1], kept["truth"])
                assert result[f"{name}_errors"][-1] == 0
            else:
                np.testing.assert_allclose(kept[name][:, -1], kept["truth"], rtol=1e-4, atol=1e-4)

    def test_that_keeps_nothing_gives_the_mode_or_the_mean(self, digits_run: Run, tmp_path: Path):
        kept = arrays(truncate, digits_run, tmp_path, n=2, keep=[0])[1]
        mode = decoded(digits_run, np.zeros((1, 64)))
        assert np.array_equal(kept["nice"][:, 0], np.concatenate([mode, mode]))
        mean = (numpy_pca(digits_run)[0] * 17).astype(int).reshape(8, 8)
        assert np.array_equal(kept["pca"][0, 0], mean)

    def test_puts_the_rest_to_the_mode_of_a_learned_prior(self, learned: tuple[Flow, Run], tmp_path: Path):
        _, run = learned
        kept = arrays(truncate, run, tmp_path, n=4, keep=[0, 3])[1]["nice"]
        h, mode = codes(run, examples(run)[:4]), np.array([1.0, 2.0, 3.0, 4.0, 5.0])
        for column, chosen in enumerate(([], [1, 2, 4])):
            cut = np.tile(mode, (4, 1))
            cut[:, chosen] = h[:, chosen]
            np.testing.assert_allclose(kept[:, column], decoded(run, cut), rtol=1e-4, atol=1e-4)

    def test_keeps_the_components_of_largest_sigma(self, digits_run: Run, tmp_path: Path):
        kept = arrays(truncate, digits_run, tmp_path, n=4, keep=[5, 20])[1]
        h = codes(digits_run, examples(digits_run)[:4])
        s = digits_run.flow.bijection.layers["scaling"].s.detach().numpy()
        for column, k in enumerate((5, 20)):
            cut = np.zeros_like(h)
            chosen = np.argsort(s)[:k]
            cut[:, chosen] = h[:, chosen]
            assert np.array_equal(kept["nice"][:, column], decoded(digits_run, cut))

    def test_errors_are_those_of_the_pictures_and_of_numpys_pca(self, digits_run: Run, tmp_path: Path):
        x = examples(digits_run)
        result, kept = arrays(truncate, digits_run, tmp_path, n=len(x), keep=[3, 30])
        mean, _, directions = numpy_pca(digits_run)
        y = on_interval(digits_run, x)
        for column, k in enumerate((3, 30)):
            shadow = mean + (y - mean) @ directions[:k].T @ directions[:k]
            levels = np.clip(np.floor(shadow * 17), 0, 16).reshape(-1, 8, 8)
            assert (kept["pca"][:, column] == levels).mean() > 0.999
            for name in ("nice", "pca"):
                error = (kept[name][:, column].astype(float) - kept["truth"]) / 17
                assert result[f"{name}_errors"][column] == pytest.approx((error**2).mean(), rel=1e-4)

    def test_of_pca_falls_as_more_is_kept(self, any_run: Run):
        errors = truncate(any_run, n=1).pca_errors
        assert (np.diff(errors) < 1e-4).all()


class TestFigures:
    @pytest.mark.parametrize("look", LOOKS)
    def test_of_images_go_into_the_run_unless_told_otherwise(
        self, look: Callable[..., dict], colour_run: Run, copy_of: Callable[[Run], Run], picture_at: Callable
    ):
        run = copy_of(colour_run)
        path = run.path / "figures" / f"{look.__name__}.png"
        few = {"n": 2} if look is truncate else {}
        assert look(run, **few).out == str(path)
        assert min(picture_at(path).size) > 200

    @pytest.mark.parametrize("look", LOOKS)
    def test_name_the_data_and_the_recipe(
        self, look: Callable[..., dict], digits_run: Run, colour_run: Run, drawn: Callable
    ):
        few = {"n": 2} if look is truncate else {}
        assert drawn(look, digits_run, **few).get_suptitle().startswith("digits (recipe digits): ")
        assert drawn(look, colour_run, **few).get_suptitle().startswith("images (recipe digits): ")

    @pytest.mark.parametrize("look", LOOKS)
    @pytest.mark.parametrize("name", ["a", "a.png", "a.npz"])
    def test_do_not_take_the_place_of_a_folder(
        self, look: Callable[..., dict], name: str, digits_run: Run, tmp_path: Path, refusal: Callable[..., str]
    ):
        (tmp_path / name).mkdir()
        assert refusal(look, digits_run, out=tmp_path / name) == f"cannot write {tmp_path / name}: it is a folder"

    def test_take_endings_of_either_case(self, digits_run: Run, tmp_path: Path, picture_at: Callable):
        spectrum(digits_run, out=tmp_path / "a.PNG")
        assert picture_at(tmp_path / "a.PNG").width == 1170
        spectrum(digits_run, out=tmp_path / "a.NPZ")
        with np.load(tmp_path / "a.NPZ") as archive:
            assert "sigma" in archive

    @pytest.mark.parametrize("look", [spectrum, truncate])
    def test_of_curves_need_no_images(self, look: Callable[..., dict], rows_run: Run, tmp_path: Path):
        look(rows_run, out=tmp_path / "a.svg")
        assert "<svg" in (tmp_path / "a.svg").read_text()

    @pytest.mark.parametrize("look", [sphere, interpolate])
    def test_of_rows_are_refused_with_the_way_out(
        self, look: Callable[..., dict], rows_run: Run, tmp_path: Path, refusal: Callable[..., str]
    ):
        assert f"write arrays, to {look.__name__}.npz" in refusal(look, rows_run, out=tmp_path / "a.png")
        assert look(rows_run, out=tmp_path / "a.npz").out == str(tmp_path / "a.npz")

    @pytest.mark.parametrize("look", LOOKS)
    def test_of_another_kind_are_refused(
        self, look: Callable[..., dict], digits_run: Run, tmp_path: Path, refusal: Callable[..., str]
    ):
        assert "expected a picture" in refusal(look, digits_run, out=tmp_path / "a.xyz")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("look", "options", "says"),
    [
        (sphere, {"basis": "north"}, "a basis of random, top"),
        (sphere, {"radius": 0.0}, "a radius above 0"),
        (sphere, {"radius": math.nan}, "a radius above 0"),
        (sphere, {"grid": 0}, "a grid of 1"),
        (interpolate, {"start": [0], "end": [180]}, "images 0 to 179 of the test split, got 180"),
        (interpolate, {"start": [-1], "end": [0]}, "got -1"),
        (interpolate, {"steps": 1}, "2 steps"),
        (interpolate, {"way": "around"}, "a way of straight, spherical"),
        (truncate, {"n": 0}, "1 to 180 images"),
        (truncate, {"n": 181}, "1 to 180 images"),
        (truncate, {"keep": [0, 65]}, "0 to 64 components, got 65"),
        (truncate, {"keep": [-1, 3]}, "got -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    refusal: Callable[..., str], digits_run: Run, tmp_path: Path, look: Callable, options: dict, says: str
):
    assert says in refusal(look, digits_run, out=tmp_path / "a.npz", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_sphere_needs_three_dimensions(make: Callable, save_run: Callable, refusal: Callable[..., str]):
    flow, recipe = make(np.zeros((9, 2), np.float32))
    run = save_run("run", flow, recipe)
    assert "3 dimensions, this model has 2" in refusal(sphere, run, out=run.path / "a.npz")
