"""How a token is taken from logits."""

from __future__ import annotations

import torch
from torch import Tensor


def choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Take a token a row, logits [R, V] -> [R]: the most probable at temperature 0, else a draw from
    softmax(logits / temperature).

    The draw is a race of exponential clocks with the probabilities as rates: the first to ring has exactly
    its rate's share of all races, and no step of it waits for the device.
    """
    if temperature == 0:
        return logits.argmax(-1)
    rates = torch.softmax(logits.float() / temperature, -1)
    return (rates / torch.empty_like(rates).exponential_(generator=generator)).argmax(-1)
