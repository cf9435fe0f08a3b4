"""Speed and memory of the fused draft loss beside the public losses that install, on this machine.

    python benchmarks/loss.py --json FILE [--figure FOLDER] [--only TEXT ...]

On a CUDA device: 1,024 blocks of 24 slots, a vocabulary of 248,320, hidden size 5,120, bf16. The matmul rate
is measured first, in the same process; the floors are the matmuls that the loss cannot avoid, at that rate,
for all 24,576 positions (slot 0 of each block carries no loss, and the fused loss leaves it out).
`*_to_floor` takes the rate of the first ten matmuls of a cool card; under load it falls within a tenth of a
second, and `*_to_held_floor` takes the rate that the card holds over two seconds. Without a device everything
runs at toy sizes, and the file says so: those figures test the script, they are no claim. Peers that are not
installed are named as such. Peak is what a loss and its backward need beyond its inputs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import loss_peers
import torch
from result_file import read_result, told
from torch import Tensor

from dflash_lab.drafter.loss import fused_draft_loss
from dflash_lab.drafter.loss_terms import LossConfig
from dflash_lab.files import write_json
from dflash_lab.provenance import provenance

HARD = LossConfig()
FULL = LossConfig(hard_weight=0.85, soft_weight=0.15, cap_weight=0.1)


@dataclass(frozen=True)
class Shape:
    """A size of the problem."""

    anchors: int
    block: int
    vocab: int
    hidden: int

    @property
    def positions(self) -> int:
        return self.anchors * self.block

    @property
    def matmul_flop(self) -> float:
        """Operations of one [positions, hidden] x [hidden, vocab] matmul."""
        return 2.0 * self.positions * self.vocab * self.hidden


@dataclass(frozen=True)
class Inputs:
    """Random states of both sides; labels are the drafter's own argmax at about half of the positions."""

    shape: Shape
    hidden: Tensor  # [A, B, H], requires grad
    head: Tensor  # [V, H]
    labels: Tensor  # [A, B]
    weights: Tensor  # [A, B]; 0 in slot 0
    target_hidden: Tensor  # [R, H]
    target_rows: Tensor  # [A, B], on the CPU, where a sampler makes it

    @classmethod
    def make(cls, shape: Shape, device: torch.device, dtype: torch.dtype, *, sequence: int = 0) -> Inputs:
        """`sequence` tokens that the sorted anchors share; 0 gives every slot a target row of its own."""
        g = torch.Generator(device).manual_seed(0)
        cpu = torch.Generator().manual_seed(0)
        a, b, v, h = shape.anchors, shape.block, shape.vocab, shape.hidden
        hidden = torch.randn(a, b, h, generator=g, device=device, dtype=dtype)
        head = torch.randn(v, h, generator=g, device=device, dtype=dtype) * (2.0 / h**0.5)
        if sequence:
            anchor = torch.randperm(sequence - b, generator=cpu)[:a].sort().values
            rows = (anchor[:, None] + torch.arange(b) - 1).clamp_min(0)
            target = torch.randn(sequence, h, generator=g, device=device, dtype=dtype)
        else:
            rows = torch.arange(a * b).view(a, b)
            target = hidden.view(-1, h) + 0.5 * torch.randn(a * b, h, generator=g, device=device, dtype=dtype)
        weights = torch.exp(-(torch.arange(b) - 1).clamp_min(0) / 7.0).repeat(a, 1)
        weights[:, 0] = 0
        labels = torch.randint(v, (a, b), generator=cpu)
        inputs = cls(shape, hidden, head, labels.to(device), weights.to(device), target, rows)
        with torch.no_grad():
            own = fused_draft_loss(hidden, head, inputs.labels, inputs.weights, config=HARD).rows.argmax
        take = (torch.rand(a, b, generator=cpu) < 0.5).to(device) & (own >= 0)
        inputs.labels.copy_(torch.where(take, own, inputs.labels))
        hidden.requires_grad_()
        return inputs


