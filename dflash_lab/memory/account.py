"""What an extraction batch holds at its peak, by closed formulas: named terms in bytes. No torch, and a
millisecond.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_lab.errors import InputError
from dflash_lab.memory.shapes import (
    CHUNK,
    GIB,
    LINEAR,
    MIB,
    SLIDING,
    ExtractionSetup,
    TargetShape,
    dtype_bytes,
    repeats_keys,
    target_shape,
)

Live = dict[str, tuple[int, str]]  # term -> bytes and formula
# What is there before the first batch and stays: a change of batch or length does not move these.
STATIC_TERMS = frozenset(
    (
        "target weights",
        "head and embedding",
        "drafter weights",
        "fp32 masters",
        "optimizer moments",
        "workspace",
        "outside torch",
    )
)
NOT_LIVE = ("fragmentation", "recorded forward's pool")  # the allocator holds it beside live tensors


@dataclass(frozen=True)
class Account:
    """Bytes by term at the peak, which comes in `moment`; `formulas` says how each term was made."""

    title: str
    terms: Mapping[str, int]
    formulas: Mapping[str, str] = field(default_factory=dict)
    moment: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        kept = {name: int(size) for name, size in self.terms.items() if size}
        if negative := [name for name, size in kept.items() if size < 0]:
            raise InputError(f"negative terms in an account of memory: {', '.join(negative)}")
        object.__setattr__(self, "terms", kept)

    @property
    def peak(self) -> int:
        """Bytes at the peak: the sum of the terms."""
        return sum(self.terms.values())

    @property
    def peak_gib(self) -> float:
        return self.peak / GIB

    @property
    def static(self) -> int:
        """Bytes that are there whatever the batch."""
        return sum(size for name, size in self.terms.items() if name in STATIC_TERMS)

    @property
    def moving(self) -> int:
        """Bytes that the batch brings."""
        return self.peak - self.static

    @property
    def live(self) -> int:
        """Bytes of live tensors: the peak without fragments and a recorded graph's pool."""
        return self.peak - sum(self.terms.get(name, 0) for name in NOT_LIVE)

    def largest(self, count: int = 3) -> list[tuple[str, int]]:
        """Return the `count` largest terms, largest first."""
        return sorted(self.terms.items(), key=lambda item: -item[1])[:count]

    def fragmented(self, share: float) -> Account:
        """Return the account with fragments worth `share` of what the batch brings."""
        size = int(share * (self.live - self.static))
        formula = f"{100 * share:.0f}% of what the batch brings: typical of a replayed allocator"
        return replace(
            self,
            terms={**self.terms, "fragmentation": size},
            formulas={**self.formulas, "fragmentation": formula},
        )

    def explain(self) -> str:
        """Say in one paragraph what fills the memory and when."""
        shares = ", ".join(
            f"{name} {size / GIB:.2f} GiB ({100 * size / max(1, self.peak):.0f}%)"
            for name, size in self.largest(4)
        )
        when = f" The peak comes in {self.moment}." if self.moment else ""
        notes = "".join(f" {note}" for note in self.notes)
        head = f"{self.title}: {self.peak_gib:.2f} GiB at the peak."
        return f"{head} Largest: {shares}.{when}{notes}"


@dataclass(frozen=True)
class Moment:
    """Terms live at one point of a pass, as ``name -> (bytes, formula)``."""

    name: str
    live: Live

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.live.values())


def account_of(title: str, moments: list[Moment], notes: tuple[str, ...] = ()) -> Account:
    """Return the account of the largest of `moments`."""
    peak = max(moments, key=lambda moment: moment.size)
    return Account(
        title=title,
        terms={name: size for name, (size, _) in peak.live.items()},
        formulas={name: formula for name, (_, formula) in peak.live.items()},
        moment=peak.name,
        notes=notes,
    )


# An extraction batch: T = batch x length, H hidden, s bytes an element. A forward without gradients holds the
# token embeddings, the residual stream, what was captured before, and one sublayer's working set, which is
# that of the eager transformers code; the tests hold the formulas to the same modules run on fake tensors.

WORKSPACE = 32 * MIB  # cuBLAS keeps this on Hopper for each thread that calls it; 8 MiB before it
# Share of what a batch brings that the allocator needs beside it, by `expandable`: replays of counted runs
# of the 27B, 8B and 135M shapes give 10 to 30% and 5 to 18%.
FRAGMENTS = {False: 0.2, True: 0.12}
OUTSIDE_TORCH = 550 * MIB  # CUDA context and loaded kernels: typical, `measure` says what it is here


def on_cuda(threads: int) -> Live:
    """Return what CUDA holds beside tensors; `threads` call cuBLAS (a backward has its own)."""
    return {
        "workspace": (threads * WORKSPACE, "cuBLAS, a handle a thread"),
        "outside torch": (OUTSIDE_TORCH, "CUDA context and loaded kernels, typical"),
    }


