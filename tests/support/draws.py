"""Whether drawn tokens follow the target's distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_lab.models.load import Target


@torch.no_grad()
def assert_follows(target: Target, prompt: Sequence[int], drawn: Sequence[int], temperature: float) -> None:
    """Every likely next token of `prompt` is drawn as often as its probability says, to 4.5 deviations."""
    states = target.body(input_ids=torch.tensor([list(prompt)]), use_cache=False).last_hidden_state
    p = torch.softmax(target.head.logits(states[0, -1]) / temperature, -1)
    counts = torch.bincount(torch.tensor(drawn), minlength=p.numel())
    likely = p > 0.02
    spread = (len(drawn) * p * (1 - p)).sqrt()
    assert int(likely.sum()) > 3
    assert ((counts - len(drawn) * p).abs() < 4.5 * spread)[likely].all()
