"""plots: exact pixels of grids, and figures whose lines are the numbers they were given."""

import io
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from PIL import Image

from nicest.errors import NicestError
from nicest.plots import (
    ACCENT,
    INK,
    contact_sheet,
    heading,
    image_grid,
    likelihood_figure,
    panel_figure,
    save_figure,
    spectrum_figure,
    sphere_figure,
)

METRICS = [
    {"epoch": 1, "train_nats": -90.0, "valid_nats": -80.0},
    {"epoch": 2, "train_nats": -50.0, "valid_nats": None},  # not finite: JSON has it as null
    {"epoch": 3, "train_nats": -10.0, "valid_nats": -20.0},
]
GAP = 96


class TestImageGrid:
    def test_of_grey_images_is_exact(self):
        images = np.array([[[0, 51, 102], [153, 204, 255]], [[255, 0, 0], [0, 0, 255]], [[1, 2, 3], [4, 5, 6]]])
        sheet = np.asarray(image_grid(images, brightest=255, columns=2, size=1))
        g = GAP
        expected = [
            [g, g, g, g, g, g, g, g, g],
            [g, 0, 51, 102, g, 255, 0, 0, g],
            [g, 153, 204, 255, g, 0, 0, 255, g],
            [g, g, g, g, g, g, g, g, g],
            [g, 1, 2, 3, g, g, g, g, g],
            [g, 4, 5, 6, g, g, g, g, g],
            [g, g, g, g, g, g, g, g, g],
        ]
        assert sheet.tolist() == expected

    def test_of_colour_images_puts_each_plane_in_its_channel_upright(self):
        image = np.zeros((1, 3, 2, 3), np.uint8)  # planar: 2 high, 3 wide
        image[0, 0, 0, 2] = 255  # red, top right
        image[0, 1, 1, 0] = 255  # green, bottom left
        image[0, 2, 0, 0] = 255  # blue, top left
        picture = image_grid(image, brightest=255, gap=0, size=1)
        assert (picture.mode, picture.size) == ("RGB", (3, 2))
        black, red, green, blue = (0, 0, 0), (255, 0, 0), (0, 255, 0), (0, 0, 255)
        pixels = [[picture.getpixel((column, row)) for column in range(3)] for row in range(2)]
        assert pixels == [[blue, black, red], [green, black, black]]

    def test_of_one_channel_is_the_grey_grid(self):
        images = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
        with_axis = image_grid(images[:, None], brightest=23)
        assert with_axis.mode == "L"
        assert np.array_equal(np.asarray(with_axis), np.asarray(image_grid(images, brightest=23)))

    def test_scales_levels_to_bytes_and_clips_what_lies_outside(self):
        image = np.array([[[-1.0, 0.0, 4.0, 8.0, 16.0, 99.0]]])
        sheet = np.asarray(image_grid(image, brightest=16, gap=0, size=1))
        assert sheet.tolist() == [[0, 0, 64, 128, 255, 255]]

    @pytest.mark.parametrize(("n", "rows", "columns"), [(1, 1, 1), (2, 1, 2), (5, 2, 3), (9, 3, 3), (10, 3, 4)])
    def test_is_as_square_as_can_be(self, n: int, rows: int, columns: int):
        picture = image_grid(np.zeros((n, 3, 3)), brightest=1, size=1)
        assert picture.size == (4 * columns + 1, 4 * rows + 1)

    @pytest.mark.parametrize(("n", "side"), [(100, 8), (100, 28), (100, 32), (1, 5), (400, 48)])
    def test_is_enlarged_by_whole_pixels_to_at_least_its_size(self, n: int, side: int):
        images = np.random.default_rng(0).integers(0, 256, (n, side, side))
        small, large = (image_grid(images, brightest=255, size=size) for size in (1, 720))
        assert max(large.size) >= 720
        zoom = large.width // small.width
        assert zoom == 1 or (zoom - 1) * small.width < 720
        assert np.array_equal(np.asarray(large), np.kron(np.asarray(small), np.ones((zoom, zoom), np.uint8)))


class TestSpectrum:
    SIGMA = np.array([4.0, 2.0, 1.0, 0.01])

    def test_draws_beside_them_the_pca_or_the_level_of_whitened_data(self):
        pca = self.SIGMA + 1
        for options, expected, name in (
            ({"pca": pca}, pca, "PCA of the data"),
            ({"whitened": True}, 1, "whitened data"),
        ):
            ax = spectrum_figure(self.SIGMA, title="a title", **options).axes[0]
            assert (np.array(ax.lines[1].get_ydata()) == expected).all()
            assert [text.get_text() for text in ax.get_legend().get_texts()] == ["NICE, of each component", name]
            assert ax.get_ylabel() == "standard deviation"

    def test_has_a_linear_and_a_logarithmic_axis(self):
        figure = spectrum_figure(self.SIGMA, title="a title")
        assert [ax.get_yscale() for ax in figure.axes] == ["linear", "log"]
        assert figure.get_suptitle() == "a title"
        for ax in figure.axes:
            assert np.array_equal(ax.lines[0].get_xdata(), [1, 2, 3, 4])
            assert np.array_equal(ax.lines[0].get_ydata(), self.SIGMA)


@pytest.mark.parametrize(
    ("data", "shown"),
    [("digits", "digits"), ("/a/rows.npy", "rows.npy"), ("some/images/", "images"), ("a$b$", r"a\$b\$")],
)
def test_a_heading_names_the_data_and_the_recipe(data: str, shown: str):
    assert heading(data, "mnist") == f"{shown} (recipe mnist)"


