"""How fast is a training step, what does it need, and where does its time go?

    python benchmarks/training.py --json FILE [--scratch /dev/shm] [--only small large pipeline]

Real steps of the training loop on rows of a real feature store (random states, in `--scratch`), on one CUDA
device: the large configuration (drafter of a 27B target, 1,024 anchors x 24 of an 8,192-token row, vocabulary
248,320, 85 % cross-entropy + 15 % KL + CAP, gamma 10, windows of 2,048 on four layers, noise) and the small
one (drafter of SmolLM2, 3,072 x 8). Without a device the same script runs at toy sizes and says so.

Model FLOPs: 2 a weight and position forward and twice that backward (Kaplan et al. 2020, arXiv:2001.08361,
appendix of PaLM, arXiv:2204.02311), less what is never computed: gradients of the states and of the head.
Attention counts the visible pairs alone, 4 x query heads x head size each; what is computed again counts
nothing. `large_config_mfu` is the share of the rate that an 8,192-cubed matmul reaches on a cool card in the
same process; `..._held` of the rate that it holds for two seconds, as a step lasts nearly one.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import json
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import loss_peers
import torch
import torch.nn.functional as F
from loss import matmul_rates
from random_store import write_random_store
from result_file import made_of, read_result, told
from torch import Tensor

from dflash_lab import files
from dflash_lab.drafter.attention import key_bounds
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.distributed import Single
from dflash_lab.drafter.loss_terms import LossConfig
from dflash_lab.drafter.model import Drafter, RMSNorm
from dflash_lab.drafter.objective import TrainSettings
from dflash_lab.drafter.optim import OptimizerConfig
from dflash_lab.drafter.rows import Row, feed, prefetch
from dflash_lab.drafter.train import Trainer
from dflash_lab.extraction.store import open_store
from dflash_lab.models.load import TargetHead
from dflash_lab.provenance import provenance

BLENDED = LossConfig(hard_weight=0.85, soft_weight=0.15, cap_weight=0.1)


@dataclass(frozen=True)
class Case:
    """A configuration to measure: the drafter, the settings of its loop, the samples of its store."""

    config: DrafterConfig
    settings: TrainSettings
    lengths: tuple[int, ...]
    steps: int
    warm: int = 2  # steps before the clock starts


def large_case(toy: bool, steps: int = 0) -> Case:
    """The drafter of a 27B target; its rows are single documents, the most that attention can have to do."""
    size = (4096, 64, 96, 4, 2, 16) if toy else (248_320, 5120, 17_408, 32, 8, 128)
    vocab, hidden, intermediate, heads, kv_heads, head_dim = size
    context, anchors, block, window = (256, 16, 8, 64) if toy else (8192, 1024, 24, 2048)
    config = DrafterConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_layers=5,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, block_size=block,
        mask_token_id=vocab - 1, tap_ids=(1, 16, 31, 46, 61), num_target_layers=64,
        layer_types=("sliding_attention",) * 4 + ("full_attention",), sliding_window=window, rope_theta=1e7,
    )  # fmt: skip
    settings = TrainSettings(
        max_steps=1000, context_tokens=context, anchors=anchors, loss=BLENDED, gamma=10.0, noise_std=0.05,
        optimizer=OptimizerConfig(lr=1e-5), eval_rows=0,
    )  # fmt: skip
    return Case(config, settings, (context,) * 4, steps or (2 if toy else 8))


def small_case(toy: bool, **changes: Any) -> Case:
    """The drafter of SmolLM2-135M on short documents, packed."""
    size = (1024, 48, 64, 3, 1, 16) if toy else (49_152, 576, 1536, 9, 3, 64)
    vocab, hidden, intermediate, heads, kv_heads, head_dim = size
    context, anchors = (256, 48) if toy else (8192, 3072)
    config = DrafterConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_layers=5,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, block_size=8, mask_token_id=4,
        tap_ids=(1, 8, 14, 21, 27), num_target_layers=30, rope_theta=1e5,
    )  # fmt: skip
    values: dict[str, Any] = dict(
        max_steps=10_000, context_tokens=context, anchors=anchors, loss=LossConfig(), gamma=4.0,
        optimizer=OptimizerConfig(lr=1e-4), eval_rows=0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    count, low, high = (24, 30, 90) if toy else (240, 100, 500)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return Case(
        config, TrainSettings(**(values | changes)), tuple(lengths), 3 if toy else 60, 2 if toy else 20
    )


def random_head(config: DrafterConfig, device: torch.device, dtype: torch.dtype) -> TargetHead:
    """The frozen ends of a target, untied."""
    g = torch.Generator(device).manual_seed(1)

    def weight() -> Tensor:
        shape = config.vocab_size, config.hidden_size
        return torch.randn(shape, generator=g, device=device, dtype=dtype) * (2.0 / config.hidden_size**0.5)

    norm = RMSNorm(config.hidden_size, 1e-6).to(device, dtype).requires_grad_(False)
    return TargetHead(weight(), norm, weight())


def new_trainer(case: Case, store: Path, folder: Path, device: torch.device, group: Single) -> Trainer:
    """The training loop of a case, compiled as on a device it would be, before its first step."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        drafter = Drafter(case.config).to(dtype)
    drafter.initialize(torch.Generator(device).manual_seed(0))
    if device.type == "cuda":
        drafter.compile_layers()
    head = random_head(case.config, device, dtype)
    return Trainer(open_store(store), head, drafter, case.settings, folder, group=group)


