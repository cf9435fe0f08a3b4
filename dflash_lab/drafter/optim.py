"""Optimizers of the drafter: AdamW and Muon with float32 masters, 8-bit moments, offload."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dflash_lab.drafter.rows import stream_seed
from dflash_lab.errors import InputError

logger = logging.getLogger(__name__)

MUON_ELEMENTS = 1 << 26  # of the matrices that are orthogonalised at once
SMALL = 1 << 14  # elements of a parameter that does not deserve kernels of its own: norms


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Peak rates and constants. `kind` is `adamw` for everything, or `muon` for the matrices inside layers;
    `fc`, norms and DFlash 2's codebooks and base kernels always take AdamW.
    """

    kind: str = "adamw"
    lr: float = 6e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    muon_lr: float = 1e-3
    muon_momentum: float = 0.95
    muon_weight_decay: float = 0.1
    moments: str = "fp32"  # or "int8": Adam's two moments in a byte each
    offload: bool = False  # masters and moments in host memory, brought to the device one parameter at a time

    def __post_init__(self) -> None:
        if self.moments not in ("fp32", "int8"):
            raise InputError(f"moments = {self.moments!r}: choose 'fp32' or 'int8'.")
        if self.kind not in ("adamw", "muon"):
            raise InputError(f"optimizer = {self.kind!r}: choose 'adamw' or 'muon'.")


