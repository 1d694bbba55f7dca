"""What the backward passes by hand have in common: they give first derivatives, and refuse to give others."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def first_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a backward pass raise RuntimeError where its result would be differentiated (`create_graph=True`).

    torch's `once_differentiable` is silent if x also reaches the result another way, as in a coupling: second
    derivatives would be wrong.
    """

    @wraps(backward)
    def checked(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("a lowered flow has first derivatives only: take second ones of the flow itself")
        return backward(ctx, *gradients)

    return checked
