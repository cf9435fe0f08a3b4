"""One sequence in the target while a drafter guesses ahead of it: append tokens, look, then keep only what
was accepted.

Attention layers are rolled back by dropping the last keys and values. Layers with a recurrent state (gated
delta net) cannot be: transformers' `crop` restores their convolution window but silently leaves the recurrent
state advanced, which changes the next logits without any error. Their states are therefore copied before a
verification; after a partial acceptance the copies are put back and the accepted tokens are run again. Tap
states and logits of that second run equal the first's.

A tree of drafts is verified in one forward with a mask in which a node sees the committed tokens and its own
ancestors. No mask can separate siblings inside a recurrence, so hybrid targets refuse it.
"""

from __future__ import annotations

import inspect
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from dflash_lab.acceptance.tree import DraftTree
from dflash_lab.errors import UnsupportedTarget
from dflash_lab.target.model import Target
from dflash_lab.target.taps import Taps


class Step(NamedTuple):
    """What a forward of Q tokens gave: `normed` [Q, H] after the final norm, `taps` [Q, K*H] (None when not
    tapped)."""

    normed: torch.Tensor
    taps: torch.Tensor | None


def check_tree_target(target: Target) -> None:
    """Raise `UnsupportedTarget`, with the reason and what to use instead, unless one forward can verify a
    tree."""
    instead = (
        "Measure trees offline (offline(..., budgets=...) needs no tree forward) or verify their leaf "
        "paths as a batch (acceptance.leaf_paths)."
    )
    if target.is_hybrid:
        raise UnsupportedTarget(
            f"{target.name}: a tree cannot be verified in one forward on a hybrid target: siblings would "
            f"leak into each other through the recurrent state, which no attention mask can stop. {instead}"
        )
    kinds = sorted(set(getattr(target.config, "layer_types", None) or []) - {"full_attention"})
    if kinds:
        raise UnsupportedTarget(
            f"{target.name}: layers of kind {', '.join(kinds)} keep a window of their cache that a tree "
            f"cannot be compacted in. {instead}"
        )
    backend = getattr(target.config, "_attn_implementation", "sdpa")
    if backend not in ("sdpa", "eager"):
        raise UnsupportedTarget(
            f"{target.name}: attention {backend!r} takes no tree mask. Load the target with attn='sdpa'."
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
        kept = torch.tensor(path, device=self._pending.device)
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                tensor = getattr(
                    layer, name
                )  # [1, heads, length + appended, d]; keys are already rotated to their place
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
        output = self.target.body(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=mask,
            use_cache=True,
            **{self._keyword: self.cache},
        )
        taps = torch.cat(self._taps.take(), dim=-1)[0] if self._taps is not None else None
        return Step(output.last_hidden_state[0], taps)


def cache_keyword(body: torch.nn.Module) -> str:
    """Return what this transformers calls a forward's cache: `cache` from 5.24 on, `past_key_values`
    before."""
    return "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"


def new_cache(target: Target) -> DynamicCache:
    """Return an empty cache whose attention layers can be rolled back; `UnsupportedTarget` for a kind that
    cannot."""
    cache = DynamicCache(config=target.config)
    layer: Any
    for layer in cache.layers:
        sliding = isinstance(layer, DynamicSlidingWindowLayer)
        linear = isinstance(layer, LinearAttentionCacheLayerMixin)
        if not (isinstance(layer, DynamicLayer) or linear) or (sliding and linear):
            raise UnsupportedTarget(
                f"{target.name}: no rollback is known for cache layers of type {type(layer).__name__}; "
                "speculative decoding needs one. Offline metrics (acceptance.offline) work on stored answers "
                "without it."
            )
        if sliding:
            layer.activate_past_recording()
    return cache


def crop_keys(layer: Any, count: int) -> None:
    """Drop the last `count` keys and values of a layer; recurrent states are not touched."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        layer.crop(
            -count
        )  # positive counts meant "keep" once and raise now; 0 trims a sliding layer to its window
    elif isinstance(layer, DynamicLayer):
        DynamicLayer.crop(layer, -count)


def _states(layer: Any) -> list[torch.Tensor]:
    both = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [state for state in both if state is not None]


def save_states(cache: DynamicCache) -> list[list[torch.Tensor]]:
    """Copy the convolution and recurrent states of every linear layer; empty for an attention-only target."""
    linear = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    return [[state.clone() for state in _states(layer)] for layer in linear]


def restore_states(cache: DynamicCache, saved: list[list[torch.Tensor]]) -> None:
    """Put back what `save_states` copied, in place: the states keep their addresses."""
    linear = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    for layer, states in zip(linear, saved, strict=True):
        for state, copy in zip(_states(layer), states, strict=True):
            state.copy_(copy)
