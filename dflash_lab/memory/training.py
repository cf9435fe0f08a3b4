"""What a training step holds at its peak, by closed formulas: drafter, loss, optimizer, and what the loop
adds; and what processes beside it hold.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from dflash_lab.memory.account import (
    FRAGMENTS,
    Account,
    Live,
    account_of,
    on_cuda,
    predict_extraction,
)
from dflash_lab.memory.shapes import (
    ExtractionSetup,
    Optimizer,
    TargetShape,
    TrainingSetup,
    dtype_bytes,
    target_shape,
)

# N = anchors x block rows, S context tokens, H hidden, I feed-forward, V vocabulary, K taps, q = n_q d, kv =
# n_kv d, c chunk rows, s bytes an element, P parameters, n processes. The tests hold the sums to the real
# modules on fake tensors.

STEP_FRAGMENTS = {False: 0.05, True: 0.03}  # as FRAGMENTS; large tensors return in the same sizes
SELECTOR_ELEMENTS = 1 << 26  # logits that DFlash 2's selector holds at once, as in drafter/objective.py


def predict_training(target: Any, drafter: Any, setup: TrainingSetup, *, cuda: bool = True) -> Account:
    """Predict the peak of one training step, in bytes by term.

    target: a transformers config or a `TargetShape`. drafter: a `DrafterConfig`. cuda: as in
    `predict_extraction`. Raises `UnsupportedTarget` for a structure that is not understood.
    """
    shape = target_shape(target)
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
    loss |= _selector(drafter, setup, loss=True)
    before = gathered(drafter, setup, parameters, backward=False)
    inside = {**_backward(drafter, setup, shape.vocab), **gathered(drafter, setup, parameters, backward=True)}
    inside |= _selector(drafter, setup, loss=False)
    moments = [
        ("the loss", {**inputs, **layers_kept(drafter, setup), **loss_hidden, **loss, **before}),
        (
            "the backward of the last layer",
            {**inputs, **layers_kept(drafter, setup, remade=True), **hidden, **inside},
        ),
    ]
    inside.pop("logits", None)
    layers = parameters - len(drafter.tap_ids) * hidden_size**2
    behind = layers * (drafter.num_layers - 1) // drafter.num_layers
    alone = layers_kept(drafter, setup, remade=True, layers=1)
    first = _gradients(setup, behind, "s x parameters of the layers behind")
    moments.append(("the backward of the first layer", {**inputs, **alone, **hidden, **inside, **first}))
    copies = 6 * setup.context * hidden_size * 4
    entry: Live = {
        **_gradients(setup, layers, "s x parameters of all layers"),
        **before,
        "fc output and its norm": (copies, "6 S H 4: the norm's input and its gradient's fp32 copies"),
    }
    moments.append(("the backward of the context's norm", {**inputs, **entry}))
    update: Live = {
        **_gradients(setup, parameters, "P s"),
        "update temporaries": update_temporaries(
            drafter, setup.optimizer, _share(largest, setup), element=size, shards=setup.shards
        ),
    }
    moments.append(("the update", {**inputs, **update}))
    if setup.live:
        forward = target_forward(shape, drafter, setup, cuda=cuda)
        held = {name: part for name, part in always.items() if name != "recorded forward's pool"}
        moments.append(("the target's forward of a row", {**held, **_inputs(drafter, setup), **forward}))
    title = f"training {setup.anchors} x {setup.block_size}, {setup.context} context tokens"
    title += ", compiled layers" if setup.compiled else ""
    account = account_of(title, moments, _notes(shape, setup))
    return account.fragmented(STEP_FRAGMENTS[setup.expandable]) if cuda else account


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


@functools.cache  # sliders ask thousands of times
def _planned_rows(vocab: int, block: int, dtype: str, soft: bool, rows: int, cuda: bool) -> int:
    import torch

    from dflash_lab.drafter.loss import plan_chunk_rows

    return plan_chunk_rows(
        vocab=vocab,
        block=block,
        dtype=getattr(torch, dtype),
        device=torch.device("cuda" if cuda else "cpu"),
        soft=soft,
        rows=rows,
        free=1 << 50,
    )


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
    kept, formula = optimizer_moments(drafter, setup.optimizer, parameters)
    each = f" / {setup.shards} processes" if setup.shards > 1 else ""
    live: Live = {
        "drafter weights": (_share(parameters * size, setup), f"P s{each}, P = {parameters / 1e9:.3f}e9"),
        "fp32 masters": (_share(4 * parameters, setup) if masters else 0, f"4 P{each}"),
        "optimizer moments": (_share(kept, setup), formula + each),
        "head and embedding": (0 if setup.head_elsewhere else ends, "V H s each (once if tied)"),
        "target weights": (resident_target_bytes(shape, setup), "target layers on this device"),
    }
    return live | (on_cuda(2) if cuda else {})


def _inputs(drafter: Any, setup: TrainingSetup) -> Live:
    size, hidden = dtype_bytes(setup.dtype), drafter.hidden_size
    taps = setup.context * len(drafter.tap_ids) * hidden * size
    carried = setup.soft_targets or setup.final_states or setup.live
    final = setup.context * hidden * size if carried else 0
    return {
        "captured states": (taps, "S K H s: the fc inputs"),
        "target final states": (final, "S H s"),
    }


# Draft layers, plain and compiled


def layers_kept(drafter: Any, setup: TrainingSetup, *, remade: bool = False, layers: int = 0) -> Live:
    """Return what the forward of `layers` draft layers (0: all) keeps for its backward, and the context's fc
    and norm; `remade` adds the layer, or the feed-forward, that checkpointing makes again.
    """
    size, hidden, context = dtype_bytes(setup.dtype), drafter.hidden_size, setup.context
    layers = layers or drafter.num_layers
    parts = (_compiled_layer if setup.compiled else _plain_layer)(drafter, setup)
    counts = dict.fromkeys(parts, layers)
    if setup.checkpointing == "layers":
        counts = dict.fromkeys(parts, 1 if remade else 0)
    elif setup.checkpointing == "mlp":
        counts["MLP"] = 1 if remade else 0
    live: Live = {
        f"draft layers: {name}": (counts[name] * part, f"a layer: {formula}")
        for name, (part, formula) in parts.items()
    }
    if setup.compiled:
        entry = (2 * context * hidden * size + 4 * context, "2 S H s: before and behind")
    else:
        norm = 4 + size
        entry = (context * hidden * (norm + size), "S H (4 + s + s): fp32 copy, normed, times weight")
        norms, formula = live["draft layers: norms"]
        last = setup.rows * hidden * norm
        live["draft layers: norms"] = (norms + last, f"{formula}; and the last one")
    inputs = layers * setup.rows * hidden * size if setup.checkpointing == "layers" else 0
    live["draft layers: inputs"] = (inputs, "layers x N H s: kept by checkpointing")
    return {"fc output and its norm": entry, **live}


def _plain_layer(drafter: Any, setup: TrainingSetup) -> Live:
    """Norms compute in fp32 and save that copy and the normed value, beside their output."""
    size, hidden, wide = dtype_bytes(setup.dtype), drafter.hidden_size, drafter.intermediate_size
    rows, context = setup.rows, setup.context
    norm = 4 + size
    q, kv = drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
    block = rows * (q * (norm + 2 * size) + 4 * drafter.num_heads + kv * norm)
    attention = block + (context + rows) * 2 * kv * size + context * kv * norm
    taps = drafter.conv_kernel_size
    return {
        "norms": (2 * rows * hidden * (norm + size), "2 N H (4 + 2 s)"),
        "attention": (attention, "N (q (4 + 3 s) + kv (4 + s)) + 2 (S + N) kv s"),
        "MLP": (rows * 4 * wide * size, "4 N I s: gate, its silu, up, product"),
        "convolutions": (
            8 * taps * rows * hidden * size,
            "8 t N H s: kernels and shifted inputs of the 4 convolutions of DFlash 2, t taps each",
        ),
    }


def _compiled_layer(drafter: Any, setup: TrainingSetup) -> Live:
    """torch cuts the joint graph of a layer where few bytes cross (`torch/_functorch/partitioners.py`).

    Kept are results of products and of attention, and what a product or attention of the backward reads;
    elementwise results between them are made again inside the kernels that need them. So a norm costs its
    input, which the stream is anyway, its normed output and a number a row; SwiGLU costs gate, up and their
    product. The tests hold this to that cut of the real layer, and to peaks measured on an H200.
    """
    size, hidden, wide = dtype_bytes(setup.dtype), drafter.hidden_size, drafter.intermediate_size
    rows, context, heads, kv_heads = setup.rows, setup.context, drafter.num_heads, drafter.num_kv_heads
    q, kv = heads * drafter.head_dim, kv_heads * drafter.head_dim
    scales = 4 * (rows * (2 + heads + kv_heads) + context * kv_heads)  # a norm's 1/rms, fp32
    attention = rows * (3 * q + kv) * size + context * kv * size + 2 * (context + rows) * kv * size
    convolutions = 0
    if taps := drafter.conv_kernel_size:
        deltas = 4 * taps * rows * (hidden // drafter.conv_group_size) * size
        convolutions = (4 * taps + 1) * rows * hidden * size + deltas
    return {
        "stream": (2 * rows * hidden * size, "2 N H s: its input, and what attention adds"),
        "norms": (2 * rows * hidden * size + scales, "2 N H s normed, a number a row and head"),
        "attention": (
            attention + 4 * rows * heads,
            "N (3 q + kv) s + S kv s + 2 (S + N) kv s + 4 N n_q",
        ),
        "MLP": (3 * rows * wide * size, "3 N I s: gate, up, product"),
        "convolutions": (convolutions, "(4 t + 1) N H s + 4 t N H s / g, g channels a group (DFlash 2)"),
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


def _selector(drafter: Any, setup: TrainingSetup, *, loss: bool) -> Live:
    """Return the gradients of the selector's codebooks, which come first, and in the loss one chunk's work: a
    bound, for candidates' rows are gathered and one codebook's gradient at a time is made whole.
    """
    rank, vocab = drafter.selector_rank, drafter.vocab_size
    if not rank:
        return {}
    size = dtype_bytes(setup.dtype)
    codebook = vocab * rank * size
    live: Live = {"selector gradients": (2 * codebook, "2 V r s: of both codebooks")}
    if loss:
        rows = min(setup.rows, max(1, SELECTOR_ELEMENTS // vocab))
        gathered = rows * drafter.selector_top_k * (2 * drafter.hidden_size + 3 * rank) * size
        chunk = rows * vocab * size + gathered + codebook
        live["selector's chunk"] = (chunk, "c V s + c k (2 H + 3 r) s + V r s")
    return live


# Head and loss


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


# Optimizers (drafter/optim.py): AdamW is one kernel a parameter on CUDA, and one for all norms, laid side by
# side; Muon orthogonalises matrices of one shape together, up to 2^26 elements; the codes of byte moments are
# made in plain tensor operations. The tests hold these to the counted step.

MUON_ELEMENTS = 1 << 26
_MOMENT_BYTES = {"adamw": 8.0, "adamw8bit": 2.03, "cpu-offload": 0.0}  # a parameter
_CODES = 46  # bytes an element while its codes are made: 11 fp32 copies and both codes
_HOST = 12  # master and both moments of one matrix, come from the host and go back
_MUON = 12  # the stack of matrices, the update and its scaled copy
_FLAT = 4  # the momentum ahead, in one buffer; and of one matrix the pull towards the gradient


def optimizer_moments(drafter: Any, optimizer: Optimizer, parameters: int) -> tuple[int, str]:
    """Return the bytes of the moments on the device."""
    if optimizer == "muon":
        matrices = drafter.num_layers * sum(count * size for count, size in _layer_matrices(drafter))
        return 8 * parameters - 4 * matrices, "8 P - 4 x matrices of the layers: one momentum each"
    return int(_MOMENT_BYTES[optimizer] * parameters), f"{_MOMENT_BYTES[optimizer]:g} P ({optimizer})"


def update_temporaries(
    drafter: Any, optimizer: Optimizer, largest: int, *, element: int, shards: int = 1
) -> tuple[int, str]:
    """Return the bytes that the update needs beside gradients and state.

    `largest`: elements of the largest matrix, of a sharded drafter of a process's share; `element`: bytes of
    one of the drafter's. Muon orthogonalises whole matrices, so of a sharded one all are gathered.
    """
    if optimizer == "muon":
        together, most = _together(drafter)
        flat = -(-_FLAT * (together + most) // shards)
        whole = 4 * together if shards > 1 else 0
        formula = "16 E + 4 m" if shards == 1 else f"16 E + 4 (E + m) / {shards}"
        text = f"{formula}: E elements of the matrices orthogonalised together, m of one of them"
        return _MUON * together + flat + whole, text
    if optimizer == "adamw8bit":
        return _CODES * largest, "largest matrix x 11 fp32 copies: codes are made in plain tensor operations"
    if optimizer == "cpu-offload":
        return _HOST * largest, "largest matrix x 3 fp32 copies: master and moments come and go"
    norms = drafter.num_layers * 2 * (drafter.hidden_size + drafter.head_dim) + 2 * drafter.hidden_size
    state = 8 if element == 4 else 12
    return (2 * element + state) * norms // shards, "of the norms, side by side: weights, gradients and state"


def _layer_matrices(drafter: Any) -> list[tuple[int, int]]:
    """(how many of one shape, elements of each) of a layer's matrices; DFlash 2 has two more for kernels."""
    hidden = drafter.hidden_size
    q, kv = drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
    kernels = (
        2 * drafter.conv_kernel_size * (hidden // drafter.conv_group_size if drafter.conv_kernel_size else 0)
    )
    sizes: dict[int, int] = {}
    for count, width in ((2, q), (2, kv), (3, drafter.intermediate_size), (2, kernels)):
        sizes[hidden * width] = sizes.get(hidden * width, 0) + count
    return [(count, size) for size, count in sizes.items()]


def _together(drafter: Any) -> tuple[int, int]:
    """Elements of the largest group that Muon orthogonalises at once, and of one of its matrices."""
    groups = [(drafter.num_layers * count, size) for count, size in _layer_matrices(drafter) if size]
    return max((min(count, max(1, MUON_ELEMENTS // size)) * size, size) for count, size in groups)


# Rows on their way, a live target, shards

_ROW_BYTES = 2  # an element of a row's states: bf16 wherever they come from


def beside_the_step(shape: TargetShape, drafter: Any, setup: TrainingSetup, *, cuda: bool) -> Live:
    """Return the rows that wait, the noisy copy of the one in use, and what a recorded forward holds."""
    final = setup.soft_targets or setup.final_states or setup.live
    taps, hidden = len(drafter.tap_ids), drafter.hidden_size
    row = setup.context * (taps + final) * hidden * _ROW_BYTES
    size = dtype_bytes(setup.dtype)
    states = setup.context * taps * hidden
    live: Live = {
        "rows ahead": (setup.rows_ahead * row, f"{setup.rows_ahead} x S (K + final) H 2"),
        "noisy states": (states * size if setup.noise else 0, "S K H s"),
    }
    if setup.recorded:
        kept = setup.context * (taps + 1) * hidden * _ROW_BYTES
        live["recorded forward's states"] = (kept, "S (K + 1) H 2: the graph's own outputs")
        live["recorded forward's pool"] = (
            target_forward(shape, drafter, setup, cuda=cuda)["target's forward of a row"][0],
            "one forward's tensors: reserved for the graph, live in none of its pauses",
        )
    return live


def target_forward(shape: TargetShape, drafter: Any, setup: TrainingSetup, *, cuda: bool) -> Live:
    """Return what the live target's forward of one row holds at its worst moment beside its weights.

    A row is one sequence of S tokens, or documents padded to about as many (each at least 64 long where
    layers are linear).
    """
    one = ExtractionSetup(
        batch=1,
        length=setup.context,
        tap_ids=tuple(drafter.tap_ids),
        dtype=setup.target_dtype or setup.dtype,
        store_final=True,
        kernels="fla" if cuda else "torch",
        fused=cuda and shape.delta is not None,  # what the loop asks for (`speed_up`)
    )
    account = predict_extraction(shape, one, cuda=False)
    size = account.live - account.terms["target weights"]
    return {"target's forward of a row": (size, f"1 x S tokens, in {account.moment}")}


def resident_target_bytes(shape: TargetShape, setup: TrainingSetup) -> int:
    """Return the bytes of a live target on the training device beside the head and embedding that the loss
    uses: its layers, and ends of its own where it cannot share those.
    """
    if not setup.live:
        return 0
    layers = sum(map(shape.layer_parameters, range(shape.layers)))
    own = setup.head_elsewhere or setup.target_dtype not in ("", setup.dtype)
    ends = shape.vocab * shape.hidden + shape.hidden + shape.head_parameters() if own else 0
    return (layers + ends) * dtype_bytes(setup.target_dtype or setup.dtype)


def gathered(drafter: Any, setup: TrainingSetup, parameters: int, *, backward: bool) -> Live:
    """Return what FSDP gathers: the fc, which stays, and in the backward two layers with their gradients.

    One layer is used while the next one comes; gradients are whole, and copied once to be scattered. (A
    checkpoint gathers tensor by tensor, which is less.)
    """
    if setup.shards == 1:
        return {}
    fc = len(drafter.tap_ids) * drafter.hidden_size**2
    size = dtype_bytes(setup.dtype)
    layer = (parameters - fc) // drafter.num_layers
    if not backward:
        return {"gathered weights": (fc * size, "fc s: the root stays gathered")}
    return {
        "gathered weights": ((fc + 2 * layer) * size, "fc and 2 layers: one in use, one coming"),
        "gathered gradients": (2 * layer * size, "2 x a layer's: whole, and on their way to be summed"),
    }


# Processes that do not train: a target that feeds drafters, a head on a GPU of its own


def target_process(shape: TargetShape, drafter: Any, setup: TrainingSetup, *, cuda: bool = True) -> Account:
    """Return the account of a process that makes rows for drafters (`drafter.pipeline.RowServer`).

    Of `setup` count the context, the target's dtype, and whether its forward is a recorded graph. While a row
    is made, the one before may still be on its way to its drafter's slot.
    """
    taps, hidden = len(drafter.tap_ids), drafter.hidden_size
    weights = (shape.body_parameters() + shape.head_parameters()) * dtype_bytes(
        setup.target_dtype or setup.dtype
    )
    row = setup.context * (taps + 1) * hidden * _ROW_BYTES
    forward = target_forward(shape, drafter, setup, cuda=cuda)
    always: Live = {"target weights": (weights, "all layers, embedding and head")}
    always |= on_cuda(1) if cuda else {}
    sent: Live = {"rows on their way": (row, "S (K + 1) H 2: the row before")}
    moments = [("the target's forward of a row", {**always, **forward, **sent})]
    if setup.recorded:
        pool = forward["target's forward of a row"][0]
        replayed: Live = {
            "recorded forward's states": (row, "S (K + 1) H 2: the graph's own outputs"),
            "recorded forward's pool": (pool, "one forward's tensors: reserved for the graph"),
            "rows on their way": (2 * row, "2 S (K + 1) H 2: a copy of the outputs, and the row before"),
        }
        moments.append(("a replay of the recorded forward", {**always, **replayed}))
    account = account_of(f"target, rows of {setup.context} tokens", moments)
    return account.fragmented(FRAGMENTS[setup.expandable]) if cuda else account


def head_process(shape: TargetShape, drafter: Any, setup: TrainingSetup, *, cuda: bool = True) -> Account:
    """Return the account of what a drafter's process holds on the GPU of its frozen head."""
    setup = with_chunk(setup, shape.vocab, cuda=cuda)
    size = dtype_bytes(setup.dtype)
    matrix = shape.vocab * shape.hidden * size
    stream = setup.rows * shape.hidden * size
    final = setup.context * shape.hidden * size if setup.soft_targets else 0
    live: Live = {
        "head and embedding": (matrix * (1 if shape.tied else 2), "V H s each (once if tied)"),
        "block states": (2 * stream, "2 N H s: hidden states that came, and their gradient"),
        "target final states": (final, "S H s: a copy"),
        **loss_terms(shape.vocab, drafter.hidden_size, setup),
        **(on_cuda(2) if cuda else {}),
    }
    account = account_of(f"head of {setup.anchors} x {setup.block_size}", [("the loss", live)])
    return account.fragmented(FRAGMENTS[setup.expandable]) if cuda else account


def target_head_process(shape: TargetShape, setup: TrainingSetup, *, cuda: bool = True) -> Account:
    """Return the account of what a drafter's process holds on the GPU that makes the target's logits."""
    chunk, size = with_chunk(setup, shape.vocab, cuda=cuda).chunk, dtype_bytes(setup.dtype)
    live: Live = {
        "head": (shape.vocab * shape.hidden * size, "V H s"),
        "target final states": (2 * setup.context * shape.hidden * size, "2 S H s: as they came, and normed"),
        "target logits": (chunk * shape.vocab * 4, "c V 4: of a chunk"),
        **(on_cuda(1) if cuda else {}),
    }
    return account_of("the target's side of the loss", [("the target's logits", live)])


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
