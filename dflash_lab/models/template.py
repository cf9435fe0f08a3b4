"""Conversations as token ids with a mask of what the assistant generates, for any chat template; and
answered anew, turn by turn.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date as Date
from typing import Any, cast

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

from dflash_lab.data.conversations import REASONING, Message
from dflash_lab.data.records import BadRecord
from dflash_lab.errors import InputError

# A template is a program, so where its output comes from is found by experiment, never by a registry of
# templates. An assistant turn begins where the generation prompt of the conversation before it ends: rendered
# with ``add_generation_prompt``, that is a prefix of the text. It ends where the text parts from the same
# conversation followed by a generation prompt, less what the two openings have in common; of what stands
# there the first token that closes plain answers is the turn's last, since a model generates that too. Where
# history is shown otherwise than it was generated (thinking taken out of earlier turns), the answer is found
# by putting marks in its place. ``{% generation %}`` blocks may leave parts of a turn out; they cannot add to
# it, for public templates put headers, line breaks and closing tokens of all sorts into them.
#
# Who changes what comes out here, ids or mask, raises `MASK_RULES` of `data.samples`.

# What templates that print the date print: a day of our own choice, or samples would change at midnight.
DATE = "2026-01-01"
_GENERATION = re.compile(r"\{%-?\s*generation\b")
# What a format of a date may hold, padded or (glibc's "-") not.
_DIRECTIVES = [f"%{pad}{letter}" for pad in ("", "-") for letter in "aAbBcdDeFfGHIjmMpRSTuUVwWxXyYZ%"]
# Two marks that share no first and no last letter, so that one of them differs from any content at each end.
_MARKS = ("QZmarkXA", "JVmarkWB")
# A tag, or a word; and how far back one that is cut may begin.
_UNIT = re.compile(r"<[^<>\s]{1,64}>|\[[^\[\]\s]{1,64}\]|\w+|\s|.", re.DOTALL)
_LONGEST_UNIT = 66
_FRAME = 32  # characters by which the end of a turn is known again: its last words and what closes it
_DEEPEST = 200  # levels of a tool's definition or arguments, of which Python's json prints no thousand
# The brackets around thinking are special tokens in some vocabularies; an answer that holds them is sound.
_THOUGHT = re.compile(r"think|thought|reason", re.IGNORECASE)

# What a template, which is a program, may end with.
_REFUSALS = (
    TemplateError,
    TypeError,
    LookupError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class TemplateFailure(BadRecord, InputError):
    """A template refuses a conversation, or what it makes of one cannot be told apart into turns.

    `kind` is the short name it is counted under.
    """

    def __init__(self, message: str, kind: str = "template") -> None:
        super().__init__(kind, message)


@dataclass(frozen=True)
class Rendered:
    """One conversation: token ids [L]; ones [L] on what the assistant generates, closing token included.

    `turns` has the first and the past-the-end token of every assistant turn that is shown, `notes` names what
    the template does not show as it was given, each at most once.
    """

    input_ids: list[int]
    loss_mask: list[int]
    turns: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping] = (),
    thinking: bool = False,
    date: str = DATE,
) -> Rendered:
    """Render `messages` (``{"role": .., "content": str}``, and ``reasoning_content``, ``tool_calls`` where
    there are any) with the tokenizer's chat template.

    The ids equal ``apply_chat_template(messages, tools=tools)``. thinking goes to the template as
    ``enable_thinking`` and ``thinking``; `date` (ISO) is what it prints as today. A greeting before the first
    user turn is left out where the template has no room for it. A token that reaches over the start of an
    answer (one that begins with a line break) is left out of the mask. Raises `TemplateFailure` when the
    template refuses the conversation, does not show an assistant turn or its tool calls, or when a content
    spells a control token.
    """
    return _rendered(_chat(tokenizer, tools=tools, thinking=thinking, date=date), messages)


def _rendered(chat: _Chat, messages: Sequence[Message]) -> Rendered:
    shown, notes = _shown(chat, messages)
    text = chat.text(shown)
    ids, offsets = _with_offsets(chat.tokenizer, text)
    mask = [0] * len(ids)
    turns = []
    for start, end, altered in _turn_spans(chat, shown, text):
        if altered:
            notes.append("turn shown otherwise")
        first, last = _closed(chat, text, ids, offsets, start, end)
        mask[first:last] = [1] * (last - first)
        turns.append((first, last))
    if any(mask) and _GENERATION.search(chat.template):
        mask = _allowed(mask, _blocks(chat, shown, offsets))
    return Rendered(ids, mask, tuple(turns), tuple(dict.fromkeys([*notes, *_unshown(chat, shown, text)])))


def render_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping] = (),
    thinking: bool = False,
    date: str = DATE,
) -> list[int]:
    """Return the ids of `messages` and the opening of an answer; options and errors are `render`'s."""
    return _prompt_ids(_chat(tokenizer, tools=tools, thinking=thinking, date=date), messages)


