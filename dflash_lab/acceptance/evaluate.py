"""The work of the stage `acceptance`, step by step; torch is imported here, so this module is loaded only
to run it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import polars as pl
import torch

from dflash_lab.acceptance import causes, diagnosis
from dflash_lab.acceptance.agreement import compare_taus
from dflash_lab.acceptance.answers import Answers
from dflash_lab.acceptance.batch import check_batch_target
from dflash_lab.acceptance.decode import Decoded
from dflash_lab.acceptance.evaluation import Evaluation
from dflash_lab.acceptance.methods import Method, Methods
from dflash_lab.acceptance.offline import offline
from dflash_lab.acceptance.offline_report import OfflineReport
from dflash_lab.acceptance.operating import (
    Operating,
    measure_operating_points,
    speeds,
    typical_context,
)
from dflash_lab.acceptance.prompts import check_vocabulary, choose, load_prompts
from dflash_lab.acceptance.protocol import Protocol
from dflash_lab.acceptance.study import (
    Study,
    answers_frame,
    breaks_frame,
    differences,
    next_turn,
    rounds_frame,
    run_study,
    tokens_frame,
)
from dflash_lab.acceptance.target_run import check_tree_target
from dflash_lab.acceptance.tau import compare
from dflash_lab.acceptance.together import run_together
from dflash_lab.drafter.checkpoint import load_checkpoint
from dflash_lab.drafter.model import Drafter
from dflash_lab.errors import UnsupportedTarget
from dflash_lab.target.loading import choose_device, load_target

logger = logging.getLogger(__name__)


class Evaluator:
    """One evaluation: target, drafter and prompts, and the studies made so far.

    `params` has the names of the stage `acceptance`'s parameters, which document unit and range of each.
    """

    def __init__(self, params: Any, progress: Any = None) -> None:
        self.params, self.progress = params, progress
        device = choose_device(params.device)
        self.target = load_target(params.target, device=device, dtype=params.dtype, seed=params.seed)
        self.drafter = self._load(params.drafter_path)
        self.size = params.block_size or self.drafter.config.block_size
        self.answers = Answers(params, self.target, self.drafter.config.tap_ids)
        self.rendered = causes.template(self.target, *self.answers.made_by())
        available = load_prompts(
            params.prompts,
            params.samples_path,
            lambda: self.target.tokenizer,
            thinking=params.thinking,
            date=self.answers.date(),
        )
        self.prompts = choose(available, params.num_prompts, params.seed)
        source = params.samples_path if params.prompts == "heldout" else params.prompts
        check_vocabulary(self.prompts, self.target.vocab_size, str(source))
        self.methods = Methods(
            self.target,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=params.seed,
        )
        self.studies: dict[str, Study] = {}
        self.figures: dict[str, Any] = {"prompts": len(self.prompts), "prompts_available": len(available)}
        self.facts: dict[str, Any] = {
            "hybrid": self.target.is_hybrid,
            "decoding": self.methods.sentence,
        }

    def evaluate(self) -> Evaluation:
        """Do everything in order."""
        params = self.params
        self._decode_basics()
        report = self._offline()
        operating = self._operating(report)
        self._decode_best()
        self._decode_together()
        checks = self._checks()
        self._speed()
        protocol = Protocol.of(params, self.target, len(self.prompts), self.size, self.answers.thinking())
        self.facts["protocol"] = protocol.as_dict()
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
        return Evaluation(
            figures=self.figures,
            answers=answers_frame(studies, self.prompts, self._text),
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

    def _load(self, folder: Any) -> Drafter:
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
        follow = next_turn(self.target, self.params.thinking, self.answers.date()) if many else None
        study = run_study(
            method, self.prompts, one, max_new_tokens=limit, follow=follow, progress=self.progress
        )
        return self._keep(method, study)

    def _keep(self, method: str, study: Study) -> Study:
        self.studies[method] = study
        if method != "plain" and self.params.temperature == 0:
            found = differences(self.target, self.studies["plain"], study)
            self.facts.setdefault("differences", {})[method] = [vars(d) for d in found]
            for name, count in (("greedy_different", len(found)), ("greedy_ties", sum(d.tie for d in found))):
                self.figures[name] = self.figures.get(name, 0) + count
        return study

    def _speculative(
        self, method: str, drafter: Drafter, limit: int, *, block_size: int = 0, budget: int = 0
    ) -> Study:
        answer = self.methods.speculative(drafter, block_size or self.size, budget)
        return self._study(method, answer, limit)

    def _decode_basics(self) -> None:
        """Plain decoding, the trained drafter (DFlash 2: also without its selector), an untrained one, and
        the drafter to compare with.
        """
        params = self.params
        self._study("plain", self.methods.plain(), params.max_new_tokens)
        tau = self._speculative("trained", self.drafter, params.max_new_tokens).tau(params.seed)
        self.figures |= tau.figures("tau_trained")
        if self.drafter.candidate_selector is not None:
            bare = self._speculative("no selector", self.drafter.without_selector(), params.max_new_tokens)
            self.figures |= bare.tau(params.seed).figures("tau_no_selector")
        if params.untrained_tokens:
            generator = torch.Generator().manual_seed(params.seed)
            untrained = Drafter(self.drafter.config).initialize(generator).eval()
            untrained = untrained.to(self.target.device, self.target.dtype)
            limit = min(params.untrained_tokens, params.max_new_tokens)
            self.figures |= (
                self._speculative("untrained", untrained, limit).tau(params.seed).figures("tau_untrained")
            )
        if params.other_drafter:
            other = self._load(params.other_drafter)
            second = self._speculative(
                "other", other, params.max_new_tokens, block_size=other.config.block_size
            )
            self.figures |= second.tau(params.seed).figures("tau_other")
            paired = compare(self.studies["trained"].answer_taus, second.answer_taus, seed=params.seed)
            self.figures |= {
                "other_minus_trained": round(paired.difference, 4),
                "other_minus_trained_low": round(paired.interval.low, 4),
                "other_minus_trained_high": round(paired.interval.high, 4),
            }

    def _offline(self) -> OfflineReport:
        """Offline metrics of the decoded prompts, then of more held-out samples; the former's answer
        numbers.
        """
        params = self.params
        items = self.answers.items(self.prompts, self.studies["plain"], extra=params.offline_samples)
        self.facts["offline_source"] = self.answers.source
        with_temperatures = self.answers.has_final and not self.drafter.config.is_second
        done = itertools.count(1)
        report = offline(
            items,
            self.target.head,
            self.drafter,
            block_size=self.size,
            budgets=params.budgets,
            temperatures=params.temperatures if with_temperatures else (),
            on_item=lambda tokens: self._tick("offline", next(done), len(items)),
        )
        texts = self.answers.texts(self.prompts, self.studies["plain"])
        self.agreement = compare_taus(self.studies["trained"], report, *texts, params.max_new_tokens)
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
        found = measure_operating_points(
            self.target,
            self.drafter,
            report,
            dev_share=self.params.dev_share,
            tree_steps=self._can_tree(),
            context_tokens=typical_context(plain.asked, [answer.tokens for answer in plain.answers]),
            repeats=self.params.cost_repeats,
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
        try:
            check_tree_target(self.target)
        except UnsupportedTarget as error:
            self.facts["tree_refused"] = str(error)
            return False
        return True

    def _decode_best(self) -> None:
        """Decode at the best expected block size and at the best tree budget, chosen on the dev part."""
        params = self.params
        size = self.figures["best_block_size"]
        if params.decode_best and size != self.size:
            study = self._speculative("best block", self.drafter, params.max_new_tokens, block_size=size)
            self.figures["tau_best_block"] = round(study.tau(params.seed).mean, 4)
        if params.decode_tree and "tree_budget" in self.figures and self._can_tree():
            budget = self.figures["tree_budget"]
            study = self._speculative("tree", self.drafter, params.max_new_tokens, budget=budget)
            self.figures |= study.tau(params.seed).figures("tau_tree_decoded")

    def _decode_together(self) -> None:
        """Decode the prompts in batches: the same tokens, and how many a second come out of it."""
        params = self.params
        if params.batch == 1:
            return
        try:
            check_batch_target(self.target)
        except UnsupportedTarget as error:
            self.facts["decoding"] += f" Prompts were not decoded {params.batch} at a time: {error}"
            return
        study, tokens_per_s = run_together(
            self.target,
            self.drafter,
            self.prompts,
            batch=params.batch,
            max_new_tokens=params.max_new_tokens,
            progress=self.progress,
            block_size=self.size,
            **self.methods.sampling(),
        )
        self._keep("together", study)
        self.figures["tau_together"] = round(study.tau(params.seed).mean, 4)
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
        params, told = self.params, self.agreement.sentence(self.params.gap_tolerance)
        disagree = params.temperature == 0 and abs(self.agreement.judged_gap) > params.gap_tolerance
        lossy = self.figures.get("greedy_different", 0) > self.figures.get("greedy_ties", 0)
        if lossy:
            told += " Some greedy answers are not the target's own: decoding is at fault."
        self.facts["agreement"] = told
        doubt = disagree or lossy or self.rendered.verdict == causes.SUSPECT
        if params.diagnose == "never" or (params.diagnose == "auto" and not doubt):
            return pl.DataFrame(schema=diagnosis.SCHEMA)
        samples, thinking = self.answers.made_by()
        checks = diagnosis.diagnose(
            self.target,
            self.drafter,
            self.answers.items(self.prompts, self.studies["plain"]),
            samples=samples,
            thinking=thinking,
            progress=self.progress,
        )
        self.facts["cause"] = diagnosis.likely_cause(checks, disagree or lossy)
        return diagnosis.checks_frame(checks)
