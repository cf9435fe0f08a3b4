"""Where training blocks start, and which of their slots count.

An anchor is what decoding would start a block from: a response token whose next token is a response token
too. So position a is valid when 1 <= a, a + 1 < L, loss_mask[a] = 1 and loss_mask[a + 1] = 1 (SpecForge's
rule; a = 0 has no context). Anchors are shared out over the documents of a row in proportion to their valid
positions, drawn without replacement, sorted, and drawn anew each epoch: random anchors train better than
fixed ones (paper: tau 5.64 / 4.94).

Slot k >= 1 counts while every slot up to it stands on a response token of the same document: what lies behind
a gap could never be accepted in one round.

A whole row is worked on at once, in numpy: a thread packs rows beside the one that starts the device's
kernels, and each of thousands of small operations would stop it on its way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
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


def valid_anchors(loss_mask: Tensor, starts: np.ndarray | Sequence[int] = (0,)) -> np.ndarray:
    """Sorted indices [n] where a block may start, for the loss_mask [S] of a row whose documents begin at
    `starts`.
    """
    on = loss_mask.numpy() != 0
    first = np.zeros(len(on) + 1, dtype=bool)
    first[np.asarray(starts)] = True
    return np.flatnonzero(on[:-1] & on[1:] & ~first[: max(len(on) - 1, 0)] & ~first[1 : len(on)])


def draw_anchors(counts: np.ndarray, total: int, generator: torch.Generator) -> np.ndarray:
    """Draw `total` of the valid positions of documents that have `counts` of them, or all if there are fewer:
    sorted places among all of them, [n].

    Shares are proportional, rounded at random without bias (systematic sampling), so short documents get
    their turn.
    """
    available = int(counts.sum())
    if available <= total:
        return np.arange(available)
    ends = counts.cumsum() * float(total) / available
    ends += torch.rand(1, generator=generator, dtype=torch.float64).numpy()
    ends[-1] = total + ends[-1] % 1  # exact, whatever the sum rounded to
    shares = np.diff(np.floor(ends), prepend=0.0).astype(np.int64).tolist()
    drawn, before = [], 0
    for count, share in zip(counts.tolist(), shares, strict=True):
        drawn.append(torch.randperm(count, generator=generator).numpy()[:share] + before)
        before += count
    return np.sort(np.concatenate(drawn))


def slot_labels(
    input_ids: Tensor, loss_mask: Tensor, anchors: np.ndarray, ends: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """labels [n, B] = input_ids[a + k] (0 past the end) and valid [n, B] bool; slot 0 is never valid.

    `anchors` [n] are indices of a row [S] of documents, `ends` [n] lie one past the last token of each
    anchor's document.
    """
    length = len(input_ids)
    off = np.append(np.where(loss_mask.numpy() != 0, length, np.arange(length)), length)
    next_off = np.minimum.accumulate(off[::-1])[::-1]  # [S + 1] first index from here on that does not count
    slots = np.arange(block_size)
    where = anchors[:, None] + slots
    labels = input_ids.numpy().astype(np.int64, copy=False).take(where, mode="clip")
    labels[where >= ends[:, None]] = 0
    valid = where < np.minimum(next_off[anchors + 1], ends)[:, None]
    valid[:, :1] = False
    return labels, valid


def decay_weights(block_size: int, gamma: float) -> Tensor:
    """w [B]: exp(-(k-1)/gamma) for slots k >= 1, 0 for the anchor; gamma 0 means no decay. Source: DFlash
    paper.
    """
    slots = torch.arange(block_size, dtype=torch.float32)
    weights = torch.exp(-(slots - 1) / gamma) if gamma > 0 else torch.ones(block_size)
    weights[0] = 0.0
    return weights