def _prompt_ids(chat: _Chat, messages: Sequence[Message]) -> list[int]:
    shown, _ = _shown(chat, messages, prompt=True)
    return _encode(chat.tokenizer, chat.text(shown, prompt=True))


def user_frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids before and after the user's words in a prompt of one user turn: what a conversation
    opens with, and the turn's end with the opening of the assistant's.
    """
    chat = _chat(tokenizer)
    prompts = [chat.text(_fitted(chat, [_user(mark)]), prompt=True) for mark in _MARKS]
    first, last = _shared(*prompts), _shared(prompts[0][::-1], prompts[1][::-1])
    return _encode(tokenizer, prompts[0][:first]), _encode(tokenizer, prompts[0][len(prompts[0]) - last :])


def closing_id(tokenizer: Tokenizer, role: str) -> int | None:
    """Return the special token with which the template ends a turn of `role`, or None."""
    chat = _chat(tokenizer)
    if role == "assistant":
        return next(iter(_closers(chat)), None)
    text = chat.text(_fitted(chat, [_user(_MARKS[0])]))
    return next(_specials(tokenizer, text[text.rfind(_MARKS[0]) + len(_MARKS[0]) :]), None)


def template_of(tokenizer: Tokenizer, tools: Sequence[Mapping] = ()) -> str:
    """Return the chat template, of several named ones that for `tools`; `TemplateFailure` if the tokenizer
    has none, or none by the name of "default".
    """
    try:
        return tokenizer.get_chat_template(tools=[dict(tool) for tool in tools] or None)
    except ValueError as error:
        if tokenizer.chat_template:
            raise TemplateFailure(
                f"The chat templates of this tokenizer are named {', '.join(tokenizer.chat_template)}, and "
                'none is "default", so which one to render with is not known. Set tokenizer.chat_template.'
            ) from error
        raise TemplateFailure(
            "This tokenizer has no chat template, so conversations cannot be rendered. Use the "
            "instruction-tuned checkpoint, or set tokenizer.chat_template."
        ) from error


@dataclass(frozen=True)
class _Chat:
    """A template with all that it is rendered with but the messages."""

    tokenizer: Tokenizer
    template: str
    tools: tuple[Mapping, ...] = ()
    thinking: bool = False
    date: str = DATE

    def plain(self) -> _Chat:
        """Return the same without tools."""
        return _Chat(self.tokenizer, self.template, (), self.thinking, self.date)

    def apply(self, messages: Sequence[Message], **options: Any) -> Any:
        """Call the tokenizer; `TemplateFailure` with the template's own words where it refuses."""
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=[dict(tool) for tool in self.tools] or None,
                chat_template=_dated(self.template, self.date),
                enable_thinking=self.thinking,
                thinking=self.thinking,
                **options,
            )
        except _REFUSALS as error:
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateFailure(
                f"The chat template refuses a conversation of roles {roles}: {error}"
            ) from error

    def text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Return what the template prints, with the opening of an answer for a `prompt`."""
        return str(self.apply(messages, tokenize=False, add_generation_prompt=prompt))


def _chat(
    tokenizer: Tokenizer, *, tools: Sequence[Mapping] = (), thinking: bool = False, date: str = DATE
) -> _Chat:
    return _Chat(tokenizer, template_of(tokenizer, tools), tuple(tools), thinking, date)


@functools.lru_cache(maxsize=16)
def _dated(template: str, date: str) -> str:
    """Return the template with a clock that stands still: its ``strftime_now`` prints `date` in any format.

    The line break behind the macro is Jinja's to drop; what the template begins with stays.
    """
    if "strftime_now" not in template:
        return template
    try:
        day = Date.fromisoformat(date)
    except ValueError as error:
        raise TemplateFailure(f"date={date!r} is no date. Give year-month-day, as in {DATE}.") from error
    printed = "".join(
        f" | replace({json.dumps(directive)}, {json.dumps(day.strftime(directive))})"
        for directive in _DIRECTIVES
    )
    return f"{{% macro strftime_now(format) -%}}{{{{- format{printed} -}}}}{{%- endmacro %}}\n{template}"


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _shown(
    chat: _Chat, messages: Sequence[Message], *, prompt: bool = False
) -> tuple[list[Message], list[str]]:
    """Return `messages` in the form that the template takes, and notes of what had to be left out."""
    checked = _checked(chat, messages)
    try:
        return _fitted(chat, checked, prompt), []
    except TemplateFailure:
        begin = next((i for i, message in enumerate(checked) if message["role"] == "user"), 0)
        greeted = [message for message in checked[:begin] if message["role"] != "assistant"]
        if len(greeted) == begin:
            raise
        return _fitted(chat, [*greeted, *checked[begin:]], prompt), ["greeting left out"]


def _checked(chat: _Chat, messages: Sequence[Message]) -> list[Message]:
    if not chat.tokenizer.is_fast:
        raise TemplateFailure(
            "A mask needs character offsets, which only tokenizers of the tokenizers library give."
        )
    if not messages:
        raise TemplateFailure("No messages in this conversation.")
    for tool in chat.tools:
        _check_texts("A tool's definition", tool, _control(chat.tokenizer))
    checked = []
    for i, message in enumerate(messages):
        content, role = message.get("content"), message.get("role")
        if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
            texts = [part.get("text") for part in content]
            content = (
                "".join(text for text in texts if isinstance(text, str)) if None not in texts else content
            )
        wordless = content is None and role == "assistant"  # a turn that only calls a tool
        if not (isinstance(content, str) or wordless) or not isinstance(role, str):
            kind = type(content).__name__
            raise TemplateFailure(f"Message {i}: role and content must be text, got {kind} as content.")
        one = {**message, "content": content}
        reasoning = next((one[key] for key in REASONING if one.get(key) is not None), None)
        if reasoning is not None:  # as transformers does since 5.20: each template reads a name of its own
            one = {"thinking": reasoning, **one, "reasoning_content": reasoning}
        # Escapes in arguments that are text are undone when those are read.
        read = [_call(call, as_text=False) for call in one.get("tool_calls") or ()]
        _check_texts(f"Message {i} ({role})", [one, read], _control(chat.tokenizer), role == "assistant")
        checked.append(one)
    return checked


def _check_texts(place: str, value: Any, control: re.Pattern | None, may_think: bool = False) -> None:
    """Raise `TemplateFailure` for a control token that a text in `value` spells, however deep it lies, and
    for what lies deeper than a template can print.
    """
    level = [value]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for one in level:
            if isinstance(one, Mapping):
                below += [*one.keys(), *one.values()]
            elif isinstance(one, list | tuple):
                below += one
            for found in control.finditer(one) if control and isinstance(one, str) else ():
                if not (may_think and _THOUGHT.search(found.group())):
                    raise TemplateFailure(
                        f"{place} spells the control token {found.group()!r}, which would become a real one "
                        "and forge a turn.",
                        "control tokens",
                    )
        level = below
    if level:
        raise TemplateFailure(f"{place} is nested deeper than {_DEEPEST} levels.")


@functools.lru_cache(maxsize=16)
def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    named = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(named | set(tokenizer.all_special_ids))


@functools.lru_cache(maxsize=16)
def _control(tokenizer: Tokenizer) -> re.Pattern | None:
    """Return what finds special tokens spelled in a text, or None for a tokenizer without any."""
    names = [str(tokenizer.convert_ids_to_tokens(i)) for i in _special_ids(tokenizer)]
    spelled = sorted((name for name in names if name.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, spelled))) if spelled else None


def _fitted(chat: _Chat, messages: list[Message], prompt: bool = False) -> list[Message]:
    """Return `messages` in the first form that the template takes whole.

    Templates differ in three things that no standard settles: content as text or as a list of parts,
    arguments of calls as objects or as JSON text, and no content or an empty one beside a call.
    """
    parts = _wants_parts(chat.template, chat.tokenizer)
    calling = any(message.get("tool_calls") for message in messages)
    failures = {}
    for as_text, empty in (
        ((False, None), (True, None), (False, ""), (True, "")) if calling else ((False, ""),)
    ):
        form = [_formed(message, parts, as_text, empty) for message in messages]
        try:
            chat.text(form, prompt=prompt)
            if calling and not _calls_shown(chat, form):
                raise TemplateFailure(
                    "The chat template does not show the tool calls of an assistant turn.",
                    "tool calls not shown",
                )
            return form
        except TemplateFailure as error:
            failures[as_text, empty] = error
    raise failures[False, ""]  # the plainest form, so the words that say most


def _formed(message: Message, parts: bool, as_text: bool, empty: str | None) -> Message:
    content = message["content"]
    if content is None or (not content and message.get("tool_calls")):
        content = empty
    if parts and content is not None:
        content = [{"type": "text", "text": content}]
    one = {**message, "content": content}
    if message.get("tool_calls"):
        one["tool_calls"] = [_call(call, as_text) for call in message["tool_calls"]]
    return one


def _call(call: Mapping, as_text: bool) -> dict[str, Any]:
    function = dict(call["function"]) if isinstance(call.get("function"), Mapping) else dict(call)
    arguments = function.get("arguments", {})
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        # A model's own broken JSON is what it said, and so is an escape of half a character.
        with contextlib.suppress(ValueError, RecursionError):
            read = json.loads(arguments)
            json.dumps(read, ensure_ascii=False).encode()
            arguments = read
    function["arguments"] = arguments
    return {**({"id": call["id"]} if "id" in call else {}), "type": "function", "function": function}


def _calls_shown(chat: _Chat, messages: list[Message]) -> bool:
    """Return whether every call of every turn reaches the text: by calling each by a name of its own."""
    marked: list[Message] = []
    names: list[str] = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            names.append(f"{_MARKS[0]}{len(names)}Z")
            calls.append({**call, "function": {**call["function"], "name": names[-1]}})
        marked.append({**message, "tool_calls": calls} if calls else message)
    text = chat.text(marked)
    return all(name in text for name in names)


@functools.lru_cache(maxsize=64)
def _wants_parts(template: str, tokenizer: Tokenizer) -> bool:
    """Return whether the template shows content as a list of parts only."""
    chat = _Chat(tokenizer, template)
    for content in (_MARKS[0], [{"type": "text", "text": _MARKS[0]}]):
        try:
            if _MARKS[0] in chat.text([{"role": "user", "content": content}]):
                return isinstance(content, list)
        except TemplateFailure:
            continue  # the conversation itself will be refused, in the template's words
    return False


def _with_content(message: Message, text: str) -> Message:
    """Return the message with `text` as its content, in the form that its content had."""
    parts = isinstance(message["content"], list)
    return {**message, "content": [{"type": "text", "text": text}] if parts else text}


def _content(message: Message) -> str:
    content = message["content"]
    return content[0]["text"] if isinstance(content, list) else content or ""


def _turn_spans(chat: _Chat, messages: list[Message], text: str) -> Iterator[tuple[int, int, bool]]:
    """Yield `_turn_span` of every assistant turn."""
    end = 0
    for turn in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
        start, end, altered = _turn_span(chat, messages, turn, text, end)
        yield start, end, altered


def _turn_span(chat: _Chat, messages: list[Message], turn: int, text: str, low: int) -> tuple[int, int, bool]:
    """Return the characters start..end of `text` that assistant turn `turn` and its closing are, and whether
    it stands there otherwise than when it was generated. `low` is where the turn before ended.
    """
    message, last = messages[turn], turn == len(messages) - 1
    prompt = _prompt_text(chat, messages[:turn])
    exact = prompt is not None and text.startswith(prompt)
    start = len(prompt) if prompt is not None and exact else low
    agreed = len(text) if last else _agreed(text, _ended_text(chat, messages[: turn + 1]) or "")
    if message.get("tool_calls"):
        end = _calls_end(chat, messages[: turn + 1], text, start)
        if exact:
            return start, end, agreed < end
        content = text.find(_content(message), low, end) if _content(message) else end
    else:
        end = agreed if last else _without_opening(chat, text, agreed)
        if exact and _content(message).strip() in text[start:end]:
            return start, end, False
        content, end = _marked(chat, messages, turn, text)
        if last:
            end = len(text)
        else:
            marked = [*messages[:turn], _with_content(message, _MARKS[0])]
            end = _without_opening(chat, text, end + _agreed(text[end:], _after_mark(chat, marked)), end)
    if prompt is not None and not exact:
        start = _opened(chat, prompt, text, low, content)
        before = prompt.removesuffix(_opening(chat.plain()))[-_FRAME:]
        if before.strip() and before in text[start:end]:
            raise TemplateFailure(
                f"Where assistant turn {turn} begins cannot be told: the chat template prints what stands "
                "before it otherwise with the turn than without, so no mask."
            )
        return start, end, True
    return (start if exact else _with_blank(text, content)), end, not last


def _after_mark(chat: _Chat, messages: list[Message]) -> str:
    """Return what follows the last mark where `messages` end; empty if there is none."""
    _, mark, rest = (_ended_text(chat, messages) or "").rpartition(_MARKS[0])
    return rest if mark else ""


def _calls_end(chat: _Chat, messages: list[Message], text: str, start: int) -> int:
    """Return where in `text` the calls of the last of `messages` and the turn's closing end.

    What follows a call's name is found by giving it another name: its arguments and the closing, which stand
    in the text as they are.
    """
    *calls, call = messages[-1]["tool_calls"]
    name = call["function"]["name"]
    renamed = {**call, "function": {**call["function"], "name": _MARKS[0]}}
    rest = _after_mark(chat, [*messages[:-1], {**messages[-1], "tool_calls": [*calls, renamed]}])
    shown = name + rest[: _without_opening(chat, rest, len(rest))]
    place = text.find(shown, start) if rest else -1
    if place < 0:
        raise TemplateFailure(
            f"The chat template shows the call of {name!r} otherwise in history than at the end: no mask.",
            "tool calls not shown",
        )
    return place + len(shown)


def _prompt_text(chat: _Chat, messages: list[Message]) -> str | None:
    """Return the text up to an answer to `messages`, or None where the template has no such prompt."""
    try:
        return chat.text(messages, prompt=True) if messages else None
    except TemplateFailure:
        return None


def _ended_text(chat: _Chat, messages: list[Message]) -> str | None:
    """Return the text of `messages`, with the opening of an answer where the template opens one there; None
    where it refuses both (what must follow is the result of a call, say).
    """
    try:
        return _prompt_text(chat, messages) or chat.text(messages)
    except TemplateFailure:
        return None


def _without_opening(chat: _Chat, text: str, end: int, low: int = 0) -> int:
    """Return `end` less the opening of the next turn, of which the texts of two different next turns may
    share the first characters (``<|start|>`` of ``<|start|>user`` and ``<|start|>assistant``)."""
    opening = _opening(chat.plain())
    common = next((n for n in range(len(opening), 0, -1) if text.endswith(opening[:n], low, end)), 0)
    return end - common


@functools.lru_cache(maxsize=64)
def _opening(chat: _Chat) -> str:
    """Return what the template prints to open an answer, empty if nothing."""
    asked = _fitted(chat, [_user(_MARKS[0])])
    prompt = chat.text(asked, prompt=True)
    return prompt[_agreed(prompt, chat.text(asked)) :]


def _opened(chat: _Chat, prompt: str, text: str, low: int, content: int) -> int:
    """Return where in `text` the opening of an answer ends whose content begins at `content`, though `prompt`
    is not how the text begins: the opening holds more than the turn shows later, or the history differs.
    """
    opening = _opening(chat.plain())
    if not opening or not prompt.endswith(opening):
        return _with_blank(text, content)
    agreed = _agreed(prompt, text)
    if agreed > len(prompt) - len(opening):
        return max(low, min(content, agreed))
    least = _UNIT.match(opening)
    for n in range(len(opening), least.end() if least else 0, -1):
        place = text.rfind(opening[:n], low, content)
        if place >= 0:
            return place + _agreed(opening, text[place:])
    return _with_blank(text, content)


def _with_blank(text: str, start: int) -> int:
    """Return where an answer begins that nothing opens: with the blank before it, as words' tokens have."""
    return start - 1 if text[start - 1 : start] == " " else start


