"""How extraction, training and the online pipeline scale over the GPUs of one machine.

    python benchmarks/many_gpus.py --json FILE --gpus N [--params FILE.yaml] [--scratch /dev/shm]
    python benchmarks/many_gpus.py --json FILE --merge FILE...    parts that were run one by one (--only)

Extraction: one process a GPU, each its shard, for every count up to N; a GPU's work stays the same (weak
scaling), efficiency is tokens/s over N times those of one GPU, skew the time between the first and the last
GPU to finish as a share of the run. Training: the 1.73 B drafter of `training.py` under DDP and FSDP2, a row
a GPU, from a store; gradients of the first step beside those of one GPU that accumulates the same rows; the
loss with the head in shards over NCCL. Pipeline: `pipeline.py` for each split of the parameter file. With
`--toy`, and always on `--device cpu`, everything runs at toy sizes, for tests of the script and the machine.
A part that fails leaves its traceback in the result, and the others run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from extraction import real_lengths, touch_memory
from random_store import write_random_store
from result_file import made_of, read_result, told
from training import large_case

from dflash_lab import files
from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.machine import usable_cpus, visible_gpus
from dflash_lab.models.source import load_config
from dflash_lab.provenance import provenance
from dflash_lab.run_params import read_parameter_file

HERE = Path(__file__).resolve().parent
WORKERS = HERE / "many_gpus_workers.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
TOY = {"tokens_per_gpu": 2000, "token_budget": 512, "longest": 64, "train_steps": 2}
TOY_PIPELINE = dict(context_tokens=128, anchors=16, block_size=8, draft_layers=2, layers=10, steps=24)
TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 10, "hidden_size": 64,
    "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 512, "tie_word_embeddings": True, "max_position_embeddings": 4096, "eos_token_id": 1,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "dtype": "float32",
}  # fmt: skip


def environment(gpu: int | None, gpus: int) -> dict[str, str]:
    """Of a worker: the one GPU it may see, and its share of the cores."""
    threads = str(max(1, usable_cpus() // gpus))
    seen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": visible_gpus()[gpu]}
    return {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads), **seen}


def make_samples(path: Path, tokens: int, vocabulary: int, longest: int) -> Path:
    """Samples of real skewed lengths with `tokens` tokens in all."""
    lengths = np.minimum(real_lengths(max(8, tokens // 40)), longest)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]
    generator = np.random.default_rng(1)
    samples = (
        Sample(str(n), generator.integers(0, vocabulary, length), np.ones(length, np.uint8), "benchmark")
        for n, length in enumerate(lengths)
    )
    write_samples(path, samples, heldout_fraction=0.0, provenance={"benchmark": "many_gpus"})
    return path


def extraction(
    params: dict[str, Any], counts: list[int], device: str, scratch: Path
) -> Iterator[list[dict[str, Any]]]:
    """Sharded extraction on each count of GPUs, after each all so far; the targets are loaded once."""
    most, target = max(counts), params["target"]
    config = load_config(f"random:{target}")
    vocabulary, longest, tokens = config.vocab_size, params.get("longest", 4096), params["tokens_per_gpu"]
    # The largest store, five taps of two bytes, is written into memory that was backed while targets load.
    touching = threading.Thread(target=touch_memory, args=(most * tokens * config.hidden_size * 10,))
    touching.start()
    warm = make_samples(scratch / "warm.parquet", 2 * params["token_budget"], vocabulary, longest)
    order = {"target": target, "device": device, "token_budget": params["token_budget"], "warm": str(warm)}
    workers = []
    for gpu in range(most):
        text = json.dumps(order | {"scratch": str(scratch / f"warm-{gpu}")})
        command = [sys.executable, str(WORKERS), "extract", text]
        env = environment(gpu if device == "cuda" else None, most)
        workers.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        )
    try:
        for worker in workers:
            answer(worker)
        touching.join()
        results: list[dict[str, Any]] = []
        for count in counts:
            results.append(extract_round(workers[:count], count, tokens, vocabulary, longest, scratch))
            yield results
    finally:
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in workers:
            try:
                worker.wait(30)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()


def answer(worker: subprocess.Popen) -> dict[str, Any]:
    """The next JSON line of a worker; RuntimeError when it died."""
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError(f"an extraction worker ended with code {worker.wait()}; its message is above")


def extract_round(
    workers: list[subprocess.Popen], count: int, tokens: int, vocabulary: int, longest: int, scratch: Path
) -> dict[str, Any]:
    """One count of GPUs."""
    samples = make_samples(scratch / f"samples-{count}.parquet", tokens * count, vocabulary, longest)
    with tempfile.TemporaryDirectory(dir=scratch) as store:
        for shard, worker in enumerate(workers):
            assert worker.stdin is not None
            asked = {"samples": str(samples), "store": store, "shard": shard, "num_shards": count}
            print(json.dumps(asked), file=worker.stdin, flush=True)
        found = [answer(worker) for worker in workers]
    began, ended = min(f["began"] for f in found), [f["ended"] for f in found]
    seconds = max(ended) - began
    return {
        "gpus": count,
        "seconds": seconds,
        "tokens": sum(f["tokens"] for f in found),
        "tokens_per_s": sum(f["tokens"] for f in found) / seconds,
        "skew_pct": 100 * (max(ended) - min(ended)) / seconds,
        "write_gb_per_s": sum(f["bytes"] for f in found) / seconds / 1e9,
        "host_gib": sum(f["host_gib"] for f in found),
        "gpu_idle_pct": [f["gpu_idle_pct"] for f in found],
    }


def training(
    params: dict[str, Any], counts: list[int], device: str, scratch: Path
) -> Iterator[list[dict[str, Any]]]:
    """DDP and FSDP2 on each count of GPUs, each beside every GPU for itself; after each, all so far."""
    case = large_case(params["toy"])
    on = torch.device(device, 0) if device == "cuda" else torch.device(device)
    rows = max(4, 2 * max(counts))
    store = write_random_store(scratch / "store", case.config, case.lengths[:1] * rows, final=True, device=on)
    if device == "cuda":
        torch.cuda.empty_cache()
    results: list[dict[str, Any]] = []
    for count in [count for count in counts if count > 1] or [1]:
        result = scratch / f"train-{count}.json"
        order = {
            "modes": params["modes"], "device": device, "store": str(store), "scratch": str(scratch),
            "steps": params["train_steps"], "result": str(result), "toy": params["toy"],
            "vocabulary_parallel": params["vocabulary_parallel"],
        }  # fmt: skip
        command = [*TORCHRUN, "--nproc-per-node", str(count), str(WORKERS), "train", json.dumps(order)]
        ended = subprocess.run(command, env=environment(None, count)).returncode
        found = files.read_json(result) if result.exists() else {}
        results.append({"gpus": count, "exit_code": ended, **found})
        yield results


def pipelines(params: dict[str, Any], gpus: int, device: str, scratch: Path) -> dict[str, Any]:
    """The online pipeline at each split, "targets+drafters", that these GPUs allow."""
    splits = [split for split in params["pipeline_splits"] if sum(map(int, split.split("+"))) <= gpus]
    if not splits:
        return {}
    path = scratch / "pipeline.json"
    command = [sys.executable, str(HERE / "pipeline.py"), "--json", str(path), "--scratch", str(scratch)]
    work = params.get("pipeline", {})
    if params["toy"]:
        work = TOY_PIPELINE | {"shape": params["target"]} | ({"device": "cpu"} if device == "cpu" else {})
    for name, value in work.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    ended = subprocess.run([*command, "--splits", *splits]).returncode
    return {"exit_code": ended, **(files.read_json(path) if path.exists() else {})}


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """The headline figures: at the largest count, against one GPU."""
    figures: dict[str, Any] = dict(result.get("pipeline", {}).get("figures", {}))
    extracted, trained = result.get("extraction", []), result.get("training", [])
    if extracted:
        first, last = extracted[0], extracted[-1]
        for row in extracted:
            row["efficiency"] = row["tokens_per_s"] / (row["gpus"] / first["gpus"] * first["tokens_per_s"])
        figures |= {
            "extraction_gpus": last["gpus"], "extraction_tokens_per_s": last["tokens_per_s"],
            "extraction_efficiency": last["efficiency"], "extraction_skew_pct": last["skew_pct"],
            "extraction_write_gb_per_s": last["write_gb_per_s"], "extraction_host_gib": last["host_gib"],
        }  # fmt: skip
    if trained:
        for row in trained:
            for name, run in row.items():
                if isinstance(run, dict) and "step_ms" in run:
                    run["efficiency"] = row["one"]["step_ms"] / run["step_ms"]
                    if name != "one":
                        figures[f"{name}_{row['gpus']}_efficiency"] = run["efficiency"]
                        figures[f"{name}_{row['gpus']}_step_ms"] = run["step_ms"]
                        figures[f"{name}_{row['gpus']}_peak_gib"] = run["peak_gib"]
                        figures[f"{name}_{row['gpus']}_gradient_rel_error"] = run["gradient_rel_error"]
            if "vocabulary_parallel" in row:
                split = row["vocabulary_parallel"]
                figures[f"vocabulary_parallel_{row['gpus']}_speedup"] = split["whole_ms"] / split["shards_ms"]
                figures[f"vocabulary_parallel_{row['gpus']}_gradient_rel_error"] = split["gradient_rel_error"]
            if "one" in row:
                figures["one_gpu_step_ms"] = row["one"]["step_ms"]
    return figures


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of several with different parts; what is said of the whole run is the first one's."""
    whole = dict(results[0])
    for other in results[1:]:
        whole |= {name: other[name] for name in ("extraction", "training", "pipeline") if name in other}
        whole |= {name: whole[name] | other[name] for name in ("seconds", "failed")}
    return whole | {"figures": summary(whole)}


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument("--gpus", type=int, help="GPUs of this machine to use (processes on a CPU)")
    parser.add_argument("--merge", nargs="+", type=Path, help="only put these results together")
    parser.add_argument("--params", type=Path, default=HERE / "many_gpus.yaml", help="parameter file")
    parser.add_argument("--scratch", type=Path, default=None, help="folder for stores (fast: /dev/shm)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--toy", action="store_true", help="toy sizes")
    parser.add_argument("--only", nargs="+", default=["extraction", "training", "pipeline"])
    options = parser.parse_args()
    if options.merge:
        parts = [
            read_result(path, "many_gpus.py", gpus=int, seconds=dict, failed=dict) for path in options.merge
        ]
        with made_of(", ".join(map(str, options.merge)), "many_gpus.py"):
            whole = merged(parts)
        files.write_json(options.json, whole)
        return
    if not options.gpus:
        parser.error("--gpus N: how many GPUs of this machine to use")
    toy = options.toy or options.device == "cpu"
    params = read_parameter_file(options.params) | {"toy": toy} | (TOY if toy else {})
    counts = sorted({count for count in params["gpu_counts"] if count <= options.gpus} | {options.gpus})
    if options.device == "cuda" and torch.cuda.device_count() < options.gpus:
        parser.error(f"--gpus {options.gpus}: this machine shows {torch.cuda.device_count()}")
    result: dict[str, Any] = {
        "figures": {},
        "sizes": "toy: these figures test the script only" if toy else "full",
        "parameters": params,
        "gpus": options.gpus,
        "seconds": {},
        "failed": {},
        **provenance(),
    }
    files.write_json(options.json, result)
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        scratch = Path(folder)
        if toy:
            files.write_json(scratch / "tiny.json", TINY)
            params["target"] = str(scratch / "tiny.json")
        parts = {
            "extraction": lambda: extraction(params, counts, options.device, scratch),
            "training": lambda: training(params, counts, options.device, scratch),
            "pipeline": lambda: iter([pipelines(params, options.gpus, options.device, scratch)]),
        }
        for name in options.only:
            began = time.perf_counter()
            try:
                for found in parts[name]():
                    result[name] = found
                    result["seconds"][name] = time.perf_counter() - began
                    result["figures"] = summary(result)
                    files.write_json(options.json, result)
            except Exception:  # what the other parts measure must not be lost with it
                result["failed"][name] = traceback.format_exc()
                files.write_json(options.json, result)
                print(result["failed"][name], file=sys.stderr, flush=True)
    print(json.dumps(result["figures"], indent=1))
    broken = [
        row for row in (*result.get("training", []), result.get("pipeline", {})) if row.get("exit_code")
    ]
    sys.exit(1 if result["failed"] or broken else 0)


if __name__ == "__main__":
    sys.exit(told(main))
