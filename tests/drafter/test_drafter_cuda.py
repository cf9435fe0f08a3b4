"""The loop on a CUDA device: it learns, resumes to a millionth, skips bad steps unasked, waits for nobody."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_drafters import (
    HIDDEN,
    ItemList,
    Killed,
    head_on,
    killed_at,
    learner,
    records,
    relative_error,
    tiny_config,
    tiny_items,
    tiny_settings,
)

from dflash_lab.drafter.attention import row_layout
from dflash_lab.drafter.model import Drafter
from dflash_lab.drafter.optim import OptimizerConfig
from dflash_lab.drafter.rows import feed, prefetch
from dflash_lab.drafter.train import Diverged, Trainer, train

pytestmark = pytest.mark.gpu


CHOSEN = dict(
    max_steps=40, optimizer=OptimizerConfig(lr=1e-2), log_every=5, eval_every=20, checkpoint_every=20
)


def start(compiled: bool = False) -> Drafter:
    drafter = learner(torch.bfloat16, "cuda")
    if compiled:
        drafter.compile_layers()
    return drafter


def cuda_head():
    return head_on("cuda", torch.bfloat16)


@pytest.mark.parametrize(
    ("compiled", "optimizer"),
    [
        (False, {}),
        (True, {}),
        (False, dict(kind="muon", muon_lr=1e-2)),
        (False, dict(moments="int8")),
        (False, dict(offload=True)),
    ],
)
def test_it_learns_and_resumes_to_a_millionth(tmp_path, compiled, optimizer):
    chosen = tiny_settings(**CHOSEN | dict(optimizer=OptimizerConfig(lr=1e-2, **optimizer)))
    items = tiny_items(16, heldout=4)
    report = train(items, cuda_head(), start(compiled), chosen, folder=tmp_path / "whole")
    assert report.last["streak"] > report.first["streak"] + 0.5
    assert report.compile_seconds > 0 and report.skipped == 0
    with pytest.raises(Killed):
        train(items, cuda_head(), start(compiled), chosen, folder=tmp_path / "cut", on_progress=killed_at(23))
    train(items, cuda_head(), start(compiled), chosen, folder=tmp_path / "cut")
    whole, cut = (records(tmp_path / name, "step") for name in ("whole", "cut"))
    assert [r["step"] for r in cut] == [r["step"] for r in whole] == list(range(1, 41))
    for a, b in zip(whole, cut, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-6)
    names = [
        tmp_path / run / "checkpoints" / "step-00000040" / "model.safetensors" for run in ("whole", "cut")
    ]
    wanted, found = map(load_file, names)
    assert all(relative_error(found[name], wanted[name]) < 1e-6 for name in wanted)


def test_bad_rows_are_skipped_counted_and_saved_without_a_wait(tmp_path):
    items = tiny_items(12, heldout=0)
    taps = items[5].taps.clone().index_fill_(0, torch.tensor([0, 1]), float("nan"))
    items[5] = dataclasses.replace(items[5], taps=taps)
    drafter = start()
    report = train(
        items, cuda_head(), drafter, tiny_settings(**CHOSEN | dict(max_steps=9, eval_rows=0)), folder=tmp_path
    )
    steps = records(tmp_path, "step")
    skipped = [r for r in steps if r["skipped"]]
    assert report.skipped == len(skipped) == len(list((tmp_path / "bad").iterdir())) >= 1
    assert all("nan" in r["skipped"] and r["loss"] is None for r in skipped)
    assert all(torch.isfinite(p).all() for p in drafter.parameters())
    assert len(steps) == 9


def test_many_bad_steps_in_a_row_end_the_run(tmp_path):
    bad = ItemList(
        dataclasses.replace(i, taps=torch.full_like(i.taps, float("inf"))) for i in tiny_items(6, heldout=0)
    )
    with pytest.raises(Diverged, match="3 bad steps in a row at step 3"):
        train(
            bad,
            cuda_head(),
            start(),
            tiny_settings(**CHOSEN | dict(max_bad_steps=3, eval_rows=0)),
            folder=tmp_path,
        )


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_step_waits_for_nobody(tmp_path, kind):
    """Anything in a step that would wait for the device is an error here."""
    chosen = tiny_settings(**CHOSEN | dict(optimizer=OptimizerConfig(kind=kind), eval_rows=0))
    trainer = Trainer(tiny_items(12, heldout=0), cuda_head(), start(), chosen, tmp_path)
    trainer.warm_up()
    with contextlib.closing(prefetch(feed(trainer.stream(), trainer.device))) as stream:
        for _ in range(3):
            trainer.train_step(stream)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                trainer.train_step(stream)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        trainer.catch_up()
    assert trainer.place["tokens"] > 0 and trainer.guard.skipped == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_flex_equals_dense_through_the_whole_drafter(compiled):
    """Forward and gradients of a row of three documents and padding, sliding and full layers, bf16."""
    config = tiny_config(block_size=6, sliding_window=40)
    generator = torch.Generator().manual_seed(0)
    lengths, anchors = [130, 70, 56], []
    for length in lengths:
        anchors.append((torch.randperm(length - 2, generator=generator)[:16] + 1).sort().values.tolist())
    layout = row_layout(anchors, lengths, 6).map(lambda index: index.cuda())
    embeddings = torch.randn(48, 6, HIDDEN, generator=generator).cuda().bfloat16()
    taps = torch.randn(256, 2 * HIDDEN, generator=generator).cuda().bfloat16()
    ahead = torch.randn(48, 6, HIDDEN, generator=generator).cuda()  # a norm's own square has no gradient
    results = []
    for path in ("flex", "dense"):
        drafter = Drafter(config).initialize(torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
        if compiled and path == "flex":
            drafter.compile_layers()
        hidden = drafter(embeddings, taps, layout, path)
        (hidden.float() * ahead).sum().backward()
        results.append([hidden.detach(), *(p.grad for p in drafter.parameters())])
    for flex, dense in zip(*results, strict=True):
        assert relative_error(flex, dense) < 0.06