def _agreed(a: str, b: str) -> int:
    """Return how many first characters two texts share in whole words and tags (<think>, <tool>: 0)."""
    end = _shared(a, b)
    if end < len(a):
        for unit in _UNIT.finditer(a, max(0, end - _LONGEST_UNIT)):
            if unit.start() < end < unit.end():
                return unit.start()
    return end


def _marked(chat: _Chat, messages: list[Message], turn: int, text: str) -> tuple[int, int]:
    """Return the characters start..end of `text` that depend on the content of assistant turn `turn`."""
    start, tail = len(text), len(text)
    for mark in _MARKS:
        other = chat.text([*messages[:turn], _with_content(messages[turn], mark), *messages[turn + 1 :]])
        if mark not in other:
            raise TemplateFailure(
                f"The chat template does not show the content of assistant turn {turn}, so no mask."
            )
        start = min(start, _shared(text, other))
        tail = min(tail, _shared(text[::-1], other[::-1]))
    return start, max(start, len(text) - tail)


def _shared(a: Sequence, b: Sequence) -> int:
    """Return how many first elements two sequences share, by bisection (a loop over characters is slow)."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _closed(
    chat: _Chat, text: str, ids: list[int], offsets: list[tuple[int, int]], start: int, end: int
) -> tuple[int, int]:
    """Return the tokens that lie inside characters start..end of `text`, up to the turn's closing token."""
    first = next((t for t, (a, _) in enumerate(offsets) if a >= start), len(offsets))
    last = next((t for t, (_, b) in enumerate(offsets) if b > end), len(offsets))
    special, closers = _special_ids(chat.tokenizer), _closers(chat.plain())

    def blank(t: int) -> bool:
        return not text[slice(*offsets[t])].strip()

    tail = last
    while tail > first and (ids[tail - 1] in special or blank(tail - 1)):
        tail -= 1
    ending = [t for t in range(tail, last) if ids[t] in special]
    closing = next((t for t in ending if ids[t] in closers), ending[-1] if ending else None)
    return first, max(first, tail if closing is None else closing + 1)


