"""Readers of image files: exact contents, and one line for every damaged file."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import ExifTags, Image
from published import cifar10_rows, cut, idx_bytes, write_fer2013, write_idx, write_mnist, write_svhn
from scipy.io import savemat

from nicest.data import images, load
from nicest.data.images import Fit, read_images
from nicest.recipes import load_recipe
from nicest.recipes.splits import load_splits

Refusal = Callable[..., str]


@given(
    array=hnp.arrays(
        st.sampled_from(["u1", "i1", "i2", "i4", "f4", "f8"]).map(np.dtype),
        hnp.array_shapes(min_dims=1, max_dims=4, max_side=5),
    ),
    suffix=st.sampled_from(["", ".gz"]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_idx_round_trip(tmp_path: Path, array: np.ndarray, suffix: str) -> None:
    got = images.read_idx(write_idx(tmp_path / f"x-idx{suffix}", array))
    assert got.dtype == array.dtype
    assert got.dtype.isnative
    np.testing.assert_array_equal(got, array)


def test_idx_says_expected_and_actual_bytes(tmp_path: Path, refusal: Refusal) -> None:
    images_ = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    plain = cut(write_idx(tmp_path / "plain-idx3-ubyte", images_), 5)
    assert f"{plain}: expected 28 bytes by its header, got 23" in refusal(images.read_idx, plain)
    packed = cut(write_idx(tmp_path / "packed-idx3-ubyte.gz", images_), 12)
    assert f"{packed}: expected a whole gzip file" in refusal(images.read_idx, packed)
    longer = tmp_path / "longer-idx3-ubyte"
    longer.write_bytes(idx_bytes(images_) + b"\0")
    assert "expected 28 bytes by its header, got 29" in refusal(images.read_idx, longer)


@pytest.mark.parametrize("data", [b"", b"\0\0", b"PK\3\4rest", b"\0\0\x07\3rest", b"\0\0\x08\0"])
def test_idx_wrong_magic(tmp_path: Path, refusal: Refusal, data: bytes) -> None:
    path = tmp_path / "x-idx3-ubyte"
    path.write_bytes(data)
    message = refusal(images.read_idx, path)
    assert "magic number" in message
    assert f"got '{data[:4].hex(' ')}'" in message


def test_cifar10_pixels(tmp_path: Path) -> None:
    rows = cifar10_rows(2)["data_batch_1.bin"]
    (tmp_path / "b.bin").write_bytes(rows.tobytes())
    batch = images.read_cifar10(tmp_path / "b.bin")
    assert batch.shape == (2, 3, 32, 32)
    assert batch[1, 2, 3, 4] == rows[1, 1 + 2 * 1024 + 3 * 32 + 4]


def test_cifar10_damaged(tmp_path: Path, refusal: Refusal) -> None:
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(cifar10_rows(2)["data_batch_1.bin"].tobytes())
    message = refusal(images.read_cifar10, cut(path))
    assert f"{path}: expected a multiple of 3073 bytes (published: 30730000), got 6139, 1 whole images" in message
    path.write_bytes(b"")
    assert "got 0" in refusal(images.read_cifar10, path)
    path.write_bytes(b"\x0b" + bytes(3072))
    assert "expected labels 0..9, got 11" in refusal(images.read_cifar10, path)
    assert "cannot be read (No such file" in refusal(images.read_cifar10, tmp_path / "none.bin")


def test_svhn_is_planar(tmp_path: Path) -> None:
    train, _ = write_svhn(tmp_path, n_train=3)
    got = images.read_svhn(tmp_path / "train_32x32.mat")
    assert got.shape == (3, 3, 32, 32)
    assert got[2, 1, 5, 7] == train[5, 7, 1, 2]
    write_svhn(tmp_path, n_train=1)
    assert images.read_svhn(tmp_path / "train_32x32.mat").shape == (1, 3, 32, 32)


def test_mat_of_another_kind(tmp_path: Path, refusal: Refusal) -> None:
    path = tmp_path / "x.mat"
    savemat(path, {"X": np.zeros((32, 32, 3, 2))})
    assert "expected X to be (32, 32, 3, N) uint8, got (32, 32, 3, 2) float64" in refusal(images.read_svhn, path)
    savemat(path, {"Z": np.zeros(3)})
    assert "expected a MATLAB file with X of numbers" in refusal(images.read_svhn, path)
    savemat(path, {"images": np.zeros((4, 48, 48), np.uint8), "folds": np.zeros((3, 5))})
    assert "expected folds to be (4, 5)" in refusal(images.read_tfd, path)
    path.write_bytes(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(400))
    message = refusal(images.read_svhn, path)
    assert "save it with -v7" in message


@pytest.mark.parametrize("value", [np.array([[1, 2]], object), {"a": 1}, "words", np.ones((32, 32, 3, 2)) * 1j])
def test_mat_variables_that_are_no_real_numbers(tmp_path: Path, refusal: Refusal, value: object) -> None:
    savemat(tmp_path / "x.mat", {"X": value})
    assert "expected X to be (32, 32, 3, N) uint8, got" in refusal(images.read_svhn, tmp_path / "x.mat")


@pytest.mark.parametrize("suffix", [".csv", ".npz"])
def test_fer2013_contents(tmp_path: Path, suffix: str) -> None:
    faces, usage = write_fer2013(tmp_path, suffix=suffix)
    got_faces, got_usage = images.read_fer2013(tmp_path / f"fer2013{suffix}")
    np.testing.assert_array_equal(got_faces, faces)
    np.testing.assert_array_equal(got_usage, usage)


def test_fer2013_csv_of_another_hand(tmp_path: Path) -> None:
    """Another order of columns, blanks after commas, quotes, a byte order mark, other line ends, a blank line."""
    path = tmp_path / "fer2013.csv"
    text = f'\ufeffemotion, Usage, pixels\r\n0, Training,"{"7 " * 2304}"\r\n\r\n1,PublicTest,{" 255" * 2304}'
    path.write_bytes(text.encode())
    faces, usage = images.read_fer2013(path)
    assert (faces[0] == 7).all()
    assert (faces[1] == 255).all()
    assert usage.tolist() == ["Training", "PublicTest"]


def _csv(pixels: str = "0 " * 2304, usage: str = "Training", columns: str = "emotion,pixels,Usage") -> str:
    return f"{columns}\n0,{pixels},{usage}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "got no images"),
        (_csv(columns="label,faces,Usage"), "expected the columns emotion, pixels and Usage"),
        (_csv("0 " * 2303), "image 0 has 2303 pixels"),
        (_csv("0 " * 2303 + "256"), "bytes must be in range(0, 256)"),
        (_csv("0 " * 2303 + "0.5"), "'0.5'"),
        (_csv(usage="Validation"), "expected images of the usages Training, PublicTest, PrivateTest, got 'Validation'"),
        (_csv(usage='"a\nb"'), r"got 'a\nb'"),
        (_csv() + "0,1 2 3\n", "image 1 has 3 pixels"),
        (_csv() + '"' + "0\n" * 99_999, "field larger than field limit"),
        ("PK\3\4\0\ufffd\udcff\n", "expected the columns emotion, pixels and Usage"),
    ],
)
def test_fer2013_csv_damaged(tmp_path: Path, refusal: Refusal, text: str, words: str) -> None:
    path = tmp_path / "fer2013.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    message = refusal(images.read_fer2013, path)
    assert message.startswith(f"{path}: ")
    assert words in message


FACES = np.zeros((2, 48, 48), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"images": FACES}, "expected the arrays images and usage, got 'images'"),
        ({"images": FACES[:0], "usage": np.array([], str)}, "got no images"),
        (
            {"images": FACES[:, 1:], "usage": np.array(["Training"] * 2)},
            "to be (N, 48, 48) uint8, got (2, 47, 48)",
        ),
        ({"images": FACES, "usage": np.array([0, 1])}, "expected usage to be (2) str, got (2,) int64"),
        ({"images": FACES, "usage": np.array(["Training", "test"])}, "Training, PublicTest, PrivateTest, got 'test'"),
    ],
)
def test_fer2013_npz_damaged(tmp_path: Path, refusal: Refusal, arrays: dict[str, np.ndarray], words: str) -> None:
    np.savez(tmp_path / "fer2013.npz", **arrays)  # type: ignore[arg-type]
    assert words in refusal(images.read_fer2013, tmp_path / "fer2013.npz")


def _save_images(folder: Path, pixels: np.ndarray, suffix: str = ".png") -> None:
    folder.mkdir(exist_ok=True)
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{i:02d}{suffix}")


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".gif"])
def test_grey_folder(tmp_path: Path, suffix: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 6), np.uint8)
    _save_images(tmp_path / "a", pixels, suffix)
    np.testing.assert_array_equal(images.read_images(images.image_files(tmp_path)), pixels)
    splits = load(str(tmp_path / "a"))
    assert (splits.shape, splits.levels, splits.train.dtype) == ((4, 6), 256, np.uint8)


@pytest.mark.parametrize("suffix", [".png", ".PNG", ".bmp"])
def test_colour_folder_is_recursive_sorted_and_planar(tmp_path: Path, suffix: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 5, 3), np.uint8)
    _save_images(tmp_path / "b", pixels[3:], suffix)
    _save_images(tmp_path / "a", pixels[:3], suffix)
    (tmp_path / "b" / "notes.txt").write_text("not an image")
    (tmp_path / "b" / f"._00{suffix}").write_text("a resource fork")
    np.testing.assert_array_equal(images.read_images(images.image_files(tmp_path)), pixels)
    splits = load(str(tmp_path))
    assert (splits.shape, splits.dim, splits.levels) == ((3, 4, 5), 60, 256)
    planar = {row.tobytes() for row in pixels.transpose(0, 3, 1, 2).reshape(6, -1)}
    assert {row.tobytes() for part in ("train", "valid", "test") for row in splits.split(part)} == planar


def test_images_of_other_depths(tmp_path: Path) -> None:
    wide = np.random.default_rng(0).integers(0, 65536, (4, 3, 3), np.uint16)
    _save_images(tmp_path / "wide", wide, ".tif")
    assert load(str(tmp_path / "wide")).levels == 65536
    assert load(str(tmp_path / "wide")).train.dtype == np.uint16
    _save_images(tmp_path / "bits", wide > 30000)
    assert load(str(tmp_path / "bits")).levels == 2
    (tmp_path / "palette").mkdir()
    colours = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    for i in range(3):
        colours.quantize(16).save(tmp_path / "palette" / f"{i}.png")
    assert load(str(tmp_path / "palette")).shape == (3, 4, 4)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright_by_their_exif(tmp_path: Path, suffix: str, orientation: int) -> None:
    """Where the first row and the first column of what is stored are to be seen is by the standard, EXIF 2.3."""
    rows, columns = ["", "tl", "tr", "br", "bl", "lt", "rt", "rb", "lb"][orientation]
    stored = np.full((32, 48), 100, np.uint8)
    stored[:8], stored[8:, :8] = 0, 200  # its first row is dark, its first column light
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(stored).convert("RGB").save(tmp_path / f"x{suffix}", exif=exif, quality=100, lossless=True)
    (seen,) = read_images(images.image_files(tmp_path))
    assert seen.shape == ((32, 48, 3) if orientation < 5 else (48, 32, 3))
    sides = {"t": seen[2, 12:-12], "b": seen[-3, 12:-12], "l": seen[12:-12, 2], "r": seen[12:-12, -3]}
    assert {side for side, pixels in sides.items() if pixels.mean() < 20} == {rows}
    assert {side for side, pixels in sides.items() if pixels.mean() > 180} == {columns}


@pytest.mark.parametrize("suffix", [".gif", ".png", ".webp", ".tif"])
def test_animations_and_pages_are_refused(tmp_path: Path, refusal: Refusal, suffix: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    frames[0].save(tmp_path / f"x{suffix}", save_all=True, append_images=frames[1:])
    line = refusal(read_images, images.image_files(tmp_path))
    assert f"x{suffix}: expected one picture, got an animation or several pages; save one of them" in line
    frames[0].save(tmp_path / f"x{suffix}", save_all=True)
    assert read_images(images.image_files(tmp_path)).shape == (1, 8, 8, 3)


def test_what_a_camera_adds_to_a_photo_is_no_page(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "red").save(
        tmp_path / "x.jpg", "MPO", save_all=True, append_images=[Image.new("RGB", (4, 4))]
    )
    (pixels,) = read_images(images.image_files(tmp_path))
    np.testing.assert_allclose(pixels.mean((0, 1)), [255, 0, 0], atol=3)


def test_bad_folders(tmp_path: Path, refusal: Refusal) -> None:
    folder = tmp_path / "faces"
    folder.mkdir()
    assert f"{folder}: expected images (.png" in refusal(load, str(folder))
    _save_images(folder, np.zeros((3, 4, 4), np.uint8))
    Image.fromarray(np.zeros((5, 4), np.uint8)).save(folder / "99.png")
    message = refusal(load, str(folder))
    assert f"{folder / '00.png'} of 4x4 grey" in message
    assert f"{folder / '99.png'} of 4x5 grey" in message
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(folder / "99.png")
    message = refusal(load, str(folder))
    assert "99.png of 4x4 RGB; convert them all to 8-bit grey, mode L, or all to RGB" in message
    assert "data." not in message
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(folder / "99.png")
    assert "99.png of 4x4 16-bit grey; convert them all to 8-bit grey" in refusal(load, str(folder))
    Image.fromarray(np.zeros((4, 4, 4), np.uint8)).save(folder / "99.png")
    assert "99.png: expected a grey or RGB image, got mode RGBA" in refusal(load, str(folder))
    (folder / "99.png").write_text("no image")
    assert "99.png: expected an image, got" in refusal(load, str(folder))
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)).save(folder / "99.png")
    cut(folder / "99.png", 2000)
    assert "99.png: expected an image, got" in refusal(load, str(folder))


def test_idx_folders(tmp_path: Path, refusal: Refusal) -> None:
    train, test = write_mnist(tmp_path / "fashion", 12, 4, suffix="")
    splits = load(str(tmp_path / "fashion"))
    assert splits.name == "fashion"
    np.testing.assert_array_equal(splits.train, train[:10].reshape(10, -1))
    np.testing.assert_array_equal(splits.valid, train[10:].reshape(2, -1))
    np.testing.assert_array_equal(splits.test, test.reshape(4, -1))

    own = tmp_path / "own"
    write_idx(own / "a-images-idx3-ubyte.gz", train)
    write_idx(own / "b-images-idx3-ubyte", test)
    write_idx(own / "a-labels-idx1-ubyte", np.zeros(12, np.uint8))
    splits = load(str(own), seed=3)
    assert [len(splits.split(part)) for part in ("train", "valid", "test")] == [12, 2, 2]
    assert splits.levels == 256
    assert len(load(str(own / "a-images-idx3-ubyte.gz")).train) == 10

    write_idx(own / "c-images-idx2-float.gz", np.zeros((3, 4), "f4"))
    message = refusal(load, str(own))
    assert "a-images-idx3-ubyte.gz of (28, 28) uint8" in message
    assert "c-images-idx2-float.gz of (4,) float32" in message
    write_idx(own / "a-images-idx3-ubyte.gz", np.zeros(9, np.uint8))
    assert "rank 1" in refusal(load, str(own / "a-images-idx3-ubyte.gz"))


@pytest.mark.parametrize("dtype", ["f4", "f8", "i2"])
def test_idx_of_other_types_is_continuous(tmp_path: Path, dtype: str) -> None:
    values = np.random.default_rng(0).permutation(80).reshape(20, 4).astype(dtype)
    splits = load(str(write_idx(tmp_path / "rows-idx2-other", values)))
    assert (splits.train.dtype, splits.levels, splits.shape) == (np.float32, None, (4,))


class TestFit:
    """Images of several sizes, cropped and resized where it is asked for, and only there."""

    def write(self, folder: Path, *sizes: tuple[int, int], mode: str = "RGB") -> list[Path]:
        paths = []
        for i, (height, width) in enumerate(sizes):
            ramp = np.indices((height, width)).sum(0).astype(np.uint8)
            paths.append(folder / f"{i}.png")
            Image.fromarray(ramp).convert(mode).save(paths[-1])
        return paths

    def test_several_sizes_are_refused_with_the_remedy(self, tmp_path: Path, refusal: Callable[..., str]):
        line = refusal(read_images, self.write(tmp_path, (8, 9), (9, 8)))
        (remedy,) = re.findall(r"set '([^']+)'", line)
        fit = load_recipe("images").override(remedy).data
        assert read_images(sorted(tmp_path.iterdir()), Fit(fit.crop, fit.resize)).shape == (2, 32, 32, 3)

    def test_crop_keeps_the_middle(self, tmp_path: Path):
        (image,) = read_images(self.write(tmp_path, (6, 10), mode="L"), Fit(crop=(2, 4)))
        assert np.array_equal(image, np.indices((6, 10)).sum(0)[2:4, 3:7])

    def test_resize_after_crop(self, tmp_path: Path):
        images = read_images(self.write(tmp_path, (20, 30), (40, 24)), Fit(crop=(20, 20), resize=(8, 6)))
        assert images.shape == (2, 8, 6, 3)

    def test_too_small_for_the_crop(self, tmp_path: Path, refusal: Callable[..., str]):
        line = refusal(read_images, self.write(tmp_path, (8, 9)), Fit(crop=(9, 9)))
        assert "at least 9x9, for data.crop, got 9x8" in line

    def test_a_folder_by_its_recipe(self, tmp_path: Path):
        self.write(tmp_path, *((8 + i, 12) for i in range(12)))
        recipe = load_recipe("images").override(f"data.name={tmp_path}", "data.resize=[4, 5]")
        assert load_splits(recipe).shape == (3, 4, 5)

    def test_a_table_is_none(self, tmp_path: Path, refusal: Callable[..., str]):
        (tmp_path / "t.csv").write_text("a,b\n1,2\n3,4\n5,6\n")
        recipe = load_recipe("images").override(f"data.name={tmp_path / 't.csv'}")
        assert "for folders of images: use the recipe `table`" in refusal(load_splits, recipe)
        self.write(tmp_path, *[(4, 4)] * 5)
        recipe = load_recipe("table").override(f"data.name={tmp_path}")
        assert "for tables: use the recipe `images`" in refusal(load_splits, recipe)
        assert load_splits(recipe.override("data.kind=auto")).shape == (3, 4, 4)

    def test_none_is_given(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]):
        monkeypatch.chdir(tmp_path)
        assert "give its path as data" in refusal(load_splits, load_recipe("images"))
        (tmp_path / "images").mkdir()
        self.write(tmp_path / "images", *[(4, 5)] * 5)
        assert load_splits(load_recipe("images")).shape == (3, 4, 5)

    def test_is_for_folders_of_images(self, tmp_path: Path, refusal: Callable[..., str]):
        np.save(tmp_path / "x.npy", np.zeros((5, 4), np.uint8))
        recipe = load_recipe("images").override(f"data.name={tmp_path / 'x.npy'}", "data.resize=[4, 5]")
        assert "for folders of images" in refusal(load_splits, recipe)

    @pytest.mark.parametrize("size", ["[4]", "[0, 4]", "[4, 4, 4]"])
    def test_no_size(self, size: str, refusal: Callable[..., str]):
        assert "a height and a width" in refusal(load_recipe("images").override, f"data.crop={size}")
