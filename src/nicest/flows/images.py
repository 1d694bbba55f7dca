"""Parts for images: rows stay (B, D) at every border, and are images (C, H, W), channel after channel, only in here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from nicest.flows.bijection import Bijection, check_context, check_features
from nicest.flows.laws import Law
from nicest.flows.linear import Mixing
from nicest.flows.shares import Dropout

Shape = tuple[int, int, int]  # channels, height, width


class Squeeze(Bijection):
    """Tiles of `by` pixels, 2 x 2 unless told otherwise, become pixels with as many times the channels: (C, H, W) ->
    (4 C, H/2, W/2), a permutation of the components (Dinh et al. 2017, "Density estimation using Real NVP"); log det 0.

    The channels of a tile's first pixel come first: half of all channels are the upper half of every tile.
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
        check_features(x, self.dim)
        y = x.unflatten(-1, self.tiles).permute(0, 3, 5, 1, 2, 4).flatten(1)
        return y, x.new_zeros(len(x))

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        check_features(y, self.dim)
        channels, height, _, width, _ = self.tiles
        return y.unflatten(-1, (*self.by, channels, height, width)).permute(0, 3, 4, 1, 5, 2).flatten(1)

    def carry(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        order = self(torch.arange(self.dim, device=mean.device)[None])[0][0]
        return mean[order], covariance[order][:, order]

    def extra_repr(self) -> str:
        return f"{self.by[0]} x {self.by[1]}, to {self.squeezed}"


class ChannelMixing(Bijection):
    """y = W x + b at every pixel, W of the channels as `Mixing` has it; log det = H W Σ log U_ii (Kingma and Dhariwal
    2018, "Glow", invertible 1 x 1 convolution). `fit` starts it with channels of mean 0 and variance 1.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dim, self.pixels = math.prod(shape), shape[1] * shape[2]
        self.mixing = Mixing(shape[0])

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, _ = self.mixing(self._each_pixel(x))
        return self._rows(y), (self.pixels * self.mixing.log_diagonal.sum()).expand(len(x)).clone()

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        return self._rows(self.mixing.inverse(self._each_pixel(y)))

    @torch.no_grad()
    def fit(self, x: Tensor) -> Self:
        """Let every channel of these rows leave with mean 0 and variance 1: S (L U P x + b - μ), S = diag(1/σ)."""
        y = self.mixing(self._each_pixel(x))[0].double()
        mean, scale = y.mean(0), 1 / y.std(0, correction=0).clamp_min(1e-6)
        mixing, below = self.mixing, torch.ones_like(self.mixing.lu).tril(-1).bool()
        mixing.lu.mul_(torch.where(below, scale[:, None] / scale, scale[:, None]))  # (S L S⁻¹) (S U)
        mixing.log_diagonal.add_(scale.log())
        mixing.b.copy_((mixing.b - mean) * scale)
        return self

    def _each_pixel(self, x: Tensor) -> Tensor:
        """(B, D) as rows of the channels of a pixel, (B · H · W, C)."""
        check_features(x, self.dim)
        return x.unflatten(-1, (-1, self.pixels)).mT.flatten(0, 1)

    def _rows(self, y: Tensor) -> Tensor:
        return y.unflatten(0, (-1, self.pixels)).mT.flatten(1)


class ConvNet(nn.Module):
    """m of images: a 3 x 3 convolution, `blocks` gated residual blocks of `width` channels, and another convolution,
    which starts at 0, so that a coupling starts as the identity.

    It reads I1 as an image of shape `inputs` and gives what `law` takes for `channels` channels of I2 on the same
    pixels: the sets of `channels` and of a `checkerboard` of even width lie so. A learned bias for every pixel tells
    places apart; a context adds another one, which is a linear function of it. Convolutions of float32 are not rounded
    to TF32, which would cost the inverse its digits.
    """

    def __init__(
        self,
        inputs: Shape,
        channels: int,
        law: Law,
        width: int = 64,
        blocks: int = 2,
        *,
        context_dim: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.inputs, self.law, self.context_dim = inputs, law, context_dim
        self.first = nn.Conv2d(inputs[0], width, 3, padding=1)
        self.place = nn.Parameter(torch.zeros(width, *inputs[1:]))
        self.context = nn.Linear(context_dim, self.place.numel(), bias=False) if context_dim else None
        self.blocks = nn.ModuleList(GatedBlock(width, dropout) for _ in range(blocks))
        self.last = nn.Conv2d(width, law.size * channels, 3, padding=1)
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
            return self.law.from_planes(self.last(functional.silu(h)))


class GatedBlock(nn.Module):
    """h + a ⊙ sigmoid(g), (a, g) = W₂ u with the mean of V u over all pixels added to g, u = silu(W₁ * silu(h)).

    W₁ is a 3 x 3 convolution, W₂ is 1 x 1 and starts at 0; `dropout` stands after u. The mean lets every pixel know of
    all others (Hu et al. 2018, "Squeeze-and-excitation networks").
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
    """Inside, cuDNN's convolutions of float32 are exact to float32, as torch's matrix products are by themselves."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
