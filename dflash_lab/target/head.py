"""The head of a target alone: embedding, final norm and head matrix, which is all that training a drafter
needs of it.

The final norm is the model class's own module: Qwen3.5 and Gemma multiply by (1 + w), Llama by w, and a norm
written again here would be wrong for one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class TargetHead:
    """Frozen ends of a target. V vocabulary, H hidden size; all on one device in one dtype."""

    embedding_weight: torch.Tensor  # [V, H], raw: a model that scales its embeddings does so after this
    norm: nn.Module  # the final norm, [.., H] -> [.., H]
    weight: torch.Tensor  # [V, H]; the same tensor as embedding_weight when they are tied

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the raw embedding rows of `ids`: [..] -> [.., H]."""
        return F.embedding(ids, self.embedding_weight)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to the output of the last decoder layer: [.., H] -> [.., H]."""
        return self.norm(hidden)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the logits of normed states: [.., H] -> [.., V]."""
        return F.linear(normed, self.weight)
