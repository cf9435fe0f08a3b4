"""Under which rules a tau was measured. Two taus may be compared only when these agree."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from dflash_lab.target.model import Target
from dflash_lab.target.template import template_of


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What goes into the report beside every tau.

    `prompts` names the set, `count` how many were decoded; an answer ends at a stop token, at
    `max_new_tokens` and, for prompts with a stored answer, at that answer's length. `counts`: tau counts the
    bonus token.
    """

    target: str
    dtype: str
    device: str
    template: str  # first 12 hex digits of the SHA-256 of the chat template, or "none"
    thinking: bool
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    prompts: str
    count: int
    seed: int
    block_size: int
    last_block: str = "full"
    batch: int = 1
    counts: str = (
        "accepted drafts + 1 a round; mean over rounds, then over answers; last round cut at the answer's end"
    )

    @classmethod
    def of(cls, params: Any, target: Target, count: int, block_size: int, thinking: bool) -> Protocol:
        """Return the rules of an evaluation with the stage's `params` of `count` prompts, rendered with
        `thinking` or without.
        """
        own = ("temperature", "top_p", "top_k", "max_new_tokens", "prompts", "seed")
        return cls(
            target=target.name,
            dtype=str(target.dtype).removeprefix("torch."),
            device=str(target.device),
            template="none" if target.name.startswith("random:") else template_id(target),
            count=count,
            block_size=block_size,
            thinking=thinking,
            **{name: getattr(params, name) for name in own},
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def template_id(target: Target) -> str:
    """Return a short identity of the target's chat template."""
    return hashlib.sha256(template_of(target.tokenizer).encode()).hexdigest()[:12]
