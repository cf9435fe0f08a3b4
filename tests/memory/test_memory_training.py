"""The analytic account of training against counted steps of the real drafter and loss, and the incidents."""

import time

import pytest
import torch
import torch.nn.functional as F
from support.fake_memory.tracker import LabelledTensors
from support.fake_memory.training import CountedStep, count_training
from support.tiny_targets import tiny_config
from support.wording import refused
from torch.utils.checkpoint import checkpoint

from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.model import Drafter
from dflash_lab.errors import InputError
from dflash_lab.memory.measure import training_parts
from dflash_lab.memory.shapes import GIB, TrainingSetup, target_shape
from dflash_lab.memory.training import (
    drafter_parameters,
    loss_terms,
    optimizer_moments,
    predict_training,
    update_temporaries,
    with_chunk,
)
from dflash_lab.models.source import shape_config

CARD_GIB = 94.97


def drafter_of(name):
    config = shape_config(name)
    options = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128} if "27b" in name else {}
    layers = 2 if "smol" in name else 5
    drafter = DrafterConfig.from_target(config, mask_token_id=17, num_layers=layers, block_size=16, **options)
    return config, drafter


def moving(account):
    return account.moving - account.terms.get("fragmentation", 0)


SETUPS = [
    TrainingSetup(anchors=1024, context=4096, block_size=24, chunk=1024),
    TrainingSetup(anchors=256, context=4096, block_size=24),
    TrainingSetup(anchors=64, context=8192, block_size=16),
    TrainingSetup(anchors=512, context=2048, block_size=16, soft_targets=False),
    TrainingSetup(anchors=256, context=1024, block_size=16, dtype="float32"),
]


