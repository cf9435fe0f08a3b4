"""Offline metrics equal decoding on greedy answers, and equal slow definitions on any answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from drafters import PROMPTS, answered, close, greedy, random_drafter, second_drafter
from support.wording import check_wording, refused

from dflash_lab.acceptance.decode import Proposer, Sampling, accept_sampled, decode
from dflash_lab.acceptance.offline import TextItems, answer_segments, offline, passes
from dflash_lab.acceptance.results import OfflineReport
from dflash_lab.data.samples import FeatureItem
from dflash_lab.errors import InputError
from dflash_lab.models.generate import draw


def item_of(target, answer) -> FeatureItem:
    (item,) = answered(target, PROMPTS[:1], [answer])
    return item


def drafted(drafter, target, item, place):
    """What the drafter drafts at one place of a text, by itself."""
    proposer = Proposer(drafter, target.head)
    proposer.extend(item.taps[:place])
    return proposer.draft(item.input_ids[place : place + 1].long(), drafter.config.block_size)


def streak(drafts, truth) -> int:
    return next((i for i, (draft, token) in enumerate(zip(drafts, truth)) if draft != token), len(truth))


def with_answers_of_the_drafter(target, drafter, count=24):
    """Answers that agree with the drafter now and then: each token is its best draft or a fixed other one."""
    generator = torch.Generator().manual_seed(3)
    answer = [65]
    while len(answer) < count:
        item = item_of(target, answer)
        drafts = drafted(drafter, target, item, len(item) - 1).greedy().tolist()
        keep = int(torch.randint(0, 5, (1,), generator=generator))
        answer += [*drafts[:keep], 70 + keep]
    return answer[:count]


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_chained_rounds_equal_decoded_rounds_on_greedy_answers(trained, kind):
    target, drafter, items = trained(kind)
    for size in (5, 3, 8):
        report = offline(items, target.head, drafter, block_size=size, budgets=())
        for prompt, rounds in zip(PROMPTS[: 4 if size == 5 else 1], report.rounds()):
            fast = decode(target, drafter, prompt, max_new_tokens=20, block_size=size, stop_ids=())
            assert fast.produced == rounds
    assert len({length for rounds in report.rounds() for length in rounds}) > 1  # not always the same


def test_what_the_selector_adds_is_told_alike_offline_and_by_decoding(loaded):
    target = loaded("llama")
    drafter = second_drafter(target, block_size=5)
    bare = drafter.without_selector()
    assert bare.candidate_selector is None and drafter.candidate_selector is not None
    # Each answer is what that way of drafting proposes, so that there is something to accept.
    for chosen in (drafter, bare):
        items = [item_of(target, with_answers_of_the_drafter(target, chosen))]
        report = offline(items, target.head, drafter, budgets=())
        other, alone = report.without_selector(), offline(items, target.head, bare, budgets=())
        assert other.rounds() == alone.rounds() != report.rounds() and other.streak() == alone.streak()
        assert alone.without_selector() is None and "unselected" not in alone.anchors.columns
    options = {"max_new_tokens": 30, "block_size": 5, "stop_ids": ()}
    found, unselected = (decode(target, one, PROMPTS[0], **options) for one in (drafter, bare))
    assert found.tokens == unselected.tokens
    items = [item_of(target, found.tokens)]
    report = offline(items, target.head, drafter, budgets=())
    assert found.produced == report.rounds()[0]
    assert unselected.produced == report.without_selector().rounds()[0]


@pytest.mark.parametrize(("kind", "build"), [("qwen3_5", random_drafter), ("llama", second_drafter)])
def test_every_anchor_equals_drafting_there_alone(loaded, kind, build, monkeypatch):
    monkeypatch.setattr("dflash_lab.acceptance.offline.CPU_ELEMENTS", 7 * 4 * 288)
    target = loaded(kind)
    drafter = build(target, block_size=5, sliding_layers=1, sliding_window=6)
    answer = with_answers_of_the_drafter(target, drafter)
    item = item_of(target, answer)
    budgets = (1, 4, 60)
    report = offline([item], target.head, drafter, budgets=budgets, top_k=(1, 3))
    rows = report.anchors.rows(named=True)
    assert len(rows) == len(answer) - 1
    assert max(r["accepted"] for r in rows) >= 3
    for row in rows:
        place = row["anchor"]
        draft = drafted(drafter, target, item, place)
        truth = item.input_ids[place + 1 : place + 5].tolist()
        chain = draft.greedy().tolist()
        accepted = row["accepted"]
        assert accepted == streak(chain, truth)
        if build is second_drafter:
            assert row["unselected"] == streak(draft.logits.argmax(-1).tolist(), truth)
        assert row["left"] == len(PROMPTS[0]) + len(answer) - 1 - place
        for budget in budgets:
            tree = draft.tree(budget)
            choices = [truth[d] if d < len(truth) else -1 for d in (0, *tree.depths.tolist())]
            assert row[f"tree_{budget}"] == len(tree.walk(choices)[0]) - 1
        best = draft.logits.topk(3).indices.tolist()
        assert row["top_3"] == next((i for i, t in enumerate(truth) if t not in best[i]), len(truth))
        if accepted < len(truth):
            q = draft.logits[accepted].softmax(-1)
            assert (row["label"], row["drafted"]) == (truth[accepted], chain[accepted])
            assert row["p_label"] == pytest.approx(float(q[truth[accepted]]), rel=1e-3)
            assert row["entropy"] == pytest.approx(float(torch.special.entr(q).sum()), rel=1e-3)
        else:
            assert row["label"] is None and row["entropy"] is None


def test_slots_streak_budgets_and_block_sizes_follow_from_the_anchors(loaded):
    target = loaded("llama")
    drafter = random_drafter(target, block_size=5)
    answer = with_answers_of_the_drafter(target, drafter)
    item = item_of(target, answer)
    report = offline([item], target.head, drafter, budgets=(4, 64, 1024))
    accepted = report.anchors["accepted"].to_list()
    assert report.streak() == pytest.approx(1 + sum(accepted) / len(accepted))
    slots = report.by_slot()
    for slot in range(1, 5):
        valid = [min(4, left) >= slot for left in report.anchors["left"]]
        held = [a >= slot for a in accepted]
        assert slots["survival"][slot - 1] == pytest.approx(sum(held) / sum(valid))
        assert slots["accuracy"][slot - 1] >= slots["survival"][slot - 1]
    columns = [report.anchors[report.column(budget)].to_numpy() for budget in (4, 64, 1024)]
    assert (columns[0] <= columns[1]).all() and (columns[1] <= columns[2]).all()
    taus = report.by_budget()["tau"].to_list()
    assert taus[-1] > taus[0] > 1.3
    assert report.oracle()["tau"].to_list() == sorted(report.oracle()["tau"].to_list())
    assert report.oracle()["tau"][0] == pytest.approx(report.tau().mean)
    cut = report.by_block_size()["tau"].to_list()
    assert cut[-1] == pytest.approx(report.tau().mean) and cut[0] < cut[-1]
    with refused(InputError):
        report.tau(99)


def test_a_sample_that_is_not_a_number_is_left_out_by_name(trained, caplog):
    target, drafter, items = trained("llama")
    taps = items[1].taps.clone()
    taps[2] = torch.nan
    spoilt = replace(items[1], hash="ab" * 16, taps=taps)
    found = offline([items[0], spoilt, items[2]], target.head, drafter, budgets=(4,), top_k=(1,))
    wanted = offline([items[0], items[2]], target.head, drafter, budgets=(4,), top_k=(1,))
    assert found.anchors.equals(wanted.anchors) and found.slots.equals(wanted.slots)
    check_wording(caplog.records[-1].getMessage())


def test_logits_that_are_not_numbers_are_accepted_nowhere(trained, monkeypatch):
    target, drafter, items = trained("llama")
    plan = dict(budgets=(4, 16), top_k=(1, 8), temperatures=(1.0,))
    assert offline(items, target.head, drafter, **plan).anchors["top_8"].sum() > 0
    logits = type(drafter).logits
    monkeypatch.setattr(type(drafter), "logits", lambda *given: logits(*given) * torch.nan)
    report = offline(items, target.head, drafter, **plan)
    for name in ("accepted", "top_1", "top_8", "tree_4", "tree_16", "sampled_1"):
        assert report.anchors[name].sum() == 0, name
    assert report.tau().mean == 1.0


def test_report_survives_disk_and_turns_are_separate_answers(loaded, tmp_path):
    target = loaded("llama")
    drafter = random_drafter(target, block_size=4)
    whole = item_of(target, [65] * 20)
    mask = whole.loss_mask.clone()
    mask[12:15] = 0  # a user turn in the middle
    mask[-1] = 0
    assert answer_segments(mask) == [(7, 12), (15, 26)]
    two = replace(whole, loss_mask=mask)
    report = offline([whole, two], target.head, drafter, budgets=(2,))
    assert report.num_answers == 3
    assert report.anchors["answer"].unique().sort().to_list() == [0, 1, 2]
    report.save(tmp_path)
    again = OfflineReport.load(tmp_path)
    assert again.anchors.equals(report.anchors) and again.slots.equals(report.slots)
    assert again.tau(2).mean == report.tau(2).mean
    silent = replace(whole, loss_mask=torch.zeros_like(mask))
    with refused(InputError):
        offline([silent], target.head, drafter)


def test_expected_acceptance_under_sampling_equals_simulation(loaded):
    """At an anchor of a one-token draft it is 1 - TV, which simulated rejection sampling must meet."""
    target = loaded("llama")
    drafter = random_drafter(target, block_size=2, initializer_range=0.1)
    (item,) = answered(target, PROMPTS[:1], greedy(target, PROMPTS[:1], 6))
    report = offline([item], target.head, drafter, budgets=(), temperatures=(0.7,))
    row = report.anchors.row(2, named=True)
    place = row["anchor"]
    q = Sampling(0.7).probabilities(drafted(drafter, target, item, place).logits)
    p = Sampling(0.7).probabilities(target.logits(item.final[place : place + 1]))
    generator = torch.Generator().manual_seed(0)
    q = q.expand(20000, 1, -1)
    accepted, _ = accept_sampled(draw(q, generator), q, torch.cat([p, p]).expand(20000, 2, -1), generator)
    assert row["sampled_0.7"] == pytest.approx(float(accepted.float().mean()), abs=0.015)
    assert report.by_temperature()["streak"][1] == pytest.approx(1 + report.anchors["sampled_0.7"].mean())
    with refused(InputError):
        offline([replace(item, final=None)], target.head, drafter, temperatures=(1.0,))


@pytest.mark.parametrize("most", [0, 20, 64, 10**6])
def test_passes_hold_every_text_once_in_order_and_are_as_long_as_they_may(most):
    lengths = [3, 9, 1, 1, 1, 20, 2, 2, 30, 1]
    runs = list(passes(lengths, most))
    assert [i for start, end in runs for i in range(start, end)] == list(range(len(lengths)))
    for start, end in runs:
        assert max(lengths[start:end]) * (end - start) <= most or end == start + 1
        one_more = lengths[start : end + 1]
        assert end == len(lengths) or max(one_more) * len(one_more) > most
    assert list(passes([], most)) == []


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_moe"])
def test_texts_that_share_a_forward_get_the_states_of_their_own(loaded, kind):
    texts = []
    for name, length in (("a", 7), ("b", 19), ("c", 12)):
        ids = torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(length))
        texts.append((name, ids, torch.ones(length, dtype=torch.uint8)))
    items = TextItems(loaded(kind), (1, 2), texts)
    for text, alone, shared in zip(texts, items, items._made(texts), strict=True):
        assert alone.hash == shared.hash == text[0] and torch.equal(alone.input_ids, shared.input_ids)
        for one, other in ((alone.taps, shared.taps), (alone.final, shared.final)):
            assert one.shape == other.shape and close(other, one, 1e-4)
