"""Measure what a batch takes: on CUDA from the allocator and the driver, on a CPU by counting live tensors.

A lack of memory is a result: the message's request is kept, and the sweep goes on.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_lab.drafter.attention import row_layout
from dflash_lab.drafter.loss_terms import LossConfig
from dflash_lab.drafter.model import Drafter, RMSNorm
from dflash_lab.drafter.objective import Objective, TrainSettings
from dflash_lab.drafter.optim import Optimizer, OptimizerConfig
from dflash_lab.drafter.rows import Row
from dflash_lab.errors import InputError
from dflash_lab.extraction.oom import classify
from dflash_lab.machine import release
from dflash_lab.memory.crash import requested_bytes
from dflash_lab.memory.shapes import GIB, ExtractionSetup, TargetShape, TrainingSetup, target_shape
from dflash_lab.memory.training import with_chunk
from dflash_lab.models.compiled import compiling
from dflash_lab.models.hooks import Taps
from dflash_lab.models.load import TargetHead


@dataclass(frozen=True)
class Measurement:
    """Bytes of one point. `failed` is the request that was refused; then the peaks are those before it."""

    allocated: int
    reserved: int
    static: int  # live before the batch
    outside: int  # of the device, not this torch's: context, libraries, other processes
    failed: int
    out_of_memory: bool
    seconds: float

    @property
    def fragmentation(self) -> int:
        """Reserved but in no live block at the moment of the reserved peak, as far as the allocator tells."""
        return max(0, self.reserved - self.allocated)

    @property
    def moving(self) -> int:
        """Bytes that the batch brought, tensors only."""
        return self.allocated - self.static


def measure_cuda(run: Callable[[], Any], device: torch.device) -> Measurement:
    """Run `run` twice from a clean state and return the second run's peaks.

    A lack of memory, in whatever form the libraries report it, is returned; any other error is raised.
    """
    clean(device)
    if message := attempt(run):  # the first run pays for compilation and autotuning
        return _failed(device, torch.cuda.memory_allocated(device), message)
    clean(device)
    static = torch.cuda.memory_allocated(device)  # with the libraries' workspaces, which stay
    torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    if message := attempt(run):
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
    if target.device.type != "cuda":
        return _row(count_forward(target, setup, seed=seed))
    found = measure_cuda(lambda: forward_once(target, setup, seed), target.device)
    return {**_row(found), **_device_part(found)}


def _row(found: Measurement, given: int = 0) -> dict[str, Any]:
    """A table's row of a measurement; `given` are bytes of the batch that lay there before."""
    return {
        "measured_gib": found.allocated / GIB,
        "measured_moving": found.moving + given,
        "reserved_gib": None,
        "out_of_memory": False,
        "seconds": found.seconds,
    }


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
    return {**_row(found, given), **_device_part(found)}


def _training_step(
    shape: TargetShape, drafter: Any, setup: TrainingSetup, device: torch.device
) -> TrainingStep:
    model, head, row = training_parts(shape, drafter, setup, device)
    if setup.compiled:
        torch.compiler.reset()  # shapes of other points count against the compiler's limit
        model.compile_layers()
    return TrainingStep(model, head, row, setup)


def training_parts(
    shape: TargetShape, drafter: Any, setup: TrainingSetup, device: torch.device
) -> tuple[Any, Any, Any]:
    """Build the drafter, a head and one packed row of `setup` on `device`; frozen values are zeros."""
    config = dataclasses.replace(drafter, block_size=setup.block_size)
    dtype = getattr(torch, setup.dtype)
    with device:
        model = Drafter(config).to(dtype)
        embedding = torch.zeros(shape.vocab, shape.hidden, dtype=dtype)
        weight = embedding if shape.tied else torch.zeros(shape.vocab, shape.hidden, dtype=dtype)
        norm = RMSNorm(shape.hidden, 1e-6).to(dtype).requires_grad_(False)
    model.gradient_checkpointing = setup.checkpointing == "layers"
    head = TargetHead(embedding_weight=embedding, norm=norm, weight=weight)
    return model.train(), head, _packed_row(config, setup, device)


def _packed_row(config: Any, setup: TrainingSetup, device: torch.device) -> Any:
    """Return a row of `setup.context` tokens with `setup.anchors` blocks, of which every draft counts."""
    context, anchors, block = setup.context, setup.anchors, setup.block_size
    if anchors > context - 1:
        raise InputError(f"{anchors} anchors need at least {anchors + 1} context tokens, not {context}.")
    places = torch.linspace(1, context - 1, anchors).round().long()
    dtype = getattr(torch, setup.dtype)
    slots = torch.arange(block)
    mask = (slots > 0).expand(anchors, block)
    row = Row(
        input_ids=torch.zeros(context, dtype=torch.long),
        taps=torch.zeros(context, len(config.tap_ids) * config.hidden_size, dtype=dtype, device=device),
        final=torch.zeros(context, config.hidden_size, dtype=dtype, device=device)
        if setup.soft_targets
        else None,
        layout=row_layout([places.tolist()], [context], block),
        block_ids=torch.zeros(anchors, block, dtype=torch.long),
        labels=torch.zeros(anchors, block, dtype=torch.long),
        slot_mask=mask,
        target_rows=(places[:, None] + slots - 1).clamp(0, context - 1),
        hashes=("",),
        tokens=context,
        blocks=anchors,
    )
    return row.to(device)


