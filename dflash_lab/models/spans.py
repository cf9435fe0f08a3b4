"""What every layer of a target attends to: the one place that reads it, asked by decoding, generation, fused
layers and memory accounts.

transformers' configs spell it in several ways: a kind a layer (`layer_types`, into which its config classes
turn patterns such as `sliding_window_pattern` and `max_window_layers`), one window for all layers, or
GPT-Neo's `attention_layers`. A window of W tokens is a token and the W - 1 before it. Chunks are cut at
multiples of their length, so a token attends to the earlier ones of its own chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, STATE = "linear_attention", "own_state"
# Kinds whose state is neither keys nor values: gated delta nets and state spaces, convolutions, and layers
# that have a state beside their attention.
RECURRENT = (LINEAR, "mamba", "conv", "hybrid", "hybrid_sliding", STATE)
# Families whose layers do something else than their configs say, for transformers 5.17 to 5.24: Moshi's look
# at no window, MiniMax's full ones do, and its others have a state in a cache of its own class.
_OTHERWISE = {"moshi": {SLIDING: FULL}, "minimax": {FULL: SLIDING, LINEAR: STATE}}


@dataclass(frozen=True)
class Span:
    """What a layer attends to. kind: transformers' name for it. tokens: of its window or chunk, None without
    one. shared: it has no keys and values of its own and reads those of an earlier layer.
    """

    kind: str = FULL
    tokens: int | None = None
    shared: bool = False

    @property
    def recurrent(self) -> bool:
        return self.kind in RECURRENT

    def __str__(self) -> str:
        tokens = f" over {self.tokens} tokens" if self.tokens else ""
        state = ", a recurrent state" if self.recurrent else ""
        return f"{self.kind}{tokens}{state}{' on keys of an earlier layer' if self.shared else ''}"


def layer_spans(config: PretrainedConfig, body: nn.Module | None = None) -> tuple[Span, ...]:
    """Return the span of each layer of a text config.

    A few recurrent models (RWKV) say what they are only in their class, so give their `body` too.
    """
    count = config.num_hidden_layers
    layers: Sequence[Any] = getattr(config, "per_layer_config", None) or [config] * count
    said = getattr(config, "layer_types", None) or _kinds(config, body, layers)
    otherwise = _OTHERWISE.get(config.model_type, {})
    last = getattr(config, "num_kv_shared_layers", 0) or 0
    sharing = getattr(config, "kv_sharing_modes", None) or [None] * (count - last) + ["reuse"] * last
    return tuple(
        _span(otherwise.get(kind, kind), layer, mode == "reuse")
        for kind, layer, mode in zip(said, layers, sharing, strict=True)
    )


def _kinds(config: PretrainedConfig, body: nn.Module | None, layers: Sequence[Any]) -> list[str]:
    """Return the kinds of a config without `layer_types`."""
    if getattr(body, "_is_stateful", False):
        return [STATE] * len(layers)
    if named := getattr(config, "attention_layers", None):  # GPT-Neo
        return [SLIDING if name == "local" else FULL for name in named]
    found = []
    for layer in layers:
        if getattr(layer, "sliding_window", None) and getattr(layer, "use_sliding_window", True):
            found.append(SLIDING)
        else:
            found.append(CHUNKED if getattr(layer, "attention_chunk_size", None) else FULL)
    return found


def _span(kind: str, layer: Any, shared: bool) -> Span:
    tokens = None
    if kind == CHUNKED:
        tokens = getattr(layer, "attention_chunk_size", None)
    elif kind in (SLIDING, "hybrid_sliding"):
        tokens = getattr(layer, "sliding_window", None) or getattr(layer, "window_size", None)
    return Span(FULL if kind == SLIDING and not tokens else kind, tokens, shared)


def besides(spans: Sequence[Span], kinds: Collection[str]) -> str:
    """Name the layers of other `kinds` than these, and those that share keys: "layers 0-2, 4
    (sliding_attention over 16 tokens), layer 3 (linear_attention)". Empty: there are none.
    """
    odd: dict[Span, list[int]] = {}
    for index, span in enumerate(spans):
        if span.kind not in kinds or span.shared:
            odd.setdefault(span, []).append(index)
    return ", ".join(
        f"layer{'s' if len(found) > 1 else ''} {_ranges(found)} ({span})" for span, found in odd.items()
    )


def _ranges(numbers: Sequence[int]) -> str:
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ends)
