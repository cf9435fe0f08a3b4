"""Conversations as token ids with a mask of what the assistant wrote, for any chat template.

A template is a program, so where its output comes from is found by experiment: the assistant's content is
replaced by two different marks, and what stays equal before and after is the template's (``{% generation %}``
blocks are believed where a template has them). This needs no registry of templates, and it sees what really
happens, such as thinking that is removed from earlier turns. The loss starts where the generation prompt ends
and covers the closing end-of-turn token, since a model generates that too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

from dflash_lab.errors import InputError

Message = dict[str, Any]
_GENERATION = re.compile(r"\{%-?\s*generation\b")
# Two marks that share no first and no last letter, so that one of them differs from any content at each end.
_MARKS = ("QZmarkXA", "JVmarkWB")


class TemplateFailure(InputError):
    """A template refuses a conversation, or what it makes of one cannot be told apart into turns."""


@dataclass(frozen=True)
class Rendered:
    """One conversation: token ids [L]; ones [L] on what the assistant generates, closing token included."""

    input_ids: list[int]
    loss_mask: list[int]


def render(tokenizer: Tokenizer, messages: Sequence[Message], *, thinking: bool = False) -> Rendered:
    """Render `messages` (``{"role": .., "content": str}``) with the tokenizer's chat template.

    The ids equal ``apply_chat_template(messages)``. thinking goes to the template as ``enable_thinking`` and
    ``thinking``. A token that reaches over the start of an answer (one that begins with a line break) is left
    out of the mask. Raises `TemplateFailure` when the template refuses the conversation or drops or rewrites
    an assistant turn.
    """
    messages = _checked(tokenizer, messages)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    text = _text(tokenizer, messages, thinking)
    closing = closing_id(tokenizer, "assistant", thinking)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = cast(list[int], encoded["input_ids"])
    offsets = cast(list[tuple[int, int]], encoded["offset_mapping"])
    mask = [0] * len(ids)
    if _GENERATION.search(template_of(tokenizer)):
        spans = _marked_spans(tokenizer, messages, thinking, len(ids)) if turns else []
    else:
        chars = [_answer_span(tokenizer, messages, turn, text, thinking) for turn in turns]
        spans = [_token_span(offsets, start, end) for start, end in chars]
    for first, last in spans:
        last = _closed(ids, last, closing)
        mask[first:last] = [1] * (last - first)
    return Rendered(ids, mask)


def render_prompt(tokenizer: Tokenizer, messages: Sequence[Message], *, thinking: bool = False) -> list[int]:
    """Return the ids of `messages` followed by the template's opening of an assistant turn."""
    text = _text(tokenizer, _checked(tokenizer, messages), thinking, prompt=True)
    return _encode(tokenizer, text)


