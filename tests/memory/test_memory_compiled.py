"""Compiled draft layers: the formulas against the cut that torch makes of the real layer, and against peaks
of compiled training measured on an H200.
"""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.fake_memory.tracker import LabelledTensors
from torch import Tensor

from dflash_lab.drafter import objective
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.model import ContextStates, Layer, rope
from dflash_lab.memory.shapes import FULL, GIB, TargetShape, TrainingSetup
from dflash_lab.memory.training import SELECTOR_ELEMENTS, layers_kept, predict_training

RESULTS = Path(__file__).parents[2] / "benchmarks/results/h200/training.json"
SIZES = dict(num_layers=5, mask_token_id=4, num_target_layers=64)
LARGE = DrafterConfig(
    vocab_size=248_320, hidden_size=5120, intermediate_size=17_408, num_heads=32, num_kv_heads=8,
    head_dim=128, block_size=24, tap_ids=(1, 16, 31, 46, 61), rope_theta=1e7, **SIZES,
)  # fmt: skip
SMALL = DrafterConfig(
    vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64,
    block_size=8, tap_ids=(1, 8, 14, 21, 27), rope_theta=1e5, **SIZES,
)  # fmt: skip
LOOP = dict(rows_ahead=3, final_states=True)  # two rows waiting, one on its way, with final states


def shape_of(drafter):
    """A target whose ends are as wide as the drafter, as the benchmark makes them."""
    return TargetShape(
        "qwen3", drafter.hidden_size, drafter.intermediate_size, drafter.num_heads, drafter.num_kv_heads,
        drafter.head_dim, drafter.vocab_size, (FULL,), (None,), (False,), False, False, False, True, False,
        drafter.head_dim, None, None,
    )  # fmt: skip


