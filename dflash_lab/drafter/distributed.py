"""One process, or many under torchrun: what the loop needs of the others, and the drafter's wrappers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from dflash_lab.drafter.model import Drafter
from dflash_lab.drafter.optim import Optimizer
from dflash_lab.errors import InputError


class Single:
    """A run in one process, and what one of many does as well.

    Every process packs its own rows of the global batch and counts its own loss; the denominator is summed
    over all of them, and gradients, which the wrappers average, are scaled so that they equal those of one
    process on the whole batch. Checkpoints hold whole tensors, so any kind of run reads any other's.
    """

    rank = 0
    world = 1
    plan_group: dist.ProcessGroup | None = None  # processes that must use the same loss chunks

    def wrap(self, drafter: Drafter) -> nn.Module:
        """What the loop calls instead of the drafter."""
        return drafter

    def exchange(self, model: nn.Module, wanted: bool) -> None:
        """Told before each row of a step: only the last one's backward needs to exchange gradients."""

    def total(self, value: Tensor) -> Tensor:
        """Sum of `value` over all processes."""
        return value

    def longest(self, seconds: float) -> float:
        """The largest of all processes' times, so that they agree when time is up."""
        return seconds

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Full tensors, of sharded ones copies in the first process's host memory and none elsewhere."""
        return tensors

    def replica(self, drafter: Drafter) -> Drafter:
        """A drafter with whole weights in the first process, for measures that look inside it."""
        return drafter

    def load(self, drafter: Drafter, weights: dict[str, Tensor]) -> None:
        """Put whole `weights` into the (possibly sharded) drafter."""
        drafter.load_state_dict(weights)

    def load_optimizer(self, optimizer: Optimizer, tensors: dict[str, Tensor], steps: int) -> None:
        """Put whole state tensors into the (possibly sharded) optimizer."""
        optimizer.load(tensors, steps)

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Norm of all gradients together."""
        return total_norm([p.grad for p in parameters if p.grad is not None])

    def barrier(self) -> None:
        """Wait for the other processes."""


class Replicated(Single):
    """Data parallel: the whole drafter in each process, gradients averaged by DDP."""

    def __init__(self) -> None:
        self.rank, self.world, self.plan_group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD

    def wrap(self, drafter: Drafter) -> nn.Module:
        device = drafter.fc.weight.device
        # Layers are compiled one by one, so gradients already leave in between; splitting their graphs
        # further, as the compiler would, cannot be done with attention in them.
        torch._dynamo.config.optimize_ddp = False
        return DistributedDataParallel(
            drafter,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # else every gradient exists twice
        )

    def exchange(self, model: nn.Module, wanted: bool) -> None:
        model.require_backward_grad_sync = wanted  # type: ignore[assignment]

    def total(self, value: Tensor) -> Tensor:
        # NCCL moves tensors of each process's own GPU; a frozen head, and its sums, may live on another.
        summed = value.to(_own_device(value), copy=True)
        dist.all_reduce(summed)
        return summed.to(value.device)

    def longest(self, seconds: float) -> float:
        value = torch.tensor(seconds, dtype=torch.float64)
        value = value.to(_own_device(value))
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)

    def barrier(self) -> None:
        # Untold, NCCL takes the GPU of the rank's number, which with `drafters: [5, 7]` is not ours.
        dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)


class Sharded(Replicated):
    """FSDP2: every process holds a share of each tensor and gathers a layer when it is used."""

    def wrap(self, drafter: Drafter) -> nn.Module:
        for layer in drafter.layers:
            fully_shard(layer)
        fully_shard(drafter)
        return drafter

    def exchange(self, model: Any, wanted: bool) -> None:
        model.set_requires_gradient_sync(wanted)

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {}
        for name, tensor in tensors.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.rank == 0:
                kept[name] = full.cpu()
            del full  # before the next one is gathered
        return kept

    def replica(self, drafter: Drafter) -> Drafter:
        weights = self.whole(drafter.state_dict())
        with torch.device("meta"):
            copied = Drafter(drafter.config)
        if self.rank == 0:
            copied.load_state_dict(weights, assign=True)
            copied.to(drafter.fc.weight.device)
        return copied.eval()

    def load(self, drafter: Drafter, weights: dict[str, Tensor]) -> None:
        for name, parameter in drafter.state_dict().items():
            parameter.copy_(_shared(weights[name], parameter))

    def load_optimizer(self, optimizer: Optimizer, tensors: dict[str, Tensor], steps: int) -> None:
        like = optimizer.tensors()
        shared = {name: _shared(value, like[name]) for name, value in tensors.items() if name in like}
        optimizer.load({**tensors, **shared}, steps)

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        grads = [p.grad for p in parameters if p.grad is not None]
        share = total_norm([g.to_local() if isinstance(g, DTensor) else g for g in grads])
        return self.total(share.square()).sqrt()


def total_norm(grads: list[Tensor]) -> Tensor:
    """Norm of all tensors together, summed in fp32 whatever their type; waits for nothing."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)))


def _own_device(value: Tensor) -> torch.device:
    """Where the group can sum `value`: on this process's own GPU, its current one, under NCCL."""
    return torch.device("cuda") if dist.get_backend() == "nccl" else value.device


def _shared(whole: Tensor, like: Tensor) -> Tensor:
    """This process's share of a whole tensor, laid out as `like`."""
    if not isinstance(like, DTensor):
        return whole
    local = whole.to(like.device, like.dtype)
    return distribute_tensor(local, like.device_mesh, like.placements)


MODES = {"ddp": Replicated, "fsdp": Sharded}


def join(mode: str, device: torch.device | str) -> tuple[Single, torch.device]:
    """Join the processes torchrun started, if it did: the group of `mode` (ddp | fsdp), and this one's
    device.
    """
    device = torch.device(device)
    if "WORLD_SIZE" not in os.environ:
        return Single(), device
    if mode not in MODES:
        raise InputError(f"parallel = {mode!r}: choose 'ddp' or 'fsdp'.")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return MODES[mode](), device
