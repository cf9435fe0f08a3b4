"""What stored answers say about a drafter: one row for every anchor, from which every tau is a walk.

Decoding starts each block right after a miss, so its anchors are not uniform: a long easy run holds many
positions but is entered once. The chained tau walks as decoding does, from the first answer token by accepted
+ 1; when the stored answers are the target's own greedy ones it reproduces decoding round by round. The
uniform streak, which training logs, weighs every anchor alike and reads higher. Both are here, and since
every anchor was drafted once, so is every tree budget and every smaller block size, without another draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dflash_lab import files
from dflash_lab.acceptance.tau import Tau, summarize
from dflash_lab.errors import InputError


@dataclass(frozen=True)
class OfflineReport:
    """Every anchor of every answer, drafted once.

    `anchors`, one row an anchor, answers in order and their anchors rising: `answer`, `sample` (hash),
    `anchor` (absolute position), `place` (in the answer), `left` (answer tokens after it), `accepted` (drafts
    a chain accepts), `tree_<budget>` (drafts a tree of that budget accepts), `top_<k>` (streak if every token
    among the k best counted), of DFlash 2 `unselected` (drafts accepted if each slot's own best token were
    drafted, without the selector), and of the slot at which the chain broke: `label` and `drafted` token ids,
    `entropy` (nats), `p_top`, `p_label`; null where it did not break. `slots`, one row a slot 1..B-1, over
    all anchors: `valid` count, `hits` (the best token is the answer's), `reached` (all slots before it hit),
    `held` (it too).
    """

    anchors: pl.DataFrame
    slots: pl.DataFrame
    block_size: int
    budgets: tuple[int, ...]
    top_k: tuple[int, ...]
    temperatures: tuple[float, ...] = ()

    def tau(
        self, budget: int = 0, *, block_size: int = 0, limit: int = 0, answers: Sequence[int] | None = None
    ) -> Tau:
        """Return the chained tau of a chain (budget 0) or of trees of `budget` nodes.

        block_size below the drafted one cuts each block's drafts, which is exact for a drafter that is causal
        inside the block and an estimate for a bidirectional one. limit: cut answers to so many tokens (0:
        whole). `answers` restricts to some answers (a dev or a test part).
        """
        produced = self.rounds(budget, block_size=block_size, limit=limit)
        return summarize(produced if answers is None else [produced[i] for i in answers])

    def rounds(self, budget: int = 0, *, block_size: int = 0, limit: int = 0) -> list[list[int]]:
        """Return the tokens produced by each round of each answer."""
        visited, produced = self.walk(budget, block_size=block_size, limit=limit)
        answer = self.anchors["answer"].to_numpy()[visited]
        starts = np.searchsorted(answer, np.arange(self.num_answers + 1))
        return [produced[a:b].tolist() for a, b in pairwise(starts)]

    def walk(self, budget: int = 0, *, block_size: int = 0, limit: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of `anchors` at which decoding starts a round, in order, and the tokens each round
        produces.

        All answers step together, so the cost is the rounds of the longest answer.
        """
        accepted = self.anchors[self.column(budget)].to_numpy().astype(np.int64)
        left, place = (self.anchors[name].to_numpy().astype(np.int64) for name in ("left", "place"))
        if block_size:
            accepted = np.minimum(accepted, block_size - 1)
        if limit:
            left = np.minimum(left, np.maximum(limit - 1 - place, 0))
        produced = np.minimum(accepted + 1, left)
        here = np.flatnonzero((place == 0) & (left > 0))
        last = here + left[here]  # one past the answer's last anchor
        visited = []
        while len(here):
            visited.append(here)
            here = here + produced[here]
            here, last = here[here < last], last[here < last]
        rows = np.sort(np.concatenate(visited)) if visited else np.zeros(0, np.int64)
        return rows, produced[rows]

    def column(self, budget: int) -> str:
        """Return the name of the column with the drafts accepted at `budget` (0: a chain)."""
        if budget and budget not in self.budgets:
            raise InputError(f"tree budget {budget} was not measured; measured are {list(self.budgets)}.")
        return f"tree_{budget}" if budget else "accepted"

    @property
    def num_answers(self) -> int:
        """Count of answers with at least one anchor."""
        return int((self.anchors["place"] == 0).sum())

    def streak(self) -> float:
        """Return 1 + mean accepted drafts over all anchors, blocks at an answer's end cut short (as training
        logs it)."""
        return 1.0 + float(self.anchors["accepted"].mean())  # type: ignore[arg-type]

    def without_selector(self) -> OfflineReport | None:
        """Return the same anchors as chains without DFlash 2's selector; None for a drafter that has none."""
        if "unselected" not in self.anchors.columns:
            return None
        anchors = self.anchors.with_columns(accepted=pl.col("unselected"))
        return OfflineReport(anchors, self.slots, self.block_size, (), ())

    def by_temperature(self) -> pl.DataFrame:
        """Return `temperature`, `streak`: expected tokens a round over all anchors; 0 is the greedy streak.

        Under sampling the answer would go other ways than the stored one, so this is an estimate along it.
        """
        rows = [(0.0, self.streak())]
        rows += [(t, 1.0 + float(self.anchors[f"sampled_{t:g}"].mean())) for t in self.temperatures]  # type: ignore[arg-type]
        return pl.DataFrame(rows, schema=["temperature", "streak"], orient="row")

    def oracle(self) -> pl.DataFrame:
        """Return `k`, `tau`: the chained acceptance length if the right token counted whenever it is among
        the k best."""
        rows = []
        for k in self.top_k:
            lifted = OfflineReport(
                self.anchors.with_columns(accepted=pl.col(f"top_{k}")), self.slots, self.block_size, (), ()
            )
            rows.append({"k": k, "tau": lifted.tau().mean})
        return pl.DataFrame(rows, schema={"k": pl.Int64, "tau": pl.Float64})

    def by_slot(self) -> pl.DataFrame:
        """Return `slot`, `accuracy` P(hit), `conditional` P(hit | all before hit), `survival` P(all up to it
        hit)."""
        valid = pl.when(pl.col("valid") > 0).then(pl.col("valid"))
        reached = pl.when(pl.col("reached") > 0).then(pl.col("reached"))
        return self.slots.select(
            "slot",
            accuracy=pl.col("hits") / valid,
            conditional=pl.col("held") / reached,
            survival=pl.col("held") / valid,
        )

    def by_budget(self) -> pl.DataFrame:
        """Return `budget` (0: the chain), `tau`, `low`, `high`, `pooled`."""
        rows = []
        for budget in (0, *self.budgets):
            tau = self.tau(budget)
            rows.append((budget, tau.mean, tau.interval.low, tau.interval.high, tau.pooled))
        return pl.DataFrame(rows, schema=["budget", "tau", "low", "high", "pooled"], orient="row")

    def by_block_size(self) -> pl.DataFrame:
        """Return `block_size` 2..B, `tau` of chains cut to it."""
        rows = [(b, self.tau(block_size=b).mean) for b in range(2, self.block_size + 1)]
        return pl.DataFrame(rows, schema=["block_size", "tau"], orient="row")

    def save(self, folder: Path | str) -> None:
        """Write `anchors.parquet`, `slots.parquet` and `offline.json` into `folder`."""
        folder = Path(folder)
        for name, frame in (("anchors", self.anchors), ("slots", self.slots)):
            with files.atomic_path(folder / f"{name}.parquet") as path:
                frame.write_parquet(path)
        settings: dict[str, Any] = {
            "block_size": self.block_size,
            "budgets": list(self.budgets),
            "top_k": list(self.top_k),
        }
        settings["temperatures"] = list(self.temperatures)
        files.write_json(folder / "offline.json", settings)

    @classmethod
    def load(cls, folder: Path | str) -> OfflineReport:
        """Read what `save` wrote."""
        folder = Path(folder)
        settings = files.read_json(folder / "offline.json")
        return cls(
            pl.read_parquet(folder / "anchors.parquet"),
            pl.read_parquet(folder / "slots.parquet"),
            settings["block_size"],
            tuple(settings["budgets"]),
            tuple(settings["top_k"]),
            tuple(settings["temperatures"]),
        )
