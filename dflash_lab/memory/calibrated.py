"""Predictions of any setup, corrected by what was measured, and when a calibration may be used.

A calibration speaks for the layers that were measured: another target, device, dtype, kernel or version of
torch may hold something else, and then the formulas are left as they are. Fields that only add tensors whose
size is known (captured layers, batches in flight, rows ahead) may differ: the formulas count those exactly.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from dflash_lab.errors import LabError
from dflash_lab.memory.account import Account
from dflash_lab.memory.extraction_account import extraction_account
from dflash_lab.memory.fit import Calibration
from dflash_lab.memory.setups import ExtractionSetup, TrainingSetup
from dflash_lab.memory.shapes import TargetShape
from dflash_lab.memory.training_account import training_account


def extraction_prediction(
    shape: TargetShape, setup: ExtractionSetup, *, cuda: bool = True, calibration: Calibration | None = None
) -> Account:
    """Return the account of an extraction batch, calibrated where there is a calibration."""
    account = extraction_account(shape, setup, cuda=cuda)
    if calibration is None:
        return account
    measured = calibration.measured(setup)
    base = account if measured == setup else extraction_account(shape, measured, cuda=cuda)
    return calibration.account(account, setup, base)


def training_prediction(
    shape: TargetShape,
    drafter: Any,
    setup: TrainingSetup,
    *,
    cuda: bool = True,
    calibration: Calibration | None = None,
) -> Account:
    """Return the account of a training step, calibrated where there is a calibration."""
    account = training_account(shape, drafter, setup, cuda=cuda)
    if calibration is None:
        return account
    measured = calibration.measured(setup)
    base = account if measured == setup else training_account(shape, drafter, measured, cuda=cuda)
    return calibration.account(account, setup, base)


def extraction_scope(shape: TargetShape, setup: ExtractionSetup, device: str) -> dict[str, str]:
    """Say what a measurement of extraction holds for; `device` is its name (`device_name`)."""
    layers = f"{'fused' if setup.fused else 'plain'} layers, {setup.kernels} kernels"
    return {**_common(shape, setup.dtype, device), "layers": layers, "capture": setup.capture}


def training_scope(shape: TargetShape, drafter: Any, setup: TrainingSetup, device: str) -> dict[str, str]:
    """Say what a measurement of training steps holds for."""
    layers = f"{'compiled' if setup.compiled else 'plain'} layers, checkpointing {setup.checkpointing}"
    heads = f"{drafter.num_heads} / {drafter.num_kv_heads} heads of {drafter.head_dim}"
    form = f"{drafter.num_layers} layers, {heads}, feed-forward {drafter.intermediate_size}"
    form += ", convolutions and selector" if drafter.conv_kernel_size or drafter.selector_rank else ""
    ways = {"layers": layers, "loss": setup.loss, "optimizer": setup.optimizer, "drafter": form}
    return {**_common(shape, setup.dtype, device), **ways}


def device_name(device: Any) -> str:
    """Return the name of a device as its maker writes it, or ``cpu``."""
    import torch

    device = torch.device(device)
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type


@dataclass(frozen=True)
class Basis:
    """What a prediction rests on, in words, and the calibration if there is one that holds."""

    words: str
    calibration: Calibration | None = None


def find_calibration(path: Path, scope: Mapping[str, str]) -> Basis:
    """Return the calibration in `path` if it was measured for `scope`, or why the formulas stand alone."""
    try:
        found = Calibration.load(path)
    except LabError as error:
        return Basis(f"formulas alone: {error}")
    where = path.name
    odd = [name for name in {**scope, **found.scope} if scope.get(name) != found.scope.get(name)]
    if not odd:
        return Basis(f"{found.words} ({where})", found)
    told = "; ".join(f"{name} {found.scope.get(name)}, here {scope.get(name)}" for name in odd)
    return Basis(f"formulas alone: {where} was measured for another {', '.join(odd)} ({told})")


def _common(shape: TargetShape, dtype: str, device: str) -> dict[str, str]:
    digest = xxhash.xxh3_64(repr(shape).encode()).hexdigest()[:8]
    return {
        "target": f"{shape.model_type}, {shape.layers} layers of {shape.hidden} ({digest})",
        "dtype": dtype,
        "device": device,
        "torch": importlib.metadata.version("torch"),
    }
