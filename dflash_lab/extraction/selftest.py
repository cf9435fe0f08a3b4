"""Before a week of GPU time: does this target, on this machine, give the states that we believe it gives?

A few prefixes of real samples run batched and alone. Checked: the row count, batched against alone (wrong
padding, mask or kernels), each tap against the layer it names (an off-by-one costs acceptance, never an
error), health of every row.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_lab.errors import LabError
from dflash_lab.extraction.capture import Capture, pad
from dflash_lab.extraction.health import FINDINGS, check_rows
from dflash_lab.target.model import Target

AROUND_A_CHUNK = (1, 17, 63, 64, 65)  # around the 64-token chunk of the gated delta rule
SHORT = (1, 17, 40)  # a dense target on a CPU has no chunks, and every token costs milliseconds
# Of the first layer's output; rounding errors add up over layers like a random walk, so layer k may have
# sqrt(k + 1) times that. Measured in bf16 on 62 random layers: 0.017 at layer 1, 0.1 at layer 61. Padding on
# the wrong side gives 0.1 to 1.2 at every layer.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.03, torch.float16: 0.01}


class SelfTestError(LabError, RuntimeError):
    """The target's batched states are not its states; nothing was extracted."""


@dataclass(frozen=True)
class SelfTest:
    """The record of a self-test; errors are the worst rel-L2 by stored state, `tolerance` what each
    may be.
    """

    lengths: list[int]
    batched_error: list[float]
    layer_error: list[float]
    tolerance: list[float]
    problems: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def prefix_lengths(target: Target) -> tuple[int, ...]:
    """The lengths that the self-test runs, at most six."""
    if target.device.type == "cuda":
        return (*AROUND_A_CHUNK, 512)
    return AROUND_A_CHUNK if target.is_hybrid else SHORT


def rel_l2(value: Tensor, reference: Tensor) -> float:
    """Return ||value - reference|| / ||reference|| in float64; NaN counts as infinitely wrong."""
    value, reference = value.double(), reference.double()
    error = ((value - reference).norm() / reference.norm().clamp_min(1e-30)).item()
    return error if np.isfinite(error) else float("inf")


def self_test(target: Target, capture: Capture, samples: list[np.ndarray], layers: list[int]) -> SelfTest:
    """Test with prefixes of up to six `samples`; `layers` are the layer ids of the stored states in order.

    Raises `SelfTestError` that says which state fails and by how much. The target must be inside `capture`.
    """
    prefixes = [row[:length] for row, length in zip(samples, prefix_lengths(target))]
    batch = pad(prefixes, target.device)
    together = capture.states(batch)
    problems: list[str] = []
    if len(together) != len(layers) or any(state.shape[:2] != batch.input_ids.shape for state in together):
        problems.append(
            f"{len(together)} states of {[tuple(state.shape) for state in together]} for layers {layers}"
        )
    batched, health = [0.0] * len(layers), [0] * len(layers)
    for number, row in enumerate(prefixes):
        alone = capture.states(pad([row], target.device))
        for index, (one, many) in enumerate(zip(alone, together)):
            batched[index] = max(batched[index], rel_l2(many[number, : len(row)], one[0]))
            owner = torch.zeros(len(row), dtype=torch.int64, device=one.device)
            health[index] = max(health[index], int(check_rows(one[0], owner, 1)))
    layered = _against_layers(target, capture, prefixes[-1], layers)
    tolerance = [TOLERANCE.get(target.dtype, 2e-5) * (layer + 1) ** 0.5 for layer in layers]
    for layer, error, other, finding, limit in zip(layers, batched, layered, health, tolerance):
        if error > limit:
            problems.append(
                f"layer {layer}: batched states differ from single ones by rel-L2 {error:.3g} (at "
                f"most {limit:.2g})"
            )
        if other > limit:
            problems.append(f"layer {layer}: the tap is not the output of that layer (rel-L2 {other:.3g})")
        if finding:
            problems.append(f"layer {layer}: {FINDINGS[finding]} row")
    result = SelfTest([len(row) for row in prefixes], batched, layered, tolerance, problems)
    if problems:
        raise SelfTestError(
            f"{target.name}: the self-test before extraction failed and nothing was stored.\n  "
            + "\n  ".join(problems)
            + "\nA fault of kernels shows as a difference that goes away with fast=off; compare also "
            "with dtype=float32."
        )
    return result


@torch.inference_mode()
def _against_layers(target: Target, capture: Capture, ids: np.ndarray, layers: list[int]) -> list[float]:
    """Compare the taps of one sample with what the library itself calls hidden_states[layer + 1]."""
    padded = pad([ids], target.device)
    tapped = capture.states(padded)
    listed = target.body(input_ids=padded.input_ids, use_cache=False, output_hidden_states=True).hidden_states
    capture.forget()
    if listed is None or len(listed) != target.num_layers + 1:
        found = "no" if listed is None else str(len(listed))
        raise SelfTestError(
            f"{target.name}: asked for all hidden states the model returned {found} states for "
            f"{target.num_layers} layers, "
            "so its layers cannot be told apart. This transformers version is not understood."
        )
    return [rel_l2(state, listed[layer + 1]) for state, layer in zip(tapped, layers)]
