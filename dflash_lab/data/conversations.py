"""Conversations in the forms people have them, tokens made elsewhere, and mixtures of several inputs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from dflash_lab.data.records import FIELDS, MAX_RECORD_BYTES, BadRecord, Problem, read_records, storable
from dflash_lab.errors import InputError, near

# ---- Conversations in the forms people have them ----
# A form is registered with the keys it needs and those it may have beside them (of Parquet, no other column
# is read), and turns a record into messages. A record no form knows, or a turn that would lose content (an
# image), is named by file and line and left out; nothing is guessed.

# {"role": system | user | assistant | tool, "content": text}. An assistant's turn may have, as text,
# "reasoning_content", and "tool_calls", [{"type": "function", "function": {"name", "arguments"}}], beside
# which content may be None; a tool's has "tool_call_id" and "name" where they are given.
Message = dict[str, Any]
REASONING = ("reasoning_content", "reasoning", "thinking")

TOKEN_KEYS = ("input_ids", "loss_mask")  # of a record whose tokens were made elsewhere
Tokens = tuple[list[int], list[int]]  # ids [L]; mask [L], 1 on what the target is to have said


@dataclass(frozen=True, slots=True)
class Conversation:
    """`id` is `file:line`; `source` is the record's own `source` field, or the file's name; `tools` are the
    definitions that the assistant may call. `tokens`: ids [L] and mask [L] that were made elsewhere, in place
    of messages.
    """

    id: str
    messages: list[Message]
    source: str
    tools: list[dict[str, Any]] = field(default_factory=list)
    tokens: Tokens | None = None

    def problem(self, error: BadRecord) -> Problem:
        """Return the problem that `error` is, at this conversation's place."""
        file, _, line = self.id.rpartition(":")
        return error.at(file, int(line))


@dataclass(frozen=True)
class Form:
    """How one kind of record becomes messages; `needs` are the keys that tell it from the others."""

    name: str
    needs: tuple[str, ...]
    convert: Callable[[dict[str, Any]], list[Message]]


FORMS: dict[str, Form] = {}
_OF_ANY = ("source", "tools", "functions")  # what any record may have
FIELDS[TOKEN_KEYS] = frozenset((*TOKEN_KEYS, *_OF_ANY))

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}


