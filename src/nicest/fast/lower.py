"""The fast twin of a flow. The plain flow knows nothing of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from nicest.fast.coupling import FastCoupling, Stream
from nicest.fast.gpu import kernels_for
from nicest.fast.layers import FastChannelMixing, FastElementwise
from nicest.fast.networks import FastMLP, hooked
from nicest.flows import Bijection, Chain, ChannelMixing, Coupling, Elementwise, Mixing, Mixture, Spline, Units, Within
from nicest.flows.chain import Ledger, joined, ledger
from nicest.flows.noise import batch_size, select
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
    if type(getattr(flow, "units", None)) is Units and flow.units.levels and not hooked(flow.units):
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
                yield joined(name, inner), each
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
        rest = [part for _, part in self.parts() if not (isinstance(part, FastCoupling) and part.network)]
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
        if isinstance(part, FastElementwise) and part.plain.conditioner is not None:
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
        stream, total = Stream(y), y.new_zeros(len(y))
        for _, part in reversed(self.fast):
            if not isinstance(part, FastCoupling):
                x, log_det = part.inverse(stream.whole(), context)
                stream, total = Stream(x), total + log_det
            elif part.network and part.at_once(y, context):
                stream = Stream(part.network.shift(stream.whole(), part.partition, -1))
            else:
                x1, x2, inner = part.couple(*stream.split(part.partition), context, inverse=True)
                stream.parts, total = (x1, x2), total if inner is None else total + inner
        return stream.whole(), total

    def _walk(self, x: Tensor, context: Tensor | None, *, by_layer: bool) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Return f(x) and the log-determinants by name, None for a volume-preserving layer.

        Between couplings x stays split in its two parts. A plain layer has one term, or one for each layer inside it.
        """
        terms: dict[str, Tensor | None] = {}
        stream = Stream(x)
        for name, part in self.fast:
            if not isinstance(part, FastCoupling):
                if by_layer:
                    x, inner = ledger(part, stream.whole(), context)
                    terms |= {joined(name, key): term for key, term in inner.items()}
                else:
                    x, terms[name] = part(stream.whole(), context)
                stream = Stream(x)
            elif part.network and part.at_once(x, context):
                stream = Stream(part.network.shift(stream.whole(), part.partition, 1))
                terms[name] = None
            else:
                y1, y2, terms[name] = part.couple(*stream.split(part.partition), context)
                stream.parts = y1, y2
        return stream.whole(), terms


class FastWithin(Within):
    """A `Within` whose inner layers are fast."""

    inner: LoweredChain

    def __init__(self, layer: Within, dtype: torch.dtype) -> None:
        super().__init__(layer.partition, LoweredChain(layer.inner, dtype), layer.network)


def _fast_layer(layer: Any, dtype: torch.dtype) -> FastCoupling | Bijection:
    """Return the fast form of a layer, or the layer itself."""
    kind = type(layer)
    if hooked(layer, deep=kind not in (Coupling, Within)):
        return layer
    if kind is Coupling:
        return FastCoupling(layer, dtype)
    if kind is Within:
        return FastWithin(layer, dtype)
    if kind is ChannelMixing:
        return FastChannelMixing(layer)
    if kind is Elementwise and (layer.conditioner is not None or type(layer.law) is Spline):
        return FastElementwise(layer, dtype)
    return layer


def _flattened(name: str, layer: Bijection) -> Iterator[tuple[str, Bijection]]:
    """Yield the layers of chains within chains, by the names that the ledger gives them."""
    if type(layer) is not Chain or hooked(layer, deep=False):
        yield name, layer
        return
    for inner, each in layer.layers.items():
        yield from _flattened(joined(name, inner), each)  # type: ignore[arg-type]
