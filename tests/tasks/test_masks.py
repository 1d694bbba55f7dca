"""masks: every form hides exactly what it names, for any shape of image."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from nicest.tasks.masks import FIGURE, hidden_by, mask_list, mask_name

MNIST = (28, 28)
SHAPES = st.one_of(
    st.tuples(st.integers(1, 9)),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.sampled_from([1, 3]), st.integers(1, 9), st.integers(1, 9)),
)


def planes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Channels, rows and columns of any shape."""
    channels, height, width = (1, 1, *shape)[-3:]
    return channels, height, width


def spell(numbers: set[int]) -> str:
    """Numbers as ranges that leave out their end."""
    starts = sorted(i for i in numbers if i - 1 not in numbers)
    ends = sorted(i + 1 for i in numbers if i + 1 not in numbers)
    return ",".join(str(a) if b == a + 1 else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


class TestTheFigure:
    """The regions of the authors' code, on 28 x 28 row by row."""

    @pytest.mark.parametrize(
        ("name", "region"), [("top", np.s_[:392]), ("bottom", np.s_[392:]), ("odd", np.s_[::2]), ("even", np.s_[1::2])]
    )
    def test_flat_masks(self, name: str, region: slice):
        expected = np.zeros(784, bool)
        expected[region] = True
        assert np.array_equal(hidden_by(name, MNIST)[0].ravel(), expected)

    @pytest.mark.parametrize(
        ("name", "region"),
        [
            ("left", np.s_[:, :14]),
            ("right", np.s_[:, 14:]),
            ("middle-rows", np.s_[7:21]),
            ("middle-columns", np.s_[:, 7:21]),
        ],
    )
    def test_square_masks(self, name: str, region: tuple[slice, ...]):
        expected = np.zeros(MNIST, bool)
        expected[region] = True
        assert np.array_equal(hidden_by(name, MNIST)[0], expected)

    @pytest.mark.parametrize(("name", "count"), [("random:75", 588), ("random:90", 706), ("random:12.5", 98)])
    def test_random_masks_hide_their_share_of_other_pixels_in_every_image(self, name: str, count: int):
        hidden = hidden_by(name, MNIST, 20)
        assert (hidden.sum((1, 2)) == count).all()
        assert len(np.unique(hidden.reshape(20, -1), axis=0)) == 20
        assert np.array_equal(hidden, hidden_by(name, MNIST, 20))
        assert not np.array_equal(hidden, hidden_by(name, MNIST, 20, seed=1))

    def test_are_ten_in_the_captions_order(self):
        assert mask_list("paper") == list(FIGURE)
        assert [name.split(":")[0] for name in FIGURE] == [
            *("top", "bottom", "odd", "even", "left", "right"),
            *("middle-rows", "middle-columns", "random", "random"),
        ]
        assert mask_list(["top", "paper", "rows:0"]) == ["top", *FIGURE, "rows:0"]

    @given(st.tuples(st.integers(2, 12), st.integers(2, 12)))
    def test_halves_and_parities_are_complements_at_any_size(self, shape: tuple[int, int]):
        for one, other in (("top", "bottom"), ("left", "right"), ("odd", "even")):
            assert (hidden_by(one, shape) ^ hidden_by(other, shape)).all()


class TestRanges:
    @given(SHAPES, st.data())
    def test_hide_exactly_what_they_name(self, shape: tuple[int, ...], data: st.DataObject):
        channels, height, width = planes(shape)
        axes = {"channels": (0, channels), "rows": (1, height), "columns": (2, width)}
        kind = data.draw(st.sampled_from(sorted(axes)))
        axis, size = axes[kind]
        chosen = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
        hidden = hidden_by(f"{kind}:{spell(chosen)}", shape, 2).reshape(2, channels, height, width)
        expected = np.zeros((channels, height, width), bool)
        np.moveaxis(expected, axis, 0)[sorted(chosen)] = True
        assert (hidden == expected).all()

    @given(SHAPES, st.data())
    def test_of_pixels_round_trip_in_every_channel(self, shape: tuple[int, ...], data: st.DataObject):
        channels, height, width = planes(shape)
        chosen = data.draw(st.sets(st.integers(0, height * width - 1), min_size=1))
        hidden = hidden_by(f"pixels:{spell(chosen)}", shape).reshape(channels, -1)
        assert all(set(np.flatnonzero(plane)) == chosen for plane in hidden)

    def test_leave_out_their_end_so_that_halves_meet(self):
        assert np.array_equal(hidden_by("rows:0-14", MNIST), hidden_by("top", MNIST))
        assert np.array_equal(hidden_by("rows:14-28", MNIST), hidden_by("bottom", MNIST))

    def test_box_is_rows_times_columns(self):
        expected = np.zeros((3, 4, 6), bool)
        expected[:, 1:3, 2:5] = True
        assert np.array_equal(hidden_by("box:1-3,2-5", (3, 4, 6))[0], expected)

    def test_join_with_plus(self):
        both = hidden_by("rows:0 + columns:2-4", (4, 6))[0]
        assert np.array_equal(both, hidden_by("rows:0", (4, 6))[0] | hidden_by("columns:2-4", (4, 6))[0])


class TestFiles:
    def test_a_picture_hides_where_it_is_bright(self, tmp_path: Path):
        chosen = np.random.default_rng(0).random((4, 6)) < 0.5
        for name, image in (
            ("grey.png", Image.fromarray(np.where(chosen, 200, 90).astype(np.uint8))),
            ("binary.png", Image.fromarray(chosen)),
            ("colour.png", Image.fromarray(np.stack([np.where(chosen, 255, 30).astype(np.uint8)] * 3, -1))),
            ("deep.png", Image.fromarray(np.where(chosen, 60000, 3000).astype(np.uint16))),
        ):
            image.save(tmp_path / name)
            assert np.array_equal(hidden_by(str(tmp_path / name), (4, 6))[0], chosen), name
            assert (hidden_by(str(tmp_path / name), (3, 4, 6), 2) == chosen).all(), name

    @given(SHAPES, st.integers(1, 3), st.randoms(use_true_random=False))
    def test_an_array_hides_where_it_is_not_zero(self, shape: tuple[int, ...], n: int, random: object):
        rng = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
        for form in {shape, shape[-2:], (n, *shape)}:
            array = rng.integers(0, 3, form)
            array[..., 0] = 1
            expected = array if array.ndim > len(shape) else np.broadcast_to(array, (n, *shape))
            assert np.array_equal(hidden_by(array, shape, n), expected != 0)

    def test_an_npy_file_is_its_array(self, tmp_path: Path):
        array = np.eye(5, dtype=bool)
        np.save(tmp_path / "mask.npy", array)
        assert np.array_equal(hidden_by(str(tmp_path / "mask.npy"), (5, 5))[0], array)
        assert (mask_name(array), mask_name("top"), mask_name("random:12.5")) == ("array", "top", "random:12.5")
        assert [mask_name(f"/a/b/{name}") for name in ("mask.npy", "mask.PNG")] == ["mask.npy", "mask.PNG"]
        assert mask_list(array)[0] is array


class TestRefusals:
    @pytest.mark.parametrize(
        ("mask", "says"),
        [
            ("topp", "did you mean 'top'"),
            ("", "expected a mask such as paper, top"),
            ("rows", "ranges such as 0-3,5, got ''"),
            ("rows:a", "ranges such as 0-3,5, got 'a'"),
            ("rows:-3", "ranges such as 0-3,5, got '-3'"),
            ("rows:3-", "ranges such as 0-3,5, got '3-'"),
            ("rows:3-3", "within 0-28"),
            ("columns:5-2", "within 0-28"),
            ("columns:20-29", "within 0-28"),
            ("pixels:784", "within 0-784"),
            ("channels:1", "within 0-1"),
            ("box:1-3", "expected a mask such as"),
            ("random:0", "expected a mask such as"),
            ("random:101", "expected a mask such as"),
            ("random:0.01", "hides nothing of image 0"),
            ("no.png", "cannot be read"),
            ("no.npy", "no.npy"),
        ],
    )
    def test_say_what_was_expected(self, refusal: Callable[..., str], mask: str, says: str):
        assert says in refusal(hidden_by, mask, MNIST)

    def test_of_an_array_of_another_shape_or_of_nothing(self, refusal: Callable[..., str]):
        assert "(2, 4, 6), got (6, 4)" in refusal(hidden_by, np.ones((6, 4)), (4, 6), 2)
        array = np.ones((2, 4, 6))
        array[1] = 0
        assert "hides nothing of image 1" in refusal(hidden_by, array, (4, 6), 2)

    def test_halves_of_plain_rows_have_no_top(self, refusal: Callable[..., str]):
        assert hidden_by("left", (5,)).tolist() == [[True, True, False, False, False]]
        assert "hides nothing" in refusal(hidden_by, "top", (5,))
