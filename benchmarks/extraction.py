"""How fast is extraction, against the matrix-multiply ceiling of the same device in the same run?

    python benchmarks/extraction.py --json benchmarks/results/<device>/extraction.json

On CUDA: the 27B hybrid and the 8B dense shape with random weights, real skewed lengths, through the whole
pipeline (batches planned, states packed, copied, written and sealed), once with the plain transformers
forward and once fused. Work is counted as 2 x parameters of the layers that run, a real token; padding,
attention scores and the delta rule count nothing. On a CPU: planning and statistics over 913,000 lengths, and
the error of each storage codec on real states.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from dflash_lab import files, provenance
from dflash_lab.data.batching import plan_batches
from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.extraction.codecs import CODECS
from dflash_lab.extraction.fast.apply import speed_up
from dflash_lab.extraction.loop import extract
from dflash_lab.extraction.preflight import body_parameters
from dflash_lab.extraction.selftest import rel_l2
from dflash_lab.extraction.store import open_store
from dflash_lab.target.loading import load_target
from dflash_lab.target.sources import load_config
from dflash_lab.target.taps import default_tap_ids

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = ROOT / "tests" / "data" / "lengths_public_chat.parquet"
MAX_LENGTH = 4096
log = logging.getLogger("extraction")


def real_lengths(count: int, *, seed: int = 0) -> np.ndarray:
    """Draw `count` chat exchange lengths with replacement, cut at 4,096 tokens."""
    pool = pl.read_parquet(LENGTHS).filter(pl.col("source") == "exchange")["length"].to_numpy()
    return np.minimum(np.random.default_rng(seed).choice(pool, count), MAX_LENGTH).astype(np.int64)


def matmul_ceiling(device: torch.device) -> float:
    """TFLOP/s of a 16,384 x 5,120 x 17,408 bf16 product on random data, median of 20."""
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(16384, 5120, device=device, dtype=torch.bfloat16, generator=generator)
    b = torch.randn(17408, 5120, device=device, dtype=torch.bfloat16, generator=generator)
    times = []
    for number in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.nn.functional.linear(a, b)
        end.record()
        torch.cuda.synchronize()
        if number >= 5:
            times.append(begin.elapsed_time(end) / 1e3)
    return 2 * 16384 * 5120 * 17408 / statistics.median(times) / 1e12


def typical_samples(path: Path, vocabulary: int, *, token_budget: int, max_batch: int, batches: int) -> Path:
    """Write the samples of `batches` batches spread evenly over the plan of a whole window of 32,768 samples.

    So padding is that of a long run, not of a small set.
    """
    lengths = real_lengths(32768)
    plan = plan_batches(lengths, token_budget=token_budget, max_batch=max_batch, chunk=64)
    chosen = plan.batches[len(plan) // (2 * batches) :: max(1, len(plan) // batches)][:batches]
    generator = np.random.default_rng(1)
    samples = (
        Sample(
            str(row),
            generator.integers(0, vocabulary, lengths[row]),
            np.ones(lengths[row], np.uint8),
            "benchmark",
        )
        for batch in chosen
        for row in batch
    )
    write_samples(path, samples, heldout_fraction=0.0, provenance={"benchmark": "extraction"})
    return path


def speed_case(
    shape: str, ceiling: float, folder: Path, *, token_budget: int, batches: int, profile: bool
) -> dict[str, Any]:
    """Extract typical samples with a target of `shape`, plain and fused; return both rates and the states'
    difference.
    """
    config = load_config(f"random:{shape}")
    tap_ids = default_tap_ids(config.num_hidden_layers)
    parameters = body_parameters(config, max(tap_ids))
    began = time.perf_counter()
    target = load_target(
        f"random:{shape}", device="cuda", dtype="bfloat16", last_layer=max(tap_ids), with_head=False
    )
    loaded = time.perf_counter() - began
    samples = typical_samples(
        folder / f"{shape}.parquet",
        config.vocab_size,
        token_budget=token_budget,
        max_batch=512,
        batches=batches,
    )
    began = time.perf_counter()
    path = speed_up(target, "auto")
    log.info("%s: %s %s", shape, path.summary(), dict(list(path.plain.items())[:3]))
    result: dict[str, Any] = {
        "shape": shape,
        "body_parameters": parameters,
        "load_seconds": round(loaded, 1),
        "fuse_seconds": round(time.perf_counter() - began, 1),
        "fast_path": path.summary(),
        "token_budget": token_budget,
    }
    for name in ("eager", "fast"):
        if name == "eager":
            with path.off():
                result[name] = _one(
                    target,
                    samples,
                    folder / f"{shape}-{name}",
                    tap_ids,
                    token_budget,
                    parameters,
                    ceiling,
                    profile,
                )
        else:
            result[name] = _one(
                target,
                samples,
                folder / f"{shape}-{name}",
                tap_ids,
                token_budget,
                parameters,
                ceiling,
                profile,
            )
    result["fast_against_eager"] = compare_stores(folder / f"{shape}-eager", folder / f"{shape}-fast")
    del target, path
    gc.collect()
    torch.cuda.empty_cache()
    return result


def _one(
    target: Any,
    samples: Path,
    store: Path,
    tap_ids: list[int],
    token_budget: int,
    parameters: int,
    ceiling: float,
    profile: bool,
) -> dict[str, Any]:
    warm_up(target, token_budget)
    torch.cuda.reset_peak_memory_stats()
    report = extract(
        target, samples, store, tap_ids=tap_ids, token_budget=token_budget, max_batch=512, part_gib=4.0
    )
    tflops = 2 * parameters * report.tokens_per_s / 1e12
    found = {
        **report.figures(),
        "tflops": round(tflops, 1),
        "share_of_matmul_ceiling": round(tflops / ceiling, 4),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "selftest": report.selftest,
    }
    if profile:
        found["kernels_ms"] = kernel_times(target, token_budget)
    log.info("%s: %s", store.name, {k: v for k, v in found.items() if k not in ("selftest", "kernels_ms")})
    return found


@torch.inference_mode()
def warm_up(target: Any, token_budget: int) -> None:
    """Compile and tune every kernel on the shapes of long and short batches."""
    for length in (4096, 560, 130):
        ids = torch.zeros(
            max(1, min(512, token_budget // length)), length, dtype=torch.int64, device=target.device
        )
        target.body(input_ids=ids, use_cache=False)
    torch.cuda.synchronize()


@torch.inference_mode()
def kernel_times(target: Any, token_budget: int, length: int = 512) -> dict[str, float]:
    """Milliseconds by kernel name of one forward of a full batch, the 25 largest."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (token_budget // length, length), generator=generator).to(
        target.device
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        target.body(input_ids=ids, use_cache=False)
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)[:25]
    total = sum(row.self_device_time_total for row in profiler.key_averages())
    return {"total": round(total / 1e3, 2)} | {
        f"{row.key[:90]} x{row.count}": round(row.self_device_time_total / 1e3, 2) for row in rows
    }


