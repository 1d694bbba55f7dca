"""Optimisers and learning-rate schedules: the text's Adam, with or without decay, and the released code's RMSProp."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from nicest.flows.optimizer import Light, plain
from nicest.recipes.recipe import TrainSettings
from nicest.train.distributed import local


class LightAdamW(Light, AdamW):
    step = torch.no_grad()(plain(AdamW.step))


class RMSProp(Light):
    """RMSProp with momentum as the authors' released code has it.

        v <- 0.95 v + 0.05 g²,   w <- μ w - lr · g / max(√v, 0.01),   θ <- θ + w

    without bias correction. DIFFERS from torch's RMSprop, whose denominator is √v + ε.
    """

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.0, decay: float = 0.95, floor: float = 1e-2
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay, "floor": floor})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for p in parameters:
                if not self.state[p]:
                    self.state[p] = {"square": torch.zeros_like(p), "velocity": torch.zeros_like(p)}
            gradients = [local(p.grad) for p in parameters if p.grad is not None]
            squares = [local(self.state[p]["square"]) for p in parameters]
            velocities = [local(self.state[p]["velocity"]) for p in parameters]
            torch._foreach_mul_(squares, group["decay"])
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - group["decay"])
            roots = torch._foreach_sqrt(squares)
            torch._foreach_clamp_min_(roots, group["floor"])
            torch._foreach_mul_(velocities, group["momentum"])
            steps = torch._foreach_div(gradients, roots)
            torch._foreach_mul_(steps, group["lr"])
            torch._foreach_sub_(velocities, steps)
            torch._foreach_add_([local(p) for p in parameters], velocities)


def make_optimizer(model: nn.Module, settings: TrainSettings) -> Optimizer:
    """Make the optimiser of a recipe; AdamW without decay is Adam, and decay is for matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    captured = trained[0].is_cuda and local(trained[0]) is trained[0]

    def rate(value: float) -> Any:
        """Return the rate, on a GPU as a tensor: a captured step reads it there."""
        return torch.tensor(value, device=trained[0].device) if captured else value

    if settings.optimizer == "rmsprop":
        return RMSProp(trained, rate(settings.lr), rate(0.0))
    options: dict[str, Any] = {"betas": settings.betas, "eps": settings.eps, "fused": True, "capturable": captured}
    matrices, others = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return LightAdamW([group for group in groups if group["params"]], lr=rate(settings.lr), **options)


def moment_names(optimizer: Optimizer) -> tuple[str, str]:
    """Return the names of the two numbers that the optimiser keeps for each weight."""
    return ("square", "velocity") if isinstance(optimizer, RMSProp) else ("exp_avg", "exp_avg_sq")


def learning_rate(settings: TrainSettings, step: int, total: int) -> float:
    """Return the learning rate of step 0, 1, ..., total - 1."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    if settings.schedule == "cosine":
        done = (step - settings.warmup) / max(1, total - settings.warmup)
        return settings.lr * 0.5 * (1 + math.cos(math.pi * done))
    if settings.schedule == "exponential":
        return max(settings.lr * settings.lr_decay**-step, settings.lr_floor)
    return settings.lr


def momentum(epoch: int) -> float:
    """Return the released code's momentum for RMSProp: none for five epochs, then 0.5."""
    return 0.0 if epoch < 5 else 0.5


def set_rates(optimizer: Optimizer, settings: TrainSettings, step: int, epoch: int, total: int) -> float:
    """Set the rates of this step in the optimiser; return the learning rate."""
    lr = learning_rate(settings, step, total)
    rates = {"lr": lr} | ({"momentum": momentum(epoch)} if settings.optimizer == "rmsprop" else {})
    filled: list[Tensor] = []  # the groups may share theirs
    for group in optimizer.param_groups:
        for name, value in rates.items():
            if isinstance(group[name], Tensor):
                if not any(group[name] is each for each in filled):
                    filled.append(group[name].fill_(value))
            else:
                group[name] = value
    return lr


def average_weight(decay: float, step: int) -> float:
    """Return the weight of new parameters in their average: 1 - decay, and more at first."""
    return 1 - min(decay, (1 + step) / (10 + step))