def form(name: str, *, needs: tuple[str, ...], may: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Register a converter of records with the keys `needs`, and maybe `may`; the first that fits counts."""

    def register(convert: Callable[[dict[str, Any]], list[Message]]) -> Callable:
        FIELDS[needs] = FIELDS.get(needs, frozenset()) | {*needs, *may, *_OF_ANY}
        FORMS[name] = Form(name, needs, convert)
        return convert

    return register


def read_conversations(
    source: str | Path,
    *,
    name: str = "",
    need_answer: bool = True,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> tuple[Iterator[Conversation], list[Problem]]:
    """Return an iterator of conversations and the list that fills with problems while it is consumed.

    `source`: a file, a folder, or a Hugging Face data set id; `name`: what it is called (see `read_records`).
    With `need_answer` false, conversations without an assistant turn are kept too: prompts, whose answers are
    generated later; tokens made elsewhere are then refused, for they ask nothing. Raises `InputError` when
    there is nothing to read.
    """
    problems: list[Problem] = []
    records = read_records(source, problems, name=name, max_record_bytes=max_record_bytes)
    return _conversations(records, problems, need_answer), problems


def _conversations(
    records: Iterator[tuple[str, int, Any]], problems: list[Problem], need_answer: bool
) -> Iterator[Conversation]:
    for file, line, record in records:
        messages: list[Message] = []
        tools: list[dict[str, Any]] = []
        tokens = None
        try:
            if isinstance(record, Mapping) and all(record.get(key) is not None for key in TOKEN_KEYS):
                if not need_answer:
                    raise BadRecord(
                        "no messages",
                        "tokens made elsewhere (input_ids) hold no messages to ask the target. Turn "
                        "regeneration off, or give the messages without them.",
                    )
                tokens = read_tokens(record)
            else:
                messages, tools = to_messages(record), tools_of(record)
                if need_answer and not any(message["role"] == "assistant" for message in messages):
                    raise BadRecord(
                        "no answer", "no assistant turn. Turn regeneration on to have the target answer it."
                    )
        except BadRecord as error:
            problems.append(error.at(file, line))
            continue
        origin = record.get("source")
        origin = origin if isinstance(origin, str) and origin else file
        yield Conversation(f"{file}:{line}", messages, storable(origin[:200]), tools, tokens)


def to_messages(record: Any) -> list[Message]:
    """Convert one record by the first form whose keys it has; `BadRecord` says why it cannot be used."""
    if not isinstance(record, Mapping):
        raise BadRecord("unknown form", f"the record is {_kind(record)}, not an object")
    present = {key for key, value in record.items() if value is not None}
    for candidate in FORMS.values():
        if present.issuperset(candidate.needs):
            messages = candidate.convert(dict(record))
            if not messages:
                raise BadRecord("no turns", "the conversation has no turns")
            if not any(message["role"] == "user" for message in messages):
                raise BadRecord("no question", "no user turn")
            return messages
    needed = [*(candidate.needs for candidate in FORMS.values()), TOKEN_KEYS]
    known = [key for keys in needed for key in keys]
    keys = ", ".join(sorted(map(str, present))[:8]) or "none"
    near_ones = (near(str(key), known) for key in present if key not in known)
    hint = next(filter(None, near_ones), "")
    needs = "; ".join(map(" + ".join, needed))
    raise BadRecord("unknown form", f"no known form: keys are {keys[:200]}{hint}. Needed: {needs}.")


def tools_of(record: Mapping) -> list[dict[str, Any]]:
    """Return the tools that a record declares: a list, or the JSON text of one, as columns of Parquet files
    hold it; an empty text, list or null declares none.
    """
    given = record.get("tools") if record.get("tools") is not None else record.get("functions")
    tools = _unpacked(given, "tools")
    if tools is None:
        return []
    if isinstance(tools, Mapping):
        tools = [tools]
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRecord("tools", f"tools is {_kind(tools)}, not a list of objects")
    for number, tool in enumerate(tools):
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRecord("tools", f"tools[{number}] has no function with a name")
        _texts(tool, f"tools[{number}]")
    return [
        dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools
    ]


def _unpacked(value: Any, place: str) -> Any:
    """Return a value that may be given as the JSON text of it; None for a blank text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRecord("tools", f"{place} is text, but no JSON: {error}") from None


@form("messages", needs=("messages",))
def from_messages(record: dict[str, Any]) -> list[Message]:
    """OpenAI: {"messages": [{"role", "content"}]}; content is text or a list of text parts."""
    return _turns(record["messages"], "messages")


@form("sharegpt", needs=("conversations",), may=("system",))
def from_sharegpt(record: dict[str, Any]) -> list[Message]:
    """ShareGPT: {"conversations": [{"from", "value"}]}, with an optional "system" text."""
    turns = _turns(record["conversations"], "conversations")
    system = _optional_text(record, "system")
    return [{"role": "system", "content": system}, *turns] if system else turns


@form("alpaca", needs=("instruction", "output"), may=("input", "system", "history"))
def from_alpaca(record: dict[str, Any]) -> list[Message]:
    """Alpaca: {"instruction", "input", "output"}, with optional "system" and "history" (pairs of turns)."""
    messages: list[Message] = []
    if system := _optional_text(record, "system"):
        messages.append({"role": "system", "content": system})
    history = record.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise BadRecord("wrong type", "history is not a list of [question, answer] pairs")
    for question, answer in history:
        messages.append({"role": "user", "content": _text(question, "history")})
        messages.append({"role": "assistant", "content": _text(answer, "history")})
    question = _text(record["instruction"], "instruction")
    if extra := _optional_text(record, "input"):
        question = f"{question}\n\n{extra}"
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": _text(record["output"], "output")})
    return messages


def _turns(value: Any, name: str) -> list[Message]:
    if not isinstance(value, list):
        raise BadRecord("wrong type", f"{name} is {_kind(value)}, not a list of turns")
    return [_turn(turn, f"{name}[{number}]") for number, turn in enumerate(value)]


def _turn(turn: Any, place: str) -> Message:
    if not isinstance(turn, Mapping):
        raise BadRecord("wrong type", f"{place} is {_kind(turn)}, not an object")
    role = _either(turn, "role", "from", place)
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise BadRecord(
            "unknown role", f"{place}: role {str(role)[:40]!r} is not one of {', '.join(sorted(_ROLES))}"
        )
    role = _ROLES[role.lower()]
    if role == "call":  # ShareGPT: the call is the turn's text
        calls = _unpacked(_either(turn, "value", "content", place), place)
        return {"role": "assistant", "content": None, "tool_calls": _calls(calls, place)}
    given = turn.get("tool_calls") if turn.get("tool_calls") is not None else turn.get("function_call")
    calls = _calls(given, place) if role == "assistant" else []
    content = None if calls and turn.get("content") is None else _either(turn, "content", "value", place)
    if isinstance(content, list):
        content = "".join(_part(part, f"{place}.content[{number}]") for number, part in enumerate(content))
    message: Message = {"role": role, "content": content if content is None else _text(content, place)}
    if role == "assistant":
        if not calls and not message["content"].strip():
            raise BadRecord("empty turn", f"{place}: the assistant says nothing")
        thought = next((turn[key] for key in REASONING if turn.get(key)), None)
        if thought is not None:
            message["reasoning_content"] = _text(thought, f"{place}: reasoning")
        if calls:
            message["tool_calls"] = calls
    if role == "tool":
        message |= {
            key: _text(turn[key], f"{place}.{key}")
            for key in ("tool_call_id", "name")
            if turn.get(key) is not None
        }
    return message


def _calls(value: Any, place: str) -> list[dict[str, Any]]:
    """Return tool calls in OpenAI's form; their arguments stay an object or text, as they were given."""
    value = _unpacked(value, f"{place}: tool calls")
    calls = [value] if isinstance(value, Mapping) else value or []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise BadRecord("tools", f"{place}: tool calls are {_kind(value)}, not a list of objects")
    found = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call.get("function"), Mapping) else call
        name, arguments = function.get("name"), function.get("arguments", function.get("parameters"))
        if not isinstance(name, str) or not isinstance(arguments, Mapping | str | None):
            raise BadRecord("tools", f"{place}: call {number} has no name, or arguments that are no object")
        arguments = {} if arguments is None else arguments
        _texts([name, arguments], f"{place}: call {number}")
        known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        found.append({**known, "type": "function", "function": {"name": name, "arguments": arguments}})
    return found