class TestLikelihood:
    def test_draws_both_curves_and_leaves_a_hole_where_there_is_no_number(self):
        (ax,) = likelihood_figure(METRICS, title="digits").axes
        train, valid = ax.lines
        assert ax.get_title() == "digits"
        assert [text.get_text() for text in ax.get_legend().get_texts()][-1] == "validation"
        assert np.array_equal(train.get_xdata(), [1, 2, 3])
        assert np.array_equal(train.get_ydata(), [-90, -50, -10])
        assert np.array_equal(valid.get_ydata().astype(float), [-80, np.nan, -20], equal_nan=True)
        assert to_hex(valid.get_color()) == ACCENT

    def test_draws_a_level_with_its_name_for_each_baseline(self):
        levels = {"full_gaussian": 48.0, "zca_logistic": 52.5}
        (ax,) = likelihood_figure(METRICS, title="digits", baselines=levels).axes
        levels = [line for line in ax.lines if to_hex(line.get_color()) == INK]
        assert sorted(line.get_ydata()[0] for line in levels) == [48.0, 52.5]
        assert [text.get_text().strip() for text in ax.texts] == ["zca logistic 52.5", "full gaussian 48.0"]
        upper, lower = (text.get_position()[1] for text in ax.texts)
        assert upper == 52.5
        assert lower < 48.0  # else one would hide the other

    def test_the_axis_leaves_out_where_training_comes_from_and_what_is_far_below(self):
        rows = [{"epoch": i, "train_nats": 100.0 + i, "valid_nats": 90.0 + i} for i in range(1, 100)]
        rows[0] |= {"train_nats": -5000.0, "valid_nats": -5000.0}
        (ax,) = likelihood_figure(rows, title="digits", baselines={"near": 80.0, "far": -900.0}).axes
        low, high = ax.get_ylim()
        assert 50 < low < 80
        assert 199 < high < 220
        assert [text.get_text().split()[0] for text in ax.texts] == ["near"]


class TestContactSheet:
    @pytest.fixture
    def pictures(self, tmp_path: Path) -> dict[str, Path]:
        colours = {"one": 10, "two": 120, "three": 250}
        for name, grey in colours.items():
            Image.new("L", (6, 4), grey).save(tmp_path / f"{name}.png")
        return {name.title(): tmp_path / f"{name}.png" for name in colours}

    def test_shows_each_picture_under_its_name(self, pictures: dict[str, Path]):
        figure = contact_sheet(pictures, title="all")
        shown = [(ax.get_title(), int(ax.images[0].get_array()[0, 0])) for ax in figure.axes if ax.images]
        assert shown == [("One", 10), ("Two", 120), ("Three", 250)]
        assert figure.get_suptitle() == "all"
        assert len(figure.axes) == 4
        assert not any(ax.axison for ax in figure.axes)


class TestSaveFigure:
    FIGURE = spectrum_figure(np.array([2.0, 1.0]), title="t")

    @pytest.mark.parametrize("name", ["a.png", "a.PNG", "no suffix"])
    def test_writes_a_picture_in_a_folder_that_it_makes(self, tmp_path: Path, name: str):
        path = tmp_path / "new" / "folder" / name
        save_figure(self.FIGURE, path)
        picture = Image.open(io.BytesIO(path.read_bytes()))
        assert picture.format == "PNG"
        assert picture.size == (1170, 468)
        assert len(np.unique(np.asarray(picture.convert("L")))) > 20
        assert [file.name for file in path.parent.iterdir()] == [name]

    @pytest.mark.parametrize(("side", "n"), [(8, 10), (28, 10), (48, 20)])
    def test_shows_every_pixel_of_a_grid_in_the_same_size(self, tmp_path: Path, side: int, n: int):
        images = np.random.default_rng(0).integers(0, 256, (n * n, side, side))
        grid = image_grid(images, brightest=255, size=1)
        pixels = np.asarray(grid).astype(int)
        names = [str(k) for k in range(n)]
        for figure in (panel_figure({"a": grid, "b": grid}, names, title="t"), sphere_figure(grid, n, title="t")):
            save_figure(figure, tmp_path / "a.png")
            with Image.open(tmp_path / "a.png") as picture:
                shown = np.asarray(picture.convert("L")).astype(int)
            for box in (ax.bbox for ax in figure.axes):
                zoom, top, left = round(box.width) // grid.width, len(shown) - round(box.y1), round(box.x0)
                expected = np.kron(pixels, np.ones((zoom, zoom), int))
                part = shown[top : top + len(expected), left : left + expected.shape[1]]
                assert zoom >= 1
                assert np.abs(part - expected).max() <= 1

    def test_writes_vectors_too(self, tmp_path: Path):
        save_figure(self.FIGURE, tmp_path / "a.svg")
        assert "<svg" in (tmp_path / "a.svg").read_text()

    def test_refuses_a_kind_it_cannot_draw(self, tmp_path: Path):
        with pytest.raises(NicestError, match=r"\.png.*a\.xyz"):
            save_figure(self.FIGURE, tmp_path / "a.xyz")
        assert list(tmp_path.iterdir()) == []

    def test_that_fails_leaves_what_was_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        path = tmp_path / "a.png"
        path.write_bytes(b"before")

        def full(self: Path, data: bytes) -> int:
            with self.open("wb") as file:
                file.write(data[:100])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(NicestError, match=r"a\.png: No space left on device"):
            save_figure(self.FIGURE, path)
        assert [file.name for file in tmp_path.iterdir()] == ["a.png"]
        assert path.read_bytes() == b"before"

    def test_says_when_the_folder_cannot_be_made(self, tmp_path: Path):
        (tmp_path / "file").write_text("")
        with pytest.raises(NicestError, match=r"cannot write .*a\.png"):
            save_figure(self.FIGURE, tmp_path / "file" / "a.png")
