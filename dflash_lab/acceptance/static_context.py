"""The drafter's context at a fixed size and address: `drafter.cache.DraftCache` for CUDA graphs.

Positions and lengths are device tensors; the block's attention reads all cells under the mask that
`dense_attend` builds from the anchor's position. Rows past the committed ones may be written: the next round
overwrites them before any block can see them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dflash_lab.drafter.attention import BlockLayout, Segment, dense_attend
from dflash_lab.drafter.model import ContextKeys, Drafter, RMSNorm, rotate


class StaticContext:
    """Context keys and values, `store` [2, layers, capacity, heads, d]; a token's cell is its position."""

    def __init__(self, drafter: Drafter, capacity: int) -> None:
        config = drafter.config
        self.drafter, self.capacity = drafter, capacity
        weight = drafter.fc.weight
        shape = (2, config.num_layers, capacity, config.num_kv_heads, config.head_dim)
        self.store = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        # All layers read the same fused states, so their keys and values are one product and one norm.
        attentions = [layer.self_attn for layer in drafter.blocks()]
        both = [a.k_proj.weight for a in attentions] + [a.v_proj.weight for a in attentions]
        self._both = torch.cat(both).detach()
        self._norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        gains = torch.stack([a.k_norm.weight for a in attentions])[:, None]  # [layers, 1, d]
        self._norm.weight = torch.nn.Parameter(gains.detach(), requires_grad=False)

    def extend(self, taps: torch.Tensor, start: torch.Tensor) -> None:
        """Write tapped states [n, K*H] of positions start .. start+n-1; `start` [1] is on the device."""
        ctx = self.drafter.context(taps.to(self.store.dtype))
        cells = start + torch.arange(len(taps), device=taps.device)
        cos, sin = self.drafter.angles(cells, ctx.dtype)
        _, layers, _, heads, size = self.store.shape
        keys, values = F.linear(ctx, self._both).view(-1, 2, layers, heads, size).unbind(1)
        keys = rotate(self._norm(keys), (cos[:, None], sin[:, None]))
        self.store[0].index_copy_(1, cells, keys.transpose(0, 1))
        self.store[1].index_copy_(1, cells, values.transpose(0, 1))

    def block(self, embeddings: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, H] of a block whose anchor stands at position `length` [1]; embeddings [B, H] are
        raw rows.
        """
        device = embeddings.device
        layout = BlockLayout(
            length,
            torch.zeros_like(length),
            torch.arange(self.capacity, device=device),
            (Segment(0, self.capacity, 0, 1),),
            len(embeddings),
        )
        attends = dense_attend(layout)
        h = self.drafter.scaled(embeddings).to(self.store.dtype)[None]
        angles = self.drafter.angles(layout.slot_positions, h.dtype)
        for index, layer in enumerate(self.drafter.blocks()):
            h = layer(h, angles, ContextKeys(self.store[0, index], self.store[1, index]), attends(layer.mask))
        return self.drafter.norm(h)[0]
