"""The two matmuls of the loss: hidden states to logits in float32, and the logit gradient back to hidden
states.

Logits leave the matmul in float32 (float64 for float64): logits rounded to bfloat16 flip 2 % of the argmaxes
and, near convergence, make the KL's gradient 40 % wrong. On CUDA the matmul unit writes its float32
accumulator directly; elsewhere bfloat16 operands are widened a strip of the vocabulary at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WIDEN_ROWS = 8192
_ALIGN = 32


def logit_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of logits, statistics and sums for hidden states of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def logit_buffer(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, vocab] uninitialised, its rows padded on CUDA so that every row starts on 64 bytes, as fast
    loads need.
    """
    pitch = -(-vocab // _ALIGN) * _ALIGN if device.type == "cuda" else vocab
    return torch.empty(rows, pitch, dtype=dtype, device=device)[:, :vocab]


def project(states: Tensor, head: Tensor, out: Tensor, *, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
    """Write the logits of `states` [n, H] under `head` [V, H] into `out` [n, V] and return it."""
    if states.dtype == out.dtype:
        torch.mm(states, head.t(), out=out)
    elif states.device.type == "cuda":
        torch.mm(states, head.t(), out_dtype=out.dtype, out=out)
    else:
        wide = states.to(out.dtype)
        for start in range(0, head.shape[0], _WIDEN_ROWS):
            strip = head[start : start + _WIDEN_ROWS].to(out.dtype)
            out[:, start : start + _WIDEN_ROWS] = wide @ strip.t()
    if scale != 1.0:
        out.mul_(scale)
    if softcap:
        out.div_(softcap).tanh_().mul_(softcap)
    return out


def project_back(grad: Tensor, head: Tensor, out: Tensor) -> Tensor:
    """Write the gradient of the hidden states, `grad` [n, V] @ `head` [V, H], into `out` [n, H] and return
    it.
    """
    if grad.dtype == out.dtype:
        return torch.mm(grad, head, out=out)
    if grad.device.type == "cuda":
        return torch.mm(grad, head, out_dtype=out.dtype, out=out)
    out.zero_()
    for start in range(0, head.shape[0], _WIDEN_ROWS):
        strip = head[start : start + _WIDEN_ROWS].to(out.dtype)
        out += grad[:, start : start + _WIDEN_ROWS].to(out.dtype) @ strip
    return out
