"""Fit picture files to the size, colours and levels of a model."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from nicest.data.images import IMAGE_FORMATS, turn_upright
from nicest.errors import NicestError
from nicest.messages import brief
from nicest.recipes.recipe import DataSettings

LARGEST = 4096  # pixels a side


def fit_picture(content: bytes, data: DataSettings, *, inverted: bool = False) -> np.ndarray:
    """Return a picture file as a row of levels, (D,): its centre, in the size, colours and levels of the data.

    EXIF rotation is applied, and an animation gives its first frame. `inverted` swaps dark and light. Transparent
    pixels become white behind dark ink, else black.
    """
    if len(data.shape) == 1 or not data.levels:
        raise NicestError("this is not a model of images with levels, so it cannot take a picture")
    height, width = data.shape[-2:]
    mode = "RGB" if len(data.shape) == 3 and data.shape[0] == 3 else "L"
    try:
        with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
            if max(image.size) > LARGEST:
                raise NicestError(f"expected a picture of at most {LARGEST} pixels a side, got {_size(image)}")
            turn_upright(image)
            fitted = ImageOps.fit(_eight_bits(image), (width, height), Image.Resampling.LANCZOS)
            plain = _opaque(fitted).convert(mode)
    except NicestError:
        raise
    except Exception as error:  # broken bytes lead Pillow to errors of every kind
        found = "of another kind" if isinstance(error, UnidentifiedImageError) else f"that are not ({brief(error)})"
        known = ", ".join(IMAGE_FORMATS)
        raise NicestError(f"expected a picture ({known}), got {len(content)} bytes {found}") from error
    pixels = np.asarray(ImageOps.invert(plain) if inverted else plain, dtype=np.float64)
    levels = (pixels * (data.levels - 1) / 255).round()
    row = (levels.transpose(2, 0, 1) if mode == "RGB" else levels).reshape(-1)
    return row.astype(np.uint8 if data.levels <= 256 else np.uint16)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Convert an image to 8-bit grey or colours, with its transparency if it has one."""
    if image.mode.startswith("I"):  # 16 bits, `convert` would clip them
        return Image.fromarray((np.asarray(image).clip(0, 65535) / 257).round().astype(np.uint8))
    mode = "RGBA" if image.has_transparency_data else "L" if image.mode in ("1", "L") else "RGB"
    return image if image.mode == mode else image.convert(mode)  # convert would copy it


def _opaque(image: Image.Image) -> Image.Image:
    """Put an image on a background in contrast to its ink: white behind dark ink, else black."""
    if image.mode != "RGBA":
        return image
    alpha, grey = np.asarray(image.getchannel("A"), np.float64), np.asarray(image.convert("L"), np.float64)
    dark = (alpha * grey).sum() < 127.5 * alpha.sum()
    return Image.alpha_composite(Image.new("RGBA", image.size, "white" if dark else "black"), image).convert("RGB")


def _size(image: Image.Image) -> str:
    return f"{image.width}x{image.height}"
