"""What is checked before, during and after an extraction: room on disk, the target's states, the store's
bytes.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from transformers import PretrainedConfig

from dflash_lab import files
from dflash_lab.errors import FileError, InputError, LabError, StoreError, naming
from dflash_lab.extraction.manifest import (
    MANIFEST_FILE,
    Broken,
    Part,
    drop_part,
    mend,
    parts_of,
    read_identity,
    shard_count,
    shard_folders,
    shard_lock,
)
from dflash_lab.extraction.store import Layout, as_keys, find_codec, open_part
from dflash_lab.extraction.writer import FINDINGS, Capture, check_rows, pad
from dflash_lab.models.hooks import check_tap_ids
from dflash_lab.models.load import Target, cut_config, find_parts, skeleton

log = logging.getLogger(__name__)


# Before 54 GB are read: do the states fit on the disk, how many hours will it take? -----------------------


ROW_BYTES = 5.0  # token id and mask; offsets, hashes and marks add 25 bytes a sample
SAMPLE_BYTES = 25
MARGIN = 1.02  # headers, and what else writes to the disk meanwhile
ASSUMED_TFLOPS = {"cuda": 500.0, "cpu": 0.1}


@dataclass(frozen=True)
class Preflight:
    """What a run over all shards will take, on paper."""

    token_bytes: int
    bytes_needed: int
    bytes_free: int
    body_parameters: int
    hours: float

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
    """Check a run against the target's config and the disk, no weight touched; `InputError` when it cannot
    work.

    lengths: tokens of every sample of every shard. replaced: the store whose place this one will take, which
    stays until it is whole. tflops: sustained TFLOP/s of one device, 0 for an assumed one. Work is 2 x
    parameters of the layers that run, a token.
    """
    check_tap_ids(tap_ids, config.num_hidden_layers)
    layout = Layout(tuple(tap_ids), config.hidden_size, store_final, find_codec(storage))
    tokens = int(lengths.sum())
    needed = tokens * (layout.token_bytes + ROW_BYTES) + len(lengths) * SAMPLE_BYTES
    stored = sum(part.bytes for part in parts_of(store, []))
    there = next(path for path in (store.absolute(), *store.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed * MARGIN - stored > free:
        beside = ""
        if replaced is not None:
            size = sum(path.stat().st_size for path in replaced.rglob("*") if path.is_file())
            beside = (
                f" The earlier store, {replaced} ({size / 2**30:,.1f} GiB), stays until this one is whole, "
                "and both do not fit. If it is not needed any more, remove it first."
            )
        raise InputError(
            f"{store}: the states of {len(lengths):,} samples ({tokens:,} tokens x {layout.token_bytes:,} "
            f"bytes) take {needed / 2**30:,.1f} GiB, {stored / 2**30:,.1f} GiB are stored and "
            f"{free / 2**30:,.1f} GiB are free. Give another store folder, fewer taps, storage=fp8 (half the "
            "bytes), or fewer samples." + beside
        )
    last = config.num_hidden_layers - 1 if store_final else max(tap_ids)
    parameters = body_parameters(config, last)
    rate = tflops or ASSUMED_TFLOPS.get(device_type, ASSUMED_TFLOPS["cpu"])
    hours = 2 * parameters * tokens / (rate * 1e12) / 3600
    return Preflight(layout.token_bytes, int(needed), free, parameters, hours)


def body_parameters(config: PretrainedConfig, last_layer: int) -> int:
    """Count the parameters of decoder layers 0..last_layer: what one token is multiplied with, embedding and
    head left out.

    For a mixture of experts every expert counts, so its hours are an upper bound.
    """
    config = cut_config(config, last_layer)
    body = skeleton(config, name="preflight", dtype=torch.bfloat16)
    layers = find_parts(body, config, "preflight").layers
    return sum(parameter.numel() for parameter in layers.parameters())


# Does this target, on this machine, give a batch the states that we believe it gives? ---------------------
#
# Before a week of GPU time, prefixes of real samples run batched and alone (`self_test`). Some faults show
# only at the size of a real batch, or only after hours: so samples of real batches are compared with the same
# samples alone too (`SpotChecks`).
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


def self_test(
    target: Target, capture: Capture, samples: list[np.ndarray], layers: list[int]
) -> dict[str, Any]:
    """Test with prefixes of up to six of `samples`; `layers` are the layer ids of the stored states in order.

    Checked: the row count, batched against alone (wrong padding, mask or kernels), each tap against the layer
    it names (an off-by-one costs acceptance, never an error), health of every row. A sample that is unsound
    alone as well as batched is passed over for the next one: the run quarantines it. Raises `SelfTestError`
    that says which state fails and by how much, also where most samples are unsound.

    Returns the manifest's record: the prefixes' `lengths`, the worst rel-L2 of each stored state
    (`batched_error`, `layer_error`), what each may be (`tolerance`), and how many samples were `unsound`.
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
        limit = worst([found[number].limit for number in sound])
        own = compare.limits(longest, [state[0] for state in tapped], layered)
        problems += [
            f"layer {layer}: the tap is not the output of that layer (rel-L2 {error:.3g})"
            for layer, error, most in zip(layers, layered, own, strict=True)
            if error > most
        ]
    if unsound > len(sound):
        problems += [
            f"layer {layer}: {FINDINGS[finding]} row, alone as well as batched; {unsound} of "
            f"{unsound + len(sound)} samples have such rows"
            for layer, finding in zip(layers, worst([found[number].finding for number in bad]), strict=True)
            if finding
        ]
    if problems:
        _refuse(target, problems)
    return {
        "lengths": [len(row) for row in prefixes],
        "batched_error": worst([one.error for one in found]),
        "layer_error": layered,
        "tolerance": limit,
        "problems": [],
        "unsound": unsound,
    }


