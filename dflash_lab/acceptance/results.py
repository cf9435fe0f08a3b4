"""What an evaluation of a drafter found, and how its numbers are made: tau, the offline report, the expected
speed-up. No torch here: figures and sliders need nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dflash_lab import files
from dflash_lab.errors import InputError

LEVEL, DRAWS = 0.95, 2000  # of bootstrap intervals
TYPED_BUILD_MS = 0.002  # a tree's node, where costs are typed in
FRAMES = ("answers", "rounds", "tokens", "budgets", "costs", "points", "checks", "breaks")


@dataclass(frozen=True)
class Evaluation:
    """Headline figures and the tables that figures are drawn from.

    `answers`, `rounds`, `tokens`: see `evaluate.answers_frame` and its like. `budgets`: `part` (dev | test |
    all), `budget`, `tau`, `low`, `high`. `costs`: `what`, `size`, `ms`. `points`: `block_size`, `budget`,
    `tau`, `round_ms`, `speedup`, best first. `checks`: `name`, `verdict`, `value`, `detail`. `breaks`: one
    row a round of the offline walk whose draft broke, see `evaluate.token_class`. `offline`: every anchor of
    the analysed answers. `facts`: protocol, phases, sentences.
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
    def sets(self) -> pl.DataFrame:
        """What `by_set` says of the answers; no rows for a result of an earlier version."""
        known = "set" in self.answers.columns
        return (
            by_set(self.answers, seed=self.facts["protocol"]["seed"])
            if known
            else pl.DataFrame(schema=SET_COLUMNS)
        )

    @property
    def cost_model(self) -> Costs:
        """The measured costs, for `operating_points`."""
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


# The acceptance length, as published, with what surrounds the number. A round yields its accepted drafts and
# one token of the target's own (the bonus): 1..B tokens. An answer's tau is the mean over its rounds, the
# reported tau the mean over answers of those means, so a long answer counts no more than a short one; vLLM's
# figure, which pools all rounds, stands beside it. Tools differ in the last round: `overshoot` counts all B
# tokens that it verified even past the end of the answer (z-lab's git version), `truncated` only those that
# the answer kept (the dflash 0.1.0 package), which reads lower for short answers. It is the default here, for
# the sum of its lengths is exactly the number of tokens produced.


@dataclass(frozen=True)
class Interval:
    """A percentile bootstrap interval (95 %) of a mean over answers."""

    low: float
    high: float


@dataclass(frozen=True)
class Tau:
    """Acceptance lengths of a set of answers; see above for the two conventions and the two
    averages."""

    per_answer: np.ndarray  # [answers] float64, truncated convention
    mean: float  # the published average: over answers, of the mean over rounds (truncated)
    pooled: float  # over all rounds of all answers (truncated)
    overshoot: float  # like `mean`, the last round counted in full
    interval: Interval  # of `mean`
    answers: int
    rounds: int
    histogram: np.ndarray  # [B+1] int64: rounds by acceptance length (overshoot, i.e. 1 + accepted drafts)

    def figures(self, prefix: str) -> dict[str, Any]:
        """Return the headline numbers as a flat dictionary."""
        return {
            prefix: round(self.mean, 4),
            f"{prefix}_low": round(self.interval.low, 4),
            f"{prefix}_high": round(self.interval.high, 4),
            f"{prefix}_pooled": round(self.pooled, 4),
            f"{prefix}_overshoot": round(self.overshoot, 4),
            f"{prefix}_rounds": self.rounds,
        }


def summarize(
    produced: Sequence[Sequence[int]], lengths: Sequence[Sequence[int]] | None = None, *, seed: int = 0
) -> Tau:
    """Summarise rounds by answer: `produced` tokens kept of each round, `lengths` = 1 + accepted drafts
    (default: the same).

    Answers without a round (their first token, which the prefill gives, was the last) have no tau and are
    left out.
    """
    lengths = produced if lengths is None else lengths
    kept = [
        (np.asarray(p, float), np.asarray(full, float))
        for p, full in zip(produced, lengths, strict=True)
        if len(p)
    ]
    if not kept:
        raise InputError("no answer has a round of speculative decoding: raise max_new_tokens above 1.")
    per_answer = np.asarray([p.mean() for p, _ in kept])
    all_produced = np.concatenate([p for p, _ in kept])
    all_lengths = np.concatenate([full for _, full in kept])
    return Tau(
        per_answer=per_answer,
        mean=float(per_answer.mean()),
        pooled=float(all_produced.mean()),
        overshoot=float(np.mean([full.mean() for _, full in kept])),
        interval=bootstrap(per_answer, seed=seed),
        answers=len(kept),
        rounds=len(all_produced),
        histogram=np.bincount(all_lengths.astype(int)),
    )


