"""Masks that hide part of an image: the ten of the paper's figure, ranges, boxes, pictures, arrays (NICE §5.2)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nicest.data.arrays import read_npy
from nicest.data.images import IMAGE_SUFFIXES, read_images
from nicest.errors import NicestError
from nicest.messages import nearest

# in the order of the paper's figure, whose captions call 7 and 8 "middle vertically" and "middle horizontally"
HALVES = ("top", "bottom", "odd", "even", "left", "right", "middle-rows", "middle-columns")
FIGURE = (*HALVES, "random:75", "random:90")
FORMS = "rows:0-14, columns:3, box:7-21,7-21, pixels:0-9, channels:0, a picture or an .npy file"

Mask = str | np.ndarray
Shape = tuple[int, ...]


def mask_list(masks: Mask | Sequence[Mask]) -> list[Mask]:
    """Return a list of masks, with the figure's ten in place of `paper`."""
    asked = [masks] if isinstance(masks, str | np.ndarray) else masks
    return [each for mask in asked for each in (FIGURE if isinstance(mask, str) and mask == "paper" else (mask,))]


def mask_name(mask: Mask) -> str:
    """Return the name of a mask for figures and messages."""
    if not isinstance(mask, str):
        return "array"
    return Path(mask).name if Path(mask).suffix.lower() in (".npy", *IMAGE_SUFFIXES) else mask


def hidden_by(mask: Mask, shape: Shape, n: int = 1, *, seed: int = 0) -> np.ndarray:
    """Return where a mask hides n images, boolean (n, *shape); a random mask hides other pixels of each image.

    A mask is a name of the figure (`top`); ranges of rows, columns, pixels or channels (`rows:0-14,20`); a box of rows
    and columns (`box:7-21,7-21`); a random percentage of the pixels (`random:75`); several of these
    joined by `+`; a picture, hidden where it is bright; or an .npy file or array, hidden where it is not zero, for one
    image, for each channel or for all n images. Ranges count from 0 and leave out their end: of 28 rows, `rows:0-14`
    and `rows:14-28` are the two halves. Plain rows of numbers are images one pixel high.
    """
    channels, height, width = (1, 1, *shape)[-3:]
    hidden = np.zeros((n, channels, height, width), bool)
    if isinstance(mask, np.ndarray):
        hidden |= _of_array(mask, shape, n, mask_name(mask))
    elif Path(mask).suffix.lower() == ".npy":
        hidden |= _of_array(read_npy(Path(mask)), shape, n, mask)
    elif Path(mask).suffix.lower() in IMAGE_SUFFIXES:
        hidden |= _of_array(_bright(Path(mask)), shape, n, mask)
    else:
        rng = np.random.default_rng(seed)
        for part in mask.split("+"):
            hidden |= _of_words(part.strip(), hidden.shape, rng)
    empty = np.flatnonzero(~hidden.any((1, 2, 3)))
    if len(empty):
        raise NicestError(
            f"mask {mask_name(mask)!r} hides nothing of image {empty[0]}, of shape {shape}: choose another mask"
        )
    return hidden.reshape(n, *shape)


def _of_words(text: str, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Return one term of a mask, in a shape that broadcasts to (n, channels, height, width)."""
    n, channels, height, width = shape
    rows, columns = np.arange(height)[:, None], np.arange(width)
    pixels = rows * width + columns
    named = {
        "top": rows < height // 2,
        "bottom": rows >= height // 2,
        "odd": pixels % 2 == 0,  # as the caption counts them, from 1
        "even": pixels % 2 == 1,
        "left": columns < width // 2,
        "right": columns >= width // 2,
        "middle-rows": (rows >= height // 4) & (rows < height - height // 4),
        "middle-columns": (columns >= width // 4) & (columns < width - width // 4),
    }
    if text in named:
        return named[text]
    kind, _, where = text.partition(":")
    match kind:
        case "rows":
            return _chosen(where, height, text)[:, None]
        case "columns":
            return _chosen(where, width, text)
        case "pixels":
            return _chosen(where, height * width, text).reshape(height, width)
        case "channels":
            return _chosen(where, channels, text)[:, None, None]
        case "box" if where.count(",") == 1:
            top_bottom, left_right = where.split(",")
            return np.outer(_chosen(top_bottom, height, text), _chosen(left_right, width, text))
        case "random" if re.fullmatch(r"\d+(\.\d+)?", where) and 0 < float(where) <= 100:
            order = rng.random((n, height * width)).argsort(1).argsort(1)
            return (order < round(float(where) / 100 * height * width)).reshape(n, 1, height, width)
    meant = nearest(text, (*FIGURE, "paper"))
    raise NicestError(f"expected a mask such as paper, {', '.join(FIGURE)}, {FORMS}; got {text!r}{meant}")


def _chosen(text: str, size: int, mask: str) -> np.ndarray:
    """Parse ranges such as `0-3,5` to a boolean array (size,); a range leaves out its end."""
    chosen = np.zeros(size, bool)
    for part in text.split(","):
        first, dash, end = part.strip().partition("-")
        if not (first.isdecimal() and (end.isdecimal() if dash else not end)):
            raise NicestError(f"mask {mask!r}: expected ranges such as 0-3,5, got {part!r}")
        start, stop = int(first), int(end) if dash else int(first) + 1
        if not start < stop <= size:
            raise NicestError(f"mask {mask!r}: expected ranges within 0-{size}, the end left out, got {part!r}")
        chosen[start:stop] = True
    return chosen


def _of_array(array: np.ndarray, shape: Shape, n: int, source: str) -> np.ndarray:
    """Return the mask of an array for one image, its rows and columns, or n images; broadcasts to (n, C, H, W)."""
    if array.shape not in (shape, shape[-2:], (n, *shape)):
        raise NicestError(f"{source}: expected a mask of shape {shape} or {(n, *shape)}, got {array.shape}")
    leading = (n,) if array.shape == (n, *shape) else ()
    planes = shape if leading else array.shape
    return (array != 0).reshape(*leading, *(1,) * (3 - len(planes)), *planes)


def _bright(path: Path) -> np.ndarray:
    """Return where a picture is brighter than half, (H, W); inpainting programs mark what to hide in white."""
    (pixels,) = read_images([path])
    full = 1 if pixels.dtype == bool else np.iinfo(pixels.dtype).max
    return (pixels if pixels.ndim == 2 else pixels.mean(-1)) > full / 2
