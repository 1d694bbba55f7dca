"""Training by several processes, which torchrun starts: who is who, what they tell each other, who holds what."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nicest.errors import NicestError
from nicest.flows import Density
from nicest.inference.engine import Share
from nicest.messages import one_line
from nicest.runs.runtime import choose_device

PATIENCE = timedelta(minutes=30)  # with a process that does not answer: the first may be writing a large state
_COUNT = itertools.count()
GRACE = 10.0  # seconds in which a process may come to its own end after another has failed
LOST = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Socket")  # what torch says then


@dataclass(frozen=True)
class World:
    """The processes that train together, and which of them this is; without torchrun, this one alone.

    Each method is called by all of them, in the same order; alone, it gives back what it was given.
    """

    rank: int = 0
    size: int = 1
    backend: str = ""

    @property
    def joined(self) -> bool:
        """Whether torchrun started this process, be it with no other."""
        return bool(self.backend)

    @property
    def share(self) -> Share:
        """What this process has of every batch."""
        return Share(self.rank, self.size)

    def broadcast(self, value: Any) -> Any:
        """Broadcast an object from rank 0."""
        said = [value]
        if self.joined:
            dist.broadcast_object_list(said, 0, device=torch.device("cpu"))
        return said[0]

    def all_gather(self, value: Any) -> list[Any]:
        """Return the objects of all processes."""
        said = [value] * self.size
        if self.joined:
            dist.all_gather_object(said, value)
        return said

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set in any process."""
        if not self.joined:
            return flag
        count = torch.tensor(int(flag))
        dist.all_reduce(count)
        return bool(count)

    def average_(self, *tensors: Tensor) -> None:
        """Give every process the average of their tensors, in place."""
        for tensor in tensors if self.joined else ():
            sums = tensor if self.backend == "nccl" else tensor.float()  # gloo may not add bfloat16
            dist.all_reduce(sums)
            tensor.copy_(sums.div_(self.size))

    def mean(self, values: Tensor) -> float:
        """Return the mean of numbers that are spread over all processes."""
        if not self.joined:
            return float(values.double().mean())
        sums = torch.tensor([float(values.double().sum()), len(values)], dtype=torch.float64)
        dist.all_reduce(sums)
        return float(sums[0] / sums[1])

    def sent(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Broadcast tensors from the CPU of rank 0."""
        if not self.joined:
            return dict(tensors)
        described = self.broadcast([(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()])
        received = {}
        for name, shape, dtype in described:
            received[name] = tensors[name].contiguous() if self.rank == 0 else torch.empty(shape, dtype=dtype)
            dist.broadcast(received[name], 0)
        return received

    def collected(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather sharded tensors in the first process, to be written; the others get nothing."""
        found = {}
        for name, tensor in tensors.items():
            entire = whole(tensor)
            if self.rank == 0:
                found[name] = entire if entire is tensor else entire.cpu()
        return found

    def require_shares(self, batch: int) -> None:
        """Refuse a batch that cannot be shared out evenly."""
        if batch % self.size:
            raise NicestError(
                f"expected a batch that {self.size} processes share evenly, got {batch}: set train.batch to a"
                f" multiple of {self.size}, such as {-(-batch // self.size) * self.size}, or start another number"
            )


def restarts() -> int:
    """Return how often torchrun has restarted all processes after one was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextmanager
def joined(name: str) -> Iterator[tuple[World, torch.device]]:
    """Join the processes of torchrun; yield them and the device of this one. Only the first that fails reports why."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun did not start this process
        yield World(), choose_device(name)
        return
    device, backend = own_device(name)
    store, rank, size = next(dist.rendezvous("env://", timeout=PATIENCE))
    backends = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    # torchrun's store may outlive its workers, and a process may train more than once: each time has its own keys
    store = dist.PrefixStore(f"nicest {restarts()}.{next(_COUNT)}", store)
    dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    failed = False
    try:
        with leaving_when_another_fails(store):
            yield World(rank, size, backend), device
    except Exception as error:
        failed, lost = True, isinstance(error, RuntimeError) and any(word in str(error) for word in LOST)
        first, why, says_so = blamed(store, (rank, one_line(error), lost or isinstance(error, NicestError)))
        if first != rank:
            if lost and not says_so:
                say_who_failed(store, first, why)
            raise SystemExit(1) from None
        sys.stderr = sys.__stderr__  # the command line silences all but the first process of a machine
        if lost:
            raise NicestError("another process of this training died: the last saved state is kept") from error
        raise
    finally:
        if not (failed and backend == "nccl"):  # it may wait for the others: torchrun ends them
            dist.destroy_process_group()


Blame = tuple[int, str, bool]  # the rank of a process that failed, why, and whether it says so itself in one line


def blamed(store: dist.Store, mine: Blame | None = None) -> Blame:
    """Return the process that failed first: this one if none did before."""
    rank, why, says_so = json.loads(store.compare_set("failed", "", json.dumps(mine)))
    return rank, why, says_so


def say_who_failed(store: dist.Store, first: int, why: str) -> None:
    """Print one line for the user, in one of the processes that end because another failed."""
    if store.add("said", 1) == 1:
        text = f"error: process {first} of this training failed ({why}): what was saved last is kept"
        print(text, file=sys.__stderr__, flush=True)


@contextmanager
def leaving_when_another_fails(store: dist.Store) -> Iterator[None]:
    """End this process soon after another has failed, though it may wait for an answer that will never come."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1):
            try:
                failed = store.check(["failed"])
            except RuntimeError:  # torchrun is gone, and will be missed elsewhere
                return
            if failed and not over.wait(GRACE):
                first, why, _ = blamed(store)
                say_who_failed(store, first, why)
                os._exit(1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def own_device(name: str) -> tuple[torch.device, str]:
    """Return the device of this process, and the backend: NCCL, unless processes share a GPU."""
    place, neighbours = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    spread = name in ("auto", "cuda") and torch.cuda.is_available()
    gpus = torch.cuda.device_count() if spread else 1
    device = choose_device(f"cuda:{place % gpus}" if spread else name)
    return device, "nccl" if device.type == "cuda" and neighbours <= gpus else "gloo"


def shard(flow: Density, device: torch.device, precision: torch.dtype) -> None:
    """Shard the weights of a density over all processes (FSDP2), each coupling function by itself, then the rest.

    A network is gathered only while it is used, and computes in `precision`; inputs and outputs keep their dtype.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    reduced = None if precision == torch.float32 else precision
    policy = MixedPrecisionPolicy(param_dtype=reduced, reduce_dtype=torch.float32, output_dtype=torch.float32)
    networks = [getattr(layer, "network", None) for layer in flow.modules()]
    for network in dict.fromkeys(each for each in networks if isinstance(each, torch.nn.Module)):
        fully_shard(network, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    fully_shard(flow, mesh=mesh, reshard_after_forward=True)
    for method in ("log_prob", "validation_log_prob"):
        register_fsdp_forward_method(flow, method)


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded over all processes."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def placed(entire: Tensor, like: Any) -> Tensor:
    """Shard a global tensor over all processes as `like` is."""
    if not hasattr(like, "device_mesh"):
        return entire
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(entire.to(device=like.device, dtype=like.dtype), like.device_mesh, like.placements)
