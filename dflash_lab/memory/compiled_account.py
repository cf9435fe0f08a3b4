"""What compiled draft layers keep for their backward (`Drafter.compile_layers`, the default on CUDA).

torch cuts the joint graph of a layer where few bytes cross (min-cut, `torch/_functorch/partitioners.py`):
kept are results of products and of attention, and what a product or attention of the backward reads;
elementwise results between them are made again inside the kernels that need them. So a norm costs its input,
which the stream is anyway, its normed output and a number a row; SwiGLU costs gate, up and their product.
The tests hold these formulas to that cut of the real layer, and to peaks measured on an H200. Letters are
those of `training_account`.
"""

from __future__ import annotations

from typing import Any

from dflash_lab.memory.extraction_account import Live
from dflash_lab.memory.setups import TrainingSetup
from dflash_lab.memory.shapes import dtype_bytes


def compiled_saved(drafter: Any, setup: TrainingSetup, *, remade: bool = False, layers: int = 0) -> Live:
    """Return what the forward of `layers` compiled layers (0: all) keeps, and the context's fc and norm.

    `remade` adds the layer that checkpointing makes again.
    """
    size, hidden, wide = dtype_bytes(setup.dtype), drafter.hidden_size, drafter.intermediate_size
    rows, context, heads, kv_heads = setup.rows, setup.context, drafter.num_heads, drafter.num_kv_heads
    q, kv = heads * drafter.head_dim, kv_heads * drafter.head_dim
    layers = layers or drafter.num_layers
    scales = 4 * (rows * (2 + heads + kv_heads) + context * kv_heads)  # a norm's 1/rms, fp32
    parts = {
        "stream": 2 * rows * hidden * size,
        "norms": 2 * rows * hidden * size + scales,
        "attention": rows * (3 * q + kv) * size + context * kv * size + 2 * (context + rows) * kv * size
        + 4 * rows * heads,
        "MLP": 3 * rows * wide * size,
    }  # fmt: skip
    kept = {name: layers * part for name, part in parts.items()}
    inputs = 0
    if setup.checkpointing == "layers":
        kept = dict(parts) if remade else dict.fromkeys(parts, 0)
        inputs = layers * rows * hidden * size
    elif setup.checkpointing == "mlp":
        kept["MLP"] = parts["MLP"] if remade else 0
    formulas = {
        "stream": "a compiled layer: 2 N H s: its input, and what attention adds",
        "norms": "a compiled layer: 2 N H s normed, a number a row and head",
        "attention": "a compiled layer: N (3 q + kv) s + S kv s + 2 (S + N) kv s + 4 N n_q",
        "MLP": "a compiled layer: 3 N I s: gate, up, product",
    }
    return {
        "fc output and its norm": (2 * context * hidden * size + 4 * context, "2 S H s: before and behind"),
        **{f"draft layers: {name}": (kept[name], formulas[name]) for name in parts},
        "draft layers: inputs": (inputs, "layers x N H s: kept by checkpointing"),
    }