def _texts(value: Any, place: str) -> None:
    """Check every text in a value, however deep (so without recursion), and that it holds nothing that JSON
    has not, as columns of Parquet files do: templates print a date or bytes as no more than the name of it.
    """
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            _text(one, place)
        elif isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            left += one
        elif not isinstance(one, int | float | None) or (isinstance(one, float) and not math.isfinite(one)):
            shown = one if isinstance(one, float) else type(one).__name__
            raise BadRecord("wrong type", f"{place} holds {shown}, which no JSON can hold")


def _either(turn: Mapping, first: str, second: str, place: str) -> Any:
    for key in (first, second):
        if turn.get(key) is not None:
            return turn[key]
    raise BadRecord("missing field", f"{place} has neither {first!r} nor {second!r}")


def _part(part: Any, place: str) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type", "no type") if isinstance(part, Mapping) else _kind(part)
    raise BadRecord("not text", f"{place} is {str(kind)[:40]}: only text parts that hold a text are used")


def _optional_text(record: dict[str, Any], name: str) -> str:
    return _text(record[name], name) if record.get(name) is not None else ""


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise BadRecord("wrong type", f"{place} is {_kind(value)}, not text")
    if "\0" in value:
        raise BadRecord("NUL", f"{place} holds a NUL character at {value.index(chr(0))}")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRecord(
                "encoding", f"{place} holds half a surrogate pair at {error.start}: not text"
            ) from None
    return value


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true/false",
        int: "a number",
        float: "a number",
    }
    return "null" if value is None else names.get(type(value), type(value).__name__)


# ---- Tokens that were made elsewhere: taken as they are, or named by their fault ----


def read_tokens(record: Mapping[str, Any]) -> Tokens:
    """Return ids [L] and mask [L] of a record that has them; `BadRecord` where they are not what they must
    be: whole numbers, a mark of 0 or 1 (false or true) for each, none at the first position, one at least.
    """
    ids, mask = (_numbers(record[key], key) for key in TOKEN_KEYS)
    if len(ids) != len(mask):
        reason = f"{len(ids):,} input_ids and {len(mask):,} values of loss_mask: one is needed for each"
        raise BadRecord("other length", reason)
    if not ids:
        raise BadRecord("no tokens", "input_ids is empty")
    for place, mark in enumerate(mask):
        if mark not in (0, 1):
            raise BadRecord("wrong mask", f"loss_mask[{place}] is {mark}, neither 0 nor 1")
    if not any(mask):
        raise BadRecord("no answer", "loss_mask is 0 everywhere: nothing is to be learned from these tokens")
    if mask[0]:
        reason = "loss_mask[0] is 1, and nothing stands before the first token to foretell it from: make it 0"
        raise BadRecord("wrong mask", reason)
    return ids, mask


def check_vocabulary(ids: list[int], size: int) -> None:
    """Raise a `BadRecord` for the first of `ids` [L] that is no token of a target with `size` of them."""
    if min(ids) >= 0 and max(ids) < size:
        return
    place, token = next((at, one) for at, one in enumerate(ids) if not 0 <= one < size)
    raise BadRecord(
        "not in the vocabulary",
        f"input_ids[{place}] is {str(token)[:40]}, the target has tokens 0 to {size - 1:,}: they were made "
        "with another tokenizer",
    )


