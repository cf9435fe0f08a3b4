"""The analytic account of a training step: closed formulas for what the drafter, its loss and its optimizer
hold.

Moments compete: the loss (all activations saved, and logits in some form), the backward of the last layer
(activations, and the feed-forward's gradients) and of the first (all other layers' gradients), the backward
of the context's norm (fp32 copies of S rows), and the update (gradients, and what the optimizer needs of the
largest matrix). N = anchors x block rows, S context tokens, H hidden, I feed-forward, V vocabulary, K taps,
q = n_q d, kv = n_kv d, c chunk rows, s bytes an element, P parameters. Norms compute in fp32 and save that
copy; the tests hold the sums to the count of the real modules on fake tensors.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from dflash_lab.memory.account import Account, Moment, account_of
from dflash_lab.memory.extraction_account import OUTSIDE_TORCH, WORKSPACE, Live
from dflash_lab.memory.optimizer_account import moments, update_temporaries
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
    always = _static(shape, drafter, setup, cuda)
    size, rows = dtype_bytes(setup.dtype), setup.rows
    stream = rows * drafter.hidden_size * size
    inputs = {**always, **_inputs(drafter, setup)}
    hidden: Live = {"block states": (2 * stream, "2 N H s: hidden states and their gradient")}
    forward, remade = _saved(drafter, setup), _saved(drafter, setup, remade=True)
    loss = loss_terms(shape.vocab, drafter.hidden_size, setup)
    backward = _backward(drafter, setup, shape.vocab)
    moments = [
        Moment("the loss", {**inputs, **forward, **hidden, **loss}),
        Moment("the backward of the last layer", {**inputs, **remade, **hidden, **backward}),
    ]
    parameters, largest = drafter_parameters(drafter)
    behind = (parameters - len(drafter.tap_ids) * drafter.hidden_size**2) * (drafter.num_layers - 1)
    first: Live = {"gradients": (behind // drafter.num_layers * size, "s x parameters of the layers behind")}
    alone = _saved(drafter, setup, remade=True, layers=1)
    inside = _backward(drafter, setup, shape.vocab)
    inside.pop("logits", None)
    moments.append(
        Moment("the backward of the first layer", {**inputs, **alone, **hidden, **inside, **first})
    )
    context, hidden_size = setup.context, drafter.hidden_size
    layers = parameters - len(drafter.tap_ids) * hidden_size**2
    copies = 6 * context * hidden_size * 4
    entry: Live = {
        "gradients": (layers * size, "s x parameters of all layers"),
        "fc output and its norm": (copies, "6 S H 4: the norm's input and its gradient's fp32 copies"),
    }
    moments.append(Moment("the backward of the context's norm", {**inputs, **entry}))
    update: Live = {
        "gradients": (parameters * size, "P s"),
        "update temporaries": update_temporaries(drafter, setup.optimizer, largest),
    }
    moments.append(Moment("the update", {**inputs, **update}))
    title = f"training {setup.anchors} x {setup.block_size}, {setup.context} context tokens"
    account = account_of("analytic", title, moments, _notes(shape, setup))
    return account.fragmented(FRAGMENTS[setup.expandable]) if cuda else account


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


def resident_target_bytes(shape: TargetShape, drafter: Any, setup: TrainingSetup) -> int:
    """Return the bytes of target layers that lie on the training device beside head and embedding."""
    if setup.placement != "same device":
        return 0
    last = shape.layers - 1 if setup.soft_targets else max(drafter.tap_ids)
    return sum(shape.layer_parameters(index) for index in range(last + 1)) * dtype_bytes(setup.dtype)


def loss_terms(vocab: int, hidden: int, setup: TrainingSetup) -> Live:
    """Return what the head and the loss hold at their worst.

    A side (drafter, and the target with soft targets) costs N V s for its logits and N V 4 for what its
    softmax saves; the gradient is N V 4. A loop over chunks, or chunks put back together, changes when
    these are made and not what is kept for the backward; only recomputing (checkpoint) or finishing the
    gradient inside the chunk (fused) does.
    """
    size, sides = dtype_bytes(setup.dtype), 1 + setup.soft_targets
    vocab = -(-vocab // setup.vocabulary_shards)
    here = sides - (1 if setup.soft_targets and setup.target_logits_elsewhere else 0)
    whole = setup.rows * vocab
    drafted = setup.block_size - 1  # slot 0 takes no part; a chunk holds whole blocks
    chunk = min(max(1, setup.chunk // drafted), setup.anchors) * drafted * vocab
    if setup.loss in ("naive", "concat"):
        return {
            "logits": (here * whole * size, f"{here} sides x N V s"),
            "softmax and its gradient": (whole * 4 * (sides + 1), f"N V 4 x ({sides} sides + gradient)"),
        }
    if setup.loss == "loop":
        return {
            "logits": (sides * whole * size, f"{sides} sides x N V s: kept by autograd for every chunk"),
            "softmax and its gradient": (
                whole * size + chunk * 4 * (sides + 1),
                "N V s kept + c V 4 x (sides + gradient)",
            ),
        }
    if setup.loss == "checkpoint":
        work = chunk * ((size + 4) * sides + 4)
        return {
            "logits of one chunk": (chunk * size * here, "c V s a side"),
            "softmax and its gradient": (work - chunk * size * sides, "c V 4 x (sides + gradient)"),
            "loss inputs": (setup.rows * hidden * size, "N H s: all that checkpointing the head keeps"),
        }
    return {
        "logits of one chunk": (chunk * 4 * sides, f"{sides} sides x c V 4 (fp32)"),
        "softmax and its gradient": (chunk * size, "c V s: the logit gradient"),
        "loss inputs": (
            chunk // vocab * hidden * (size + 8),
            "c H (s + 8): one chunk's states and their gradient",
        ),
    }


def _static(shape: TargetShape, drafter: Any, setup: TrainingSetup, cuda: bool) -> Live:
    size = dtype_bytes(setup.dtype)
    parameters, _ = drafter_parameters(drafter)
    matrix = shape.vocab * shape.hidden * size
    ends = matrix // setup.vocabulary_shards + (0 if shape.tied else matrix)
    here = setup.masters and size < 4 and setup.optimizer != "cpu-offload"
    masters = 4 * parameters if here else 0
    live: Live = {
        "drafter weights": (parameters * size, f"P s, P = {parameters / 1e9:.3f}e9"),
        "fp32 masters": (masters, "4 P"),
        "optimizer moments": moments(drafter, setup.optimizer, parameters),
        "head and embedding": (ends, "V H s each (once if tied)"),
        "target weights": (resident_target_bytes(shape, drafter, setup), "target layers on this device"),
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
    final = setup.context * hidden * size if setup.soft_targets else 0
    return {
        "captured states": (taps, "S K H s: the fc inputs"),
        "target final states": (final, "S H s"),
    }


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
    live: Live = {"gradients inside the backward": (inside, "2 N I s + H I s: the last layer's feed-forward")}
    if setup.loss in ("naive", "loop", "concat"):
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
