"""AdamW and Muon with fp32 master weights, one parameter at a time.

A bf16 parameter cannot take a step of 1e-4 of itself (it has 8 bits), so each keeps an fp32 master that the
update moves and the parameter is rounded from. Gradients stay in the parameter's type: 2 (weight) + 2
(gradient) + 4 (master) + 8 (moments) = 16 bytes a parameter; moments in int8 make it 10, offloading leaves
4 of them on the device. Walking parameter by parameter bounds temporaries by the largest one.

Muon orthogonalises the momentum of matrices inside layers (Newton-Schulz) and gives it the size of an AdamW
step; `fc`, norms and DFlash 2's codebooks and base kernels always take AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dflash_lab.drafter.anchors import stream_seed
from dflash_lab.drafter.moments import decode, encode
from dflash_lab.errors import InputError


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Peak rates and constants. `kind` is `adamw` for everything or `muon` for the layers' matrices."""

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
    """Holds masters and moments by parameter name; `step` reads `.grad` and never changes it."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> None:
        self.config = config
        self.parameters = dict(named)
        self.steps = 0
        self.state: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self.parameters.items():
            if config.moments == "int8" and isinstance(parameter, DTensor):
                raise InputError("moments = 'int8' works on whole tensors: use 'fp32', or parallel: ddp.")
            kinds = ("momentum",) if self.takes_muon(name) else ("exp_avg", "exp_avg_sq")
            state = {kind: torch.zeros_like(parameter, dtype=torch.float32) for kind in kinds}
            if parameter.dtype != torch.float32:
                state["master"] = parameter.detach().float().clone()
            self._keep(name, state)

    def takes_muon(self, name: str) -> bool:
        """Whether parameter `name` is a matrix that Muon updates."""
        inside = name.startswith("layers.") and not name.endswith("base_kernel")
        return self.config.kind == "muon" and inside and self.parameters[name].ndim == 2

    @torch.no_grad()
    def step(self, factor: float, grad_scale: Tensor | float = 1.0) -> None:
        """Move every parameter; `factor` multiplies the peak rates, `grad_scale` the gradients (clipping,
        1/D).
        """
        self.steps += 1
        config = self.config
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            state = self._fetch(name)
            master = state.get("master", parameter.data)
            grad = parameter.grad.float() * grad_scale
            if self.takes_muon(name):
                master.mul_(1 - factor * config.muon_lr * config.muon_weight_decay)
                update = muon_direction(grad, state["momentum"], config.muon_momentum)
                master.add_(update, alpha=-factor * config.muon_lr)
            else:
                master.mul_(1 - factor * config.lr * config.weight_decay)
                update = adam_direction(grad, state, self.steps, config)
                master.add_(update, alpha=-factor * config.lr)
            if "master" in state:
                parameter.copy_(master)
            self._keep(name, state)

    def _fetch(self, name: str) -> dict[str, Tensor]:
        """A parameter's state as fp32 tensors on its device."""
        device = self.parameters[name].device
        state = {kind: tensor.to(device, non_blocking=True) for kind, tensor in self.state[name].items()}
        for kind in ("exp_avg", "exp_avg_sq"):
            if f"{kind}_scale" in state:
                state[kind] = decode(state[kind], state.pop(f"{kind}_scale"))
        return state

    def _keep(self, name: str, state: dict[str, Tensor]) -> None:
        """Store a parameter's state as the configuration says."""
        kept = dict(state)
        if self.config.moments == "int8" and "exp_avg" in state:
            device = self.parameters[name].device
            generator = torch.Generator(device)
            generator.manual_seed(stream_seed("moments", self.steps, name))
            for kind in ("exp_avg", "exp_avg_sq"):
                kept[kind], kept[f"{kind}_scale"] = encode(state[kind], generator, signed=kind == "exp_avg")
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
        if self.config.offload and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # copies into these very tensors may be under way
        return {f"{kind}.{name}": t for name, state in self.state.items() for kind, t in state.items()}

    def load(self, tensors: dict[str, Tensor], steps: int) -> None:
        """Put back what `tensors()` gave; `InputError` if the setup differs."""
        mine = self.tensors()
        if set(mine) != set(tensors):
            odd = sorted(set(mine) ^ set(tensors))
            raise InputError(f"optimizer state does not fit this drafter and optimizer: {odd[:3]} ...")
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])
        self.steps = steps


def adam_direction(grad: Tensor, state: dict[str, Tensor], step: int, config: OptimizerConfig) -> Tensor:
    """Bias-corrected m / (sqrt(v) + eps); updates the moments in place."""
    beta1, beta2 = config.betas
    first, second = state["exp_avg"], state["exp_avg_sq"]
    first.lerp_(grad, 1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    scale = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(config.eps)
    return first.div(1 - beta1**step).div_(scale)


def muon_direction(grad: Tensor, momentum: Tensor, beta: float) -> Tensor:
    """Orthogonalised Nesterov momentum, scaled so that its rms is about 0.2 as AdamW's is (0.2 sqrt(max(m,
    n))).
    """
    momentum.lerp_(grad, 1 - beta)
    ahead = grad.lerp(momentum, beta)
    scale = 0.2 * math.sqrt(max(grad.shape))
    if isinstance(ahead, DTensor):  # a shard cannot be orthogonalised alone
        update = orthogonalized(ahead.full_tensor())
        return distribute_tensor(update * scale, ahead.device_mesh, ahead.placements)
    return orthogonalized(ahead) * scale


def orthogonalized(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Approximate U V^T of `matrix` [m, n] by quintic Newton-Schulz steps (coefficients of K. Jordan's
    Muon).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if tall else x).to(matrix.dtype)
