"""transformers' growing cache of a target's keys, values and states, for the layers that are known to keep
all of theirs in it.
"""

from __future__ import annotations

import inspect

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
            "cache is known that keeps what they need. What needs none works: extraction, training, and "
            "metrics on stored answers (acceptance.offline)."
        )
    # Without a config every layer keeps everything: a config may have a window that no layer looks at.
    plain = all(span == Span() for span in target.spans)
    return DynamicCache() if plain else DynamicCache(config=target.config)
