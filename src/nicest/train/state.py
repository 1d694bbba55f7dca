"""The state of a training: everything that changes, and everything that an exact resume needs."""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nicest.errors import NicestError
from nicest.flows import Density, Flow, Mixture
from nicest.messages import shown
from nicest.recipes import Recipe
from nicest.runs.folder import Sink
from nicest.runs.formats import NAMES_OF_TODAY, convert_state
from nicest.runs.runtime import training_precision
from nicest.runs.sinks import Saved
from nicest.train.distributed import World, placed, shard, whole
from nicest.train.optim import make_optimizer


@dataclass
class Counters:
    """The progress of a training."""

    step: int = 0
    best_nats: float = -math.inf
    best_epoch: int = 0
    seconds: float = 0.0
    rolled_back: bool = False
    unscored: bool = False  # stopped at the end of an epoch, before or in its validation


class State:
    """The density, its average, the optimiser, the counters and the losses of the epoch."""

    def __init__(self, recipe: Recipe, flow: Any, device: torch.device, world: World = World()) -> None:
        # fitted constants are kept in float64 beside the float32 flow, and saved so
        trained = {name for name, p in flow.named_parameters(remove_duplicate=False) if p.requires_grad}
        stored = flow.state_dict()
        if odd := [name for name, t in stored.items() if not isinstance(t, Tensor)]:
            raise NicestError(f"a layer keeps something that is not a tensor, which cannot be saved: {shown(odd[0])}")
        self.constants = {n: t.clone() for n, t in stored.items() if n not in trained and t.is_floating_point()}
        self.recipe, self.device, self.world = recipe, device, world
        self.precision = training_precision(recipe.train.precision, device)
        flows = isinstance(flow, Flow | Mixture)  # other densities are small
        self.sharded = world.joined and recipe.train.sharding == "full" and flows
        self.entire = copy.deepcopy(flow).float() if self.sharded else flow
        self.flow = flow.float().to(device)
        self.average = copy.deepcopy(self.flow) if recipe.train.ema else self.flow
        if self.sharded:
            for each in dict.fromkeys((self.flow, self.average)):
                shard(each, device, self.precision)
        self.optimizer: Optimizer = make_optimizer(self.flow, recipe.train)
        self.counters = Counters()
        self.losses = torch.zeros(0, device=device)  # the losses of the epoch so far

    def average_tensors(self) -> dict[str, Tensor]:
        """Copy the averaged weights."""
        return {name: tensor.clone() for name, tensor in self.average.state_dict().items()}

    def exact(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors to save: constants that training did not change in float64, as they were fitted."""

        def kept(name: str, tensor: Tensor) -> Tensor:
            constant = self.constants.get(name)
            return constant if constant is not None and torch.equal(constant.to(tensor), tensor) else tensor

        return {name: kept(name, tensor) for name, tensor in tensors.items()}

    @torch.no_grad()
    def prepare_average(self) -> None:
        """Prepare the average for a validation: copy the buffers, which are not averaged."""
        if self.average is not self.flow:
            for target, buffer in zip(self.average.buffers(), self.flow.buffers(), strict=True):
                target.copy_(buffer)
        self.average.eval()

    @property
    def fingerprint(self) -> str:
        """A hash of the layers and of the weights that train, which a resumed run must keep."""
        laws = {name: getattr(module, "law", None) for name, module in self.entire.named_modules()}
        said = {name: repr(law) if is_dataclass(law) else type(law).__name__ for name, law in laws.items()}
        kinds = [(name, type(module).__name__, said[name]) for name, module in self.entire.named_modules()]
        trained = [(name, tuple(p.shape)) for name, p in self.entire.named_parameters() if p.requires_grad]
        return hashlib.blake2b(repr((kinds, trained)).encode(), digest_size=8).hexdigest()

    def whole(self, flow: Density) -> Density:
        """Return the density or its average, or a copy with all parts if it is sharded."""
        if not self.sharded:
            return flow
        copied = copy.deepcopy(self.entire).to(self.device)
        copied.load_state_dict({name: whole(t) for name, t in flow.state_dict().items()})
        return copied.train(flow.training)

    def save(self, sink: Sink) -> None:
        tensors = {f"flow.{name}": t for name, t in self.flow.state_dict().items()}
        if self.average is not self.flow:
            tensors |= {f"average.{name}": p.clone() for name, p in self.average.named_parameters()}
        for i, values in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{name}": value for name, value in values.items()}
        tensors |= {"losses": self.losses, "random.cpu": torch.get_rng_state()}  # the same in all processes
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.device)
        tensors = self.world.collected(tensors)
        if self.world.rank == 0:
            tensors |= {f"flow.{name}": t for name, t in self.exact(under("flow.", tensors)).items()}
            sink.save_state(Saved(tensors, self.recipe, asdict(self.counters) | {"flow": self.fingerprint}))

    def restore(self, saved: Saved, *, random: bool) -> None:
        """Restore a saved state; without `random`, torch's random state is kept."""
        tensors, _, counters, version = saved
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        if version < NAMES_OF_TODAY:
            tensors = convert_state(tensors, self.flow, self.recipe.data, trained)
        weights = under("flow.", tensors)
        if self.sharded:
            weights = {name: placed(weights[name], like) for name, like in self.flow.state_dict().items()}
        self.flow.load_state_dict(weights)
        if self.average is not self.flow:
            with torch.no_grad():
                averages = under("average.", tensors)
                for name, parameter in self.average.named_parameters():
                    parameter.copy_(placed(averages[name], parameter))
        slots: dict[int, dict[str, Tensor]] = {}
        for key, value in under("optimizer.", tensors).items():
            i, _, name = key.partition(".")
            slots.setdefault(int(i), {})[name] = value
        if self.sharded:
            slots = {i: {name: placed(t, trained[i]) if t.ndim else t for name, t in slots[i].items()} for i in slots}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": slots, "param_groups": groups})
        self.counters = Counters(**{name: value for name, value in counters.items() if name != "flow"})
        self.losses = tensors["losses"].to(self.device)
        if random:
            torch.set_rng_state(tensors["random.cpu"])
            if self.device.type == "cuda" and "random.cuda" in tensors:
                torch.cuda.set_rng_state(tensors["random.cuda"], self.device)


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names start with a prefix, without it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
