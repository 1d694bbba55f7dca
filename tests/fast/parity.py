"""Whether a bijection and its fast form agree: in value, log-det, inverse, ledger and gradients."""

import copy

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from nicest.fast import LoweredChain
from nicest.flows import Bijection
from nicest.flows.chain import ledger

ROUNDING = {torch.float64: {"rtol": 1e-10, "atol": 1e-10}, torch.float32: {"rtol": 1e-3, "atol": 2e-4}}


def gradients(layer: Bijection, module: nn.Module, x: Tensor, *context: Tensor) -> tuple[Tensor, ...]:
    """Those of x and of the parameters of a module, of the NICE criterion under a Gaussian prior."""
    x = x.detach().clone().requires_grad_()
    y, log_det = layer(x, *context)
    return torch.autograd.grad(0.5 * y.square().sum() - log_det.sum(), [x, *module.parameters()])


def assert_parity(layer: Bijection, x: Tensor, *context: Tensor) -> None:
    """The fast form in the dtype of x agrees to rounding."""
    fast, limit = LoweredChain(layer, x.dtype), ROUNDING[x.dtype]
    (y, log_det), (fast_y, fast_log_det) = layer(x, *context), fast(x, *context)
    assert fast_y.dtype == fast_log_det.dtype == x.dtype
    assert_close(fast_y, y, **limit)
    assert_close(fast_log_det, log_det, **limit)
    assert_close(fast.inverse(y.detach(), *context), layer.inverse(y.detach(), *context), **limit)
    (walked, terms), (_, expected) = ledger(fast, x, *context), ledger(layer, x, *context)
    assert_close(walked, y, **limit)
    assert list(terms) == list(expected)
    for name, term in terms.items():
        assert_close(term, expected[name], **limit)
    for found, plain in zip(gradients(fast, layer, x, *context), gradients(layer, layer, x, *context), strict=True):
        size = max(1.0, float(plain.abs().max())) if plain.numel() else 1.0
        assert_close(found, plain, rtol=limit["rtol"], atol=limit["atol"] * size)


def assert_close_in_bfloat16(layer: Bijection, x: Tensor, *context: Tensor) -> None:
    """The fast form in bfloat16 agrees with float32 within that precision; what it gives and learns is float32.

    Where random splines are steep, log-dets may err by twice what rounding the parameters to bfloat16 changes.
    """
    fast = LoweredChain(layer, torch.bfloat16)
    (y, log_det), (fast_y, fast_log_det) = layer(x, *context), fast(x, *context)
    assert fast_y.dtype == fast_log_det.dtype == torch.float32
    size = 1 + y.abs().max()
    assert (fast_y - y).abs().max() < 0.05 * size
    rounded = copy.deepcopy(layer)
    for parameter in rounded.parameters():
        parameter.data = parameter.bfloat16().float()
    changes = (rounded(x, *context)[1] - log_det).abs().mean()
    assert (fast_log_det - log_det).abs().mean() < 0.05 * (1 + log_det.abs().mean()) + 2 * changes
    assert (fast.inverse(fast_y.detach(), *context)[0] - x).abs().max() < 1e-3 * size
    found, plain = gradients(fast, layer, x, *context), gradients(layer, layer, x, *context)
    assert all(gradient.dtype == torch.float32 for gradient in found)
    found, plain = (torch.cat([gradient.flatten() for gradient in each]) for each in (found, plain))
    assert (found - plain).norm() < 0.1 * plain.norm()
