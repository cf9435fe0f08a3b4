"""The question a run asks before it starts: does it fit, and if not, what to change. Where memory lacks all
the same, what was live is explained; afterwards `outcome` says how right the prediction was.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_lab import files
from dflash_lab.errors import InputError
from dflash_lab.memory.account import Account, predict_extraction
from dflash_lab.memory.advice import Advice, advise
from dflash_lab.memory.crash import explain_crash, on_failure, requested_bytes
from dflash_lab.memory.planner import MARGIN, extraction_budget, length_buckets, padded, usable
from dflash_lab.memory.shapes import CHUNK, GIB, ExtractionSetup, TargetShape, TrainingSetup, target_shape


class DoesNotFit(InputError):
    """A run that is predicted not to fit: `details` are plain numbers, `advice` is a sentence."""

    def __init__(self, message: str, advice: Advice) -> None:
        super().__init__(message)
        self.advice = suggestion(advice)
        self.details: dict[str, Any] = {
            "predicted_peak_gib": round(advice.account.peak_gib, 3),
            "budget_gib": round(advice.budget_gib, 3),
            "largest": advice.largest,
            **{term: round(size / GIB, 3) for term, size in advice.account.largest(6)},
        }


@dataclass(frozen=True)
class Clearance:
    """A run that may start: the account of its worst batch or step, the memory it had, budgets for its
    batches (of training, 0). `forced`: it was predicted not to fit and starts all the same.
    """

    account: Account
    budget_gib: float
    forced: bool
    token_budget: int = 0
    max_batch: int = 0
    advice: Advice | None = None  # on that batch or step under that memory


@dataclass(frozen=True)
class NotPredicted:
    """A run that starts without an answer, and why, in words for its result."""

    reason: str


def clear_extraction(
    target: Any,
    setup: ExtractionSetup,
    budget_gib: float,
    *,
    token_budget: int = 0,
    max_batch: int = 512,
    cuda: bool = True,
    force: bool = False,
    margin: float = MARGIN,
) -> Clearance:
    """Clear an extraction of samples of up to `setup.length` tokens; `token_budget` 0 takes the planner's.

    Raises `DoesNotFit` when the worst batch under the budgets is predicted not to fit `budget_gib` and
    `force` is false; `InputError` when not even one sample fits.
    """
    shape = target_shape(target)
    if not token_budget:
        planned = extraction_budget(shape, setup, budget_gib, max_batch=max_batch, cuda=cuda, margin=margin)
        token_budget = planned.token_budget
        # Where one sample of the longest is all that fits, shorter ones may not fill its tokens.
        short = [rows for edge, rows in planned.batches.items() if rows * padded(shape, edge) < token_budget]
        max_batch = min(max_batch, planned.batches[min(planned.batches)], *short)
    worst = worst_batch(shape, setup, token_budget, max_batch, cuda=cuda)
    advice = advise(shape, worst, budget_gib, margin=margin, cuda=cuda)
    what = f"batch of {worst.batch} x {worst.length:,} tokens"
    forced = _forced(advice, what, margin, force, " Or lower token_budget or max_batch;")
    return Clearance(advice.account, budget_gib, forced, token_budget, max_batch, advice)


def clear_training(
    target: Any,
    drafter: Any,
    setup: TrainingSetup,
    budget_gib: float,
    *,
    cuda: bool = True,
    force: bool = False,
    margin: float = MARGIN,
) -> Clearance:
    """Clear a training run by its step. Raises `DoesNotFit` as above."""
    advice = advise(target, setup, budget_gib, drafter=drafter, margin=margin, cuda=cuda)
    forced = _forced(advice, f"step of {setup.anchors} anchors x {setup.block_size}", margin, force)
    return Clearance(advice.account, budget_gib, forced, advice=advice)


def _forced(advice: Advice, what: str, margin: float, force: bool, instead: str = "") -> bool:
    """Return whether only `force` starts it; `DoesNotFit` where it does not fit and is not forced."""
    if not advice.fits and not force:
        raise DoesNotFit(
            f"A {what} is predicted to need {advice.account.peak_gib:.2f} GiB, the budget is "
            f"{_budget(advice.budget_gib, margin)}. {suggestion(advice)}{instead} ignore_memory starts it "
            "all the same.",
            advice,
        )
    return not advice.fits


def _budget(budget_gib: float, margin: float) -> str:
    return f"{budget_gib:.2f} GiB ({100 * margin:.0f}% kept free)"


def worst_batch(
    shape: TargetShape, setup: ExtractionSetup, token_budget: int, max_batch: int, *, cuda: bool = True
) -> ExtractionSetup:
    """Return the batch of the largest predicted peak that budgets allow, for samples of up to `setup.length`.

    Rows are counted as the batch planner does, in whole chunks of 64 where the target has linear layers.
    Tried are both ends of each length bucket, the longest samples of which `max_batch` rows are allowed,
    and those that open a new chunk of 64 just behind.
    """
    edges = length_buckets(setup.length)
    full = token_budget // max_batch
    lengths = {1, full, full + 1, CHUNK * -(-full // CHUNK) + 1, *edges, *(edge + 1 for edge in edges)}
    batches = [
        replace(setup, length=length, batch=max(1, min(max_batch, token_budget // padded(shape, length))))
        for length in lengths
        if 1 <= length <= setup.length
    ]
    return max(batches, key=lambda batch: predict_extraction(shape, batch, cuda=cuda).peak)


def suggestion(advice: Advice) -> str:
    """Say in a sentence what would have fitted."""
    if advice.plan:
        return f"It fits with: {'; then '.join(advice.plan)} ({advice.after.peak_gib:.2f} GiB)."
    if advice.fits:
        return "It fits as it is."
    term, size = advice.account.largest(1)[0]
    return f"Nothing listed makes it fit; the largest part is {term}, {size / GIB:.2f} GiB."


# Processes that share GPUs. Each could ask for itself, but would find free what its neighbour is about to
# take.


@dataclass(frozen=True)
class GpuProcess:
    """What a process is predicted to hold on a device. `advise` gives advice on it for a budget in GiB, where
    something can be changed; `extra` are bytes beside its account (libraries that talk to other devices).
    """

    name: str
    device: str
    account: Account
    advise: Callable[[float], Advice] | None = None
    extra: int = 0

    @property
    def peak(self) -> int:
        return self.account.peak + self.extra


def clear_devices(
    processes: Sequence[GpuProcess],
    budgets_gib: Mapping[str, float],
    *,
    force: bool = False,
    margin: float = MARGIN,
) -> list[str]:
    """Return the devices that are predicted to hold too much, of which `force` says to start all the same.

    `budgets_gib` are by device. Raises `DoesNotFit` for the first of them without `force`.
    """
    over = []
    for device in dict.fromkeys(process.device for process in processes):
        here = [process for process in processes if process.device == device]
        peak, budget_gib = sum(process.peak for process in here), budgets_gib[device]
        if peak <= usable(budget_gib, margin):
            continue
        over.append(device)
        if not force:
            raise _refusal(device, here, peak, budget_gib, margin)
    return over


def _refusal(
    device: str, here: Sequence[GpuProcess], peak: int, budget_gib: float, margin: float
) -> DoesNotFit:
    """Advice is on the process that can be changed, for the memory that the others leave it."""
    told = max(here, key=lambda process: (process.advise is not None, process.peak))
    left_gib = budget_gib - (peak - told.account.peak) / GIB / (1 - margin)
    if told.advise is not None and left_gib > 0:
        advice = told.advise(left_gib)
    else:
        account = told.account
        advice = Advice(account, budget_gib, False, 0, (), (), account, account.explain())
    holds = " + ".join(f"{process.name} {process.peak / GIB:.2f}" for process in here)
    error = DoesNotFit(
        f"{device} is predicted to hold {holds} = {peak / GIB:.2f} GiB, the budget is "
        f"{_budget(budget_gib, margin)}. {suggestion(advice)} Or place a process elsewhere; "
        "ignore_memory starts it all the same.",
        advice,
    )
    parts = {process.name: round(process.peak / GIB, 3) for process in here}
    whole = {"predicted_peak_gib": round(peak / GIB, 3), "budget_gib": round(budget_gib, 3)}
    error.details |= {"device": device, **whole, **parts}
    return error


# A lack of memory all the same, and how right the prediction was


@contextlib.contextmanager
def explained(
    clearance: Clearance | NotPredicted | None,
    dimensions: Mapping[str, int],
    *,
    device: Any = "cpu",
    snapshot: Path | None = None,
) -> Iterator[None]:
    """Give a lack of memory that passes through its explanation: `error.advice`, which `failure.json` shows.

    `dimensions` are names and sizes of the run, with which requests are read as tensors' shapes. Named are
    the changes that alone would have given what lacked. On CUDA, what was live when a request was last
    refused is written to `snapshot` (a few hundred kilobytes of JSON), also where the run went on from there.
    """
    import torch

    refused: deque[Mapping[str, Any]] = deque(maxlen=1)
    with contextlib.ExitStack() as watching:
        if snapshot is not None:
            snapshot.unlink(missing_ok=True)
        if torch.device(device).type == "cuda":
            watching.enter_context(on_failure(refused.append))
        try:
            yield
        except Exception as error:
            if requested_bytes(str(error)):
                _explain(error, clearance, dimensions, refused[0] if refused else None, snapshot)
            raise
        finally:
            if refused and snapshot is not None:
                files.write_json(snapshot, refused[0])


def _explain(
    error: Any,
    clearance: Clearance | NotPredicted | None,
    dimensions: Mapping[str, int],
    refused: Mapping[str, Any] | None,
    path: Path | None,
) -> None:
    """Put `advice` and `details` on `error`, unless it carries some already."""
    crash = explain_crash(error, refused, dimensions=dimensions)
    if not getattr(error, "advice", None):
        free = crash.parts.get("free", refused["refused"]["free"] if refused else 0)
        lacked = max(1, crash.requested - free)
        changes = getattr(clearance, "advice", None)
        told = [crash.explain(), *([would_have_given(changes, lacked)] if changes else [])]
        error.advice = " ".join(told)
    if not getattr(error, "details", None) and refused is not None:
        held = {
            f"{holder.blocks} blocks{holder.made}": round(holder.size / GIB, 3)
            for holder in crash.holders[:8]
        }
        error.details = {"requested_gib": round(crash.requested / GIB, 3), "held_gib": held}
        error.details |= {"snapshot": str(path)} if path is not None else {}


def would_have_given(advice: Advice, lacked: int) -> str:
    """Name the three best changes that give `lacked` bytes each, in a sentence."""
    enough = [change for change in advice.changes if change.built_in and change.saves_gib * GIB >= lacked]
    if not enough:
        return f"No change listed gives the {lacked / GIB:.2f} GiB that lacked: take fewer rows or anchors."
    named = "; ".join(
        f"{change.name} ({change.saves_gib:.2f} GiB, time {change.time_pct:+.0f}%)" for change in enough[:3]
    )
    return f"{lacked / GIB:.2f} GiB lacked. Each of these alone would have given it: {named}."


def outcome(clearance: Clearance, device: Any) -> dict[str, float]:
    """Return predicted and measured peak in GiB and the error in percent, for a run's result.

    Compared is what this process's tensors held at most, on the device's clock: blocks that a copy under way
    still reads are among them. What lies outside torch is in neither number (no driver tells whose it is),
    nor are fragments; `reserved_peak_gib` is what the allocator took for both. Only CUDA knows a peak: on a
    CPU there is the prediction alone.
    """
    import torch

    outside = clearance.account.terms.get("outside torch", 0)
    predicted = (clearance.account.live - outside) / GIB
    figures = {"predicted_peak_gib": round(predicted, 4)}
    device = torch.device(device)
    if device.type != "cuda":
        return figures
    stats = torch.cuda.memory_stats(device)
    measured, reserved = (stats[f"{name}_bytes.all.peak"] / GIB for name in ("active", "reserved"))
    return {
        **figures,
        "measured_peak_gib": round(measured, 4),
        "reserved_peak_gib": round(reserved, 4),
        "memory_error_pct": round(100 * (predicted / measured - 1), 2) if measured else 0.0,
    }
