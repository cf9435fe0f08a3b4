"""Where a stored answer stands in the best-first tree, for thousands of anchors at once and every budget
together.

A block is accepted to depth j by the tree of budget b exactly when the answer's first j tokens are among the
b best prefixes, so all that is needed is the rank of each answer prefix. Building a Python heap per anchor
would take hours for ten thousand answers; here the M best prefixes are found level by level for a batch of
anchors with tensor operations. A prefix of depth d among the M best extends one of the M best of depth d-1,
and candidate (i-th parent, r-th token) is beaten by all (i' <= i, r' <= r), so only pairs with (i+1)(r+1) <=
M can matter: about M ln M of them rather than M^2.

Ties follow the heap's order (tuple of token ranks). bf16 logits tie all the time, so this is not a nicety.
Only a tie that straddles rank M itself may be cut differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from dflash_lab.acceptance.tree import UNITS_A_NAT, best_tokens

NEVER = 1 << 30  # rank of a prefix that is in no tree of at most M nodes


def path_ranks(log_probs: torch.Tensor, labels: torch.Tensor, max_budget: int) -> torch.Tensor:
    """Return [A, L] int64: the 1-based rank of every answer prefix among all draft prefixes, NEVER beyond
    `max_budget`.

    `log_probs` [A, L, V] are the draft's log marginals, `labels` [A, L] the answer's tokens (negative:
    unknown, never in a tree). The tree of budget b holds the prefix of length j exactly when its rank is <=
    b.
    """
    tokens, costs = best_tokens(log_probs, max_budget)
    return _ranks(costs.double() / -UNITS_A_NAT, tokens, labels, max_budget)


def accepted_by_budget(log_probs: torch.Tensor, labels: torch.Tensor, budgets: Sequence[int]) -> torch.Tensor:
    """Return [A, len(budgets)]: drafts that the trees of `Draft.tree` accept of the answer `labels` [A, L].

    Such a tree holds the `budget` best prefixes and the draft's own chain, so it accepts the longer of the
    two.
    """
    tokens, costs = best_tokens(log_probs, max(budgets))
    places = _ranks(costs.double() / -UNITS_A_NAT, tokens, labels, max(budgets))
    chain = (tokens[..., 0] == labels).int().cumprod(-1).sum(-1)
    return torch.stack([torch.maximum((places <= budget).sum(-1), chain) for budget in budgets], dim=1)


def _ranks(scores: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor, max_budget: int) -> torch.Tensor:
    """`path_ranks` from the best `scores` and `tokens` [A, L, R] of each slot."""
    hit = tokens == labels[..., None]
    found = hit.any(-1)
    rank = hit.int().argmax(-1)  # [A, L] rank of the answer's token in its row
    own = torch.where(found, scores.gather(-1, rank[..., None])[..., 0], -torch.inf)
    weights = _running_sum(own)  # [A, L] log-probability of each answer prefix
    beam = _Beam.first(scores[:, 0], rank[:, 0])
    place = 1 + beam.ahead_of(weights)
    for level in range(1, labels.shape[1]):
        beam = beam.extend(scores[:, level], rank[:, level], max_budget)
        place += beam.ahead_of(weights)
    return torch.where(found.cumprod(-1).bool() & (place <= max_budget), place, NEVER)


def _running_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum along the last axis strictly left to right, so that equal paths get bit-equal sums here and in the
    beam."""
    sums = [values[:, 0]]
    for column in range(1, values.shape[1]):
        sums.append(sums[-1] + values[:, column])
    return torch.stack(sums, dim=1)


@lru_cache(maxsize=32)
def _pairs(parents: int, width: int, keep: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all (parent index, token rank) with (i+1)(r+1) <= keep."""
    i, r = torch.meshgrid(torch.arange(parents), torch.arange(width), indexing="ij")
    kept = (i + 1) * (r + 1) <= keep
    return i[kept].to(device), r[kept].to(device)


@dataclass(frozen=True)
class _Beam:
    """The best prefixes of one depth for each anchor, best first, with how each compares to the answer's
    path.

    `scores` [A, m]; `split` [A, m]: the depth at which the prefix leaves the answer's path (0: it has not
    left it); `before` [A, m]: whether it leaves it by a smaller token rank.
    """

    depth: int
    scores: torch.Tensor
    split: torch.Tensor
    before: torch.Tensor

    @classmethod
    def first(cls, scores: torch.Tensor, answer_rank: torch.Tensor) -> _Beam:
        ranks = torch.arange(scores.shape[1], device=scores.device)[None]
        return cls(1, scores, (ranks != answer_rank[:, None]).long(), ranks < answer_rank[:, None])

    def extend(self, scores: torch.Tensor, answer_rank: torch.Tensor, keep: int) -> _Beam:
        """Go one level deeper: `scores` [A, R] of that level's tokens, best first; keep the `keep` best
        prefixes."""
        parent, rank = _pairs(self.scores.shape[1], scores.shape[1], keep, scores.device)
        total = self.scores[:, parent] + scores[:, rank]
        total, kept = total.topk(min(keep, total.shape[1]), dim=-1)
        parent, rank = parent[kept], rank[kept]
        split, before = self.split.gather(1, parent), self.before.gather(1, parent)
        on_path = split == 0
        leaves = on_path & (rank != answer_rank[:, None])
        return _Beam(
            self.depth + 1,
            total,
            torch.where(leaves, self.depth + 1, split),
            torch.where(on_path, rank < answer_rank[:, None], before),
        )

    def ahead_of(self, weights: torch.Tensor) -> torch.Tensor:
        """Count, for each answer prefix (`weights` [A, L]), the prefixes of this beam that the heap would pop
        earlier."""
        scores, split, before = self.scores[:, None], self.split[:, None], self.before[:, None]  # [A, 1, m]
        lengths = torch.arange(1, weights.shape[1] + 1, device=weights.device)[:, None]  # [L, 1]
        left_in_time = (split > 0) & (split <= lengths)
        smaller = (left_in_time & before) | (~left_in_time & (self.depth < lengths))
        weights = weights[..., None]
        return ((scores > weights) | ((scores == weights) & smaller)).sum(-1)
