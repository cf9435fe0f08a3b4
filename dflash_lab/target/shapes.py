"""`random:` targets: the right shape with random weights, for memory and speed work before a 54 GB download.

Weights are made on the device, in the dtype, one module after another, so a 27B target needs its own 54 GB
and no fp32 copy. Each module is seeded by (seed, its name): the same rows come out whatever else is built, so
a head made alone equals the head of the whole target.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from dflash_lab.errors import InputError, UnsupportedTarget, near


def _folder() -> Path:
    """Return params/targets of the checkout, or where an installed wheel puts it."""
    checkout = Path(__file__).resolve().parents[2] / "params" / "targets"
    return (
        checkout
        if checkout.is_dir()
        else Path(sysconfig.get_path("data")) / "share" / "dflash-lab" / "targets"
    )


def shape_names() -> list[str]:
    """Return the names that ``random:<name>`` understands."""
    return sorted(path.stem for path in _folder().glob("*.json"))


def shape_config(shape: str) -> PretrainedConfig:
    """Return the config (wrapper included) of a named shape, a config.json or a folder that holds one."""
    path = _folder() / f"{shape}.json"
    if "/" in shape or "\\" in shape or not path.is_file():
        path = Path(shape).expanduser()
        path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        names = shape_names()
        raise InputError(
            f"random:{shape}: neither a named shape nor a config.json{near(shape, names)}. "
            f"Named shapes: {', '.join(names)}."
        )
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not valid JSON ({error.msg}).") from error
    model_type = fields.pop("model_type", None)
    if model_type is None:
        raise InputError(f"{path}: no model_type in it; a Hugging Face config.json has one.")
    try:
        return AutoConfig.for_model(model_type, **fields)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error


def randomise(model: PreTrainedModel, *, seed: int, device: torch.device, dtype: torch.dtype) -> None:
    """Give a model on the meta device its random weights, in place, as its class initialises them."""
    strict = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, module in model.named_modules():
        _check_buffers(name, module)
        _allocate(module, name, device, dtype, strict)
    for name, module in reversed(list(model.named_modules())):  # a block may set its children's weights again
        _initialise(module, model, seed, name, device)
    empty = [name for name, parameter in model.named_parameters() if bool(parameter.isnan().any())]
    if empty:
        raise UnsupportedTarget(
            f"random: {type(model).__name__} does not initialise {len(empty)} of its parameters, "
            f"first {empty[0]}. Save a checkpoint of it and give the folder as target."
        )


def randomise_alone(
    module: nn.Module,
    name: str,
    model: PreTrainedModel,
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Give one module the weights that it would have as `name` in a whole random model of `model`'s class."""
    _allocate(module, name, device, dtype, ())
    _initialise(module, model, seed, name, device)


def _allocate(
    module: nn.Module, name: str, device: torch.device, dtype: torch.dtype, fp32_names: Collection[str]
) -> None:
    """Put the tensors that `module` itself holds on the device; parameters are NaN until initialised."""
    for key, tensor in list(module.named_parameters(recurse=False)):
        kind = torch.float32 if any(part in f"{name}.{key}" for part in fp32_names) else dtype
        fresh = torch.full(tensor.shape, float("nan"), dtype=kind, device=device)
        setattr(module, key, nn.Parameter(fresh, requires_grad=False))
    for key, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, key, torch.empty_like(buffer, device=device))


def _initialise(
    module: nn.Module, model: PreTrainedModel, seed: int, name: str, device: torch.device
) -> None:
    """Call the class's own initialiser on one module, seeded by (seed, name).

    It draws from the global generators, so their state is put back afterwards.
    """
    devices = list(range(torch.cuda.device_count())) if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1)
        model._init_weights(module)


def _check_buffers(name: str, module: nn.Module) -> None:
    buffers = [key for key, _ in module.named_buffers(recurse=False)]
    if buffers and "RotaryEmbedding" not in type(module).__name__:
        raise UnsupportedTarget(
            f"random: {type(module).__name__} ({name}) computes the buffers {buffers} when it is built, "
            "which a model made on the meta device lacks. Save a checkpoint of it and give its folder."
        )
