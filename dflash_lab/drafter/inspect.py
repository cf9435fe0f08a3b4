"""One real packed row as plain data, so that a person can see what its blocks see (no weights involved)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dflash_lab.drafter.attention import block_mask
from dflash_lab.drafter.config import SLIDING, DrafterConfig
from dflash_lab.drafter.rows import Bare, Items, PackedRows

SHOWN = 160  # tokens of the document


def inspect_row(
    items: Items | Bare,
    config: DrafterConfig,
    context_tokens: int,
    anchors: int,
    seed: int,
    decode: Callable[[int], str] | None,
) -> dict[str, Any]:
    """The first document with anchors of the first training row: its tokens, anchors, and each layer kind's
    rule.

    `low[i][k] <= p < anchors[i]` is the context that slot k of block i sees; `block[k][j]` says whether slot
    k sees slot j of its own block.
    """
    source = PackedRows(
        items,
        np.flatnonzero(~np.asarray(items.heldout)),
        config,
        context_tokens=context_tokens,
        anchors=anchors,
        seed=seed,
    )
    row = source.row(0, 0)
    layout = row.layout
    filled = [s for s in layout.segments if s.block_stop > s.block_start]
    if not filled:
        return {"tokens": [], "texts": [], "anchors": [], "kinds": [], "documents": len(layout.segments)}
    segment = filled[0]
    start, blocks = segment.context_start, slice(segment.block_start, segment.block_stop)
    shown = min(segment.context_stop - start, SHOWN)
    keep = layout.anchors[blocks] - start < shown
    ids = row.input_ids[start : start + shown].tolist()
    kinds = []
    for name in dict.fromkeys(config.layer_types):
        layers = [i for i, kind in enumerate(config.layer_types) if kind == name]
        mask = config.layer_mask(layers[0])
        low, _ = layout.visible(mask.window)
        kinds.append(
            {
                "name": "sliding" if name == SLIDING else "full",
                "layers": layers,
                "window": mask.window,
                "causal": mask.causal,
                "low": (low[blocks][keep] - start).tolist(),
                "block": block_mask(config.block_size, mask).int().tolist(),
            }
        )
    return {
        "tokens": ids,
        "texts": [decode(token) for token in ids] if decode else [str(token) for token in ids],
        "anchors": (layout.anchors[blocks][keep] - start).tolist(),
        "slot_mask": row.slot_mask[blocks][keep].int().tolist(),
        "block_size": config.block_size,
        "kinds": kinds,
        "documents": len(layout.segments),
        "row_tokens": row.tokens,
        "row_blocks": row.blocks,
    }
