"""Stage `prepare`: conversations to tokenised samples: read, render, mask, optionally answer anew, write."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import polars as pl
import xxhash

from dflash_lab import files
from dflash_lab.data.conversations import (
    Conversation,
    Ingredient,
    amounts,
    check_vocabulary,
    draw,
    read_conversations,
    read_mixture,
)
from dflash_lab.data.lengths import by_source, length_counts
from dflash_lab.data.records import BadRecord, Problem
from dflash_lab.data.regenerate import AnswerFile, Speaker, regenerate, sealed_lines
from dflash_lab.data.samples import MASK_RULES, Sample, WriteReport, fitted, scan_samples, write_samples
from dflash_lab.errors import InputError
from dflash_lab.files import Move
from dflash_lab.params import StageParams, no_address, param
from dflash_lab.progress import ProgressCallback
from dflash_lab.provenance import provenance

if TYPE_CHECKING:
    from dflash_lab.models.load import Target
    from dflash_lab.models.server import Server
    from dflash_lab.models.template import Dialogue

log = logging.getLogger(__name__)
_PREVIEWS = 3  # samples shown with their mask
_PREVIEW_CHOICE = 256  # of so many
_PREVIEW_TOKENS = 400
_WINDOW = 1024  # conversations whose answers are open at a time
_EXTRA_ROUNDS = 8  # of drawing prompts again where the target repeated itself


class PrepareParams(StageParams):
    """Where conversations come from, how they are rendered, and who writes the answers."""

    stage: ClassVar[str] = "prepare"

    input: str = param(
        "data/demo/smollm2_selfprompted.jsonl",
        "conversations: file, folder, data set id",
        group="data",
    )
    mixture: dict = param({}, "in place of input: {file: {weight: 2}, other: {cap: 500}, all_of_it: {}}")
    limit: int = param(0, "conversations to read, of each input; 0: all", low=0)
    max_record_mib: int = param(64, "largest input record", unit="MiB", low=1, high=2**16)
    thinking: bool = param(False, "render with thinking on, for templates that know it")
    date: str = param("2026-01-01", "what templates that print a date print as today, year-month-day")
    max_length: int = param(4096, "longest sample; 0: no limit", unit="tokens", low=0)
    over_long: str = param("drop", "what happens to longer ones", choices=("drop", "truncate"))
    heldout_fraction: float = param(0.1, "share kept apart for measuring, by content hash", low=0.0, high=0.9)
    regenerate: str = param(
        "off", "let the target write the answers", choices=("off", "greedy", "sampled"), group="answers"
    )
    max_new_tokens: int = param(512, "longest new answer", unit="tokens", low=1)
    temperature: float = param(1.0, "of sampled answers", low=0.01, high=10.0)
    self_prompts: int = param(0, "prompts the target writes itself, beside the input", low=0)
    self_prompt_tokens: int = param(64, "longest prompt it writes", unit="tokens", low=1)
    batch_size: int = param(0, "answers generated and saved together; 0: what suits the device", low=0)
    server: str = param("", "ask this server for answers, http://host:port/v1; empty: load the target")
    server_model: str = param("", "the model it serves; empty: the only one")
    server_requests: int = param(32, "requests sent to it at a time", low=1, high=4096)
    server_timeout_s: int = param(600, "longest wait for a word of it", unit="s", low=1)

    @property
    def samples_path(self) -> Path:
        """The file this stage makes."""
        return self.run_folder / "samples.parquet"

    @property
    def ingredients(self) -> list[Ingredient]:
        """The inputs to read: those of the mixture, else the one input, if there is one."""
        return read_mixture(self.mixture) or ([Ingredient(self.input)] if self.input else [])

    def check(self) -> None:
        try:
            datetime.date.fromisoformat(self.date)
        except ValueError:
            self.require(False, "date", "give year-month-day, such as 2026-01-01")
        try:
            read_mixture(self.mixture)
        except ValueError as error:
            self.require(False, "mixture", str(error))
        given = bool(self.ingredients)
        self.require(given or self.self_prompts > 0, "input", "give one, or self_prompts above 0")
        for one in self.ingredients:
            why = files.too_wide(one.name) if os.path.isdir(os.path.expanduser(one.name)) else ""
            self.require(not why, "mixture" if self.mixture else "input", why)
        if self.self_prompts:
            self.require(self.regenerate != "off", "self_prompts", "prompts need answers: set regenerate")
        if self.server:
            self.require(self.regenerate != "off", "server", "it is asked for answers: set regenerate")
            told = "a server is not asked for prompts, only for answers: leave server empty, or give 0"
            self.require(not self.self_prompts, "self_prompts", told)
            self.require(not (why := no_address(self.server)), "server", why)
        if self.regenerate != "off" and self.max_length:
            enough = self.max_new_tokens < self.max_length
            self.require(
                enough, "max_new_tokens", f"leaves no room for a prompt in max_length={self.max_length}"
            )

    def inputs(self) -> list[Path]:
        paths = [os.path.expanduser(one.name) for one in self.ingredients]
        return [Path(path) for path in paths if os.path.exists(path)]

    def outputs(self) -> list[Path]:
        return [self.samples_path, self.samples_path.with_suffix(".json")]

    def rendered(self) -> list[Path]:
        """The samples."""
        return [self.samples_path]

    def products(self) -> list[Move]:
        """The samples and what made them."""
        return [Move(self.fresh / path.name, path) for path in reversed(self.outputs())]

    def taken(self) -> list[Path]:
        """Samples that `dflash-lab merge` put together."""
        made = self.samples_path.with_suffix(".json")
        record = files.read_json(made) if made.exists() else {}
        return [self.samples_path] if isinstance(record, dict) and "merged" in record else []


class NothingStored(InputError):
    """No record became a sample; `details` lists the first problems."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        told = [f"{one.file}:{one.line}: {one.reason}" for one in problems]
        super().__init__(f"{source}: no sample could be stored. {'; '.join(told[:3]) or 'It is empty.'}")
        self.details = {"problems": told[:50]}


