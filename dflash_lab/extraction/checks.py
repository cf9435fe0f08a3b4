"""What is checked before, during and after an extraction: room on disk, the self-test, a store's bytes."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from transformers import PretrainedConfig

from dflash_lab import files
from dflash_lab.errors import FileError, InputError, LabError, StoreError, naming
from dflash_lab.extraction import store as manifests
from dflash_lab.extraction.store import Layout, as_keys, find_codec, open_part
from dflash_lab.extraction.writer import FINDINGS, Capture, check_rows, pad
from dflash_lab.models.hooks import check_tap_ids
from dflash_lab.models.load import Target, cut_config, find_parts, skeleton

# ----------------------------------------------------------------------------------------------------
# Before 54 GB are read: do the layers exist, do the states fit on the disk, how many hours will it take?
#
# Everything here comes from the config, the lengths and the file system; no weight is touched.


ROW_BYTES = 5.0  # token id and mask; offsets, hashes and marks add 25 bytes a sample
SAMPLE_BYTES = 25
MARGIN = 1.02  # headers, and what else writes to the disk meanwhile
ASSUMED_TFLOPS = {"cuda": 500.0, "cpu": 0.1}


@dataclass(frozen=True)
class Preflight:
    """What a run over all shards will take, on paper."""

    samples: int
    tokens: int
    token_bytes: int
    bytes_needed: int
    bytes_stored: int
    bytes_free: int
    body_parameters: int
    hours: float
    assumed_tflops: float

    def figures(self) -> dict[str, float | int]:
        """Return the flat numbers."""
        return {
            "preflight_store_gib": round(self.bytes_needed / 2**30, 4),
            "preflight_free_gib": round(self.bytes_free / 2**30, 2),
            "preflight_hours": round(self.hours, 4),
        }


def preflight(
    config: PretrainedConfig,
    lengths: np.ndarray,
    store: Path,
    *,
    tap_ids: list[int],
    store_final: bool,
    storage: str,
    device_type: str,
    tflops: float = 0.0,
    replaced: Path | None = None,
) -> Preflight:
    """Check a run against the target's config and the disk; `InputError` when it cannot work.

    lengths: tokens of every sample of every shard. replaced: the store whose place this one will take, which
    stays until it is whole. tflops: sustained TFLOP/s of one device, 0 for an assumed one. Work is 2 x
    parameters of the layers that run, a token.
    """
    layers = config.num_hidden_layers
    check_tap_ids(tap_ids, layers)
    layout = Layout(tuple(tap_ids), config.hidden_size, store_final, find_codec(storage))
    needed = int(lengths.sum()) * (layout.token_bytes + ROW_BYTES) + len(lengths) * SAMPLE_BYTES
    stored = sum(
        part.bytes for folder in manifests.shard_folders(store) for part in manifests.sealed_parts(folder, [])
    )
    free = shutil.disk_usage(_existing(store)).free
    missing = max(0.0, needed * MARGIN - stored)
    if missing > free:
        raise InputError(
            f"{store}: the states of {len(lengths):,} samples ({int(lengths.sum()):,} tokens x "
            f"{layout.token_bytes:,} bytes) "
            f"take {needed / 2**30:,.1f} GiB, {stored / 2**30:,.1f} GiB are stored and "
            f"{free / 2**30:,.1f} GiB are free. "
            "Give another store folder, fewer taps, storage=fp8 (half the bytes), or fewer samples."
            + _beside(replaced)
        )
    last = layers - 1 if store_final else max(tap_ids)
    parameters = body_parameters(config, last)
    rate = tflops or ASSUMED_TFLOPS.get(device_type, ASSUMED_TFLOPS["cpu"])
    hours = 2 * parameters * int(lengths.sum()) / (rate * 1e12) / 3600
    return Preflight(
        len(lengths),
        int(lengths.sum()),
        layout.token_bytes,
        int(needed),
        stored,
        free,
        parameters,
        hours,
        rate,
    )


def _beside(replaced: Path | None) -> str:
    if replaced is None:
        return ""
    size = sum(path.stat().st_size for path in replaced.rglob("*") if path.is_file())
    return (
        f" The earlier store, {replaced} ({size / 2**30:,.1f} GiB), stays until this one is whole, and both "
        "do not fit. If it is not needed any more, remove it first."
    )


def body_parameters(config: PretrainedConfig, last_layer: int) -> int:
    """Count the parameters of decoder layers 0..last_layer: what one token is multiplied with, embedding and
    head left out.

    For a mixture of experts every expert counts, so its hours are an upper bound.
    """
    body = skeleton(cut_config(config, last_layer), name="preflight", dtype=torch.bfloat16)
    layers = find_parts(body, cut_config(config, last_layer), "preflight").layers
    return sum(parameter.numel() for parameter in layers.parameters())


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


# ----------------------------------------------------------------------------------------------------
# Does this target, on this machine, give a batch the states that we believe it gives?
#
# Before a week of GPU time, prefixes of real samples run batched and alone (`self_test`). Checked: the row
# count, batched against alone (wrong padding, mask or kernels), each tap against the layer it names (an
# off-by-one costs acceptance, never an error), health of every row. Some faults show only at the size of a
# real batch, or only after hours: so samples of real batches are compared with the same samples alone too
# (`SpotChecks`).
#
# What a difference may be follows from the sample alone: where it is more than `TOLERANCE`, the sample runs
# alone again with noise of the size of rounding on the output of every layer. A routing choice near a tie
# turns over in some of these runs as it does in a batch; wrong padding is far above them all.


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


# ----------------------------------------------------------------------------------------------------
# Re-read a whole store and name everything that is not as its manifests say.
#
# `verify` only looks. `discard` gives damaged parts up, so that the next extraction redoes exactly their
# samples.


_ROWS = 1 << 14  # tokens looked at together


@dataclass(frozen=True)
class Fault:
    """One thing wrong: `file` relative to the store, `what` in words. `part` says that a sealed part is
    damaged.
    """

    file: str
    what: str
    part: bool = True


def verify(store: Path | str, on_progress: Callable[[str, int, int], None] | None = None) -> list[Fault]:
    """Read every byte of a store; return its faults, none for a sound store.

    Found and named: a missing, truncated, altered or unreadable part, a tensor of another shape or type than
    store.json says, offsets that do not add up, states that are not numbers, a sample stored twice, a part
    that no manifest names, a line of a manifest that is none.
    """
    store = Path(store)
    identity = manifests.read_identity(store)
    codec = find_codec(identity["storage"])
    layout = Layout(tuple(identity["tap_ids"]), identity["hidden"], identity["has_final"], codec)
    faults: list[Fault] = []
    seen: dict[bytes, str] = {}
    folders = [(folder, _parts(folder, faults)) for folder in manifests.shard_folders(store)]
    total, done = sum(part.bytes for _, parts in folders for part in parts), 0
    for folder, parts in folders:
        named = {part.file for part in parts}
        for stray in sorted(
            path.name for path in folder.glob("part-*.safetensors") if path.name not in named
        ):
            faults.append(
                Fault(
                    f"{folder.name}/{stray}",
                    "no manifest line names it (a crash before its line); ignored",
                    False,
                )
            )
        for part in parts:
            found = size_fault(folder, part) or checksum_fault(folder, part)
            what = found or _content_fault(folder / part.file, part, layout)
            what = what or _state_fault(folder / part.file, part, layout)
            if what:
                faults.append(Fault(part.name, what))
            else:
                with open_part(folder / part.file) as opened:
                    keys = as_keys(opened.get_tensor("hashes"))
                for key in keys:
                    if (other := seen.setdefault(key.tobytes(), part.name)) != part.name:
                        faults.append(
                            Fault(
                                part.name,
                                f"sample {key.tobytes().hex()} is also in {other}; read once",
                                False,
                            )
                        )
            done += part.bytes
            if on_progress:
                on_progress("verify", done, total)
    return faults


def _parts(folder: Path, faults: list[Fault]) -> list[manifests.Part]:
    """The sealed parts of a shard; lines of its manifest that are broken are added to `faults`."""
    broken: list[manifests.Broken] = []
    parts = manifests.sealed_parts(folder, broken)
    file = f"{folder.name}/{manifests.MANIFEST_FILE}"
    faults += [Fault(file, line.told(folder), part=False) for line in broken]
    return parts


def size_fault(folder: Path, part: manifests.Part) -> str | None:
    """What is wrong with a part by its presence and size alone, the check that every resume makes."""
    path = folder / part.file
    if not path.exists():
        return "the part is missing"
    if (size := path.stat().st_size) != part.bytes:
        return f"{size} bytes where the manifest says {part.bytes}: the part is truncated or altered"
    return None


def checksum_fault(folder: Path, part: manifests.Part) -> str | None:
    """What is wrong with a part by its bytes."""
    found = files.checksum(folder / part.file)
    return (
        None
        if found == part.checksum
        else f"checksum {found} where the manifest says {part.checksum}: bytes were altered"
    )


def discard(store: Path | str, faults: list[Fault]) -> int:
    """Give the damaged parts among `faults` up: a `discard` line, then the file goes. Return how
    many parts.
    """
    store, names = Path(store), sorted({fault.file for fault in faults if fault.part})
    for name in names:
        drop_part(files.inside(store, name), next(fault.what for fault in faults if fault.file == name))
    return len(names)


def drop_part(path: Path, why: str) -> None:
    """Record that a sealed part no longer counts and remove its file, in this order."""
    manifests.append(path.parent, "discard", file=path.name, why=why)
    path.unlink(missing_ok=True)


def _content_fault(path: Path, part: manifests.Part, layout: Layout) -> str | None:
    """A part whose bytes are as sealed but whose tensors do not fit the store: a defect of the writer."""
    try:
        with open_part(path) as opened:
            names = list(opened.keys())
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
            offsets = opened.get_tensor("offsets").numpy() if "offsets" in shapes else np.empty(0)
    except StoreError as error:
        return str(error)
    n, t = part.samples, part.tokens
    wanted: dict[str, tuple[int, ...]] = {region.name: (t, region.width) for region in layout.regions}
    wanted |= {"input_ids": (t,), "loss_mask": (t,), "offsets": (n + 1,), "hashes": (n, 16), "heldout": (n,)}
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            return f"tensor {name} has shape {shapes.get(name)}, {shape} expected"
    if offsets[0] != 0 or offsets[-1] != t or (np.diff(offsets) < 1).any():
        return "offsets do not rise from 0 to the token count"
    return None


def _state_fault(path: Path, part: manifests.Part, layout: Layout) -> str | None:
    """Samples whose states are not numbers, as versions stored them that looked before the cast."""
    bad: set[int] = set()
    with open_part(path) as opened:
        owner = np.repeat(np.arange(part.samples), np.diff(opened.get_tensor("offsets").numpy()))
        slices = {region.name: opened.get_slice(region.name) for region in layout.regions}
        for start in range(0, part.tokens, _ROWS):
            views = {name: rows[start : start + _ROWS] for name, rows in slices.items()}
            for index in range(layout.states):
                finite = layout.read_state(views, index).isfinite().all(dim=-1).numpy()
                bad.update(owner[start : start + _ROWS][~finite].tolist())
        hashes = opened.get_tensor("hashes").numpy()
    if not bad:
        return None
    named = ", ".join(hashes[number].tobytes().hex() for number in sorted(bad)[:8])
    more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
    return f"states of sample {named}{more} are not numbers"


def stored_keys(store: Path, *, check_bytes: bool = False) -> tuple[np.ndarray, list[Fault]]:
    """Sorted 16-byte keys of every sample a store soundly holds, and what does not count: parts, and broken
    lines of manifests.

    Trusts manifest and size; with `check_bytes` the checksum of every part too.
    """
    keys: list[np.ndarray] = []
    faults: list[Fault] = []
    for folder in manifests.shard_folders(store):
        for part in _parts(folder, faults):
            what = size_fault(folder, part) or (checksum_fault(folder, part) if check_bytes else None)
            if what is None:
                with open_part(folder / part.file) as opened:
                    keys.append(as_keys(opened.get_tensor("hashes")))
            else:
                faults.append(Fault(part.name, what))
    return np.unique(np.concatenate(keys)) if keys else as_keys(torch.empty(0, 16, dtype=torch.uint8)), faults


# ----------------------------------------------------------------------------------------------------
# Parts are read whole once before they are trained on, and remembered as sound.
#
# A part that was altered without a change of size loads, and trains on noise. Its checksum costs one read
# of the store, far less than an epoch; so it is asked before the first step, never within one, and again
# only for parts whose file has another size or time since, or another line in the manifest. The time of
# change counts as well as that of writing: a copy that keeps the latter is another file, and is read. What
# was found sound lies in `.checked.json`: hidden, for it says nothing about the store but how lately it was
# read.


CHECKED = ".checked.json"
_THREADS = 4  # reading and hashing release the interpreter
_BLOCK = 1 << 24  # bytes
_TOLD_EVERY_S = 1.0
logger = logging.getLogger(__name__)
Stamp = list[Any]  # [bytes, mtime and ctime in ns, checksum in the manifest]


def check_parts(store: Path | str, on_progress: Callable[[str, int, int], None] | None = None) -> int:
    """Read every part of `store` that is not remembered as sound; return the bytes read.

    `on_progress` gets ("checking the store", bytes done, bytes in all); what it raises ends the reading, and
    finished parts stay remembered. Raises `StoreError` naming each part whose bytes are not those sealed.
    """
    store = Path(store)
    parts = [part for folder in manifests.shard_folders(store) for part in manifests.sealed_parts(folder)]
    known = _remembered(store)
    stamps = {part.name: _stamp(store, part) for part in parts}
    todo = [part for part in parts if known.get(part.name) != stamps[part.name]]
    sound = {name: stamp for name, stamp in stamps.items() if known.get(name) == stamp}
    if not todo:
        return 0
    stop, done = threading.Event(), dict.fromkeys((part.name for part in todo), 0)
    total, damaged = sum(part.bytes for part in todo), []
    with ThreadPoolExecutor(_THREADS) as pool:
        reading = {pool.submit(_is_sound, store, part, done, stop): part.name for part in todo}
        try:
            waiting: set[Future[bool]] = set(reading)
            while waiting:
                ready, waiting = wait(waiting, _TOLD_EVERY_S)
                for one in ready:
                    name = reading[one]
                    if one.result():
                        sound[name] = stamps[name]
                    else:
                        damaged.append(name)
                if on_progress:
                    on_progress("checking the store", sum(done.values()), total)
        finally:
            stop.set()
            _remember(store, sound)
    if damaged:
        raise StoreError(
            f"{store}: {', '.join(sorted(damaged))}: not the bytes that its manifest's checksum is of; they "
            "were damaged since. Run extract with -p recheck True: exactly its samples are redone. "
            "(-p check_store False trains without looking.)"
        )
    return total


def _stamp(store: Path, part: manifests.Part) -> Stamp:
    path = store / part.name
    with naming(path):
        found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, part.checksum]


def _is_sound(store: Path, part: manifests.Part, done: dict[str, int], stop: threading.Event) -> bool:
    """Whether a part's bytes have its checksum; counted in `done`, given up (as not sound) on `stop`."""
    digest, path = xxhash.xxh3_128(), store / part.name
    with naming(path), open(path, "rb") as file:
        while not stop.is_set() and (block := file.read(_BLOCK)):
            digest.update(block)
            done[part.name] += len(block)
    return digest.hexdigest() == part.checksum


def _remembered(store: Path) -> dict[str, Stamp]:
    path = store / CHECKED
    if not path.is_file():
        return {}
    with naming(path):
        found = files.unsealed(path.read_bytes())
    parts = found.get("parts") if found else None
    return parts if isinstance(parts, dict) else {}  # damaged: everything is read again


def _remember(store: Path, sound: dict[str, Stamp]) -> None:
    try:
        files.write_json(store / CHECKED, files.sealed({"parts": sound}))
    except FileError as error:  # a store on a read-only disk
        logger.warning("the next run reads the whole store again: %s", error)