@pytest.mark.parametrize(
    "setup", SETUPS, ids=lambda s: f"{s.anchors}x{s.block_size}-{s.dtype}-{s.chunk}-{s.soft_targets}"
)
@pytest.mark.parametrize("name", ["qwen3.6-27b", "qwen3-8b", "smollm2-135m"])
def test_formulas_agree_with_the_counted_step(name, setup):
    config, drafter = drafter_of(name)
    setup = with_chunk(setup, config.vocab_size)
    start = time.monotonic()
    counted, _ = count_training(config, drafter, setup)
    assert time.monotonic() - start < 20
    account = predict_training(target_shape(config), drafter, setup, cuda=False)
    assert moving(account) == pytest.approx(moving(counted), rel=0.03)
    for term in ("drafter weights", "fp32 masters", "optimizer moments"):
        assert account.terms.get(term, 0) == counted.terms.get(term, 0)
    assert account.terms["head and embedding"] == pytest.approx(counted.terms["head and embedding"], rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw8bit", "muon"])
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-8b"])
def test_other_optimizers_agree_too(name, optimizer):
    config, drafter = drafter_of(name)
    for anchors in (8, 512):  # the peak is the update's, then the loss's
        setup = TrainingSetup(anchors=anchors, context=1024, block_size=16, optimizer=optimizer)
        setup = with_chunk(setup, config.vocab_size)
        counted, _ = count_training(config, drafter, setup)
        account = predict_training(target_shape(config), drafter, setup, cuda=False)
        assert account.live == pytest.approx(counted.live, rel=0.03)
        assert account.terms["optimizer moments"] == pytest.approx(
            counted.terms["optimizer moments"], rel=0.1
        )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-8b", "qwen3.6-27b"])
def test_the_buffers_of_an_update_are_those_counted(name, optimizer):
    config, drafter = drafter_of(name)
    setup = TrainingSetup(anchors=8, context=16, block_size=8, optimizer=optimizer, chunk=8)
    counted, _ = count_training(config, drafter, setup)
    account = predict_training(target_shape(config), drafter, setup, cuda=False)
    assert account.moment == "the update" and counted.moment.startswith("update")
    assert account.terms["update temporaries"] == pytest.approx(counted.terms["update"], rel=0.02)


def test_muon_keeps_one_momentum_of_the_kernels_of_the_second_kind_too():
    from dflash_lab.drafter.optim import Optimizer, OptimizerConfig

    second = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
    drafter = DrafterConfig.from_target(
        tiny_config("llama"), mask_token_id=260, num_layers=3, block_size=4, is_causal=False, **second
    )
    state = Optimizer(Drafter(drafter).named_parameters(), OptimizerConfig(kind="muon")).tensors()
    kept, _ = optimizer_moments(drafter, "muon", drafter_parameters(drafter)[0])
    assert kept == sum(tensor.nbytes for tensor in state.values())


def test_a_sharded_muon_gathers_the_matrices_it_orthogonalises():
    _, drafter = drafter_of("qwen3-8b")
    (alone, _), (share, _) = (update_temporaries(drafter, "muon", 1, element=2, shards=n) for n in (1, 4))
    together = 4 * 4096 * 4096
    assert alone == 16 * together + 4 * 4096 * 4096
    assert share == 16 * together + (4 * together + 4 * 4096 * 4096) // 4


def test_an_optimizer_on_the_host_leaves_weights_and_gradients():
    config, drafter = drafter_of("qwen3-8b")
    here, there = (
        predict_training(
            config, drafter, TrainingSetup(anchors=64, context=1024, optimizer=kind, block_size=16)
        )
        for kind in ("adamw", "cpu-offload")
    )
    assert here.static - there.static == 12 * drafter_parameters(drafter)[0]
    with refused(InputError):
        setup = TrainingSetup(anchors=64, context=1024, block_size=16, optimizer="cpu-offload")
        count_training(config, drafter, setup)


def test_recomputed_layers_agree_too():
    config, drafter = drafter_of("qwen3-8b")
    setup = TrainingSetup(anchors=512, context=2048, block_size=16, checkpointing="layers")
    counted, _ = count_training(config, drafter, setup)
    account = predict_training(target_shape(config), drafter, setup, cuda=False)
    assert moving(account) == pytest.approx(moving(counted), rel=0.11)
    assert moving(counted) < 0.5 * moving(
        count_training(config, drafter, TrainingSetup(anchors=512, context=2048, block_size=16))[0]
    )


def test_parameters_equal_the_real_drafter():
    for kind in ("llama", "qwen3_5"):
        for extra in (
            {},
            {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4},
        ):
            drafter = DrafterConfig.from_target(
                tiny_config(kind), mask_token_id=260, num_layers=3, block_size=4, is_causal=False, **extra
            )
            model = Drafter(drafter)
            sizes = [parameter.numel() for parameter in model.parameters()]
            assert drafter_parameters(drafter) == (sum(sizes), max(sizes))


def test_the_27b_drafter_has_its_published_size():
    _, drafter = drafter_of("qwen3.6-27b")
    parameters, _ = drafter_parameters(drafter)
    assert parameters / 1e9 == pytest.approx(1.730, abs=0.001)
    account = predict_training(
        *drafter_of("qwen3.6-27b"), TrainingSetup(anchors=8, context=64, block_size=16)
    )
    static = sum(
        account.terms[name] for name in ("drafter weights", "fp32 masters", "optimizer moments", "gradients")
    )
    assert static / 1e9 == pytest.approx(27.7, abs=0.1)  # 16 bytes a parameter


def test_a_real_step_on_the_cpu_holds_what_was_counted_on_fake_tensors():
    """The same code on real tensors: what differs is the path of the device (dense attention, widened
    matmuls).
    """
    config = tiny_config("qwen3", vocab_size=4096)
    drafter = DrafterConfig.from_target(config, mask_token_id=260, num_layers=2, block_size=8)
    setup = TrainingSetup(anchors=16, context=200, block_size=8, dtype="float32", soft_targets=True, chunk=56)
    live = LabelledTensors()
    torch.manual_seed(0)
    model, head, row = training_parts(target_shape(config), drafter, setup, torch.device("cpu"))
    with live:
        live.add(model.parameters(), "weights")
        live.add([head.weight, head.embedding_weight, row.taps, row.final], "inputs")
        step = CountedStep(model, head, row, setup, live)
        step.run()
        live.start_peak_here()
        step.run()
    counted, _ = count_training(config, drafter, setup, row_pass="torch")
    static = counted.static
    assert live.peak - static == pytest.approx(moving(counted), rel=0.35)
    assert live.by_label()["optimizer moments"] == counted.terms["optimizer moments"]


# --- incidents, with their numbers
# -----------------------------------------------------------------------------------


def test_incident_logits_of_24576_positions():
    config, drafter = drafter_of("qwen3.6-27b")
    account = predict_training(
        config, drafter, TrainingSetup(anchors=1024, context=4096, block_size=24, loss="naive")
    )
    assert account.terms["logits"] / 1e9 == pytest.approx(24.4, abs=0.05)
    assert "24,576 positions make 12.2 GB a logits tensor in bf16, 24.4 GB for both sides" in account.notes[0]
    assert account.peak_gib > CARD_GIB


@pytest.mark.parametrize("loss", ["loop", "concat"])
def test_incident_chunks_under_autograd_or_concatenated_save_nothing(loss):
    config, drafter = drafter_of("qwen3.6-27b")
    naive = predict_training(
        config, drafter, TrainingSetup(anchors=1024, context=4096, block_size=24, loss="naive")
    )
    chunked = predict_training(
        config, drafter, TrainingSetup(anchors=1024, context=4096, block_size=24, loss=loss)
    )
    assert chunked.terms["logits"] == naive.terms["logits"]
    assert chunked.peak_gib > CARD_GIB


@pytest.mark.parametrize("anchors, block", [(768, 16), (512, 24)])
def test_incident_both_shapes_of_12288_positions_are_the_same(anchors, block):
    config, drafter = drafter_of("qwen3.6-27b")
    account = predict_training(
        config, drafter, TrainingSetup(anchors=anchors, context=4096, block_size=block, loss="naive")
    )
    assert "12,288 positions make 6.1 GB a logits tensor" in account.notes[0]
    assert account.terms["logits"] / 2 / 1e9 == pytest.approx(6.1, abs=0.05)


def test_incident_data_parallel_changes_nothing_on_a_device():
    config, drafter = drafter_of("qwen3.6-27b")
    one, two = (
        predict_training(
            config, drafter, TrainingSetup(anchors=1024, context=4096, block_size=24, data_parallel=n)
        )
        for n in (1, 2)
    )
    assert dict(one.terms) == dict(two.terms)
    assert "each hold all of this" in two.notes[-1]


def test_incident_the_fused_loss_fits_1024_anchors_of_24():
    config, drafter = drafter_of("qwen3.6-27b")
    account = predict_training(config, drafter, TrainingSetup(anchors=1024, context=4096, block_size=24))
    assert account.peak_gib < CARD_GIB
    assert "logits" not in account.terms
    setup = with_chunk(TrainingSetup(anchors=1024, context=4096, block_size=24), 248320)
    assert sum(size for size, _ in loss_terms(248320, 5120, setup).values()) < 1.5 * GIB


def test_a_chunk_not_given_is_the_one_the_loss_plans():
    config, drafter = drafter_of("qwen3.6-27b")
    setup = with_chunk(TrainingSetup(anchors=1024, context=4096, block_size=24), 248320)
    assert setup.chunk == 512  # 1.25 GiB of buffers: two sides in fp32 and the bf16 gradient
    given = predict_training(
        config, drafter, TrainingSetup(anchors=1024, context=4096, block_size=24, chunk=512)
    )
    assert (
        given.terms
        == predict_training(config, drafter, TrainingSetup(anchors=1024, context=4096, block_size=24)).terms
    )


@pytest.mark.parametrize(
    "loss, chunk, measured_gib", [("naive", 1024, 91.2), ("loop", 1024, 36.5), ("checkpoint", 1024, 4.1)]
)
def test_loss_paths_match_what_an_h200_measured(loss, chunk, measured_gib):
    setup = TrainingSetup(anchors=1024, context=4096, block_size=24, loss=loss, chunk=chunk)
    predicted = sum(size for size, _ in loss_terms(248320, 5120, setup).values())
    assert predicted / GIB == pytest.approx(measured_gib, rel=0.06)


def _ce_kl(x, t, w, y):
    z, s = (x @ w.T).float(), (t @ w.T).float()
    kl = F.kl_div(F.log_softmax(z, -1), F.log_softmax(s, -1), reduction="sum", log_target=True)
    return F.cross_entropy(z, y, reduction="sum") + kl


def test_autograd_keeps_every_chunk_of_a_loop():
    """Counted: what is held between forward and backward is the same in a loop; recomputing holds almost
    nothing.
    """
    rows, vocab, hidden, chunk = 512, 2048, 32, 64
    kept = {}
    for way in ("whole", "loop", "checkpoint"):
        x = torch.zeros(rows, hidden, requires_grad=True)
        t, w, y = torch.zeros(rows, hidden), torch.zeros(vocab, hidden), torch.zeros(rows, dtype=torch.long)
        with LabelledTensors() as live:
            parts = [slice(None)] if way == "whole" else [slice(i, i + chunk) for i in range(0, rows, chunk)]
            run = (lambda *a: checkpoint(_ce_kl, *a, use_reentrant=False)) if way == "checkpoint" else _ce_kl
            loss = sum(run(x[part], t[part], w, y[part]) for part in parts)
            kept[way] = live.current
            loss.backward()
    assert kept["loop"] == pytest.approx(kept["whole"], rel=0.01)
    assert kept["checkpoint"] < 0.05 * kept["whole"]


def test_placement_moves_the_target():
    config, drafter = drafter_of("qwen3.6-27b")
    here = predict_training(
        config, drafter, TrainingSetup(anchors=64, context=1024, placement="same device", block_size=16)
    )
    away = predict_training(
        config, drafter, TrainingSetup(anchors=64, context=1024, placement="other device", block_size=16)
    )
    assert here.peak - away.peak == here.terms["target weights"] > 44 * GIB
    assert "target weights" not in away.terms


def test_options_that_cannot_be_are_refused():
    config, drafter = drafter_of("qwen3-8b")
    with refused(InputError):
        predict_training(config, drafter, TrainingSetup(anchors=8, context=64, loss="fast", block_size=16))
    with refused(InputError):
        count_training(config, drafter, TrainingSetup(anchors=8, context=64, block_size=8, loss="naive"))
    with refused(InputError):
        count_training(config, drafter, TrainingSetup(anchors=100, context=64, block_size=8))


def test_what_the_formulas_take_from_the_code_is_what_stands_there():
    """The accounts import no torch, so they repeat two numbers."""
    from dflash_lab.drafter import optim
    from dflash_lab.extraction import fused_layers
    from dflash_lab.memory import account, training

    assert training.MUON_ELEMENTS == optim.MUON_ELEMENTS
    assert account._TILE == fused_layers._ROWS
