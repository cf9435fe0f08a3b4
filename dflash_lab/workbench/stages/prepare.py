"""Conversations to tokenised samples: read, render with the target's template, mask, optionally answer anew,
store.

Whatever is not stored is in `problems.parquet` with file, line and reason; the numbers add up or the stage
fails.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dflash_lab.errors import InputError
from dflash_lab.files import read_json
from dflash_lab.folders import too_wide
from dflash_lab.workbench.params import StageParams, param
from dflash_lab.workbench.progress import ProgressCallback
from dflash_lab.workbench.replace import Move

if TYPE_CHECKING:
    import polars as pl

    from dflash_lab.data.conversations import Ingredient
    from dflash_lab.data.records import Problem

log = logging.getLogger(__name__)
_PREVIEWS = 3  # samples shown with their mask
_PREVIEW_CHOICE = 256  # of so many
_PREVIEW_TOKENS = 400


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

    @property
    def samples_path(self) -> Path:
        """The file this stage makes."""
        return self.run_folder / "samples.parquet"

    def check(self) -> None:
        from dflash_lab.data.conversations import read_mixture

        self.require(_is_day(self.date), "date", "give year-month-day, such as 2026-01-01")
        try:
            read_mixture(self.mixture)
        except ValueError as error:
            self.require(False, "mixture", str(error))
        given = bool(self.ingredients)
        self.require(given or self.self_prompts > 0, "input", "give one, or self_prompts above 0")
        for one in self.ingredients:
            why = too_wide(one.name) if os.path.isdir(os.path.expanduser(one.name)) else ""
            self.require(not why, "mixture" if self.mixture else "input", why)
        if self.self_prompts:
            self.require(self.regenerate != "off", "self_prompts", "prompts need answers: set regenerate")
        if self.regenerate != "off" and self.max_length:
            enough = self.max_new_tokens < self.max_length
            self.require(
                enough, "max_new_tokens", f"leaves no room for a prompt in max_length={self.max_length}"
            )

    @property
    def ingredients(self) -> list[Ingredient]:
        """The inputs to read: those of the mixture, else the one input, if there is one."""
        from dflash_lab.data.conversations import Ingredient, read_mixture

        return read_mixture(self.mixture) or ([Ingredient(self.input)] if self.input else [])

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
        record = read_json(made) if made.exists() else {}
        return [self.samples_path] if isinstance(record, dict) and "merged" in record else []


def _is_day(text: str) -> bool:
    try:
        return bool(datetime.date.fromisoformat(text))
    except ValueError:
        return False


@dataclass(frozen=True)
class PrepareResult:
    """`problems`: file, line, kind, reason, records (lost by it); `previews`: pieces of samples, `trained` or
    not."""

    figures: dict[str, Any]
    problems: pl.DataFrame
    previews: pl.DataFrame

    def save(self, folder: Path) -> None:
        """Leave the result in a folder."""
        import polars as pl

        from dflash_lab import files

        tables = {
            "problems": self.problems,
            "previews": self.previews,
            "summary": pl.DataFrame([self.figures]),
        }
        for name, table in tables.items():
            with files.atomic_path(folder / f"{name}.parquet") as temporary:
                table.write_parquet(temporary)

    @classmethod
    def load(cls, folder: Path | str) -> PrepareResult:
        """Read a finished stage."""
        import polars as pl

        folder = Path(folder)
        tables = {
            name: pl.read_parquet(folder / f"{name}.parquet") for name in ("problems", "previews", "summary")
        }
        return cls(tables["summary"].row(0, named=True), tables["problems"], tables["previews"])


class NothingStored(InputError):
    """No record became a sample; `details` lists the first problems."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        told = [f"{one.file}:{one.line}: {one.reason}" for one in problems]
        super().__init__(f"{source}: no sample could be stored. {'; '.join(told[:3]) or 'It is empty.'}")
        self.details = {"problems": told[:50]}


def run_prepare(params: PrepareParams, progress: ProgressCallback | None = None) -> PrepareResult:
    """Write `samples.parquet` and `samples.json`, ready to take their place in the run's folder.

    Raises `InputError` when nothing can be read, or nothing is left to store (its details list the problems).
    """
    from dflash_lab.data.samples import MASK_RULES, write_samples
    from dflash_lab.models.source import load_tokenizer, template_hash, tokenizer_hash
    from dflash_lab.provenance import provenance
    from dflash_lab.workbench.preparation import Preparation

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
    samples = work.answered() if params.regenerate != "off" else work.rendered(tokenizer)
    staged = params.fresh / "samples.parquet"  # takes its place in the run when the numbers add up
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
    problems = _problem_table(work.problems())
    return PrepareResult(figures, problems, _previews(staged, tokenizer))


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
    """Return the first samples, and of the first few hundred the one with most answers, as runs of text that
    is trained on or not.
    """
    import numpy as np
    import polars as pl

    from dflash_lab.data.samples import scan_samples

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
