"""Does this target, on this machine, give a batch the states that we believe it gives?

Before a week of GPU time, prefixes of real samples run batched and alone (`self_test`). Checked: the row
count, batched against alone (wrong padding, mask or kernels), each tap against the layer it names (an
off-by-one costs acceptance, never an error), health of every row. Some faults show only at the size of a real
batch, or only after hours: so samples of real batches are compared with the same samples alone too
(`SpotChecks`).

What a difference may be follows from the sample alone: where it is more than `TOLERANCE`, the sample runs
alone again with noise of the size of rounding on the output of every layer. A routing choice near a tie
turns over in some of these runs as it does in a batch; wrong padding is far above them all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dflash_lab.errors import LabError
from dflash_lab.extraction.capture import Capture, pad
from dflash_lab.extraction.health import FINDINGS, check_rows
from dflash_lab.models.load import Target

AROUND_A_CHUNK = (1, 17, 63, 64, 65)  # around the 64-token chunk of the gated delta rule
SHORT = (1, 17, 40)  # a dense target on a CPU has no chunks, and every token costs milliseconds
CANDIDATES = 12  # samples the self-test may try: twice the most prefixes
# Of the first layer's output; rounding errors add up over layers like a random walk, so layer k may have
# sqrt(k + 1) times that. Measured in bf16 on 62 random layers: 0.017 at layer 1, 0.1 at layer 61. Padding on
# the wrong side gives 0.1 to 1.2 at every layer.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.03, torch.float16: 0.01}
NOISE = 0.1  # of TOLERANCE: of a layer's output, what rounding alone moves
NOISY_RUNS = 8  # a tie that rounding decides falls either way in half of them
SPREAD = 4.0  # times the furthest of the noisy runs, a difference is no rounding
MOST = 0.5  # nor is one of more than this: states of another sample are 1.3 and more apart
# Of the tokens forwarded so far, what comparisons may have cost when a later batch is chosen for one. A
# sample alone ran at 29 % of a batch's rate (27B shape, 335 tokens), so in time this is below 0.5 % as well.
SHARE = 0.001


class SelfTestError(LabError, RuntimeError):
    """The target's batched states are not its states: nothing that shows it is stored."""


@dataclass(frozen=True)
class SelfTest:
    """The record of a self-test; errors are the worst rel-L2 by stored state, `tolerance` what each may be.
    `unsound`: samples passed over because a row of theirs is not a state, alone as well as batched.
    """

    lengths: list[int]
    batched_error: list[float]
    layer_error: list[float]
    tolerance: list[float]
    problems: list[str]
    unsound: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Compared:
    """A sample in a batch against the same alone: rel-L2 by stored state, what each may be, the finding
    (index into FINDINGS) that both have, and in words what is wrong.
    """

    error: list[float]
    limit: list[float]
    finding: list[int]
    problems: list[str]


class Comparison:
    """Runs samples alone and holds a batch's states against theirs. The target must be inside `capture`."""

    def __init__(self, target: Target, capture: Capture, layers: list[int]) -> None:
        self._target, self._capture, self._layers = target, capture, layers
        self._first = TOLERANCE.get(target.dtype, 2e-5)
        self.tolerance = [self._first * (layer + 1) ** 0.5 for layer in layers]

    def of(self, ids: np.ndarray, batched: list[Tensor]) -> Compared:
        """Compare `batched`, the stored states [L, H] of the sample `ids` [L] in a batch."""
        alone = [state[0] for state in self._capture.states(pad([ids], self._target.device))]
        pairs = [(_finding(one), _finding(many)) for one, many in zip(alone, batched, strict=True)]
        # Unsound in both is the sample's own; in one alone, the states differ without measure.
        error = [
            0.0 if one and many else rel_l2(mine, own)
            for (one, many), mine, own in zip(pairs, batched, alone, strict=True)
        ]
        limit = self.limits(ids, alone, error)
        problems = [
            f"layer {layer}: batched states differ from single ones by rel-L2 {found:.3g} (at most "
            f"{most:.2g})"
            for layer, found, most in zip(self._layers, error, limit, strict=True)
            if found > most
        ]
        for layer, (one, many) in zip(self._layers, pairs, strict=True):
            if bool(one) != bool(many):
                where = "batched, not alone" if many else "alone, not batched"
                problems.append(f"layer {layer}: {FINDINGS[one or many]} row {where}")
        return Compared(error, limit, [min(pair) for pair in pairs], problems)

    def limits(self, ids: np.ndarray, alone: list[Tensor], error: list[float]) -> list[float]:
        """What differences from `alone`, the states of `ids`, may be where `error` is what they are."""
        if all(found <= most for found, most in zip(error, self.tolerance, strict=True)):
            return self.tolerance
        moved = [0.0] * len(alone)
        for seed in range(NOISY_RUNS):
            with _noise(self._target.layers, NOISE * self._first, seed):
                noisy = self._capture.states(pad([ids], self._target.device))
            apart = [rel_l2(state[0], own) for state, own in zip(noisy, alone, strict=True)]
            moved = [max(pair) for pair in zip(moved, apart, strict=True)]
        return [max(most, min(SPREAD * far, MOST)) for most, far in zip(self.tolerance, moved, strict=True)]


