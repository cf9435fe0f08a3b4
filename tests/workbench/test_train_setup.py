"""Every choice of the training stage changes what is trained or how: none is asked for and then forgotten."""

from __future__ import annotations

import pytest

from dflash_lab.models.load import load_head
from dflash_lab.stages.train_drafter import TrainDrafterParams
from dflash_lab.stages.train_processes import first_drafter
from dflash_lab.stages.training_inputs import resolve_inputs, train_settings

BASE = dict(device="cpu", source="live", num_layers=2, sliding_layers=[0], max_steps=9, interactive=False)
CHANGED = dict(
    tap_ids=[1, 2], num_layers=3, block_size=5, sliding_layers=[1], sliding_window=7, mask_token_id=270,
    num_heads=8, num_kv_heads=1, head_dim=8, intermediate_size=32, dflash2=True, selector_weight=0.5,
    context_tokens=100, anchors=7, grad_accum_steps=3, noise_std=0.1, gamma=3.0, weighting="dpace",
    dpace_alpha=0.1, denominator="mask", labels="argmax", hard_weight=0.5, soft_weight=0.5, temperature=2.0,
    cap_weight=0.1, tv_weight=0.1, lk_weight=0.1, lk_decay=2.0, length_weight=0.1,
    acceptance="overlap", optimizer="muon", lr=1e-5,
    weight_decay=0.1, beta1=0.8, beta2=0.95, eps=1e-6, muon_lr=0.1, muon_momentum=0.9,
    muon_weight_decay=0.2, moments="int8", offload=True, warmup=0.1, min_lr_ratio=0.1,
    clip_norm=2.0, max_steps=8, time_limit_s=5.0, log_every=3, eval_every=3, eval_rows=2, checkpoint_every=3,
    keep=1, max_bad_steps=2, explode_factor=9.0, gradient_checkpointing=True, attention="dense", seed=1,
)  # fmt: skip
# Where states come from and results go, where it runs, and how many steps an epoch is: tests of their own.
ELSEWHERE = {
    "run", "run_dir", "target", "device", "dtype", "interactive", "force", "ignore_memory",
    "source", "store", "check_store",
    "samples", "drafter", "start_from", "drafter_dtype", "epochs", "min_steps", "tau_samples", "compile",
    "compile_target", "gpus", "parallel", "target_gpus", "drafter_gpus", "head_gpu", "target_head_gpu",
    "head_parallel", "queue_rows", "export",
}  # fmt: skip


@pytest.fixture(scope="module")
def changes_the_run(tiny_target):
    target = str(tiny_target("llama"))
    head = load_head(target, device="cpu", dtype="float32")

    def make(**changes):
        """All that the loop is given of some parameters."""
        params = TrainDrafterParams(**{**BASE, "target": target, **changes})
        inputs = resolve_inputs(params)
        drafter = first_drafter(inputs, head)
        return inputs.drafter, train_settings(inputs, None), drafter.gradient_checkpointing

    base = make()
    return lambda **changes: make(**changes) != base


@pytest.mark.parametrize("name", CHANGED)
def test_a_choice_changes_the_run(changes_the_run, name):
    assert changes_the_run(**{name: CHANGED[name]})


def test_no_choice_is_left_out():
    assert set(TrainDrafterParams.model_fields) == {*CHANGED, *ELSEWHERE}
