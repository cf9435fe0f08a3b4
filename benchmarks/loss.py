"""Speed and memory of the fused draft loss beside the public losses that install, on this machine.

    python benchmarks/loss.py --json FILE [--figure FOLDER]

On a CUDA device: 1,024 blocks of 24 slots, a vocabulary of 248,320, hidden size 5,120, bf16. The matmul rate
is measured first, in the same process; the floors are the matmuls that the loss cannot avoid, at that rate,
for all 24,576 positions (slot 0 of each block carries no loss, and the fused loss leaves it out). The rate is
the one the card holds over two seconds; under load it falls within a tenth of a second, and
`*_to_first_floor` takes the first ten matmuls instead. Without a device everything runs at toy
sizes, and the file says so: those figures test the script, they are no claim. Peers that are not installed
are named as such. Peak is what a loss and its backward need beyond its inputs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import loss_peers
import torch
from torch import Tensor

from dflash_lab.drafter.loss.config import LossConfig
from dflash_lab.drafter.loss.fused import fused_draft_loss
from dflash_lab.drafter.loss.plan import ChunkPlan
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
    inputs: Inputs, config: LossConfig, *, backend: str = "auto", plan: ChunkPlan | None = None
) -> Callable[[], Tensor]:
    """A step of the fused loss, target side included when the config uses it."""
    target: dict[str, Any] = {}
    if config.needs_target:
        target = {"target_hidden": inputs.target_hidden, "target_rows": inputs.target_rows}

    scale = 1 / inputs.weights.sum()  # known before the forward, as in training with given weights
    labels, weights = inputs.labels.cpu(), inputs.weights.cpu()  # as a sampler hands them over

    def step() -> Tensor:
        loss = fused_draft_loss(
            inputs.hidden, inputs.head, labels, weights, config=config, backend=backend, plan=plan,
            scale=scale,
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


def attempt(
    name: str, step: Callable[[], Callable[[], Tensor]], inputs: Inputs, out: dict[str, Any], **how: Any
) -> None:
    """Measure one row of the table; a peer that is not installed or does not fit is recorded as such."""
    try:
        found = measure(step(), inputs.hidden, **how)
        out[name] = {"ms": found.ms, "extra_gib": found.extra_gib}
    except ImportError as error:
        out[name] = {"absent": f"not installed: {error}"}
    except torch.OutOfMemoryError:
        out[name] = {"absent": "out of memory"}
    if inputs.hidden.device.type == "cuda":
        torch.cuda.empty_cache()
    row = out[name]
    gib = "" if row.get("extra_gib") is None else f"{row['extra_gib']:8.2f} GiB"
    print(f"{name:<34}" + (row["absent"] if "absent" in row else f"{row['ms']:9.1f} ms {gib}"), flush=True)


def main_table(
    shape: Shape, device: torch.device, dtype: torch.dtype, backends: list[str]
) -> tuple[dict[str, Any], dict[str, float]]:
    """Every backend and every peer on the main shape; errors of the gradient by config."""
    inputs = Inputs.make(shape, device, dtype)
    out: dict[str, Any] = {}
    for config, label in ((FULL, "CE + KL + CAP"), (HARD, "CE")):
        for backend in backends:
            attempt(
                f"fused, {backend}, {label}",
                lambda c=config, b=backend: ours(inputs, c, backend=b),
                inputs,
                out,
            )
    for name, peer in loss_peers.PEERS.items():
        attempt(name, lambda p=peer: p(inputs, FULL), inputs, out, repeat=3, warm=1)
    errors = {"grad_rel_err": gradient_error(inputs, FULL), "grad_rel_err_ce": gradient_error(inputs, HARD)}
    return out, errors


def shared_rows(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[dict[str, Any], float]:
    """The same with the anchors in one sequence of 8 tokens an anchor; and rho, distinct target rows over live rows."""
    inputs = Inputs.make(shape, device, dtype, sequence=8 * shape.anchors)
    out: dict[str, Any] = {}
    attempt("fused, shared target rows", lambda: ours(inputs, FULL), inputs, out)
    distinct = inputs.target_rows[:, 1:].unique().numel()
    return out, distinct / (shape.anchors * (shape.block - 1))


def small_end(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A small vocabulary and a small hidden size, where the naive loss is at its best."""
    inputs = Inputs.make(shape, device, dtype)
    out: dict[str, Any] = {}
    attempt("small: fused", lambda: ours(inputs, FULL), inputs, out)
    attempt("small: naive", lambda: loss_peers.naive(inputs, FULL), inputs, out)
    return out