def compare_stores(one: Path, other: Path, count: int = 16) -> dict[str, float]:
    """Worst and mean rel-L2 a tap between two stores of the same samples."""
    first, second = open_store(one), open_store(other)
    errors = [[] for _ in first.tap_ids]
    for index in range(0, len(first), max(1, len(first) // count)):
        a, b = first[index], second[second.find(first[index].hash)]
        for number, (x, y) in enumerate(
            zip(b.taps.split(first.hidden_size, -1), a.taps.split(first.hidden_size, -1))
        ):
            errors[number].append(rel_l2(x, y))
    return {f"tap {tap}": round(statistics.mean(found), 5) for tap, found in zip(first.tap_ids, errors)}


def codec_errors() -> dict[str, float]:
    """Rel-L2 error of each codec on SmolLM2's states of its own chat template, by codec; and bytes against
    bf16.
    """
    target = load_target("smollm2", last_layer=27, with_head=False)
    text = (ROOT / "LICENSE").read_text()[:4000]
    ids = torch.tensor([target.tokenizer(text)["input_ids"][:400]])
    states: list[torch.Tensor] = []
    handle = target.layers[14].register_forward_hook(
        lambda module, args, output: states.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.inference_mode():
        target.body(input_ids=ids, use_cache=False)
    handle.remove()
    rows, found = states[0].flatten(0, 1).to(torch.bfloat16), {}
    for codec in CODECS.values():
        codes = torch.empty_like(rows, dtype=codec.dtype)
        scale = torch.empty(len(rows)) if codec.scaled else None
        codec.encode(rows, codes, scale)
        decoded = codec.decode(codes, scale[:, None] if scale is not None else None)
        found[codec.name] = round(rel_l2(decoded, rows), 6)
    return found


def plan_figures() -> dict[str, float]:
    """Padding waste of 8,192 and 32,768 windows and planning time over 913,000 real lengths."""
    lengths, found = real_lengths(913_000), {}
    for name, window in (("8k", 8192), ("32k", 32768)):
        began = time.perf_counter()
        plan = plan_batches(lengths, token_budget=32768, max_batch=512, window=window, chunk=64)
        found["plan_seconds"] = max(found.get("plan_seconds", 0.0), round(time.perf_counter() - began, 3))
        found[f"padding_waste_{name}_pct"] = round(plan.waste_pct, 4)
    return found


def main() -> None:
    """Run the cases this machine can and write their figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument(
        "--shapes", nargs="*", default=["qwen3.6-27b", "qwen3-8b"], help="named shapes of the CUDA cases"
    )
    parser.add_argument("--batches", type=int, default=8, help="full batches of each CUDA case")
    parser.add_argument("--token-budget", type=int, default=32768)
    parser.add_argument("--scratch", type=Path, default=None, help="folder for the stores (fast: /dev/shm)")
    parser.add_argument("--profile", action="store_true", help="also list the kernels of one forward")
    parser.add_argument("--skip-cpu", action="store_true", help="leave out planning and codecs")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    figures: dict[str, Any] = {} if arguments.skip_cpu else plan_figures()
    cases: dict[str, Any] = {} if arguments.skip_cpu else {"codec_rel_l2_smollm2": codec_errors()}
    if torch.cuda.is_available():
        ceiling = matmul_ceiling(torch.device("cuda"))
        figures["matmul_ceiling_tflops"] = round(ceiling, 1)
        for shape in arguments.shapes:
            with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
                case = speed_case(
                    shape,
                    ceiling,
                    Path(folder),
                    token_budget=arguments.token_budget,
                    batches=arguments.batches,
                    profile=arguments.profile,
                )
            cases[shape] = case
            name = shape.rsplit("-", 1)[-1]
            figures[f"share_of_matmul_ceiling_{name}"] = case["fast"]["share_of_matmul_ceiling"]
            figures[f"share_eager_{name}"] = case["eager"]["share_of_matmul_ceiling"]
            figures[f"tokens_per_s_{name}"] = case["fast"]["extract_tokens_per_s"]
            figures.setdefault("gpu_idle_pct", case["fast"]["gpu_idle_pct"])
            _write(arguments.json, figures, cases)
        figures["matmul_ceiling_after_tflops"] = round(matmul_ceiling(torch.device("cuda")), 1)
    _write(arguments.json, figures, cases)
    log.info("%s", figures)


def _write(path: Path | None, figures: dict[str, Any], cases: dict[str, Any]) -> None:
    if path is not None:
        files.write_json(path, {"figures": figures, "cases": cases, **provenance.provenance()})


if __name__ == "__main__":
    main()
