"""The drafter: a few Qwen3-like layers that read the target's hidden states and fill a block of masked slots.

Shapes: S context tokens, A blocks, B slots, H hidden, K taps, nq/nkv query/key heads, d head dimension.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dflash_lab.drafter.attention import Attend, BlockLayout, dense_attend, make_attends, next_block
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.errors import InputError

# What DFlash 2 adds -----------------------------------------------------------------------------------------
# Slots talk to their left neighbours twice a layer, and drafted tokens are chosen in order.


def convolve(x: Tensor, delta: Tensor, base: Tensor) -> Tensor:
    """y[i, c] = sum over t of (base[t, c] + delta[i, t, c // g]) * x[i - t, c]; terms before slot 0 are zero.

    Causal over the slots of one block, never across blocks nor over context; the kernel is a learned base
    plus a part computed from the input for each group of g channels.
    x [A, B, H], delta [A, B, taps, H/g], base [taps, H] -> [A, B, H].
    """
    groups = delta.shape[-1]
    x = x.unflatten(-1, (groups, -1))  # [A, B, H/g, g]
    total = torch.zeros_like(x)
    for t in range(base.shape[0]):
        shifted = F.pad(x[:, : x.shape[1] - t], (0, 0, 0, 0, t, 0)) if t else x
        kernel = base[t].view(groups, -1).to(x.dtype) + delta[:, :, t, :, None]
        total = total + kernel * shifted
    return total.flatten(-2)


class GroupedDynamicCausalConv(nn.Module):
    """A pair of convolutions around a sublayer: `enter` before it, `leave` after it, kernels from one
    projection.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.groups = config.hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, config.conv_kernel_size, config.hidden_size))
        self.kernel_projection = nn.Linear(
            config.hidden_size, 2 * config.conv_kernel_size * self.groups, bias=False
        )

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [A, B, H] -> its convolution and the kernel part for `leave` (both from the unconvolved x)."""
        delta = self.kernel_projection(x).unflatten(-1, (2, -1, self.groups))
        return convolve(x, delta[..., 0, :, :], self.base_kernel[0]), delta[..., 1, :, :]

    def leave(self, x: Tensor, delta: Tensor) -> Tensor:
        """Convolve the sublayer's output with the second kernel."""
        return convolve(x, delta, self.base_kernel[1])


class CandidateSelector(nn.Module):
    """score(c) = unary[c] + sum_r P[previous]_r (W h)_r S[c]_r over the top candidates of a slot: a bilinear
    form of rank r between two token codebooks, given the token chosen before.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def scores(self, unary: Tensor, candidates: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
        """unary and candidates [..., k], hidden [..., H], previous token ids [...] -> scores [..., k]."""
        query = self.predecessor_codebook[previous] * self.hidden_projection(hidden)
        return unary + torch.einsum("...r,...kr->...k", query, self.successor_codebook[candidates])

    def select(self, hidden: Tensor, logits: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Walk the slots from the anchor, greedily: hidden [A, L, H], logits [A, L, V], anchor [A].

        Returns tokens [A, L], candidates [A, L, k] and the scores [A, L, k] they were chosen by.
        """
        unary, candidates = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1)
        previous, tokens, scores = anchor, [], []
        for slot in range(hidden.shape[1]):
            score = self.scores(unary[:, slot], candidates[:, slot], hidden[:, slot], previous)
            previous = candidates[:, slot].gather(-1, score.argmax(-1, keepdim=True))[:, 0]
            tokens.append(previous)
            scores.append(score)
        return torch.stack(tokens, 1), candidates, torch.stack(scores, 1)


# Layers -----------------------------------------------------------------------------------------------------


Rope = tuple[Tensor, Tensor]  # cos, sin [..., d]


class ContextStates(NamedTuple):
    """Fused context ctx [S, H] with its rotary angles: training, where every layer makes its keys and values
    anew.
    """

    states: Tensor
    angles: Rope


