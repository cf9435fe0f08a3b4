"""Measure what a batch takes: on CUDA from the allocator and the driver, on a CPU by counting live tensors.

A point is measured in a fresh state (nothing cached, peaks reset) after one run of the same shape, which
pays for compilation and autotuning. A lack of memory is a result: the message's request is kept, the state
is cleaned after the `except` block (an exception holds its frames, and they their tensors), and the sweep
goes on. Sizes are measured rising and falling, since an allocator that grew step by step is fragmented
differently from one that started large.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dflash_lab.drafter.compiling import compiling
from dflash_lab.extraction.oom import classify
from dflash_lab.memory.account import Account
from dflash_lab.memory.crash import requested_bytes
from dflash_lab.memory.fake import layer_labels
from dflash_lab.memory.fake_training import TrainingStep, training_parts
from dflash_lab.memory.setups import ExtractionSetup, TrainingSetup
from dflash_lab.memory.shapes import GIB, TargetShape, target_shape
from dflash_lab.memory.tracker import LiveTensors, module_scopes
from dflash_lab.memory.training_account import with_chunk
from dflash_lab.release import release
from dflash_lab.target.taps import Taps


@dataclass(frozen=True)
class Measurement:
    """Bytes of one point. `outside` is memory of the device that this process's torch does not manage:
    context and libraries, and other processes if there are any.

    `fragmentation` is reserved but in no live block at the moment of the reserved peak, as far as the
    allocator tells: reserved peak - allocated peak. `failed` is the largest request that was refused; then
    the peaks are those before it.
    """

    allocated: int
    reserved: int
    static: int  # live before the batch
    outside: int
    failed: int
    out_of_memory: bool
    seconds: float
    message: str = ""

    @property
    def fragmentation(self) -> int:
        return max(0, self.reserved - self.allocated)

    @property
    def moving(self) -> int:
        """Bytes that the batch brought, tensors only."""
        return self.allocated - self.static

    def account(self, title: str) -> Account:
        """Return the measurement as an account of kind ``measured``."""
        terms = {"before the batch": self.static, "the batch": self.moving}
        terms |= {"fragmentation": self.fragmentation, "outside torch": self.outside}
        return Account("measured", title, terms)


def measure_cuda(
    run: Callable[[], Any], device: torch.device | str = "cuda", *, warm: bool = True
) -> Measurement:
    """Run `run` twice (once without `warm`) from a clean state and return the second run's peaks.

    A lack of memory, in whatever form the libraries report it, is returned; any other error is raised.
    """
    device = torch.device(device)
    clean(device)
    message = attempt(run) if warm else ""
    if message:
        return _failed(device, torch.cuda.memory_allocated(device), message)
    clean(device)
    static = torch.cuda.memory_allocated(device)  # with the libraries' workspaces, which stay
    torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    message = attempt(run)
    if message:
        return _failed(device, static, message)
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    return _read(device, static, seconds, message="")


def clean(device: torch.device) -> None:
    """Drop garbage and cached blocks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    release()


def measure_extraction(target: Any, setup: ExtractionSetup, *, seed: int = 0) -> dict[str, Any]:
    """Measure one extraction batch on the target's device, as fields of a table's row.

    `measured_gib` is the peak of live tensors, `measured_moving` the bytes of it that the batch brought. On
    CUDA also: `reserved_gib` is what the allocator took, `fragmentation_gib` what of it was in no live block,
    `outside_gib` the device's memory outside torch, `failed_gib` the largest request that was refused.
    """
    start = time.perf_counter()
    if target.device.type != "cuda":
        account, _ = count_forward(target, setup, seed=seed)
        seconds = time.perf_counter() - start
        return _row(account.peak, account.moving, seconds)
    found = measure_cuda(lambda: forward_once(target, setup, seed), target.device)
    return {**_row(found.allocated, found.moving, found.seconds), **_device_part(found)}


def _row(peak: int, moving: int, seconds: float) -> dict[str, Any]:
    measured = {"measured_gib": peak / GIB, "measured_moving": moving, "reserved_gib": None}
    return {**measured, "out_of_memory": False, "seconds": seconds}


def _device_part(found: Measurement) -> dict[str, Any]:
    return {
        "reserved_gib": found.reserved / GIB,
        "fragmentation_gib": found.fragmentation / GIB,
        "outside_gib": found.outside / GIB,
        "failed_gib": found.failed / GIB,
        "out_of_memory": found.out_of_memory,
    }


