"""Hold loss masks against many chat templates: conversations of unmistakable words are rendered under every
.jinja of a folder, each set on a tokenizer that knows the special tokens which the template spells.

What is wrong with a mask is told by name:
  HAS x      words of the user, the system prompt or a tool are trained as an answer
  LOST x     an answer's words, its thinking where the template shows it, or a call are not inside the mask
  RUNS       not one run of masked tokens an answer
  TAIL       something beyond the closing token (but white space) is inside a run
  OPEN       the run does not begin where the generation prompt ends, and no note says so
  IDS        not the tokens of apply_chat_template
  ERR        refused
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.chat_templates import assistant, user
from support.tiny_targets import tiny_tokenizer

from dflash_lab.models.template import TemplateFailure, render, render_prompt

SPECIAL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜]{1,40}｜>|<\|[a-z_]{1,40}>|<[a-z_]{1,40}\|>"
    r"|<(?:start_of_turn|end_of_turn|end_of_utterance)>|\[/?(?:INST|SYSTEM_PROMPT)\]|\[\|[a-z]+\|\]|</?think>"
)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "TOOLalpha",
            "description": "Tell the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "where"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "TOOLalpha", "arguments": {"city": "ARGalpha"}},
}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "TOOLalpha", "content": "RESULTalpha 21"}
SYSTEM = {"role": "system", "content": "SYSalpha rule"}
ONE = [user("USERalpha one two"), assistant("ANSalpha three four")]
TWO = [*ONE, user("USERbeta five"), assistant("ANSbeta six seven")]
TALKS: dict[str, list[dict[str, Any]]] = {
    "one": ONE,
    "two": TWO,
    "three": [SYSTEM, *TWO, user("USERgamma"), assistant("ANSgamma eight")],
    "greeting": [assistant("ANSzero hello"), *ONE],
    "thinking": [ONE[0], assistant("ANSalpha three four", reasoning_content="THINKalpha hm")],
    "thinking twice": [
        ONE[0],
        assistant("ANSalpha three four", reasoning_content="THINKalpha hm"),
        user("USERbeta five"),
        assistant("ANSbeta six seven", reasoning_content="THINKbeta well"),
    ],
    "tool": [ONE[0], assistant(None, tool_calls=[CALL]), RESULT, assistant("ANSalpha three four")],
    "tool between": [
        SYSTEM,
        *ONE,
        user("USERbeta five"),
        assistant(None, tool_calls=[CALL], reasoning_content="THINKalpha hm"),
        RESULT,
        assistant("ANSbeta six seven", reasoning_content="THINKbeta well"),
        user("USERgamma"),
        assistant("ANSgamma eight"),
    ],
}


def templates(folder: Path) -> dict[str, str]:
    """Return every template below a folder by its name."""
    return {path.stem: path.read_text() for path in sorted(folder.rglob("*.jinja"))}


def runs_of(ids: list[int], mask: list[int]) -> list[tuple[int, list[int]]]:
    """Return begin and tokens of every run of masked tokens."""
    runs: list[tuple[int, list[int]]] = []
    before = 0
    for place, (token, inside) in enumerate(zip(ids, mask, strict=True)):
        if inside:
            if not before:
                runs.append((place, []))
            runs[-1][1].append(token)
        before = inside
    return runs


def faults(tokenizer: Any, talk: str, thinking: bool) -> Iterator[str]:
    """Yield what is wrong with the mask of one conversation under the tokenizer's template."""
    messages = TALKS[talk]
    today = datetime.date.today().isoformat()  # what apply_chat_template prints
    options = {"tools": TOOLS if "tool" in talk else [], "thinking": thinking, "date": today}
    try:
        found = render(tokenizer, messages, **options)
    except TemplateFailure as error:
        yield f"ERR {error.kind}: {error}"
        return
    runs = runs_of(found.input_ids, found.loss_mask)
    texts = [tokenizer.decode(tokens) for _, tokens in runs]
    whole = tokenizer.decode(found.input_ids)
    answers = [m for m in messages if m["role"] == "assistant"]
    for message in messages:
        if message["role"] != "assistant" and any(message["content"].split()[0] in text for text in texts):
            yield f"HAS {message['content'].split()[0]}"
            continue
        for part in (message["content"], message.get("reasoning_content")) if message in answers else ():
            shown = part and part in whole and not part.startswith("ANSzero")
            if shown and not any(part in text for text in texts):
                yield f"LOST {part.split()[0]}"
        if message.get("tool_calls") and not any("TOOLalpha" in t and "ARGalpha" in t for t in texts):
            yield "LOST call"
    greeted = messages[0]["role"] == "assistant"
    if not len(answers) - greeted <= len(runs) <= len(answers):
        yield f"RUNS {len(runs)} for {len(answers)}"
    special = set(tokenizer.all_special_ids) | {
        i for i, t in tokenizer.added_tokens_decoder.items() if t.special
    }
    for text, (_, tokens) in zip(texts, runs, strict=True):
        words = next((a["content"] for a in answers if a["content"] and a["content"] in text), None)
        tail = text[text.rfind(words) + len(words) :] if words else ""
        if len([t for t in tokens if t in special and tokenizer.decode([t]) in tail]) > 1:
            yield f"TAIL {tail[:60]!r}"
    prompt = render_prompt(tokenizer, messages[:-1], **options)
    opens = found.input_ids[: len(prompt)] == prompt and runs and runs[-1][0] == len(prompt)
    if (
        not opens
        and "turn shown otherwise" not in found.notes
        and "generation" not in tokenizer.chat_template
    ):
        yield f"OPEN {whole[-60:]!r} for {tokenizer.decode(prompt)[-60:]!r}"
    # Since 5.20 transformers gives reasoning its other names itself.
    named = [
        {**m, **({"thinking": m["reasoning_content"]} if "reasoning_content" in m else {})} for m in messages
    ]
    try:
        plain = tokenizer.apply_chat_template(
            named, tools=options["tools"] or None, enable_thinking=thinking, thinking=thinking
        )
    except Exception:  # content as parts, arguments as text: what the template takes is found by trial
        return
    words = [m["content"] for m in messages if m["content"] and m["role"] != "system"]
    shown = all(word in tokenizer.decode(plain["input_ids"]) for word in words)
    if shown and "tool" not in talk and plain["input_ids"] != found.input_ids:
        yield f"IDS {whole!r} for {tokenizer.decode(plain['input_ids'])!r}"


def battery(folder: Path) -> dict[tuple[str, str], list[str]]:
    """Return what is wrong by template and conversation, for both modes of thinking."""
    wrong: dict[tuple[str, str], list[str]] = {}
    for name, text in templates(folder).items():
        tokenizer = tiny_tokenizer(text)
        modes = (False, True) if "think" in text else (False,)
        spelled = sorted(set(SPECIAL.findall(text)) - set(tokenizer.get_vocab()))
        tokenizer.add_special_tokens({"additional_special_tokens": spelled})
        for talk in TALKS:
            for thinking in modes:
                if found := list(faults(tokenizer, talk, thinking)):
                    wrong.setdefault((name, talk), []).extend(found)
    return wrong