class TrainingStep:
    """One optimizer step as the training loop makes it."""

    def __init__(self, model: Any, head: Any, row: Any, setup: TrainingSetup) -> None:
        self.model, self.row = model, row
        soft = 0.15 if setup.soft_targets else 0.0
        settings = TrainSettings(
            max_steps=1,
            context_tokens=setup.context,
            anchors=setup.anchors,
            loss=LossConfig(hard_weight=1.0 - soft, soft_weight=soft),
            attention="dense" if model.fc.weight.device.type == "cpu" else "flex",
        )
        self.objective = Objective(head, model.config, settings)
        self.objective.fused.chunk_rows = max(setup.block_size, min(setup.chunk, setup.rows))
        moments = "int8" if setup.optimizer == "adamw8bit" else "fp32"
        kind, offload = "muon" if setup.optimizer == "muon" else "adamw", setup.optimizer == "cpu-offload"
        config = OptimizerConfig(kind=kind, moments=moments, offload=offload)
        self.optimizer = Optimizer(model.named_parameters(), config)

    def run(self) -> None:
        """Run forward, loss, backward and update."""
        self.backward(self.loss())
        self.update()

    def loss(self) -> Any:
        """Run the forward and the loss."""
        return self.objective(self.model, self.model, self.row, self.row.taps, teacher=False)

    def backward(self, loss: Any) -> None:
        """Fill the gradients."""
        (loss.total / self.row.labels.numel()).backward()

    def update(self) -> None:
        """Step the optimizer, after the norm that the loop clips by."""
        torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        self.optimizer.step(1.0, 1.0)
        self.optimizer.zero_grad()


def forward_once(
    target: Any, setup: ExtractionSetup, seed: int = 0, *, ids: torch.Tensor | None = None
) -> None:
    """Run one extraction batch: the body with its taps, and the taps packed together.

    `ids` [batch, length] on the target's device; by default random ones, which are copied there first.
    """
    ids = _tokens(target, setup, seed) if ids is None else ids
    taps = Taps(target, list(setup.tap_ids))
    with torch.inference_mode(), taps:
        target.body(input_ids=ids, use_cache=setup.use_cache)
        states = taps.take()
        if setup.packed:
            torch.cat([state.flatten(0, 1) for state in states], dim=-1)


def _tokens(target: Any, setup: ExtractionSetup, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (setup.batch, setup.length)
    return torch.randint(0, target.vocab_size, shape, generator=generator).to(target.device)


def count_forward(target: Any, setup: ExtractionSetup, *, seed: int = 0) -> Measurement:
    """Run one extraction batch of random tokens on `target` for real and count its live tensors.

    On a CPU this is the whole truth but for scratch inside kernels. The target has to be loaded up to its
    last tap.
    """
    start = time.perf_counter()
    ids = _tokens(target, setup, seed)
    live = LiveTensors()
    with live:
        live.add(target.body.parameters())
        live.add(target.body.buffers())
        weights = live.current
        live.add([ids])
        live.start_peak_here()
        forward_once(target, setup, ids=ids)
    seconds = time.perf_counter() - start
    return Measurement(live.peak, 0, weights, 0, 0, False, seconds)


class LiveTensors(TorchDispatchMode):
    """Count the bytes of tensors made while the mode is on; `peak` is the highest sum seen, in bytes.

    A dispatch mode sees every tensor an operation returns; a weak reference on its storage says when the
    bytes are given back. Storages are counted once, whatever views exist. Not seen is memory inside a kernel
    (cuBLAS, cuDNN, Triton scratch) and the allocator's rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._visit(result)
        return result

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that existed before."""
        for tensor in tensors:
            self._see(tensor)

    def start_peak_here(self) -> None:
        """Forget the peak so far: the next one is looked for from now on."""
        self.peak = self.current

    def made(self, key: int, tensor: torch.Tensor, size: int) -> None:
        """Count a new storage of `size` bytes, first shown by `tensor`; `key` is its own while it lives."""
        self.current += size
        self.peak = max(self.peak, self.current)

    def gone(self, key: int, size: int) -> None:
        """Count a storage that was given back."""
        self.current -= size

    def _visit(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._see(value)
        elif isinstance(value, (tuple, list)):
            for item in value:
                self._visit(item)

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if size and key not in self._alive:
            self._alive[key] = weakref.ref(storage, partial(self._forget, key, size))
            self.made(key, tensor, size)

    def _forget(self, key: int, size: int, _reference: Any) -> None:
        del self._alive[key]
        self.gone(key, size)


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
    return message  # only now are the frames gone that the exception held, and their tensors with them


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
    )


def capped(device: torch.device | str, limit_gib: float) -> None:
    """Let this process use at most `limit_gib` of the device, as if it were a smaller card."""
    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index  # this call takes no bare "cuda"
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * GIB / total), index)