def step_flop(case: Case, row: Row) -> dict[str, float]:
    """Model FLOPs of one step by part: see the module's text."""
    config, size = case.config, case.config.hidden_size
    positions, context = row.blocks * config.block_size, row.tokens
    key_value = 2 * config.num_kv_heads * config.head_dim * size
    attention = 2 * config.num_heads * config.head_dim * size + key_value
    layer = attention + 3 * size * config.intermediate_size
    pairs = 0
    for number in range(config.num_layers):
        low, high, first, last = key_bounds(row.layout, config.layer_mask(number))
        seen = (high - low).clamp_min(0) + last - first
        pairs += int(seen[:positions].sum(dtype=torch.int64))
    live = row.slot_mask
    head = 2 * config.vocab_size * size
    teacher = case.settings.loss.needs_target * row.target_rows[live].unique().numel()
    return {
        "layers": 6.0 * positions * config.num_layers * layer,
        "context": 4.0 * context * len(config.tap_ids) * size**2
        + 6.0 * context * config.num_layers * key_value,
        "attention": 3 * 4.0 * config.num_heads * config.head_dim * pairs,
        "loss": head * (2.0 * int(live.sum()) + teacher),
    }


def host_times(trainer: Trainer, stream: Any, steps: int = 5, most: int = 40) -> dict[str, float]:
    """Milliseconds of the loop's own thread a step by function, without what it calls; the profiler's own
    time is in it.
    """
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(steps):
            trainer.train_step(stream)
    trainer.catch_up()
    rows = sorted(pstats.Stats(profiler).stats.items(), key=lambda row: -row[1][2])  # type: ignore[attr-defined]
    return {
        f"{Path(file).name}:{line} {name} x{calls / steps:g}": round(own / steps * 1e3, 3)
        for (file, line, name), (_, calls, own, *_) in rows[:most]
    }


class Phases:
    """Marks on the device's own clock around the parts of each step; on a CPU, on the host's."""

    NAMES = ("forward", "loss", "backward", "norm and update")

    def __init__(self, trainer: Trainer) -> None:
        self.cuda = trainer.device.type == "cuda"
        self.marks: list[Any] = []
        trainer.drafter.register_forward_pre_hook(lambda *_: self.mark())
        trainer.drafter.register_forward_hook(lambda *_: self.mark())
        trainer.objective.fused.register_forward_hook(lambda *_: self.mark())
        update = trainer.update

        def marked(*arguments: Any) -> Tensor:
            self.mark()
            good = update(*arguments)
            self.mark()
            return good

        trainer.update = marked  # type: ignore[method-assign]

    def mark(self) -> None:
        if not self.cuda:
            self.marks.append(time.perf_counter() * 1e3)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def means(self, step_ms: float) -> dict[str, float]:
        """Milliseconds a step by part; `rest` is what lies between them (noise, metrics, waiting)."""
        steps = len(self.marks) // 5
        found = dict.fromkeys(self.NAMES, 0.0)
        for step in range(steps):
            marks = self.marks[5 * step : 5 * step + 5]
            for name, (first, second) in zip(self.NAMES, pairwise(marks), strict=True):
                found[name] += (first.elapsed_time(second) if self.cuda else second - first) / steps
        return found | {"rest": step_ms - sum(found.values())}