def bootstrap(values: np.ndarray, *, seed: int = 0) -> Interval:
    """Return the percentile bootstrap interval of the mean of `values` [n], resampled over answers."""
    values = np.asarray(values, float)
    chosen = np.random.default_rng(seed).integers(len(values), size=(DRAWS, len(values)))
    means = values[chosen].mean(1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))


SET_COLUMNS = {
    "set": pl.String,
    "method": pl.String,
    "prompts": pl.Int64,
    "answers": pl.Int64,
    "tokens": pl.Int64,
    "tau": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "tau_offline": pl.Float64,
    "speedup": pl.Float64,
}


def by_set(answers: pl.DataFrame, *, seed: int = 0) -> pl.DataFrame:
    """Return one row a set of prompts and method (see `SET_COLUMNS`), in the order of `answers`, which is
    `evaluate.answers_frame`'s.

    `tau`, its interval and `tau_offline` are null where no answer has a round; `speedup` is null where one
    method's answers are timed together, and plain decoding's is 1.
    """
    rows: list[dict[str, Any]] = []
    for (name, method), part in answers.group_by("set", "method", maintain_order=True):
        plain = answers.filter(
            (pl.col("set") == name) & (pl.col("method") == "plain") & (pl.col("tokens") > 1)
        )
        timed = part.filter((pl.col("tokens") > 1) & (pl.col("method") != "together"))["ms_per_token"].mean()
        taus = part["tau"].drop_nulls().to_numpy()
        interval = bootstrap(taus, seed=seed) if len(taus) else None
        rows.append(
            {
                "set": name,
                "method": method,
                "prompts": part.filter(pl.col("turn") == 0).height,
                "answers": part.height,
                "tokens": part["tokens"].sum(),
                "tau": float(taus.mean()) if len(taus) else None,
                "low": interval.low if interval else None,
                "high": interval.high if interval else None,
                "tau_offline": part["tau_offline"].mean(),
                "speedup": plain["ms_per_token"].mean() / timed if timed and plain.height else None,  # type: ignore[operator]
            }
        )
    order = {name: place for place, name in enumerate(answers["set"].unique(maintain_order=True))}
    return pl.DataFrame(sorted(rows, key=lambda row: order[row["set"]]), schema=SET_COLUMNS)


@dataclass(frozen=True)
class Paired:
    """Two drafters on the same answers: the mean difference of tau, second minus first, with its interval."""

    difference: float
    interval: Interval
    answers: int


def compare(first: np.ndarray, second: np.ndarray, *, seed: int = 0) -> Paired:
    """Compare two per-answer taus [n] of the same answers in the same order; pairs are resampled together.

    Answers without a tau (NaN) under either are left out, as `summarize` leaves them out.
    """
    if len(first) != len(second):
        raise InputError(f"paired comparison needs the same answers: {len(first)} and {len(second)} given.")
    change = np.asarray(second, float) - np.asarray(first, float)
    change = change[~np.isnan(change)]
    if not len(change):
        raise InputError("paired comparison: no answer has a round of both drafters; decode longer answers.")
    return Paired(
        float(change.mean()),
        bootstrap(change, seed=seed),
        len(change),
    )


# What stored answers say about a drafter: one row for every anchor, from which every tau is a walk. Decoding
# starts each block right after a miss, so its anchors are not uniform: a long easy run holds many positions
# but is entered once. The chained tau walks as decoding does, from the first answer token by accepted + 1; on
# the target's own greedy answers it reproduces decoding round by round. The uniform streak, which training
# logs, weighs every anchor alike and reads higher. Since every anchor was drafted once, so is every tree
# budget and every smaller block size, without another draft.


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

    def tau(self, budget: int = 0, *, block_size: int = 0, answers: Sequence[int] | None = None) -> Tau:
        """Return the chained tau of a chain (budget 0) or of trees of `budget` nodes.

        block_size below the drafted one cuts each block's drafts, which is exact for a drafter that is
        causal inside the block and an estimate for a bidirectional one. `answers` restricts to some answers
        (a dev or a test part).
        """
        produced = self.rounds(budget, block_size=block_size)
        return summarize(produced if answers is None else [produced[i] for i in answers])

    def rounds(self, budget: int = 0, *, block_size: int = 0, limit: int = 0) -> list[list[int]]:
        """Return the tokens produced by each round of each answer. limit: cut answers to so many tokens (0:
        whole).
        """
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


