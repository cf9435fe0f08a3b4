"""Several projections of one input as one matrix: a larger product, one read of the input, one launch.

The merged matrix takes the place of the single ones: the modules' weights become views of its rows, so
nothing is stored twice and the plain forward still works on them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_ROWS = 128  # rows are filled up to whole tiles: a product with 16,480 columns runs like one with 16,512


@torch.no_grad()
def merge(modules: list[nn.Linear]) -> tuple[Tensor, list[int]]:
    """Stack the weights of `modules` ([n_i, H]) and re-point them; return the matrix [N, H] and each one's
    first row.
    """
    weights: list[Tensor] = [module.weight for module in modules]
    starts = [0, *torch.tensor([len(weight) for weight in weights]).cumsum(0).tolist()]
    rows = math.ceil(starts[-1] / _ROWS) * _ROWS
    merged = weights[0].new_zeros(rows, weights[0].shape[1])
    for module, weight, start in zip(modules, weights, starts):
        merged[start : start + len(weight)] = weight
        module.weight = nn.Parameter(merged[start : start + len(weight)], requires_grad=False)
    return merged, starts[:-1]
