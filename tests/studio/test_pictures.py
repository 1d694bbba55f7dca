"""A picture of any size and kind as an image that a model takes."""

import io

import numpy as np
import pytest
from PIL import ExifTags, Image

from nicest.recipes.recipe import DataSettings
from nicest.studio.pictures import fit_picture

GREY = DataSettings(name="own", shape=(8, 6), levels=256)


def content(pixels: np.ndarray, kind: str, **more: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **more)
    return buffer.getvalue()


def test_a_photo_on_its_side_is_turned_upright() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6), np.uint8)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # the first row of what is stored is seen at the right
    turned = fit_picture(content(np.rot90(pixels), "PNG", exif=exif), GREY)
    np.testing.assert_array_equal(turned.reshape(8, 6), pixels)


@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0junk", b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01"])
def test_broken_exif_is_none(exif: bytes) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6), np.uint8)
    np.testing.assert_array_equal(fit_picture(content(pixels, "PNG", exif=exif), GREY).reshape(8, 6), pixels)


def test_of_an_animation_it_is_the_first_frame() -> None:
    more = [Image.new("L", (6, 8), 200)]
    animation = content(np.full((8, 6), 100, np.uint8), "GIF", save_all=True, append_images=more)
    assert (fit_picture(animation, GREY) == 100).all()
