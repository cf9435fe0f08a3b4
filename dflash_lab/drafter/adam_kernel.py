"""AdamW as one Triton kernel a parameter: gradient, master and moments are read once and written once.

28 bytes a parameter cross the memory bus (bf16 gradient and weight, fp32 master and moments) and no temporary
exists; the same update in plain operations moves about four times as much and keeps fp32 copies. Whether the
step happens is read on the device, so nobody waits for the verdict.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _adam(
    grad, weight, master, first, second, scalars, count,
    rate, decay, new1, beta2, new2, eps,  # new: 1 - beta, exact only before it is rounded to fp32
    MASTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    go = tl.load(scalars)
    if go != 0:
        scale, bias1, root2 = tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3)
        where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = where < count
        g = tl.load(grad + where, mask=inside, other=0.0).to(tl.float32) * scale
        m = tl.load(first + where, mask=inside, other=0.0)
        v = tl.load(second + where, mask=inside, other=0.0)
        home = master if MASTER else weight
        w = tl.load(home + where, mask=inside, other=0.0)
        m += new1 * (g - m)
        v = v * beta2 + new2 * g * g
        w = w * (1 - decay) - rate * (m / bias1) / (tl.sqrt(v) / root2 + eps)
        tl.store(first + where, m, mask=inside)
        tl.store(second + where, v, mask=inside)
        if MASTER:
            tl.store(master + where, w, mask=inside)
        tl.store(weight + where, w.to(weight.dtype.element_ty), mask=inside)


def adam(
    grad: Tensor, weight: Tensor, state: dict[str, Tensor], scalars: Tensor, rate: float, decay: float,
    betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    """Move `weight` and its fp32 `state` (exp_avg, exp_avg_sq, perhaps master) in place, all contiguous.

    `scalars` fp32 [4]: whether to move at all, what multiplies the gradient, 1 - beta1^t, sqrt(1 - beta2^t).
    `rate` is the learning rate of the step, `decay` that times the weight decay.
    """
    count = weight.numel()
    if not count:
        return
    master = state.get("master")
    with torch.cuda.device_of(weight):
        _adam[(triton.cdiv(count, _BLOCK),)](
            grad, weight, weight if master is None else master, state["exp_avg"], state["exp_avg_sq"],
            scalars, count, rate, decay, 1 - betas[0], betas[1], 1 - betas[1], eps,
            MASTER=master is not None, BLOCK=_BLOCK,
        )  # fmt: skip