def user_frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids before and after the user's words in a prompt of one user turn: what a conversation
    opens with, and the turn's end with the opening of the assistant's.
    """
    prompts = [_text(tokenizer, [{"role": "user", "content": mark}], False, prompt=True) for mark in _MARKS]
    first, last = _shared(*prompts), _shared(prompts[0][::-1], prompts[1][::-1])
    return _encode(tokenizer, prompts[0][:first]), _encode(tokenizer, prompts[0][len(prompts[0]) - last :])


def closing_id(tokenizer: Tokenizer, role: str, thinking: bool = False) -> int | None:
    """Return the special token with which the template ends a turn of `role`, or None if it ends turns in
    text.
    """
    return _closing_id(tokenizer, template_of(tokenizer), role, thinking)


@functools.lru_cache(maxsize=16)
def _closing_id(tokenizer: Tokenizer, template: str, role: str, thinking: bool) -> int | None:
    messages = [{"role": "user", "content": _MARKS[0]}]
    if role == "assistant":
        messages.append({"role": "assistant", "content": _MARKS[1]})
    text, last = _text(tokenizer, messages, thinking), messages[-1]["content"]
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    for token in _encode(tokenizer, text[text.rfind(last) + len(last) :]):
        if token in special:
            return token
        if not str(tokenizer.decode([token])).isspace():
            return None
    return None


def template_of(tokenizer: Tokenizer) -> str:
    """Return the chat template; `TemplateFailure` if the tokenizer has none."""
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise TemplateFailure(
            "This tokenizer has no chat template, so conversations cannot be rendered. Use the "
            "instruction-tuned checkpoint, or set tokenizer.chat_template."
        ) from error


def _checked(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[Message]:
    if not tokenizer.is_fast:
        raise TemplateFailure(
            "A mask needs character offsets, which only tokenizers of the tokenizers library give."
        )
    if not messages:
        raise TemplateFailure("No messages in this conversation.")
    checked = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if content is None and message.get("role") == "assistant":
            content = ""  # a turn that only calls a tool
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            kind = type(content).__name__
            raise TemplateFailure(f"Message {i}: role and content must be text, got {kind} as content.")
        checked.append({**message, "content": content})
    return checked


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return cast(list[int], tokenizer(text, add_special_tokens=False)["input_ids"])


def _text(tokenizer: Tokenizer, messages: Sequence[Message], thinking: bool, *, prompt: bool = False) -> str:
    template_of(tokenizer)
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=prompt,
            enable_thinking=thinking,
            thinking=thinking,
        )
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise TemplateFailure(
            f"The chat template refuses a conversation of roles {roles}: {error}"
        ) from error
    return str(text)


def _answer_span(
    tokenizer: Tokenizer, messages: list[Message], turn: int, text: str, thinking: bool
) -> tuple[int, int]:
    """Return the characters start..end of `text` that assistant turn `turn` is, without its closing token."""
    start, tail = len(text), len(text)
    for mark in _MARKS:
        marked = [*messages[:turn], {**messages[turn], "content": mark}, *messages[turn + 1 :]]
        other = _text(tokenizer, marked, thinking)
        if mark not in other:
            raise TemplateFailure(
                f"The chat template does not show the content of assistant turn {turn}, so no mask."
            )
        start = min(start, _shared(text, other))
        tail = min(tail, _shared(text[::-1], other[::-1]))
    end = max(start, len(text) - tail)
    # Where the generation prompt is shorter than the header of the turn (it leaves the opening of thinking
    # to the model), the rest of the header is generated too. That shows only where everything before the turn
    # reads as it did when the turn was generated.
    if turn > 0:
        before = len(_text(tokenizer, messages[:turn], thinking))
        opened = _shared(text, _text(tokenizer, messages[:turn], thinking, prompt=True))
        if opened > before:
            start = min(start, opened)
    return start, end


def _shared(a: str, b: str) -> int:
    """Return how many first characters two texts share, by bisection (a character loop is slow in Python)."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _token_span(offsets: list[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """Return the tokens that lie inside characters start..end as (first, one past the last)."""
    first = next((t for t, (a, _) in enumerate(offsets) if a >= start), len(offsets))
    last = next((t for t, (_, b) in enumerate(offsets) if b > end), len(offsets))
    return first, max(first, last)


def _marked_spans(
    tokenizer: Tokenizer, messages: list[Message], thinking: bool, length: int
) -> list[tuple[int, int]]:
    """Return the token spans of the template's own ``{% generation %}`` blocks."""
    encoded = tokenizer.apply_chat_template(
        messages,
        return_dict=True,
        return_assistant_tokens_mask=True,
        enable_thinking=thinking,
        thinking=thinking,
    )
    mask = cast(dict[str, list[int]], encoded)["assistant_masks"]
    if len(mask) != length or not any(mask):
        raise TemplateFailure(
            "The template has generation blocks, but they mark nothing of this conversation."
        )
    edges = [i for i, (a, b) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _closed(ids: list[int], end: int, closing: int | None) -> int:
    """Return where an answer that ends before token `end` ends with its closing token and any tool call
    before it.
    """
    if closing is None or (end > 0 and ids[end - 1] == closing) or closing not in ids[end:]:
        return end
    return ids.index(closing, end) + 1