class Optimizer:
    """Holds masters and moments by parameter name; `step` reads `.grad` and never changes it. Offloaded
    `state` is being copied for a while after a step: `tensors` waits for it.

    A bf16 parameter cannot take a step of 1e-4 of itself (it has 8 bits), so each keeps an fp32 master that
    the update moves and the parameter is rounded from. Gradients stay in the parameter's type: 2 (weight) + 2
    (gradient) + 4 (master) + 8 (moments) = 16 bytes a parameter; moments in int8 make it 10, offloading
    leaves 4 of them on the device. On CUDA a parameter's AdamW update is one kernel without temporaries;
    elsewhere, walking parameter by parameter bounds them by the largest one.

    torch.optim.Muon does not serve here: it orthogonalises in bf16 everywhere (on a CPU its steps differ from
    these by 1 %), matrix by matrix, without masters, sharded tensors, or a flag on the device.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> None:
        self.config = config
        self.parameters = dict(named)
        self.device = next(iter(self.parameters.values())).device
        self._steps = torch.zeros((), dtype=torch.float64, device=self.device)
        self.state: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self.parameters.items():
            if config.moments == "int8" and isinstance(parameter, DTensor):
                raise InputError("moments = 'int8' works on whole tensors: use 'fp32', or parallel: ddp.")
            kinds = ("momentum",) if self.takes_muon(name) else ("exp_avg", "exp_avg_sq")
            state = {kind: torch.zeros_like(parameter, dtype=torch.float32) for kind in kinds}
            if parameter.dtype != torch.float32:
                state["master"] = parameter.detach().float().clone()
            self._keep(name, state)

    @property
    def steps(self) -> int:
        """Steps made; waits for the device."""
        return int(self._steps)

    def takes_muon(self, name: str) -> bool:
        """Whether parameter `name` is a matrix that Muon updates."""
        inside = name.startswith("layers.") and not name.endswith("base_kernel")
        return self.config.kind == "muon" and inside and self.parameters[name].ndim == 2

    @torch.no_grad()
    def step(self, factor: float, grad_scale: Tensor | float = 1.0, go: Tensor | bool = True) -> None:
        """Move every parameter that has a gradient; `factor` multiplies the peak rates, `grad_scale` the
        gradients (clipping, 1/D).

        With `go` false nothing changes, whatever the gradients hold. A flag on CUDA is not waited for, unless
        moments are rounded at random or come from the host.
        """
        config = self.config
        waits = config.offload or config.moments == "int8" or self.device.type != "cuda"
        if waits and isinstance(go, Tensor):
            go = bool(go)
        if go is False:
            return
        self._steps += go
        beta1, beta2 = config.betas
        count = self._steps.clamp_min(1)  # a first step that is called off divides by nothing
        values = (go, grad_scale, 1 - beta1**count, (1 - beta2**count).sqrt())
        scalars = torch.stack([_scalar(value, self.device) for value in values])  # see `kernels.adam`
        alike: dict[tuple[int, ...], list[str]] = {}
        small: dict[torch.dtype, list[str]] = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            if self.takes_muon(name):
                alike.setdefault(tuple(sorted(parameter.shape)), []).append(name)
                continue
            if parameter.numel() <= SMALL:
                small.setdefault(parameter.dtype, []).append(name)
                continue
            self._adam([name], factor, scalars)
        for names in small.values():
            self._adam(names, factor, scalars)
        for shape, names in alike.items():
            most = max(1, MUON_ELEMENTS // math.prod(shape))
            for start in range(0, len(names), most):
                self._muon(names[start : start + most], factor, scalars)

    def _adam(self, names: list[str], factor: float, scalars: Tensor) -> None:
        """Move parameters of one type by one kernel, laid side by side for it if they are several."""
        config, states = self.config, [self._fetch(name) for name in names]
        homes = [
            {kind: _local(tensor) for kind, tensor in {"weight": self.parameters[name].data, **state}.items()}
            for name, state in zip(names, states, strict=True)
        ]
        grad, *others = (_local(self.parameters[name].grad) for name in names)
        tensors = homes[0]
        if others:
            grad = torch.cat([grad.flatten(), *(other.flatten() for other in others)])
            tensors = {kind: torch.cat([home[kind].flatten() for home in homes]) for kind in tensors}
        rate = factor * config.lr
        update = (_adam_kernel() if grad.is_cuda else None) or adam_update
        decay = rate * config.weight_decay
        update(grad, tensors["weight"], tensors, scalars, rate, decay, config.betas, config.eps)
        for kind, moved in tensors.items() if others else ():
            parts = moved.split([home[kind].numel() for home in homes])
            back = [part.view_as(home[kind]) for part, home in zip(parts, homes, strict=True)]
            torch._foreach_copy_([home[kind] for home in homes], back)
        for name, state in zip(names, states, strict=True):
            self._keep(name, state)

    def _muon(self, names: list[str], factor: float, scalars: Tensor) -> None:
        """Move matrices of one shape, some of them transposed: one kernel a step of the rule for all."""
        config, states = self.config, [self._fetch(name) for name in names]
        go, scale = scalars[0], scalars[1]
        parameters = [_local(self.parameters[name].data) for name in names]
        momenta = [_local(state["momentum"]) for state in states]
        sizes = [momentum.numel() for momentum in momenta]
        flat = momenta[0].new_empty(sum(sizes))
        grads = [part.view_as(m) for part, m in zip(flat.split(sizes), momenta, strict=True)]
        torch._foreach_copy_(grads, [_local(self.parameters[name].grad) for name in names])
        flat.mul_(scale).masked_fill_(go <= 0, 0)
        pull = ((1 - config.muon_momentum) * go).expand(max(sizes)).contiguous()  # a tensor as `go` is one
        torch._foreach_lerp_(momenta, grads, [pull[: m.numel()].view_as(m) for m in momenta])
        torch._foreach_lerp_(grads, momenta, config.muon_momentum)
        ahead = [_like(grad, state["momentum"]) for grad, state in zip(grads, states, strict=True)]
        updates = [_local(update) for update in muon_updates(ahead)]
        rate = factor * config.muon_lr
        masters = [_local(state["master"]) for state in states if "master" in state]
        moved = masters or parameters
        torch._foreach_mul_(moved, 1 - go * (rate * config.muon_weight_decay))
        torch._foreach_mul_(updates, go * rate)
        torch._foreach_sub_(moved, updates)
        if masters:
            torch._foreach_copy_(parameters, masters)
        for name, state in zip(names, states, strict=True):
            self._keep(name, state)

    def _fetch(self, name: str) -> dict[str, Tensor]:
        """A parameter's state as fp32 tensors on its device."""
        device = self.parameters[name].device
        state = {kind: tensor.to(device, non_blocking=True) for kind, tensor in self.state[name].items()}
        for kind in ("exp_avg", "exp_avg_sq"):
            if f"{kind}_scale" in state:
                state[kind] = decode_moment(state[kind], state.pop(f"{kind}_scale"))
        return state

    def _keep(self, name: str, state: dict[str, Tensor]) -> None:
        """Store a parameter's state as the configuration says."""
        kept = dict(state)
        if self.config.moments == "int8" and "exp_avg" in state:
            generator = torch.Generator(self.parameters[name].device)
            generator.manual_seed(stream_seed("moments", self.steps, name))
            for kind in ("exp_avg", "exp_avg_sq"):
                kept[kind], kept[f"{kind}_scale"] = encode_moment(
                    state[kind], generator, signed=kind == "exp_avg"
                )
        if self.config.offload:
            for kind, tensor in kept.items():
                home = self.state.get(name, {}).get(kind)
                if home is None:
                    home = torch.empty_like(tensor, device="cpu")
                    home = home.pin_memory() if tensor.is_cuda else home
                kept[kind] = home.copy_(tensor, non_blocking=True)
        self.state[name] = kept

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """All state as flat tensors, `<kind>.<parameter>`."""
        if self.config.offload and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # copies into these very tensors may be under way
        return {f"{kind}.{name}": t for name, state in self.state.items() for kind, t in state.items()}

    def load(self, tensors: dict[str, Tensor], steps: int) -> None:
        """Put back what `tensors()` gave; `InputError` if the setup differs."""
        mine = self.tensors()
        if set(mine) != set(tensors):
            odd = sorted(set(mine) ^ set(tensors))
            raise InputError(f"optimizer state does not fit this drafter and optimizer: {odd[:3]} ...")
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])
        self._steps.fill_(steps)


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    """fp32 scalar on `device`; a number needs no wait, a full tensor is filled there."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32)
    return torch.full((), float(value), device=device)


def _local(tensor: Tensor | None) -> Tensor:
    """This process's share of a tensor, or the tensor."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(local: Tensor, sharded: Tensor) -> Tensor:
    """A local share as part of a tensor laid out like `sharded`."""
    if not isinstance(sharded, DTensor):
        return local
    return DTensor.from_local(
        local, sharded.device_mesh, sharded.placements, shape=sharded.shape, stride=sharded.stride()
    )


