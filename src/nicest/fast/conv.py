"""Convolutional networks in reduced precision, as one operation with a backward pass by hand.

Inside, a batch of images is a matrix (B · H · W, channels): a GPU convolves this layout fastest. Between two products
there is one pass over memory on a GPU, by a kernel that computes what is written here in torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nicest.fast.derivatives import first_only
from nicest.fast.gpu import kernels_for
from nicest.fast.networks import FastNetwork
from nicest.flows import ConvNet, Law, Partition
from nicest.flows.images import GatedBlock, Shape
from nicest.flows.noise import Dropout, batch_size, select


class FastConv(FastNetwork):
    """A convolutional network."""

    @staticmethod
    def made(network: Any) -> list[type]:
        if type(network) is not ConvNet:
            return []
        block = [GatedBlock, nn.Conv2d, Dropout, nn.Conv2d, nn.Linear]
        given = [nn.Linear] if network.context_dim else []
        return [ConvNet, nn.Conv2d, *given, nn.ModuleList, *block * len(network.blocks), nn.Conv2d]

    @staticmethod
    def sizes_fit(network: Any) -> bool:
        width, last = len(network.place), network.last
        expected = [(network.first, network.inputs[0], width, 3), (last, width, last.out_channels, 3)]
        expected += [(block.inner, width, width, 3) for block in network.blocks]
        expected += [(block.outer, width, 2 * width, 1) for block in network.blocks]
        return all(_is_convolution(*each) for each in expected)

    def fits(self, partition: Partition, law: Law) -> bool:
        """Return True if the network reads I1 and returns the parameters of the law for I2."""
        (channels, height, width), network = self.network.inputs, self.network
        read, given = channels * height * width, network.last.out_channels * height * width
        return network.size == law.size and read == len(partition.i1) and given == law.size * len(partition.i2)

    def planes(self, x1: Tensor, context: Tensor | None = None) -> Tensor:
        """Return m(x_I1) in `dtype`, (B, H · W, n): the parameters of each channel of a pixel in turn, then zeros."""
        network, blocks = self.network, self.network.blocks
        of_context = network.place.new_zeros(0) if network.context is None else network.context.weight
        context = x1.new_zeros(len(x1), 0) if context is None else context
        return _Conv.apply(
            x1, context, self.dtype, network.inputs, self.rate, network.first.weight, of_context, network.first.bias,
            network.place, network.last.weight, network.last.bias, *(block.inner.weight for block in blocks),
            *(block.inner.bias for block in blocks), *(block.outer.weight for block in blocks),
            *(block.outer.bias for block in blocks), *(block.pooled.weight for block in blocks),
        )  # fmt: skip

    def read(self, x1: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        planes = self.planes(x1, context)[..., : self.network.last.out_channels]
        images = planes.mT.unflatten(-1, self.network.inputs[1:])
        return x1, self.network.at_components(images).to(x1.dtype)


class _Pass:
    """A pass through the network, with what the way back needs; `run` gives the output and does not keep it.

    Block k takes h[k] and s[k] = silu(h[k]). c[k] = W₁ * s[k] is its convolution; u[k] is as in `GatedBlock`, and
    mean[k] its means over pixels; ag[k] = W₂ u[k] and lift[k] = V mean[k] are the gates, without their bias.
    A context adds `of_context` of it to h[0].
    """

    def __init__(
        self, x: Tensor, context: Tensor, dtype: torch.dtype, shape: Shape, rate: float, parameters: Sequence[Tensor]
    ) -> None:
        self.dtype, self.shape, self.rate, self.images = dtype, shape, rate, len(x)
        self.shapes = [p.shape for p in parameters]
        first, of_context, first_bias, place, last, self.last_bias, *of_blocks = (p.detach() for p in parameters)
        self.n, self.width, self.pixels = len(of_blocks) // 5, len(place), shape[1] * shape[2]
        inner, self.inner_bias, outer, self.outer_bias, pooled = _by_kind(of_blocks)

        width, n = self.width, self.n
        taps = torch.cat([w.reshape(-1) for w in (*inner, last)]).view(-1, width, 9)
        copies = taps.new_zeros(n * width + _eights(len(last)), 9, width, dtype=dtype)
        copies[: len(taps)] = taps.mT
        *self.inner, self.last = copies.split([width] * n + [_eights(len(last))])
        flat = torch.cat([w.reshape(-1) for w in (place.new_empty(0), *outer, *pooled)]).to(dtype)
        outers, pools = flat.tensor_split((2 * n * width**2,))
        self.outer, self.pooled = outers.view(n, 2 * width, width), pools.view(n, width, width)
        self.seen, self.given = 9 * shape[0], context.shape[1]
        self.first = functional.pad(first.flatten(1).to(dtype), (0, _eights(self.seen) - self.seen))
        maps = of_context.view(width, self.pixels, self.given).permute(2, 1, 0).flatten(1)
        more = _eights(self.given) - self.given
        self.of_context = functional.pad(maps.to(dtype), (0, 0, 0, more))
        self.context = functional.pad(context.to(dtype), (0, more))
        self.place = (place.flatten(1) + first_bias[:, None]).mT.contiguous()
        self.kept: Tensor | None = None
        if rate and n:
            drawn = torch.empty(batch_size(len(x)), n, self.pixels, width, dtype=torch.uint8, device=x.device)
            self.kept = select(drawn.bernoulli_(1 - rate))
        self.x = _patches(x, shape, self.first.shape[1], dtype)

    def run(self) -> Tensor:
        n, width, new = self.n, self.width, self.x.new_empty
        self.u, self.mean = new(n, len(self.x), width), new(n, self.images, width)
        self.c: list[Tensor] = []
        self.ag: list[Tensor] = []
        self.lift: list[Tensor] = []
        m = self.x @ self.first.mT
        if self.given:
            m.view(self.images, -1).addmm_(self.context, self.of_context)
        h, s = _enter(m, self.place)
        self.h, self.s = [h], [s]
        for k in range(n):
            self.c.append(self._convolve(self.s[k], self.inner[k]))
            _activate(self.c[k], self.inner_bias[k], self._kept(k), self.rate, self.u[k], self.mean[k])
            self.ag.append(self.u[k] @ self.outer[k].mT)
            self.lift.append(self.mean[k] @ self.pooled[k].mT)
            h, s = _gate(h, self.ag[k], self.outer_bias[k], self.lift[k])
            self.h.append(h)
            self.s.append(s)
        output = self._convolve(s, self.last)
        _add_bias(output, self.last_bias)
        return output.unflatten(0, (self.images, -1))

    def back(self, gradient: Tensor, to_x: bool, to_weights: bool) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradients of x and of the parameters from that of the output."""
        n, width, images = self.n, self.width, self.images
        gradient = gradient.flatten(0, 1).contiguous()
        accurate = torch.promote_types(self.dtype, torch.float32)
        g_ag, g_lift = gradient.new_empty(n, len(self.x), 2 * width), torch.empty_like(self.mean)
        sums = gradient.new_empty(n, images, 3 * width, dtype=accurate)  # of g_ag and gc over the pixels of an image
        taps: list[Tensor] = []
        parts = math.gcd(images, 16)  # of the rows, whose products are summed: one long product fills no GPU
        outer = gradient.new_empty(n, parts, 2 * width, width)

        gh: Tensor | None = None
        if to_weights:
            taps.append(self._taps_back(gradient, self.s[n], self.last))
            last_bias = _over_images(gradient, images, accurate).sum(0)[: len(self.last_bias)]
        gs = self._rows_back(gradient, self.s[n], self.last)
        for k in reversed(range(n)):
            gates = self.ag[k], self.outer_bias[k], self.lift[k]
            gh = _gate_back(gs, self.h[k + 1], gh, *gates, g_ag[k], g_lift[k], sums[k])
            gu, g_mean = g_ag[k] @ self.outer[k], g_lift[k] @ self.pooled[k]
            gc = _activate_back(gu, g_mean, self.c[k], self.inner_bias[k], self._kept(k), self.rate, sums[k])
            if to_weights:
                taps.append(self._taps_back(gc, self.s[k], self.inner[k]))
                torch.bmm(g_ag[k].unflatten(0, (parts, -1)).mT, self.u[k].unflatten(0, (parts, -1)), out=outer[k])
            gs = self._rows_back(gc, self.s[k], self.inner[k])
        gh = _enter_back(gs, self.h[0], gh)
        gx = _patches_back(gh @ self.first, self.images, self.shape, accurate) if to_x else None
        if not to_weights:
            return gx, [None] * len(self.shapes)

        first = (gh.mT @ self.x)[:, : self.seen].to(accurate)
        maps = (self.context.mT @ gh.view(images, -1))[: self.given].to(accurate)
        of_context = maps.view(self.given, self.pixels, width).permute(2, 1, 0)
        place = _over_images(gh, images, accurate).mT.contiguous()
        pooled = torch.bmm(g_lift.mT, self.mean).to(accurate)
        of_gates, of_c = sums.sum(1).split([2 * width, width], -1)
        flat = torch.cat([g.permute(0, 2, 3, 1).reshape(-1) for g in reversed(taps)]).view(-1, 9, width)
        used = n * width + len(self.last_bias)
        inner_and_last = flat.new_empty(used, width, 9, dtype=accurate).copy_(flat[:used].mT)
        *inner, last = inner_and_last.split([width] * n + [len(self.last_bias)])
        outers = outer.sum(1, dtype=accurate)
        grads = [first, of_context, place.sum(1), place, last, last_bias, *inner, *of_c, *outers, *of_gates, *pooled]
        return gx, [g.reshape(size) for g, size in zip(grads, self.shapes, strict=True)]

    def _kept(self, k: int) -> Tensor | None:
        return None if self.kept is None else self.kept[:, k]

    def _images(self, rows: Tensor) -> Tensor:
        """Reshape rows of pixels to (B, channels, H, W), channels last in memory."""
        return rows.view(self.images, *self.shape[1:], -1).permute(0, 3, 1, 2)

    def _convolve(self, rows: Tensor, taps: Tensor) -> Tensor:
        images = functional.conv2d(self._images(rows), _weight(taps), padding=1)
        return images.permute(0, 2, 3, 1).reshape(len(rows), -1)

    def _rows_back(self, gradient: Tensor, rows: Tensor, taps: Tensor) -> Tensor:
        """Return the gradient of the input of a convolution."""
        images = self._convolve_back(gradient, rows, taps, [True, False, False])[0]
        return images.permute(0, 2, 3, 1).reshape(len(rows), -1)

    def _taps_back(self, gradient: Tensor, rows: Tensor, taps: Tensor) -> Tensor:
        """Return the gradient of the weights of a convolution, (outputs, inputs, 3, 3)."""
        return self._convolve_back(gradient, rows, taps, [False, True, False])[1]

    def _convolve_back(self, gradient: Tensor, rows: Tensor, taps: Tensor, wanted: list[bool]) -> tuple[Tensor, ...]:
        images = self._images(gradient), self._images(rows)
        ones = [1, 1]
        return torch.ops.aten.convolution_backward(
            *images, _weight(taps), None, ones, ones, ones, False, [0, 0], 1, wanted
        )


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, context: Tensor, dtype: torch.dtype, shape: Shape, rate: float, *parameters: Tensor
    ) -> Tensor:
        ctx.made = _Pass(x, context, dtype, shape, rate, parameters)
        return ctx.made.run()

    @staticmethod
    @first_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gx, grads = ctx.made.back(gradient, ctx.needs_input_grad[0], any(ctx.needs_input_grad[5:]))
        return gx, None, None, None, None, *grads


