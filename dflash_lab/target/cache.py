"""transformers' growing cache of a target's keys, values and states, for the layers that are known to keep
all of theirs in it.
"""

from __future__ import annotations

import inspect
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import DynamicCache

from dflash_lab.errors import UnsupportedTarget
from dflash_lab.target.model import Target
from dflash_lab.target.spans import CHUNKED, FULL, LINEAR, SLIDING, Span, besides

# Others keep an index beside their keys, compress them, or hold a state that no cache of transformers knows.
_GROWING = (FULL, SLIDING, CHUNKED, LINEAR, "conv", "hybrid", "moe", "mlp")


def cache_keyword(body: nn.Module) -> str:
    """Return what this transformers calls a forward's cache: `cache` from 5.24 on, `past_key_values`
    before."""
    return "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"


def growing_cache(target: Target) -> DynamicCache:
    """Return an empty cache for one forward after another; `UnsupportedTarget` where it would be wrong."""
    if odd := besides(target.spans, _GROWING):
        raise UnsupportedTarget(
            f"{target.name}: {odd} of this {target.config.model_type} cannot go on from earlier tokens: no "
            f"cache is known that keeps what they need. {_WITHOUT}"
        )
    if not goes_on(target, 1):
        raise UnsupportedTarget(
            f"{target.name}: the {target.config.model_type} of this transformers does not go on from what "
            f"its cache holds: the next token's state is another than without a cache. {_WITHOUT} Another "
            "version of transformers may do it."
        )
    return _empty(target)


_WITHOUT = (
    "What needs no cache works: extraction, training, and metrics on stored answers (acceptance.offline)."
)
_GOES_ON: WeakKeyDictionary[Target, dict[int, bool]] = WeakKeyDictionary()  # asked once a target


@torch.no_grad()
def goes_on(target: Target, block: int) -> bool:
    """Return whether `block` tokens at once go on from what the cache holds, by trying: some models do so for
    a single token only (Mamba's first scan starts from nothing), some versions of some models not at all, and
    none says so.
    """
    known = _GOES_ON.setdefault(target, {})
    if block not in known:
        ids = torch.randint(target.vocab_size, (1, 24), generator=torch.Generator().manual_seed(0))
        ids, places = ids.to(target.device), torch.arange(24, device=target.device)[None]
        whole = target.body(input_ids=ids, position_ids=places, use_cache=False).last_hidden_state
        cache = {"use_cache": True, cache_keyword(target.body): _empty(target)}
        states = []
        for part in (slice(0, 20), *(slice(start, start + block) for start in range(20, 24, block))):
            out = target.body(input_ids=ids[:, part], position_ids=places[:, part], **cache)
            states.append(out.last_hidden_state)
        errors = (torch.cat(states, 1) - whole).float().norm(dim=-1)[0] / whole.float().norm(dim=-1)[0]
        # A start from nothing spoils every token; rounding sends few of them to other experts.
        worst = max(float(errors[:20].median()), float(errors[20:].min()))
        known[block] = worst < (1e-3 if target.dtype == torch.float32 else 0.05)
    return known[block]


def _empty(target: Target) -> DynamicCache:
    # Without a config every layer keeps everything: a config may have a window that no layer looks at.
    plain = all(span == Span() for span in target.spans)
    return DynamicCache() if plain else DynamicCache(config=target.config)
