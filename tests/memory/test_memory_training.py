"""The analytic account of training against counted steps of the real drafter and loss, and the incidents."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import CARD_GIB, DFLASH2, SHAPE, step
from cases import DRAFTER as DRAFTER_27B
from support.fake_memory.tracker import LabelledTensors
from support.fake_memory.training import CountedStep, count_training
from support.tiny_targets import tiny_config
from support.wording import check_wording, refused
from torch.utils.checkpoint import checkpoint

from dflash_lab.drafter import optim
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.model import Drafter
from dflash_lab.drafter.optim import Optimizer, OptimizerConfig
from dflash_lab.errors import InputError
from dflash_lab.extraction import fused_layers
from dflash_lab.memory import account as accounts
from dflash_lab.memory import training
from dflash_lab.memory.measure import LiveTensors, training_parts
from dflash_lab.memory.shapes import GIB, target_shape
from dflash_lab.memory.training import (
    drafter_parameters,
    loss_terms,
    optimizer_moments,
    predict_training,
    update_temporaries,
    with_chunk,
)
from dflash_lab.models.source import shape_config


def drafter_of(name):
    config = shape_config(name)
    if "27b" in name:
        return config, DRAFTER_27B
    layers = 2 if "smol" in name else 5
    return config, DrafterConfig.from_target(config, mask_token_id=17, num_layers=layers, block_size=16)


def account(*sizes, **options):
    """What the 27B target's drafter takes."""
    return predict_training(SHAPE, DRAFTER_27B, step(*sizes, **options))


def counted_and_predicted(name, setup):
    config, drafter = drafter_of(name)
    setup = with_chunk(setup, config.vocab_size)
    counted = count_training(config, drafter, setup)
    return counted, predict_training(target_shape(config), drafter, setup, cuda=False)


LARGE, SMALL = "qwen3.6-27b", "smollm2-135m"


@pytest.mark.parametrize(
    "name, setup",
    [
        (LARGE, step(chunk=1024)),
        (LARGE, step(256)),
        (LARGE, step(512, 2048, 16, soft_targets=False)),
        ("qwen3-8b", step(64, 8192, 16)),
        ("qwen3-8b", step(256, 1024, 16, dtype="float32")),
        (SMALL, step(1024, 4096, 24)),
    ],
    ids=["chunk", "block 24", "hard", "context", "float32", "small"],
)
def test_formulas_agree_with_the_counted_step(name, setup):
    counted, predicted = counted_and_predicted(name, setup)
    assert predicted.moving == pytest.approx(counted.moving, rel=0.03)
    for term in ("drafter weights", "fp32 masters", "optimizer moments"):
        assert predicted.terms.get(term, 0) == counted.terms.get(term, 0)
    ends = "head and embedding"
    assert predicted.terms[ends] == pytest.approx(counted.terms[ends], rel=1e-4)


@pytest.mark.parametrize("anchors", [8, 512])  # the peak is the update's, then the loss's
@pytest.mark.parametrize("name, optimizer", [(SMALL, "adamw8bit"), ("qwen3-8b", "muon")])
def test_other_optimizers_agree_too(name, optimizer, anchors):
    counted, predicted = counted_and_predicted(name, step(anchors, 1024, 16, optimizer=optimizer))
    assert predicted.live == pytest.approx(counted.live, rel=0.03)
    moments = "optimizer moments"
    assert predicted.terms[moments] == pytest.approx(counted.terms[moments], rel=0.1)


@pytest.mark.parametrize("name, optimizer", [(SMALL, "muon"), (LARGE, "adamw"), (LARGE, "muon")])
def test_the_buffers_of_an_update_are_those_counted(name, optimizer):
    counted, predicted = counted_and_predicted(name, step(8, 16, 8, optimizer=optimizer, chunk=8))
    assert predicted.moment == "the update" and counted.moment.startswith("update")
    assert predicted.terms["update temporaries"] == pytest.approx(counted.terms["update"], rel=0.02)


