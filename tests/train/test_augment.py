"""Warps move what they should, by as much as they say, and leave alone what they should not touch."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nicest.flows import Units
from nicest.recipes.recipe import AugmentSettings
from nicest.train.augment import Motion, Warp

LAB = AugmentSettings(
    share=0.8, rotation=0.1, scale=0.08, shear=0.1, shift=0.5, elastic=0.5, grid=5, contrast=1.2
)  # what MNIST is trained with
PADDINGS = ("zeros", "border", "reflection")
DTYPES = {2: torch.uint8, 17: torch.uint8, 256: torch.uint8, 65536: torch.int32}


def random_rows(n: int, shape: tuple[int, ...], levels: int = 256) -> Tensor:
    return torch.randint(levels, (n, math.prod(shape))).to(DTYPES[levels])


def still(warp: Warp, n: int, **changes: Tensor | list[float] | float) -> Motion:
    """No motion but the changes, each the same for all n images."""
    dtype = warp.pixels.dtype
    zero = Motion(
        torch.zeros(n, 1, dtype=dtype),
        torch.zeros(n, 1, dtype=dtype),
        torch.zeros(n, 2, dtype=dtype),
        torch.ones(n, 2, dtype=dtype),
        torch.zeros(n, 2, dtype=dtype),
        torch.zeros(n, 2, len(warp.spline), dtype=dtype),
    )
    return zero._replace(
        **{
            name: torch.as_tensor(value, dtype=dtype).expand_as(getattr(zero, name)).clone()
            for name, value in changes.items()
        }
    )


def moved(rows: Tensor, shape: tuple[int, ...], padding: str = "zeros", **changes) -> Tensor:
    """The images of the rows after a motion, everything else being still."""
    warp = Warp(shape, 256, AugmentSettings(padding=padding))
    return warp.warp(rows, still(warp, len(rows), **changes)).view(-1, *shape)


def keys(d: np.ndarray, a: float = -0.75) -> np.ndarray:
    """The kernel of cubic convolution (Keys 1981), with the a of most image libraries."""
    d = np.abs(d)
    near = (a + 2) * d**3 - (a + 3) * d**2 + 1
    far = a * (d**3 - 5 * d**2 + 8 * d - 4)
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


def read_by_keys(image: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """An image, 0 outside, read at the points (x, y), in pixels: the sum over all its pixels."""
    height, width = image.shape
    weights_y = keys(y[:, None] - np.arange(height))
    weights_x = keys(x[:, None] - np.arange(width))
    return np.einsum("pi,ij,pj->p", weights_y, image, weights_x)


class TestUntouched:
    @pytest.mark.parametrize("levels", DTYPES)
    @pytest.mark.parametrize("padding", PADDINGS)
    @pytest.mark.parametrize("shape", [(28, 28), (1, 7), (6, 1), (3, 5, 4), (3, 32, 32), (2, 300)])
    def test_no_motion_gives_every_level_back(self, shape: tuple[int, ...], padding: str, levels: int):
        rows = random_rows(5, shape, levels)
        warp = Warp(shape, levels, AugmentSettings(share=1.0, padding=padding))
        assert torch.equal(warp(rows), rows)
        assert warp(rows).dtype == rows.dtype

    @pytest.mark.parametrize(("share", "warped"), [(0.0, 0), (0.04, 0), (0.3, 3), (0.8, 8), (1.0, 10)])
    def test_rows_after_the_share(self, share: float, warped: int):
        rows = random_rows(10, (28, 28))
        out = Warp((28, 28), 256, AugmentSettings(share=share, rotation=0.1, elastic=0.5))(rows)
        assert (out != rows).any(1).tolist() == [True] * warped + [False] * (10 - warped)

    def test_labels_after_the_pixels(self):
        rows, label = random_rows(10, (9, 9)), torch.arange(10, dtype=torch.uint8)[:, None]
        torch.manual_seed(5)
        alone = Warp((9, 9), 256, LAB)(rows)
        torch.manual_seed(5)
        assert torch.equal(Warp((9, 9), 256, LAB)(torch.cat((rows, label), 1)), torch.cat((alone, label), 1))
        assert not torch.equal(alone, rows)

    def test_the_batch_itself(self):
        rows = random_rows(10, (9, 9))
        before = rows.clone()
        Warp((9, 9), 256, LAB)(rows)
        assert torch.equal(rows, before)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 6),
    st.sampled_from([(), (1,), (3,)]),
    st.integers(1, 13),
    st.integers(1, 13),
    st.sampled_from(list(DTYPES)),
    st.sampled_from(PADDINGS),
    st.booleans(),
    st.sampled_from([0.5, 1.0, 1.2, 3.0]),
    st.integers(2, 6),
)
def test_any_image_stays_whole_levels_of_its_shape(
    n: int,
    channels: tuple[int, ...],
    height: int,
    width: int,
    levels: int,
    padding: str,
    flip: bool,
    contrast: float,
    grid: int,
):
    shape = (*channels, height, width)
    rows = random_rows(n, shape, levels)
    strong = AugmentSettings(1.0, 3.0, 0.5, 1.0, 4.0, 2.0, grid, flip, contrast, padding)
    out = Warp(shape, levels, strong)(rows)
    assert (out.shape, out.dtype) == (rows.shape, rows.dtype)
    assert ((out >= 0) & (out.long() < levels)).all()
    units = Units.pixels(out.shape[1], levels)
    assert torch.equal(units.leave(units.enter(out)), out.float())


class TestMotions:
    """Each alone, with amounts for which the answer is known."""

    @pytest.mark.parametrize(("right", "down"), [(2, 0), (0, 3), (-3, 1), (-1, -2), (20, 0)])
    @pytest.mark.parametrize("shape", [(8, 11), (7, 9)])
    def test_shift(self, shape: tuple[int, int], right: int, down: int):
        rows = random_rows(4, shape)
        padded = np.pad(rows.view(-1, *shape).numpy(), ((0, 0), (20, 20), (20, 20)))
        expected = padded[:, 20 - down : 20 - down + shape[0], 20 - right : 20 - right + shape[1]]
        assert np.array_equal(moved(rows, shape, shift=[right, down]).numpy(), expected)

    @pytest.mark.parametrize(("padding", "mode"), [("border", "edge"), ("reflection", "symmetric")])
    def test_what_lies_outside(self, padding: str, mode: str):
        rows = random_rows(4, (8, 11))
        padded = np.pad(rows.view(-1, 8, 11).numpy(), ((0, 0), (5, 5), (5, 5)), mode)
        assert np.array_equal(moved(rows, (8, 11), padding, shift=[3, -2]).numpy(), padded[:, 7:15, 2:13])

    @pytest.mark.parametrize("turns", [-1, 1, 2, 3])
    @pytest.mark.parametrize("size", [7, 28])
    def test_quarter_turns_are_counter_clockwise(self, size: int, turns: int):
        rows = random_rows(4, (size, size))
        expected = rows.view(-1, size, size).rot90(turns, (1, 2))
        assert torch.equal(moved(rows, (size, size), rotation=turns * math.pi / 2), expected)

    @pytest.mark.parametrize("shape", [(8, 11), (3, 28, 28), (1, 1)])
    def test_mirrors(self, shape: tuple[int, ...]):
        rows = random_rows(4, shape)
        images = rows.view(-1, *shape)
        assert torch.equal(moved(rows, shape, mirror=[-1.0, 1.0]), images.flip(-1))
        assert torch.equal(moved(rows, shape, mirror=[1.0, -1.0]), images.flip(-2))

    def test_channels_move_alike(self):
        rows = random_rows(6, (3, 12, 10))
        colour, grey = Warp((3, 12, 10), 256, LAB), Warp((12, 10), 256, LAB)
        motion = colour.draw(6)
        together = colour.warp(rows, motion).view(6, 3, -1)
        for c in range(3):
            assert torch.equal(together[:, c], grey.warp(rows.view(6, 3, -1)[:, c], motion))

    def test_contrast_is_about_the_middle_grey_of_warped_rows(self):
        rows = torch.tensor([[0, 100, 128, 200, 255]] * 2, dtype=torch.uint8)
        out = Warp((1, 5), 256, AugmentSettings(share=0.5, contrast=1.5))(rows)
        assert out.tolist() == [[0, 86, 128, 236, 255], [0, 100, 128, 200, 255]]

    @pytest.mark.parametrize("shape", [(11, 8), (12, 12)])
    def test_all_at_once_is_their_product_read_by_cubic_convolution(self, shape: tuple[int, int]):
        rows = random_rows(20, shape)
        warp = Warp(shape, 256, AugmentSettings(1.0, 0.5, 0.3, 0.4, 2.0, 1.0, 4, True))
        motion = warp.draw(20)
        out = warp.warp(rows, motion).view(-1, *shape).numpy()
        height, width = shape
        centre = np.array([(width - 1) / 2, (height - 1) / 2])
        y, x = (each.ravel() for each in np.mgrid[:height, :width])
        field = (motion.elastic @ warp.spline).numpy()
        for i in range(20):
            angle, k = float(motion.rotation[i]), float(motion.shear[i])
            turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
            stretch = np.diag(np.exp(motion.scale[i].double().numpy()) * np.sign(motion.mirror[i].numpy()))
            matrix = turn @ [[1, k], [0, 1]] @ stretch
            target = np.stack([x, y], 1) - centre - motion.shift[i].numpy() - field[i].T
            source = np.linalg.solve(matrix, target.T).T + centre
            expected = read_by_keys(rows[i].view(shape).numpy().astype(float), *source.T).clip(0, 255)
            assert np.abs(out[i].ravel() - expected).max() < 0.51


class TestElastic:
    @pytest.mark.parametrize(("grid", "shape"), [(2, (9, 9)), (3, (5, 9)), (5, (17, 29)), (4, (28, 28))])
    def test_linear_fields_are_linear_up_to_the_edge(self, grid: int, shape: tuple[int, int]):
        warp = Warp(shape, 256, AugmentSettings(grid=grid))
        at = torch.linspace(-1, 1, grid)
        x, y = at.repeat(grid), at.repeat_interleave(grid)
        field = torch.stack([3 * x - y + 1, 2 * y]) @ warp.spline
        down, right = torch.meshgrid(*(torch.linspace(-1, 1, size) for size in shape), indexing="ij")
        expected = torch.stack([3 * right - down + 1, 2 * down]).flatten(1)
        assert torch.allclose(field, expected, atol=1e-5)

    def test_the_field_takes_the_values_of_the_control_points_and_is_smooth_between(self):
        warp = Warp((17, 65), 256, AugmentSettings(grid=5))
        values = torch.randn(5, 5)
        field = (values.flatten() @ warp.spline).view(17, 65)
        assert torch.allclose(field[::4, ::16], values, atol=1e-6)
        bends = field.diff(dim=1).diff(dim=1).abs().max()  # 1/16 of a slope's change where the slope jumps
        assert bends < 0.1 * values.diff(dim=1).abs().max()


class TestDraw:
    def test_amounts_are_as_large_as_the_settings_say(self):
        motion = Warp((28, 28), 256, AugmentSettings(1.0, 0.1, 0.08, 0.2, 0.5, 0.7, 5, True)).draw(4000)
        for values, largest in [(motion.rotation, 0.1), (motion.scale, 0.08), (motion.shear, 0.2), (motion.shift, 0.5)]:
            assert values.abs().max() <= largest * (1 + 1e-6)
            assert values.mean(0).abs().max() < 0.05 * largest
            assert torch.allclose(values.std(0), torch.tensor(largest / 3**0.5), rtol=0.05)
        assert motion.elastic.std() == pytest.approx(0.7, rel=0.01)
        assert motion.elastic.mean() == pytest.approx(0, abs=0.01)
        left, up = (motion.mirror < 0).float().mean(0).tolist()
        assert left == pytest.approx(0.5, abs=0.04)
        assert up == 0
        columns = torch.cat([each.flatten(1) for each in motion], 1)[:, [0, 1, 2, 3, 4, 6, 7, 8, 33]]
        assert (columns.T.corrcoef() - torch.eye(9)).abs().max() < 0.08

    def test_half_the_images_are_mirrored_when_asked_and_the_rest_is_left(self):
        rows = random_rows(400, (5, 6))
        out = Warp((5, 6), 256, AugmentSettings(share=1.0, flip=True))(rows).view(-1, 5, 6)
        images = rows.view(-1, 5, 6)
        mirrored = (out == images.flip(-1)).all((1, 2))
        assert 150 < int(mirrored.sum()) < 250
        assert torch.equal(out[~mirrored], images[~mirrored])

    def test_seeded_by_the_default_generator_and_fresh_in_every_call(self):
        rows, warp = random_rows(10, (28, 28)), Warp((28, 28), 256, LAB)
        torch.manual_seed(5)
        first, second = warp(rows), warp(rows)
        torch.manual_seed(5)
        assert torch.equal(warp(rows), first)
        assert not torch.equal(first, second)


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
def test_nothing_is_asked_of_the_device(share: float):
    """Tensors without values answer no question, and mix with none that was made elsewhere: so a graph can be made."""
    warp = Warp((3, 8, 8), 256, AugmentSettings(share=share, rotation=0.1, elastic=0.5, flip=True)).to("meta")
    out = warp(torch.empty(10, 192, dtype=torch.uint8, device="meta"))
    assert (out.shape, out.dtype, out.device.type) == ((10, 192), torch.uint8, "meta")


@pytest.mark.parametrize(
    ("shape", "levels", "words"),
    [
        ((64,), 17, "these examples are (64,), 17 levels: set augment.share=0"),
        ((28, 28), 0, "these examples are (28, 28), continuous numbers: set augment.share=0"),
        ((2, 3, 8, 8), 256, "(H, W) or (C, H, W); these examples are (2, 3, 8, 8)"),
    ],
)
def test_what_is_no_image_is_refused(refusal: Callable[..., str], shape: tuple[int, ...], levels: int, words: str):
    assert words in refusal(Warp, shape, levels, LAB)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replays_of_one_graph_draw_afresh_and_still_rows_stay():
    rows = random_rows(20, (28, 28)).cuda()
    identity, warp = (Warp((28, 28), 256, each).cuda() for each in (AugmentSettings(share=1.0), LAB))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        identity(rows), warp(rows)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        same, varied = identity(rows), warp(rows)
    graph.replay()
    first = varied.clone()
    graph.replay()
    assert torch.equal(same, rows)
    assert torch.equal(varied[16:], rows[16:])
    assert (varied[:16] != first[:16]).any(1).all()
