"""The fast twin of a flow. The plain flow knows nothing of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nicest.fast.conv import FastConv
from nicest.fast.derivatives import first_only
from nicest.fast.gpu import kernels_for
from nicest.fast.networks import by_hand, on_cpu
from nicest.fast.rectified import Buffers, rectified, shifted
from nicest.fast.spline import FastAffineSpline, FastSpline, fast_law
from nicest.flows import (
    MLP,
    Additive,
    Bijection,
    Chain,
    ChannelMixing,
    Coupling,
    Elementwise,
    Mixing,
    Mixture,
    Partition,
    ResidualMLP,
    Spline,
    Units,
    Within,
)
from nicest.flows.bijection import check_context
from nicest.flows.chain import Ledger, ledger
from nicest.flows.noise import Dropout, batch_size, dropout, select
from nicest.flows.units import check_rows


def lower(flow: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a density that computes the same function from the same parameters, faster; gradients reach them.

    Between couplings x stays split in its two parts. With another `dtype` than the flow's own, such as bfloat16,
    coupling functions compute in it; x and the log-determinants keep theirs. On a GPU, additive couplings,
    dequantisation, splines and convolutional networks have kernels of their own. Networks without a fast form run under
    autocast; `LoweredChain.plain_layers` names them. Lower a flow on the device and in the dtype in which it will be
    used. A flow with sharded parameters, and a density without a bijection, are returned as they are.
    """
    known = isinstance(flow, Mixture) or isinstance(getattr(flow, "bijection", None), Bijection)
    if not known or any(hasattr(p, "full_tensor") for p in flow.parameters()):
        return flow
    twin = copy.copy(flow)  # keeps the class, whose methods may be the caller's own
    twin._modules = dict(flow._modules)
    if isinstance(flow, Mixture):
        twin.members = nn.ModuleList(lower(each, dtype) for each in flow.members)
        if flow.shares_units:  # the twins share them too, and with them the dequantisation noise
            for each in twin.members:
                each.units = twin.members[0].units
        return twin
    twin.bijection = LoweredChain(flow.bijection, dtype or flow.dtype)
    if type(getattr(flow, "units", None)) is Units and flow.units.levels and not _hooked(flow.units):
        twin.units = LoweredUnits(flow.units)
    return twin


def lowered_chains(flow: Any) -> list[LoweredChain]:
    """Return the lowered bijections of a flow, or of the members of a mixture."""
    members = flow.members if isinstance(flow, Mixture) else [flow]
    return [each.bijection for each in members if isinstance(getattr(each, "bijection", None), LoweredChain)]


def copy_weights(flow: Any) -> None:
    """Let the networks of a lowered flow keep copies of their weights as they are now."""
    for chain in lowered_chains(flow):
        chain.copy_weights()


class LoweredUnits(nn.Module):
    """Units of pixels, which enter and leave by one kernel on a GPU; the rest is that of the plain units."""

    def __init__(self, units: Units) -> None:
        super().__init__()
        self.plain = units

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("plain"), name)

    def enter(self, x: Tensor, *, noise: bool | Tensor = True, generator: torch.Generator | None = None) -> Tensor:
        units = self.plain
        check_rows(x, units.dim)
        kernels = self._kernels(x)
        if not kernels or noise is not True:
            return units.enter(x, noise=noise, generator=generator)
        u = select(torch.rand(batch_size(len(x)), units.dim, device=x.device, generator=generator))
        return kernels.dequantize(x.contiguous(), u, units.loc, units.scale)

    def leave(self, y: Tensor) -> Tensor:
        units = self.plain
        check_rows(y, units.dim)
        kernels = self._kernels(y)
        return kernels.quantize(y.contiguous(), units.loc, units.scale, units.levels) if kernels else units.leave(y)

    def _kernels(self, x: Tensor) -> Any:
        """Return the kernels for float32 tensors without gradients, or None."""
        fits = self.plain.scale.dtype == torch.float32 and not (x.requires_grad and torch.is_grad_enabled())
        return kernels_for(x) if fits else None


