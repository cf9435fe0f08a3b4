"""Where training blocks start, and which of their slots count.

An anchor is what decoding would start a block from: a response token whose next token is a response token
too. So position a is valid when 1 <= a, a + 1 < L, loss_mask[a] = 1 and loss_mask[a + 1] = 1 (SpecForge's
rule; a = 0 has no context). Anchors are shared out over the documents of a row in proportion to their valid
positions, drawn without replacement, sorted, and drawn anew each epoch: random anchors train better than
fixed ones (paper: tau 5.64 / 4.94).

Slot k >= 1 counts while every slot up to it stands on a response token of the same document: what lies behind
a gap could never be accepted in one round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor


def stream_seed(*parts: int | str) -> int:
    """A seed for one purpose at one point of a run, such as ("anchors", seed, epoch, row).

    Streams depend on their parts alone, so a resumed run draws what the uninterrupted one drew.
    """
    return xxhash.xxh3_64(repr(parts).encode()).intdigest() & (2**63 - 1)


def seeded(*parts: int | str) -> torch.Generator:
    """A CPU generator for `stream_seed` of the same parts."""
    return torch.Generator().manual_seed(stream_seed(*parts))


def valid_anchors(loss_mask: Tensor) -> Tensor:
    """Sorted positions [n] where a block may start, for a document's loss_mask [L]."""
    on = loss_mask.bool()
    valid = on[:-1] & on[1:]
    valid[:1] = False
    return valid.nonzero()[:, 0]


def draw_anchors(valid: Sequence[Tensor], total: int, generator: torch.Generator) -> list[Tensor]:
    """Draw `total` anchors from the documents' valid positions, or all of them if there are fewer; each
    sorted.

    Shares are proportional, rounded at random without bias (systematic sampling), so short documents get
    their turn.
    """
    counts = torch.tensor([len(positions) for positions in valid], dtype=torch.float64)
    available = int(counts.sum())
    if available <= total:
        return [positions.clone() for positions in valid]
    ends = counts.cumsum(0) * total / available + torch.rand(1, generator=generator, dtype=torch.float64)
    ends[-1] = total + ends[-1] % 1  # exact, whatever the sum rounded to
    shares = ends.floor().diff(prepend=torch.zeros(1, dtype=torch.float64)).long().tolist()
    drawn = []
    for positions, share in zip(valid, shares, strict=True):
        order = torch.randperm(len(positions), generator=generator)[:share]
        drawn.append(positions[order].sort().values)
    return drawn


def slot_labels(
    input_ids: Tensor, loss_mask: Tensor, anchors: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """labels [n, B] = input_ids[a + k] (0 past the end) and valid [n, B] bool; slot 0 is never valid."""
    length = input_ids.shape[0]
    where = anchors[:, None] + torch.arange(block_size)
    inside = where < length
    where = where.clamp(max=length - 1)
    labels = torch.where(inside, input_ids[where].long(), 0)
    counts = (inside & loss_mask.bool()[where])[:, 1:].long().cumprod(dim=1).bool()
    return labels, torch.cat([torch.zeros_like(counts[:, :1]), counts], dim=1)


def decay_weights(block_size: int, gamma: float) -> Tensor:
    """w [B]: exp(-(k-1)/gamma) for slots k >= 1, 0 for the anchor; gamma 0 means no decay. Source: DFlash
    paper.
    """
    slots = torch.arange(block_size, dtype=torch.float32)
    weights = torch.exp(-(slots - 1) / gamma) if gamma > 0 else torch.ones(block_size)
    weights[0] = 0.0
    return weights
