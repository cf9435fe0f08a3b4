"""How DFlash 2's selector learns: pick the label among the best candidates of a slot, given the right
predecessor.

The candidates are the drafter's own top k (their indices are not differentiated, their logits are); a label
that is not among them takes the last place, so that there is always something to learn. The predecessor is
the data token before the slot (teacher forcing). Its cross-entropy weighs slots as the main loss does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dflash_lab.drafter.loss.result import RowStats
from dflash_lab.drafter.model import Drafter

ELEMENTS = 1 << 26  # logits held at once


def selector_loss(
    drafter: Drafter, hidden: Tensor, head: Tensor, labels: Tensor, rows: RowStats
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the selector's cross-entropy, and its choices [A, B] (-1 where none counts).

    hidden [A, B, H] of the drafter, head [V, H], labels [A, B] data tokens (slot 0: the anchor), `rows` the
    main loss's statistics, whose labels and weights are used. A choice is one of the true top k: it is wrong
    wherever the label had to be put in.
    """
    previous = labels.to(hidden.device).roll(1, dims=1)[rows.live]  # slot 0 is never live
    states, wanted, weights = hidden[rows.live], rows.label[rows.live], rows.weight[rows.live]
    total = hidden.new_zeros((), dtype=torch.float32)
    picks = [previous[:0]]
    size = max(1, ELEMENTS // head.shape[0])
    for start in range(0, len(states), size):
        part = slice(start, start + size)
        losses, pick = checkpoint(
            _choose, drafter, states[part], head, previous[part], wanted[part], use_reentrant=False
        )
        total = total + (losses * weights[part]).sum()
        picks.append(pick)
    chosen = torch.full_like(rows.label, -1)
    chosen[rows.live] = torch.cat(picks)
    return total, chosen


def _choose(
    drafter: Drafter, states: Tensor, head: Tensor, previous: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor]:
    """states [n, H] -> cross-entropy [n] over the candidates, and the token the selector would choose [n]."""
    selector = drafter.candidate_selector
    assert selector is not None
    with torch.no_grad():
        candidates = drafter.logits(states, head).topk(min(selector.top_k, head.shape[0]), dim=-1).indices
        missing = (candidates != wanted[:, None]).all(-1)
        taught = candidates.clone()
        taught[missing, -1] = wanted[missing]
    unary = drafter.capped(torch.einsum("nh,nkh->nk", states, head[taught])).float()
    scores = selector.scores(unary, taught, states, previous).float()
    where = (taught == wanted[:, None]).long().argmax(-1)
    losses = F.cross_entropy(scores, where, reduction="none")
    with torch.no_grad():
        # Where the label was put among the candidates, it is no choice of the drafter's.
        free = torch.where(missing, scores[:, :-1].argmax(-1), scores.argmax(-1))
    return losses, taught.gather(-1, free[:, None])[:, 0]