def run_prepare(params: PrepareParams, progress: ProgressCallback | None = None) -> PrepareResult:
    """Write `samples.parquet` and `samples.json`, ready to take their place in the run's folder.

    Whatever is not stored is in the result's `problems`: the numbers add up, or the stage fails. Raises
    `InputError` when nothing can be read, or nothing is left to store (its details list the problems).
    """
    from dflash_lab.models.source import load_tokenizer, template_hash, tokenizer_hash

    work = Preparation(params, progress or (lambda *args, **fields: None))
    tokenizer = load_tokenizer(params.target)
    if params.mixture and params.input:
        log.info("input (%s) is not read: mixture names what is", params.input)
    made = {
        "target": params.target,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": template_hash(tokenizer),
        "thinking": params.thinking,
        "date": params.date,
        "mask_rules": MASK_RULES,
        "parameters": params.as_dict(),
        **provenance(),
    }
    staged = params.fresh / "samples.parquet"  # takes its place in the run when the numbers add up
    with contextlib.ExitStack() as open_:
        if params.server:
            from dflash_lab.models.server import Server

            limits = {"timeout_s": params.server_timeout_s}
            server = open_.enter_context(Server(params.server, params.target, params.server_model, **limits))
            made["answers_by"] = {"server": server.url, "model": server.model, "form": server.form}
            samples = work.served(server)
        else:
            samples = work.answered() if params.regenerate != "off" else work.rendered(tokenizer)
        report = write_samples(staged, samples, heldout_fraction=params.heldout_fraction, provenance=made)
    figures = work.figures(report, staged)
    unaccounted = figures["samples_in"] - report.stored - report.duplicates - figures["lost"]
    if unaccounted:
        raise RuntimeError(
            f"{unaccounted} of {figures['samples_in']} records are unaccounted for: a bug in prepare"
        )
    if not report.stored:
        names = [one.name for one in params.ingredients] or ["self_prompts"]
        raise NothingStored(", ".join(names), work.problems())
    if params.heldout_fraction and not 0 < report.heldout < report.stored:
        log.warning("%d of %d samples are held out: too few samples to split", report.heldout, report.stored)
    return PrepareResult(figures, _problem_table(work.problems()), _previews(staged, tokenizer))


