"""From pixels to real numbers, each step a layer with its own log-det (NICE §5.1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from nicest.flows.bijection import Bijection, check_features
from nicest.flows.gpu import kernels_for
from nicest.flows.shares import own, whole


class Dequantize(Bijection):
    """y = (x + u) / levels, u ~ U[0, 1) drawn afresh in every call; log det = -D log levels (NICE §5.1).

    x holds whole levels 0..levels-1, in any dtype. Then log_prob(x) is a noisy value of the density of x + u, whose
    mean over u bounds the log-probability of the discrete x from below. inverse(y) is the level that y lies in.
    """

    unit: Tensor
    zero: Tensor

    def __init__(self, levels: int = 256) -> None:
        super().__init__()
        if levels < 2:
            raise ValueError(f"expected at least 2 levels, got {levels}")
        self.levels = levels
        self.register_buffer("unit", torch.tensor(1.0), persistent=False)  # carry the dtype of the flow
        self.register_buffer("zero", torch.tensor(0.0), persistent=False)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = x.to(self.unit.dtype) if x.is_floating_point() else x
        u = own(torch.rand((whole(len(x)), *x.shape[1:]), dtype=self.unit.dtype, device=x.device))
        # rounding may take y up to the next level: the largest number below that is meant
        kernels = kernels_for(x) if u.dtype == torch.float32 and not x.requires_grad else None
        if kernels:
            y = kernels.dequantize(x.contiguous(), u, self.levels)
        else:
            next_level = (x + self.unit) / self.levels
            y = torch.minimum((x + u) / self.levels, torch.nextafter(next_level, self.zero))
        return y, y.new_full((len(y),), -y.shape[-1] * math.log(self.levels))

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        level = (y * self.levels).floor()
        # where rounding took y * levels across a level, y itself tells on which side it lies
        level = level + ((level + 1) / self.levels <= y).to(y) - (level / self.levels > y).to(y)
        return level.clamp(0, self.levels - 1)

    def extra_repr(self) -> str:
        return f"levels={self.levels}"


class DequantizeColumns(Bijection):
    """y_d = x_d + step_d u_d, u ~ U[0, 1) drawn afresh in every call: columns of whole steps; log det = Σ log step_d.

    Columns with step 0 are continuous and stay as they are. log_prob(x) is then a noisy value whose mean over u bounds,
    from below, the logarithm of a density of the continuous columns times a probability of the others (NICE §5.1,
    where all steps are one level). inverse(y) is the step that y lies in.
    """

    step: Tensor

    def __init__(self, step: Tensor) -> None:
        super().__init__()
        if not bool((step >= 0).all()):
            raise ValueError("every step must be 0 or more")
        self.register_buffer("step", step.clone())

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_features(x, len(self.step))
        x = x.to(self.step.dtype)
        y = x + self.step * own(torch.rand((whole(len(x)), len(self.step)), dtype=self.step.dtype, device=x.device))
        # rounding may take y up to the next step: the largest number below that is meant
        unit = torch.where(self.step > 0, self.step, 1.0)
        next_step = ((x / unit).round() + 1) * unit
        y = torch.where(self.step > 0, torch.minimum(y, torch.nextafter(next_step, x)), x)
        log_det = unit.log().sum()
        return y, log_det.expand(len(x)).clone()

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        check_features(y, len(self.step))
        whole = torch.where(self.step > 0, self.step, 1.0)
        count = (y / whole).floor()
        # where rounding took y / step across a step, y itself tells on which side it lies
        count = count + ((count + 1) * whole <= y).to(y) - (count * whole > y).to(y)
        return torch.where(self.step > 0, count * whole, y)

    def extra_repr(self) -> str:
        return f"{int((self.step > 0).sum())} of {len(self.step)}"


class Rescale(Bijection):
    """y = shift + scale ⊙ x; log det = Σ_d log scale_d; for the interval [-1, 1], or to standardise columns."""

    shift: Tensor
    scale: Tensor

    def __init__(self, shift: Tensor | float, scale: Tensor | float, dim: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.as_tensor(shift, dtype=torch.get_default_dtype()).expand(dim).clone())
        self.register_buffer("scale", torch.as_tensor(scale, dtype=torch.get_default_dtype()).expand(dim).clone())
        if not bool((self.scale > 0).all()):
            raise ValueError("every scale must be positive")

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_features(x, len(self.scale))
        y = (self.shift + self.scale * x).to(self.scale.dtype)  # numbers far from 0 come in float64 and leave near 0
        return y, self.scale.log().sum().expand(x.shape[0]).clone()

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        check_features(y, len(self.scale))
        return (y - self.shift) / self.scale


class Logit(Bijection):
    """y = logit(a), a = margin + (1 - 2 margin) x, for x in [0, 1].

    log det = Σ_d [log(1 - 2 margin) - log a_d - log(1 - a_d)]. The margin keeps y finite at 0 and 1.
    """

    def __init__(self, margin: float = 1e-6) -> None:
        super().__init__()
        if not 0 <= margin < 0.5:
            raise ValueError(f"expected a margin in [0, 0.5), got {margin}")
        self.margin = margin

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = torch.logit(self.margin + (1 - 2 * self.margin) * x)
        log_det = math.log1p(-2 * self.margin) + y.abs() + 2 * functional.softplus(-y.abs())
        return y, log_det.sum(-1)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        return (y.sigmoid() - self.margin) / (1 - 2 * self.margin)

    def extra_repr(self) -> str:
        return f"margin={self.margin}"
