"""Causal attention that stays inside the documents of a packed row, for a transformers model that calls it by
name.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from dflash_lab.errors import LabError

# A name with "flash" in it means a kernel package to transformers.
ATTENTION = "packed_documents"


class Unpackable(LabError, RuntimeError):
    """This target's attention cannot be kept inside documents here."""


def documents_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document of a packed row, as transformers calls it.

    query [1, nq, S, d], key and value [1, nkv, S, d] -> [1, S, nq, d]. `cu_seq_lens_q` [n+1] i32 are the
    documents' ends (empty ones allowed), `max_length_q` bounds their length.
    """
    if cu_seq_lens_q is None or softcap is not None or s_aux is not None:
        raise Unpackable("its attention hides the documents' bounds, caps its scores or has sinks")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [S, heads, d]
    if query.is_cuda:
        out = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            0.0,
            True,
            False,
            scale=scaling,
            window_size_left=None if sliding_window is None else sliding_window - 1,
            window_size_right=None if sliding_window is None else 0,
        )[0]
        return out[None], None
    ends = cu_seq_lens_q.tolist()
    parts = [
        _attend(q[a:b], k[a:b], v[a:b], scaling, sliding_window) for a, b in itertools.pairwise(ends) if a < b
    ]
    return torch.cat(parts)[None], None


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None) -> Tensor:
    """One document on a CPU: [L, heads, d] -> [L, nq, d]."""
    mask = None
    if window is not None:
        ahead = torch.arange(len(q))[:, None] - torch.arange(len(q))
        mask = (ahead >= 0) & (ahead < window)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[0].transpose(0, 1)


AttentionInterface.register(ATTENTION, documents_attention)