def worst(by_sample: list[list[Any]]) -> list[Any]:
    """The largest value of each state, from a list of all states' values a sample."""
    return [max(values) for values in zip(*by_sample, strict=True)]


def _refuse(target: Target, problems: list[str]) -> NoReturn:
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


# Is the store as its manifests say? -----------------------------------------------------------------------


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
    that no manifest names, a line of a manifest that is none. `discard` gives the damaged parts up.
    """
    store = Path(store)
    layout = Layout.of(read_identity(store))
    broken: list[Broken] = []
    parts = parts_of(store, broken)
    faults = [Fault(f"{line.folder.name}/{MANIFEST_FILE}", str(line), part=False) for line in broken]
    there = {str(p.relative_to(store)) for f in shard_folders(store) for p in f.glob("part-*.safetensors")}
    for stray in sorted(there - {part.name for part in parts}):
        faults.append(Fault(stray, "no manifest line names it (a crash before its line); ignored", False))
    seen: dict[bytes, str] = {}
    total, done = sum(part.bytes for part in parts), 0
    for part in parts:
        what = part.size_fault(store) or checksum_fault(store, part) or _content_fault(store, part, layout)
        if what:
            faults.append(Fault(part.name, what))
        else:
            with open_part(store / part.name) as opened:
                keys = as_keys(opened.get_tensor("hashes"))
            for key in keys:
                if (other := seen.setdefault(key.tobytes(), part.name)) != part.name:
                    told = f"sample {key.tobytes().hex()} is also in {other}; read once"
                    faults.append(Fault(part.name, told, False))
        done += part.bytes
        if on_progress:
            on_progress("verify", done, total)
    return faults


def checksum_fault(store: Path, part: Part) -> str:
    """What is wrong with a part by its bytes; "" if nothing is."""
    if (found := files.checksum(store / part.name)) == part.checksum:
        return ""
    return f"checksum {found} where the manifest says {part.checksum}: bytes were altered"


def _content_fault(store: Path, part: Part, layout: Layout) -> str:
    """What is wrong with a part whose bytes are as sealed: tensors that do not fit the store, a defect of the
    writer; states that are not numbers, as versions stored them that looked before the cast.
    """
    n, t = part.samples, part.tokens
    wanted: dict[str, tuple[int, ...]] = {region.name: (t, region.width) for region in layout.regions}
    wanted |= {"input_ids": (t,), "loss_mask": (t,), "offsets": (n + 1,), "hashes": (n, 16), "heldout": (n,)}
    try:
        opened = open_part(store / part.name)
    except StoreError as error:
        return str(error)
    with opened:
        names = set(opened.keys())
        for name, shape in wanted.items():
            found = tuple(opened.get_slice(name).get_shape()) if name in names else None
            if found != shape:
                return f"tensor {name} has shape {found}, {shape} expected"
        offsets = opened.get_tensor("offsets").numpy()
        if offsets[0] != 0 or offsets[-1] != t or (np.diff(offsets) < 1).any():
            return "offsets do not rise from 0 to the token count"
        owner, bad = np.repeat(np.arange(n), np.diff(offsets)), set[int]()
        slices = {region.name: opened.get_slice(region.name) for region in layout.regions}
        for start in range(0, t, _ROWS):
            views = {name: rows[start : start + _ROWS] for name, rows in slices.items()}
            for index in range(layout.states):
                finite = layout.read_state(views, index).isfinite().all(dim=-1).numpy()
                bad.update(owner[start : start + _ROWS][~finite].tolist())
        hashes = opened.get_tensor("hashes").numpy()
    if not bad:
        return ""
    named = ", ".join(hashes[number].tobytes().hex() for number in sorted(bad)[:8])
    more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
    return f"states of sample {named}{more} are not numbers"


def discard(store: Path | str, faults: list[Fault]) -> int:
    """Give the damaged parts among `faults` up: a `discard` line, then the file goes; the next extraction
    redoes exactly their samples. Return how many parts.
    """
    damaged = {fault.file: fault.what for fault in reversed(faults) if fault.part}
    for name, what in damaged.items():
        drop_part(files.inside(store, name), what)
    return len(damaged)


def trusted_keys(store: Path, folder: Path, *, recheck: bool) -> np.ndarray:
    """Sorted 16-byte keys of every sample that a store soundly holds, by manifest and size; with `recheck` by
    the checksum of every part too.

    What does not count is given up, so that its samples are redone: of the shard in `folder`, whose lock is
    held, and of shards of another count, which nobody runs any more. The rest is its own shard's business.
    """
    keys = [as_keys(torch.empty(0, 16, dtype=torch.uint8))]
    broken: list[Broken] = []
    parts = parts_of(store, broken)
    for line in broken:
        if shard_count(line.folder) == shard_count(folder):
            log.warning("%s", line)  # that shard's next run mends it
        else:
            with shard_lock(line.folder):
                mend(line.folder)
    for part in parts:
        path = store / part.name
        what = part.size_fault(store) or (checksum_fault(store, part) if recheck else "")
        if not what:
            with open_part(path) as opened:
                keys.append(as_keys(opened.get_tensor("hashes")))
        elif path.parent == folder:
            drop_part(path, what)
        elif shard_count(path.parent) != shard_count(folder):
            with shard_lock(path.parent):
                drop_part(path, what)
    return np.unique(np.concatenate(keys))


# Parts are read whole once before they are trained on, and remembered as sound ----------------------------
#
# A part that was altered without a change of size loads, and trains on noise. Its checksum costs one read
# of the store, far less than an epoch; so it is asked before the first step, and again only for parts whose
# file has another size or time since, or another line in the manifest. The time of change counts as well as
# that of writing: a copy that keeps the latter is another file, and is read.


CHECKED = ".checked.json"  # hidden: it says nothing about the store but how lately it was read
_THREADS = 4  # reading and hashing release the interpreter
_BLOCK = 1 << 24  # bytes
_TOLD_EVERY_S = 1.0
Stamp = list[Any]  # [bytes, mtime and ctime in ns, checksum in the manifest]


def check_parts(store: Path | str, on_progress: Callable[[str, int, int], None] | None = None) -> int:
    """Read every part of `store` that is not remembered as sound; return the bytes read.

    `on_progress` gets ("checking the store", bytes done, bytes in all); what it raises ends the reading, and
    finished parts stay remembered. Raises `StoreError` naming each part whose bytes are not those sealed.
    """
    store = Path(store)
    parts = parts_of(store)
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


def _stamp(store: Path, part: Part) -> Stamp:
    path = store / part.name
    with naming(path):
        found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, part.checksum]


def _is_sound(store: Path, part: Part, done: dict[str, int], stop: threading.Event) -> bool:
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
        log.warning("the next run reads the whole store again: %s", error)
