"""One sequence in the target while a drafter guesses ahead of it: append tokens, look, then keep only what
was accepted.

Attention layers are rolled back by dropping the last keys and values. Layers with a recurrent state (gated
delta net) cannot be: transformers' `crop` restores their convolution window but silently leaves the recurrent
state advanced, which changes the next logits without any error. Their states are therefore copied before a
verification; after a partial acceptance the copies are put back and the accepted tokens are run again. Tap
states and logits of that second run equal the first's.

A tree of drafts is verified in one forward with a mask in which a node sees the committed tokens and its own
ancestors. No mask can separate siblings inside a recurrence, and a window forgets cells that a rejection
would need, so both refuse it.
"""

from __future__ import annotations

import inspect
from types import TracebackType
from typing import NamedTuple, Self

import torch

from dflash_lab.acceptance.rollback import (
    crop_keys,
    new_cache,
    restore_states,
    save_states,
    select_rows,
)
from dflash_lab.acceptance.tree import DraftTree
from dflash_lab.errors import UnsupportedTarget
from dflash_lab.target.cache import cache_keyword
from dflash_lab.target.model import Target
from dflash_lab.target.spans import FULL, besides
from dflash_lab.target.taps import Taps


class Step(NamedTuple):
    """What a forward of Q tokens gave: `normed` [Q, H] after the final norm, `taps` [Q, K*H] (None when not
    tapped)."""

    normed: torch.Tensor
    taps: torch.Tensor | None


def unmaskable(target: Target, *kinds: str) -> str:
    """Return why a mask and positions cannot tell a forward of `target` who attends to whom; empty if they
    can. kinds: of layers that are fine.
    """
    family = target.config.model_type
    if odd := besides(target.spans, kinds):
        return f"{odd} of this {family} do not attend to everything before them by keys of their own"
    if "position_ids" not in inspect.signature(target.body.forward).parameters or getattr(
        target.config, "alibi", False
    ):
        return f"this {family} takes the positions of tokens from their places in the cache"
    backend = getattr(target.config, "_attn_implementation", "sdpa")
    return "" if backend in ("sdpa", "eager") else f"attention {backend!r} takes no mask (attn='sdpa' does)"


def check_tree_target(target: Target) -> None:
    """Raise `UnsupportedTarget`, with the reason and what to use instead, unless one forward can verify a
    tree."""
    if why := unmaskable(target, FULL):
        leak = "siblings would leak into each other through the recurrent state: " if target.is_hybrid else ""
        raise UnsupportedTarget(
            f"{target.name}: a tree cannot be verified in one forward: {leak}{why}. Measure trees offline "
            "(offline(..., budgets=...) needs no tree forward) or verify their leaf paths as a batch "
            "(tree_mode='paths')."
        )


