"""The question a run asks before it starts: does it fit, and if not, what to change; and how right the
answer was.

A run that is predicted not to fit does not start unless it is forced. The prediction is of its worst batch
or step. Afterwards `outcome` puts the prediction beside what the device says.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_lab import files
from dflash_lab.errors import InputError
from dflash_lab.memory.account import Account
from dflash_lab.memory.advise import Advice, advise_extraction, advise_training
from dflash_lab.memory.calibrated import Basis, extraction_prediction
from dflash_lab.memory.crash import explain_crash, requested_bytes
from dflash_lab.memory.fit import CALIBRATED, Calibration
from dflash_lab.memory.planner import MARGIN, extraction_budget, length_buckets, padded, usable
from dflash_lab.memory.setups import ExtractionSetup, Kernels, TrainingSetup
from dflash_lab.memory.shapes import CHUNK, GIB, target_shape
from dflash_lab.memory.snapshot import on_failure

FORMULAS = Basis("formulas alone")


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
    """A run that may start: budgets for its batches, the account of its worst batch or step, the memory it
    had.

    `forced` when it was predicted not to fit and starts all the same. For training, `token_budget` and
    `max_batch` are 0.
    """

    account: Account
    budget_gib: float
    forced: bool
    token_budget: int = 0
    max_batch: int = 0
    advice: Advice | None = None  # on that batch or step under that memory
    basis: str = ""  # what the prediction rests on: formulas alone, or a calibration


@dataclass(frozen=True)
class NotPredicted:
    """A run that starts without an answer, and why, in words for its result."""

    reason: str


def clear_extraction(
    config: Any,
    budget_gib: float,
    *,
    tap_ids: Sequence[int],
    longest: int,
    dtype: str = "bfloat16",
    store_final: bool = False,
    kernels: Kernels = "fla",
    fused: bool = False,
    plain_layers: Sequence[int] = (),
    in_flight: int = 0,
    token_budget: int = 0,
    max_batch: int = 512,
    cuda: bool = True,
    force: bool = False,
    margin: float = MARGIN,
    basis: Basis = FORMULAS,
) -> Clearance:
    """Clear an extraction of samples of up to `longest` tokens; `token_budget` 0 takes the planner's.

    `basis` is what `find_calibration` found for these layers.

    Raises `DoesNotFit` when the worst batch under the budgets is predicted not to fit `budget_gib` and
    `force` is false; `InputError` when not even one sample fits.
    """
    shape = target_shape(config)
    setup = ExtractionSetup(
        batch=1,
        length=longest,
        tap_ids=tuple(tap_ids),
        dtype=dtype,
        store_final=store_final,
        kernels=kernels,
        fused=fused,
        plain_layers=tuple(plain_layers),
        in_flight=in_flight,
    )
    if not token_budget:
        planned = extraction_budget(
            shape,
            budget_gib,
            tap_ids=tap_ids,
            longest=longest,
            dtype=dtype,
            store_final=store_final,
            kernels=kernels,
            fused=fused,
            plain_layers=plain_layers,
            in_flight=in_flight,
            max_batch=max_batch,
            cuda=cuda,
            margin=margin,
            calibration=basis.calibration,
        )
        token_budget = planned.token_budget
        max_batch = min(max_batch, planned.batches[min(planned.batches)])
    how: dict[str, Any] = dict(cuda=cuda, calibration=basis.calibration)
    worst = worst_batch(config, setup, token_budget, max_batch, **how)
    account = extraction_prediction(shape, worst, **how)
    fits = account.peak <= usable(budget_gib, margin)
    budget = f"{budget_gib:.2f} GiB ({100 * margin:.0f}% kept free)"
    advice = advise_extraction(shape, worst, budget_gib, margin=margin, **how)
    if not fits and not force:
        raise DoesNotFit(
            f"A batch of {worst.batch} x {worst.length:,} tokens is predicted to need "
            f"{account.peak_gib:.2f} GiB, the budget is {budget}. {suggestion(advice)} Or lower "
            "token_budget or max_batch; ignore_memory starts it all the same.",
            advice,
        )
    return Clearance(account, budget_gib, not fits, token_budget, max_batch, advice, basis.words)


def worst_batch(
    config: Any,
    setup: ExtractionSetup,
    token_budget: int,
    max_batch: int,
    *,
    cuda: bool = True,
    calibration: Calibration | None = None,
) -> ExtractionSetup:
    """Return the batch of the largest predicted peak that budgets allow, for samples of up to `setup.length`.

    Rows are counted as the batch planner does, in whole chunks of 64 where the target has linear layers.
    Tried are both ends of each length bucket, the longest samples of which `max_batch` rows are allowed,
    and those that open a new chunk of 64 just behind.
    """
    shape = target_shape(config)
    edges = length_buckets(setup.length)
    full = token_budget // max_batch
    lengths = {1, full, full + 1, CHUNK * -(-full // CHUNK) + 1, *edges, *(edge + 1 for edge in edges)}
    batches = [
        replace(setup, length=length, batch=max(1, min(max_batch, token_budget // padded(shape, length))))
        for length in lengths
        if 1 <= length <= setup.length
    ]
    how: dict[str, Any] = dict(cuda=cuda, calibration=calibration)
    return max(batches, key=lambda batch: extraction_prediction(shape, batch, **how).peak)


def clear_training(
    target_config: Any,
    drafter_config: Any,
    budget_gib: float,
    *,
    anchors: int,
    context: int,
    cuda: bool = True,
    force: bool = False,
    margin: float = MARGIN,
    basis: Basis = FORMULAS,
    **options: Any,
) -> Clearance:
    """Clear a training run by its step; `options` are fields of `TrainingSetup`. Raises `DoesNotFit` as
    above.
    """
    shape = target_shape(target_config)
    setup = TrainingSetup(anchors=anchors, context=context, block_size=drafter_config.block_size, **options)
    advice = advise_training(
        shape, drafter_config, setup, budget_gib, margin=margin, cuda=cuda, calibration=basis.calibration
    )
    if not advice.fits and not force:
        raise DoesNotFit(
            f"A step of {anchors} anchors x {setup.block_size} is predicted to need "
            f"{advice.account.peak_gib:.2f} GiB, the budget is {budget_gib:.2f} GiB "
            f"({100 * margin:.0f}% kept free). {suggestion(advice)} ignore_memory starts it all the same.",
            advice,
        )
    return Clearance(advice.account, budget_gib, not advice.fits, advice=advice, basis=basis.words)


def suggestion(advice: Advice) -> str:
    """Say in a sentence what would have fitted."""
    if advice.plan:
        return f"It fits with: {'; then '.join(advice.plan)} ({advice.after.peak_gib:.2f} GiB)."
    if advice.fits:
        return "It fits as it is."
    term, size = advice.account.largest(1)[0]
    return f"Nothing listed makes it fit; the largest part is {term}, {size / GIB:.2f} GiB."


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
        basis = getattr(clearance, "basis", "")
        if basis.startswith(CALIBRATED):
            told.append(
                f"The run was cleared by a prediction {basis}: run memory_sweep again, or remove that file "
                "to plan by the formulas alone."
            )
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
