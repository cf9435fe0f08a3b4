"""Which of the two ways to decode serves a method: at fixed shapes with CUDA graphs, or with a growing cache.

Both give the same greedy tokens. Fixed shapes need a CUDA device (without graphs they only compute masked
cells on top), greedy choice and a target whose cache has a fixed form; everything else takes the growing
cache. Plain decoding takes the same way as what is compared with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dflash_lab.acceptance.decode import Decoded, decode, plain_decode
from dflash_lab.acceptance.static_cache import why_not
from dflash_lab.acceptance.static_decode import StaticDecoder, Workspace
from dflash_lab.drafter.model import Drafter
from dflash_lab.target.model import Target

Method = Callable[..., Decoded]  # (prompt_ids, *, max_new_tokens, stop_ids=None, on_round=None)


class Methods:
    """Makes decoding methods for one target under one way of choosing tokens, each with a generator of its
    own from `seed`.

    `workspace`: None with the growing cache, and then `why` says why.
    """

    def __init__(
        self,
        target: Target,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
    ) -> None:
        self.target, self.seed = target, seed
        self._choice = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        self.why = why_not(target)
        if target.device.type != "cuda":
            self.why = f"graphs need a CUDA device, this is {target.device.type}"
        elif temperature > 0:
            self.why = "sampling draws random numbers, which these graphs do not"
        self.workspace = None if self.why else Workspace(target)

    @property
    def sentence(self) -> str:
        """How everything is decoded, for the report."""
        if self.workspace is not None:
            return "Plain and speculative decoding run as CUDA graphs over fixed shapes."
        return f"Plain and speculative decoding run with a growing cache: {self.why}."

    def plain(self) -> Method:
        """One token a forward."""
        if self.workspace is not None:
            return StaticDecoder(self.workspace)
        return partial(plain_decode, self.target, **self.sampling())

    def speculative(self, drafter: Drafter, block_size: int, budget: int = 0) -> Method:
        """Chains, or trees of `budget` nodes."""
        if self.workspace is not None:
            return StaticDecoder(self.workspace, drafter, block_size=block_size, budget=budget)
        options = {"block_size": block_size, "tree_budget": budget, **self.sampling()}
        return partial(decode, self.target, drafter, **options)

    def sampling(self) -> dict[str, Any]:
        """The options of `decode` that say how tokens are chosen."""
        return {**self._choice, "generator": torch.Generator(self.target.device).manual_seed(self.seed)}
