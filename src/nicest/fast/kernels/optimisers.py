"""Kernels of optimisers, which also copy the weights and update their average."""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = tl.constexpr(1024)
Update = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]  # weights, gradient, two moments, copy, average


def adam(tensors: Update, **rates: Any) -> None:
    """Apply AdamW to scale · gradient at step number `step`; copy the weights, and update their average.

    `rates` are tensors step, lr, scale and weight, and the numbers beta1, beta2, eps and decay.
    """
    logs = {f"log_{name}": math.log(max(rates[name], 1e-300)) for name in ("beta1", "beta2")}
    _update(_adam, tensors, **rates, **logs)


def rmsprop(tensors: Update, **rates: Any) -> None:
    """Apply the released code's RMSProp to scale · gradient with lr, momentum, decay and floor; otherwise as `adam`."""
    _update(_rmsprop, tensors, **rates)


def _update(kernel: Any, tensors: Update, **rates: Any) -> None:
    *others, average = tensors
    total, kept = tensors[0].numel(), tensors[0] if average is None else average
    kernel[(triton.cdiv(total, _BLOCK.value),)](*others, kept, total=total, averages=average is not None, **rates)


@triton.jit
def _adam(
    weights, gradient, first, second, copy, average, step, lr, scale, weight, total,
    beta1: tl.constexpr, beta2: tl.constexpr, log_beta1: tl.constexpr, log_beta2: tl.constexpr,
    eps, decay, averages: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    inside = i < total
    steps, rate = tl.load(step).to(tl.float64), tl.load(lr)
    correction1 = (1.0 - tl.exp(steps * log_beta1)).to(tl.float32)
    correction2 = tl.sqrt((1.0 - tl.exp(steps * log_beta2)).to(tl.float32))
    g = tl.load(gradient + i, mask=inside).to(tl.float32) * tl.load(scale)
    m = tl.load(first + i, mask=inside)
    m += (1.0 - beta1) * (g - m)
    v = beta2 * tl.load(second + i, mask=inside) + (1.0 - beta2) * g * g
    p = tl.load(weights + i, mask=inside) * (1.0 - rate * decay)
    p -= rate / correction1 * m / (tl.sqrt(v) / correction2 + eps)
    tl.store(first + i, m, mask=inside)
    tl.store(second + i, v, mask=inside)
    _store(weights, copy, average, weight, i, inside, p, averages)


@triton.jit
def _rmsprop(
    weights, gradient, square, velocity, copy, average, lr, momentum, scale, weight, total, decay, floor,
    averages: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    inside = i < total
    g = tl.load(gradient + i, mask=inside).to(tl.float32) * tl.load(scale)
    v = decay * tl.load(square + i, mask=inside) + (1.0 - decay) * g * g
    w = tl.load(momentum) * tl.load(velocity + i, mask=inside) - tl.load(lr) * g / tl.maximum(tl.sqrt(v), floor)
    p = tl.load(weights + i, mask=inside) + w
    tl.store(square + i, v, mask=inside)
    tl.store(velocity + i, w, mask=inside)
    _store(weights, copy, average, weight, i, inside, p, averages)


@triton.jit
def _store(weights, copy, average, weight, i, inside, p, averages: tl.constexpr):
    tl.store(weights + i, p, mask=inside)
    tl.store(copy + i, p.to(copy.dtype.element_ty), mask=inside)
    if averages:
        mean = tl.load(average + i, mask=inside)
        tl.store(average + i, mean + tl.load(weight) * (p - mean), mask=inside)
