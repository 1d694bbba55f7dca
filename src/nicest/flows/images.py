"""Layers and networks for images. Rows are (B, D) outside; only inside they are (B, C, H, W)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from nicest.flows.bijection import Bijection, check_context
from nicest.flows.linear import Mixing
from nicest.flows.noise import Dropout

Shape = tuple[int, int, int]  # channels, height, width


class Squeeze(Bijection):
    """Turn tiles of pixels into channels: (C, H, W) -> (4 C, H/2, W/2) for tiles of 2 x 2 (Dinh et al. 2017).

    A permutation of the components, with log det 0. The channels of a tile's first pixel come first, so half of all
    channels are the upper half of every tile. `by` is the height and width of a tile.
    """

    def __init__(self, shape: Shape, by: tuple[int, int] = (2, 2)) -> None:
        super().__init__()
        (channels, height, width), (rows, columns) = shape, by
        if height % rows or width % columns:
            raise ValueError(f"expected a height and width that {rows} x {columns} divides, got {height} x {width}")
        self.dim, self.by = math.prod(shape), by
        self.tiles = (channels, height // rows, rows, width // columns, columns)
        self.squeezed: Shape = (channels * rows * columns, height // rows, width // columns)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = x.unflatten(-1, self.tiles).permute(0, 3, 5, 1, 2, 4).flatten(1)
        return y, x.new_zeros(len(x))

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        channels, height, _, width, _ = self.tiles
        x = y.unflatten(-1, (*self.by, channels, height, width)).permute(0, 3, 4, 1, 5, 2).flatten(1)
        return x, y.new_zeros(len(y))

    def extra_repr(self) -> str:
        return f"{self.by[0]} x {self.by[1]}, to {self.squeezed}"


class ChannelMixing(Bijection):
    """y = W x + b at every pixel, with W of the channels as in `Mixing`; log det = H W Σ log U_ii (Glow).

    The invertible 1 x 1 convolution of Kingma and Dhariwal 2018. `initialise` starts it so that the channels have mean
    0 and variance 1.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dim, self.pixels = math.prod(shape), shape[1] * shape[2]
        self.mixing = Mixing(shape[0])

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, log_det = self.mixing(self._each_pixel(x))
        return self._rows(y), log_det.view(len(x), self.pixels).sum(1)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, log_det = self.mixing.inverse(self._each_pixel(y))
        return self._rows(x), log_det.view(len(y), self.pixels).sum(1)

    @torch.no_grad()
    def initialise(self, x: Tensor, context: Tensor | None = None) -> None:
        """Give every channel of these rows mean 0 and variance 1: S (L U P x + b - μ), S = diag(1/σ)."""
        y = self.mixing(self._each_pixel(x))[0].double()
        mean, scale = y.mean(0), 1 / y.std(0, correction=0).clamp_min(1e-6)
        mixing, below = self.mixing, torch.ones_like(self.mixing.lu).tril(-1).bool()
        mixing.lu.mul_(torch.where(below, scale[:, None] / scale, scale[:, None]))  # (S L S⁻¹) (S U)
        mixing.log_diagonal.add_(scale.log())
        mixing.b.copy_((mixing.b - mean) * scale)

    def _each_pixel(self, x: Tensor) -> Tensor:
        """Reshape (B, D) to one row of channels per pixel, (B · H · W, C)."""
        return x.unflatten(-1, (-1, self.pixels)).mT.flatten(0, 1)

    def _rows(self, y: Tensor) -> Tensor:
        return y.unflatten(0, (-1, self.pixels)).mT.flatten(1)


class ConvNet(nn.Module):
    """A convolutional coupling function m: 3 x 3 convolution, gated residual blocks, 3 x 3 convolution.

    It reads I1 as an image of shape `inputs` and returns the parameters of a law for `channels` channels of I2 on the
    same pixels, as the partitions `channels` and `checkerboard` (of even width) need them. Every pixel has a learned
    bias; a context adds another, a linear function of it. The last convolution starts at 0, so a coupling starts as
    the identity. Convolutions of float32 are not rounded to TF32, which would cost the inverse its digits.
    """

    def __init__(
        self,
        inputs: Shape,
        channels: int,
        size: int,
        width: int = 64,
        blocks: int = 2,
        *,
        context_dim: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.inputs, self.size, self.context_dim = inputs, size, context_dim
        self.first = nn.Conv2d(inputs[0], width, 3, padding=1)
        self.place = nn.Parameter(torch.zeros(width, *inputs[1:]))
        self.context = nn.Linear(context_dim, self.place.numel(), bias=False) if context_dim else None
        self.blocks = nn.ModuleList(GatedBlock(width, dropout) for _ in range(blocks))
        self.last = nn.Conv2d(width, channels * size, 3, padding=1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)  # type: ignore[arg-type]
        if self.context is not None:
            nn.init.zeros_(self.context.weight)

    def forward(self, x1: Tensor, context: Tensor | None = None) -> Tensor:
        check_context(context, self.context_dim)
        with _without_tf32():
            h = self.first(x1.unflatten(1, self.inputs).contiguous(memory_format=torch.channels_last))
            h = h + self.place.to(h.dtype)
            if self.context is not None and context is not None:
                h = h + self.context(context.to(x1.dtype)).unflatten(1, self.place.shape)
            for block in self.blocks:
                h = block(h)
            return self.at_components(self.last(functional.silu(h)))

    def at_components(self, planes: Tensor) -> Tensor:
        """Reorder (B, channels · size, H, W) to `size` consecutive numbers for every component, (B, D · size)."""
        return planes.unflatten(1, (-1, self.size)).movedim(2, -1).flatten(1)


class GatedBlock(nn.Module):
    """h + a ⊙ sigmoid(g), (a, g) = W₂ u with the mean of V u over all pixels added to g, u = silu(W₁ * silu(h)).

    W₁ is a 3 x 3 convolution, W₂ is 1 x 1 and starts at 0; `dropout` follows u. The mean gives every pixel information
    about all others (Hu et al. 2018, "Squeeze-and-excitation networks").
    """

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Conv2d(width, width, 3, padding=1)
        self.dropout = Dropout(dropout)
        self.outer = nn.Conv2d(width, 2 * width, 1)
        self.pooled = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)  # type: ignore[arg-type]

    def forward(self, h: Tensor) -> Tensor:
        u = self.dropout(functional.silu(self.inner(functional.silu(h))))
        a, g = self.outer(u).chunk(2, 1)
        return h + a * torch.sigmoid(g + self.pooled(u.mean((2, 3)))[..., None, None])


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Compute float32 convolutions in full float32 precision, as torch does matrix products by default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