class Preparation:
    """The counts and problems of one run, and the two ways a conversation becomes a sample: `rendered` as it
    is, `answered` by the target, or by what is `served`.
    """

    def __init__(self, params: PrepareParams, report: ProgressCallback) -> None:
        self.params = params
        self.report = report
        self._unread: list[list[Problem]] = []  # what each input fills while it is read
        self._unfit: list[Problem] = []  # conversations that became no sample, and notes on some that did
        self._counts: Counter[str] = Counter()
        self._noted: dict[tuple[str, str], list[int]] = {}  # file, kind -> first line, number

    def rendered(self, tokenizer: Any) -> Iterator[Sample]:
        """Render conversations as they are; tokens made elsewhere are taken so."""
        from dflash_lab.models.template import render

        params = self.params
        for one in self._read():
            try:
                if one.tokens is not None:
                    ids, mask = one.tokens
                    notes: tuple[str, ...] = ()
                    check_vocabulary(ids, self._vocabulary)
                else:
                    found = render(
                        tokenizer, one.messages, tools=one.tools, thinking=params.thinking, date=params.date
                    )
                    ids, mask, notes = found.input_ids, found.loss_mask, found.notes
                yield self._sample(one, ids, mask)
                self._note(one, notes)
            except BadRecord as error:
                self._unfit.append(one.problem(error))

    @functools.cached_property
    def _vocabulary(self) -> int:
        """How many tokens the target has."""
        from dflash_lab.models.source import load_config

        return int(load_config(self.params.target).vocab_size)

    def answered(self) -> Iterator[Sample]:
        """Let the target write the prompts asked for, and all answers."""
        from dflash_lab.models.generate import usual_batch
        from dflash_lab.models.load import load_target

        params = self.params
        target = load_target(params.target, device=params.device, dtype=params.dtype)
        speaker = speaker_of(target, params)
        answers = AnswerFile(params.folder / "answers.jsonl", speaker.settings)

        def generated(count: int) -> None:
            self._counts["answers_generated"] += count
            self.report("answers", self._counts["answers_generated"], 0, reused=answers.reused)

        batch = params.batch_size or usual_batch(target)
        yield from self._anew(self._prompts(target), speaker, answers, batch=batch, on_answers=generated)

    def served(self, server: Server) -> Iterator[Sample]:
        """Let a server write all answers."""
        counts, failures = self._counts, Counter[str]()

        def asked(prompts: list[list[int]]) -> Iterator[tuple[int, list[int] | BadRecord]]:
            found = server.answer_all(
                prompts,
                self.params.max_new_tokens,
                requests=self.params.server_requests,
                on_wait=tell,
                answered=counts["answers_generated"] + answers.reused > 0,
                temperature=_temperature(self.params),
                seed=self.params.seed,
            )
            with contextlib.closing(found):
                for number, answer in found:
                    if isinstance(answer, BadRecord):
                        failures[answer.kind] += 1
                        yield number, answer
                    else:
                        counts["answers_generated"] += 1
                        yield number, answer.tokens
                    tell()  # which may raise to stop: the answer is on disk

        def tell() -> None:
            told = {kind.replace(" ", "_"): count for kind, count in failures.items()}
            self.report("answers", counts["answers_generated"], 0, reused=answers.reused, **told)

        speaker = speaker_at(server, asked, self.params)
        answers = AnswerFile(self.params.folder / "answers.jsonl", speaker.settings)
        yield from self._anew(self._read(), speaker, answers, batch=_WINDOW)
        form = "answers_as_text" if server.form == "text" else "answers_as_ids"
        counts[form] = counts["answers_generated"] + counts["answers_reused"]

    def _anew(
        self, conversations: Iterator[Conversation], speaker: Speaker, answers: AnswerFile, **how: Any
    ) -> Iterator[Sample]:
        """Yield the conversations with their answers written by `speaker`, counting what became of them."""
        room = self.params.max_length - self.params.max_new_tokens if self.params.max_length else 0
        found = regenerate(
            conversations, speaker, answers, self._unfit, window=_WINDOW, max_prompt=room, **how
        )
        for answered in found:
            one = answered.conversation
            self._counts["answers_cut"] += answered.cut
            self._counts["answers_reused"] = answers.reused
            try:
                yield self._sample(one, answered.input_ids, answered.loss_mask)
                self._note(one, answered.notes)
            except BadRecord as error:
                self._unfit.append(one.problem(error))

    def _prompts(self, target: Target) -> Iterator[Conversation]:
        """Read the input, then let the target write prompts."""
        yield from self._read()
        wanted = self.params.self_prompts
        texts = own_prompts(target, self.params, self.report) if wanted else []
        if len(texts) < wanted:
            reason = f"the target wrote only {len(texts)} different prompts of {wanted}; allow longer ones"
            self._unfit.append(Problem("self_prompts", 0, reason, "too few prompts", records=0))
        for number, text in enumerate(texts, 1):
            self._counts["conversations"] += 1
            yield Conversation(f"self_prompts:{number}", [{"role": "user", "content": text}], "self_prompts")

    def _read(self) -> Iterator[Conversation]:
        """Read the input, or what is drawn of those of the mixture, reporting now and then."""
        mixture = self.params.ingredients
        opened = [self._open(one) for one in mixture]  # all of them: what is not there is told at once
        counts = [0 if one.whole else self._counted(one) for one in mixture]
        wanted = amounts(mixture, counts)
        total = sum(wanted) or self.params.limit
        self._unread = [problems for _, problems in opened]
        for one, (found, problems), count, number in zip(mixture, opened, counts, wanted, strict=True):
            if not one.whole:
                found = self._drawn(one, found, problems, count, number)
            for conversation in found:
                self._count(conversation)
                if self._counts["conversations"] % 256 == 0:
                    self._tell(total)
                if self.params.mixture:
                    conversation = dataclasses.replace(conversation, source=one.name)
                yield conversation
        self._tell(self._counts["conversations"])

    def _tell(self, total: int) -> None:
        problems = sum(map(len, self._unread))
        self.report("conversations", self._counts["conversations"], total, problems=problems)

    def _open(self, one: Ingredient) -> tuple[Iterator[Conversation], list[Problem]]:
        """Return what `read_conversations` does of an input, at most `limit` of it."""
        found, problems = read_conversations(
            one.name,
            name=one.name if self.params.mixture else "",
            need_answer=self.params.regenerate == "off",
            max_record_bytes=self.params.max_record_mib << 20,
        )
        return itertools.islice(found, self.params.limit or None), problems

    def _counted(self, one: Ingredient) -> int:
        """Count the conversations of an input, which is read once for that alone."""
        count = 0
        for count, _ in enumerate(self._open(one)[0], 1):
            if count % 256 == 0:
                self.report(f"counting {one.name}", count, 0)
        return count

    def _drawn(
        self,
        one: Ingredient,
        found: Iterator[Conversation],
        problems: list[Problem],
        count: int,
        wanted: int,
    ) -> Iterator[Conversation]:
        """Yield the conversations of an input that are drawn; the others become one problem."""
        left = 0
        for conversation in draw(found, count, wanted, seed=self.params.seed, name=one.name):
            if conversation is None:
                left += 1
            else:
                yield conversation
        if left:
            reason = f"{left:,} of {count:,} conversations were left out for the mixture's weights and caps"
            problems.append(Problem(one.name, 0, reason, "not drawn", records=left))

    def _sample(self, one: Conversation, ids: list[int], mask: list[int]) -> Sample:
        """Apply the length limit; a cut is noted among the problems, though it loses no record."""
        limit = self.params.max_length
        kept, kept_mask = fitted(ids, mask, limit, self.params.over_long)
        if len(kept) < len(ids):
            reason = f"{len(ids):,} tokens cut to max_length={limit:,}; what is left is stored"
            self._unfit.append(one.problem(BadRecord("truncated to max_length", reason, records=0)))
            self._counts["truncated"] += 1
        return Sample(one.id, np.asarray(kept), np.asarray(kept_mask), one.source)

    def _count(self, one: Conversation) -> None:
        answers = [message for message in one.messages if message["role"] == "assistant"]
        calls = any("tool_calls" in message for message in answers)
        self._counts["conversations"] += 1
        self._counts["with_reasoning"] += any("reasoning_content" in message for message in answers)
        self._counts["with_tools"] += bool(one.tools) or calls
        self._counts["with_several_turns"] += len(answers) > 1

    def _note(self, one: Conversation, kinds: Iterable[str]) -> None:
        """Count what the template does not show as it was given; a record has a line of its own for none."""
        file, _, line = one.id.rpartition(":")
        for kind in kinds:
            self._noted.setdefault((file, kind), [int(line), 0])[1] += 1

    def problems(self) -> list[Problem]:
        """Return all problems, and a note on each kind of thing not shown as it was given, by file."""
        notes = [
            Problem(file, line, f"{count:,} conversations, of which this is the first", kind, records=0)
            for (file, kind), (line, count) in self._noted.items()
        ]
        return [*itertools.chain(*self._unread), *self._unfit, *notes]

    def figures(self, report: WriteReport, samples: Path) -> dict[str, Any]:
        """Return the headline figures; every kind of problem that lost records has its own, and of a mixture
        every input's share of the `samples` file.
        """
        lost: Counter[str] = Counter()
        for problem in self.problems():
            lost[problem.kind] += problem.records
        noted: Counter[str] = Counter()
        for (_, kind), (_, count) in self._noted.items():
            noted[kind] += count
        unread = sum(problem.records for problem in itertools.chain(*self._unread))
        counts = self._counts
        found = {
            "samples_in": counts["conversations"] + unread,
            "samples_stored": report.stored,
            "duplicates": report.duplicates,
            "lost": lost.total(),
            "truncated": counts["truncated"],
            "train": report.stored - report.heldout,
            "heldout": report.heldout,
            "tokens": report.tokens,
            "answer_tokens": report.answer_tokens,
            "answer_tokens_pct": 100 * report.answer_tokens / max(report.tokens, 1),
            "mean_tokens": report.tokens / max(report.stored, 1),
            "longest_tokens": report.longest,
            **{name: counts[name] for name in ("with_reasoning", "with_tools", "with_several_turns")},
            "forged_tokens": lost["control tokens"],
            **{f"noted_{kind.replace(' ', '_')}": number for kind, number in sorted(noted.items())},
            **{name: counts[name] for name in ("answers_generated", "answers_reused", "answers_cut")},
            **{name: counts[name] for name in ("answers_as_ids", "answers_as_text") if self.params.server},
            **{f"lost_{kind.replace(' ', '_')}": count for kind, count in sorted(lost.items()) if count},
        }
        if self.params.mixture:
            for row in by_source(length_counts(samples)).iter_rows(named=True):
                for name in ("samples", "samples_pct", "tokens_pct", "answer_tokens_pct"):
                    found[f"{name}_of_{row['source']}"] = row[name]
        return found


