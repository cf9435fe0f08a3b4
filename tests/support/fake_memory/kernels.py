"""Stand-ins for kernels that cannot run on fake tensors: they allocate what the kernel allocates."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from dflash_lab.memory.shapes import CHUNK, HYBRID_MODULES, Kernels

_RULE = "torch_chunk_gated_delta_rule"


def fla_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    **_unused: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Allocate as flash-linear-attention's forward does (fla-core 0.6), where torch's fallback would count
    chunk tensors twice as large. query, key: [B, L, Hk, K]; value: [B, L, Hv, V]; g, beta: [B, L, Hv].
    """
    query, key, value, g, beta = (x.contiguous() for x in (query, key, value, g, beta))
    batch, length, _heads, key_dim = key.shape
    heads, value_dim = value.shape[-2:]
    query_normed, key_normed = torch.empty_like(query), torch.empty_like(key)
    norms = [torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for x in (query, key)]
    decay = torch.empty_like(g, dtype=torch.float32)
    solved = key.new_empty(batch, length, heads, CHUNK)
    w = key.new_empty(batch, length, heads, key_dim)
    u = torch.empty_like(value)
    states = key.new_empty(batch, -(-length // CHUNK), heads, key_dim, value_dim)
    final = None
    if output_final_state:
        final = torch.empty(batch, heads, key_dim, value_dim, dtype=torch.float32, device=key.device)
    new_values = torch.empty_like(u)
    output = torch.empty_like(new_values)
    # Everything above lives until the forward returns; the output and the final state outlive it.
    del query_normed, key_normed, norms, decay, solved, w, states
    return output, final


def grouped_product(rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Allocate as a grouped matrix product does, of which fake tensors know bf16 only."""
    return rows.new_empty(rows.shape[0], weight.shape[-1], dtype=weight.dtype)


@contextlib.contextmanager
def kernels_of(model_type: str, kernels: Kernels) -> Iterator[None]:
    """Let models of `model_type` run on fake tensors as if `kernels` were used (``"fla"`` or ``"torch"``)."""
    masking = importlib.import_module("transformers.masking_utils")
    with contextlib.ExitStack() as stack:
        # Positions are 0..L-1 in every row here, for which a run on real tensors returns None: fake ones are
        # taken for tracing, which builds a causal mask and loses attention's fused path.
        stack.enter_context(mock.patch.object(masking, "find_packed_sequence_indices", lambda *_, **__: None))
        moe = importlib.import_module("transformers.integrations.moe")
        stack.enter_context(mock.patch.object(moe, "_grouped_mm", grouped_product))
        if model_type in HYBRID_MODULES:
            module = importlib.import_module(HYBRID_MODULES[model_type])
            rule, conv = getattr(module, _RULE), module.causal_conv1d_fn
            chosen = fla_gated_delta_rule if kernels == "fla" else getattr(rule, "__wrapped__", rule)
            stack.enter_context(mock.patch.object(module, _RULE, chosen))
            stack.enter_context(
                mock.patch.object(module, "causal_conv1d_fn", getattr(conv, "__wrapped__", conv))
            )
        yield
