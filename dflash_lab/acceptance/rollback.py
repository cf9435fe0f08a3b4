"""What transformers' cache needs so that a sequence can be rolled back, copied and batched, layer kind by
layer kind.

Facts this rests on, for transformers 5.17 to 5.24: `crop` takes a negative count (a positive one once meant
"keep" and raises now); sliding layers must record their past before they can be cropped, and want `crop(0)`
after every forward; linear layers keep `conv_states` and `recurrent_states` as dictionaries of tensors, whose
recurrent part `crop` does not restore.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from dflash_lab.errors import UnsupportedTarget
from dflash_lab.target.cache import goes_on, growing_cache
from dflash_lab.target.model import Target
from dflash_lab.target.spans import FULL, besides


def new_cache(target: Target) -> DynamicCache:
    """Return an empty cache whose layers can be rolled back; `UnsupportedTarget` as `growing_cache`."""
    cache = growing_cache(target)
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.activate_past_recording()
    return cache


def check_goes_on(target: Target) -> None:
    """Raise `UnsupportedTarget` if several tokens at once do not go on from what the cache holds: plain
    decoding may be right where the verification of a block is not.
    """
    if not goes_on(target, 4):
        odd = besides(target.spans, [FULL]) or "attention"
        raise UnsupportedTarget(
            f"{target.name}: {odd} of this {target.config.model_type} cannot take blocks of drafts: several "
            "tokens at once do not go on from those before. Plain decoding and offline metrics "
            "(acceptance.offline) work."
        )


def crop_keys(layer: Any, count: int) -> None:
    """Drop the last `count` keys and values of a layer; recurrent states are not touched."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        # Positive counts meant "keep" once and raise now; 0 trims a sliding layer to its window.
        layer.crop(-count)
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
        for state, saved_state in zip(_states(layer), states, strict=True):
            state.copy_(saved_state)


def select_rows(cache: DynamicCache, rows: torch.Tensor) -> DynamicCache:
    """Return a cache whose batch rows are `rows` of `cache` (repeats allowed); the tensors are copies."""
    chosen = copy.copy(cache)
    layers: list[Any] = [copy.copy(layer) for layer in cache.layers]
    chosen.layers = layers
    for layer in layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.conv_states = _rows_of(layer.conv_states, rows)
            layer.recurrent_states = _rows_of(layer.recurrent_states, rows)
    for layer in attention_layers(chosen):
        layer.keys, layer.values = layer.keys.index_select(0, rows), layer.values.index_select(0, rows)
    return chosen


def _rows_of(states: dict[int, torch.Tensor | None], rows: torch.Tensor) -> dict[int, torch.Tensor | None]:
    return {i: None if state is None else state.index_select(0, rows) for i, state in states.items()}


def attention_layers(cache: DynamicCache) -> list[Any]:
    """Return the layers that hold `keys` and `values` [R, heads, T, d]."""
    return [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
