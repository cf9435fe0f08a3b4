"""Backward passes that are not differentiable themselves.

PyTorch's `once_differentiable` notices a second derivative only where the incoming gradient depends on
something. That of a plain `loss.backward(create_graph=True)` is the constant 1: a penalty on the gradient
would then be dropped without a word, and training would go on without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dflash_lab.errors import InputError


def first_order(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the `backward` of an autograd function: with create_graph=True it raises `InputError`.

    `what` begins the message, as "the fused loss".
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def checked(*arguments: Any) -> Any:
            if torch.is_grad_enabled():  # a backward pass has it off, except to build a graph of itself
                raise InputError(
                    f"{what} has a first derivative only, and create_graph=True asks for a second: a penalty "
                    "on its gradient would be dropped. Take it without create_graph, or put the penalty on a "
                    "loss of plain torch operations over the logits."
                )
            return backward(*arguments)

        return checked

    return decorate
