"""What extraction's fused layers (`extraction/fast/layers.py`) hold at the worst moment of their mixers.

Projections of one input are one tensor there, filled up to whole tiles, and no key is repeated. Their
feed-forward holds what transformers' own does. T = batch x length, s bytes an element.
"""

from __future__ import annotations

from dflash_lab.memory.setups import ExtractionSetup
from dflash_lab.memory.shapes import CHUNK, LINEAR, SLIDING, TargetShape

Live = dict[str, tuple[int, str]]
_TILE = 128  # columns: extraction/fast/merge.py


def fusable(shape: TargetShape, setup: ExtractionSetup, index: int) -> bool:
    """Whether layer `index` gets its fused forward in `setup`."""
    plain = shape.bias or shape.output_bias or shape.layer_types[index] == SLIDING
    plain = plain or index in setup.plain_layers
    return setup.fused and not plain and not setup.mask and not setup.use_cache


def fused_mixer(shape: TargetShape, setup: ExtractionSetup, index: int, size: int) -> list[tuple[str, Live]]:
    """Return the worst moment of a fused attention or gated delta net."""
    tokens, delta = setup.tokens, shape.delta
    if shape.layer_types[index] == LINEAR and delta is not None:
        heads = delta.value_heads
        columns = _tiles(delta.conv_channels + delta.values + 2 * heads)
        each = columns + 2 * delta.keys + delta.values
        each += heads * (CHUNK + delta.key_dim) + 2 * delta.values
        padded = setup.batch * CHUNK * -(-setup.length // CHUNK)
        states = padded // CHUNK * heads * delta.key_dim * delta.value_dim * size
        live: Live = {
            "gated delta net": (
                tokens * (each * size + heads * 8),
                "T (merged qkv z b a, q, k, v, 64-blocks, w, u, new v) s",
            ),
            "gated delta net chunk states": (states, "B 64 ceil(L/64) x n_v k v s / 64"),
        }
        return [("gated delta rule", live)]
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    columns = _tiles(q * (2 if shape.gated_attention else 1) + 2 * kv)
    each = columns + q + kv + q + (q if shape.gated_attention else 0) + shape.hidden
    held = tokens * (each * size + shape.heads * 4)
    formula = "T (merged q k v, q, k, output" + (", gated" if shape.gated_attention else "") + ", H) s"
    return [("the output projection", {"attention": (held, formula)})]


def _tiles(columns: int) -> int:
    return -(-columns // _TILE) * _TILE
