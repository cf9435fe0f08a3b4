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
import itertools
import json
import logging
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import planning
import polars as pl
import torch

from dflash_lab import files, provenance
from dflash_lab.data.batching import plan_batches
from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.extraction.checks import body_parameters, rel_l2
from dflash_lab.extraction.fused_layers import speed_up
from dflash_lab.extraction.loop import BUFFERS, extract
from dflash_lab.extraction.shard import Tokens, read_index
from dflash_lab.extraction.store import CODECS, Layout
from dflash_lab.extraction.writer import Capture, HostBuffers, pad
from dflash_lab.machine import device_budget_gib
from dflash_lab.memory.gate import clear_extraction, outcome
from dflash_lab.memory.shapes import GIB, ExtractionSetup
from dflash_lab.models.hooks import Taps, default_tap_ids
from dflash_lab.models.load import Target, load_target
from dflash_lab.models.source import load_config

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = ROOT / "tests" / "data" / "lengths_public_chat.parquet"
MAX_LENGTH = 4096
log = logging.getLogger("extraction")


def real_lengths(count: int, *, seed: int = 0) -> np.ndarray:
    """Draw `count` chat exchange lengths with replacement, cut at 4,096 tokens."""
    pool = pl.read_parquet(LENGTHS).filter(pl.col("source") == "exchange")["length"].to_numpy()
    return np.minimum(np.random.default_rng(seed).choice(pool, count), MAX_LENGTH).astype(np.int64)


