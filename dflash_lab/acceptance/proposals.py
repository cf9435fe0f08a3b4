"""What a drafter proposes for one block: tokens to verify in a row, or edges to grow a tree from.

Plain DFlash gives independent marginals per slot. DFlash 2's selector rescores the best candidates of a slot
given the token chosen before it, so its tokens are found by walking left to right and its tree edges depend
on the previous token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_lab.acceptance.rejection import probabilities
from dflash_lab.acceptance.tree import (
    UNITS_A_NAT,
    DraftTree,
    Edges,
    best_tokens,
    build_tree,
    exact_costs,
    marginal_edges,
    with_chain,
)
from dflash_lab.acceptance.tree_levels import Choices
from dflash_lab.drafter.cache import DraftCache
from dflash_lab.drafter.model import Drafter
from dflash_lab.errors import InputError
from dflash_lab.target.choice import draw
from dflash_lab.target.head import TargetHead
from dflash_lab.target.model import Target

_ROOT = -1  # stands for the anchor in `Edges`: its id need not come to the host


def check_pair(target: Target, drafter: Drafter) -> None:
    """Raise `InputError` unless `drafter` was made for a target of this shape."""
    config = drafter.config
    for name, ours, theirs in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    ):
        if ours != theirs:
            raise InputError(
                f"this drafter was made for another target: its {name} is {ours}, {target.name} has {theirs}."
            )


@dataclass(frozen=True)
class Draft:
    """One drafted block: `logits` [L, V] of slots 1..L, their hidden states [L, H], and the token they
    follow, `anchor` [1]."""

    drafter: Drafter
    anchor: torch.Tensor
    hidden: torch.Tensor
    logits: torch.Tensor

    def greedy(self) -> torch.Tensor:
        """Return the most likely tokens [L]."""
        selector = self.drafter.candidate_selector
        if selector is None:
            return self.logits.argmax(-1)
        return selector.select(self.hidden[None], self.logits[None], self.anchor)[0][0]

    def sampled(
        self, temperature: float, top_p: float, top_k: int, generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw tokens [L] and return them with the probabilities q [L, V] that they were drawn from.

        DFlash 2 draws among its candidates by softmax(score / T); top-p and top-k are the target's affair
        there.
        """
        selector = self.drafter.candidate_selector
        if selector is None:
            chances = probabilities(self.logits, temperature, top_p, top_k)
            return draw(chances, generator), chances
        unary, candidates = self.logits.topk(min(selector.top_k, self.logits.shape[-1]), dim=-1)
        chances = torch.zeros_like(self.logits, dtype=torch.float32)
        previous, tokens = self.anchor[0], []
        for slot, options in enumerate(candidates):
            score = selector.scores(unary[slot], options, self.hidden[slot], previous)
            q = probabilities(score, temperature)
            chances[slot].scatter_(0, options, q)
            previous = options[draw(q, generator)]
            tokens.append(previous)
        return torch.stack(tokens), chances

    def edges(self, width: int, temperature: float = 0.0) -> Edges:
        """Return the tree edges of this block, at T > 0 of its distribution at that temperature."""
        scale = 1.0 / temperature if temperature > 0 else 1.0
        if self.drafter.candidate_selector is None:
            return marginal_edges(torch.log_softmax(self.logits.float() * scale, -1), width)
        before, choices = self._conditional(scale)
        table: dict[tuple[int, int], tuple[list[int], list[float]]] = {}
        log_probs = choices.costs.double() / -UNITS_A_NAT
        rows = zip(before.tolist(), choices.tokens.tolist(), log_probs.tolist())
        for level, row in enumerate(rows, start=1):
            for previous, ids, values in zip(*row):
                table[level, previous if level > 1 else _ROOT] = ids, values
        return lambda level, previous: table[level, previous]

    def choices(self, width: int) -> Choices:
        """Return the same edges (greedy ones) as tensors, for the tree that is built on the device."""
        if self.drafter.candidate_selector is not None:
            return self._conditional(1.0)[1]
        tokens, costs = best_tokens(torch.log_softmax(self.logits.float(), -1), width)
        return Choices(tokens[:, None], costs[:, None], torch.zeros_like(tokens)[:, None])

    def tree(self, budget: int, temperature: float = 0.0) -> DraftTree:
        """Build the best tree of `budget` nodes, and add what it lacks of the draft's own chain."""
        edges, depth = self.edges(max(budget, 1), temperature), len(self.logits)
        return with_chain(
            build_tree(edges, root=_ROOT, depth=depth, budget=budget), edges, root=_ROOT, depth=depth
        )

    def _conditional(self, scale: float) -> tuple[torch.Tensor, Choices]:
        """Score every candidate after every candidate of the slot before, in one go on the device.

        Returns the tokens [L, k] that stand before each slot (the anchor's, k times, before the first) and
        what may follow each of them.
        """
        selector = self.drafter.candidate_selector
        assert selector is not None
        unary, candidates = self.logits.topk(min(selector.top_k, self.logits.shape[-1]), dim=-1)
        before = torch.cat([self.anchor.expand(1, candidates.shape[1]), candidates[:-1]])  # [L, k]
        scores = selector.scores(
            unary[:, None], candidates[:, None].expand(-1, before.shape[1], -1), self.hidden[:, None], before
        )
        costs, order = exact_costs(torch.log_softmax(scores.float() * scale, -1)).sort(dim=-1, stable=True)
        tokens = candidates[:, None].expand_as(order).gather(-1, order)
        return before, Choices(tokens, costs, order)


class Proposer:
    """A drafter at work on one sequence: remembers the context's keys and values, drafts the next block."""

    def __init__(self, drafter: Drafter, head: TargetHead) -> None:
        self.drafter = drafter
        self.head = head
        self.cache = DraftCache(drafter)

    def extend(self, taps: torch.Tensor) -> None:
        """Take in the tapped states [n, K*H] of the next n committed tokens."""
        self.cache.extend(taps)

    @torch.no_grad()
    def draft(self, anchor: torch.Tensor, block_size: int) -> Draft:
        """Draft a block after `anchor` [1], a token whose own tap states do not exist yet."""
        mask = anchor.new_full((block_size - 1,), self.drafter.config.mask_token_id)
        hidden = self.cache.block(self.head.embed(torch.cat([anchor, mask])))[1:].to(self.head.weight.dtype)
        return Draft(self.drafter, anchor, hidden, self.drafter.logits(hidden, self.head.weight))
