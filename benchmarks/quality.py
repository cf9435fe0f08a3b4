"""How good a drafter becomes: data that the target writes itself, one recipe a row, tau by the public client.

    python benchmarks/quality.py data --out DIR --tokens 1900000 --whole --augment 8
    python benchmarks/quality.py merge --data DIR DIR2 --out DIR3
    python benchmarks/quality.py train short --data DIR --out RUNS/short --seconds 120
    python benchmarks/quality.py client --data DIR --drafter RUNS/short/drafter --json FILE
    python benchmarks/quality.py study --data DIR --out RUNS --steps 600 --parallel 8 --json FILE

`data` several times with other seeds (on several GPUs), then `merge`, makes one large set.
`train` is the stage `train_drafter` with the row's parameters (`quality_recipes.py`; `-p NAME VALUE` changes
one), then tau from stored greedy answers of held-out prompts and of all HumanEval's, 128 tokens each.
`client` decodes 20 prompts of each with the PyPI package `dflash` 0.1.0 (in .venv/clients, or in the folder
that DFLASH_CLIENTS names). `study` trains rows for the same number of steps, some side by side
(`quality_study.py`); it ends with status 1 and names them if some did not finish.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from quality_data import MEASURED_TOKENS, check_data, write_data
from quality_merge import merge_data
from quality_recipes import ROWS, recipe
from quality_study import CURVE, TRAINING, study
from quality_warm import warm_drafter
from result_file import told

from dflash_lab import files, provenance
from dflash_lab.acceptance.offline import offline
from dflash_lab.acceptance.prompts import draw_prompts, heldout_prompts
from dflash_lab.acceptance.results import Tau, summarize
from dflash_lab.data.samples import read_provenance
from dflash_lab.drafter.checkpoint import load_checkpoint, save_checkpoint
from dflash_lab.drafter.live import LiveItems
from dflash_lab.models.load import choose_device, load_target
from dflash_lab.models.source import cached_folder
from dflash_lab.stage_run import execute
from dflash_lab.stages.train_drafter import TrainDrafterParams
from dflash_lab.stages.training_inputs import resolve_inputs
from dflash_lab.strict_yaml import parse_parameters

log = logging.getLogger("quality")
SETS = ("heldout", "humaneval")


def described(tau: Tau) -> dict[str, Any]:
    """Plain values of a tau, those of the single answers too: they are the same for every row of a study."""
    low, high = tau.interval.low, tau.interval.high
    values = dict(tau=tau.mean, pooled=tau.pooled, low=low, high=high)
    found = {name: round(float(value), 4) for name, value in values.items()}
    return found | {"answers": len(tau.per_answer), "per_answer": tau.per_answer.round(4).tolist()}


def offline_taus(data: Path, folder: Path, model: str, device: torch.device, most: int) -> dict[str, Any]:
    """Chained tau on stored greedy answers of each set, up to `most` of each."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    drafter = load_checkpoint(folder, device, dtype).eval().requires_grad_(False)
    found = {}
    for name in SETS:
        target = load_target(model, device=device, dtype=dtype)  # live items change how it attends
        items = LiveItems(
            data / f"{name}.parquet", target, tap_ids=list(drafter.config.tap_ids), context_tokens=1024
        )
        few = (items[i] for i in range(min(most, len(items))))
        report = offline(few, target.head, drafter, budgets=(), top_k=())
        found[name] = described(summarize(report.rounds(limit=MEASURED_TOKENS)))
    return found


