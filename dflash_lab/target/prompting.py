"""Prompts from nothing: let the target write the user's turn, by sampling from its own template's opening.

An instruction-tuned model given only ``<|im_start|>user`` writes what users wrote in its training data, which
is the closest thing to a prompt set of the right distribution when there is none. Given the first words of a
turn as well, it writes turns of that kind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import cast

from dflash_lab.errors import InputError
from dflash_lab.target.generation import generate
from dflash_lab.target.model import Target
from dflash_lab.target.template import closing_id, user_frame

log = logging.getLogger(__name__)
_ROUNDS = 8


def self_prompts(
    target: Target,
    count: int,
    *,
    seed: int = 0,
    temperature: float = 0.8,
    max_new_tokens: int = 64,
    batch: int = 0,
    begin: Sequence[str] = ("",),
    progress: Callable[..., None] | None = None,
) -> list[str]:
    """Return up to `count` different user turns that the target sampled, each ended by the model itself.

    `begin`: first words of the turns, taken in turn, for turns of a kind; they are part of what is returned.
    Turns that run past `max_new_tokens` new ones, are empty or repeat an earlier one are drawn again, in at
    most 8 rounds; a shortfall is logged. Raises `InputError` for a template that closes user turns without a
    special token.
    """
    tokenizer = target.tokenizer
    closing = closing_id(tokenizer, "user")
    if closing is None:
        raise InputError(
            f"{target.name}: its template closes a user turn without a special token, so a sampled turn "
            "never ends. Give prompts from a file."
        )
    opening, _ = user_frame(tokenizer)
    openings = [[*opening, *tokenizer(words, add_special_tokens=False)["input_ids"]] for words in begin]
    special = set(tokenizer.all_special_ids)
    found: dict[str, None] = {}
    for attempt in range(_ROUNDS):
        missing = count - len(found)
        if missing <= 0:
            break
        asked = [openings[i % len(openings)] for i in range(missing)]
        drawn = generate(
            target,
            asked,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed * _ROUNDS + attempt,
            stop_ids=[*target.stop_ids, closing],
            batch=batch,
            progress=progress,
        )
        turns = [
            [*first[len(opening) :], *tokens[:-1]]
            for first, tokens in zip(asked, drawn, strict=True)
            if tokens[-1] == closing and special.isdisjoint(tokens[:-1])
        ]
        for text in cast(list[str], tokenizer.batch_decode(turns)):
            if text := text.strip():
                found.setdefault(text)
    if len(found) < count:
        log.warning("%s: %d of %d user turns after %d rounds", target.name, len(found), count, _ROUNDS)
    return list(found)[:count]


def prompts_of(target: Target, texts: Sequence[str]) -> list[list[int]]:
    """Ids of a conversation of one user turn each, up to where the answer begins: what `render_prompt` gives,
    for many at once.
    """
    if not texts:
        return []
    opening, ending = user_frame(target.tokenizer)
    encoded = cast(list[list[int]], target.tokenizer(list(texts), add_special_tokens=False)["input_ids"])
    return [[*opening, *ids, *ending] for ids in encoded]