# ---- Who answers, as the data room sees it: functions that ask and answer, and the target's own prompts ----


def speaker_of(target: Target, params: PrepareParams) -> Speaker:
    """Return the functions of `target`; each batch of answers is seeded by the prompts in it."""
    from dflash_lab.models.generate import generate

    def answers_to(prompts: list[list[int]]) -> Iterator[tuple[int, list[int]]]:
        tokens = np.concatenate([np.asarray(ids, "<i4") for ids in prompts])
        found = generate(
            target,
            prompts,
            max_new_tokens=params.max_new_tokens,
            temperature=_temperature(params),
            seed=xxhash.xxh3_64(tokens.tobytes(), seed=params.seed).intdigest() >> 1,
            batch=params.batch_size,
        )
        return enumerate(found)

    by = {"target": target.identity, "dtype": str(target.dtype)}
    return _speaker(target.tokenizer, target.stop_ids, answers_to, by, params)


def speaker_at(server: Server, generate: Any, params: PrepareParams) -> Speaker:
    """Return the functions of what a server serves; `generate` asks it."""
    from dflash_lab.models.source import template_hash, tokenizer_hash

    tokenizer = server.tokenizer
    by = {
        "target": params.target,
        "tokenizer": tokenizer_hash(tokenizer),
        "template": template_hash(tokenizer),
        "served": server.model,
        "text": server.form == "text",
    }
    return _speaker(tokenizer, server.stop_ids, generate, by, params)


