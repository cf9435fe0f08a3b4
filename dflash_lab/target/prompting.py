"""Prompts from nothing: let the target write the user's turn, by sampling from its own template's opening.

An instruction-tuned model given only ``<|im_start|>user`` writes what users wrote in its training data, which
is the closest thing to a prompt set of the right distribution when there is none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from dflash_lab.errors import InputError
from dflash_lab.target.generation import generate
from dflash_lab.target.model import Target
from dflash_lab.target.template import closing_id, user_opening

log = logging.getLogger(__name__)
_ROUNDS = 8


def self_prompts(
    target: Target,
    count: int,
    *,
    seed: int = 0,
    temperature: float = 0.8,
    max_new_tokens: int = 64,
    batch: int = 32,
    progress: Callable[..., None] | None = None,
) -> list[str]:
    """Return up to `count` different user turns that the target sampled, each ended by the model itself.

    Turns that run past `max_new_tokens`, are empty or repeat an earlier one are drawn again, in at most 8
    rounds; a shortfall is logged. Raises `InputError` for a template that closes user turns without a special
    token.
    """
    tokenizer = target.tokenizer
    closing = closing_id(tokenizer, "user")
    if closing is None:
        raise InputError(
            f"{target.name}: its template closes a user turn without a special token, so a sampled turn "
            "never ends. Give prompts from a file."
        )
    opening = user_opening(tokenizer)
    found: dict[str, None] = {}
    for attempt in range(_ROUNDS):
        missing = count - len(found)
        if missing <= 0:
            break
        drawn = generate(
            target,
            [opening] * missing,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed * _ROUNDS + attempt,
            stop_ids=[*target.stop_ids, closing],
            batch=batch,
            progress=progress,
        )
        for tokens in drawn:
            if tokens[-1] == closing:
                text = str(tokenizer.decode(tokens[:-1])).strip()
                if text and not set(tokens[:-1]) & set(tokenizer.all_special_ids):
                    found.setdefault(text)
    if len(found) < count:
        log.warning("%s: %d of %d user turns after %d rounds", target.name, len(found), count, _ROUNDS)
    return list(found)[:count]
