"""Drafters for tests: random weights, trained a little, and proposers that know the answer and lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dflash_lab.acceptance.decode import Decoded, Draft, Study, plain_decode
from dflash_lab.acceptance.offline import answered_items
from dflash_lab.acceptance.tree import DraftTree, build_tree, marginal_edges
from dflash_lab.data.samples import FeatureItem
from dflash_lab.drafter.attention import row_layout
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.model import ContextKeys, Drafter, run_blocks

PROMPT = [257, 84, 104, 105, 115, 32, 105, 115, 32, 97]
PROMPTS = [
    [257, 84, 104, 105, 115, 32, 105],
    [257, 80],
    [257, 66, 67, 12, 9, 9, 44, 45, 46, 47],
    [70, 71, 72],
]


def random_drafter(target, block_size=6, seed=0, **extra) -> Drafter:
    """A two-layer drafter with random weights for a tiny target; `extra` overrides config fields."""
    fields = {"num_layers": 2, "tap_ids": (1, 4), "mask_token_id": 280, "initializer_range": 0.3} | extra
    config = DrafterConfig.from_target(target.config, block_size=block_size, **fields)
    return Drafter(config).initialize(torch.Generator().manual_seed(seed)).eval()


def second_drafter(target, **extra) -> Drafter:
    """A random DFlash 2 drafter whose selector matters (codebooks as large as the logits)."""
    second = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6}
    drafter = random_drafter(target, **second, **extra)
    for codebook in (
        drafter.candidate_selector.predecessor_codebook,
        drafter.candidate_selector.successor_codebook,
    ):
        codebook.data.mul_(50)
    return drafter


def oracle(answer, lie=0.0) -> type:
    """A class in place of `decode.Proposer` that knows `answer` (prompt and continuation) and errs
    with chance `lie`, the truth then standing second, where trees can find it.
    """

    class Oracle:
        def __init__(self, drafter, head) -> None:
            self.drafter, self.head, self.length = drafter, head, 0
            self.generator = torch.Generator().manual_seed(0)

        def extend(self, taps) -> None:
            self.length += len(taps)

        def draft(self, anchor, block_size) -> Draft:
            assert int(anchor) == answer[self.length]
            count, wide = block_size - 1, self.head.weight.shape[0]
            logits = lying_logits(answer[self.length + 1 :], (count, wide), lie, self.generator)
            return Draft(self.drafter, anchor, torch.zeros(count, self.drafter.config.hidden_size), logits)

    return Oracle


def lying_logits(truth, shape, lie, generator) -> torch.Tensor:
    """Logits [slots, V] with `truth` (0 beyond its end) first, or second with chance `lie`."""
    logits = torch.randn(shape, generator=generator)
    for slot, row in enumerate(logits):
        token = truth[slot] if slot < len(truth) else 0
        lies = torch.rand(1, generator=generator).item() < lie
        row[token], row[(token + 1) % len(row)] = 10.0, 11.0 if lies else 5.0
    return logits


def answered(target, prompts, answers, tap_ids=(1, 4)) -> list[FeatureItem]:
    """Prompts with these answers as items, as extraction makes them."""
    asked = [tuple(prompt) for prompt in prompts]
    study = Study("plain", [Decoded(list(tokens)) for tokens in answers], asked)
    return list(answered_items(target, tap_ids, study))


def greedy(target, prompts, count, stop_ids=()) -> list[list[int]]:
    """The target's own answers of `count` tokens, or until one of `stop_ids` (None: its own)."""
    return [plain_decode(target, p, max_new_tokens=count, stop_ids=stop_ids).tokens for p in prompts]


def paths_of(tokens, parents, active=None) -> list[tuple[int, ...]]:
    """The token path of every (active) node of a tree, in order."""
    paths = [()]
    for token, parent in zip(tokens.tolist(), parents.tolist()):
        paths.append((*paths[int(parent)], int(token)))
    used = [True] * len(paths) if active is None else active.tolist()
    return [path for path, kept in zip(paths[1:], used) if kept]


def close(ours: torch.Tensor, theirs: torch.Tensor, bound: float = 2e-5) -> bool:
    """Relative L2 error below `bound`."""
    return float((ours - theirs).norm() / theirs.norm()) < bound


def overfit(
    target, drafter: Drafter, items, steps: int = 60, *, visible_shift: int = 0, label_shift: int = 0
) -> Drafter:
    """Train a tiny drafter on `items` until it is right often, so that tests see real partial acceptance.

    visible_shift, label_shift: faults to train with (context past the anchor, labels of the slot after).
    """
    size = drafter.config.block_size
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    drafter.train()
    for _ in range(steps):
        for item in items:
            ids = item.input_ids.long()
            first = int(item.loss_mask.nonzero()[0])
            anchors = list(range(first, len(ids) - 1))
            block = torch.full((len(anchors), size), drafter.config.mask_token_id)
            block[:, 0] = ids[anchors]
            padded = torch.cat([ids, ids.new_full((size + label_shift,), -100)])
            labels = padded[torch.tensor(anchors)[:, None] + torch.arange(1, size) + label_shift]
            context = drafter.context(item.taps.float())
            angles = drafter.angles(torch.arange(len(ids)), context.dtype)
            keys = [ContextKeys(*layer.self_attn.keys_values(context, angles)) for layer in drafter.layers]
            layout = row_layout([anchors], [len(ids)], size)
            hidden = run_blocks(drafter, target.head.embed(block), layout, keys, visible_shift)[:, 1:]
            logits = drafter.logits(hidden, target.head.weight)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return drafter.eval().requires_grad_(False)


def tree_from_logits(logits: torch.Tensor, budget: int) -> DraftTree:
    """Return the tree of the marginals `logits` [L, V], slots 1..L."""
    edges = marginal_edges(torch.log_softmax(logits.float(), -1), max(budget, 1))
    return build_tree(edges, root=0, depth=len(logits), budget=budget)


def chain_tree(tokens: Sequence[int]) -> DraftTree:
    """Return a draft without branches as a tree."""
    count = len(tokens)
    return DraftTree(
        np.asarray(tokens, np.int64), np.arange(count), np.arange(1, count + 1), np.zeros(count, np.float64)
    )