def measure(case: Case, trainer: Trainer, *, profile: bool) -> dict[str, Any]:
    """Warm up, time the case's steps one after the other, and take one apart."""
    device, cuda = trainer.device, trainer.device.type == "cuda"
    compile_seconds = trainer.warm_up()
    print(f"compiled in {compile_seconds:.1f} s", flush=True)
    with contextlib.closing(prefetch(feed(trainer.stream(), device))) as stream:
        for _ in range(case.warm):
            trainer.train_step(stream)
        trainer.catch_up()
        before = dict(trainer.place)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        phases = Phases(trainer)
        began = time.perf_counter()
        for _ in range(case.steps):
            trainer.train_step(stream)
        trainer.catch_up()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
        spent = {name: trainer.place[name] - before[name] for name in ("tokens", "blocks", "waited")}
        step_ms = seconds / case.steps * 1e3
        result = {
            "step_ms": step_ms,
            "peak_gib": peak,
            "parts_ms": phases.means(step_ms),
            "anchors_per_s": spent["blocks"] / seconds,
            "context_tokens_per_s": spent["tokens"] / seconds,
            "loader_share_pct": 100 * spent["waited"] / seconds,
            "compile_seconds": compile_seconds,
            "steps": case.steps,
            "skipped": trainer.guard.skipped,
        }
        print(json.dumps(result), flush=True)
        if profile and cuda:
            result["kernels_ms"] = kernels(trainer, stream)
            result["host_ms"] = host_times(trainer, stream)
    return result


def kernels(trainer: Trainer, stream: Any, most: int = 30) -> dict[str, Any]:
    """Milliseconds of one step by kernel, the largest first; `busy` is their sum."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        trainer.train_step(stream)
        trainer.catch_up()
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows) / 1e3
    launches = sum(row.count for row in rows)
    named = {
        f"{row.key[:100]} x{row.count}": round(row.self_device_time_total / 1e3, 3) for row in rows[:most]
    }
    return {"busy": round(total, 2), "launches": launches} | named


def beside_peers(trainer: Trainer, row: Row) -> dict[str, Any]:
    """Forward, loss and backward of a row, masters and moments in place: ours, and with the loss over full
    logits that speculators 0.9 trains with.
    """
    settings, config, head = trainer.settings, trainer.drafter.config, trainer.head
    row = row.to(trainer.device)
    weights = (row.slot_mask * trainer.objective.weights).to(trainer.device).flatten()[None]
    places = row.target_rows.to(trainer.device).flatten()

    def ours() -> Tensor:
        loss = trainer.objective(trainer.drafter, trainer.drafter, row, row.taps, teacher=False)
        return loss.total / loss.denominator

    def full_logits() -> Tensor:
        """Its kernels take the target's logits for both terms: labels are the target's argmax."""
        kernels = loss_peers.speculators_losses()
        embeddings = head.embed(row.block_ids)
        hidden = trainer.drafter(embeddings, row.taps, row.layout, settings.attention).flatten(0, 1)[None]
        with torch.no_grad():
            targets = F.linear(head.normed(row.final)[places][None], head.weight)
        logits = F.linear(hidden, head.weight)
        losses = 0.85 * kernels.fused_ce_loss(logits, targets) + 0.15 * kernels.fused_kl_div_loss(
            logits, targets
        )
        return (losses * weights).sum() / weights.sum()

    steps = {"ours": ours, "speculators' losses on full logits": full_logits}
    return {"block_size": config.block_size} | {name: one_peer(trainer, step) for name, step in steps.items()}


def one_peer(trainer: Trainer, step: Callable[[], Tensor], repeat: int = 2) -> dict[str, Any]:
    """Milliseconds and peak GiB of a step without the update; why there are none, if so."""
    trainer.optimizer.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    absent = ""
    try:
        for _ in range(1 + repeat):
            torch.cuda.synchronize()
            began = time.perf_counter()
            step().backward()
            trainer.optimizer.zero_grad()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
    except ImportError as error:
        absent = f"not installed: {error}"
    except torch.OutOfMemoryError:
        absent = "out of memory"
    except Exception as error:  # a peer's own fault must not cost what was measured before
        absent = f"failed: {error!r}"
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"absent": absent, "peak_gib": peak} if absent else {"ms": min(times[1:]), "peak_gib": peak}


def run_large(
    device: torch.device, scratch: Path, rates: tuple[float, float], profile: bool
) -> dict[str, Any]:
    """The large configuration."""
    case = large_case(device.type != "cuda")
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        store = write_random_store(
            Path(folder) / "store", case.config, case.lengths, final=True, device=device
        )
        trainer = new_trainer(case, store, Path(folder) / "run", device, Single())
        result = measure(case, trainer, profile=profile)
        row = trainer.rows.row(0, 0)
        flop = step_flop(case, row)
        rate = sum(flop.values()) / result["step_ms"] * 1e3 / 1e12
        result |= {"flop": flop, "tflops": rate, "mfu": rate / rates[0], "mfu_held": rate / rates[1]}
        result["parameters"] = case.config.parameter_count
        yield result
        if device.type == "cuda":
            yield result | {"loss_beside_peers": beside_peers(trainer, row)}


def run_small(device: torch.device, scratch: Path, profile: bool) -> Iterator[dict[str, Any]]:
    """The small configuration, and what its options cost; after each, all that is measured so far."""
    toy = device.type != "cuda"
    variants: dict[str, dict[str, Any]] = {
        "cross-entropy, AdamW": {},
        "D-PACE, Muon": dict(
            loss=LossConfig(weighting="dpace"), optimizer=OptimizerConfig(kind="muon", lr=1e-4, muon_lr=1e-4)
        ),
    }
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        first = small_case(toy)
        store = write_random_store(
            Path(folder) / "store", first.config, first.lengths, final=True, device=device
        )
        for number, (name, changes) in enumerate(variants.items()):
            case = small_case(toy, **changes)
            trainer = new_trainer(case, store, Path(folder) / str(number), device, Single())
            results[name] = measure(case, trainer, profile=profile and not number)
            if not number:
                results["flop"] = step_flop(case, trainer.rows.row(0, 0))
            del trainer
            gc.collect()
            yield results


PIPELINE = ("pipeline_drafter_busy_pct", "pipeline_speedup")


def add_pipeline(path: Path, measured: Path) -> None:
    """Put the online pipeline's headline figures from a result of `pipeline.py` into one of this script."""
    result = read_result(path, "training.py", figures=dict, cases=dict)
    other = read_result(measured, "pipeline.py", figures=dict, splits=list)
    with made_of(measured, "pipeline.py"):
        result["figures"] |= {name: other["figures"][name] for name in PIPELINE}
    result["pipeline"] = {"from": measured.name} | {n: other.get(n) for n in ("device", "time", "commit")}
    files.write_json(path, result)