class ContextKeys(NamedTuple):
    """Ready context keys and values [S, nkv, d] of one layer: decoding, where they are cached."""

    keys: Tensor
    values: Tensor


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32 and rounded before the product with the weight, as Qwen3 does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rope(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rope:
    """cos and sin [..., d] of absolute positions [...]; angles in fp32, the two halves of d share
    frequencies.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None].float() * (1.0 / theta**exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, angles: Rope) -> Tensor:
    """Rotate x [..., heads, d] by angles [..., d]."""
    cos, sin = (part[..., None, :] for part in angles)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention of block slots over injected context keys and the own block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size, d = config.hidden_size, config.head_dim
        self.head_dim = d
        self.q_proj = nn.Linear(size, config.num_heads * d, bias=False)
        self.k_proj = nn.Linear(size, config.num_kv_heads * d, bias=False)
        self.v_proj = nn.Linear(size, config.num_kv_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_heads * d, size, bias=False)
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)

    def keys_values(self, x: Tensor, angles: Rope) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., nkv, d] of x [..., H]; the same for context and block."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return rotate(k, angles), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def forward(
        self, x: Tensor, angles: Rope, context: ContextStates | ContextKeys, attend: Attend
    ) -> Tensor:
        """x [A, B, H] -> [A, B, H]."""
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), angles)
        k, v = self.keys_values(x, angles)
        kc, vc = self.keys_values(*context) if isinstance(context, ContextStates) else context
        return self.o_proj(attend(q, k, v, kc, vc).flatten(-2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and feed-forward; DFlash 2 wraps each in a dynamic convolution over the block's
    slots.
    """

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        self.mask = config.layer_mask(index)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.attention_conv = GroupedDynamicCausalConv(config) if config.is_dflash2 else None
        self.mlp_conv = GroupedDynamicCausalConv(config) if config.is_dflash2 else None

    def forward(
        self, h: Tensor, angles: Rope, context: ContextStates | ContextKeys, attend: Attend
    ) -> Tensor:
        """h [A, B, H] -> [A, B, H]."""
        x = self.input_layernorm(h)
        if self.attention_conv is None or self.mlp_conv is None:
            h = h + self.self_attn(x, angles, context, attend)
            return h + self.mlp(self.post_attention_layernorm(h))
        y, kernel = self.attention_conv.enter(x)
        h = h + self.attention_conv.leave(self.self_attn(y, angles, context, attend), kernel)
        y, kernel = self.mlp_conv.enter(self.post_attention_layernorm(h))
        return h + self.mlp_conv.leave(self.mlp(y), kernel)


# The drafter ------------------------------------------------------------------------------------------------


class Drafter(nn.Module):
    """A DFlash drafter. Parameters carry the names of the released checkpoints (3 + 11 a layer).

    Tapped target states (K layers, concatenated) are fused once, `ctx = hidden_norm(fc(taps))`, and every
    layer turns the same ctx into keys and values with the projections it uses for the block itself ("K/V
    injection"); ctx is never updated and has no queries. The block [anchor, MASK x (B-1)] enters as rows of
    the target's embedding and leaves through the target's head, both frozen and not stored here. Slot k
    predicts the token AT its own position a + k.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.tap_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.candidate_selector = CandidateSelector(config) if config.is_dflash2 else None
        self.gradient_checkpointing = False  # recompute each layer in the backward pass
        self.compiled = False

    def initialize(self, generator: torch.Generator) -> Drafter:
        """Draw matrices from N(0, initializer_range), norms to one, DFlash 2's convolutions to the
        identity.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("base_kernel"):
                    parameter.zero_()[:, 0] = 1.0
                elif name.endswith("kernel_projection.weight"):
                    parameter.zero_()
                elif parameter.ndim == 1:
                    parameter.fill_(1.0)
                else:
                    deviation = 0.02 if name.endswith("codebook") else self.config.initializer_range
                    parameter.normal_(0.0, deviation, generator=generator)
        return self

    def fit_to_head(self, head: Tensor) -> Drafter:
        """Scale the final norm so that logits over `head` [V, H] start with a standard deviation of 1.

        A tied head has long rows: from norm weights of one, SmolLM2's gives logits of size 11 and a first
        loss of 65 nats where guessing costs 10.8, and the first hundred steps only shrink them.
        """
        with torch.no_grad():
            self.norm.weight.fill_(float(head.float().square().sum(1).mean().rsqrt()))
        return self

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile every layer, attention included, and the two norms outside them, each kind once.

        For rows of one shape (`PackedRows(pad=True)`); parameter names stay as they are. Only `forward` is
        compiled, not the call around it, so hooks (FSDP's gathers) stay outside of the graph.
        """
        for module in (*self.layers, self.norm, self.hidden_norm):
            module.forward = torch.compile(module.forward, backend=backend, dynamic=False)
        self.compiled = True

    def run_plain(self) -> None:
        """Undo `compile_layers`."""
        for module in (*self.layers, self.norm, self.hidden_norm):
            vars(module).pop("forward", None)
        self.compiled = False

    def without_selector(self) -> Drafter:
        """The same weights as a drafter that takes each slot's own best token (DFlash 2; else no change)."""
        view = copy.copy(self)
        view._modules = {**self._modules, "candidate_selector": None}
        return view

    def blocks(self) -> list[Layer]:
        """The layers, typed."""
        return list(self.layers)  # type: ignore[arg-type]

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """Rotary cos and sin of `positions`."""
        return rope(positions, self.config.head_dim, self.config.rope_theta, dtype)

    def context(self, taps: Tensor) -> Tensor:
        """Fuse tapped states [..., S, K*H] into ctx [..., S, H], the input of every layer's context keys and
        values.
        """
        return self.hidden_norm(self.fc(taps))

    def forward(
        self, embeddings: Tensor, taps: Tensor, layout: BlockLayout, attention: str = "auto"
    ) -> Tensor:
        """Hidden states of all blocks of a packed row.

        embeddings [A, B, H]: raw rows of the target's embedding for [anchor, MASK, ...]; taps [S, K*H];
        returns [A, B, H], the input of the target's head (see `logits`). Slot 0, the anchor, predicts
        nothing.
        """
        attends = make_attends(layout, attention)
        ctx = self.context(taps)
        context = ContextStates(ctx, self.angles(layout.positions, ctx.dtype))
        h = self.scaled(embeddings).to(ctx.dtype)
        angles = self.angles(layout.slot_positions, ctx.dtype)
        if self.compiled and torch.is_grad_enabled():
            h = h.detach().requires_grad_()  # like what later layers get, so that all share one graph
        for layer in self.blocks():
            if self.gradient_checkpointing and self.training:
                h = checkpoint(layer, h, angles, context, attends(layer.mask), use_reentrant=False)
            else:
                h = layer(h, angles, context, attends(layer.mask))
        return self.norm(h)

    def scaled(self, embeddings: Tensor) -> Tensor:
        """Apply `input_embedding_scale` to raw embedding rows."""
        scale = self.config.input_embedding_scale
        return embeddings if scale == 1.0 else embeddings * scale

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """Draft logits [..., V] of hidden [..., H] with the target's head [V, H], scaled and soft-capped as
        configured.
        """
        return self.capped(F.linear(hidden, head))

    def capped(self, logits: Tensor) -> Tensor:
        """Apply `output_multiplier` and `final_logit_softcapping`."""
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        if (cap := self.config.final_logit_softcapping) > 0:
            logits = torch.tanh(logits / cap) * cap
        return logits


# Its memory in decoding -------------------------------------------------------------------------------------


def run_blocks(
    drafter: Drafter,
    embeddings: Tensor,
    layout: BlockLayout,
    contexts: Iterable[ContextKeys],
    visible_shift: int = 0,
) -> Tensor:
    """Hidden states [A, B, H] of blocks, from raw embedding rows [A, B, H] and each layer's context keys.

    visible_shift: let blocks see that many more context positions than those before their anchor, and stand
    where they stood (a diagnosis).
    """
    attends = dense_attend(
        replace(layout, anchors=layout.anchors + visible_shift) if visible_shift else layout
    )
    h = drafter.scaled(embeddings).to(drafter.fc.weight.dtype)
    angles = drafter.angles(layout.slot_positions, h.dtype)
    for layer, context in zip(drafter.blocks(), contexts, strict=True):
        h = layer(h, angles, context, attends(layer.mask))
    return drafter.norm(h)


class DraftCache:
    """Context keys and values of one sequence, of every layer; positions 0 .. length-1 are in it.

    A verify round commits some positions and brings their tapped states; `extend` appends them, `block`
    drafts after them. A block's own keys and values live for one call, so a rejected draft leaves nothing
    behind.
    """

    def __init__(self, drafter: Drafter, capacity_tokens: int = 256) -> None:
        config = drafter.config
        self.drafter = drafter
        self.length = 0
        weight = drafter.fc.weight
        shape = (2, config.num_layers, capacity_tokens, config.num_kv_heads, config.head_dim)
        self._store = torch.zeros(shape, device=weight.device, dtype=weight.dtype)  # keys, values

    @torch.no_grad()
    def extend(self, taps: Tensor) -> None:
        """Append the tapped states [n, K*H] of the next n committed positions."""
        count = taps.shape[0]
        self._reserve(self.length + count)
        ctx = self.drafter.context(taps.to(self._store.dtype))
        positions = torch.arange(self.length, self.length + count, device=ctx.device)
        angles = self.drafter.angles(positions, ctx.dtype)
        for index, layer in enumerate(self.drafter.blocks()):
            k, v = layer.self_attn.keys_values(ctx, angles)
            self._store[0, index, self.length : self.length + count] = k
            self._store[1, index, self.length : self.length + count] = v
        self.length += count

    def crop(self, length: int) -> None:
        """Keep positions 0 .. length-1 only."""
        if not 0 <= length <= self.length:
            raise InputError(f"crop({length}): the cache holds {self.length} positions.")
        self.length = length

    @torch.no_grad()
    def block(self, embeddings: Tensor) -> Tensor:
        """Hidden states [B, H] of a block whose anchor stands at position `length`; embeddings [B, H] are raw
        rows.
        """
        layout = next_block(self.length, embeddings.shape[0], embeddings.device)
        return self.blocks(embeddings[None], layout)[0]

    @torch.no_grad()
    def blocks(self, embeddings: Tensor, layout: BlockLayout, visible_shift: int = 0) -> Tensor:
        """The same of the blocks of `layout`, [A, B, H]; see `run_blocks`."""
        keys, values = self._store[:, :, : self.length]
        return run_blocks(self.drafter, embeddings, layout, map(ContextKeys, keys, values), visible_shift)

    def _reserve(self, length: int) -> None:
        capacity = self._store.shape[2]
        if length > capacity:
            grown = list(self._store.shape)
            grown[2] = max(length, 2 * capacity)
            store = self._store.new_zeros(grown)
            store[:, :, : self.length] = self._store[:, :, : self.length]
            self._store = store
