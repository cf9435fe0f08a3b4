"""The target's keys and values at a fixed size and address, so that a forward over them can be a CUDA graph.

A graph replays the same kernels on the same addresses: nothing in it may depend on how long the sequence is.
So every layer's keys and values lie in one tensor of `capacity` cells, a forward writes its own rows in place
at cells named by a device tensor, and attention reads all cells under a mask that hides the unused ones. A
masked cell has weight exactly 0, so what it holds does not matter as long as it is finite.

Full attention only. A recurrent state cannot be cut back to the accepted tokens on the device without
running them again, a sliding window forgets cells that a rejection would need, attention that counts places
in the cache would count the unused ones, and experts have shapes that follow the data; `why_not` says which
of these keeps a target on the growing cache.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from dflash_lab.acceptance.rollback import new_cache
from dflash_lab.acceptance.target_run import Step, unmaskable
from dflash_lab.target.cache import cache_keyword
from dflash_lab.target.model import Target
from dflash_lab.target.spans import FULL
from dflash_lab.target.taps import Taps

_LOOKS_AT_POSITIONS = ("dynamic", "longrope")  # rotary angles chosen on the host by the longest position


def why_not(target: Target) -> str:
    """Return why `target` cannot be decoded at fixed shapes; empty if it can."""
    config = target.config
    if why := unmaskable(target, FULL):
        return f"{why}, and only what does can be rolled back at a fixed size"
    if target.has_experts:
        return "its experts are called on as many tokens as are routed to them, which no fixed shape holds"
    if hasattr(config, "kv_lora_rank"):
        return "its attention keeps compressed keys and values"
    rotary = getattr(config, "rope_parameters", None) or {}
    if rotary.get("rope_type") in _LOOKS_AT_POSITIONS:
        return "its rotary angles follow the longest position, which the host must look at"
    return ""


class _Layer(CacheLayerMixin):
    """One layer's cells [1, heads, capacity, d], views of the whole store."""

    is_sliding = False

    def __init__(self, cache: StaticKeys, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self._cache = cache
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the cells exist from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the forward's rows [1, heads, Q, d] at the cache's cells; return all cells."""
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self._cache.cells, key_states)
        self.values.index_copy_(2, self._cache.cells, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.capacity, 0

    def get_seq_length(self) -> int:
        return self._cache.capacity

    def get_max_length(self) -> int:
        return self._cache.capacity


class StaticKeys(Cache):
    """`store` [2N, 1, heads, capacity, d]: keys and values of N layers, in turn. `cells` [Q]: where the next
    forward writes.
    """

    def __init__(self, target: Target, capacity: int) -> None:
        self.target, self.capacity = target, capacity
        self.cells = torch.zeros(1, dtype=torch.long, device=target.device)
        self._keyword = cache_keyword(target.body)
        cache = new_cache(target)
        with torch.no_grad():  # one token: a config does not say how many heads have keys in every family
            target.body(input_ids=self.cells[None], use_cache=True, **{self._keyword: cache})
        keys: Any = cache.layers[0]
        _, heads, _, size = keys.keys.shape
        shape = (2 * target.num_layers, 1, heads, capacity, size)
        self.store = torch.zeros(shape, dtype=target.dtype, device=target.device)
        super().__init__(layers=[_Layer(self, *pair) for pair in self.store.split(2)])

    def load(self, cache: Cache, length: int) -> None:
        """Take over the first `length` keys and values of a growing cache."""
        for own, layer in zip(self.layers, cache.layers, strict=True):
            own.keys[:, :, :length] = layer.keys[:, :, :length]  # type: ignore[index, union-attr]
            own.values[:, :, :length] = layer.values[:, :, :length]  # type: ignore[index, union-attr]

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cells: torch.Tensor,
        seen: torch.Tensor,
        tap_ids: tuple[int, ...],
    ) -> Step:
        """Run `tokens` [Q] at `positions` [Q], stored at `cells` [Q]; row i sees the cells of `seen` [Q,
        capacity].
        """
        mask = torch.zeros(seen.shape, dtype=self.target.dtype, device=seen.device)
        mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)
        self.cells = cells
        options = {"use_cache": True, "attention_mask": mask[None, None], self._keyword: self}
        ids = {"input_ids": tokens[None], "position_ids": positions[None]}
        if not tap_ids:
            return Step(self.target.body(**ids, **options).last_hidden_state[0], None)
        with Taps(self.target.layers, tap_ids) as taps:
            normed = self.target.body(**ids, **options).last_hidden_state[0]
            return Step(normed, torch.cat(taps.take(), dim=-1)[0])

    def move(self, source: torch.Tensor, cells: torch.Tensor) -> None:
        """Copy keys and values from cells `source` [n] to `cells` [n], in every layer at once."""
        self.store.index_copy_(3, cells, self.store.index_select(3, source))
