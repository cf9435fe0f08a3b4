"""The gated delta rule by flash-linear-attention's kernels, fed so that no shape makes them compile again.

The library's entry point normalises q and k and sums the decay in kernels that are compiled anew for each
batch size (a second or two, hundreds of times in a long run). Both are done here, in the convolution and in
`delta_gates`, and the three chunk kernels are called directly. They are internals: with a version other than
0.6 the entry point is used.
"""

from __future__ import annotations

import importlib.metadata
import math
from typing import Any

from torch import Tensor

from dflash_lab.extraction.fast.kernels_sequence import delta_gates
from dflash_lab.extraction.fast.reference import Gates

CHUNK = 64
_DIRECT = importlib.metadata.version("fla-core").startswith("0.6.")


def delta_rule(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, gates: Gates) -> Tensor:
    """See `reference.delta_rule`. q, k, v contiguous."""
    return (_chunked if _DIRECT else _by_entry_point)(q, k, v, rows, gates)


def _chunked(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, gates: Gates) -> Tensor:
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
    from fla.ops.common.chunk_o import chunk_fwd_o
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra

    decay, beta = delta_gates(rows, gates, q.shape[0], CHUNK)
    w, u, _ = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=decay, beta=beta, chunk_size=CHUNK)
    states, values, _ = chunk_gated_delta_rule_fwd_h(k=k, w=w, u=u, g=decay, chunk_size=CHUNK)
    del w, u, _  # a batch's peak comes about here
    return chunk_fwd_o(q=q, k=k, v=values, h=states, g=decay, scale=q.shape[-1] ** -0.5, chunk_size=CHUNK)


def _by_entry_point(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, gates: Gates) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    decay, beta = delta_gates(rows, gates, q.shape[0], chunk=1)
    out: Any = chunk_gated_delta_rule(q, k, v, g=decay * math.log(2), beta=beta, output_final_state=False)
    return out[0]
