"""The target's keys and values: growing, at fixed size, rolled back, copied and batched, layer kind by layer
kind.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from dflash_lab.errors import UnsupportedTarget
from dflash_lab.models.load import Target
from dflash_lab.models.spans import CHUNKED, FULL, LINEAR, SLIDING, Span, besides

# Names for a cache among a forward's arguments: the first from transformers 5.24 on, the other before.
CACHE_KEYWORDS = ("cache", "past_key_values")


def run_cached(target: Target, cache: Cache, tokens: Tensor, positions: Tensor, mask: Any = None) -> Tensor:
    """Run `tokens` [R, Q] at `positions` [R, Q] after what `cache` holds; return the normed states [R, Q, H].

    mask: as the model's attention_mask, or a dictionary of them by layer kind.
    """
    return target.body(
        input_ids=tokens,
        position_ids=positions,
        attention_mask=mask,
        use_cache=True,
        **{_cache_keyword(type(target.body)): cache},  # type: ignore[arg-type]
    ).last_hidden_state


@cache
def _cache_keyword(body: type[nn.Module]) -> str:
    return next(name for name in CACHE_KEYWORDS if name in inspect.signature(body.forward).parameters)


def additive_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to be added to scores: 0 where `seen` (bool), elsewhere the least of `dtype`."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
        ~seen, torch.finfo(dtype).min
    )


# ---- A cache that grows ----

# Layers known to keep all of theirs in transformers' cache. Others keep an index beside their keys, compress
# them, or hold a state that no cache of transformers knows.
_GROWING = (FULL, SLIDING, CHUNKED, LINEAR, "conv", "hybrid", "moe", "mlp")
_WITHOUT = (
    "What needs no cache works: extraction, training, and metrics on stored answers (acceptance.offline)."
)


def growing_cache(target: Target) -> DynamicCache:
    """Return an empty cache for one forward after another; `UnsupportedTarget` where it would be wrong."""
    if odd := besides(target.spans, _GROWING):
        raise UnsupportedTarget(
            f"{target.name}: {odd} of this {target.config.model_type} cannot go on from earlier tokens: no "
            f"cache is known that keeps what they need. {_WITHOUT}"
        )
    if not _goes_on(target, 1):
        raise UnsupportedTarget(
            f"{target.name}: the {target.config.model_type} of this transformers does not go on from what "
            f"its cache holds: the next token's state is another than without a cache. {_WITHOUT} Another "
            "version of transformers may do it."
        )
    return _empty(target)


def check_goes_on(target: Target) -> None:
    """Raise `UnsupportedTarget` if several tokens at once do not go on from what the cache holds: plain
    decoding may be right where the verification of a block is not.
    """
    if not _goes_on(target, 4):
        odd = besides(target.spans, [FULL]) or "attention"
        raise UnsupportedTarget(
            f"{target.name}: {odd} of this {target.config.model_type} cannot take blocks of drafts: several "
            "tokens at once do not go on from those before. Plain decoding and offline metrics "
            "(acceptance.offline) work."
        )


def _empty(target: Target) -> DynamicCache:
    # Without a config every layer keeps everything: a config may have a window that no layer looks at.
    plain = all(span == Span() for span in target.spans)
    return DynamicCache() if plain else DynamicCache(config=target.config)


_GOES_ON: WeakKeyDictionary[Target, dict[int, bool]] = WeakKeyDictionary()  # asked once a target


@torch.no_grad()
def _goes_on(target: Target, block: int) -> bool:
    """Return whether `block` tokens at once go on from what the cache holds, by trying: some models do so for
    a single token only (Mamba's first scan starts from nothing), some versions of some models not at all, and
    none says so.
    """
    known = _GOES_ON.setdefault(target, {})
    if block not in known:
        ids = torch.randint(target.vocab_size, (1, 24), generator=torch.Generator().manual_seed(0))
        ids, places = ids.to(target.device), torch.arange(24, device=target.device)[None]
        whole = target.body(input_ids=ids, position_ids=places, use_cache=False).last_hidden_state
        cache = _empty(target)
        parts = (slice(0, 20), *(slice(start, start + block) for start in range(20, 24, block)))
        states = [run_cached(target, cache, ids[:, part], places[:, part]) for part in parts]
        errors = (torch.cat(states, 1) - whole).float().norm(dim=-1)[0] / whole.float().norm(dim=-1)[0]
        # A start from nothing spoils every token; rounding sends few of them to other experts.
        worst = max(float(errors[:20].median()), float(errors[20:].min()))
        known[block] = worst < (1e-3 if target.dtype == torch.float32 else 0.05)
    return known[block]


# ---- Rolled back, copied, batched ----
# Facts this rests on, for transformers 5.17 to 5.24: `crop` takes a negative count (a positive one once meant
# "keep" and raises now); sliding layers must record their past before they can be cropped, and want `crop(0)`
# after every forward; linear layers keep `conv_states` and `recurrent_states` as dictionaries of tensors,
# whose recurrent part `crop` does not restore.


_STATES = ("conv_states", "recurrent_states")  # of a linear layer, dictionaries of tensors [R, ..] or None


def rollback_cache(target: Target) -> DynamicCache:
    """Return an empty growing cache whose layers can be rolled back; `UnsupportedTarget` as there."""
    cache = growing_cache(target)
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.activate_past_recording()
    return cache


def crop_keys(cache: DynamicCache, count: int) -> None:
    """Drop the last `count` keys and values of every layer; recurrent states are not touched."""
    for layer in cache.layers:
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.crop(-count)  # type: ignore[union-attr]  # 0 trims a sliding layer to its window
        elif isinstance(layer, DynamicLayer):
            DynamicLayer.crop(layer, -count)


def attention_layers(cache: DynamicCache) -> list[Any]:
    """Return the layers that hold `keys` and `values` [R, heads, T, d]."""
    return [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]


def linear_layers(cache: DynamicCache) -> list[Any]:
    """Return the layers that hold `conv_states` and `recurrent_states`, dictionaries of tensors [R, ..]."""
    return [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]


def save_states(cache: DynamicCache) -> list[list[Tensor]]:
    """Copy the convolution and recurrent states of every linear layer; empty for an attention-only target."""
    return [[state.clone() for state in _states(layer)] for layer in linear_layers(cache)]


def restore_states(cache: DynamicCache, saved: list[list[Tensor]]) -> None:
    """Put back what `save_states` copied, in place: the states keep their addresses."""
    for layer, states in zip(linear_layers(cache), saved, strict=True):
        for state, saved_state in zip(_states(layer), states, strict=True):
            state.copy_(saved_state)


def _states(layer: Any) -> list[Tensor]:
    return [state for name in _STATES for state in getattr(layer, name).values() if state is not None]


def shallow_copy(cache: DynamicCache) -> DynamicCache:
    """Return a cache of the same tensors whose layers go on by themselves."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other


def select_rows(cache: DynamicCache, rows: Tensor) -> DynamicCache:
    """Return a cache whose batch rows are `rows` of `cache` (repeats allowed); the tensors are copies."""
    chosen = shallow_copy(cache)
    for layer in linear_layers(chosen):
        for name in _STATES:
            states = getattr(layer, name).items()
            setattr(layer, name, {k: None if s is None else s.index_select(0, rows) for k, s in states})
    for layer in attention_layers(chosen):
        layer.keys, layer.values = layer.keys.index_select(0, rows), layer.values.index_select(0, rows)
    return chosen


def stack_rows(caches: Sequence[DynamicCache]) -> DynamicCache:
    """Put caches of one row each into one, keys and values padded at the end to the longest."""
    whole = shallow_copy(caches[0])
    for number, layer in enumerate(whole.layers):
        parts: list[Any] = [cache.layers[number] for cache in caches]
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for name in _STATES:
                first, states = getattr(layer, name).items(), [getattr(part, name) for part in parts]
                joined = {k: None if s is None else torch.cat([one[k] for one in states]) for k, s in first}
                setattr(layer, name, joined)
        else:
            longest = max(part.keys.shape[2] for part in parts)
            for name in ("keys", "values"):
                tensors = [getattr(part, name) for part in parts]
                setattr(layer, name, torch.cat([pad(t, (0, 0, 0, longest - t.shape[2])) for t in tensors]))
    return whole


# ---- Of fixed size and address ----


class StaticCache(Cache):
    """Keys and values of R sequences with room for `capacity` tokens each, for layers that attend to
    everything.

    A CUDA graph replays the same kernels on the same addresses, so nothing in a forward may depend on how
    long a sequence is: its rows are written in place at `cells` [R, Q], a tensor on the device that is set
    before the forward, and attention gets all cells. Who attends must leave out the cells not in use; their
    weight is then exactly 0, so what they hold does not matter as long as it is finite.

    `stores` [n, R, heads, capacity, d]: all keys and values of one shape, so that moving is one operation.
    """

    def __init__(self, target: Target, rows: int, capacity: int) -> None:
        self.capacity = capacity
        self.rows = torch.arange(rows, device=target.device)[:, None]
        self.cells = torch.zeros(rows, 1, dtype=torch.long, device=target.device)
        probe: Any = _empty(target)
        with torch.no_grad():  # one token: a config does not say how many heads have keys in every family
            run_cached(target, probe, self.cells[:1], self.cells[:1])
        shapes = [tuple(part.shape[1::2]) for layer in probe.layers for part in (layer.keys, layer.values)]
        options: Any = {"dtype": target.dtype, "device": target.device}
        stores = {
            (heads, size): torch.zeros(shapes.count((heads, size)), rows, heads, capacity, size, **options)
            for heads, size in shapes
        }
        self.stores = list(stores.values())
        views = {shape: iter(store) for shape, store in stores.items()}
        parts = [next(views[shape]) for shape in shapes]
        super().__init__(layers=[_StaticLayer(self, *pair) for pair in zip(parts[::2], parts[1::2])])

    def load(self, cache: DynamicCache, length: int) -> None:
        """Take over the first `length` keys and values of a growing cache of as many rows."""
        layers: list[Any] = self.layers
        for own, layer in zip(layers, attention_layers(cache), strict=True):
            own.keys[:, :, :length] = layer.keys[:, :, :length]
            own.values[:, :, :length] = layer.values[:, :, :length]

    def move(self, source: Tensor, cells: Tensor) -> None:
        """Copy keys and values from cells `source` [n] to `cells` [n], in every layer at once."""
        for store in self.stores:
            store.index_copy_(3, cells, store.index_select(3, source))


class _StaticLayer(CacheLayerMixin):
    """One layer's cells [R, heads, capacity, d], views of the whole store."""

    is_sliding = False

    def __init__(self, cache: StaticCache, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self._cache = cache
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the cells exist from the start."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the forward's rows [R, heads, Q, d] at the cache's cells; return all cells."""
        assert self.keys is not None and self.values is not None
        if len(self._cache.rows) == 1:  # verification 5 % faster than scattering rows and cells
            self.keys.index_copy_(2, self._cache.cells[0], key_states)
            self.values.index_copy_(2, self._cache.cells[0], value_states)
            return self.keys, self.values
        place = (self._cache.rows, slice(None), self._cache.cells)
        self.keys[place] = key_states.transpose(1, 2)
        self.values[place] = value_states.transpose(1, 2)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.capacity, 0

    def get_seq_length(self) -> int:
        return self._cache.capacity

    def get_max_length(self) -> int:
        return self._cache.capacity
