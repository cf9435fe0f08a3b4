"""A round of decoding whose every step is a CUDA graph: draft, build a tree, verify, commit.

Everything a round needs of the one before stays on the device: how many tokens are committed, the anchor, the
tap states that the drafter has not taken in yet. Nothing is looked at from the host, so rounds can be
launched one after the other; each leaves a record of what it decided. Shapes are fixed by block size, tree
budget and capacity; rows and nodes that a round does not need are computed and masked. Greedy choice only.

With neither drafter nor tree a round is a step of plain decoding, so the baseline of a speed-up gains as much
from graphs as what is compared with it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache

from dflash_lab.acceptance import tree_levels
from dflash_lab.acceptance.graphs import Call, captured, new_pool
from dflash_lab.acceptance.proposals import Draft
from dflash_lab.acceptance.static_cache import StaticKeys
from dflash_lab.acceptance.static_context import StaticContext
from dflash_lab.acceptance.tree_levels import Choices, LevelTree, TreePlan, plan_build
from dflash_lab.drafter.model import Drafter
from dflash_lab.target.model import Target

Build = Callable[[Choices, torch.Tensor, TreePlan], LevelTree]
See = Callable[[LevelTree, int], torch.Tensor]


def tree_builder(device: torch.device) -> tuple[Build, See]:
    """Return how trees are built on `device` and who sees whom in them: one kernel each, or, where there is
    no Triton, plain operations.
    """
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from dflash_lab.acceptance import tree_kernel

        return tree_kernel.best_tree, tree_kernel.visibility
    return tree_levels.best_tree, LevelTree.visibility


class StaticRound:
    """The steps of a round over `keys` and `context`, in order: `steps` maps a phase to its launch.

    `record` [3 + B-1] int64, on the device, is what the last round decided: accepted drafts, drafts verified,
    the bonus, then the drafts of the chain or of the accepted path. `width`: tokens of the target's forward.
    """

    def __init__(
        self,
        target: Target,
        keys: StaticKeys,
        drafter: Drafter | None = None,
        context: StaticContext | None = None,
        *,
        block_size: int = 1,
        budget: int = 0,
    ) -> None:
        self.target, self.keys, self.context = target, keys, context
        self.drafter, self.head = drafter, target.head
        self.block_size, self.budget = block_size, budget
        slots = block_size - 1
        device = target.device
        self._plan: TreePlan | None = None
        if budget and drafter is not None:
            second = drafter.candidate_selector
            fan = min(budget if second is None else second.top_k, target.vocab_size)
            self._plan = plan_build(budget, slots, fan, second is not None, device)
            self._best_tree, self._visibility = tree_builder(device)
        self.nodes = self._plan.nodes + slots if self._plan is not None else 0
        self.width = 1 + (self.nodes or slots)

        def whole(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        self.length, self.anchor, self.fresh = whole(1), whole(1), whole(1)
        self.record = whole(3 + slots)
        self._drafts, self._choices = whole(slots), whole(self.width)
        self._tree = LevelTree(
            whole(self.nodes), whole(self.nodes), whole(self.nodes), whole(self.nodes).bool()
        )
        self._seen = torch.zeros(1 + self.nodes, 1 + self.nodes, dtype=torch.bool, device=device)
        steps = {"verify": self._verify, "commit": self._commit}
        if drafter is not None:
            wide = len(drafter.config.tap_ids) * target.hidden_size
            options: Any = {"dtype": target.dtype, "device": device}
            self._taps = torch.zeros(block_size, wide, **options)  # of the tokens committed last, in order
            self._new_taps = torch.zeros(self.width, wide, **options)
            self._logits = torch.zeros(slots, target.vocab_size, **options)
            self._hidden = torch.zeros(slots, target.hidden_size, **options)
            steps = {"draft": self._draft, **({"build": self._build} if budget else {}), **steps}
        pool = new_pool(device)
        with torch.no_grad():
            self.steps: dict[str, Call] = {name: captured(call, device, pool) for name, call in steps.items()}

    @torch.no_grad()
    def load(self, cache: Cache, taps: torch.Tensor, anchor: int, length: int) -> None:
        """Start from a prefilled prompt of `length` tokens, its tap states, and its first answer token."""
        self.keys.load(cache, length)
        if self.context is not None:
            self.context.extend(taps, self.length.new_zeros(1))
        self.length.fill_(length)
        self.anchor.fill_(anchor)
        self.fresh.zero_()

    def _draft(self) -> None:
        assert self.context is not None and self.drafter is not None
        self.context.extend(self._taps, self.length - self.fresh)
        mask = self.anchor.new_full((self.block_size - 1,), self.drafter.config.mask_token_id)
        embeddings = self.head.embed(torch.cat([self.anchor, mask]))
        hidden = self.context.block(embeddings, self.length)[1:].to(self.head.weight.dtype)
        logits = self.drafter.logits(hidden, self.head.weight)
        self._hidden.copy_(hidden)
        self._logits.copy_(logits)
        self._drafts.copy_(Draft(self.drafter, self.anchor, hidden, logits).greedy())

    def _build(self) -> None:
        assert self.drafter is not None and self._plan is not None
        draft = Draft(self.drafter, self.anchor, self._hidden, self._logits)
        tree = self._best_tree(draft.choices(self.budget), self._drafts, self._plan)
        for own, new in zip(self._tree, tree):
            own.copy_(new)
        self._seen.copy_(self._visibility(tree, self.block_size - 1))

    def _verify(self) -> None:
        cells = self.length + torch.arange(self.width, device=self.length.device)
        every = torch.arange(self.keys.capacity, device=self.length.device)
        if self.nodes:
            tokens = torch.cat([self.anchor, self._tree.tokens])
            positions = self.length + torch.cat([self._tree.depths.new_zeros(1), self._tree.depths])
            seen = (every < self.length).expand(self.width, -1).index_copy(1, cells, self._seen)
        else:
            tokens = torch.cat([self.anchor, self._drafts])
            positions, seen = cells, every <= cells[:, None]
        tap_ids = self.drafter.config.tap_ids if self.drafter is not None else ()
        step = self.keys.forward(tokens, positions, cells, seen, tap_ids)
        self._choices.copy_(self.head.logits(step.normed).argmax(-1))
        if step.taps is not None:
            self._new_taps.copy_(step.taps)

    def _commit(self) -> None:
        slots = torch.arange(self.block_size, device=self.length.device)
        if self.nodes:
            path, drafts = self._accepted_path(slots)
            self.keys.move(self.length + path, self.length + slots)
            accepted, drafted = (path > 0).sum(0, keepdim=True), self._tree.active.sum(0, keepdim=True)
            bonus = self._choices[path.amax(0, keepdim=True)]
        else:
            path, drafts = slots, self._drafts
            hits = self._choices[:-1] == drafts
            accepted = hits.int().cumprod(0).sum(0, keepdim=True)
            drafted, bonus = torch.full_like(accepted, len(drafts)), self._choices[accepted]
        if self.drafter is not None:
            self._taps.copy_(self._new_taps[path])
        self.record.copy_(torch.cat([accepted, drafted, bonus, drafts]))
        self.fresh.copy_(accepted + 1)
        self.length.add_(self.fresh)
        self.anchor.copy_(bonus)

    def _accepted_path(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the accepted node at each depth [B] (0 past the last) and their tokens [B-1].

        A node is accepted when it and all its ancestors carry the token that the target chose at their
        parents; siblings carry different tokens, so there is one at most at a depth.
        """
        tree = self._tree
        right = tree.active & (tree.tokens == self._choices[tree.parents])
        right = torch.cat([right.new_ones(1), right])
        accepted = right & ~(self._seen & ~right).any(1)
        depths = torch.cat([tree.depths.new_zeros(1), tree.depths]) * accepted
        nodes = torch.arange(self.width, device=slots.device) * accepted
        path = torch.zeros_like(slots).scatter_reduce_(0, depths, nodes, "amax")
        return path, torch.where(path[1:] > 0, tree.tokens[path[1:] - 1], -1)
