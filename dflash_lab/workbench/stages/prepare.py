"""Conversations to tokenised samples: read, render with the target's template, mask, optionally answer anew,
store.

Whatever is not stored is in `problems.parquet` with file, line and reason; the numbers add up or the stage
fails.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dflash_lab.errors import InputError
from dflash_lab.workbench.params import StageParams, param
from dflash_lab.workbench.progress import ProgressCallback

if TYPE_CHECKING:
    import polars as pl

    from dflash_lab.data.conversations import Conversation
    from dflash_lab.data.problems import Problem
    from dflash_lab.data.samples import Sample, WriteReport

_PREVIEWS = 3  # samples shown with their mask
_PREVIEW_TOKENS = 400


@dataclass(frozen=True, kw_only=True)
class PrepareParams(StageParams):
    """Where conversations come from, how they are rendered, and who writes the answers."""

    stage: ClassVar[str] = "prepare"

    input: str = param(
        "data/demo/smollm2_selfprompted.jsonl",
        "conversations: .jsonl, .json, .parquet, a folder of those, or a data set id; empty: none",
    )
    limit: int = param(0, "conversations to read; 0: all", low=0)
    thinking: bool = param(False, "render with thinking on, for templates that know it")
    max_length: int = param(4096, "longest sample; 0: no limit", unit="tokens", low=0)
    over_long: str = param("drop", "what happens to longer ones", choices=("drop", "truncate"))
    heldout_fraction: float = param(0.1, "share kept apart for measuring, by content hash", low=0.0, high=0.9)
    regenerate: str = param("off", "let the target write the answers", choices=("off", "greedy", "sampled"))
    max_new_tokens: int = param(512, "longest new answer", unit="tokens", low=1)
    temperature: float = param(1.0, "of sampled answers", low=0.01, high=10.0)
    self_prompts: int = param(0, "prompts the target writes itself, beside the input", low=0)
    self_prompt_tokens: int = param(64, "longest prompt it writes", unit="tokens", low=1)
    batch_size: int = param(32, "answers generated together", low=1)
    max_record_mib: int = param(64, "largest input record", unit="MiB", low=1)

    @property
    def samples_path(self) -> Path:
        """The file this stage makes."""
        return self.run / "samples.parquet"

    def check(self) -> None:
        self.require(bool(self.input) or self.self_prompts > 0, "input", "give one, or self_prompts above 0")
        if self.self_prompts:
            self.require(self.regenerate != "off", "self_prompts", "prompts need answers: set regenerate")
        if self.regenerate != "off" and self.max_length:
            enough = self.max_new_tokens < self.max_length
            self.require(
                enough, "max_new_tokens", f"leaves no room for a prompt in max_length={self.max_length}"
            )

    def inputs(self) -> list[Path]:
        return [Path(self.input)] if self.input and Path(self.input).exists() else []

    def outputs(self) -> list[Path]:
        return [self.samples_path, self.samples_path.with_suffix(".json")]


@dataclass(frozen=True)
class PrepareResult:
    """`problems`: file, line, kind, reason, records (lost by it); `previews`: pieces of samples, `trained` or
    not."""

    figures: dict[str, Any]
    problems: pl.DataFrame
    previews: pl.DataFrame

    @classmethod
    def load(cls, folder: Path | str) -> PrepareResult:
        """Read a finished stage."""
        import polars as pl

        folder = Path(folder)
        tables = {
            name: pl.read_parquet(folder / f"{name}.parquet") for name in ("problems", "previews", "summary")
        }
        return cls(tables["summary"].row(0, named=True), tables["problems"], tables["previews"])


def run_prepare(params: PrepareParams, progress: ProgressCallback | None = None) -> PrepareResult:
    """Write `samples.parquet` and `samples.json` into the run folder, problems and previews into the stage's.

    Raises `InputError` when nothing can be read, or nothing is left to store (`problems.parquet` says why).
    """
    import polars as pl

    from dflash_lab import files
    from dflash_lab.data.samples import write_samples
    from dflash_lab.provenance import provenance
    from dflash_lab.target.identity import template_hash, tokenizer_hash
    from dflash_lab.target.sources import load_tokenizer

    work = _Preparation(params, progress or (lambda *args, **fields: None))
    tokenizer = load_tokenizer(params.target)
    made = {
        "target": params.target,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": template_hash(tokenizer),
        "thinking": params.thinking,
        "parameters": params.as_dict(),
        **provenance(),
    }
    samples = work.answered() if params.regenerate != "off" else work.rendered(tokenizer)
    staged = params.folder / "samples.parquet"  # takes its place in the run when the numbers add up
    report = write_samples(staged, samples, heldout_fraction=params.heldout_fraction, provenance=made)
    figures = work.figures(report)
    tables = {
        "problems": _problem_table([*work.unread, *work.unfit]),
        "previews": _previews(staged, tokenizer),
        "summary": pl.DataFrame([figures]),
    }
    for name, table in tables.items():
        with files.atomic_path(params.folder / f"{name}.parquet") as temporary:
            table.write_parquet(temporary)
    unaccounted = figures["samples_in"] - report.stored - report.duplicates - figures["lost"]
    if unaccounted:
        raise RuntimeError(
            f"{unaccounted} of {figures['samples_in']} records are unaccounted for: a bug in prepare"
        )
    if not report.stored:
        staged.unlink()
        first = "; ".join(f"{p.file}:{p.line}: {p.reason}" for p in [*work.unread, *work.unfit][:3])
        raise InputError(
            f"{params.input or 'self_prompts'}: no sample could be stored. {first or 'It is empty.'}"
        )
    for suffix in (".json", ".parquet"):
        staged.with_suffix(suffix).replace(params.samples_path.with_suffix(suffix))
    files.sync_folder(params.run)
    return PrepareResult(figures, tables["problems"], tables["previews"])


class _Preparation:
    """The counts and problems of one run, and the two ways a conversation becomes a sample."""

    def __init__(self, params: PrepareParams, report: ProgressCallback) -> None:
        self.params = params
        self.report = report
        self.unread: list[Problem] = []  # records that never became a conversation
        self.unfit: list[
            Problem
        ] = []  # conversations that never became a sample, and notes on those that did
        self.conversations = self.cut = self.truncated = self.generated = self.reused = 0

    def rendered(self, tokenizer: Any) -> Iterator[Sample]:
        """Render conversations as they are."""
        from dflash_lab.data.problems import BadRecord
        from dflash_lab.data.regenerate import problem_of
        from dflash_lab.workbench.speaking import rendered

        for one in self._read():
            try:
                ids, mask = rendered(tokenizer, one.messages, self.params.thinking)
                yield self._fitted(one.id, one.source, ids, mask)
            except BadRecord as error:
                self.unfit.append(problem_of(one.id, error))

    def answered(self) -> Iterator[Sample]:
        """Let the target write the prompts asked for, and all answers."""
        from dflash_lab.data.problems import BadRecord
        from dflash_lab.data.regenerate import AnswerFile, problem_of, regenerate
        from dflash_lab.target.loading import load_target
        from dflash_lab.workbench.speaking import speaker_of

        params = self.params
        target = load_target(params.target, device=params.device, dtype=params.dtype)
        temperature = params.temperature if params.regenerate == "sampled" else 0.0
        speaker = speaker_of(
            target,
            thinking=params.thinking,
            temperature=temperature,
            max_new_tokens=params.max_new_tokens,
            batch=params.batch_size,
            seed=params.seed,
        )
        answers = AnswerFile(params.folder / "answers.jsonl", speaker.settings)

        def told(count: int) -> None:
            self.generated += count
            self.report("answers", self.generated, 0, reused=answers.reused)

        for one in regenerate(
            self._prompts(target),
            speaker,
            answers,
            self.unfit,
            batch=params.batch_size,
            max_prompt=params.max_length - params.max_new_tokens if params.max_length else 0,
            on_answers=told,
        ):
            self.cut += one.cut
            self.reused = answers.reused
            try:
                yield self._fitted(one.id, one.source, one.input_ids, one.loss_mask)
            except BadRecord as error:
                self.unfit.append(problem_of(one.id, error))

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
            if self.conversations % 256 == 0:
                self.report("conversations", self.conversations, self.params.limit, problems=len(self.unread))
            yield conversation
        self.report("conversations", self.conversations, self.conversations, problems=len(self.unread))

    def _prompts(self, target: Any) -> Iterator[Conversation]:
        """Read the input, then let the target write prompts."""
        from dflash_lab.data.conversations import Conversation
        from dflash_lab.data.problems import Problem
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
            batch=self.params.batch_size,
            seed=self.params.seed,
            report=self.report,
        )
        if len(texts) < wanted:
            reason = f"the target wrote only {len(texts)} different prompts of {wanted}; allow longer ones"
            self.unfit.append(Problem("self_prompts", 0, reason, "too few prompts", records=0))
        for number, text in enumerate(texts, 1):
            self.conversations += 1
            yield Conversation(f"self_prompts:{number}", [{"role": "user", "content": text}], "self_prompts")

    def _fitted(self, name: str, source: str, ids: list[int], mask: list[int]) -> Sample:
        """Apply the length limit; `BadRecord` when the sample does not fit or holds no answer."""
        import numpy as np

        from dflash_lab.data.problems import BadRecord, Problem
        from dflash_lab.data.samples import Sample

        limit = self.params.max_length
        if limit and len(ids) > limit:
            if self.params.over_long == "drop":
                raise BadRecord("too long", f"{len(ids):,} tokens; max_length is {limit:,}")
            if not any(mask[:limit]):
                raise BadRecord("too long", f"the answer begins after max_length={limit:,} tokens")
            file, _, line = name.rpartition(":")
            reason = f"{len(ids):,} tokens cut to max_length={limit:,}; what is left is stored"
            self.unfit.append(Problem(file, int(line), reason, "truncated to max_length", records=0))
            self.truncated += 1
            ids, mask = ids[:limit], mask[:limit]
        if not any(mask):
            raise BadRecord("no answer", "the template shows no assistant token of this conversation")
        return Sample(name, np.asarray(ids), np.asarray(mask), source)

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
            "answers_generated": self.generated,
            "answers_reused": self.reused,
            "answers_cut": self.cut,
            **{f"lost_{kind.replace(' ', '_')}": lost for kind, lost in sorted(by_kind.items()) if lost},
        }


def _problem_table(problems: list[Problem]) -> pl.DataFrame:
    import polars as pl

    schema = {
        "file": pl.String,
        "line": pl.Int64,
        "kind": pl.String,
        "reason": pl.String,
        "records": pl.Int64,
    }
    rows = [(p.file, p.line, p.kind, p.reason, p.records) for p in problems]
    return pl.DataFrame(rows, schema=schema, orient="row").sort("file", "line", maintain_order=True)


def _previews(path: Path, tokenizer: Any) -> pl.DataFrame:
    """Return the first samples as runs of text that is trained on or not."""
    import numpy as np
    import polars as pl

    from dflash_lab.data.samples import scan_samples

    rows: list[tuple[str, int, str, bool]] = []
    head = scan_samples(path).select("id", "input_ids", "loss_mask").head(_PREVIEWS).collect()
    for name, ids, mask in head.iter_rows():
        ids, mask = ids[:_PREVIEW_TOKENS], np.asarray(mask[:_PREVIEW_TOKENS])
        edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
        for number, (start, end) in enumerate(itertools.pairwise(edges)):
            rows.append((name, number, tokenizer.decode(ids[start:end]), bool(mask[start])))
    schema = {"id": pl.String, "piece": pl.Int64, "text": pl.String, "trained": pl.Boolean}
    return pl.DataFrame(rows, schema=schema, orient="row")
