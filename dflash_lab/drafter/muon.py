"""Muon's direction: momenta of matrices, orthogonalised by Newton-Schulz, all of one shape together."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


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