def predict_extraction(target: Any, setup: ExtractionSetup, *, cuda: bool = True) -> Account:
    """Predict the peak of one extraction batch, in bytes by term.

    target: a transformers config or a `TargetShape`. cuda: with fragments, the library's workspace and the
    memory outside torch. Raises `UnsupportedTarget` for a structure that is not understood.
    """
    shape = target_shape(target)
    size = dtype_bytes(setup.dtype)
    last = setup.last_layer(shape.layers)
    always = _always(shape, setup, last, size, cuda)
    moments = []
    for index, captured in _worst_layers(shape, setup, last):
        held = {**always, **_captured(shape, setup, index, captured, size)}
        moments += [
            Moment(f"layer {index}, {name}", {**held, **live})
            for name, live in (*_mixer(shape, setup, index, size), *_feed_forward(shape, setup, index, size))
        ]
    moments += _after_the_last(shape, setup, last, size, always)
    notes = []
    if setup.capture == "output_hidden_states":
        stored = (last + 2) * setup.tokens * shape.hidden * size
        hooked = len(setup.tap_ids) * setup.tokens * shape.hidden * size
        notes.append(
            f"In the end {last + 2} tensors of {stored / 1e9:.1f} GB are stored; "
            f"{len(setup.tap_ids)} hooked layers would be {hooked / 1e9:.1f} GB."
        )
    if setup.mask:
        notes.append(
            "A mask with one pad builds [B, 1, L, L] and gives up the causal fast path: pad right, pass none."
        )
    account = account_of(f"extraction {setup.batch} x {setup.length}", moments, tuple(notes))
    return account.fragmented(FRAGMENTS[setup.expandable]) if cuda else account


def _always(shape: TargetShape, setup: ExtractionSetup, last: int, size: int, cuda: bool) -> Live:
    tokens, hidden = setup.tokens, shape.hidden
    weights = target_weight_bytes(shape, setup)
    live: Live = {
        "target weights": (weights, f"{weights / size / 1e9:.2f}e9 parameters x s"),
        "embedded tokens": (tokens * hidden * size, "T H s"),
        "residual stream": (tokens * hidden * size, "T H s"),
        "norms": (tokens * hidden * size, "T H s: the sublayer's normed input"),
        "positions": (
            (setup.batch if shape.gated_attention else 1) * setup.length * shape.rotary_dim * 2 * size
            + 2 * tokens * 8,
            "cos, sin: L rotary_dim 2 s; ids int64",
        ),
    }
    kinds = {shape.layer_types[index] for index in range(last + 1) if _masked(shape, setup, index)}
    if kinds:
        rows = setup.batch if setup.mask else 1  # a window is the same for all rows
        live["mask"] = (len(kinds) * rows * setup.length**2, "B L^2 bool a kind of attention; a window L^2")
    if setup.use_cache:
        cached = sum(cache_bytes(shape, setup, index) for index in range(last + 1))
        live["cache"] = (cached, "attention layer: T 2 n_kv d s; linear layer: B (n_v k v 4 + conv tail)")
    if setup.in_flight:
        states = len(setup.tap_ids) + setup.store_final
        live["packed states in flight"] = (
            setup.in_flight * states * tokens * hidden * size,
            f"{setup.in_flight} batches before x taps x T H s: launched, not yet copied",
        )
    return live | (on_cuda(1) if cuda else {})


def _worst_layers(shape: TargetShape, setup: ExtractionSetup, last: int) -> list[tuple[int, int]]:
    """Return (layer, states captured before it) of the latest layer of each kind: the later, the more."""
    worst: dict[tuple[str, bool, bool], tuple[int, int]] = {}
    for index in range(last + 1):
        captured = sum(tap < index for tap in setup.tap_ids)
        kind = (shape.layer_types[index], shape.sparse[index], fusable(shape, setup, index))
        worst[kind] = (index, captured)
    return list(worst.values())


def _captured(shape: TargetShape, setup: ExtractionSetup, index: int, captured: int, size: int) -> Live:
    state = setup.tokens * shape.hidden * size
    if setup.capture == "output_hidden_states":
        # The embedding and the stream are themselves in the list: they are counted here, not twice.
        return {"stored hidden states": (max(0, index - 1) * state, "layers so far x T H s")}
    # The state captured one layer ago IS the residual stream of this one.
    fresh = captured - (1 if index - 1 in setup.tap_ids else 0)
    return {"captured states": (fresh * state, "taps so far x T H s")}


def _masked(shape: TargetShape, setup: ExtractionSetup, index: int) -> bool:
    """Whether layer `index` attends under a mask: a window longer than the batch needs none."""
    window = shape.windows[index]
    return shape.layer_types[index] != LINEAR and (setup.mask or bool(window and setup.length >= window))


