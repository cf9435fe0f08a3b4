"""The work of the stage `acceptance`, step by step: prompts are decoded one after the other in each way, the
outcomes are held against each other and against the offline metrics, and rounds are timed.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch

from dflash_lab.acceptance.batch import check_batch_target, run_together
from dflash_lab.acceptance.decode import Decoded, Proposer, Study, TargetRun, check_tree_target
from dflash_lab.acceptance.diagnose import (
    CHECKS_SCHEMA,
    SUSPECT,
    Check,
    checks_frame,
    diagnose,
    likely_cause,
    rendered_alike,
)
from dflash_lab.acceptance.fixed_shapes import Method, Methods, StaticDecoder, StaticRound, Workspace
from dflash_lab.acceptance.offline import Answers, offline
from dflash_lab.acceptance.prompts import (
    Prompt,
    check_vocabulary,
    dialogue_of,
    find_sets,
    load_prompts,
    split_dev,
)
from dflash_lab.acceptance.results import (
    Costs,
    Evaluation,
    OfflineReport,
    compare,
    operating_points,
)
from dflash_lab.acceptance.served import Served, different, measure, sentence, served_checks
from dflash_lab.acceptance.settings import EvaluationSettings
from dflash_lab.drafter.checkpoint import load_checkpoint
from dflash_lab.drafter.model import Drafter
from dflash_lab.errors import InputError, UnsupportedTarget
from dflash_lab.models.load import Target, choose_device, load_target
from dflash_lab.models.server import ServedAnswer, Server
from dflash_lab.models.template import TemplateFailure, template_of

logger = logging.getLogger(__name__)


class Evaluator:
    """One evaluation: target, drafter and prompts, and the studies made so far."""

    def __init__(self, settings: EvaluationSettings, progress: Callable[..., None] | None = None) -> None:
        self.settings, self.progress = settings, progress
        # Before anything is loaded: a set that is not here, or a server that is down, is told at once.
        sets = find_sets(settings.prompts)
        self.server: Server | None = None
        if settings.server:
            limits = {"timeout_s": settings.server_timeout_s}
            self.server = Server(settings.server, settings.target, settings.server_model, **limits)
        self.served: list[Served] = []
        device = choose_device(settings.device)
        self.target = load_target(settings.target, device=device, dtype=settings.dtype, seed=settings.seed)
        self.drafter = self._load(settings.drafter)
        self.size = settings.block_size or self.drafter.config.block_size
        self.answers = Answers(settings, self.target, self.drafter.config.tap_ids)
        self.rendered = rendered_alike(self.target, *self.answers.made_by())
        self.prompts, available = load_prompts(
            sets,
            settings.samples,
            lambda: self.target.tokenizer,
            count=settings.num_prompts,
            seed=settings.seed,
            thinking=settings.thinking,
            date=self.answers.date(),
        )
        source = settings.samples if self.answers.stored else settings.prompts
        check_vocabulary(self.prompts, self.target.vocab_size, str(source))
        self.methods = Methods(
            self.target,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            seed=settings.seed,
        )
        self.studies: dict[str, Study] = {}
        self.figures: dict[str, Any] = {"prompts": len(self.prompts)}
        self.figures["prompts_available"] = sum(available.values())
        self.facts: dict[str, Any] = {
            "hybrid": self.target.is_hybrid,
            "decoding": self.methods.sentence,
            "sets": {
                one.label: {"file": str(one.path or settings.samples), "available": available[one.label]}
                for one in sets
            },
        }

    def evaluate(self) -> Evaluation:
        """Do everything in order."""
        settings = self.settings
        self._decode_basics()
        self._serve()
        report = self._offline()
        operating = self._operating(report)
        self._decode_best()
        self._decode_together()
        checks = self._checks()
        self._speed()
        self.facts["protocol"] = protocol(
            settings, self.target, len(self.prompts), self.size, self.answers.thinking()
        )
        self.facts["phases"] = {
            name: study.phase_share() for name, study in self.studies.items() if name != "plain"
        }
        studies = list(self.studies.values())
        sources = self.answers.sources(self.prompts, self.studies["plain"])
        tokens = pl.concat(
            tokens_frame(study, self._token).with_columns(method=pl.lit(study.method))
            for study in studies
            if study.method != "plain"
        )
        for name, value in self.figures.items():
            logger.info("%s: %s", name, value)
        offline_taus = dict(zip(self.agreement.answers.tolist(), self.agreement.offline.tolist()))
        return Evaluation(
            figures=self.figures,
            answers=answers_frame(studies, self.prompts, self._text, offline_taus),
            rounds=rounds_frame(studies),
            tokens=tokens,
            budgets=operating.budgets,
            costs=operating.costs,
            points=operating.points,
            checks=checks,
            breaks=breaks_frame(report, self._token, sources),
            offline=report,
            facts=self.facts,
        )

    def _load(self, folder: Path) -> Drafter:
        drafter = load_checkpoint(folder, self.target.device, self.target.dtype).eval()
        return drafter.requires_grad_(False)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.target.tokenizer.decode(list(tokens)))

    def _token(self, token: int) -> str:
        return self._text([token])

    def _study(self, method: str, answer: Method, limit: int) -> Study:
        """Decode all prompts with `answer`, and hold the outcome against plain decoding under greedy
        choice.
        """

        def one(ids: Sequence[int], count: int, tick: Callable[[int], None]) -> Decoded:
            return answer(ids, max_new_tokens=count, on_round=tick)

        many = any(prompt.several for prompt in self.prompts)
        follow = next_turn(self.target, self.settings.thinking, self.answers.date()) if many else None
        study = run_study(
            method, self.prompts, one, max_new_tokens=limit, follow=follow, progress=self.progress
        )
        return self._keep(method, study)

    def _keep(self, method: str, study: Study) -> Study:
        self.studies[method] = study
        if method != "plain" and self.settings.temperature == 0:
            found = differences(self.target, self.studies["plain"], study)
            self.facts.setdefault("differences", {})[method] = [vars(d) for d in found]
            for name, count in (("greedy_different", len(found)), ("greedy_ties", sum(d.tie for d in found))):
                self.figures[name] = self.figures.get(name, 0) + count
        return study

    def _speculative(
        self, method: str, drafter: Drafter, limit: int, *, block_size: int = 0, budget: int = 0
    ) -> Study:
        answer = self.methods.speculative(drafter, block_size or self.size, budget, self.settings.tree_mode)
        return self._study(method, answer, limit)

    def _decode_basics(self) -> None:
        """Plain decoding, the trained drafter (DFlash 2: also without its selector), an untrained one, and
        the drafter to compare with.
        """
        settings = self.settings
        self._study("plain", self.methods.plain(), settings.max_new_tokens)
        tau = self._speculative("trained", self.drafter, settings.max_new_tokens).tau(settings.seed)
        self.figures |= tau.figures("tau_trained")
        if self.drafter.candidate_selector is not None:
            bare = self._speculative("no selector", self.drafter.without_selector(), settings.max_new_tokens)
            self.figures |= bare.tau(settings.seed).figures("tau_no_selector")
        if settings.untrained_tokens:
            generator = torch.Generator().manual_seed(settings.seed)
            untrained = Drafter(self.drafter.config).initialize(generator).eval()
            untrained = untrained.to(self.target.device, self.target.dtype)
            limit = min(settings.untrained_tokens, settings.max_new_tokens)
            self.figures |= (
                self._speculative("untrained", untrained, limit).tau(settings.seed).figures("tau_untrained")
            )
        if settings.other_drafter:
            other = self._load(settings.other_drafter)
            second = self._speculative(
                "other", other, settings.max_new_tokens, block_size=other.config.block_size
            )
            self.figures |= second.tau(settings.seed).figures("tau_other")
            self.figures["other_block_size"] = other.config.block_size
            paired = compare(self.studies["trained"].answer_taus, second.answer_taus, seed=settings.seed)
            self.figures |= {
                "other_minus_trained": round(paired.difference, 4),
                "other_minus_trained_low": round(paired.interval.low, 4),
                "other_minus_trained_high": round(paired.interval.high, 4),
            }

    def _serve(self) -> None:
        """Send the same prompts to the running server at each concurrency, the lowest first."""
        settings, plain, trained = self.settings, self.studies["plain"], self.studies["trained"]
        if self.server is None:
            return
        limits = [self.prompts[number].longest(settings.max_new_tokens) for number in plain.prompt]
        sampling = dict(temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k)
        lengths = [length for answer in trained.answers for length in answer.lengths]
        counted = float(np.mean(lengths)) if lengths else 1.0
        self.figures["tau_trained_counted"] = round(counted, 4)
        rows = []
        with self.server as server:
            for size in sorted(set(settings.server_concurrency)):
                tick = partial(self._tick, f"serve at {size}", total=len(limits))
                found = measure(server, plain.asked, limits, size, tick, seed=settings.seed, **sampling)
                self.served.append(found)
                row = found.row()
                if settings.temperature == 0:
                    row["different"] = different(found, [answer.tokens for answer in plain.answers])
                rows.append(row)
                self.figures[f"served_tokens_per_s_at_{size}"] = row["tokens_per_s"]
                if found.tau is not None:
                    self.figures[f"tau_served_at_{size}"] = row["tau"]
        first = self.served[0]
        if first.tau is not None:
            self.figures["tau_served"] = round(first.tau, 4)
            self.figures["tau_served_gap_pct"] = round(100 * (first.tau / counted - 1), 2)
        judged = settings.temperature == 0
        self.facts["served"] = {
            "server": server.url,
            "model": server.model,
            "form": server.form,
            "said": sentence(first, counted, judged, settings.gap_tolerance),
            "rows": rows,
        }

    def _served_apart(self) -> bool:
        """Whether the server's tau is not the decoded one, or not known."""
        if not self.served:
            return False
        gap = self.figures.get("tau_served_gap_pct")
        beyond = gap is not None and abs(gap) > 100 * self.settings.gap_tolerance
        return gap is None or (beyond and self.settings.temperature == 0)

    def _served_checks(self) -> list[Check]:
        if not self.served or self.server is None:
            return []
        first, plain, greedy = self.served[0], self.studies["plain"], self.settings.temperature == 0
        tokens = [answer.tokens if isinstance(answer, ServedAnswer) else [] for answer in first.answers]
        study = Study("served", [Decoded(ids) for ids in tokens], plain.asked, plain.prompt)
        apart = differences(self.target, plain, study) if greedy else []
        return served_checks(first, self.server, apart, self.size, greedy)

    def _offline(self) -> OfflineReport:
        """Offline metrics of the decoded prompts, then of more held-out samples; the former's answer
        numbers.
        """
        settings = self.settings
        items = self.answers.items(self.prompts, self.studies["plain"], extra=settings.offline_samples)
        self.facts["offline_source"] = self.answers.source
        with_temperatures = self.answers.has_final and not self.drafter.config.is_dflash2
        done = itertools.count(1)
        report = offline(
            items,
            self.target.head,
            self.drafter,
            block_size=self.size,
            budgets=settings.budgets,
            temperatures=settings.temperatures if with_temperatures else (),
            on_item=lambda tokens: self._tick("offline", next(done), len(items)),
        )
        texts = self.answers.texts(self.prompts, self.studies["plain"])
        self.agreement = compare_taus(self.studies["trained"], report, *texts, settings.max_new_tokens)
        self.figures |= {
            "tau_offline": round(float(self.agreement.offline.mean()), 4),
            "tau_offline_gap_pct": round(100 * self.agreement.gap, 2),
            "tau_offline_gap_same_text_pct": round(100 * self.agreement.judged_gap, 2),
            "answers_same_text": int(self.agreement.same.sum()),
            "tau_offline_all": round(report.tau().mean, 4),
            "streak_uniform": round(report.streak(), 4),
            "offline_answers": report.num_answers,
            "offline_anchors": len(report.anchors),
        }
        if (bare := report.without_selector()) is not None:
            self.figures |= {
                "tau_offline_all_no_selector": round(bare.tau().mean, 4),
                "streak_uniform_no_selector": round(bare.streak(), 4),
            }
        return report

    def _operating(self, report: OfflineReport) -> Operating:
        """Costs and the points that pay; tau of the chosen budget on the test part."""
        plain = self.studies["plain"]
        # A typical context: the prompt and half of the answer.
        lengths = sorted(len(a) + len(b.tokens) // 2 for a, b in zip(plain.asked, plain.answers))
        found = measure_operating_points(
            self.target,
            self.drafter,
            report,
            dev_share=self.settings.dev_share,
            tree_steps=self.settings.tree_mode == "mask" and self._can_tree(),
            context_tokens=max(8, lengths[len(lengths) // 2]),
            repeats=self.settings.cost_repeats,
            workspace=self.methods.workspace,
            on_point=partial(self._tick, "costs of a round"),
        )
        self.figures["best_block_size"] = found.block_size
        if found.budget:
            chosen = found.budgets.filter((pl.col("part") == "test") & (pl.col("budget") == found.budget))
            self.figures |= {"tau_tree": round(chosen["tau"][0], 4), "tree_budget": found.budget}
            built = found.costs.filter((pl.col("what") == "build") & (pl.col("size") == found.budget))
            self.figures["tree_build_ms"] = round(built["ms"][0], 3)
        return found

    def _tick(self, what: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(what, done, total)

    def _can_tree(self) -> bool:
        if self.settings.tree_mode == "paths":
            return True
        try:
            check_tree_target(self.target)
        except UnsupportedTarget as error:
            self.facts["tree_refused"] = str(error)
            return False
        return True

    def _decode_best(self) -> None:
        """Decode at the best expected block size and at the best tree budget, chosen on the dev part."""
        settings = self.settings
        size = self.figures["best_block_size"]
        if settings.decode_best and size != self.size:
            study = self._speculative("best block", self.drafter, settings.max_new_tokens, block_size=size)
            self.figures["tau_best_block"] = round(study.tau(settings.seed).mean, 4)
        if settings.decode_tree and "tree_budget" in self.figures and self._can_tree():
            budget = self.figures["tree_budget"]
            if settings.tree_mode == "paths" and self.methods.workspace is not None:
                self.facts["decoding"] += " Trees, path by path, run with a growing cache."
            study = self._speculative("tree", self.drafter, settings.max_new_tokens, budget=budget)
            self.figures |= study.tau(settings.seed).figures("tau_tree_decoded")

    def _decode_together(self) -> None:
        """Decode the prompts in batches: the same tokens, and how many a second come out of it."""
        settings = self.settings
        if settings.batch == 1:
            return
        try:
            check_batch_target(self.target)
        except UnsupportedTarget as error:
            self.facts["decoding"] += f" Prompts were not decoded {settings.batch} at a time: {error}"
            return
        study, tokens_per_s = run_together(
            self.target,
            self.drafter,
            self.prompts,
            batch=settings.batch,
            max_new_tokens=settings.max_new_tokens,
            progress=self.progress,
            block_size=self.size,
            **self.methods.sampling(),
        )
        self._keep("together", study)
        self.figures["tau_together"] = round(study.tau(settings.seed).mean, 4)
        self.figures["together_tokens_per_s"] = round(tokens_per_s, 2)

    def _speed(self) -> None:
        """Speed-ups over plain decoding, and the reason when decoding is slower."""
        found, self.facts["speed"] = speeds(self.studies, self.size, self.figures["best_block_size"])
        self.figures |= found

    def _checks(self) -> pl.DataFrame:
        """Run the diagnosis when asked for, and where something says that a tau is not what it seems: offline
        and decoded ones disagree, greedy answers are not plain decoding's, or prompts are rendered otherwise
        than the training text was.
        """
        settings, told = self.settings, self.agreement.sentence(self.settings.gap_tolerance)
        disagree = settings.temperature == 0 and abs(self.agreement.judged_gap) > settings.gap_tolerance
        lossy = self.figures.get("greedy_different", 0) > self.figures.get("greedy_ties", 0)
        if lossy:
            told += " Some greedy answers are not the target's own: decoding is at fault."
        self.facts["agreement"] = told
        apart = self._served_apart()
        doubt = disagree or lossy or apart or self.rendered.verdict == SUSPECT
        if settings.diagnose == "never" or (settings.diagnose == "auto" and not doubt):
            return pl.DataFrame(schema=CHECKS_SCHEMA)
        samples, thinking = self.answers.made_by()
        checks = diagnose(
            self.target,
            self.drafter,
            self.answers.items(self.prompts, self.studies["plain"]),
            samples=samples,
            thinking=thinking,
            progress=self.progress,
        )
        checks += self._served_checks()
        self.facts["cause"] = likely_cause(checks, disagree or lossy or apart)
        return checks_frame(checks)


# Prompts are decoded one after the other, as the published protocol does, plainly first: every speculative
# run is held against that token for token. Under greedy choice the two must be equal; where they are not, the
# margin between the target's two tokens at the first difference tells a tie (numerics of another kernel or
# batch shape decided it) from a fault.

# Of logits, a few units in the last place.
TIE_MARGIN = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}


def run_study(
    method: str,
    prompts: Sequence[Prompt],
    answer: Callable[[Sequence[int], int, Callable[[int], None]], Decoded],
    *,
    max_new_tokens: int,
    follow: Callable[[Prompt, list[list[int]]], list[int] | None] | None = None,
    progress: Callable[..., None] | None = None,
) -> Study:
    """Call `answer(ids, max_new_tokens, on_round)` for every prompt.

    on_round(tokens of the answer so far) reports progress, which may raise to stop: a slow machine takes
    minutes for a prompt. follow: given a prompt and its answers so far, return the ids of its next turn, or
    None after the last.
    """
    study = Study(method)
    tokens = done = 0

    def tick(new: int = 0) -> None:
        if progress is not None:
            progress(f"decode {method}", done, len(prompts), tokens=tokens + new)

    for index, prompt in enumerate(prompts):
        ids: list[int] | None = list(prompt.input_ids)
        given: list[list[int]] = []
        while ids is not None:
            study.answers.append(answer(ids, prompt.longest(max_new_tokens), tick))
            study.asked.append(tuple(ids))
            study.prompt.append(index)
            given.append(study.answers[-1].tokens)
            tokens += len(given[-1])
            ids = follow(prompt, given) if follow is not None else None
        done = index + 1
        tick()
    return study


def next_turn(
    target: Target, thinking: bool, date: str = ""
) -> Callable[[Prompt, list[list[int]]], list[int] | None]:
    """Return the `follow` of `run_study` for prompts of several turns: the model's own answers go into the
    dialogue. Where the template refuses one (that holds a control token, say), the dialogue ends: what was
    decoded stays, and the log says why.
    """

    def follow(prompt: Prompt, given: list[list[int]]) -> list[int] | None:
        stop_ids = frozenset(target.stop_ids)
        dialogue = dialogue_of(prompt, target.tokenizer, thinking=thinking, date=date, stop_ids=stop_ids)
        ids = dialogue.prompt()
        try:
            for tokens in given:
                dialogue.answer(tokens)
                ids = dialogue.prompt()
        except TemplateFailure as error:
            logger.warning("%s ends after %d of its answers: %s", prompt.id, len(given), error)
            return None
        return ids

    return follow


@dataclass(frozen=True)
class Difference:
    """Where an answer first leaves plain decoding, and by how much the target preferred plain's token, in
    logits."""

    answer: int
    place: int
    margin: float
    tie: bool


@torch.no_grad()
def differences(target: Target, plain: Study, other: Study) -> list[Difference]:
    """Return the first difference of every answer that is not plain decoding's (the shorter of two cut
    answers rules)."""
    found = []
    for index, (a, b, asked) in enumerate(zip(plain.answers, other.answers, plain.asked)):
        length = min(len(a.tokens), len(b.tokens))
        place = next((i for i in range(length) if a.tokens[i] != b.tokens[i]), None)
        if place is None:
            continue
        ids = torch.tensor([[*asked, *a.tokens[:place]]], device=target.device)
        hidden = target.body(input_ids=ids, use_cache=False).last_hidden_state[0, -1:]
        best = target.head.logits(hidden)[0].float()
        margin = abs(float(best[a.tokens[place]] - best[b.tokens[place]]))
        found.append(Difference(index, place, margin, margin <= TIE_MARGIN[target.dtype]))
    return found


SHOWN_TOKENS = 60  # of what was asked, its end


def answers_frame(
    studies: Sequence[Study],
    prompts: Sequence[Prompt],
    text_of: Callable[[Sequence[int]], str],
    offline_taus: Mapping[int, float],
) -> pl.DataFrame:
    """Return one row an answer and method: `method`, `answer`, `prompt` (id), `set`, `turn` (of its prompt,
    from 0), `source`, `asked` (the end of what it continues, as text), `tokens`, `rounds`, `tau`,
    `tau_offline` (of the trained drafter, where it has one), `seconds`, `ms_per_token`, `prefill_ms`."""
    rows = [
        {
            "method": study.method,
            "answer": index,
            "prompt": prompts[study.prompt[index]].id,
            "set": prompts[study.prompt[index]].set_name,
            "turn": index - study.prompt.index(study.prompt[index]),
            "source": prompts[study.prompt[index]].source,
            "asked": text_of(study.asked[index][-SHOWN_TOKENS:]),
            "tokens": len(a.tokens),
            "rounds": len(a.rounds),
            "tau": sum(a.produced) / len(a.rounds) if a.rounds else None,
            "tau_offline": offline_taus.get(index) if study.method == "trained" else None,
            "seconds": a.seconds,
            "ms_per_token": 1e3 * a.seconds_per_token,
            "prefill_ms": 1e3 * a.prefill_seconds,
        }
        for study in studies
        for index, a in enumerate(study.answers)
    ]
    return pl.DataFrame(rows, infer_schema_length=None)


def rounds_frame(studies: Sequence[Study]) -> pl.DataFrame:
    """Return one row a round: `method`, `answer`, `round`, `place` (answer tokens before it), `accepted`,
    `produced`, `drafted`, `rejected` (token id or null)."""
    rows = []
    for study in studies:
        for index, answer in enumerate(study.answers):
            place = 0
            for number, r in enumerate(answer.rounds):
                rejected = r.rejected if r.rejected >= 0 else None
                rows.append((study.method, index, number, place, r.accepted, r.produced, r.drafted, rejected))
                place += r.produced
    names = ("method", "answer", "round", "place", "accepted", "produced", "drafted", "rejected")
    kinds: list[Any] = [pl.String, *[pl.Int64] * 7]
    return pl.DataFrame(rows, schema=dict(zip(names, kinds)), orient="row")


def tokens_frame(study: Study, decode_one: Callable[[int], str]) -> pl.DataFrame:
    """Return one row an answer token: `answer`, `place`, `text`, `kind` (``first``, ``accepted`` or
    ``target``: the target's own token of a round), and for the latter the text of the draft it `replaced`
    (null: all were accepted)."""
    rows = []
    for index, answer in enumerate(study.answers):
        kinds: list[tuple[str, int]] = [("first", -1)]
        for r in answer.rounds:
            kinds += [("accepted", -1)] * min(r.accepted, r.produced)
            kinds += [("target", r.rejected)] * (r.produced - min(r.accepted, r.produced))
        for place, (token, (kind, rejected)) in enumerate(zip(answer.tokens, kinds, strict=True)):
            replaced = decode_one(rejected) if rejected >= 0 else None
            rows.append((index, place, decode_one(token), kind, replaced))
    schema = {
        "answer": pl.Int64,
        "place": pl.Int64,
        "text": pl.String,
        "kind": pl.String,
        "replaced": pl.String,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def breaks_frame(
    report: OfflineReport, text_of: Callable[[int], str], source_of: dict[str, str]
) -> pl.DataFrame:
    """Return one row for every round of the offline walk whose chain broke: `answer`, `place`, `accepted`,
    `entropy`, `p_top`, `p_label`, the texts `label` (the answer's token) and `drafted`, `source`, and
    `kind` (see `token_class`).
    """
    rows, _ = report.walk()
    frame = report.anchors[rows].filter(pl.col("label").is_not_null())
    ids = frame.select(pl.concat([pl.col("label"), pl.col("drafted")]).unique()).to_series().to_list()
    texts = {token: text_of(token) for token in ids}
    return frame.select(
        "answer",
        "place",
        "accepted",
        "entropy",
        "p_top",
        "p_label",
        label=pl.col("label").replace_strict(texts, return_dtype=pl.String),
        drafted=pl.col("drafted").replace_strict(texts, return_dtype=pl.String),
        source=pl.col("sample").replace_strict(source_of, default="unknown", return_dtype=pl.String),
    ).with_columns(kind=pl.col("label").map_elements(token_class, return_dtype=pl.String))


def token_class(text: str) -> str:
    """Return what kind of token a text is: where drafts die depends on it."""
    bare = text.strip()
    if not bare:
        return "line break" if "\n" in text else "space"
    if bare.startswith("<|") or (bare.startswith("<") and bare.endswith(">")):
        return "special"
    if any(character.isdigit() for character in bare):
        return "number"
    if any(character.isalpha() for character in bare):
        return "word start" if text[0].isspace() else "word piece"
    return "punctuation"


# Do offline and decoded tau agree? Where the decoded text is the stored one, they must: every round is the
# same question. Where it is not (another precision, or sampled answers, sends a text another way at one
# token), the taus are of two texts, and a gap says nothing about the drafter. So agreement is judged on the
# answers whose text is the stored one, if there are any.


@dataclass(frozen=True)
class Agreement:
    """Decoded and offline tau of the same prompts [n], for which the texts are the same [n] bool, and the
    numbers of these answers [n].
    """

    decoded: np.ndarray
    offline: np.ndarray
    same: np.ndarray
    answers: np.ndarray

    @property
    def gap(self) -> float:
        """Offline over decoded tau, minus 1, over all answers."""
        return _gap(self.decoded, self.offline)

    @property
    def judged_gap(self) -> float:
        """The same over the answers whose text is the stored one, if there are any, else over all."""
        return _gap(self.decoded[self.same], self.offline[self.same]) if self.same.any() else self.gap

    def sentence(self, tolerance: float) -> str:
        """Say both taus and the verdict."""
        text = (
            f"Offline tau {self.offline.mean():.3f}, decoded {self.decoded.mean():.3f} on the same prompts "
            f"({100 * self.gap:+.1f} %"
        )
        verdict = "disagree" if abs(self.judged_gap) > tolerance else "agree"
        if self.same.all() or not self.same.any():
            return f"{text}): they {verdict}."
        return (
            f"{text}). {int((~self.same).sum())} of {len(self.same)} decoded answers are not the stored "
            f"ones; on the others the gap is {100 * self.judged_gap:+.1f} %: they {verdict}."
        )


def _gap(decoded: np.ndarray, offline: np.ndarray) -> float:
    return float(offline.mean() / decoded.mean() - 1)


def compare_taus(
    trained: Study, report: OfflineReport, samples: Sequence[str], texts: Sequence[Sequence[int]], limit: int
) -> Agreement:
    """Compare each decoded answer with the offline walk along its text, cut at `limit` tokens.

    `samples` and `texts` hold the hash and the tokens of what was analysed offline, one for each answer.
    Answers without a round on either side are left out.
    """
    firsts = report.anchors.group_by("sample", maintain_order=True).agg(pl.col("answer").first())
    number_of = dict(firsts.iter_rows())
    rounds = report.rounds(limit=limit)
    rows = [
        (tau, sum(rounds[number_of[sample]]) / len(rounds[number_of[sample]]), same, number)
        for number, (answer, sample, text) in enumerate(zip(trained.answers, samples, texts, strict=True))
        if sample in number_of and answer.rounds and rounds[number_of[sample]]
        for tau, same in [(sum(answer.produced) / len(answer.rounds), answer.tokens == list(text[:limit]))]
    ]
    if not rows:
        raise InputError("no answer has a round of speculative decoding: raise max_new_tokens above 1.")
    return Agreement(*(np.asarray(column) for column in zip(*rows)))


# Which block size and tree budget pay: chosen on a dev part of the answers, reported on the rest

BLOCK_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32)


class Operating(NamedTuple):
    """`costs`: see `measure_costs`. `points`: expected speed-up of each block size and budget by the
    dev part's tau, best first. `budgets`: `part`, `budget`, `tau`, `low`, `high`. `block_size`, `budget`
    (0: no tree measured): the best.
    """

    costs: pl.DataFrame
    points: pl.DataFrame
    budgets: pl.DataFrame
    block_size: int
    budget: int


def measure_operating_points(
    target: Target,
    drafter: Drafter,
    report: OfflineReport,
    *,
    dev_share: float,
    tree_steps: bool,
    context_tokens: int,
    repeats: int,
    workspace: Workspace | None = None,
    on_point: Callable[[int, int], None] | None = None,
) -> Operating:
    """Measure what rounds cost, and combine it with what the offline report says they give.

    tree_steps: also time target steps as wide as the trees; else their cost is extrapolated from the chains'
    widths. workspace: measure decoding at fixed shapes.
    """
    sizes = sorted({*(size for size in BLOCK_SIZES if size < report.block_size), report.block_size})
    wide = (report.block_size + budget for budget in report.budgets if tree_steps)
    options: dict[str, Any] = dict(
        block_sizes=sizes,
        budgets=report.budgets,
        context_tokens=context_tokens,
        repeats=repeats,
        on_point=on_point,
    )
    if workspace is not None:
        costs = measure_fixed_costs(workspace, drafter, **options)
    else:
        costs = measure_costs(target, drafter, widths=sorted({1, *sizes, *wide}), **options)
    dev, test = split_dev(report.num_answers, dev_share)
    taus = [(size, 0, report.tau(block_size=size, answers=dev).mean) for size in sizes]
    taus += [(report.block_size, budget, report.tau(budget, answers=dev).mean) for budget in report.budgets]
    known = pl.DataFrame(taus, schema=["block_size", "budget", "tau"], orient="row")
    points = operating_points(Costs.from_frame(costs, replay=target.is_hybrid), known)
    chains, trees = points.filter(pl.col("budget") == 0), points.filter(pl.col("budget") > 0)
    return Operating(
        costs,
        points,
        _by_part(report, {"dev": dev, "test": test, "all": None}),
        int(chains["block_size"][0]),
        int(trees["budget"][0]) if trees.height else 0,
    )


def _by_part(report: OfflineReport, parts: dict[str, list[int] | None]) -> pl.DataFrame:
    rows = []
    for part, answers in parts.items():
        for budget in (0, *report.budgets):
            tau = report.tau(budget, answers=answers)
            rows.append((part, budget, tau.mean, tau.interval.low, tau.interval.high))
    return pl.DataFrame(rows, schema=["part", "budget", "tau", "low", "high"], orient="row")


def speeds(studies: Mapping[str, Study], size: int, best_size: int) -> tuple[dict[str, float], str]:
    """Return figures of how much faster than plain decoding each method was, and a sentence on the fastest
    chain, blocks of `size` slots (``trained``) or of `best_size` (``best block``), and why it was slower.
    """
    plain = studies["plain"].seconds_per_token
    faster = {name: plain / study.seconds_per_token for name, study in studies.items() if name != "plain"}
    chains = {name: faster[name] for name in ("trained", "best block") if name in faster}
    best = max(chains, key=chains.__getitem__)
    figures = {
        "plain_ms_per_token": round(1e3 * plain, 3),
        "speedup_chain": round(chains[best], 4),
        "speedup_trained_block": round(faster["trained"], 4),
    }
    for name in ("tree", "other"):
        if name in faster:
            figures[f"speedup_{name}"] = round(faster[name], 4)
    study, speed = studies[best], chains[best]
    beside = ""
    if "other" in faster:
        other = studies["other"].tau().pooled
        beside = f" The other drafter reached {other:.2f} tokens a round and {faster['other']:.2f} times."
    tau, rounds = study.tau().pooled, sum(len(a.rounds) for a in study.answers)
    round_s = sum(a.seconds for a in study.answers) / max(1, rounds)
    shares = ", ".join(
        f"{phase} {100 * share:.0f} %" for phase, share in study.phase_share().items() if share > 0
    )
    told = f"At block size {size if best == 'trained' else best_size} a round took {1e3 * round_s:.1f} ms "
    told += f"({shares}) and gave {tau:.2f} tokens; a plain step took {1e3 * plain:.1f} ms. "
    if speed >= 1:
        return figures, f"{told}Speculative decoding was {speed:.2f} times as fast.{beside}"
    paid = round_s / plain
    reason = f"a round costs {paid:.2f} plain steps, so it pays only above tau {paid:.2f}"
    return (
        figures,
        f"{told}It was slower ({speed:.2f} times): {reason}; this drafter reaches {tau:.2f} there.{beside}",
    )


# What a round costs on this machine, each the median of a few repeats after one warm-up. A speed-up is tau
# over cost, so these few milliseconds decide whether a longer block or a larger tree pays.

SCHEMA = {"what": pl.String, "size": pl.Int64, "ms": pl.Float64}


def median_ms(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the median milliseconds of `call` after one warm-up."""
    timings = []
    for _ in range(repeats + 1):
        _drain(device)
        start = time.perf_counter()
        call()
        _drain(device)
        timings.append(1e3 * (time.perf_counter() - start))
    return statistics.median(timings[1:])


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def measure_costs(
    target: Target,
    drafter: Drafter,
    *,
    widths: Sequence[int],
    block_sizes: Sequence[int],
    budgets: Sequence[int] = (),
    context_tokens: int = 128,
    repeats: int = 5,
    on_point: Callable[[int, int], None] | None = None,
) -> pl.DataFrame:
    """Return `what`, `size`, `ms`: ``step`` (target on that many tokens, rolled back), ``draft`` (block
    size), ``build``.

    A step includes choosing the tokens and forgetting them all again. On a hybrid target keeping some of them
    runs those once more, which costs another step of their width (see `results.round_ms`).
    on_point(done, total) is called before every point.
    """
    head = target.head
    device = target.device
    rows: list[tuple[str, int, float]] = []
    total = len(widths) + len(block_sizes) + len(budgets)

    def point(what: str, size: int, call: Callable[[], Any]) -> None:
        if on_point is not None:
            on_point(len(rows), total)
        rows.append((what, size, median_ms(call, device, repeats)))

    tokens = torch.arange(context_tokens, device=device) % target.vocab_size
    with TargetRun(target, drafter.config.tap_ids) as run:
        taps = run.step(tokens, certain=True).taps
        run.commit(context_tokens)
        assert taps is not None

        def step(width: int) -> None:
            head.logits(run.step(tokens[:1].expand(width)).normed).argmax(-1).tolist()
            run.commit(0)

        for width in widths:
            point("step", width, partial(step, width))
    proposer = Proposer(drafter, head)
    proposer.extend(taps)

    def draft(size: int) -> None:
        proposer.extend(taps[:2])
        proposer.draft(tokens[:1], size).greedy().tolist()
        proposer.cache.crop(context_tokens)

    for size in block_sizes:
        point("draft", size, partial(draft, size))
    longest = proposer.draft(tokens[:1], max(block_sizes))
    for budget in budgets:
        point("build", budget, partial(longest.tree, budget))
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def _again(now: StaticRound, length: int, launch: Callable[[], None]) -> None:
    now.length.fill_(length)
    launch()


@torch.no_grad()
def measure_fixed_costs(
    workspace: Workspace,
    drafter: Drafter,
    *,
    block_sizes: Sequence[int],
    budgets: Sequence[int] = (),
    context_tokens: int = 128,
    repeats: int = 5,
    on_point: Callable[[int, int], None] | None = None,
) -> pl.DataFrame:
    """The same for decoding at fixed shapes: every phase of a round is timed as it is launched there.

    Trees are those of the largest block size; a step of width block size + budget is theirs.
    """
    device = workspace.target.device
    rows: list[tuple[str, int, float]] = []
    longest = max(block_sizes)
    points = [(1, 0), *((size, 0) for size in block_sizes), *((longest, budget) for budget in budgets)]
    for done, (size, budget) in enumerate(points):
        if on_point is not None:
            on_point(done, len(points))
        decoder = StaticDecoder(workspace, drafter if size > 1 else None, block_size=size, budget=budget)
        now = decoder.prepared(2 * context_tokens)
        times = {}
        for phase, launch in now.steps.items():
            times[phase] = median_ms(partial(_again, now, context_tokens, launch), device, repeats)
        rows.append(("step", size + budget, times["verify"] + times["commit"]))
        if size > 1 and not budget:
            rows.append(("draft", size, times["draft"]))
        if budget:
            rows.append(("build", budget, times["build"]))
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def protocol(
    settings: EvaluationSettings, target: Target, count: int, block_size: int, thinking: bool
) -> dict[str, Any]:
    """Return the rules under which a tau was measured: two may be compared only when these agree.

    An answer ends at a stop token, at `max_new_tokens` and, for prompts with a stored answer, at that
    answer's length. `template`: the first 12 hex digits of the chat template's SHA-256.
    """
    template = "none"
    if not target.name.startswith("random:"):
        template = hashlib.sha256(template_of(target.tokenizer).encode()).hexdigest()[:12]
    return {
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "template": template,
        "thinking": thinking,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "max_new_tokens": settings.max_new_tokens,
        "prompts": settings.prompts,
        "count": count,
        "seed": settings.seed,
        "block_size": block_size,
        "last_block": "full",
        "batch": 1,
        "counts": "accepted drafts + 1 a round; mean over rounds, then over answers; last round cut at the "
        "answer's end",
    }
