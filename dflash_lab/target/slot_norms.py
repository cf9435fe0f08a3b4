"""A target's RMS norms in two kernels instead of eight, while it generates in slots.

Transformers writes Llama's norm in plain operations: to float32, square, mean, add, root, multiply, back,
times the weight. `F.rms_norm` without a weight is all but the last as one kernel, with the one rounding at
the same place; only the order in which the squares are summed is the kernel's own. A norm is replaced if its
forward is Llama's, instruction by instruction, as in most families. Those that multiply by (1 + w) or round
elsewhere stay as they are, and so do those of float32 models, which are run for their exact numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm


@contextlib.contextmanager
def few_kernels(body: nn.Module) -> Iterator[int]:
    """Replace the norms of `body` meanwhile; how many there are."""
    norms = [module for module in body.modules() if _is_llamas(module)]
    for norm in norms:
        norm.forward = partial(_normed, norm)
    try:
        yield len(norms)
    finally:
        for norm in norms:
            del norm.forward


def _is_llamas(module: Any) -> bool:
    if "forward" in vars(module) or getattr(module, "weight", None) is None:  # wrapped by somebody else
        return False
    code, theirs = (getattr(kind.forward, "__code__", None) for kind in (type(module), LlamaRMSNorm))
    if code is None or theirs is None:
        return False
    same = all(getattr(code, part) == getattr(theirs, part) for part in ("co_code", "co_names", "co_consts"))
    return same and module.weight.dtype in (torch.bfloat16, torch.float16)  # of others it may be no tensor


def _normed(norm: Any, hidden: Tensor) -> Tensor:
    return norm.weight * F.rms_norm(hidden, hidden.shape[-1:], eps=norm.variance_epsilon)