@torch.library.custom_op("dflash_test::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """An attention that the cut cannot look into, like flex attention: output and log-sum-exp."""
    return torch.zeros_like(q), q.new_zeros(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("dflash_test::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Its backward, which reads all of it."""
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


attention.register_fake(lambda q, k, v: (torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)))
attention_backward.register_fake(lambda grad, q, k, v, *_: tuple(torch.empty_like(x) for x in (q, k, v)))
attention.register_autograd(
    lambda ctx, grad, _sums: attention_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


def attend(q, kb, vb, kc, vc):
    """As the drafter's `flex_attend` calls it."""
    k = torch.cat([kc, kb.flatten(0, 1)]).transpose(0, 1)[None]
    v = torch.cat([vc, vb.flatten(0, 1)]).transpose(0, 1)[None]
    out, _ = attention(q.flatten(0, 1).transpose(0, 1)[None], k, v)
    return out[0].transpose(0, 1).unflatten(0, q.shape[:2])


def kept_by_the_cut(config, anchors, context):
    """Bytes that one compiled layer keeps for its backward beside weights, context and rotary angles."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    forwards = []

    def keep(graph, _inputs):
        forwards.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=lambda graph, _inputs: make_boxed_func(graph.forward),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    layer = Layer(config, 0).to(torch.bfloat16)
    ways = dict(dtype=torch.bfloat16, requires_grad=True)
    h = torch.zeros(anchors, config.block_size, config.hidden_size, **ways)
    ctx = torch.zeros(context, config.hidden_size, **ways)
    slots = torch.arange(anchors * config.block_size).view(anchors, -1)
    angles = [rope(p, config.head_dim, 1e5, torch.bfloat16) for p in (slots, torch.arange(context))]
    run = torch.compile(layer.forward, backend=backend, dynamic=False)
    run(h, angles[0], ContextStates(ctx, angles[1]), attend).sum().backward()
    (output,) = (node for node in forwards[0].graph.nodes if node.op == "output")
    made = [node for node in output.args[0][1:] if node.op != "placeholder"]
    storages = {  # the attention's output is kept under two shapes
        (node.meta["val"].dtype, node.meta["val"].untyped_storage()._cdata): node.meta["val"].nbytes
        for node in made
    }
    assert len(made) - len(storages) <= 1
    return sum(storages.values()) + h.nbytes


def small(**second):
    """A small drafter of one layer, of the first kind or of the second."""
    return DrafterConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=200, num_layers=1, num_heads=6, num_kv_heads=2,
        head_dim=16, block_size=4, mask_token_id=9, tap_ids=(1, 2), num_target_layers=4, rope_theta=1e5,
        **second,
    )  # fmt: skip


def dflash2(taps, group=16):
    """Fields of a drafter of the second kind."""
    sizes = dict(conv_kernel_size=taps, conv_group_size=group, selector_rank=8, selector_top_k=4)
    return dict(**sizes, is_causal=False)


@pytest.mark.parametrize("second", [{}, dflash2(2), dflash2(2, 8), dflash2(3)])
def test_the_formulas_are_the_cut_that_torch_makes_of_a_layer(second):
    config = small(**second)
    kept = layers_kept(config, TrainingSetup(anchors=10, context=56, block_size=4, compiled=True))
    layer = sum(size for name, (size, _) in kept.items() if name.startswith("draft layers"))
    assert layer == kept_by_the_cut(config, 10, 56)
    assert bool(second) == (kept.get("draft layers: convolutions", (0,))[0] > 0)


@pytest.mark.parametrize("taps", [2, 3])
def test_plain_convolutions_keep_kernels_and_shifted_inputs(taps):
    """The real layer's forward with and without them, every live tensor counted."""
    config, anchors = small(**dflash2(taps)), 300
    live = {}
    for name, chosen in {"with": config, "without": small()}.items():
        layer = Layer(chosen, 0)
        h = torch.zeros(anchors, 4, 64, requires_grad=True)
        ctx = torch.zeros(56, 64, requires_grad=True)
        slots = torch.arange(anchors * 4).view(anchors, 4)
        angles = [rope(p, 16, 1e5, torch.float32) for p in (slots, torch.arange(56))]
        with LabelledTensors() as counted:
            out = layer(h, angles[0], ContextStates(ctx, angles[1]), lambda q, *_: q * 1.0)
            live[name] = counted.current
        del out
    setup = TrainingSetup(anchors=anchors, context=56, block_size=4, dtype="float32")
    kept, _ = layers_kept(config, setup)["draft layers: convolutions"]
    assert live["with"] - live["without"] == pytest.approx(kept, rel=0.01)


def test_a_second_drafter_asks_for_more():
    drafter = replace(LARGE, **dflash2(2) | dict(selector_rank=256, selector_top_k=16))
    for compiled in (True, False):
        setup = TrainingSetup(anchors=1024, context=8192, block_size=24, compiled=compiled)
        first, other = (predict_training(shape_of(d), d, setup) for d in (LARGE, drafter))
        convolutions, _ = layers_kept(drafter, setup)["draft layers: convolutions"]
        assert other.terms["draft layers: convolutions"] == convolutions > 10 * GIB
        assert SELECTOR_ELEMENTS == objective.SELECTOR_ELEMENTS
        assert other.live - first.live >= convolutions + other.terms["selector gradients"]


ROWS = dict(anchors=1024, context=8192, block_size=24)
SHORT = dict(anchors=3072, context=8192, block_size=8, soft_targets=False, **LOOP)


@pytest.mark.parametrize(
    "drafter, sizes, path",
    [
        (LARGE, dict(**ROWS, noise=True, **LOOP), ("large", "peak_gib")),
        (LARGE, ROWS, ("large", "loss_beside_peers", "ours", "peak_gib")),  # the step outside the loop
        (SMALL, SHORT, ("small", "cross-entropy, AdamW", "peak_gib")),
        (SMALL, dict(**SHORT, optimizer="muon"), ("small", "D-PACE, Muon", "peak_gib")),
    ],
    ids=["large in the loop", "large alone", "small", "small, Muon"],
)
def test_compiled_training_takes_what_an_h200_measured(drafter, sizes, path):
    measured = functools.reduce(lambda part, name: part[name], path, json.loads(RESULTS.read_text())["cases"])
    found = {
        compiled: predict_training(shape_of(drafter), drafter, TrainingSetup(compiled=compiled, **sizes))
        for compiled in (True, False)
    }
    tensors = {way: (account.live - account.terms["outside torch"]) / GIB for way, account in found.items()}
    assert tensors[True] == pytest.approx(measured, rel=0.02)
    assert tensors[False] > 1.15 * measured  # what was asked for before compiled layers were understood


def test_compiled_layers_under_checkpointing_keep_their_inputs():
    sizes = dict(anchors=1024, context=4096, block_size=24, compiled=True)
    plain, inputs = (
        predict_training(shape_of(LARGE), LARGE, TrainingSetup(checkpointing=how, **sizes))
        for how in ("none", "layers")
    )
    assert inputs.live < plain.live
    assert inputs.terms["draft layers: MLP"] == plain.terms["draft layers: MLP"] // 5
    setup = TrainingSetup(checkpointing="layers", **sizes)
    assert layers_kept(LARGE, setup)["draft layers: inputs"][0] == 5 * 1024 * 24 * 5120 * 2