class FastMLP:
    """A rectified network in `dtype`; what it keeps of the weights, if anything, is in `buffers`."""

    def __init__(self, network: MLP, dtype: torch.dtype) -> None:
        self.network, self.dtype = network, dtype
        self.linears = [layer for layer in network.layers if isinstance(layer, nn.Linear)]
        self.dropout = next((layer for layer in network.layers if isinstance(layer, Dropout)), None)
        self.buffers: Buffers | None = None
        self.by_columns = False  # whether the output lies in memory column by column, where it can

    @staticmethod
    def of(network: nn.Module, dtype: torch.dtype) -> FastMLP | None:
        """Return the fast form of a network, or None if it is not an unmodified `MLP`."""
        if type(network) is not MLP or _hooked(network):
            return None
        kinds = [type(layer) for layer in network.layers]
        hidden = (len(kinds) - 1) // (3 if Dropout in kinds else 2)
        made = [nn.Linear, nn.ReLU, *([Dropout] if Dropout in kinds else [])] * hidden + [nn.Linear]
        biased = all(layer.bias is not None for layer in network.layers if isinstance(layer, nn.Linear))
        rates = {layer.p for layer in network.layers if isinstance(layer, Dropout)}
        return FastMLP(network, dtype) if kinds == made and biased and len(rates) < 2 else None

    def read(self, x1: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x_I1 as the network reads it, and the output at it, in the dtype of x_I1."""
        check_context(context, self.network.context_dim)
        x = x1 if context is None else torch.cat((x1, context.to(x1.dtype)), dim=-1)
        if self.dtype == x.dtype:
            return x1, self.call(x)
        x, b = rectified(x, *self.weights(), self.dtype, dropout=self.rate, buffers=self.buffers)
        return x[:, : x1.shape[1]], b

    def call(self, x: Tensor) -> Tensor:
        """Apply the network without calling its modules, each of which costs as much as a small product."""
        *hidden, last = self.linears
        rate = self.rate
        if self.by_columns and by_hand(x):
            return on_cpu(x, rate, self.linears, residual=False, by_columns=True)
        for layer in hidden:
            x = functional.linear(x, layer.weight, layer.bias).relu_()
            if rate:
                x = dropout(x, rate)
        return functional.linear(x, last.weight, last.bias)

    def shift(self, x: Tensor, partition: Partition, sign: int) -> Tensor:
        """Apply an additive coupling with this network in one operation, on a GPU."""
        return shifted(x, partition.layout, sign, *self.weights(), self.dtype, dropout=self.rate, buffers=self.buffers)

    def weights(self) -> tuple[list[Tensor], list[Tensor]]:
        return [layer.weight for layer in self.linears], [layer.bias for layer in self.linears]

    @property
    def rate(self) -> float:
        """The current dropout rate (0 in eval mode)."""
        return self.dropout.p if self.dropout is not None and self.dropout.training else 0.0

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Shapes that a GPU likes for the weights: hidden units in multiples of 64, or of 8 if few."""
        shapes = [layer.weight.shape for layer in self.linears]
        widths = [shapes[0][1], *(_padded(rows) for rows, _ in shapes[:-1]), shapes[-1][0]]
        return [(rows, columns) for columns, rows in pairwise(widths)]

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Keep copies of the weights as they are now, in `dtype` and in shapes that a GPU likes."""
        if self.buffers is None:
            like = self.linears[0].weight.new_zeros((), dtype=self.dtype)
            self.buffers = Buffers([(like.new_zeros(n, m), like.new_zeros(n)) for n, m in self.shapes])
        for layer, (w, b) in zip(self.linears, self.buffers.copies, strict=True):
            w[: layer.weight.shape[0], : layer.weight.shape[1]] = layer.weight
            b[: len(layer.bias)] = layer.bias


class FastResidual:
    """A residual network in `dtype`, without the calls of its modules."""

    def __init__(self, network: ResidualMLP, dtype: torch.dtype) -> None:
        self.network, self.dtype = network, dtype
        self.linears = [each for each in network.modules() if isinstance(each, nn.Linear)]
        self.dropout = next((each for each in network.modules() if isinstance(each, Dropout)), None)
        self.by_columns = False

    @staticmethod
    def of(network: nn.Module, dtype: torch.dtype) -> FastResidual | None:
        """Return the fast form of a network, or None if it is not an unmodified `ResidualMLP`."""
        if type(network) is not ResidualMLP or _hooked(network):
            return None
        block = [nn.ReLU, nn.Linear, nn.ReLU, Dropout, nn.Linear]
        made = [ResidualMLP, nn.Linear, nn.ModuleList, *[nn.Sequential, *block] * len(network.blocks), nn.Linear]
        biased = all(each.bias is not None for each in network.modules() if isinstance(each, nn.Linear))
        alike = len({each.p for each in network.modules() if isinstance(each, Dropout)}) < 2 and biased
        return FastResidual(network, dtype) if [type(each) for each in network.modules()] == made and alike else None

    def read(self, x1: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x_I1, and the output at it, in the dtype of x_I1."""
        check_context(context, self.network.context_dim)
        x = x1 if context is None else torch.cat((x1, context.to(x1.dtype)), dim=-1)
        if self.dtype == x.dtype and by_hand(x):
            return x1, on_cpu(x, self.rate, self.linears, residual=True, by_columns=self.by_columns)
        first, *blocks, last = ((layer.weight, layer.bias) for layer in self.linears)
        with reduced(x, self.dtype):
            h = functional.linear(x, *first)
            for outer, inner in zip(blocks[::2], blocks[1::2], strict=True):
                u = functional.linear(h.relu(), *outer).relu_()
                h = h + functional.linear(dropout(u, self.rate) if self.rate else u, *inner)
            return x1, functional.linear(h.relu_(), *last).to(x1.dtype)

    @property
    def rate(self) -> float:
        """The current dropout rate (0 in eval mode)."""
        return self.dropout.p if self.dropout is not None and self.dropout.training else 0.0


class FastCoupling:
    """A coupling layer by its parts x_I1 and x_I2, or, where there is a kernel for it, at once."""

    def __init__(self, layer: Coupling, dtype: torch.dtype) -> None:
        self.layer, self.dtype = layer, dtype
        self.partition, self.law = layer.partition, fast_law(layer.law)
        network: nn.Module = layer.network
        self.network = FastMLP.of(network, dtype)
        if self.network and self.network.linears[-1].out_features != self.law.size * len(self.partition.i2):
            self.network = None  # the plain one says what is wrong
        self.residual = FastResidual.of(network, dtype)
        fast = self.network or self.residual
        if fast and isinstance(self.law, FastSpline | FastAffineSpline):
            fast.by_columns = True
        self.conv = None if _hooked(layer.network) else FastConv.of(layer.network, dtype)
        if self.conv and not self.conv.fits(self.partition, layer.law):
            self.conv = None
        self.additive = type(layer.law) is Additive

    def at_once(self, x: Tensor, context: Tensor | None) -> bool:
        return (
            self.network is not None
            and self.additive
            and self.partition.regular
            and context is None
            and x.dtype == torch.float32 != self.dtype
            and kernels_for(x) is not None
        )

    def convolves(self, x1: Tensor, context: Tensor | None) -> bool:
        """Return True if the fast form of the convolutional network applies to this x_I1.

        It needs a GPU, reduced precision, and a context without gradient.
        """
        if self.conv is None or (0 if context is None else context.shape[-1]) != self.conv.network.context_dim:
            return False
        fits = context is None or not context.requires_grad
        return fits and x1.dtype == torch.float32 != self.dtype and kernels_for(x1) is not None

    def couple(
        self, x1: Tensor, x2: Tensor, context: Tensor | None, *, inverse: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return y_I1, y_I2 and the log-determinant (None where it is 0), or those of the inverse."""
        if self.conv and isinstance(self.law, FastAffineSpline) and self.convolves(x1, context) and not inverse:
            y2, log_slope = self.law.at_pixels(x2, self.conv.planes(x1, context))
            return x1, y2, log_slope.sum(-1)
        x1, b = self.read(x1, context)
        if self.additive:
            return x1, x2 - b if inverse else x2 + b, None
        law = self.law.inverse if inverse else self.law.forward
        y2, log_slope = law(x2, b.unflatten(1, (-1, self.law.size)))
        return x1, y2, log_slope.sum(-1)

    def read(self, x1: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x_I1 as the network reads it, and the network's output (B, |I2| · size)."""
        if self.network is not None:
            return self.network.read(x1, context)
        if self.conv is not None and self.convolves(x1, context):
            b = self.conv.read(x1, context)
        elif self.residual is not None:
            b = self.residual.read(x1, context)[1]
        else:
            with reduced(x1, self.dtype):
                b = self.layer.network(x1) if context is None else self.layer.network(x1, context)
        self.layer.parameters_from(x1, b)  # checks the shape
        return x1, b.to(x1.dtype)


class LoweredChain(Bijection):
    """A bijection in its fast form: its couplings, in chains within chains too, are fast, the rest is as it was."""

    def __init__(self, chain: Bijection, dtype: torch.dtype) -> None:
        super().__init__()
        self.plain = chain
        self.dtype = dtype
        self.fast = [(name, _fast_layer(layer, dtype)) for name, layer in _flattened("", chain)]

    def parts(self) -> Iterator[tuple[str, FastCoupling | nn.Module]]:
        """Yield couplings, and all else that may have parameters, by name, also inside a `Within`."""
        for name, part in self.fast:
            if not isinstance(part, FastWithin):
                yield name, part
                continue
            for inner, each in part.inner.parts():
                yield "_".join(filter(None, (name, inner))), each
            if part.network is not None:
                yield name, part.network

    @property
    def networks(self) -> list[FastMLP]:
        """The networks that run fast."""
        return [part.network for _, part in self.parts() if isinstance(part, FastCoupling) and part.network]

    @property
    def exclusive(self) -> bool:
        """Whether every fast network belongs to one coupling and to nothing else."""
        fast = [p for each in self.networks for p in each.network.parameters()]
        rest = [part for _, part in self.parts() if not _is_fast(part)]
        plain = {p for e in rest for p in (e.layer if isinstance(e, FastCoupling) else e).parameters()}
        return len(set(fast)) == len(fast) and plain.isdisjoint(fast)

    @property
    def plain_layers(self) -> list[str]:
        """What has parameters to train and no fast form, by name."""
        return [
            name or type(getattr(part, "layer", part)).__name__
            for name, part in self.parts()
            if not self._has_fast_form(part)
        ]

    @staticmethod
    def _has_fast_form(part: FastCoupling | nn.Module) -> bool:
        if isinstance(part, FastCoupling):
            return bool(part.network or part.residual or part.conv)
        if isinstance(part, FastConditional):
            return part.fast[0] is not None
        return isinstance(part, Mixing | FastChannelMixing) or not any(p.ndim > 1 for p in part.parameters())

    def copy_weights(self) -> None:
        """Let every network keep a copy of its weights as they are now, for inference."""
        for network in self.networks:
            network.copy_weights()

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, terms = self._walk(x, context, by_layer=False)
        counted = [term for term in terms.values() if term is not None]
        return x, reduce(torch.add, counted) if counted else x.new_zeros(len(x))

    def ledger(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Ledger]:
        """Return f(x) and the log-determinant of every layer, by name."""
        x, terms = self._walk(x, context, by_layer=True)
        return x, {name: x.new_zeros(len(x)) if term is None else term for name, term in terms.items()}

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        stream, total = _Stream(y), y.new_zeros(len(y))
        for _, part in reversed(self.fast):
            if not isinstance(part, FastCoupling):
                x, log_det = part.inverse(stream.whole(), context)
                stream, total = _Stream(x), total + log_det
            elif part.network and part.at_once(y, context):
                stream = _Stream(part.network.shift(stream.whole(), part.partition, -1))
            else:
                x1, x2, inner = part.couple(*stream.split(part.partition), context, inverse=True)
                stream.parts, total = (x1, x2), total if inner is None else total + inner
        return stream.whole(), total

    def _walk(self, x: Tensor, context: Tensor | None, *, by_layer: bool) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Return f(x) and the log-determinants by name, None for a volume-preserving layer.

        Between couplings x stays split in its two parts. A plain layer has one term, or one for each layer inside it.
        """
        terms: dict[str, Tensor | None] = {}
        stream = _Stream(x)
        for name, part in self.fast:
            if not isinstance(part, FastCoupling):
                if by_layer:
                    x, inner = ledger(part, stream.whole(), context)
                    terms |= {"_".join(filter(None, (name, key))): term for key, term in inner.items()}
                else:
                    x, terms[name] = part(stream.whole(), context)
                stream = _Stream(x)
            elif part.network and part.at_once(x, context):
                stream = _Stream(part.network.shift(stream.whole(), part.partition, 1))
                terms[name] = None
            else:
                y1, y2, terms[name] = part.couple(*stream.split(part.partition), context)
                stream.parts = y1, y2
        return stream.whole(), terms


class _Stream:
    """x, whole, or in the parts that the last coupling left it in, so that the next need not split it again."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.partition: Partition | None = None
        self.parts: tuple[Tensor, Tensor]

    def split(self, partition: Partition) -> tuple[Tensor, Tensor]:
        before, self.partition = self.partition, partition
        if before is None:
            self.parts = _split(partition, self.x)
        elif partition.i1 is before.i2 and partition.i2 is before.i1:  # as `swap` leaves them
            self.parts = self.parts[1], self.parts[0]
        elif partition is not before:
            self.parts = _split(partition, _merge(before, *self.parts))
        return self.parts

    def whole(self) -> Tensor:
        return self.x if self.partition is None else _merge(self.partition, *self.parts)


def _split(partition: Partition, x: Tensor) -> tuple[Tensor, Tensor]:
    """Split like `partition.split`, with a fast backward pass for gathered sets."""
    if partition.regular:
        return partition.split(x)
    x1, x2 = _Reordered.apply(x, partition.order, partition.back).split((len(partition.i1), len(partition.i2)), -1)
    return x1, x2


def _merge(partition: Partition, x1: Tensor, x2: Tensor) -> Tensor:
    """Merge like `partition.merge`, with a fast backward pass for gathered sets."""
    if partition.regular:
        return partition.merge(x1, x2)
    return _Reordered.apply(torch.cat((x1, x2), -1), partition.back, partition.order)


class _Reordered(torch.autograd.Function):
    """x with its columns in another order, whose gradient takes the order `back`: no sums, as an index would have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(1, order)

    @staticmethod
    @first_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(1, *ctx.saved_tensors), None, None


def reduced(x: Tensor, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return a context manager that computes products in `dtype` if autocast supports it."""
    halved = dtype in (torch.bfloat16, torch.float16) and dtype != x.dtype
    return torch.autocast(x.device.type, dtype) if halved else nullcontext()


def _fast_layer(layer: Bijection, dtype: torch.dtype) -> FastCoupling | Bijection:
    """Return the fast form of a layer, or the layer itself."""
    if type(layer) is Coupling and not _hooked(layer, deep=False):
        return FastCoupling(layer, dtype)
    if type(layer) is Within and not _hooked(layer, deep=False):
        return FastWithin(layer, dtype)
    if type(layer) is ChannelMixing and not _hooked(layer):
        return FastChannelMixing(layer)
    if type(layer) is Elementwise and not _hooked(layer):
        if layer.conditioner is not None:
            return FastConditional(layer, dtype)
        if type(layer.law) is Spline:
            return FastElementwise(layer)
    return layer


class FastElementwise(Bijection):
    """A spline in every dimension: on a CPU its knots are found once for all rows."""

    def __init__(self, layer: Elementwise) -> None:
        super().__init__()
        self.dim, self.plain, self.law = layer.dim, layer, fast_law(layer.law)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        b = self.plain.b.view(1, self.plain.dim, -1)
        y, log_slope = self.law.forward(x, b.expand(len(x), -1, -1) if kernels_for(x) else b)
        return y, log_slope.sum(-1)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.plain.inverse(y)


class FastConditional(Bijection):
    """A law whose parameters a conditioner computes, with the fast forms of both."""

    def __init__(self, layer: Elementwise, dtype: torch.dtype) -> None:
        super().__init__()
        assert layer.conditioner is not None
        self.dim, self.plain, self.law, self.dtype = layer.dim, layer, fast_law(layer.law), dtype
        network = layer.conditioner
        self.fast = [FastMLP.of(network, dtype) or FastResidual.of(network, dtype)]  # in a list: no submodule
        if self.fast[0]:
            self.fast[0].by_columns = isinstance(self.law, FastSpline | FastAffineSpline)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, log_slope = self.law.forward(x, self.parameters_at(x, context))
        return y, log_slope.sum(-1)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, log_slope = self.law.inverse(y, self.parameters_at(y, context))
        return x, log_slope.sum(-1)

    def parameters_at(self, x: Tensor, context: Tensor | None) -> Tensor:
        """Return the parameters of every row, (B, dim, size)."""
        network = self.fast[0]
        if network is None or context is None:
            with reduced(x, self.dtype):
                return self.plain.parameters_at(x, context)
        b = network.read(context.to(x.dtype), None)[1]
        return b.unflatten(1, (self.plain.dim, self.law.size))


class FastChannelMixing(Bijection):
    """A learned linear layer of the channels, as one product with images as they lie in memory."""

    def __init__(self, layer: ChannelMixing) -> None:
        super().__init__()
        self.dim, self.plain = layer.dim, layer

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        layer, mixing = self.plain, self.plain.mixing
        log_det = (layer.pixels * mixing.log_diagonal.sum()).expand(len(x))
        kernels = kernels_for(x)
        if kernels and len(mixing.b) <= kernels.MOST_CHANNELS:
            return _Mixed.apply(x, mixing.lu, mixing.log_diagonal, mixing.b, mixing.order), log_det
        images, matrix = x.unflatten(-1, (-1, layer.pixels)), mixing.matrix.expand(len(x), -1, -1)
        return torch.baddbmm(mixing.b[:, None], matrix, images).flatten(1), log_det

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.plain.inverse(y)


class _Mixed(torch.autograd.Function):
    """W x + b at every pixel, on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lu: Tensor, log_diagonal: Tensor, b: Tensor, order: Tensor) -> Tensor:
        kernels: Any = kernels_for(x)
        matrix = kernels.mixing_matrix(lu, log_diagonal, order)
        ctx.save_for_backward(x, matrix, lu, log_diagonal, order)
        return kernels.mix_channels(x, matrix, b)

    @staticmethod
    @first_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kernels: Any = kernels_for(gradient)
        x, matrix, *factors = ctx.saved_tensors
        gx, g_matrix, g_bias = kernels.mix_channels_back(gradient, x, matrix)
        return gx, *kernels.mixing_matrix_back(g_matrix.sum(0), *factors), g_bias.sum(0), None


class FastWithin(Within):
    """A `Within` whose inner layers are fast."""

    inner: LoweredChain

    def __init__(self, layer: Within, dtype: torch.dtype) -> None:
        super().__init__(layer.partition, LoweredChain(layer.inner, dtype), layer.network)


def _is_fast(part: FastCoupling | nn.Module) -> bool:
    return isinstance(part, FastCoupling) and part.network is not None


def _flattened(name: str, layer: Bijection) -> Iterator[tuple[str, Bijection]]:
    """Yield the layers of chains within chains, by the names that the ledger gives them."""
    if type(layer) is not Chain or _hooked(layer, deep=False):
        yield name, layer
        return
    for inner, each in layer.layers.items():
        yield from _flattened("_".join(filter(None, (name, inner))), each)  # type: ignore[arg-type]


def _hooked(module: nn.Module, *, deep: bool = True) -> bool:
    """Return True if a module, or one inside it, has hooks."""
    return any(
        each._forward_hooks or each._forward_pre_hooks or each._backward_hooks or each._backward_pre_hooks
        for each in (module.modules() if deep else [module])
    )


def _padded(width: int) -> int:
    unit = 64 if width >= 512 else 8
    return -(-width // unit) * unit