def test_muon_keeps_one_momentum_of_the_kernels_of_the_second_kind_too():
    drafter = DrafterConfig.from_target(
        tiny_config("llama"), mask_token_id=260, num_layers=3, block_size=4, is_causal=False, **DFLASH2
    )
    state = Optimizer(Drafter(drafter).named_parameters(), OptimizerConfig(kind="muon")).tensors()
    kept, _ = optimizer_moments(drafter, "muon", drafter_parameters(drafter)[0])
    assert kept == sum(tensor.nbytes for tensor in state.values())


def test_a_sharded_muon_gathers_the_matrices_it_orthogonalises():
    _, drafter = drafter_of("qwen3-8b")
    (alone, _), (share, _) = (update_temporaries(drafter, "muon", 1, element=2, shards=n) for n in (1, 4))
    together = 4 * 4096 * 4096
    assert alone == 16 * together + together
    assert share == 16 * together + (4 * together + together) // 4


def test_an_optimizer_on_the_host_leaves_weights_and_gradients():
    here, there = (account(64, 1024, 16, optimizer=kind) for kind in ("adamw", "cpu-offload"))
    assert here.static - there.static == 12 * drafter_parameters(DRAFTER_27B)[0]


def test_recomputed_layers_agree_too():
    setup = step(512, 2048, 16, checkpointing="layers")
    counted, predicted = counted_and_predicted("qwen3-8b", setup)
    assert predicted.moving == pytest.approx(counted.moving, rel=0.11)
    whole, _ = counted_and_predicted("qwen3-8b", replace(setup, checkpointing="none"))
    assert counted.moving < 0.5 * whole.moving


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
@pytest.mark.parametrize("extra", [{}, DFLASH2], ids=["first", "second"])
def test_parameters_equal_the_real_drafter(kind, extra):
    drafter = DrafterConfig.from_target(
        tiny_config(kind), mask_token_id=260, num_layers=3, block_size=4, is_causal=False, **extra
    )
    sizes = [parameter.numel() for parameter in Drafter(drafter).parameters()]
    assert drafter_parameters(drafter) == (sum(sizes), max(sizes))


def test_the_27b_drafter_has_its_published_size():
    assert drafter_parameters(DRAFTER_27B)[0] / 1e9 == pytest.approx(1.730, abs=0.001)
    terms = account(8, 64, 16).terms
    names = ("drafter weights", "fp32 masters", "optimizer moments", "gradients")
    assert sum(terms[name] for name in names) / 1e9 == pytest.approx(27.7, abs=0.1)  # 16 bytes a parameter


def test_a_real_step_on_the_cpu_holds_what_was_counted_on_fake_tensors():
    """The same code on real tensors, but for the device's path (dense attention, widened matmuls)."""
    config = tiny_config("qwen3", vocab_size=4096)
    drafter = DrafterConfig.from_target(config, mask_token_id=260, num_layers=2, block_size=8)
    setup = step(16, 200, 8, dtype="float32", chunk=56)
    live = LabelledTensors()
    torch.manual_seed(0)
    model, head, row = training_parts(target_shape(config), drafter, setup, torch.device("cpu"))
    with live:
        live.add(model.parameters(), "weights")
        live.add([head.weight, head.embedding_weight, row.taps, row.final], "inputs")
        counted_step = CountedStep(model, head, row, setup, live)
        counted_step.run()
        live.start_peak_here()
        counted_step.run()
    counted = count_training(config, drafter, setup, row_pass="torch")
    assert live.peak - counted.static == pytest.approx(counted.moving, rel=0.35)
    assert live.by_label()["optimizer moments"] == counted.terms["optimizer moments"]


