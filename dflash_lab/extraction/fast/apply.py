"""Put the fused forward under the layers of a loaded target, after proving each one equal to the plain
forward.

Proof: one plain forward of random tokens; at every layer the fused forward gets the same input, and what it
ADDS to the residual stream is compared (the stream itself would hide an error). A layer that is not
understood or not equal keeps its plain forward, and the report names it and says why.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash_lab.errors import InputError
from dflash_lab.extraction.fast.layers import FusedLayer, NotUnderstood
from dflash_lab.extraction.fast.ops import Ops, ops_for
from dflash_lab.models.layer_proof import TOLERANCE, layer_errors
from dflash_lab.models.load import Target
from dflash_lab.models.spans import FULL, LINEAR, Span

log = logging.getLogger(__name__)
_PROBE = (2, 70)  # sequences x tokens: two chunks of 64, the second one short


@dataclass
class FastPath:
    """What `speed_up` did. `errors`: rel-L2 of what each fused layer adds; `plain`: layer -> why it was left
    alone.
    """

    ops: str = "none"
    errors: dict[int, float] = field(default_factory=dict)
    plain: dict[int, str] = field(default_factory=dict)
    _fused: dict[int, FusedLayer] = field(default_factory=dict, repr=False)
    _layers: Any = field(default=None, repr=False)

    def summary(self) -> dict[str, Any]:
        """Return plain JSON values for a manifest."""
        reasons = sorted(set(self.plain.values()))
        worst = max(self.errors.values(), default=0.0)
        return {
            "ops": self.ops,
            "fused_layers": len(self.errors),
            "plain_because": reasons,
            "worst_error": worst,
        }

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Run with the plain forward for a while, to compare."""
        for index in self._fused:
            del self._layers[index].forward
        try:
            yield
        finally:
            for index, fused in self._fused.items():
                self._layers[index].forward = fused


def speed_up(target: Target, mode: str = "auto", ops: Ops | None = None) -> FastPath:
    """Fuse the layers of `target` in place. mode: auto (whatever can be), on (`InputError` if a layer
    cannot), off.

    ops: the operations to use, by default those of the target's device.
    """
    path = FastPath(_layers=target.layers)
    ops = ops or ops_for(target.device)
    if mode == "off" or ops is None:
        if mode == "on":
            raise InputError(
                f"fast=on: no fused kernels for {target.device}: they need CUDA and Triton. Use fast=auto."
            )
        return path
    path.ops = ops.name
    fused: dict[int, FusedLayer] = {}
    for index, (layer, span) in enumerate(zip(target.layers, target.spans, strict=True)):
        try:
            if span not in (Span(FULL), Span(LINEAR)):
                raise NotUnderstood(str(span))
            fused[index] = FusedLayer(layer, ops)
        except (NotUnderstood, AttributeError) as error:
            path.plain[index] = str(error)
        else:
            fused[index].prepare()
    tuned = next((layer for layer in fused.values() if layer.tunes), None)
    if tuned is not None and target.device.type == "cuda":
        tuned.tune(target.device)
    path.errors = _prove(target, fused)
    limit = TOLERANCE.get(target.dtype, 1e-4)
    for index, found in list(path.errors.items()):
        if found > limit:
            path.plain[index] = f"the fused layer differs by rel-L2 {found:.2g} (at most {limit:g})"
            del path.errors[index], fused[index]
    if path.plain and mode == "on":
        listed = "; ".join(f"layer {index}: {why}" for index, why in list(path.plain.items())[:5])
        raise InputError(
            f"fast=on: {len(path.plain)} of {len(target.layers)} layers stay plain. {listed}. Use fast=auto."
        )
    for index, forward in fused.items():
        target.layers[index].forward = forward
    path._fused = fused
    log.info("fast path: %s", path.summary())
    return path


def skip_tuning() -> Callable[[], None]:
    """Let flash-linear-attention's kernels take their first tile shape instead of trying all, a minute a
    process: for tests and measurements of memory, where their rate is no matter. What is returned undoes it.
    """
    tuned: list[tuple[Any, Any]] = []

    def undo() -> None:
        for kernel, configs in reversed(tuned):
            kernel.configs = configs

    if importlib.util.find_spec("fla") is None or not torch.cuda.is_available():
        return undo
    importlib.import_module("fla.ops.gated_delta_rule")
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import KernelInterface

    modules = [module for name, module in sys.modules.items() if name.startswith("fla.")]
    for kernel in [value for module in modules for value in vars(module).values()]:
        while isinstance(kernel, KernelInterface):
            if isinstance(kernel, Autotuner):
                tuned.append((kernel, kernel.configs))
                kernel.configs = kernel.configs[:1]
            kernel = getattr(kernel, "fn", None)
    return undo


@torch.inference_mode()
def _prove(target: Target, fused: dict[int, FusedLayer]) -> dict[int, float]:
    """Return for each fused layer the rel-L2 error of what it adds to the stream, rounding of the stream
    discounted.
    """
    rounding = torch.finfo(target.dtype).eps

    def measure(before: Tensor, plain: Tensor, other: Tensor) -> float:
        error = (other.double() - plain.double()).norm() - rounding * plain.double().norm()
        added = (plain.double() - before.double()).norm().clamp_min(1e-30)
        return max(0.0, float(error / added)) if bool(other.isfinite().all()) else float("inf")

    def covered(layer: FusedLayer) -> Callable[..., Tensor | None]:
        # a model that passes a mask or a cache: nothing would be fused
        return lambda *args, **kwargs: layer(*args, **kwargs) if layer.covers(args[1:], kwargs) else None

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, _PROBE, generator=generator).to(target.device)
    return layer_errors(
        target.layers,
        {index: covered(layer) for index, layer in fused.items()},
        lambda: target.body(input_ids=ids, use_cache=False),
        measure,
    )
