"""Refuse wrong tensors before any work, saying which tensor, what is wrong with it and what is expected."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_lab.drafter.loss.config import LossConfig
from dflash_lab.errors import InputError

_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
_INDEX_DTYPES = (torch.int64, torch.int32)


def plain(weight: Tensor) -> Tensor:
    """Return a sharded (DTensor) parameter as the whole plain tensor, gathered once; any other tensor as it
    is.
    """
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def check_tensors(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor | None,
    weights: Tensor,
    target_hidden: Tensor | None,
    target_rows: Tensor | None,
    target_head: Tensor | None,
    config: LossConfig,
) -> None:
    """Check shapes, dtypes and devices of the arguments of `fused_draft_loss`; values are checked by
    `select_rows`.
    """
    if hidden.ndim != 3:
        raise InputError(f"hidden has shape {_shape(hidden)}: expected [anchors, block, hidden size].")
    if hidden.dtype not in _DTYPES:
        raise InputError(
            f"hidden is {hidden.dtype}: use bfloat16, float32 or float64 (float16 logit gradients underflow)."
        )
    _check_head("head", head, hidden.shape[2], hidden.dtype)
    if head.device != hidden.device:
        raise InputError(f"head is on {head.device} but hidden on {hidden.device}: move one of them.")
    block = hidden.shape[:2]
    _check_index("weights", weights, block, hidden.device, integer=False)
    if labels is not None:
        _check_index("labels", labels, block, hidden.device)
    elif config.label_source == "data":
        raise InputError("labels is missing: give [anchors, block] token ids, or label_source='argmax'.")
    if target_hidden is None:
        if config.needs_target:
            raise InputError(
                "target_hidden is missing: soft_weight, tv_weight, lk_weight, label_source='argmax' and "
                "acceptance='overlap' need "
                "the target's hidden states after its final norm, [rows, hidden size], and target_rows."
            )
        if target_rows is not None or target_head is not None:
            raise InputError("target_rows or target_head was given without target_hidden.")
        return
    if target_rows is None:
        raise InputError(
            "target_rows is missing: give the row of target_hidden that predicts each slot, [anchors, block]."
        )
    _check_index("target_rows", target_rows, block, hidden.device)
    if target_hidden.ndim != 2:
        raise InputError(f"target_hidden has shape {_shape(target_hidden)}: expected [rows, hidden size].")
    if target_hidden.requires_grad:
        raise InputError(
            "target_hidden requires grad: the target is not trained here; pass target_hidden.detach()."
        )
    side = head if target_head is None else target_head
    if target_head is not None:
        _check_head("target_head", target_head, target_hidden.shape[1], target_hidden.dtype)
        if target_head.shape[0] != head.shape[0]:
            raise InputError(
                f"target_head has {target_head.shape[0]} rows but head {head.shape[0]}: "
                "both sides need the same vocabulary."
            )
    if target_hidden.shape[1] != side.shape[1]:
        raise InputError(
            f"target_hidden has hidden size {target_hidden.shape[1]} but its head {side.shape[1]}."
        )
    if target_hidden.dtype != side.dtype or target_hidden.device != side.device:
        raise InputError(
            f"target_hidden is {target_hidden.dtype} on {target_hidden.device} but its head "
            f"{side.dtype} on {side.device}: give both the same dtype and device (both may lie on a second "
            "device, with target_head)."
        )


def _check_head(name: str, head: Tensor, hidden_size: int, dtype: torch.dtype) -> None:
    if head.ndim != 2 or head.shape[1] != hidden_size or head.shape[0] == 0:
        raise InputError(f"{name} has shape {_shape(head)}: expected [vocabulary, {hidden_size}].")
    if head.dtype != dtype:
        raise InputError(
            f"{name} is {head.dtype} but the hidden states {dtype}: cast one of them once, outside the step."
        )
    if head.requires_grad:
        raise InputError(
            f"{name} requires grad, but this loss never computes the head's gradient: "
            f"call {name}.requires_grad_(False)."
        )


def _check_index(
    name: str, value: Tensor, block: torch.Size, device: torch.device, *, integer: bool = True
) -> None:
    if value.shape != block:
        raise InputError(
            f"{name} has shape {_shape(value)}: expected [anchors, block] = {list(block)}, as hidden."
        )
    if value.device != device and value.device.type != "cpu":
        raise InputError(f"{name} is on {value.device}: put it on the CPU or on {device}.")
    if integer and value.dtype not in _INDEX_DTYPES:
        raise InputError(f"{name} is {value.dtype}: expected int64 or int32.")
    if not integer and not value.dtype.is_floating_point:
        raise InputError(f"{name} is {value.dtype}: expected a floating dtype.")


def _shape(value: Tensor) -> list[int]:
    return list(value.shape)
