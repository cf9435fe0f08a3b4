"""How a token is taken from logits or probabilities.

A draw is a race of exponential clocks with the probabilities as rates: the first to ring has exactly its
rate's share of all races. Rates need no common scale, so logits race as they are, in logarithms: four
passes over them, where softmax first would make six. No step waits for the device, as `torch.multinomial`,
which runs the same race, does to check its rates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_lab.errors import InputError

COLDEST, HOTTEST = 1e-4, 1e4  # beyond, logits of -inf or of thousands leave fp32's range


def check_temperature(temperature: float) -> None:
    """`InputError` for a temperature that logits cannot be divided by; 0 is greedy."""
    if temperature != 0 and not COLDEST <= temperature <= HOTTEST:  # NaN is in no range
        raise InputError(
            f"temperature {temperature:g}: give 0 for greedy decoding, or {COLDEST:g} to {HOTTEST:g}."
        )


def choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """Take a token a row, logits [.., V] -> [..]: the most probable at temperature 0, else a draw from
    softmax(logits / temperature).
    """
    if temperature == 0:
        return logits.argmax(-1)
    times = torch.empty_like(logits, dtype=torch.float32).exponential_(generator=generator).log_()
    return torch.sub(times, logits, alpha=1 / temperature, out=times).argmin(-1)


def draw(rates: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw a token a row, [.., V] -> [..], each in proportion to its rate: fp32, not negative, and not all
    zero.
    """
    return (rates / torch.empty_like(rates).exponential_(generator=generator)).argmax(-1)