def warm_start(params: TrainDrafterParams, layers: list[int], device: torch.device) -> Path:
    """Write the drafter that starts from the target's layers; return its folder."""
    target = load_target(params.target, device=device, dtype="float32")
    drafter = warm_drafter(target, resolve_inputs(params).drafter, layers, params.seed)
    save_checkpoint(params.run_folder / "start", drafter)
    return params.run_folder / "start"


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train rows one after the other and measure them; several go into folders of their names."""
    done: dict[str, Any] = {}
    apart = args.folders or len(args.rows) > 1
    for row in args.rows:
        try:
            done[row] = train_row(args, row, args.out / row if apart else args.out)
        except Exception:  # the other rows are worth having; the exit status tells
            log.exception("row %s", row)
    if len(done) < len(args.rows):
        raise RuntimeError(f"failed: {sorted(set(args.rows) - set(done))}")
    return {"rows": done}


def train_row(args: argparse.Namespace, row: str, out: Path) -> dict[str, Any]:
    """Train one row and measure it; what it gave is in `out`/row.json too."""
    device = choose_device(args.device)
    values = recipe(row, {name: parse_parameters(f"{name}: {text}", "-p")[name] for name, text in args.p})
    if args.seconds:
        values["time_limit_s"] = float(args.seconds)
    if args.steps:
        values["max_steps"] = args.steps
    start_layers = values.pop("start_layers", [])
    values["samples"] = str(args.data / values.get("samples", "samples.parquet"))
    check_data(args.data, (Path(values["samples"]).stem, *SETS))
    params = TrainDrafterParams(
        run_dir=str(out),
        target=args.target,
        device=str(device),
        dtype="bfloat16" if device.type == "cuda" else "float32",
        interactive=False,
        **{"seed": args.seed, **values},
    )
    if start_layers:
        params = params.changed(start_from=str(warm_start(params, start_layers, device)))
    if device.type == "cuda":
        gc.collect()  # of the row before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    words = ["python benchmarks/quality.py train", row, f"--data {args.data} --out {out}"]
    words += [f"--{name} {getattr(args, name):g}" for name in ("seconds", "steps") if getattr(args, name)]
    record = {
        "row": row,
        "parameters": {**values, **({"start_layers": start_layers} if start_layers else {})},
        "command": " ".join([*words, *(f"-p {name} {value}" for name, value in args.p)]),
        "data": read_provenance(values["samples"]),
        "tau": {},
    }
    # Before the first step: with the diary it is what a run that is cut leaves to the report.
    files.write_json(out / "row.json", record | provenance.provenance())
    started = time.perf_counter()
    result = execute(params)
    trained = time.perf_counter()
    last = result.metrics.filter(result.metrics["kind"] == "train").tail(1).to_dicts()[0]
    record |= {
        "figures": result.figures,
        "training": {name: last.get(name) for name in TRAINING},
        "curve": result.metrics.select(n for n in CURVE if n in result.metrics.columns).to_dicts(),
        "wall_seconds": round(trained - started, 1),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }
    files.write_json(out / "row.json", record | provenance.provenance())
    record["tau"] = offline_taus(args.data, out / "drafter", args.target, device, args.answers)
    record["measure_seconds"] = round(time.perf_counter() - trained, 1)
    files.write_json(out / "row.json", record | provenance.provenance())
    log.info("ended: %s", line(record))
    return record


def line(record: dict[str, Any]) -> str:
    """A trained row in one line."""
    figures, taus = record["figures"], {name: found["tau"] for name, found in record["tau"].items()}
    streak, kept = record["training"]["streak"], figures["streak_last"]
    words = [
        f"{figures['steps']} steps, {figures['train_seconds']:.0f} s",
        f"streak {streak:.3f} in training",
    ]
    words += ["nothing held out" if kept is None else f"{kept:.3f} held-out"]
    words += [f"tau {name} {tau:.3f}" for name, tau in taus.items()]
    return f"{record['row']}: " + ", ".join([*words, f"measured in {record['measure_seconds']:.0f} s"])


def client(args: argparse.Namespace) -> dict[str, Any]:
    """Decode prompts of both sets with the public client, in several processes."""
    check_data(args.data, SETS)
    target = load_target(args.target, device="meta")
    found: dict[str, Any] = {}
    for name in SETS:
        prompts = draw_prompts(heldout_prompts(args.data / f"{name}.parquet"), args.prompts, args.seed)
        asked = {
            "prompts": [list(prompt.input_ids) for prompt in prompts],
            "stop_ids": target.stop_ids,
            "max_new_tokens": args.max_new_tokens,
        }
        files.write_json(args.drafter / f"{name}.prompts.json", asked)
    work = [(name, part) for name in SETS for part in range(args.parallel)]
    paths = [
        os.environ.get("DFLASH_CLIENTS", str(Path(sys.prefix) / "clients")),
        os.environ.get("PYTHONPATH", ""),
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    running = []
    for name, part in work:
        out = args.drafter / f"{name}.{part}.{args.block_size}.lengths.json"
        command = [sys.executable, str(Path(__file__).with_name("quality_client.py"))]
        command += [
            "--drafter",
            str(args.drafter),
            "--target",
            str(cached_folder() if args.target == "smollm2" else args.target),
            "--out",
            str(out),
        ]
        command += ["--prompts", str(args.drafter / f"{name}.prompts.json")]
        command += ["--part", f"{part}/{args.parallel}", "--device", args.client_device]
        command += ["--dtype", args.dtype, "--block-size", str(args.block_size)]
        running.append((name, out, subprocess.Popen(command, env=env)))
    try:
        for name, out, process in running:
            if process.wait() != 0:
                raise RuntimeError(f"the client ended with {process.returncode} on {name}")
            part = json.loads(out.read_text())
            entry = found.setdefault(name, {"lengths": []})
            entry["lengths"] += part.pop("lengths")
            entry |= part
    finally:
        for _, _, process in running:
            process.kill()  # those beside one that failed; nothing happens to one that has ended
    for name, entry in found.items():
        entry |= described(summarize(entry["lengths"]))
        log.info("client, %s: tau %.3f (%d prompts)", name, entry["tau"], len(entry["lengths"]))
    rules = {name: getattr(args, name) for name in ("max_new_tokens", "block_size", "client_device", "dtype")}
    return {"tau": found, **rules, "drafter": str(args.drafter)}


def main() -> int:
    """Run a subcommand and write its JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    made = {name: commands.add_parser(name) for name in ("data", "merge", "train", "client", "study")}
    for name, one in made.items():
        one.add_argument("--device", default="auto")
        one.add_argument("--seed", type=int, default=0)
        one.add_argument("--target", default="smollm2")
        one.add_argument("--json", default="", help="where the result goes")
        if name != "data":
            many = {"nargs": "+"} if name == "merge" else {}
            one.add_argument("--data", type=Path, required=True, help="folder that `data` wrote", **many)
        if name != "client":
            one.add_argument("--out", type=Path, required=True)
        if name in ("train", "study"):
            one.add_argument("--steps", type=int, default=0)
            one.add_argument("--answers", type=int, default=512, help="stored answers of a set to measure")
            one.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    made["data"].add_argument("--tokens", type=int, default=1_900_000)
    made["data"].add_argument("--code-share", type=float, default=0.3)
    made["data"].add_argument("--brief-share", type=float, default=0.0)
    made["data"].add_argument("--answer-tokens", type=int, default=136)
    made["data"].add_argument(
        "--whole", action="store_true", help="also whole.parquet: blocks in prompts too"
    )
    made["data"].add_argument("--small", type=Path, help="folder for the first of its tokens")
    made["data"].add_argument("--small-tokens", type=int, default=1_900_000)
    made["data"].add_argument(
        "--augment", type=int, default=0, help="also augmented.parquet: documents made of each sample"
    )
    made["data"].add_argument("--heldout", type=int, default=512)
    made["data"].add_argument("--problems", type=int, default=0, help="of HumanEval; 0: all")
    made["train"].add_argument("rows", nargs="+", choices=sorted(ROWS))
    made["train"].add_argument("--folders", action="store_true", help="a folder for the row, even for one")
    made["train"].add_argument("--seconds", type=float, default=0.0)
    made["study"].add_argument("--rows", nargs="*", choices=sorted(ROWS))
    made["study"].add_argument("--parallel", type=int, default=4)
    made["study"].add_argument("--limit-s", type=float, default=0.0, help="give up what is not finished then")
    made["client"].add_argument("--drafter", type=Path, required=True)
    made["client"].add_argument("--prompts", type=int, default=20)
    made["client"].add_argument("--max-new-tokens", type=int, default=MEASURED_TOKENS)
    made["client"].add_argument("--parallel", type=int, default=2, help="processes for each set")
    made["client"].add_argument("--client-device", default="cuda")
    made["client"].add_argument("--dtype", default="bfloat16")
    made["client"].add_argument("--block-size", type=int, default=0, help="0: the drafter's")
    args = parser.parse_args()
    if args.command == "data" and args.augment < 0:
        parser.error(f"--augment {args.augment}: give how many variants of each sample, or 0 for none")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if args.command == "data":
        device = choose_device(args.device)
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        found = write_data(
            load_target(args.target, device=device, dtype=dtype),
            args.out,
            tokens=args.tokens,
            seed=args.seed,
            code_share=args.code_share,
            brief_share=args.brief_share,
            answer_tokens=args.answer_tokens,
            heldout=args.heldout,
            problems=args.problems,
            whole=args.whole,
            small=args.small,
            small_tokens=args.small_tokens,
            variants=args.augment,
        )
    elif args.command == "merge":
        found = merge_data(args.data, args.out)
    else:
        found = {"train": train, "client": client, "study": study}[args.command](args)
    if args.json:
        arguments = {name: str(value) for name, value in vars(args).items()}
        files.write_json(Path(args.json), {"arguments": arguments, **found, **provenance.provenance()})
    return 1 if found.get("missing") else 0


if __name__ == "__main__":
    sys.exit(told(main))
