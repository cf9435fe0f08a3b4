"""A drafter whose layers start as copies of the target's own, for the study's row `warm`.

A draft layer is a layer of the target but for the norms of its queries and keys, whose weights start at the
size that the target's queries and keys have on average. The fused context starts as the last tap. What is
then trained is an ordinary drafter.
"""

from __future__ import annotations

import torch

from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.model import Drafter
from dflash_lab.models.load import Target

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MATRICES = ("gate_proj", "up_proj", "down_proj")


@torch.no_grad()
def warm_drafter(target: Target, config: DrafterConfig, layers: list[int], seed: int) -> Drafter:
    """Draft layer i starts as target layer `layers[i]`."""
    drafter = Drafter(config).initialize(torch.Generator().manual_seed(seed))
    drafter.fit_to_head(target.head.weight)
    incoming = torch.zeros(config.hidden_size)
    for mine, number in zip(drafter.blocks(), layers, strict=True):
        theirs = target.layers[number]
        for name in PROJECTIONS:
            getattr(mine.self_attn, name).weight.copy_(getattr(theirs.self_attn, name).weight)
        for name in MATRICES:
            getattr(mine.mlp, name).weight.copy_(getattr(theirs.mlp, name).weight)
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(mine, name).weight.copy_(getattr(theirs, name).weight)
        scale = theirs.input_layernorm.weight.float()
        for name, norm in (("q_proj", mine.self_attn.q_norm), ("k_proj", mine.self_attn.k_norm)):
            weight = (
                getattr(theirs.self_attn, name).weight.float() * scale
            )  # rows see normed inputs of size 1
            norm.weight.fill_(float(weight.square().sum(1).mean().sqrt()))
        incoming += scale.cpu() / len(layers)
    drafter.hidden_norm.weight.copy_(incoming)
    drafter.fc.weight.mul_(0.1)
    drafter.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
    return drafter