def _mixer(shape: TargetShape, setup: ExtractionSetup, index: int, size: int) -> list[tuple[str, Live]]:
    if fusable(shape, setup, index):
        return fused_mixer(shape, setup, index, size)
    if shape.layer_types[index] == LINEAR:
        return _delta_net(shape, setup, size)
    tokens = setup.tokens
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    gate = q if shape.gated_attention else 0
    gate_projection = 2 * gate  # the projection the gate is a view of, and the gate copied out of it
    rotation = (4 * q + 2 * kv + gate_projection) * size
    formula = "T (4 n_q d + 2 n_kv d) s" + (" + T 3 n_q d s gate" if gate else "")
    found: list[tuple[str, Live]] = [("rotary angles", {"attention": (tokens * rotation, formula)})]
    if shape.qk_norm:
        norm = q * ((2 if size < 4 else 1) * 4 + size) + gate_projection * size
        found.append(("query norm", {"attention": (tokens * norm, "T n_q d (2 x 4 + s): norm in fp32")}))
    if _masked(shape, setup, index):
        # Keys and values are repeated to every query head, and the bool mask becomes a bias in the queries'
        # dtype.
        whole = tokens * (4 * q + 2 * kv + gate_projection) * size + setup.batch * setup.length**2 * size
        formula = "T (4 n_q d + 2 n_kv d) s + B L^2 s"
        found.append(("attention with a mask", {"attention": (whole, formula)}))
    return found