def _numbers(value: Any, name: str) -> list[int]:
    if not isinstance(value, list):
        raise BadRecord("wrong type", f"{name} is {type(value).__name__}, not a list of whole numbers")
    allowed = {int, bool} if name == "loss_mask" else {int}
    if {*map(type, value)} <= allowed:
        return [int(one) for one in value]
    place, one = next((at, one) for at, one in enumerate(value) if type(one) not in allowed)
    raise BadRecord("wrong type", f"{name}[{place}] is {str(one)[:40]!r}, not a whole number")


# ---- Several inputs mixed: a share of the whole or a number of each, drawn by a seed ----
#
#     mixture:
#       chats.jsonl: {weight: 3}            # or chats.jsonl: 3
#       code/: {weight: 1, cap: 20000}
#       rules.jsonl: {cap: 500}
#       owner/name: {}
#
# What has a weight is thinned until its conversations stand to each other as the weights do: there is none
# of them too few, so the one that is scarcest for its weight (after its cap) goes in whole, and nothing is
# repeated. What has a cap alone goes in up to that number, what has neither as a whole.

T = TypeVar("T")
_KEYS = ("weight", "cap")
_FORM = "Type {weight: 2} for a share, {cap: 1000} for so many at most, both, or {} for all of it"


@dataclass(frozen=True)
class Ingredient:
    """An input as a person named it; `weight` 0: no share asked for, `cap` 0: as many as there are."""

    name: str
    weight: Fraction = Fraction(0)
    cap: int = 0

    @property
    def whole(self) -> bool:
        """Whether all of it goes in, so that nothing needs counting."""
        return not self.weight and not self.cap


def read_mixture(given: Mapping[Any, Any]) -> list[Ingredient]:
    """Return what a person's mapping of inputs to weights and caps means, in its order; a `ValueError` says
    which entry is wrong and what to type.
    """
    found = [_ingredient(name, value) for name, value in given.items()]
    places: dict[str, str] = {}
    for one in found:
        other = places.setdefault(os.path.realpath(os.path.expanduser(one.name)), one.name)
        if other != one.name:
            raise ValueError(f"{other} and {one.name} are one input. Name it once")
    return found


def _ingredient(name: Any, value: Any) -> Ingredient:
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{name!r} is no input: name a file, a folder or a data set id")
    if isinstance(value, int | float):
        value = {"weight": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: {_shown(value)} says neither a weight nor a cap. {_FORM}")
    for key in value:
        if key not in _KEYS:
            raise ValueError(f"{name}: {_shown(key)} is unknown{near(str(key), _KEYS)}. {_FORM}")
    weight, cap = value.get("weight", 0), value.get("cap", 0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ValueError(f"{name}: weight {_shown(weight)} is no number. Type one above 0, such as weight: 2")
    if "weight" in value and not 0 < weight <= 10**9:
        raise ValueError(f"{name}: weight {weight} is no share. Type one above 0, or leave the input out")
    if isinstance(cap, bool) or not isinstance(cap, int):
        raise ValueError(f"{name}: cap {_shown(cap)} is no whole number. Type one, such as cap: 1000")
    if "cap" in value and cap < 1:
        raise ValueError(f"{name}: cap {cap} takes nothing. Type 1 or more, or leave the input out")
    return Ingredient(name, Fraction(str(weight)), cap)


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:60]


def amounts(mixture: Sequence[Ingredient], counts: Sequence[int]) -> list[int]:
    """Return how many of each input's `counts` conversations are taken.

    Raises `InputError` for an input that has a weight and no conversation: shares with it would all be 0.
    """
    there = [min(count, one.cap or count) for one, count in zip(mixture, counts, strict=True)]
    weighted = [(one, number) for one, number in zip(mixture, there, strict=True) if one.weight]
    for one, number in weighted:
        if not number:
            raise InputError(
                f"mixture: {one.name} has a weight and no conversation that can be used, so nothing can be "
                "mixed with it in that share. Mend it, or take it out of the mixture."
            )
    scale = min((number / one.weight for one, number in weighted), default=Fraction(0))
    return [
        int(one.weight * scale) if one.weight else number for one, number in zip(mixture, there, strict=True)
    ]


def draw(items: Iterable[T], count: int, wanted: int, *, seed: int, name: str) -> Iterator[T | None]:
    """Yield each of `items` that is drawn, `wanted` of the first `count`, and None for each that is not.

    Each item has a random number by seed, `name` and its place; the smallest are taken. So a draw is the same
    each time, and a larger one holds the smaller.
    """
    numbers = np.random.default_rng([seed, xxhash.xxh3_64_intdigest(name.encode())]).random(count)
    taken = np.zeros(count, bool)
    taken[np.argsort(numbers, kind="stable")[:wanted]] = True
    for place, item in enumerate(items):
        yield item if place < count and taken[place] else None