def measure_training(
    target: Any, drafter: Any, setup: TrainingSetup, device: torch.device | str
) -> dict[str, Any]:
    """Measure one training step on a CUDA device, as fields of a table's row (see `measure_extraction`).

    `target` is a `TargetShape` or a config: only embedding and head of that shape are made, without values.
    """
    shape = target if isinstance(target, TargetShape) else target_shape(target)
    setup, device = with_chunk(setup, shape.vocab), torch.device(device)
    built: list[TrainingStep] = []
    message = attempt(lambda: built.append(_training_step(shape, drafter, setup, device)))
    if message:  # weights, masters and moments alone are too much
        found, given = _failed(device, 0, message), 0
    else:
        step = built.pop()
        with compiling(
            "a training step", "Measure it with compile_steps=False; train_drafter falls back by itself."
        ):
            found = measure_cuda(step.run, device)
        given = sum(tensor.nbytes for tensor in (step.row.taps, step.row.final) if tensor is not None)
    return {**_row(found.allocated, found.moving + given, found.seconds), **_device_part(found)}


def _training_step(
    shape: TargetShape, drafter: Any, setup: TrainingSetup, device: torch.device
) -> TrainingStep:
    model, head, row = training_parts(shape, drafter, setup, device)
    if setup.compiled:
        torch.compiler.reset()  # shapes of other points count against the compiler's limit
        model.compile_layers()
    return TrainingStep(model, head, row, setup, None)


def forward_once(
    target: Any, setup: ExtractionSetup, seed: int = 0, *, ids: torch.Tensor | None = None
) -> None:
    """Run one extraction batch: the body with its taps, and the taps packed together.

    `ids` [batch, length] on the target's device; by default random ones, which are copied there first.
    """
    ids = _tokens(target, setup, seed) if ids is None else ids
    taps = Taps(target.layers, list(setup.tap_ids))
    with torch.inference_mode(), taps:
        target.body(input_ids=ids, use_cache=setup.use_cache)
        states = taps.take()
        if setup.packed:
            torch.cat([state.flatten(0, 1) for state in states], dim=-1)


def _tokens(target: Any, setup: ExtractionSetup, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (setup.batch, setup.length)
    return torch.randint(0, target.vocab_size, shape, generator=generator).to(target.device)


def count_forward(target: Any, setup: ExtractionSetup, *, seed: int = 0) -> tuple[Account, LiveTensors]:
    """Run one extraction batch of random tokens on `target` for real and count its live tensors (kind
    ``measured``).

    On a CPU this is the whole truth but for scratch inside kernels. The target has to be loaded up to its
    last tap.
    """
    ids = _tokens(target, setup, seed)
    tracker = LiveTensors()
    labels = layer_labels(target.body)
    taps = Taps(target.layers, list(setup.tap_ids))
    with torch.inference_mode(), taps, module_scopes(tracker, labels), tracker:
        tracker.add(target.body.parameters(), "target weights")
        tracker.add(target.body.buffers(), "target weights")
        tracker.add([ids], "token ids")
        tracker.start_peak_here()
        target.body(input_ids=ids, use_cache=setup.use_cache)
        states = taps.take()
        for state in states:
            tracker.relabel(state, "captured states")
        if setup.packed:
            with tracker.scope("packed states"):
                packed = torch.cat([state.flatten(0, 1) for state in states], dim=-1)
                del packed
    account = Account(
        kind="measured",
        title=f"extraction {setup.batch} x {setup.length}",
        terms=tracker.by_label(),
        notes=("Live tensors counted in a real run.",),
    )
    return account, tracker


def attempt(run: Callable[[], Any]) -> str:
    """Run; return the message of a lack of memory, or an empty string. Other errors are raised."""
    try:
        run()
    except Exception as error:
        failure = classify(error)
        if failure.kind != "memory":
            raise
        message = failure.message
    else:
        message = ""
    return message


def _failed(device: torch.device, static: int, message: str) -> Measurement:
    found = _read(device, static, 0.0, message)
    clean(device)
    return found


def _read(device: torch.device, static: int, seconds: float, message: str) -> Measurement:
    free, total = torch.cuda.mem_get_info(device)
    reserved_now = torch.cuda.memory_reserved(device)
    return Measurement(
        allocated=torch.cuda.max_memory_allocated(device),
        reserved=torch.cuda.max_memory_reserved(device),
        static=static,
        outside=max(0, total - free - reserved_now),
        failed=requested_bytes(message) if message else 0,
        out_of_memory=bool(message),
        seconds=seconds,
        message=message,
    )


def capped(device: torch.device | str, limit_gib: float) -> None:
    """Let this process use at most `limit_gib` of the device; the allocator then fails as a smaller card
    would.
    """
    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index  # this call takes no bare "cuda"
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * GIB / total), index)
