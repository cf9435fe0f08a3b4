"""A row's loss against what a real target says: its norm and head at a + k - 1, its argmax, denominators."""

from __future__ import annotations

import pytest
import torch
from support.tiny_drafters import SECOND, tiny_config, tiny_drafter, tiny_head, tiny_items

from dflash_lab.data.samples import FeatureItem
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.loss_terms import LossConfig
from dflash_lab.drafter.model import Drafter
from dflash_lab.drafter.objective import TERMS, Objective, Tally, TrainSettings
from dflash_lab.drafter.rows import pack
from dflash_lab.models.hooks import Taps
from dflash_lab.models.load import load_target


def chosen(**changes) -> TrainSettings:
    return TrainSettings(max_steps=1, context_tokens=200, anchors=40, **changes)


@torch.no_grad()
def items_and_logits(target, tap_ids, lengths=(30, 24)):
    """Items with the target's states, and its logits at every position of each, from a plain forward."""
    generator = torch.Generator().manual_seed(0)
    items, logits = [], []
    for number, length in enumerate(lengths):
        ids = torch.randint(0, 255, (length,), generator=generator)
        with Taps(target, [*tap_ids, target.num_layers - 1]) as taps:
            output = target.body(input_ids=ids[None], use_cache=False)
            *states, final = (state[0] for state in taps.take())
        mask = (torch.arange(length) >= 4).to(torch.uint8)
        hashed = f"{number:032x}"
        items.append(FeatureItem(hashed, ids.int(), mask, torch.cat(states, -1), final, False))
        logits.append(target.head.logits(output.last_hidden_state)[0])
    return items, logits


def case(folder):
    """A target, a drafter for it, and a row of its items with their logits."""
    target = load_target(str(folder))
    config = DrafterConfig.from_target(
        target.config, mask_token_id=280, num_layers=1, block_size=5, tap_ids=(1, 4)
    )
    drafter = Drafter(config).initialize(torch.Generator().manual_seed(0))
    items, logits = items_and_logits(target, config.tap_ids)
    return target, drafter, pack(items, config, 200, 1000, torch.Generator().manual_seed(0)), items, logits


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5", "qwen3_5_moe"])
def test_the_teacher_is_the_targets_own_distribution_one_position_before_the_slot(tiny_target, kind):
    """Through the target's own final norm: x * w of Llama, x * (1 + w) of Qwen3.5."""
    target, drafter, row, items, logits = case(tiny_target(kind))
    settings = chosen(loss=LossConfig(hard_weight=0.0, soft_weight=1.0))
    loss = Objective(target.head, drafter.config, settings)(drafter, drafter, row, row.taps, teacher=False)
    with torch.no_grad():
        hidden = drafter(target.head.embed(row.block_ids), row.taps, row.layout)
        drafted = drafter.logits(hidden, target.head.weight).log_softmax(-1)
    starts = torch.tensor([0, len(items[0])])
    document = (row.layout.starts > 0).long()
    compared = 0
    for block, slot in row.slot_mask.nonzero().tolist():
        place = int(row.layout.anchors[block] - starts[document[block]]) + slot
        said = logits[int(document[block])][place - 1]
        assert int(loss.rows.target_argmax[block, slot]) == int(said.argmax())
        wanted = (said.softmax(-1) * (said.log_softmax(-1) - drafted[block, slot])).sum()
        assert float(loss.rows.kl[block, slot]) == pytest.approx(float(wanted), rel=1e-3, abs=1e-4)
        compared += 1
    assert compared > 100


def test_labels_from_the_argmax_are_the_targets_first_choices(tiny_target):
    target, drafter, row, *_ = case(tiny_target("qwen3"))
    found = {}
    for labels in ("data", "argmax"):
        objective = Objective(target.head, drafter.config, chosen(loss=LossConfig(label_source=labels)))
        found[labels] = objective(drafter, drafter, row, row.taps, teacher=True).rows
    live = found["data"].live
    assert torch.equal(found["data"].label[live], row.labels[live])
    assert torch.equal(found["argmax"].label[live], found["data"].target_argmax[live])
    assert not torch.equal(found["argmax"].label[live], found["data"].label[live])


def test_a_loss_is_divided_by_the_sum_of_weights_or_by_the_number_of_slots():
    items, drafter = tiny_items(3, heldout=0), tiny_drafter()
    row = pack(items, tiny_config(), 100, 1000, torch.Generator().manual_seed(0))
    denominators, totals = {}, {}
    for name in ("weights", "mask"):
        objective = Objective(tiny_head(), drafter.config, chosen(gamma=2.0, denominator=name))
        loss = objective(drafter, drafter, row, row.taps.float(), teacher=False)
        denominators[name], totals[name] = float(loss.denominator), float(loss.total.detach())
    slots = row.slot_mask.sum(0).double()
    decayed = (slots[1:] * torch.exp(-torch.arange(3) / 2.0)).sum()
    assert denominators["mask"] == int(slots.sum())
    assert denominators["weights"] == pytest.approx(float(decayed))
    assert totals["mask"] == totals["weights"]


def test_the_parts_of_all_terms_add_up_to_the_loss():
    config = tiny_config(**SECOND)
    items, drafter = tiny_items(3, heldout=0), tiny_drafter(config)
    row = pack(items, config, 100, 1000, torch.Generator().manual_seed(0))
    every = dict(soft_weight=0.5, cap_weight=0.25, tv_weight=0.125, lk_weight=0.3, length_weight=0.2)
    every |= dict(hard_weight=0.7)
    for loss in (LossConfig(**every), LossConfig(cap_weight=0.1)):
        objective = Objective(tiny_head(), config, chosen(gamma=2.0, selector_weight=0.6, loss=loss))
        found = objective(drafter, drafter, row, row.taps.float(), teacher=True)
        assert float(found.parts.sum()) == pytest.approx(float(found.total.detach()), rel=1e-5)
        tally = Tally(config.block_size, "cpu")
        tally.add(found)
        report = tally.report()
        told = {name: report.get(f"loss_{name}") for name in TERMS}
        on = {name for name, factor in objective.factors.items() if factor}
        assert {name for name, value in told.items() if value} == on
        assert sum(value for value in told.values() if value) == pytest.approx(report["loss"], rel=1e-5)
        kl = (found.rows.weight * found.rows.kl).sum() / found.denominator
        assert (told["kl"] or 0) == pytest.approx(float(loss.soft_weight * kl), rel=1e-4)