def matmul_ceiling(device: torch.device, seconds: float = 4.0) -> tuple[float, float]:
    """TFLOP/s of a 16,384 x 5,120 x 17,408 bf16 product on random data: the ceiling, the median of the first
    20, and what the card holds, the median of the last quarter of `seconds` of nothing but products.

    A cool card runs above what its power allows for long, and extraction runs for hours: both are given.
    """
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(16384, 5120, device=device, dtype=torch.bfloat16, generator=generator)
    b = torch.randn(17408, 5120, device=device, dtype=torch.bfloat16, generator=generator)
    for _ in range(5):
        torch.nn.functional.linear(a, b)
    times: list[float] = []
    while sum(times) < seconds:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
        events[0].record()
        for event in events[1:]:
            torch.nn.functional.linear(a, b)
            event.record()
        torch.cuda.synchronize()
        times += [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(events)]
    work = 2 * 16384 * 5120 * 17408 / 1e12
    return work / statistics.median(times[:20]), work / statistics.median(times[-len(times) // 4 :])


def typical_samples(
    path: Path, vocabulary: int, *, token_budget: int, max_batch: int, batches: int, chunk: int
) -> Path:
    """Write the samples of `batches` batches spread evenly over the plan of a whole window of 32,768 samples.

    So padding is that of a long run, not of a small set: planned again with the same `chunk`, as extraction
    does, these samples make the same batches.
    """
    lengths = real_lengths(32768)
    plan = plan_batches(lengths, token_budget=token_budget, max_batch=max_batch, chunk=chunk)
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
    """Time the forward of typical batches plain and fused, then extract `batches` of them through
    the whole pipeline.
    """
    config = load_config(f"random:{shape}")
    tap_ids = default_tap_ids(config.num_hidden_layers)
    parameters = body_parameters(config, max(tap_ids))
    target = load_target(
        f"random:{shape}", device="cuda", dtype="bfloat16", last_layer=max(tap_ids), with_head=False
    )
    samples = typical_samples(
        folder / f"{shape}.parquet",
        config.vocab_size,
        token_budget=token_budget,
        max_batch=512,
        batches=batches,
        chunk=64 if target.is_hybrid else 1,
    )
    warming = threading.Thread(target=touch_memory, args=(batches * token_budget * config.hidden_size * 10,))
    warming.start()

    def share(tokens_per_s: float) -> dict[str, float]:
        tflops = 2 * parameters * tokens_per_s / 1e12
        return {"tflops": round(tflops, 1), "share_of_matmul_ceiling": round(tflops / ceiling, 4)}

    result: dict[str, Any] = {"shape": shape, "body_parameters": parameters, "token_budget": token_budget}
    result["eager"], eager_states = forward_rate(target, samples, tap_ids, token_budget)
    result["eager"] |= share(result["eager"]["tokens_per_s"])
    log.info("%s eager: %s", shape, result["eager"])
    began = time.perf_counter()
    path = speed_up(target, "auto")
    result["fast_path"] = {**path.summary(), "seconds": round(time.perf_counter() - began, 1)}
    log.info("%s: %s %s", shape, result["fast_path"], dict(list(path.plain.items())[:3]))
    result["fast"], fast_states = forward_rate(target, samples, tap_ids, token_budget)
    result["fast"] |= share(result["fast"]["tokens_per_s"])
    result["fast"]["rel_l2_to_eager"] = [
        round(rel_l2(one, other), 5) for one, other in zip(fast_states, eager_states)
    ]
    log.info("%s fast: %s", shape, result["fast"])
    warming.join()
    result["memory"] = {"predicted_gib": round(predicted_peak(config, samples, tap_ids, token_budget), 2)}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    report = extract(
        target, samples, folder / shape, tap_ids=tap_ids, token_budget=token_budget, max_batch=512
    )
    result["pipeline"] = {
        **report.figures(),
        **share(report.tokens_stored / report.forward_seconds),
        "selftest": report.selftest,
        "seal_seconds": round(report.write_seconds, 2),
        "tokens_per_s_by_batch": {
            f"{number}: {one.samples} x {one.longest}": round(one.tokens / one.seconds)
            for number, one in enumerate(report.batches)
        },
    }
    stats = torch.cuda.memory_stats()
    result["memory"] |= {
        f"{name}_gib": round(stats[f"{name}_bytes.all.peak"] / GIB, 2) for name in ("active", "reserved")
    }
    log.info("%s pipeline: %s", shape, result["pipeline"])
    if profile:
        result["kernels_ms"] = kernel_times(target, token_budget)
        log.info("%s kernels: %s", shape, json.dumps(result["kernels_ms"], indent=1))
    return result


def touch_memory(size: int) -> None:
    """Let the machine back `size` bytes with real pages, then give them back.

    A virtual machine gets its memory from the host at the first touch, at some 2.7 GB/s; a run of seconds
    into a folder in memory would measure that and not extraction.
    """
    np.empty(size, np.uint8).fill(1)


def predicted_peak(config: Any, samples: Path, tap_ids: list[int], token_budget: int) -> float:
    """GiB that the worst batch of the pipeline is predicted to hold in tensors."""
    longest = int(read_index(samples).lengths.max())
    setup = ExtractionSetup(batch=1, length=longest, tap_ids=tuple(tap_ids), fused=True, in_flight=BUFFERS)
    cleared = clear_extraction(
        config, setup, device_budget_gib("cuda"), token_budget=token_budget, force=True
    )
    return outcome(cleared, "cpu")["predicted_peak_gib"]


def forward_rate(
    target: Target, samples: Path, tap_ids: list[int], token_budget: int, batches: int = 3
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Tokens a second of forward and packing over the longest, a middle and the shortest batch, after one
    pass to warm up.

    Also returns some states of the middle batch, for comparison, one tensor a tap.
    """
    index = read_index(samples)
    chunk = 64 if target.is_hybrid else 1
    plan = plan_batches(index.lengths, token_budget=token_budget, max_batch=512, chunk=chunk)
    chosen = [plan.batches[at] for at in np.linspace(0, len(plan) - 2, batches).astype(int)]
    tokens = Tokens(index, np.arange(len(index.lengths)))
    layout = Layout(tuple(tap_ids), target.hidden_size, False, CODECS["bf16"])
    sizes = [layout.buffer_bytes(int(index.lengths[rows].sum()), len(rows)) for rows in chosen]
    buffers = HostBuffers(2, max(sizes), pinned=True)
    with Capture(target, layout, buffers) as capture:
        for _ in range(2):
            capture.spans.clear()
            for rows in chosen:
                host = capture.run(rows, *tokens.of(rows), lambda: None, lambda states: None)
                buffers.give_back(host.buffer)
        torch.cuda.synchronize()
        ids = tokens.of(chosen[1])[0][:4]
        states = [state.float().cpu() for state in capture.states(pad(ids, target.device))]
    seconds = [begin.elapsed_time(end) / 1e3 for begin, end in capture.spans]
    counts = [int(index.lengths[rows].sum()) for rows in chosen]
    by_shape = {
        f"{len(rows)} x {int(index.lengths[rows].max())}": round(count / second, 1)
        for rows, count, second in zip(chosen, counts, seconds)
    }
    return {"tokens_per_s": round(sum(counts) / sum(seconds), 1), "by_shape": by_shape}, states


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


@torch.inference_mode()
def codec_errors() -> dict[str, dict[str, float]]:
    """Error of each codec on SmolLM2's states of an English text, by codec.

    `rel_l2` is dominated by a few huge channels; `rel_l2_rest` leaves out the eight largest and so shows what
    the drafter's input norm makes of the others.
    """
    target = load_target("smollm2", last_layer=14, with_head=False)
    ids = torch.tensor([target.tokenizer((ROOT / "LICENSE").read_text()[:4000])["input_ids"][:400]])
    with Taps(target, [14]) as taps:
        target.body(input_ids=ids, use_cache=False)
        rows = taps.take()[0].flatten(0, 1).to(torch.bfloat16)
    rest = rows.float().square().sum(dim=0).argsort()[:-8]
    found: dict[str, dict[str, float]] = {}
    for codec in CODECS.values():
        codes = torch.empty_like(rows, dtype=codec.dtype)
        scale = torch.empty(len(rows)) if codec.scaled else None
        codec.encode(rows, codes, scale)
        decoded = codec.decode(codes, scale[:, None] if scale is not None else None)
        found[codec.name] = {
            "rel_l2": round(rel_l2(decoded, rows), 6),
            "rel_l2_rest": round(rel_l2(decoded[:, rest], rows[:, rest]), 6),
            "bytes_a_value": codec.dtype.itemsize,
        }
    return found


def cpu_figures() -> dict[str, float]:
    """Planning and statistics of 913,000 and 10 million samples, measured by `planning.py`."""
    measured = planning.measure()
    names = (
        "plan_seconds",
        "padding_waste_8k_pct",
        "padding_waste_32k_pct",
        "stats_913k_seconds",
        "stats_10m_seconds",
    )
    return {name: round(measured[name], 4) for name in names}


def main() -> None:
    """Run the cases this machine can and write their figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument(
        "--shapes", nargs="*", default=["qwen3.6-27b", "qwen3-8b"], help="named shapes of the CUDA cases"
    )
    parser.add_argument("--batches", type=int, default=24, help="full batches of each CUDA case")
    parser.add_argument("--token-budget", type=int, default=16384)
    parser.add_argument("--scratch", type=Path, default=None, help="folder for the stores (fast: /dev/shm)")
    parser.add_argument("--profile", action="store_true", help="also list the kernels of one forward")
    parser.add_argument("--skip-cpu", action="store_true", help="leave out planning and codecs")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    figures: dict[str, Any] = {} if arguments.skip_cpu else cpu_figures()
    cases: dict[str, Any] = {} if arguments.skip_cpu else {"codecs_smollm2": codec_errors()}
    if torch.cuda.is_available():
        ceiling, held = matmul_ceiling(torch.device("cuda"))
        figures["matmul_ceiling_tflops"] = round(ceiling, 1)
        figures["matmul_held_tflops"] = round(held, 1)
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
            gc.collect()
            torch.cuda.empty_cache()
            cases[shape] = case
            name = shape.rsplit("-", 1)[-1]
            figures[f"share_of_matmul_ceiling_{name}"] = case["pipeline"]["share_of_matmul_ceiling"]
            figures[f"share_of_held_rate_{name}"] = round(case["pipeline"]["tflops"] / held, 4)
            figures[f"share_eager_{name}"] = case["eager"]["share_of_matmul_ceiling"]
            figures[f"tokens_per_s_{name}"] = case["fast"]["tokens_per_s"]
            figures[f"gpu_idle_pct_{name}"] = case["pipeline"]["gpu_idle_pct"]
            figures["gpu_idle_pct"] = max(
                one["pipeline"]["gpu_idle_pct"] for one in cases.values() if "pipeline" in one
            )
            _write(arguments.json, figures, cases)
        figures["matmul_ceiling_after_tflops"] = round(matmul_ceiling(torch.device("cuda"))[0], 1)
    _write(arguments.json, figures, cases)
    log.info("%s", figures)


def _write(path: Path | None, figures: dict[str, Any], cases: dict[str, Any]) -> None:
    if path is not None:
        files.write_json(path, {"figures": figures, "cases": cases, **provenance.provenance()})


if __name__ == "__main__":
    main()
