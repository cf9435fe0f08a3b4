"""One run of `prepare`: the counts, the problems, and the two ways a conversation becomes a sample."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_lab.workbench.progress import ProgressCallback

if TYPE_CHECKING:
    from dflash_lab.data.conversations import Conversation, Ingredient
    from dflash_lab.data.records import Problem
    from dflash_lab.data.samples import Sample, WriteReport
    from dflash_lab.workbench.stages.prepare import PrepareParams


class Preparation:
    """The counts and problems of one run, and the two ways a conversation becomes a sample."""

    def __init__(self, params: PrepareParams, report: ProgressCallback) -> None:
        self.params = params
        self.report = report
        self._readings: list[list[Problem]] = []  # what each input fills while it is read
        # Conversations that never became a sample, and notes on those that did.
        self.unfit: list[Problem] = []
        self.conversations = self.cut = self.truncated = self.generated = self.reused = 0
        self.kinds: Counter[str] = Counter()  # conversations read with reasoning, tools, several turns
        self.noted: dict[tuple[str, str], list[int]] = {}  # file, kind -> first line, number

    @property
    def unread(self) -> list[Problem]:
        """Records that never became a conversation, or one that was not drawn."""
        return [problem for problems in self._readings for problem in problems]

    @functools.cached_property
    def _vocabulary(self) -> int:
        """How many tokens the target has."""
        from dflash_lab.models.source import load_config

        return int(load_config(self.params.target).vocab_size)

    def rendered(self, tokenizer: Any) -> Iterator[Sample]:
        """Render conversations as they are; tokens made elsewhere are taken so."""
        from dflash_lab.data.conversations import check_vocabulary
        from dflash_lab.data.records import BadRecord
        from dflash_lab.data.regenerate import problem_of
        from dflash_lab.workbench.speaking import rendered

        for one in self._read():
            try:
                if one.tokens is None:
                    found = rendered(tokenizer, one, self.params.thinking, self.params.date)
                    ids, mask, notes = found.input_ids, found.loss_mask, found.notes
                else:
                    (ids, mask), notes = one.tokens, ()
                    check_vocabulary(ids, self._vocabulary)
                yield self._sample(one.id, one.source, ids, mask)
                self._note(one.id, notes)
            except BadRecord as error:
                self.unfit.append(problem_of(one.id, error))

    def answered(self) -> Iterator[Sample]:
        """Let the target write the prompts asked for, and all answers."""
        from dflash_lab.data.records import BadRecord
        from dflash_lab.data.regenerate import AnswerFile, problem_of, regenerate
        from dflash_lab.models.generate import usual_batch
        from dflash_lab.models.load import load_target
        from dflash_lab.workbench.speaking import speaker_of

        params = self.params
        target = load_target(params.target, device=params.device, dtype=params.dtype)
        temperature = params.temperature if params.regenerate == "sampled" else 0.0
        speaker = speaker_of(
            target,
            thinking=params.thinking,
            date=params.date,
            temperature=temperature,
            max_new_tokens=params.max_new_tokens,
            batch=params.batch_size,
            seed=params.seed,
        )
        answers = AnswerFile(params.folder / "answers.jsonl", speaker.settings)

        def generated(count: int) -> None:
            self.generated += count
            self.report("answers", self.generated, 0, reused=answers.reused)

        for one in regenerate(
            self._prompts(target),
            speaker,
            answers,
            self.unfit,
            batch=params.batch_size or usual_batch(target),
            max_prompt=params.max_length - params.max_new_tokens if params.max_length else 0,
            on_answers=generated,
        ):
            self.cut += one.cut
            self.reused = answers.reused
            told = one.conversation
            try:
                yield self._sample(told.id, told.source, one.input_ids, one.loss_mask)
                self._note(told.id, one.notes)
            except BadRecord as error:
                self.unfit.append(problem_of(told.id, error))

    def _read(self) -> Iterator[Conversation]:
        """Read the input, or what is drawn of those of the mixture, reporting now and then."""
        from dflash_lab.data.conversations import amounts

        mixture = self.params.ingredients
        opened = [self._open(one) for one in mixture]  # all of them: what is not there is told at once
        counts = [0 if one.whole else self._counted(one) for one in mixture]
        wanted = amounts(mixture, counts)
        total = sum(wanted) or self.params.limit
        self._readings = [problems for _, problems in opened]
        for one, (found, problems), count, number in zip(mixture, opened, counts, wanted, strict=True):
            if not one.whole:
                found = self._drawn(one, found, problems, count, number)
            for conversation in found:
                self.conversations += 1
                self._count(conversation)
                if self.conversations % 256 == 0:
                    self._told(total)
                if self.params.mixture:
                    conversation = dataclasses.replace(conversation, source=one.name)
                yield conversation
        self._told(self.conversations)

    def _told(self, total: int) -> None:
        self.report("conversations", self.conversations, total, problems=sum(map(len, self._readings)))

    def _open(self, one: Ingredient) -> tuple[Iterator[Conversation], list[Problem]]:
        """Return what `read_conversations` does of an input, at most `limit` of it."""
        from dflash_lab.data.conversations import read_conversations

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
        from dflash_lab.data.conversations import draw
        from dflash_lab.data.records import Problem

        left = 0
        for conversation in draw(found, count, wanted, seed=self.params.seed, name=one.name):
            if conversation is None:
                left += 1
            else:
                yield conversation
        if left:
            reason = f"{left:,} of {count:,} conversations were left out for the mixture's weights and caps"
            problems.append(Problem(one.name, 0, reason, "not drawn", records=left))

    def _prompts(self, target: Any) -> Iterator[Conversation]:
        """Read the input, then let the target write prompts."""
        from dflash_lab.data.conversations import Conversation
        from dflash_lab.data.records import Problem
        from dflash_lab.models.generate import PLAIN_BATCH, usual_batch
        from dflash_lab.workbench.speaking import own_prompts

        yield from self._read()
        wanted = self.params.self_prompts
        if not wanted:
            return
        texts = own_prompts(
            target,
            wanted,
            self.params.folder / "self_prompts.jsonl",
            max_new_tokens=self.params.self_prompt_tokens,
            batch=self.params.batch_size or max(PLAIN_BATCH, min(wanted, usual_batch(target))),
            seed=self.params.seed,
            report=self.report,
        )
        if len(texts) < wanted:
            reason = f"the target wrote only {len(texts)} different prompts of {wanted}; allow longer ones"
            self.unfit.append(Problem("self_prompts", 0, reason, "too few prompts", records=0))
        for number, text in enumerate(texts, 1):
            self.conversations += 1
            yield Conversation(f"self_prompts:{number}", [{"role": "user", "content": text}], "self_prompts")

    def _sample(self, name: str, source: str, ids: list[int], mask: list[int]) -> Sample:
        """Apply the length limit; a cut is noted among the problems, though it loses no record."""
        import numpy as np

        from dflash_lab.data.records import BadRecord
        from dflash_lab.data.regenerate import problem_of
        from dflash_lab.data.samples import Sample, fitted

        limit = self.params.max_length
        kept, kept_mask = fitted(ids, mask, limit, self.params.over_long)
        if len(kept) < len(ids):
            reason = f"{len(ids):,} tokens cut to max_length={limit:,}; what is left is stored"
            note = problem_of(name, BadRecord("truncated to max_length", reason))
            self.unfit.append(dataclasses.replace(note, records=0))
            self.truncated += 1
        return Sample(name, np.asarray(kept), np.asarray(kept_mask), source)

    def _count(self, one: Conversation) -> None:
        answers = [message for message in one.messages if message["role"] == "assistant"]
        self.kinds["with_reasoning"] += any("reasoning_content" in message for message in answers)
        self.kinds["with_tools"] += bool(one.tools) or any("tool_calls" in message for message in answers)
        self.kinds["with_several_turns"] += len(answers) > 1

    def _note(self, name: str, kinds: Iterable[str]) -> None:
        """Count what the template does not show as it was given; a record has a line of its own for none."""
        file, _, line = name.rpartition(":")
        for kind in kinds:
            self.noted.setdefault((file, kind), [int(line), 0])[1] += 1

    def _noted_by_kind(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for (_, kind), (_, count) in self.noted.items():
            found[kind] += count
        return found

    def problems(self) -> list[Problem]:
        """Return all problems, and a note on each kind of thing not shown as it was given, by file."""
        from dflash_lab.data.records import Problem

        notes = [
            Problem(file, line, f"{count:,} conversations, of which this is the first", kind, records=0)
            for (file, kind), (line, count) in self.noted.items()
        ]
        return [*self.unread, *self.unfit, *notes]

    def figures(self, report: WriteReport, samples: Path) -> dict[str, Any]:
        """Return the headline figures; every kind of problem that lost records has its own, and of a mixture
        every input's share of the `samples` file.
        """
        by_kind: Counter[str] = Counter()
        for problem in [*self.unread, *self.unfit]:
            by_kind[problem.kind] += problem.records
        return {
            "samples_in": self.conversations + sum(problem.records for problem in self.unread),
            "samples_stored": report.stored,
            "duplicates": report.duplicates,
            "lost": by_kind.total(),
            "truncated": self.truncated,
            "train": report.stored - report.heldout,
            "heldout": report.heldout,
            "tokens": report.tokens,
            "answer_tokens": report.answer_tokens,
            "answer_tokens_pct": 100 * report.answer_tokens / max(report.tokens, 1),
            "mean_tokens": report.tokens / max(report.stored, 1),
            "longest_tokens": report.longest,
            **{name: self.kinds[name] for name in ("with_reasoning", "with_tools", "with_several_turns")},
            "forged_tokens": by_kind["control tokens"],
            **{
                f"noted_{kind.replace(' ', '_')}": number
                for kind, number in sorted(self._noted_by_kind().items())
            },
            "answers_generated": self.generated,
            "answers_reused": self.reused,
            "answers_cut": self.cut,
            **{f"lost_{kind.replace(' ', '_')}": lost for kind, lost in sorted(by_kind.items()) if lost},
            **self._shares(samples),
        }

    def _shares(self, samples: Path) -> dict[str, Any]:
        """Return what each input of a mixture is of the stored samples, by its name."""
        from dflash_lab.data.lengths import by_source, length_counts

        if not self.params.mixture:
            return {}
        names = ("samples", "samples_pct", "tokens_pct", "answer_tokens_pct")
        return {
            f"{name}_of_{row['source']}": row[name]
            for row in by_source(length_counts(samples)).iter_rows(named=True)
            for name in names
        }