@contextmanager
def deterministic() -> Iterator[None]:
    """Forbid cuDNN algorithms that may add up in another order when they run again."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


def _patches(x: Tensor, shape: Shape, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the inputs of a 3 x 3 convolution at every pixel of x (B, C · H · W): (B · H · W, columns >= 9 C)."""
    if kernels := kernels_for(x):
        return kernels.patches(x, shape, columns, dtype)
    seen = functional.unfold(x.unflatten(1, shape), 3, padding=1).mT.flatten(0, 1)
    return functional.pad(seen, (0, columns - seen.shape[1])).to(dtype)


def _patches_back(gradient: Tensor, images: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return the gradient of x from that of its patches."""
    if kernels := kernels_for(gradient):
        return kernels.patches_back(gradient, images, shape, dtype)
    seen = gradient[:, : 9 * shape[0]].unflatten(0, (images, -1)).mT.to(dtype)
    return functional.fold(seen, shape[1:], 3, padding=1).flatten(1)


def _add_bias(out: Tensor, bias: Tensor) -> None:
    """Add the bias to the first len(bias) columns, in place."""
    if kernels := kernels_for(out):
        kernels.add_bias(out, bias)
    else:
        out[:, : len(bias)] += bias


def _enter(m: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Return h = m + place, with place (H · W, width), and silu(h)."""
    if kernels := kernels_for(m):
        return kernels.conv_enter(m, place)
    h = (m.unflatten(0, (-1, len(place))) + place).flatten(0, 1)
    return h, functional.silu(h)


def _enter_back(gs: Tensor, h: Tensor, gh: Tensor | None) -> Tensor:
    """Return the gradient of h from that of silu(h) and its own."""
    if kernels := kernels_for(h):
        return kernels.conv_enter_back(gs, h, gh)
    through = gs * _silu_slope(h)
    return through if gh is None else gh + through


def _activate(c: Tensor, bias: Tensor, kept: Tensor | None, rate: float, u: Tensor, mean: Tensor) -> None:
    """Write u = dropout(silu(c + bias)), and its mean over the pixels of each image."""
    if kernels := kernels_for(c):
        kernels.conv_activate(c, bias, kept, 1 / (1 - rate), u, mean)
        return
    u.copy_(functional.silu(c + bias))
    if kept is not None:
        u *= kept.reshape(u.shape) / (1 - rate)
    torch.mean(u.unflatten(0, (len(mean), -1)), 1, out=mean)


def _activate_back(
    gu: Tensor, g_mean: Tensor, c: Tensor, bias: Tensor, kept: Tensor | None, rate: float, sums: Tensor
) -> Tensor:
    """Return the gradient of c from those of u and its means; write its sums per image to the last third of sums."""
    images, width = g_mean.shape
    if kernels := kernels_for(c):
        return kernels.conv_activate_back(gu, g_mean, c, bias, kept, 1 / (1 - rate), sums)
    both = gu.unflatten(0, (images, -1)) + g_mean[:, None] / (len(gu) // images)
    gc = both.flatten(0, 1) * _silu_slope(c + bias)
    if kept is not None:
        gc *= kept.reshape(gc.shape) / (1 - rate)
    sums[:, 2 * width :] = gc.unflatten(0, (images, -1)).sum(1)
    return gc


def _gate(h: Tensor, ag: Tensor, bias: Tensor, lift: Tensor) -> tuple[Tensor, Tensor]:
    """Return h + a ⊙ sigmoid(g), (a, g) = ag + bias with lift (B, width) added to g, and its silu."""
    if kernels := kernels_for(h):
        return kernels.conv_gate(h, ag, bias, lift)
    a, open_ = _gates(ag, bias, lift)
    h = h + a * open_
    return h, functional.silu(h)


def _gate_back(
    gs: Tensor, h: Tensor, gh: Tensor | None, ag: Tensor, bias: Tensor, lift: Tensor,
    g_ag: Tensor, g_lift: Tensor, sums: Tensor,
) -> Tensor:  # fmt: skip
    """Return the gradient of the input of `_gate` from those of its outputs h and s = silu(h).

    Write those of the gates to g_ag and g_lift, and the sums of g_ag over each image to the first two thirds of sums.
    """
    if kernels := kernels_for(h):
        return kernels.conv_gate_back(gs, h, gh, ag, bias, lift, g_ag, g_lift, sums)
    gh = _enter_back(gs, h, gh)
    a, open_ = _gates(ag, bias, lift)
    torch.cat((gh * open_, gh * a * open_ * (1 - open_)), 1, out=g_ag)
    sums[:, : ag.shape[1]] = g_ag.unflatten(0, (len(lift), -1)).sum(1)
    g_lift.copy_(sums[:, lift.shape[1] : ag.shape[1]])
    return gh


def _gates(ag: Tensor, bias: Tensor, lift: Tensor) -> tuple[Tensor, Tensor]:
    """Return a and sigmoid(g)."""
    a, g = (ag + bias).chunk(2, 1)
    return a, torch.sigmoid((g.unflatten(0, (len(lift), -1)) + lift[:, None]).flatten(0, 1))


def _over_images(rows: Tensor, images: int, dtype: torch.dtype) -> Tensor:
    """Sum over a batch, to (H · W, channels)."""
    return rows.view(images, -1).sum(0, dtype=dtype).view(-1, rows.shape[1])


def _silu_slope(x: Tensor) -> Tensor:
    share = torch.sigmoid(x)
    return share * (1 + x * (1 - share))


def _weight(taps: Tensor) -> Tensor:
    """Convert weights (outputs, 9, inputs) to those of a convolution."""
    return taps.unflatten(1, (3, 3)).permute(0, 3, 1, 2)


def _by_kind(of_blocks: list[Tensor]) -> list[list[Tensor]]:
    """Group the weights of all blocks by kind: inner.weight, inner.bias, outer.weight, ..."""
    n = len(of_blocks) // 5
    return [of_blocks[k * n : (k + 1) * n] for k in range(5)]


def _eights(count: int) -> int:
    """Round up to a multiple of 8: a GPU multiplies matrices fast if their rows are multiples of 16 bytes."""
    return -(-count // 8) * 8


def _is_convolution(layer: nn.Conv2d, inputs: int, outputs: int, size: int) -> bool:
    like = nn.Conv2d(inputs, outputs, size, padding=size // 2, device="meta")
    return str(layer) == str(like) and layer.bias is not None