def pipeline_figures(scratch: Path) -> dict[str, float]:
    """The same, measured by `pipeline.py` on two devices."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        path = Path(folder) / "pipeline.json"
        script = Path(__file__).parent / "pipeline.py"
        command = [sys.executable, str(script), "--json", str(path), "--scratch", folder]
        subprocess.run(command, check=True)
        found = files.read_json(path)["figures"]
    return {name: found[name] for name in PIPELINE}


def main() -> None:
    """Measure what this machine can and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", required=True, help="where the results go")
    parser.add_argument("--scratch", type=Path, default=None, help="folder for the stores (fast: /dev/shm)")
    parser.add_argument("--only", nargs="+", default=["small", "large", "pipeline"], help="parts to measure")
    parser.add_argument(
        "--pipeline", type=Path, help="only add the figures of this result of pipeline.py to the --json file"
    )
    parser.add_argument("--no-profile", action="store_true", help="leave out the tables of kernels")
    options = parser.parse_args()
    if options.pipeline:
        add_pipeline(Path(options.json), options.pipeline)
        return
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    toy = device.type != "cuda"
    rates = matmul_rates(device, torch.float32 if toy else torch.bfloat16)
    result: dict[str, Any] = {
        "figures": {},
        "sizes": "toy: no CUDA device, these figures test the script only" if toy else "full",
        "matmul_tflops_first": rates[0],
        "matmul_tflops_held": rates[1],
        "cases": {},
        **provenance(),
    }
    figures, cases = result["figures"], result["cases"]
    if "small" in options.only:
        for small in run_small(device, options.scratch, not options.no_profile):
            cases["small"] = small
            figures["small_config_step_ms"] = small["cross-entropy, AdamW"]["step_ms"]
            files.write_json(options.json, result)
        gc.collect()
    if "large" in options.only:
        for large in run_large(device, options.scratch, rates, not options.no_profile):
            cases["large"] = large
            names = ("peak_gib", "mfu", "mfu_held", "step_ms")
            figures |= {f"large_config_{name}": large[name] for name in names}
            figures |= {n: large[n] for n in ("anchors_per_s", "context_tokens_per_s", "loader_share_pct")}
            files.write_json(options.json, result)
            print(json.dumps(large, indent=1), flush=True)
    if "pipeline" in options.only and torch.cuda.device_count() > 1:
        figures |= pipeline_figures(options.scratch)
    elif "pipeline" in options.only:
        result["pipeline"] = "not measured: it needs two devices (benchmarks/pipeline.py)"
    files.write_json(options.json, result)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    sys.exit(told(main))
