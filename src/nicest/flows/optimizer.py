"""Torch's optimisers without its compiler: to import that takes over a second, and nothing here is compiled."""

from typing import Any

from torch.optim import LBFGS, Optimizer


def plain(method: Any) -> Any:
    """Return a method of torch's optimisers without the wrapper that imports the compiler."""
    return getattr(method, "__wrapped__", method)


class Light(Optimizer):
    """An optimiser that starts at once."""

    add_param_group = plain(Optimizer.add_param_group)
    zero_grad = plain(Optimizer.zero_grad)
    state_dict = plain(Optimizer.state_dict)
    load_state_dict = plain(Optimizer.load_state_dict)


class LightLBFGS(Light, LBFGS):
    """L-BFGS that starts at once."""