@functools.lru_cache(maxsize=64)
def _closers(chat: _Chat) -> tuple[int, ...]:
    """Return the special tokens that end a plain answer: as the last turn, and before another one."""
    said = _fitted(chat, [_user(_MARKS[0]), {"role": "assistant", "content": _MARKS[1]}])
    found: dict[int, None] = {}
    for prompt in (False, True):
        text = _prompt_text(chat, said) if prompt else chat.text(said)
        if text is None or _MARKS[1] not in text:
            continue
        end = _without_opening(chat, text, len(text)) if prompt else len(text)
        found.update(
            dict.fromkeys(
                [*_specials(chat.tokenizer, text[text.rfind(_MARKS[1]) + len(_MARKS[1]) : end])][:1]
            )
        )
    return tuple(found)


def _specials(tokenizer: Tokenizer, text: str) -> Iterator[int]:
    """Yield the special tokens that a text holds, up to the first other token that is not blank."""
    for token in _encode(tokenizer, text):
        if token in _special_ids(tokenizer):
            yield token
        elif str(tokenizer.decode([token])).strip():
            return


def _with_offsets(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the ids of a text and the characters that each stands for."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return cast(list[int], encoded["input_ids"]), cast(list[tuple[int, int]], encoded["offset_mapping"])


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return cast(list[int], tokenizer(text, add_special_tokens=False)["input_ids"])


def _blocks(chat: _Chat, messages: list[Message], offsets: list[tuple[int, int]]) -> list[int]:
    """Return ones [L] inside the template's own ``{% generation %}`` blocks."""
    encoded = chat.apply(messages, return_dict=True, return_assistant_tokens_mask=True)
    mask = list(cast(dict[str, list[int]], encoded)["assistant_masks"])
    if len(mask) != len(offsets) or not any(mask):
        raise TemplateFailure(
            "The template has generation blocks, but they mark nothing of this conversation."
        )
    for t in range(1, len(mask)):
        if (
            offsets[t] == offsets[t - 1]
        ):  # a character of several tokens, of which some versions mark the first
            mask[t] = mask[t] or mask[t - 1]
    return mask


def _allowed(mask: list[int], blocks: list[int]) -> list[int]:
    """Return `mask` where the blocks agree; the closing token stays with an answer that a block holds."""
    kept = [a & b for a, b in zip(mask, blocks, strict=True)]
    for t in range(1, len(mask)):
        ends = mask[t] and (t + 1 == len(mask) or not mask[t + 1])
        if ends and kept[t - 1]:
            kept[t] = 1
    return kept


def _unshown(chat: _Chat, messages: list[Message], text: str) -> Iterator[str]:
    """Yield notes on what was given and is not in the text."""
    for message in messages:
        reasoning = message.get("reasoning_content")
        if isinstance(reasoning, str) and reasoning.strip() and reasoning.strip() not in text:
            yield "reasoning not shown"
    for tool in chat.tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and str(function.get("name")) not in text:
            yield "tools not shown"


# ---- A conversation whose answers are given anew, one after another, as in a chat with the target ----
# An answer enters the next prompt as a chat would have it: as a message, thinking and content each in its
# field, which the template shows in its own way. A call of a tool is kept token for token instead, as calls
# have no common form: what the template puts between a call and the next answer (the tool's recorded result)
# is taken from the recorded conversation and set behind it.


class Dialogue:
    """`messages` of a record, of which all answers are replaced: `prompt`, `answer`, `prompt`, ... until
    `prompt` returns None.

    Results of tools stay as they are recorded. Where the recorded assistant called tools and the new answer
    does not call the same ones, the results that follow answer no call, and the conversation ends there.
    All of it may raise `TemplateFailure`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping] = (),
        thinking: bool = False,
        date: str = DATE,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._chat = _chat(tokenizer, tools=tools, thinking=thinking, date=date)
        self._stop_ids = stop_ids
        self.ids: list[int] = []  # the last prompt
        self.tokens: list[int] = []  # the last answer
        self.notes: list[str] = []
        self._ahead = _steps(messages)
        self._given: Message | None = None  # the recorded answer in the place of the next one
        self._history: list[Message] = []
        self._cut: list[bool] = []  # of each answer in the history, whether it met its limit
        self._asked: list[Message] = []  # the history that the last prompt shows
        self._mask: list[int] | None = None  # of the last prompt, once it is more than the template's text

    def prompt(self) -> list[int] | None:
        """Return the ids up to the next answer, None after the last."""
        if not self._ahead:
            return None
        before, self._given = self._ahead.pop(0)
        called = bool(self._history) and bool(self._history[-1].get("tool_calls"))
        self._history += before
        if called or self._mask is not None:
            closed = not self._cut[-1]
            between = _after(self._chat, self._history, closed)
            self._mask = [*self._prompt_mask(), *[1] * len(self.tokens), *[0] * len(between)]
            self.ids = [*self.ids, *self.tokens, *between]
        else:
            self.ids = _prompt_ids(self._chat, self._history)
        self._asked = list(self._history)
        return self.ids

    def answer(self, tokens: list[int]) -> None:
        """Take the answer to the last prompt: new ids, closing token included."""
        self.tokens = tokens
        closed = bool(tokens) and tokens[-1] in self._stop_ids
        text = str(self._chat.tokenizer.decode(tokens[:-1] if closed else tokens))
        self._cut.append(not closed)
        calls = (self._given or {}).get("tool_calls") or []
        if calls and self._ahead and self._ahead[0][0][0]["role"] == "tool":
            opening = _call_opening(self._chat, calls[0])
            if closed and all(opening + call["function"]["name"] in text for call in calls):
                self._history.append(self._given or {})
            else:
                self.notes.append("call not made")
                self._ahead.clear()
        elif self._ahead:
            self._history.append(_message(self._chat, text))

    def finished(self) -> tuple[list[int], list[int], bool]:
        """Return ids [L] and assistant mask [L] of the whole, and whether the last answer met its limit.

        The last answer and calls are masked by their own tokens, earlier answers where the template shows
        them at the prompt's start; a closing token that it puts behind one that was cut is not the target's.
        """
        mask = [*self._prompt_mask(), *[1] * len(self.tokens)]
        return [*self.ids, *self.tokens], mask, self._cut[-1]

    def _prompt_mask(self) -> list[int]:
        if self._mask is not None:
            return self._mask
        mask: list[int] = []
        if any(message["role"] == "assistant" for message in self._asked):
            earlier = _rendered(self._chat, self._asked)
            shown = self.ids[: len(earlier.input_ids)] == earlier.input_ids
            mask = list(earlier.loss_mask) if shown else []
            for (_, end), cut in zip(earlier.turns if shown else (), self._cut, strict=False):
                if cut and self.ids[end - 1] in self._stop_ids:
                    mask[end - 1] = 0
        return [*mask, *[0] * (len(self.ids) - len(mask))]


def _steps(messages: Sequence[Message]) -> list[tuple[list[Message], Message | None]]:
    """Return what precedes each answer, with the recorded answer. Of answers in a row the first stands for
    all, or the last that calls a tool; a greeting before the first question is left out.
    """
    steps: list[tuple[list[Message], Message | None]] = []
    before: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            before.append(message)
        elif any(earlier["role"] in ("user", "tool") for earlier in before):
            steps.append((before, message))
            before = []
        elif steps and not before and message.get("tool_calls"):
            steps[-1] = (steps[-1][0], message)
    if any(earlier["role"] in ("user", "tool") for earlier in before):
        steps.append((before, None))
    return steps


def _after(chat: _Chat, messages: Sequence[Message], closed: bool) -> list[int]:
    """Return the ids of a prompt from where the last assistant turn ends: behind its closing token, or with
    it for a turn that is not `closed`.
    """
    shown, _ = _shown(chat, messages, prompt=True)
    text = chat.text(shown, prompt=True)
    *_, (start, end, _) = _turn_spans(chat, shown, text)
    ids, offsets = _with_offsets(chat.tokenizer, text)
    _, last = _closed(chat, text, ids, offsets, start, end)
    return ids[last - (not closed and ids[last - 1] in _special_ids(chat.tokenizer)) :]


def _message(chat: _Chat, text: str) -> Message:
    """Return the message that an answer is which reads `text`: content, and thinking where the template has a
    place for it and the text has its brackets.
    """
    for before, between in _frames(chat.plain()):
        if not text.startswith(before.strip()):
            continue
        rest = text.removeprefix(before if text.startswith(before) else before.strip())
        if not between:
            return {"role": "assistant", "content": rest}
        thought, found, content = rest.partition(between if between in rest else between.strip())
        if found:
            return {"role": "assistant", "content": content, "reasoning_content": thought}
    return {"role": "assistant", "content": text}


@functools.lru_cache(maxsize=16)
def _frames(chat: _Chat) -> tuple[tuple[str, str], ...]:
    """Return what a template prints before and between thinking and content, then before content alone."""
    thought, content = _MARKS
    frames = []
    for extra in ({key: thought for key in REASONING}, {}):
        said = _fitted(chat, [_user("?"), {"role": "assistant", "content": content, **extra}])
        text = chat.text(said)
        ((start, end, _),) = _turn_spans(chat, said, text)
        before, found, rest = text[start:end].partition(thought if extra else content)
        between = rest.partition(content)[0] if extra else ""
        if found and (between.strip() if extra else before.strip()):
            frames.append((before, between))
    return tuple(frames)


def _call_opening(chat: _Chat, call: Mapping) -> str:
    """Return the last words before a tool's name where the template shows a call like `call`."""
    named = {**call, "function": {"name": _MARKS[0], "arguments": {}}}
    said = _fitted(chat, [_user("?"), {"role": "assistant", "content": None, "tool_calls": [named]}])
    text = chat.text(said)
    ((start, _, _),) = _turn_spans(chat, said, text)
    return text[start : text.index(_MARKS[0], start)].rpartition("\n")[2]