@contextlib.contextmanager
def _noise(layers: nn.ModuleList, size: float, seed: int) -> Iterator[None]:
    """Multiply what every layer puts out by 1 + `size` * N(0, 1), element by element."""

    def disturb(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        state = output[0] if isinstance(output, tuple) else output
        generator = generators.setdefault(state.device, torch.Generator(state.device).manual_seed(seed))
        noise = torch.randn(state.shape, generator=generator, device=state.device, dtype=torch.float32)
        moved = (state.float() * (1 + size * noise)).to(state.dtype)
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    generators: dict[torch.device, torch.Generator] = {}
    handles = [layer.register_forward_hook(disturb, prepend=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _finding(state: Tensor) -> int:
    """The worst finding among the rows [L, H] of one sample."""
    owner = torch.zeros(len(state), dtype=torch.int64, device=state.device)
    return int(check_rows(state, owner, 1))


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
    """Test with prefixes of up to six of `samples`; `layers` are the layer ids of the stored states in order.

    A sample that is unsound alone as well as batched is passed over for the next one: the run quarantines it.
    Raises `SelfTestError` that says which state fails and by how much, also where most samples are unsound.
    """
    compare, lengths, unsound = Comparison(target, capture, layers), prefix_lengths(target), 0
    chosen, waiting = samples[: len(lengths)], samples[len(lengths) :]
    while True:
        prefixes = [row[:length] for row, length in zip(chosen, lengths)]
        batch = pad(prefixes, target.device)
        together = capture.states(batch)
        if len(together) != len(layers) or any(s.shape[:2] != batch.input_ids.shape for s in together):
            shapes = [tuple(state.shape) for state in together]
            _refuse(target, [f"{len(together)} states of {shapes} for layers {layers}"])
        found = [
            compare.of(row, [state[number, : len(row)] for state in together])
            for number, row in enumerate(prefixes)
        ]
        bad = [number for number, one in enumerate(found) if any(one.finding)]
        unsound += len(bad)
        if not bad or not waiting:
            break
        for number, row in zip(bad, waiting):
            chosen[number] = row
        waiting = waiting[len(bad) :]
    problems = list(dict.fromkeys(text for one in found for text in one.problems))
    sound = [number for number in range(len(prefixes)) if number not in bad]
    layered, limit = [0.0] * len(layers), compare.tolerance
    if sound:
        longest = prefixes[sound[-1]]
        tapped, layered = _against_layers(target, capture, longest, layers)
        limit = [max(pair) for pair in zip(*(found[number].limit for number in sound))]
        own = compare.limits(longest, [state[0] for state in tapped], layered)
        problems += [
            f"layer {layer}: the tap is not the output of that layer (rel-L2 {error:.3g})"
            for layer, error, most in zip(layers, layered, own, strict=True)
            if error > most
        ]
    if unsound > len(sound):
        worst = [max(found[number].finding[index] for number in bad) for index in range(len(layers))]
        tried = unsound + len(sound)
        problems += [
            f"layer {layer}: {FINDINGS[finding]} row, alone as well as batched; {unsound} of {tried} samples "
            "have such rows"
            for layer, finding in zip(layers, worst, strict=True)
            if finding
        ]
    if problems:
        _refuse(target, problems)
    batched = [max(one.error[index] for one in found) for index in range(len(layers))]
    return SelfTest([len(row) for row in prefixes], batched, layered, limit, [], unsound)


def _refuse(target: Target, problems: list[str]) -> None:
    raise SelfTestError(
        f"{target.name}: the self-test before extraction failed and nothing was stored.\n  "
        + "\n  ".join(problems)
        + "\nA fault of kernels shows as a difference that goes away with fast=off; compare also "
        "with dtype=float32."
    )


@torch.inference_mode()
def _against_layers(
    target: Target, capture: Capture, ids: np.ndarray, layers: list[int]
) -> tuple[list[Tensor], list[float]]:
    """The taps of one sample, [1, L, H] each, and how far they are from what the library itself calls
    hidden_states[layer + 1].
    """
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
    return tapped, [rel_l2(state, listed[layer + 1]) for state, layer in zip(tapped, layers)]


class SpotChecks:
    """Which real batches are compared, and which of their samples.

    A batch of more samples or of more padded tokens than any compared before: its first and its last
    sample. Any other batch of two or more: one sample, drawn, if all comparisons so far and this one cost at
    most `SHARE` of the padded tokens that the run has forwarded.
    """

    def __init__(self) -> None:
        self._forwarded = self._spent = 0  # tokens: of batches, of samples alone
        self._rows = self._tokens = 1  # of the largest batches compared
        self._draw = np.random.default_rng(0)

    def choose(self, lengths: np.ndarray) -> list[int]:
        """Positions to compare in a batch of samples of these `lengths`, which is about to run."""
        rows, longest = len(lengths), int(lengths.max())
        if rows < 2:
            return []
        if rows > self._rows or rows * longest > self._tokens:
            return [0, rows - 1]
        if self._spent + longest > SHARE * self._forwarded:  # whichever is drawn
            return []
        return [int(self._draw.integers(rows))]

    def ran(self, lengths: np.ndarray, chosen: list[int]) -> None:
        """Take note of a batch that ran, and that its samples `chosen` passed."""
        tokens = len(lengths) * int(lengths.max())
        self._forwarded += tokens
        self._spent += int(lengths[chosen].sum())
        if chosen:
            self._rows, self._tokens = max(self._rows, len(lengths)), max(self._tokens, tokens)