def test_incident_logits_of_24576_positions():
    naive = account(loss="naive")
    assert naive.terms["logits"] / 1e9 == pytest.approx(24.4, abs=0.05)
    check_wording(naive.notes[0])
    assert naive.peak_gib > CARD_GIB
    for loss in ("loop", "concat"):  # chunks under autograd, or concatenated, save nothing
        chunked = account(loss=loss)
        assert chunked.terms["logits"] == naive.terms["logits"] and chunked.peak_gib > CARD_GIB
    fused = account()
    assert "logits" not in fused.terms and fused.peak_gib < CARD_GIB
    assert sum(size for size, _ in loss_terms(248320, 5120, with_chunk(step(), 248320)).values()) < 1.5 * GIB


@pytest.mark.parametrize("anchors, block", [(768, 16), (512, 24)])
def test_incident_both_shapes_of_12288_positions_are_the_same(anchors, block):
    naive = account(anchors, 4096, block, loss="naive")
    assert "12,288 positions make 6.1 GB a logits tensor" in naive.notes[0]
    assert naive.terms["logits"] / 2 / 1e9 == pytest.approx(6.1, abs=0.05)


def test_incident_data_parallel_changes_nothing_on_a_device():
    one, two = (account(data_parallel=n) for n in (1, 2))
    assert dict(one.terms) == dict(two.terms)
    check_wording(two.notes[-1])


def test_a_chunk_not_given_is_the_one_the_loss_plans():
    assert with_chunk(step(), 248320).chunk == 512  # 1.25 GiB of buffers: two fp32 sides, the bf16 gradient
    assert account(chunk=512).terms == account().terms


@pytest.mark.parametrize("loss, measured_gib", [("naive", 91.2), ("loop", 36.5), ("checkpoint", 4.1)])
def test_loss_paths_match_what_an_h200_measured(loss, measured_gib):
    terms = loss_terms(248320, 5120, step(loss=loss, chunk=1024))
    assert sum(size for size, _ in terms.values()) / GIB == pytest.approx(measured_gib, rel=0.06)


def _ce_kl(x, t, w, y):
    z, s = (x @ w.T).float(), (t @ w.T).float()
    kl = F.kl_div(F.log_softmax(z, -1), F.log_softmax(s, -1), reduction="sum", log_target=True)
    return F.cross_entropy(z, y, reduction="sum") + kl


def test_autograd_keeps_every_chunk_of_a_loop():
    """Between forward and backward a loop holds what the whole does; recomputing holds almost nothing."""
    rows, vocab, hidden, chunk = 512, 2048, 32, 64
    kept = {}
    for way in ("whole", "loop", "checkpoint"):
        x = torch.zeros(rows, hidden, requires_grad=True)
        t, w, y = torch.zeros(rows, hidden), torch.zeros(vocab, hidden), torch.zeros(rows, dtype=torch.long)
        with LiveTensors() as live:
            parts = [slice(None)] if way == "whole" else [slice(i, i + chunk) for i in range(0, rows, chunk)]
            run = (lambda *a: checkpoint(_ce_kl, *a, use_reentrant=False)) if way == "checkpoint" else _ce_kl
            loss = sum(run(x[part], t[part], w, y[part]) for part in parts)
            kept[way] = live.current
            loss.backward()
    assert kept["loop"] == pytest.approx(kept["whole"], rel=0.01)
    assert kept["checkpoint"] < 0.05 * kept["whole"]


def test_placement_moves_the_target():
    here, away = (account(64, 1024, 16, placement=place) for place in ("same device", "other device"))
    assert here.peak - away.peak == here.terms["target weights"] > 44 * GIB
    assert "target weights" not in away.terms


@pytest.mark.parametrize("wrong", [{"loss": "fast"}, {"anchors": 0}, {"chunk": -1}])
def test_options_that_cannot_be_are_refused(wrong):
    with refused(InputError):
        step(**wrong)


def test_what_the_formulas_take_from_the_code_is_what_stands_there():
    """The accounts import no torch, so they repeat two numbers."""
    assert training.MUON_ELEMENTS == optim.MUON_ELEMENTS and accounts._TILE == fused_layers._ROWS