@dataclass(frozen=True)
class Measured:
    """Median milliseconds and peak GiB beyond the inputs (None without a device that counts)."""

    ms: float
    extra_gib: float | None


def measure(step: Callable[[], Tensor], hidden: Tensor, *, repeat: int = 5, warm: int = 2) -> Measured:
    """Time `step` (which returns a scalar loss) with its backward to `hidden`, call after call without a
    pause.
    """
    cuda = hidden.device.type == "cuda"

    def once() -> None:
        hidden.grad = None
        step().backward()

    for _ in range(warm):
        once()
    times: list[float] = []
    base = 0
    hidden.grad = None
    if cuda:
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    if cuda:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
        marks[0].record()
        for mark in marks[1:]:
            once()
            mark.record()
        torch.cuda.synchronize()
        times = [first.elapsed_time(second) for first, second in pairwise(marks)]
    else:
        for _ in range(repeat):
            began = time.perf_counter()
            once()
            times.append((time.perf_counter() - began) * 1e3)
    peak = (torch.cuda.max_memory_allocated() - base) / 2**30 if cuda else None
    hidden.grad = None
    return Measured(statistics.median(times), peak)


def matmul_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """(TFLOP/s of the first matmuls, TFLOP/s once the clocks have settled) of a square matmul on random data.

    The loss runs for a quarter of a second at a time in a job that never rests, so what it competes with is
    the rate that the card holds, not that of its first milliseconds.
    """
    cuda = device.type == "cuda"
    size, count = (8192, 1200) if cuda else (1024, 12)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    times = []
    if cuda:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        for mark in marks:
            mark.record()
            torch.mm(left, right, out=out)
        torch.cuda.synchronize()
        times = [first.elapsed_time(second) for first, second in pairwise(marks)]
    else:
        for _ in range(count):
            began = time.perf_counter()
            torch.mm(left, right, out=out)
            times.append((time.perf_counter() - began) * 1e3)
    flop = 2.0 * size**3 / 1e9
    return flop / statistics.median(times[3:13]), flop / statistics.median(times[count // 2 :])


def ours(
    inputs: Inputs, config: LossConfig, *, backend: str = "auto", chunk_rows: int | None = None
) -> Callable[[], Tensor]:
    """A step of the fused loss, target side included when the config uses it."""
    target: dict[str, Any] = {}
    if config.needs_target:
        target = {"target_hidden": inputs.target_hidden, "target_rows": inputs.target_rows}

    scale = 1 / inputs.weights.sum()  # known before the forward, as in training with given weights
    labels, weights = inputs.labels.cpu(), inputs.weights.cpu()  # as a sampler hands them over

    def step() -> Tensor:
        loss = fused_draft_loss(
            inputs.hidden, inputs.head, labels, weights, config=config, backend=backend,
            chunk_rows=chunk_rows, scale=scale,
            **target,
        )  # fmt: skip
        return loss.total

    return step


def gradient_error(inputs: Inputs, config: LossConfig, anchors: int = 4) -> float:
    """Relative L2 error of the gradient of the first anchors of the whole run against float64 autograd over
    full logits.
    """
    inputs.hidden.grad = None
    loss = ours(inputs, config)()
    loss.backward()
    assert inputs.hidden.grad is not None
    found = inputs.hidden.grad[:anchors].double()
    inputs.hidden.grad = None
    states = inputs.hidden.detach()[:anchors].double().requires_grad_()
    head = inputs.head.double()
    rows = inputs.target_rows[:anchors].to(head.device)
    part = loss_peers.dense(
        states, head, inputs.labels[:anchors], inputs.weights[:anchors].double(),
        inputs.target_hidden.double()[rows], config,
    )  # fmt: skip
    (part / inputs.weights.double().sum()).backward()
    assert states.grad is not None
    return ((found - states.grad).norm() / states.grad.norm()).item()


class Bench:
    """One run of the script: its matmul rate, what it was asked to measure, and the result it adds to.

    Every row remembers the run it was measured in, and is compared with the matmul rate of that run, so that
    a row can be measured again without the others.
    """

    def __init__(self, device: torch.device, only: list[str], result: dict[str, Any]) -> None:
        self.device, self.only, self.result = device, only, result
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        first, held = matmul_rates(device, self.dtype)
        print(f"{first:.1f} TFLOP/s at first, {held:.1f} held", flush=True)
        rates = {"matmul_tflops": held, "matmul_tflops_first": first}
        runs = result.setdefault("runs", [])
        runs.append(rates | {"peers": loss_peers.versions(), "provenance": provenance()})
        self.number = len(runs) - 1

    def wanted(self, name: str) -> bool:
        return not self.only or any(text in name for text in self.only)

    def row(
        self, table: str, name: str, step: Callable[[], Callable[[], Tensor]], inputs: Inputs, **how: Any
    ) -> None:
        """Measure one row; a peer that is not installed or does not fit is recorded as such."""
        if not self.wanted(name):
            return
        try:
            found: dict[str, Any] = vars(measure(step(), inputs.hidden, **how))
        except ImportError as error:
            found = {"absent": f"not installed: {error}"}
        except torch.OutOfMemoryError:
            found = {"absent": "out of memory"}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.result.setdefault(table, {})[name] = found | {"run": self.number}
        gib = "" if found.get("extra_gib") is None else f"{found['extra_gib']:8.2f} GiB"
        print(
            f"{name:<38}" + (found["absent"] if "absent" in found else f"{found['ms']:9.1f} ms {gib}"),
            flush=True,
        )

    def main_table(self, shape: Shape, backends: list[str]) -> None:
        """Every backend and every peer on the main shape, and the errors of the gradient."""
        inputs = Inputs.make(shape, self.device, self.dtype)
        for config, label in ((FULL, "CE + KL + CAP"), (HARD, "CE")):
            for backend in backends:
                name = f"fused, {backend}, {label}"
                self.row("table", name, lambda c=config, b=backend: ours(inputs, c, backend=b), inputs)
        for name, peer in loss_peers.PEERS.items():
            self.row("table", name, lambda p=peer: p(inputs, FULL), inputs, repeat=3, warm=1)
        if self.wanted("errors"):
            self.result["errors"] = {
                "grad_rel_err": gradient_error(inputs, FULL),
                "grad_rel_err_ce": gradient_error(inputs, HARD),
            }

    def shared_rows(self, shape: Shape) -> None:
        """The same with the anchors in one sequence of 8 tokens an anchor; rho = distinct target rows over
        live rows.
        """
        inputs = Inputs.make(shape, self.device, self.dtype, sequence=8 * shape.anchors)
        self.row("table", "fused, shared target rows", lambda: ours(inputs, FULL), inputs)
        distinct = inputs.target_rows[:, 1:].unique().numel()
        self.result["rho"] = distinct / (shape.anchors * (shape.block - 1))

    def small_end(self, shape: Shape) -> None:
        """A small vocabulary and a small hidden size, where the naive loss is at its best."""
        inputs = Inputs.make(shape, self.device, self.dtype)
        self.row("small_table", "small: fused", lambda: ours(inputs, FULL), inputs, repeat=15)
        self.row("small_table", "small: naive", lambda: loss_peers.naive(inputs, FULL), inputs, repeat=15)

    def positions(self, shape: Shape, counts: list[int]) -> None:
        """Time and peak as positions grow, in blocks of 16; `buffers_gib` leaves out the gradient that is
        returned.
        """
        rows = []
        for count in counts:
            inputs = Inputs.make(Shape(count // 16, 16, shape.vocab, shape.hidden), self.device, self.dtype)
            found = measure(ours(inputs, FULL), inputs.hidden, repeat=3, warm=1)
            gradient_gib = inputs.hidden.numel() * inputs.hidden.element_size() / 2**30
            buffers = None if found.extra_gib is None else found.extra_gib - gradient_gib
            rows.append({"positions": count, **vars(found), "buffers_gib": buffers, "run": self.number})
            print(f"N = {count:>6}: {found.ms:9.1f} ms, buffers {buffers} GiB", flush=True)
            del inputs
        self.result["positions"] = rows


def figures(result: dict[str, Any]) -> dict[str, float | None]:
    """The headline numbers: each row against the floor of its own run."""
    table, small = result["table"], result["small_table"]
    best = "fused, triton" if "fused, triton, CE" in table else "fused, torch"
    names = {
        "ce_kl_ratio_to": (f"{best}, CE + KL + CAP", 3),
        "ce_kl_rho035_ratio_to": ("fused, shared target rows", 3),
        "ce_ratio_to": (f"{best}, CE", 2),
        "naive_ratio_to": ("naive full logits, CE + KL", 3),
    }
    out: dict[str, float | None] = {}
    for suffix, rate in (("floor", "matmul_tflops_first"), ("held_floor", "matmul_tflops")):
        for figure, (name, matmuls) in names.items():
            row = table[name]
            floor = matmuls * result["matmul_flop"] / result["runs"][row["run"]][rate] / 1e9
            out[f"{figure}_{suffix}"] = row["ms"] / floor if "ms" in row else None
    out["ce_kl_extra_gib"] = table[names["ce_kl_ratio_to"][0]]["extra_gib"]
    out["naive_extra_gib"] = table["naive full logits, CE + KL"].get("extra_gib")
    out |= result["errors"] | {"rho": result["rho"]}
    out["small_ratio_to_naive"] = small["small: fused"]["ms"] / small["small: naive"]["ms"]
    return out


def run(device: torch.device, only: list[str], result: dict[str, Any]) -> dict[str, Any]:
    """Measure what is wanted and return `result` with it."""
    cuda = device.type == "cuda"
    main = Shape(1024, 24, 248_320, 5120) if cuda else Shape(32, 8, 4096, 128)
    counts = [1024, 4096, 24_576, 98_304] if cuda else [256, 1024]
    small = Shape(512, 16, 49_152, 576) if cuda else Shape(32, 8, 4096, 64)
    bench = Bench(device, only, result)
    result |= {
        "claim": "loss",
        "sizes": "full" if cuda else "toy: no CUDA device, these figures test the script only",
        "shape": vars(main) | {"positions": main.positions, "dtype": str(bench.dtype)},
        "small_shape": vars(small),
        "matmul_flop": main.matmul_flop,
    }
    bench.main_table(main, ["triton", "torch"] if cuda else ["torch"])
    if bench.wanted("fused, shared target rows"):
        bench.shared_rows(main)
    if bench.wanted("small: fused") or bench.wanted("small: naive"):
        bench.small_end(small)
    if bench.wanted("positions"):
        bench.positions(main, counts)
    return {"figures": figures(result)} | {name: value for name, value in result.items() if name != "figures"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", required=True, help="where the results go")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="measure again only rows whose name contains one of these; the other rows of FILE are kept",
    )
    parser.add_argument("--figure", help="folder for loss.png, loss.html and loss.json (a plotly figure)")
    parser.add_argument(
        "--commit", help="what to record as the commit where the code runs outside its checkout"
    )
    options = parser.parse_args()
    result: dict[str, Any] = {}
    if options.only:
        parts: dict[str, type] = dict.fromkeys(("shape", "table", "small_table", "errors"), dict)
        result = read_result(options.json, "loss.py", runs=list, positions=list, **parts)
    result = run(torch.device("cuda" if torch.cuda.is_available() else "cpu"), options.only, result)
    if options.commit:
        result["runs"][-1]["provenance"]["commit"] = options.commit
    write_json(options.json, result)
    for name, value in result["figures"].items():
        print(f"{name:<30} {value if value is None else round(value, 5)}")
    if options.figure:
        from loss_figure import figure
        from result_figure import save_figure

        save_figure(figure(result), options.figure, "loss")


if __name__ == "__main__":
    sys.exit(told(main))
