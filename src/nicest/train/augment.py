"""Training images varied by small random motions, afresh in every step and on the device that trains."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from nicest.errors import NicestError
from nicest.flows.noise import batch_size, select
from nicest.recipes.recipe import AugmentSettings


class Motion(NamedTuple):
    """How what is seen in n images moves; of every pair the first is for x, to the right, the second for y, down."""

    rotation: Tensor  # (n, 1) radians, counter-clockwise as seen
    shear: Tensor  # (n, 1) pixels to the right for each pixel down
    scale: Tensor  # (n, 2) logarithms
    mirror: Tensor  # (n, 2) negative where the image is mirrored
    shift: Tensor  # (n, 2) pixels
    elastic: Tensor  # (n, 2, grid²) pixels at each control point


class Warp(nn.Module):
    """Moves the first round(share · B) rows of a batch at random; the other rows come back bit for bit.

    The batch is in random order, so any rows are as good as the first, and no work is done for the others. What is
    seen at q, in pixels from the centre, moves to

        q' = R K S F q + t + e(q'),

    F a mirror, S a scaling, K = [[1, k], [0, 1]] a shear, R a rotation, t a shift and e a smooth field: Gaussian at
    grid x grid control points, the outer ones on the outermost pixels, and between them their bicubic spline. Levels
    are read at q = F S⁻¹ K⁻¹ R⁻¹ (q' - t - e(q')) by cubic convolution, spread about the middle grey by `contrast`,
    which undoes the blur of that reading, and rounded. No motion at all gives every level back exactly.

    Shapes depend on the size of the batch alone and nothing is asked of the device, so a graph can capture it all;
    random numbers come from the device's own generator. Levels beyond 256 need float64 to be exact.
    """

    least: Tensor
    width: Tensor
    quarters: Tensor
    unit: Tensor
    pixels: Tensor
    spline: Tensor
    offset: Tensor

    def __init__(self, shape: tuple[int, ...], levels: int, settings: AugmentSettings) -> None:
        super().__init__()
        if len(shape) not in (2, 3) or not levels:
            kind = f"{levels} levels" if levels else "continuous numbers"
            raise NicestError(
                f"augment is for images of whole grey levels, (H, W) or (C, H, W);"
                f" these examples are {shape}, {kind}: set augment.share=0"
            )
        self.levels, self.settings = levels, settings
        height, width = shape[-2:]
        self.image = (math.prod(shape[:-2]), height, width)
        flip = 1.0 if settings.flip else 0.0
        largest = [settings.rotation, settings.shear, *[settings.scale] * 2, flip, 0.0, *[settings.shift] * 2]
        centre = [0.0, 0.0, 0.0, 0.0, 1 - flip, 1.0, 0.0, 0.0]
        y, x = torch.meshgrid(_centred(height), _centred(width), indexing="ij")
        constants = {
            "least": [c - r for c, r in zip(centre, largest, strict=True)],
            "width": [2 * r for r in largest],
            "quarters": [[0.0, math.pi / 2], [-math.pi / 2, 0.0]],
            "unit": [2 / width, 2 / height],  # grid_sample measures in half images
            "pixels": torch.stack([x.flatten(), y.flatten()]),
            "spline": torch.kron(_spline(height, settings.grid), _spline(width, settings.grid)).T.contiguous(),
            "offset": (1 - settings.contrast) * levels / 2,
        }
        dtype = torch.float32 if levels <= 256 else torch.float64
        for name, value in constants.items():
            self.register_buffer(name, torch.as_tensor(value, dtype=dtype), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        n = round(self.settings.share * batch_size(len(rows)))
        if n == 0:
            return rows
        motion = Motion(*map(select, self.draw(n)))
        n = len(motion.shift)  # of the rows that are here
        return torch.cat([self.warp(rows[:n], motion), rows[n:]])

    def draw(self, n: int) -> Motion:
        """Draw random motions of n images, as large as the settings allow."""
        uniform = torch.rand(n, len(self.width), dtype=self.width.dtype, device=self.width.device)
        affine = torch.addcmul(self.least, self.width, uniform)
        rotation, shear, scale, mirror, shift = affine.split([1, 1, 2, 2, 2], -1)
        normal = torch.randn(n, 2, len(self.spline), dtype=self.spline.dtype, device=self.spline.device)
        return Motion(rotation, shear, scale, mirror, shift, self.settings.elastic * normal)

    def warp(self, rows: Tensor, motion: Motion) -> Tensor:
        """Move each row by its motion, in whole levels of the same dtype; a label after the pixels stays."""
        rows, label = rows.tensor_split((math.prod(self.image),), 1)
        images = rows.to(self.pixels.dtype).reshape(-1, *self.image)
        grid = self.sources(motion).mT.unflatten(1, self.image[1:])
        read = functional.grid_sample(images, grid, "bicubic", self.settings.padding, align_corners=False)
        spread = torch.add(self.offset, read, alpha=self.settings.contrast)
        moved = spread.round_().clamp_(0, self.levels - 1).to(rows.dtype).flatten(1)
        return torch.cat((moved, label), 1) if label.shape[1] else moved

    def sources(self, motion: Motion) -> Tensor:
        """Return where each pixel q' is read, q = F S⁻¹ K⁻¹ R⁻¹ (q' - t - e(q')): (n, 2, H · W), in half images."""
        moved = self.pixels - motion.shift[..., None] - motion.elastic @ self.spline
        turn = (motion.rotation[..., None] + self.quarters).cos()  # R⁻¹ = [[cos, -sin], [sin, cos]], y being down
        upper = torch.addcmul(turn[:, :1], motion.shear[..., None], turn[:, 1:], value=-1)
        size = (-motion.scale).exp() * torch.copysign(self.unit, motion.mirror)
        matrix = size[..., None] * torch.cat([upper, turn[:, 1:]], 1)
        # not a matrix product: those may be rounded to ten bits on a GPU
        return torch.addcmul(matrix[:, :, :1] * moved[:, :1], matrix[:, :, 1:], moved[:, 1:])


def _centred(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float64) - (size - 1) / 2


def _spline(size: int, points: int) -> Tensor:
    """Return the matrix (size, points) of the Catmull-Rom spline from values at equal steps to pixels.

    Before the first value and after the last the line goes on straight: so linear fields stay what they are.
    """
    at = torch.linspace(0, points - 1, size, dtype=torch.float64)
    d = (at[:, None] - torch.arange(-1, points + 1)).abs()
    near, far = (1.5 * d - 2.5) * d * d + 1, ((-0.5 * d + 2.5) * d - 4) * d + 2
    weights = torch.where(d < 1, near, torch.where(d < 2, far, 0.0))
    inner = weights[:, 1:-1].clone()
    inner[:, [0, 1]] += weights[:, :1] * torch.tensor([2.0, -1.0])
    inner[:, [-1, -2]] += weights[:, -1:] * torch.tensor([2.0, -1.0])
    return inner