def adam_update(
    grad: Tensor, weight: Tensor, state: dict[str, Tensor], scalars: Tensor, rate: float, decay: float,
    betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    """What `kernels.adam` does, in plain operations: the reference, and the path of CPUs."""
    go, scale, bias1, root2 = scalars.unbind()
    beta1, beta2 = betas
    first, second, master = state["exp_avg"], state["exp_avg_sq"], state.get("master", weight)
    grad = torch.where(go > 0, grad.float() * scale, 0)
    first.lerp_(grad, (1 - beta1) * go)
    second.lerp_(grad.square_(), (1 - beta2) * go)
    denominator = second.sqrt().div_(root2).add_(eps)
    master.mul_(1 - go * decay)
    master.sub_(first.div(bias1).div_(denominator).mul_(go * rate))
    if master is not weight:
        weight.copy_(master)


@cache
def _adam_kernel() -> Any:
    """The CUDA kernel, None without Triton."""
    if importlib.util.find_spec("triton") is None:
        logger.warning(
            "Triton is not installed: each update takes some fifteen passes over its memory, not one"
        )
        return None
    from dflash_lab.drafter.kernels import adam

    return adam


def muon_updates(matrices: list[Tensor]) -> list[Tensor]:
    """Orthogonalised matrices (of one shape or its transpose), their rms about 0.2 as an AdamW step's is:
    times 0.2 sqrt(max(m, n)).
    """
    whole = [m.full_tensor() if isinstance(m, DTensor) else m for m in matrices]  # a shard has no own answer
    tall = [m.shape[0] > m.shape[1] for m in whole]
    order = sorted(range(len(whole)), key=tall.__getitem__)
    wide = torch.stack([whole[i].T if tall[i] else whole[i] for i in order])
    found = orthogonalized(wide) * (0.2 * math.sqrt(wide.shape[-1]))
    split = len(tall) - sum(tall)
    # turned back all at once, and into the layout of their matrices, or each would take kernels of its own
    parts = [*found[:split].unbind(), *found[split:].mT.contiguous().unbind()]
    updates = [part for _, part in sorted(zip(order, parts, strict=True), key=lambda pair: pair[0])]
    return [
        distribute_tensor(update, like.device_mesh, like.placements) if isinstance(like, DTensor) else update
        for update, like in zip(updates, matrices, strict=True)
    ]


def orthogonalized(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Approximate U V^T of each of `matrices` [n, rows, columns], rows <= columns, by quintic Newton-Schulz
    steps (coefficients of K. Jordan's Muon).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.to(torch.float32 if matrices.device.type == "cpu" else torch.bfloat16)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)


# ---- Adam's moments in one byte each

BLOCK = 256  # numbers that share a scale
LEVELS = 8  # codes an octave


def encode_moment(values: Tensor, generator: torch.Generator, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of fp32 `values` (any shape), a scale for every BLOCK of numbers: int8 with 7
    bits of magnitude (16 octaves below the largest of its block) when `signed`, else uint8 with 8 (32
    octaves). Smaller numbers become 0 if signed, else the least code, so that a second moment is never 0
    unless its whole block is.

    A moment moves by a thousandth of itself a step, far less than a code's width (9 %): rounded to the
    nearest it would stand still. Rounded at random, with the odds that keep the mean, it moves on average.
    Codes are logarithmic because a moment that rounds to zero while its partner does not would make a huge
    step.
    """
    top = 127 if signed else 255
    flat = values.flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    share = blocks.abs() / scales.clamp_min(torch.finfo(torch.float32).tiny)  # 0..1
    exponent = torch.floor(torch.log2(share.clamp_min(2.0**-40)) * LEVELS)
    low, high = torch.exp2(exponent / LEVELS), torch.exp2((exponent + 1) / LEVELS)
    draw = torch.rand(share.shape, generator=generator, device=share.device)
    codes = exponent + (draw < (share - low) / (high - low)) + top
    codes = torch.where(codes < 1, 0 if signed else 1, codes.clamp(max=top))
    codes = codes * blocks.sign() if signed else codes
    packed = codes.to(torch.int8 if signed else torch.uint8).flatten()[: len(flat)]
    return packed.view(values.shape), scales[:, 0]


def decode_moment(codes: Tensor, scales: Tensor) -> Tensor:
    """The fp32 numbers of `encode_moment`'s codes and scales."""
    signed = codes.dtype == torch.int8
    flat = codes.flatten().float()
    size = torch.exp2((flat.abs() - (127 if signed else 255)) / LEVELS)
    value = torch.where(flat == 0, 0.0, size * flat.sign())
    blocks = torch.nn.functional.pad(value, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    return (blocks * scales[:, None]).flatten()[: len(flat)].view(codes.shape)