# Expected speed-up = tau / cost, for any block size or tree budget, from measured or typed-in times. A round
# drafts once, runs the target on width tokens (block size plus nodes of a tree), and yields tau tokens; plain
# decoding spends one step of width 1 on each.


@dataclass(frozen=True)
class Costs:
    """Milliseconds by size, each a mapping {size: ms}; sizes between are interpolated, beyond held in
    proportion.

    `step`: target by width; `draft`: drafter by block size; `build`: tree by budget (empty: trees are not
    considered). `replay`: a hybrid target runs accepted tokens again after a partial acceptance.
    """

    step: Mapping[int, float]
    draft: Mapping[int, float]
    build: Mapping[int, float]
    replay: bool = False

    @classmethod
    def from_frame(cls, frame: pl.DataFrame, *, replay: bool = False) -> Costs:
        """Take over the frame of `evaluate.measure_costs`."""
        parts = {
            what: dict(frame.filter(pl.col("what") == what).select("size", "ms").iter_rows())
            for what in ("step", "draft", "build")
        }
        return cls(**parts, replay=replay)

    @classmethod
    def typed(
        cls,
        *,
        step_ms: float,
        step_ms_per_token: float,
        draft_ms: float,
        replay: bool = False,
    ) -> Costs:
        """Costs from four numbers: a step of width w takes step_ms + (w - 1) * step_ms_per_token."""
        widths = (1, 2048)
        return cls(
            {w: step_ms + (w - 1) * step_ms_per_token for w in widths},
            {1: draft_ms, 64: draft_ms},
            {n: n * TYPED_BUILD_MS for n in widths},
            replay,
        )


def at(table: Mapping[int, float], size: float) -> float:
    """Return the cost at `size`: linear between measured sizes, along the last two beyond them."""
    if not table:
        return 0.0
    sizes = np.asarray(sorted(table), float)
    values = np.asarray([table[int(s)] for s in sizes])
    if size <= sizes[-1] or len(sizes) < 2:
        return float(np.interp(size, sizes, values))
    slope = max(0.0, (values[-1] - values[-2]) / (sizes[-1] - sizes[-2]))
    return float(values[-1] + slope * (size - sizes[-1]))


def round_ms(costs: Costs, tau: float, block_size: int, budget: int = 0) -> float:
    """Return the expected milliseconds of a round that yields `tau` tokens."""
    width = block_size + budget  # a tree has its best nodes, the anchor and the chain (or part of it)
    total = at(costs.draft, block_size) + at(costs.step, width) + (at(costs.build, budget) if budget else 0.0)
    return total + (at(costs.step, tau) if costs.replay and tau < block_size else 0.0)


def speedup(costs: Costs, tau: float, block_size: int, budget: int = 0) -> float:
    """Return plain decoding's time a token over speculative decoding's."""
    cost = round_ms(costs, tau, block_size, budget)
    if cost <= 0:
        raise InputError("the costs of a round add up to nothing: give positive milliseconds.")
    return tau * at(costs.step, 1) / cost


def operating_points(costs: Costs, taus: pl.DataFrame) -> pl.DataFrame:
    """Add `round_ms` and `speedup` to points `block_size`, `budget` (0: chain), `tau`; best first."""
    points = [
        (b, n, tau, round_ms(costs, tau, b, n), speedup(costs, tau, b, n))
        for b, n, tau in taus.select("block_size", "budget", "tau").iter_rows()
    ]
    schema = {
        "block_size": pl.Int64,
        "budget": pl.Int64,
        "tau": pl.Float64,
        "round_ms": pl.Float64,
        "speedup": pl.Float64,
    }
    return pl.DataFrame(points, schema=schema, orient="row").sort("speedup", descending=True)