def _delta_net(shape: TargetShape, setup: ExtractionSetup, size: int) -> list[tuple[str, Live]]:
    delta = shape.delta
    assert delta is not None
    tokens, heads = setup.tokens, delta.value_heads
    padded = setup.batch * CHUNK * -(-setup.length // CHUNK)
    state = setup.batch * heads * delta.key_dim * delta.value_dim
    wide_keys = heads * delta.key_dim
    repeated = repeats_keys(shape.model_type)
    projections = (delta.conv_channels + delta.values) * size + 2 * heads * (size + 4)
    if repeated:
        projections += 2 * wide_keys * size
    if setup.mask:
        projections += shape.hidden * size  # the input multiplied by the mask
    if setup.kernels == "fla":
        keys = wide_keys if repeated else delta.keys
        copies = delta.values + (0 if repeated else 2 * delta.keys)
        each = (2 * keys + copies + wide_keys + 3 * delta.values + heads * CHUNK) * size + heads * 4
        states = padded // CHUNK * heads * delta.key_dim * delta.value_dim * size
        live: Live = {
            "gated delta net": (
                tokens * (projections + each),
                "T (qkv, z, normed q k, w, u, new v, o, 64-blocks) s",
            ),
            "gated delta net chunk states": (states, "B 64 ceil(L/64) x n_v k v s / 64"),
        }
        return [("gated delta rule", live)]
    wide = max(wide_keys, delta.values)
    chunks = padded * 4 * (10 * wide + 3 * heads * CHUNK) + state * 4
    slices = 2 * setup.batch * CHUNK * wide * 4
    scan = padded * 4 * (9 * wide + 3 * heads * CHUNK) + slices + 4 * state * 4
    held = (tokens * projections, "T (qkv + z + a + b) s")
    found: list[tuple[str, Live]] = []
    for where, most, formula in (
        ("within", chunks, "B 64 ceil(L/64) x 4 (10 n_v k + 3 n_v 64) + B n_v k v 4"),
        ("across", scan, "B 64 ceil(L/64) x 4 (9 n_v k + 3 n_v 64) + 4 B n_v k v 4"),
    ):
        live = {"gated delta net": held, "gated delta net chunk states": (most, formula)}
        found.append((f"delta rule {where} chunks (torch)", live))
    return found


def _feed_forward(
    shape: TargetShape, setup: ExtractionSetup, index: int, size: int
) -> list[tuple[str, Live]]:
    tokens = setup.tokens
    stream = (2 * tokens * shape.hidden * size, "2 T H s: the layer's input, and the stream after its mixer")
    if not shape.sparse[index]:
        active = (tokens * 3 * shape.intermediate * size, "T 3 I s: act, up, product")
        return [("feed-forward", {"MLP": active, "residual stream": stream})]
    experts = shape.experts
    assert experts is not None
    routed = tokens * experts.active
    index_bytes = routed * (4 * 8 + 4 + 2 * size) + tokens * experts.count * size
    shared = tokens * shape.hidden * size if experts.shared else 0
    gate_up = routed * (shape.hidden + 4 * experts.intermediate) * size + index_bytes
    gather = routed * 4 * shape.hidden * size + index_bytes
    gate_up_text = "T k (H + 4 I_e) s: rows sorted by expert, gate and up"
    gather_text = "T k 4 H s: rows, outputs, weighted, put back in order"
    return [
        ("experts, gate and up", {"MLP": (gate_up + shared, gate_up_text), "residual stream": stream}),
        ("experts, weighted sum", {"MLP": (gather + shared, gather_text), "residual stream": stream}),
    ]


def _after_the_last(
    shape: TargetShape, setup: ExtractionSetup, last: int, size: int, always: Live
) -> list[Moment]:
    """Return the moments after the layers: the taps packed together, or the head over every position."""
    state = setup.tokens * shape.hidden * size
    taps = len(setup.tap_ids) + (1 if setup.store_final else 0)
    gone = ("embedded tokens", "norms", "residual stream")
    kept = {name: live for name, live in always.items() if name not in gone}
    if setup.capture == "output_hidden_states":
        stored: Live = {"stored hidden states": ((last + 2) * state, "(layers + 1) x T H s")}
    else:
        stored = {"captured states": (taps * state, "taps x T H s")}
    moments = [Moment("the end of the forward", {**kept, **stored})]
    logits: Live = {}
    if setup.logits:
        logits = {"logits": (setup.tokens * shape.vocab * size, "T V s")}
        stream: Live = {"residual stream": (state, "T H s")}
        moments.append(Moment("the head over every position", {**kept, **stored, **logits, **stream}))
    if setup.packed and setup.capture == "hooks":
        packed: Live = {"packed states": (taps * state, "taps x T H s, one copy to the host")}
        moments.append(Moment("packing the taps", {**kept, **stored, **packed, **logits}))
    return moments


def cache_bytes(shape: TargetShape, setup: ExtractionSetup, index: int) -> int:
    """Return what layer `index` leaves in the cache: keys and values, or conv tail and fp32 state."""
    size = dtype_bytes(setup.dtype)
    if shape.layer_types[index] != LINEAR or shape.delta is None:
        return setup.tokens * 2 * shape.kv_heads * shape.head_dim * size
    delta = shape.delta
    conv = delta.conv_channels * delta.conv_kernel * size
    return setup.batch * (conv + delta.value_heads * delta.key_dim * delta.value_dim * 4)


def target_weight_bytes(shape: TargetShape, setup: ExtractionSetup) -> int:
    """Return the bytes of the weights that an extraction with `setup` keeps on the device."""
    last = setup.last_layer(shape.layers)
    parameters = shape.body_parameters(last + 1) + (shape.head_parameters() if setup.logits else 0)
    return parameters * dtype_bytes(setup.dtype)


# Fused layers (extraction/fused_layers.py): projections of one input are one tensor, filled up to whole
# tiles, and no key is repeated. Their feed-forward holds what transformers' own does.

_TILE = 128  # columns: extraction/fused_layers.py


def fusable(shape: TargetShape, setup: ExtractionSetup, index: int) -> bool:
    """Whether layer `index` gets its fused forward in `setup`."""
    plain = shape.bias or shape.output_bias or shape.layer_types[index] == SLIDING
    plain = plain or index in setup.plain_layers
    return setup.fused and not plain and not setup.mask and not setup.use_cache


def fused_mixer(shape: TargetShape, setup: ExtractionSetup, index: int, size: int) -> list[tuple[str, Live]]:
    """Return the worst moment of a fused attention or gated delta net."""
    tokens, delta = setup.tokens, shape.delta
    if shape.layer_types[index] == LINEAR and delta is not None:
        heads = delta.value_heads
        columns = _tiles(delta.conv_channels + delta.values + 2 * heads)
        each = columns + 2 * delta.keys + delta.values
        each += heads * (CHUNK + delta.key_dim) + 2 * delta.values
        padded = setup.batch * CHUNK * -(-setup.length // CHUNK)
        states = padded // CHUNK * heads * delta.key_dim * delta.value_dim * size
        live: Live = {
            "gated delta net": (
                tokens * (each * size + heads * 8),
                "T (merged qkv z b a, q, k, v, 64-blocks, w, u, new v) s",
            ),
            "gated delta net chunk states": (states, "B 64 ceil(L/64) x n_v k v s / 64"),
        }
        return [("gated delta rule", live)]
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    columns = _tiles(q * (2 if shape.gated_attention else 1) + 2 * kv)
    each = columns + q + kv + q + (q if shape.gated_attention else 0) + shape.hidden
    held = tokens * (each * size + shape.heads * 4)
    formula = "T (merged q k v, q, k, output" + (", gated" if shape.gated_attention else "") + ", H) s"
    return [("the output projection", {"attention": (held, formula)})]


def _tiles(columns: int) -> int:
    return -(-columns // _TILE) * _TILE