class TargetRun:
    """A target's cache for one sequence (or a batch of equal length). Use as a context manager: it holds tap
    hooks.

    `length` counts committed tokens; `step` and `step_tree` append uncommitted ones, `commit` or
    `commit_path` settle them.
    """

    def __init__(self, target: Target, tap_ids: tuple[int, ...] = ()) -> None:
        self.target = target
        self.length = 0
        self._taps = Taps(target.layers, tap_ids) if tap_ids else None
        self.cache = new_cache(target)
        self._keyword = cache_keyword(target.body)
        self._pending = torch.empty(0, dtype=torch.long)
        self._saved: list[list[torch.Tensor]] | None = None
        self._untouched = (
            False  # the last step ran on copies: the sequence's own cache has nothing to roll back
        )

    def __enter__(self) -> Self:
        if self._taps is not None:
            self._taps.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._taps is not None:
            self._taps.__exit__(kind, error, trace)

    def step(self, tokens: torch.Tensor, *, certain: bool = False) -> Step:
        """Run `tokens` [Q] after the committed ones. `certain`: all of them will be kept, so no way back is
        prepared."""
        if not certain:
            self._saved = save_states(self.cache)
        positions = self.length + torch.arange(len(tokens), device=tokens.device)
        return self._forward(tokens, positions, None)

    def step_tree(self, root: torch.Tensor, tree: DraftTree) -> Step:
        """Run the anchor `root` [1] and all nodes of `tree` in one forward of 1+n tokens; rows are in node
        order."""
        device = root.device
        tokens = torch.cat([root, torch.from_numpy(tree.tokens).to(device, non_blocking=True)])
        depths = torch.from_numpy(tree.depths).to(device, non_blocking=True)
        positions = self.length + torch.cat([torch.zeros_like(root), depths])
        seen = torch.from_numpy(tree.visibility()).to(device, non_blocking=True)
        shape = (1, 1, len(tokens), self.length + len(tokens))
        mask = torch.zeros(shape, dtype=self.target.dtype, device=device)
        mask[0, 0, :, self.length :].masked_fill_(~seen, torch.finfo(mask.dtype).min)
        return self._forward(tokens, positions, mask)

    def step_paths(self, root: torch.Tensor, tree: DraftTree, *, most_rows: int = 64) -> Step:
        """Like `step_tree`, for any target: every root-to-leaf path is a row of a batch with its own copy of
        the cache.

        Costs the sum of the path lengths and a cache copy a row, at most `most_rows` at a time. The
        sequence's own cache is left alone: settle with `commit_path`.
        """
        paths = tree.leaf_paths() or [[]]
        width = 1 + max(len(path) for path in paths)
        # Node of each cell; rows end in repeats of the root.
        table = torch.zeros(len(paths), width, dtype=torch.long)
        for row, path in enumerate(paths):
            table[row, 1 : 1 + len(path)] = torch.tensor(path)
        nodes = torch.cat([root.cpu(), torch.from_numpy(tree.tokens)])
        positions = self.length + torch.arange(width, device=root.device)
        own, normed, taps = self.cache, [], []
        try:
            for rows in table.split(most_rows):
                self.cache = select_rows(own, torch.zeros(len(rows), dtype=torch.long, device=root.device))
                step = self._batch(nodes[rows].to(root.device), positions.expand(len(rows), -1))
                normed.append(step.normed)
                taps += [step.taps] if step.taps is not None else []
        finally:
            self.cache = own
        # Any cell that holds the node: their prefixes are equal.
        cell = torch.zeros(1 + len(tree), dtype=torch.long)
        cell[table.flatten().flip(0)] = torch.arange(table.numel()).flip(0)
        cell = cell.to(root.device)
        self._pending, self._untouched = nodes.to(root.device), True
        flat = torch.cat(normed).flatten(0, 1)[cell]
        return Step(flat, torch.cat(taps).flatten(0, 1)[cell] if taps else None)

    def commit(self, count: int) -> None:
        """Keep the first `count` of the tokens appended last and forget the others."""
        appended = len(self._pending)
        if count < appended and self._saved:
            for layer in self.cache.layers:
                crop_keys(layer, appended)
            restore_states(self.cache, self._saved)
            if count:
                self.step(self._pending[:count], certain=True)
        else:
            for layer in self.cache.layers:
                crop_keys(layer, appended - count)
        self._settle(count)

    def commit_path(self, path: list[int]) -> None:
        """Keep the rows `path` (indices into the tokens appended last, rising) of every layer's keys and
        values."""
        kept = torch.tensor(path).to(self._pending.device, non_blocking=True)
        if self._untouched:
            self._untouched = False
            self.step(self._pending[kept], certain=True)
            self._settle(len(path))
            return
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                # [1, heads, length + appended, d]; keys are already rotated to their place
                tensor = getattr(layer, name)
                if path != list(range(len(path))):
                    tensor[:, :, self.length : self.length + len(path)] = tensor[:, :, self.length + kept]
                setattr(layer, name, tensor[:, :, : self.length + len(path)])
        self._settle(len(path))

    def _settle(self, count: int) -> None:
        self.length += count
        self._pending = self._pending[:0]
        self._saved = None

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> Step:
        self._pending = tokens
        step = self._batch(tokens[None], positions[None], mask)
        return Step(step.normed[0], step.taps[0] if step.taps is not None else None)

    def _batch(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None = None) -> Step:
        """One forward of tokens [R, Q] on the current cache."""
        output = self.target.body(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **{self._keyword: self.cache},
        )
        taps = torch.cat(self._taps.take(), dim=-1) if self._taps is not None else None
        return Step(output.last_hidden_state, taps)