def sweep_positions(
    shape: Shape, device: torch.device, dtype: torch.dtype, counts: list[int]
) -> list[dict[str, Any]]:
    """Time and peak as the number of positions grows, in blocks of 16; `buffers_gib` leaves the returned
    gradient out.
    """
    rows = []
    for count in counts:
        inputs = Inputs.make(Shape(count // 16, 16, shape.vocab, shape.hidden), device, dtype)
        found = measure(ours(inputs, FULL), inputs.hidden, repeat=3, warm=1)
        gradient_gib = inputs.hidden.numel() * inputs.hidden.element_size() / 2**30
        buffers = None if found.extra_gib is None else found.extra_gib - gradient_gib
        rows.append(
            {"positions": count, "ms": found.ms, "extra_gib": found.extra_gib, "buffers_gib": buffers}
        )
        print(f"N = {count:>6}: {found.ms:9.1f} ms, buffers {buffers} GiB", flush=True)
        del inputs
    return rows


def run(device: torch.device) -> dict[str, Any]:
    """All measurements."""
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    main = Shape(1024, 24, 248_320, 5120) if cuda else Shape(32, 8, 4096, 128)
    counts = [1024, 4096, 24_576, 98_304] if cuda else [256, 1024]
    small = Shape(512, 16, 49_152, 576) if cuda else Shape(32, 8, 4096, 64)
    first, rate = matmul_rates(device, dtype)
    floor_ms = main.matmul_flop / rate / 1e9
    print(
        f"{first:.1f} TFLOP/s at first, {rate:.1f} held; one matmul of the loss {floor_ms:.1f} ms", flush=True
    )
    backends = ["triton", "compile", "torch"] if cuda else ["torch"]
    table, errors = main_table(main, device, dtype, backends)
    chosen, rho = shared_rows(main, device, dtype)
    small_table = small_end(small, device, dtype)
    best = "fused, triton" if cuda else "fused, torch"
    full, hard = table[f"{best}, CE + KL + CAP"], table[f"{best}, CE"]
    naive_ms = table["naive full logits, CE + KL"].get("ms")
    positions = sweep_positions(main, device, dtype, counts)
    _, last = matmul_rates(device, dtype)

    def ratios(suffix: str, floor: float) -> dict[str, float | None]:
        return {
            f"ce_kl_ratio_to_{suffix}": full["ms"] / (3 * floor),
            f"ce_kl_rho035_ratio_to_{suffix}": chosen["fused, shared target rows"]["ms"] / (3 * floor),
            f"ce_ratio_to_{suffix}": hard["ms"] / (2 * floor),
            f"naive_ratio_to_{suffix}": naive_ms and naive_ms / (3 * floor),
        }

    figures = {
        **ratios("floor", floor_ms),
        "ce_kl_extra_gib": full["extra_gib"],
        "naive_extra_gib": table["naive full logits, CE + KL"].get("extra_gib"),
        **errors,
        "rho": rho,
        "small_ratio_to_naive": small_table["small: fused"]["ms"] / small_table["small: naive"]["ms"],
        "matmul_tflops": rate,
        "matmul_tflops_first": first,
        "matmul_tflops_at_the_end": last,
        **ratios("first_floor", main.matmul_flop / first / 1e9),
    }
    return {
        "claim": "loss",
        "sizes": "full" if cuda else "toy: no CUDA device, these figures test the script only",
        "figures": figures,
        "shape": vars(main) | {"positions": main.positions, "dtype": str(dtype)},
        "small_shape": vars(small),
        "table": table | chosen,
        "small_table": small_table,
        "positions": positions,
        "peer_versions": loss_peers.versions(),
        "provenance": provenance(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", required=True, help="where the results go")
    parser.add_argument("--figure", help="folder for loss.png, loss.html and loss.json (a plotly figure)")
    parser.add_argument(
        "--commit", help="what to record as the commit where the code runs outside its checkout"
    )
    options = parser.parse_args()
    result = run(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if options.commit:
        result["provenance"]["commit"] = options.commit
    write_json(options.json, result)
    for name, value in result["figures"].items():
        print(f"{name:<30} {value if value is None else round(value, 5)}")
    if options.figure:
        from loss_figure import save

        save(result, options.figure)


if __name__ == "__main__":
    main()
