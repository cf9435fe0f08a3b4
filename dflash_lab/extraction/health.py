"""Is a captured state one that a model computes? NaN, infinite, all-zero and constant rows are kept out of
the store.

Checked on the device in one pass over the rows, so that only a byte a sample and state travels to the host.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dflash_lab.extraction.layout import Layout

# By rank: the worst finding among a sample's rows is kept.
FINDINGS = ("sound", "constant", "all zero", "infinite", "NaN")


def check_rows(states: Tensor, owner: Tensor, samples: int) -> Tensor:
    """Return the worst finding a sample, uint8 [samples] (index into FINDINGS).

    `states` [T, H] are the rows of one tap, `owner` [T] int64 says which sample a row belongs to.
    """
    low, high = torch.aminmax(states, dim=-1)  # NaN propagates
    found = (low == high).to(torch.uint8)
    found.masked_fill_((low == 0) & (high == 0), 2)
    found.masked_fill_(low.isinf() | high.isinf(), 3)
    found.masked_fill_(low.isnan() | high.isnan(), 4)
    return torch.zeros(samples, dtype=torch.uint8, device=states.device).scatter_reduce_(
        0, owner, found, "amax"
    )


def describe(flags: np.ndarray, layout: Layout) -> str:
    """Say in words what is wrong with a sample: `flags` [states] as `check_rows` gives them, worst first."""
    names = [f"tap {tap}" for tap in layout.tap_ids] + ["the final state"]
    worst = int(flags.max())
    where = [name for name, flag in zip(names, flags) if flag == worst]
    return f"{FINDINGS[worst]} row in {', '.join(where)}"
