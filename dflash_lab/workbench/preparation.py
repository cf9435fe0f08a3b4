"""One run of `prepare`: the counts, the problems, and the two ways a conversation becomes a sample."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from dflash_lab.workbench.progress import ProgressCallback

if TYPE_CHECKING:
    from dflash_lab.data.conversations import Conversation
    from dflash_lab.data.problems import Problem
    from dflash_lab.data.samples import Sample, WriteReport
    from dflash_lab.workbench.stages.prepare import PrepareParams


class Preparation:
    """The counts and problems of one run, and the two ways a conversation becomes a sample."""

    def __init__(self, params: PrepareParams, report: ProgressCallback) -> None:
        self.params = params
        self.report = report
        self.unread: list[Problem] = []  # records that never became a conversation
        # Conversations that never became a sample, and notes on those that did.
        self.unfit: list[Problem] = []
        self.conversations = self.cut = self.truncated = self.generated = self.reused = 0
        self.kinds: Counter[str] = Counter()  # conversations read with reasoning, tools, several turns
        self.noted: dict[tuple[str, str], list[int]] = {}  # file, kind -> first line, number

    def rendered(self, tokenizer: Any) -> Iterator[Sample]:
        """Render conversations as they are."""
        from dflash_lab.data.problems import BadRecord
        from dflash_lab.data.regenerate import problem_of
        from dflash_lab.workbench.speaking import rendered

        for one in self._read():
            try:
                found = rendered(tokenizer, one, self.params.thinking, self.params.date)
                yield self._sample(one.id, one.source, found.input_ids, found.loss_mask)
                self._note(one.id, found.notes)
            except BadRecord as error:
                self.unfit.append(problem_of(one.id, error))

    def answered(self) -> Iterator[Sample]:
        """Let the target write the prompts asked for, and all answers."""
        from dflash_lab.data.problems import BadRecord
        from dflash_lab.data.regenerate import AnswerFile, problem_of, regenerate
        from dflash_lab.target.generation import usual_batch
        from dflash_lab.target.loading import load_target
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
        """Read the input, reporting now and then."""
        from dflash_lab.data.conversations import read_conversations

        if not self.params.input:
            return
        found, self.unread = read_conversations(
            self.params.input,
            need_answer=self.params.regenerate == "off",
            max_record_bytes=self.params.max_record_mib << 20,
        )
        for conversation in itertools.islice(found, self.params.limit or None):
            self.conversations += 1
            self._count(conversation)
            if self.conversations % 256 == 0:
                self.report("conversations", self.conversations, self.params.limit, problems=len(self.unread))
            yield conversation
        self.report("conversations", self.conversations, self.conversations, problems=len(self.unread))

    def _prompts(self, target: Any) -> Iterator[Conversation]:
        """Read the input, then let the target write prompts."""
        from dflash_lab.data.conversations import Conversation
        from dflash_lab.data.problems import Problem
        from dflash_lab.target.generation import PLAIN_BATCH, usual_batch
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

        from dflash_lab.data.problems import BadRecord
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
        from dflash_lab.data.problems import Problem

        notes = [
            Problem(file, line, f"{count:,} conversations, of which this is the first", kind, records=0)
            for (file, kind), (line, count) in self.noted.items()
        ]
        return [*self.unread, *self.unfit, *notes]

    def figures(self, report: WriteReport) -> dict[str, Any]:
        """Return the headline figures; every kind of problem that lost records has its own."""
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
        }
