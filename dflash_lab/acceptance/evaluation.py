"""What an evaluation of a drafter found, on disk and in memory. No torch here: figures and reports read it
alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from dflash_lab import files
from dflash_lab.acceptance.offline_report import OfflineReport
from dflash_lab.acceptance.whatif import Costs

FRAMES = ("answers", "rounds", "tokens", "budgets", "costs", "points", "checks", "breaks")


@dataclass(frozen=True)
class Evaluation:
    """Headline figures and the tables that figures are drawn from.

    `answers`, `rounds`, `tokens`: see `acceptance.study`. `budgets`: `part` (dev | test | all), `budget`,
    `tau`, `low`, `high`. `costs`: `what`, `size`, `ms`. `points`: `block_size`, `budget`, `tau`, `round_ms`,
    `speedup`, best first. `checks`: `name`, `verdict`, `value`, `detail`. `breaks`: one row a round of the
    offline walk whose draft broke, see `token_class`. `offline`: every anchor of the analysed answers.
    `facts`: protocol, phases, sentences.
    """

    figures: dict[str, Any]
    answers: pl.DataFrame
    rounds: pl.DataFrame
    tokens: pl.DataFrame
    budgets: pl.DataFrame
    costs: pl.DataFrame
    points: pl.DataFrame
    checks: pl.DataFrame
    breaks: pl.DataFrame
    offline: OfflineReport
    facts: dict[str, Any]

    @property
    def cost_model(self) -> Costs:
        """The measured costs, for `acceptance.whatif`."""
        return Costs.from_frame(self.costs, replay=bool(self.facts["hybrid"]))

    def save(self, folder: Path) -> None:
        """Leave the result in the stage's folder."""
        for name in FRAMES:
            with files.atomic_path(folder / f"{name}.parquet") as temporary:
                getattr(self, name).write_parquet(temporary)
        self.offline.save(folder / "offline")
        files.write_json(folder / "facts.json", files.plain(self.facts))
        files.write_json(folder / "figures.json", files.plain(self.figures))

    @classmethod
    def load(cls, folder: Path) -> Evaluation:
        """Read a finished result again."""
        return cls(
            figures=files.read_json(folder / "figures.json"),
            offline=OfflineReport.load(folder / "offline"),
            facts=files.read_json(folder / "facts.json"),
            **{name: pl.read_parquet(folder / f"{name}.parquet") for name in FRAMES},
        )
