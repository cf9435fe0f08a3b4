"""The analytic account of a training step: closed formulas for what the drafter, its loss and its optimizer
hold.

Moments compete: the loss (all activations saved, and logits in some form), the backward of the last layer
(activations, and the feed-forward's gradients) and of the first (all other layers' gradients), the backward
of the context's norm (fp32 copies of S rows), the update (gradients, and what the optimizer needs of the
largest matrix), and a live target's forward of a row.
N = anchors x block rows, S context tokens, H hidden, I feed-forward, V vocabulary, K taps, q = n_q d,
kv = n_kv d, c chunk rows, s bytes an element, P parameters. Norms compute in fp32 and, where layers are not
compiled, save that copy; the tests hold the sums to the count of the real modules on fake tensors.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from dflash_lab.memory.account import Account, Moment, account_of
from dflash_lab.memory.compiled_account import compiled_saved
from dflash_lab.memory.extraction_account import OUTSIDE_TORCH, WORKSPACE, Live
from dflash_lab.memory.loop_account import (
    beside_the_step,
    gathered,
    resident_target_bytes,
    target_forward,
)
from dflash_lab.memory.loss_account import loss_terms
from dflash_lab.memory.optimizer_account import moments as moments_of_optimizer
from dflash_lab.memory.optimizer_account import update_temporaries
from dflash_lab.memory.second_account import convolution_bytes, selector
from dflash_lab.memory.setups import TrainingSetup
from dflash_lab.memory.shapes import TargetShape, dtype_bytes, target_shape

FRAGMENTS = {
    False: 0.05,
    True: 0.03,
}  # as in extraction: the large tensors of training return in the same sizes


def predict_training(
    target_config: Any,
    drafter_config: Any,
    *,
    anchors: int,
    context: int,
    block_size: int = 0,
    cuda: bool = True,
    **options: Any,
) -> Account:
    """Predict the peak of one training step, in bytes by term.

    `target_config` is a transformers config (or `TargetShape`), `drafter_config` a `DrafterConfig`;
    `block_size` 0 means the drafter's own. `options` are the other fields of `TrainingSetup`. Raises
    `UnsupportedTarget` by name.
    """
    setup = TrainingSetup(
        anchors=anchors, context=context, block_size=block_size or drafter_config.block_size, **options
    )
    shape = target_config if isinstance(target_config, TargetShape) else target_shape(target_config)
    return training_account(shape, drafter_config, setup, cuda=cuda)


def training_account(shape: TargetShape, drafter: Any, setup: TrainingSetup, *, cuda: bool = True) -> Account:
    """Return the account of `setup` for a drafter of a target of `shape`."""
    setup = with_chunk(setup, shape.vocab, cuda=cuda)
    parameters, largest = drafter_parameters(drafter)
    size, hidden_size = dtype_bytes(setup.dtype), drafter.hidden_size
    always = {**_static(shape, drafter, setup, cuda), **beside_the_step(shape, drafter, setup, cuda=cuda)}
    if setup.gradients_kept:
        always["gradients"] = (parameters * size, "P s: kept from row to row, or as DDP's buckets")
    inputs = {**always, **_inputs(drafter, setup)}
    stream = setup.rows * hidden_size * size
    loss_hidden: Live = {"block states": (2 * stream, "2 N H s: hidden states and their gradient")}
    hidden = loss_hidden
    if setup.compiled:  # the last norm keeps its input, and by the layers' backward only a gradient is left
        loss_hidden = {
            "block states": (3 * stream, "3 N H s: hidden states, their gradient, the norm's input")
        }
        hidden = {"block states": (stream, "N H s: the gradient that comes in")}
    loss = {} if setup.head_elsewhere else loss_terms(shape.vocab, hidden_size, setup)
    loss |= selector(drafter, setup, loss=True)
    before = gathered(drafter, setup, parameters, backward=False)
    inside = {**_backward(drafter, setup, shape.vocab), **gathered(drafter, setup, parameters, backward=True)}
    inside |= selector(drafter, setup, loss=False)
    moments = [
        Moment("the loss", {**inputs, **_kept(drafter, setup), **loss_hidden, **loss, **before}),
        Moment(
            "the backward of the last layer",
            {**inputs, **_kept(drafter, setup, remade=True), **hidden, **inside},
        ),
    ]
    inside.pop("logits", None)
    layers = parameters - len(drafter.tap_ids) * hidden_size**2
    behind = layers * (drafter.num_layers - 1) // drafter.num_layers
    alone = _kept(drafter, setup, remade=True, layers=1)
    first = _gradients(setup, behind, "s x parameters of the layers behind")
    moments.append(
        Moment("the backward of the first layer", {**inputs, **alone, **hidden, **inside, **first})
    )
    copies = 6 * setup.context * hidden_size * 4
    entry: Live = {
        **_gradients(setup, layers, "s x parameters of all layers"),
        **before,
        "fc output and its norm": (copies, "6 S H 4: the norm's input and its gradient's fp32 copies"),
    }
    moments.append(Moment("the backward of the context's norm", {**inputs, **entry}))
    update: Live = {
        **_gradients(setup, parameters, "P s"),
        "update temporaries": update_temporaries(
            drafter, setup.optimizer, _share(largest, setup), element=size, shards=setup.shards
        ),
    }
    moments.append(Moment("the update", {**inputs, **update}))
    if setup.live:
        forward = target_forward(shape, drafter, setup, cuda=cuda)
        held = {name: part for name, part in always.items() if name != "recorded forward's pool"}
        moments.append(
            Moment("the target's forward of a row", {**held, **_inputs(drafter, setup), **forward})
        )
    title = f"training {setup.anchors} x {setup.block_size}, {setup.context} context tokens"
    title += ", compiled layers" if setup.compiled else ""
    account = account_of("analytic", title, moments, _notes(shape, setup))
    return account.fragmented(FRAGMENTS[setup.expandable]) if cuda else account


def _share(size: int, setup: TrainingSetup) -> int:
    """A process's part of what is split over `shards`."""
    return -(-size // setup.shards)


def _gradients(setup: TrainingSetup, parameters: int, formula: str) -> Live:
    """Gradients of `parameters`, unless all are there in any case; sharded as soon as a layer has its own."""
    if setup.gradients_kept:
        return {}
    size = _share(parameters * dtype_bytes(setup.dtype), setup)
    return {"gradients": (size, formula + (" / n" if setup.shards > 1 else ""))}


def with_chunk(setup: TrainingSetup, vocab: int, *, cuda: bool = True) -> TrainingSetup:
    """Return `setup` with the chunk that the loss would plan where it has none (given memory enough)."""
    if setup.chunk:
        return setup
    shard = -(-vocab // setup.vocabulary_shards)
    rows = _planned_rows(shard, setup.block_size, setup.dtype, setup.soft_targets, setup.rows, cuda)
    return replace(setup, chunk=rows)


@functools.cache
def _planned_rows(vocab: int, block: int, dtype: str, soft: bool, rows: int, cuda: bool) -> int:
    import torch

    from dflash_lab.drafter.loss.plan import plan_chunks

    return plan_chunks(
        vocab=vocab,
        block=block,
        dtype=getattr(torch, dtype),
        device=torch.device("cuda" if cuda else "cpu"),
        soft=soft,
        rows=rows,
        free=1 << 50,
    ).rows


def drafter_parameters(drafter: Any) -> tuple[int, int]:
    """Return (parameters of the drafter, elements of its largest matrix)."""
    hidden, wide = drafter.hidden_size, drafter.intermediate_size
    q, kv = drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
    layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * wide + 2 * hidden + 2 * drafter.head_dim
    fc = len(drafter.tap_ids) * hidden * hidden
    total = drafter.num_layers * layer + fc + 2 * hidden
    largest = max(fc, hidden * wide, q * hidden)
    if drafter.conv_kernel_size:
        taps, groups = drafter.conv_kernel_size, hidden // drafter.conv_group_size
        total += drafter.num_layers * 2 * (2 * taps * hidden + 2 * taps * groups * hidden)
    if drafter.selector_rank:
        total += drafter.selector_rank * (2 * drafter.vocab_size + hidden)
        largest = max(largest, drafter.selector_rank * drafter.vocab_size)
    return total, largest


def _static(shape: TargetShape, drafter: Any, setup: TrainingSetup, cuda: bool) -> Live:
    size = dtype_bytes(setup.dtype)
    parameters, _ = drafter_parameters(drafter)
    matrix = shape.vocab * shape.hidden * size
    ends = matrix // setup.vocabulary_shards + (0 if shape.tied else matrix)
    masters = setup.masters and size < 4 and setup.optimizer != "cpu-offload"
    kept, formula = moments_of_optimizer(drafter, setup.optimizer, parameters)
    each = f" / {setup.shards} processes" if setup.shards > 1 else ""
    live: Live = {
        "drafter weights": (_share(parameters * size, setup), f"P s{each}, P = {parameters / 1e9:.3f}e9"),
        "fp32 masters": (_share(4 * parameters, setup) if masters else 0, f"4 P{each}"),
        "optimizer moments": (_share(kept, setup), formula + each),
        "head and embedding": (0 if setup.head_elsewhere else ends, "V H s each (once if tied)"),
        "target weights": (resident_target_bytes(shape, setup), "target layers on this device"),
    }
    if cuda:
        live["workspace"] = (
            2 * WORKSPACE,
            "cuBLAS, a handle each for the forward's and the backward's thread",
        )
        live["outside torch"] = (OUTSIDE_TORCH, "CUDA context and loaded kernels, typical")
    return live


def _inputs(drafter: Any, setup: TrainingSetup) -> Live:
    size, hidden = dtype_bytes(setup.dtype), drafter.hidden_size
    taps = setup.context * len(drafter.tap_ids) * hidden * size
    carried = setup.soft_targets or setup.final_states or setup.live
    final = setup.context * hidden * size if carried else 0
    return {
        "captured states": (taps, "S K H s: the fc inputs"),
        "target final states": (final, "S H s"),
    }


def _kept(drafter: Any, setup: TrainingSetup, *, remade: bool = False, layers: int = 0) -> Live:
    """Return what the forward of `layers` layers (0: all) keeps, plain or compiled, DFlash or DFlash 2."""
    how = compiled_saved if setup.compiled else _saved
    each, formula = convolution_bytes(drafter, setup)
    count = layers or drafter.num_layers
    if setup.checkpointing == "layers":
        count = 1 if remade else 0
    kept = how(drafter, setup, remade=remade, layers=layers)
    return {**kept, "draft layers: convolutions": (count * each, formula)}


def _saved(drafter: Any, setup: TrainingSetup, *, remade: bool = False, layers: int = 0) -> Live:
    """Return what the forward of `layers` layers (0: all) keeps; `remade` adds the checkpointed part that
    is remade.
    """
    size, hidden, wide = dtype_bytes(setup.dtype), drafter.hidden_size, drafter.intermediate_size
    rows, context = setup.rows, setup.context
    layers = layers or drafter.num_layers
    norm = 4 + size  # a norm saves its fp32 input and the normed value, beside its output
    q, kv = drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
    norms = 2 * rows * hidden * (norm + size)
    block = rows * (q * (norm + 2 * size) + 4 * drafter.num_heads + kv * norm)
    attention = block + (context + rows) * 2 * kv * size + context * kv * norm
    mlp = rows * 4 * wide * size
    inputs = 0
    kept = {"norms": layers * norms, "attention": layers * attention, "MLP": layers * mlp}
    if setup.checkpointing == "layers":
        kept = {"norms": norms, "attention": attention, "MLP": mlp} if remade else dict.fromkeys(kept, 0)
        inputs = layers * rows * hidden * size
    elif setup.checkpointing == "mlp":
        kept["MLP"] = mlp if remade else 0
    fused = context * hidden * (norm + size)
    return {
        "fc output and its norm": (fused, "S H (4 + s + s): fp32 copy, normed, times weight"),
        "draft layers: norms": (
            kept["norms"] + rows * hidden * norm,
            "2 a layer and the last: N H (4 + 2 s)",
        ),
        "draft layers: attention": (
            kept["attention"],
            "a layer: N (q (4 + 3 s) + kv (4 + s)) + 2 (S + N) kv s",
        ),
        "draft layers: MLP": (kept["MLP"], "a layer: 4 N I s: gate, its silu, up, product"),
        "draft layers: inputs": (inputs, "layers x N H s: kept by checkpointing"),
    }


def _backward(drafter: Any, setup: TrainingSetup, vocab: int) -> Live:
    size = dtype_bytes(setup.dtype)
    inside = (
        2 * setup.rows * drafter.intermediate_size * size
        + drafter.hidden_size * drafter.intermediate_size * size
    )
    # Compiled: the gradients of gate, up and their product, beside what is kept less the product itself.
    live: Live = {"gradients inside the backward": (inside, "2 N I s + H I s: the last layer's feed-forward")}
    if setup.loss in ("naive", "loop", "concat") and not setup.head_elsewhere:
        kept = loss_terms(vocab, drafter.hidden_size, replace(setup, target_logits_elsewhere=False))["logits"]
        live["logits"] = kept
    return live


def _notes(shape: TargetShape, setup: TrainingSetup) -> tuple[str, ...]:
    notes = []
    tensor = setup.rows * shape.vocab * 2
    if setup.loss != "fused":
        notes.append(
            f"{setup.rows:,} positions make {tensor / 1e9:.1f} GB a logits tensor in bf16, "
            f"{2 * tensor / 1e9:.1f} GB for both sides."
        )
    if setup.loss == "loop":
        notes.append("Autograd keeps the logits of every chunk until the backward: the loop frees nothing.")
    if setup.loss == "concat":
        notes.append("Chunks that are concatenated are whole again before the loss sees them.")
    if setup.data_parallel > 1:
        notes.append(
            f"{setup.data_parallel} data-parallel replicas each hold all of this: "
            "only the number of batches grows."
        )
    return tuple(notes)