def _speaker(
    tokenizer: Any, stop_ids: Iterable[int], generate: Any, by: dict[str, Any], params: PrepareParams
) -> Speaker:
    """Return a speaker whose answers are told apart from others' by who gave them and by the settings."""
    from dflash_lab.models.template import Dialogue

    stops, temperature = frozenset(stop_ids), _temperature(params)

    def ask(one: Conversation) -> Dialogue:
        options: dict[str, Any] = {"thinking": params.thinking, "date": params.date, "stop_ids": stops}
        return Dialogue(tokenizer, one.messages, tools=one.tools, **options)

    settings = {
        **by,
        "thinking": params.thinking,
        "temperature": temperature,
        "max_new_tokens": params.max_new_tokens,
        "seed": params.seed if temperature else 0,
    }
    return Speaker(ask=ask, generate=generate, settings=json.dumps(settings, sort_keys=True))


def _temperature(params: PrepareParams) -> float:
    return params.temperature if params.regenerate == "sampled" else 0.0


def own_prompts(target: Target, params: PrepareParams, report: ProgressCallback) -> list[str]:
    """Return up to `self_prompts` different user turns sampled by the target; rounds that the stage's folder
    holds are not drawn again.
    """
    from dflash_lab.models.generate import PLAIN_BATCH, self_prompts, usual_batch

    count, seed, longest = params.self_prompts, params.seed, params.self_prompt_tokens
    batch = params.batch_size or max(PLAIN_BATCH, min(count, usual_batch(target)))
    path = params.folder / "self_prompts.jsonl"
    settings = json.dumps([target.identity, longest, batch, seed], sort_keys=True)
    lines = sealed_lines(path, {"settings", "round", "texts"})
    stored = {one["round"]: one["texts"] for _, one in lines if one["settings"] == settings}
    found: dict[str, None] = {}
    for number in range(-(-count // batch) + _EXTRA_ROUNDS):
        if len(found) >= count:
            break
        if number not in stored:
            stored[number] = self_prompts(
                target, batch, seed=seed * 100_003 + number, max_new_tokens=longest, batch=batch
            )
            record = {"settings": settings, "round": number, "texts": stored[number]}
            files.append_line(path, files.sealed(record))
        found.update(dict.fromkeys(stored[number]))
        report("prompts", min(len(found), count), count)
    return list(found)[:count]


@dataclass(frozen=True)
class PrepareResult:
    """`problems`: file, line, kind, reason, records lost; `previews`: pieces of samples, `trained` or not."""

    figures: dict[str, Any]
    problems: pl.DataFrame
    previews: pl.DataFrame

    def save(self, folder: Path) -> None:
        """Leave the result in a folder."""
        summary = pl.DataFrame([self.figures])
        tables = {"problems": self.problems, "previews": self.previews, "summary": summary}
        for name, table in tables.items():
            with files.atomic_path(folder / f"{name}.parquet") as temporary:
                table.write_parquet(temporary)

    @classmethod
    def load(cls, folder: Path | str) -> PrepareResult:
        """Read a finished stage."""
        names = ("summary", "problems", "previews")
        summary, problems, previews = (pl.read_parquet(Path(folder) / f"{name}.parquet") for name in names)
        return cls(summary.row(0, named=True), problems, previews)


def _problem_table(problems: list[Problem]) -> pl.DataFrame:
    kinds = {"line": pl.Int64, "records": pl.Int64}
    schema = {name: kinds.get(name, pl.String) for name in ("file", "line", "kind", "reason", "records")}
    rows = [(p.file, p.line, p.kind, p.reason, p.records) for p in problems]
    return pl.DataFrame(rows, schema=schema, orient="row").sort("file", "line", maintain_order=True)


def _previews(path: Path, tokenizer: Any) -> pl.DataFrame:
    """Return the first samples, and of the first few hundred the one with most answers, as runs of text that
    is trained on or not.
    """
    rows: list[tuple[str, int, str, bool]] = []
    head = scan_samples(path).select("id", "input_ids", "loss_mask").head(_PREVIEW_CHOICE).collect()
    answers = [int((np.diff(np.asarray(mask), prepend=0) == 1).sum()) for mask in head["loss_mask"]]
    most = [answers.index(max(answers))] if answers else []
    shown = list(dict.fromkeys([*most, *range(min(_PREVIEWS, head.height))]))[:_PREVIEWS]
    for name, ids, mask in head[sorted(shown)].iter_rows():
        ids, mask = ids[:_PREVIEW_TOKENS], np.asarray(mask[:_PREVIEW_TOKENS])
        edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
        for number, (start, end) in enumerate(itertools.pairwise(edges)):
            rows.append((name, number, tokenizer.decode(ids[start:end]), bool(mask[start])))
    schema = {"id": pl.String, "piece": pl.Int64, "text": pl.String, "trained": pl.Boolean}
    return pl.DataFrame(rows, schema=schema, orient="row")
