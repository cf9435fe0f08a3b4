"""Stage `acceptance`: does the drafter work? Measured by decoding with it, beside plain decoding and an
untrained drafter, and held against the offline metrics of the same answers.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

from dflash_lab import files
from dflash_lab.acceptance.prompts import HELDOUT, chosen, find_sets
from dflash_lab.acceptance.results import Evaluation
from dflash_lab.acceptance.settings import EvaluationSettings
from dflash_lab.params import StageParams, no_address, param
from dflash_lab.stages.judgement import of_acceptance

logger = logging.getLogger(__name__)


class AcceptanceParams(StageParams):
    """Parameters of `acceptance`."""

    stage: ClassVar[str] = "acceptance"

    drafter: str = param("", "drafter checkpoint folder; empty: the run's", group="data")
    other_drafter: str = param("", "a second drafter to compare with, same prompts; empty: none")
    samples: str = param("", "samples file; empty: the run's")
    store: str = param("", "feature store; empty: the run's, or live states where there is none")
    prompts: str = param(
        "heldout",
        "heldout, public sets (gsm8k,humaneval) or files, with commas between",
    )
    num_prompts: int = param(8, "prompts of each set decoded, drawn with the seed; 0: all", low=0)
    max_new_tokens: int = param(
        128, "longest answer; a stored answer's length also ends one", unit="tokens", low=2
    )
    batch: int = param(
        1,
        "also decode this many prompts together with the trained drafter; 1: no",
        low=1,
        high=256,
        group="decoding",
    )
    thinking: bool = param(False, "open prompts from files with thinking on")
    block_size: int = param(0, "slots of a block, the anchor included; 0: as trained", low=0, high=256)
    temperature: float = param(0.0, "0: greedy; else at least 0.01", low=0.0, high=10.0)
    top_p: float = param(1.0, "smallest mass kept when sampling", low=0.01, high=1.0)
    top_k: int = param(0, "tokens kept when sampling; 0: all", low=0)
    budgets: list[int] = param(
        [16, 32, 64, 128, 256, 512, 1024], "tree budgets", unit="nodes", low=1, high=4096, group="draft trees"
    )
    dev_share: float = param(
        0.5, "share of the answers on which block size and budget are chosen", low=0.05, high=0.95
    )
    decode_tree: bool = param(True, "also decode with trees of the best budget, where the target can")
    tree_mode: str = param("mask", "trees in one forward (mask) or path by path (paths: any target, slower)",
                           choices=("mask", "paths"))  # fmt: skip
    decode_best: bool = param(True, "also decode with the block size of the best expected speed-up")
    untrained_tokens: int = param(
        64, "longest answer of the untrained drafter; 0: skip it", unit="tokens", low=0, group="comparison"
    )
    temperatures: list[float] = param(
        [0.5, 1.0], "offline estimate of sampled tau, where final states are stored", low=0.01, high=10.0
    )
    offline_samples: int = param(64, "more held-out samples of the store analysed offline; 0: none", low=0)
    cost_repeats: int = param(5, "repeats of each timed step", low=1, high=100)
    gap_tolerance: float = param(0.03, "offline and decoded tau may differ by this share", low=0.0, high=1.0)
    diagnose: str = param("auto", "checks for likely faults: auto (when taus disagree), always, never",
                          choices=("auto", "always", "never"))  # fmt: skip
    server: str = param(
        "", "also measure this running server, http://host:port/v1; empty: none", group="a running server"
    )
    server_model: str = param("", "the model it serves; empty: the only one")
    server_concurrency: list[int] = param([1, 8], "requests at a time, each measured", low=1, high=4096)
    server_timeout_s: int = param(600, "longest wait for a word of it", unit="s", low=1)

    def check(self) -> None:
        """A temperature is 0, or one that logits can be divided by."""
        self.require(self.temperature == 0 or self.temperature >= 0.01, "temperature", "0, or at least 0.01")
        if self.server:
            self.require(not (why := no_address(self.server)), "server", why)
            self.require(bool(self.server_concurrency), "server_concurrency", "give at least one")

    @property
    def drafter_path(self) -> Path:
        """The drafter to measure."""
        return self.path_or(self.drafter, "drafter")

    @property
    def samples_path(self) -> Path:
        """The samples whose held-out part gives prompts."""
        return self.path_or(self.samples, "samples.parquet")

    @property
    def store_path(self) -> Path:
        """The feature store of the offline metrics."""
        return self.path_or(self.store, "store")

    def settings(self) -> EvaluationSettings:
        """What the evaluation is told: the same names, with paths found."""
        given = vars(self) | {
            "drafter": self.drafter_path,
            "other_drafter": Path(self.other_drafter) if self.other_drafter else None,
            "samples": self.samples_path,
            "store": self.store_path if self.store or self.store_path.exists() else None,
        }
        return EvaluationSettings(**{field.name: given[field.name] for field in fields(EvaluationSettings)})

    def inputs(self) -> list[Path]:
        """Drafters, prompts and store."""
        paths = [self.drafter_path, *([Path(self.other_drafter)] if self.other_drafter else [])]
        sets = chosen(self.prompts)
        paths += [one.path for one in sets if one.path]
        if any(one.name == HELDOUT for one in sets):
            stored = self.store or self.store_path.exists()
            paths += [self.samples_path, *([self.store_path] if stored else [])]
        return paths

    def needs(self) -> list[tuple[Path, str]]:
        """The drafter, and the samples where prompts come from them; a set of prompts that is not here is
        refused as it is looked for.
        """
        needed = [(self.drafter_path / "config.json", "" if self.drafter else "train_drafter")]
        if any(one.name == HELDOUT for one in find_sets(self.prompts)):
            needed.append((self.samples_path, "" if self.samples else "prepare"))
        return needed

    def training(self) -> dict[str, Any] | None:
        """The figures of this run's training; None for a drafter of another place, or one whose training left
        none that tell of its data.
        """
        path = self.path_or("", "train_drafter") / "figures.json"
        figures = files.read_json(path) if not self.drafter and path.exists() else {}
        return figures if "training_samples" in figures else None


AcceptanceResult = Evaluation  # the registry finds a stage's result by this name


def run_acceptance(params: AcceptanceParams, progress: Any = None) -> AcceptanceResult:
    """Decode, compare, analyse, and judge."""
    from dflash_lab.acceptance.evaluate import Evaluator

    result = Evaluator(params.settings(), progress).evaluate()
    result.figures["judgement"] = of_acceptance(result.figures, params.training())
    logger.info("%s", result.figures["judgement"])
    return result
