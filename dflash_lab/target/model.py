"""A target as the rest of the lab sees it: a frozen body that turns token ids into states, and a head matrix.

The causal-LM class is not used. With body and head apart, one path serves dense, mixture-of-experts, hybrid
and multimodal-wrapped checkpoints, and layers or a head that nobody asked for are never read.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from dflash_lab.errors import InputError
from dflash_lab.target import structure
from dflash_lab.target.head import TargetHead
from dflash_lab.target.identity import identify
from dflash_lab.target.sources import Source, source_stop_ids, source_tokenizer
from dflash_lab.target.spans import Span, layer_spans


class Target:
    """A frozen model that text is drafted for. B batch, L length, H hidden size, V vocabulary.

    body(input_ids=[B, L], use_cache=False).last_hidden_state is [B, L, H], after the final norm.
    """

    def __init__(
        self,
        source: Source,
        config: PretrainedConfig,
        body: PreTrainedModel,
        head_weight: torch.Tensor | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        self.name = source.name
        self.config = config  # text config; num_hidden_layers counts the layers that were loaded
        self.body = body
        self.head_weight = head_weight  # [V, H], or None with with_head=False
        self.device = device
        self.dtype = dtype
        self.seed = seed  # of the random weights; means nothing for a checkpoint
        self._source = source
        self._parts = structure.find_parts(body, config, source.name)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers; a forward hook on layer k sees tap id k."""
        return self._parts.layers

    @property
    def embedding(self) -> nn.Embedding:
        return self._parts.embedding

    @property
    def final_norm(self) -> nn.Module:
        return self._parts.norm

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.embedding.weight.shape[0]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """What each layer attends to."""
        return layer_spans(self.config, self.body)

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers keep a recurrent state instead of keys and values."""
        return any(span.recurrent for span in self.spans)

    @property
    def has_experts(self) -> bool:
        """Whether layers route tokens to experts."""
        return structure.has_experts(self.config)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer; `InputError` for a random target."""
        return source_tokenizer(self._source)

    @cached_property
    def stop_ids(self) -> list[int]:
        """Token ids that end an answer: from the generation config, the config and the tokenizer."""
        return source_stop_ids(self._source, self.config)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What the states of this target depend on, as plain JSON values (see `identity.identify`)."""
        return identify(self._source, seed=self.seed)

    @property
    def head(self) -> TargetHead:
        """Embedding, final norm and head matrix; shares this target's tensors."""
        return TargetHead(self.embedding.weight, self.final_norm, self._weight())

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of what the last decoder layer put out, before the final norm: [.., H] -> [..,
        V].
        """
        return F.linear(self.final_norm(hidden), self._weight())

    def _weight(self) -> torch.Tensor:
        if self.head_weight is None:
            raise InputError(f"{self.name} was loaded with with_head=False and has no logits.")
        return self.head_weight
