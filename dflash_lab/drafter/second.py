"""What DFlash 2 adds: slots talk to their left neighbours twice a layer, and drafted tokens are chosen in
order.

The convolution is causal over the slots of one block (never across blocks, never over context), with a kernel
that is a learned base plus a part computed from the input for each group of channels. The selector rescores
the top candidates of a slot given the token chosen before it, with a rank-r bilinear form between two token
codebooks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_lab.drafter.config import DrafterConfig


def convolve(x: Tensor, delta: Tensor, base: Tensor) -> Tensor:
    """y[i, c] = sum over t of (base[t, c] + delta[i, t, c // g]) * x[i - t, c]; terms before slot 0 are zero.

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
    """score(c) = unary[c] + sum_r P[previous]_r (W h)_r S[c]_r over the top candidates of a slot."""

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
