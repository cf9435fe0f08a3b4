"""Documents made of the study's samples are true greedy continuations, apart from what is measured with, and
folders merge into one that keeps them so.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from support.wording import refused

from dflash_lab.data.samples import Sample, read_samples, write_samples
from dflash_lab.errors import InputError
from dflash_lab.models.generate import generate
from dflash_lab.models.load import load_target
from dflash_lab.models.template import user_frame

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
COUNT = 40


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture(scope="module")
def target(tiny_target):
    return load_target(str(tiny_target("llama")))


def write(target, path: Path, *, seed: int, count=COUNT, fraction=0.2) -> list[Sample]:
    """Samples of one turn with random words and greedy answers."""
    rng = np.random.default_rng(seed)
    opening, ending = user_frame(target.tokenizer)
    prompts = [
        [*opening, *rng.integers(0, 256, int(rng.integers(4, 12))).tolist(), *ending] for _ in range(count)
    ]
    samples = []
    for number, (prompt, answer) in enumerate(
        zip(prompts, generate(target, prompts, max_new_tokens=20), strict=True)
    ):
        mask = np.repeat(np.array([0, 1], np.uint8), [len(prompt), len(answer)])
        samples.append(Sample(f"self:{number}", np.asarray(prompt + answer), mask, "self"))
    write_samples(path, samples, heldout_fraction=fraction, provenance={"tokens": 1, "samples": count})
    return samples


def test_a_mark_is_the_targets_first_choice_in_its_document(target):
    from quality_augment import Flat, chosen_by

    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 25)
    tokens = rng.integers(0, 256, lengths.sum()).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    with torch.no_grad():  # half of the tokens are made the target's own choice, from left to right
        for a, b in pairwise(starts):
            for t in range(a + 1, b, 2):
                ids = torch.from_numpy(tokens[None, a:t].astype(np.int64))
                tokens[t] = target.head.logits(target.body(input_ids=ids).last_hidden_state[0, -1]).argmax()
        wanted = np.zeros(len(tokens), bool)
        for a, b in pairwise(starts):
            ids = torch.from_numpy(tokens[None, a:b].astype(np.int64))
            first = target.head.logits(target.body(input_ids=ids).last_hidden_state[0]).argmax(-1)
            wanted[a + 1 : b] = first.numpy()[:-1] == tokens[a + 1 : b]
    found = chosen_by(target, Flat(tokens, starts), token_budget=64)
    assert np.array_equal(found, wanted) and 0.4 < found.mean() < 0.6


def test_variants_are_of_training_samples_alone_and_held_out_ones_stay(target, tmp_path):
    from quality_augment import augment

    samples = write(target, tmp_path / "samples.parquet", seed=1)
    facts = augment(target, tmp_path / "samples.parquet", variants=5, seed=3, share=0.2)
    given, found = read_samples(tmp_path / "samples.parquet"), read_samples(tmp_path / "augmented.parquet")
    held = set(given.filter(pl.col("split") == "heldout")["id"])
    assert 2 < len(held) < COUNT // 2
    assert found[: len(given)].equals(given)
    assert set(found.filter(pl.col("split") == "heldout")["id"]) == held
    made = found[len(given) :]
    assert len(made) == facts["documents"] and 4 * (COUNT - len(held)) > len(made) > 2 * (COUNT - len(held))
    by_id = {one.id: one for one in samples}
    opening, ending = (len(part) for part in user_frame(target.tokenizer))
    kinds = np.zeros(3)
    for name, ids, mask in zip(made["id"], made["input_ids"].to_list(), made["loss_mask"].to_list()):
        answer, turn, _ = name.split("~")
        assert not {answer, turn} & held
        start = int(by_id[turn].loss_mask.argmax())
        whole = by_id[answer].input_ids[by_id[answer].loss_mask == 1]
        prompt, rest = np.array(ids[:start]), np.array(ids[start:])
        asked = by_id[turn].input_ids[:start]
        assert len(whole) - len(whole) // 2 <= len(rest) <= len(whole)
        assert np.array_equal(prompt[:opening], asked[:opening])
        assert np.array_equal(prompt[start - ending :], asked[start - ending :])
        assert not any(mask[:opening]) and not any(mask[start - ending : start]) and any(mask)
        replaced = (prompt != asked).sum() + (rest != whole[len(whole) - len(rest) :]).sum()
        kinds += [turn != answer, len(rest) < len(whole), replaced / (len(ids) - opening - ending)]
    assert np.all(np.abs(kinds / len(made) - [0.5, 0.3, 0.2]) < [0.2, 0.2, 0.06])
    again = tmp_path / "again"
    write(target, again / "samples.parquet", seed=1)
    augment(target, again / "samples.parquet", variants=5, seed=3, share=0.2)
    assert read_samples(again / "augmented.parquet").equals(found)


def test_a_merge_keeps_what_is_measured_apart(target, tmp_path):
    from quality_augment import augment
    from quality_data import HELDOUT
    from quality_merge import merge_data

    first, second = tmp_path / "a", tmp_path / "b"
    parts = [
        write(target, folder / "samples.parquet", seed=seed) for folder, seed in ((first, 1), (second, 2))
    ]
    asked = parts[1][0].input_ids[: int(parts[1][0].loss_mask.argmax())]
    secret = Sample(
        "self:0", [*asked, 7, 8, 9], [0] * len(asked) + [1] * 3, "self"
    )  # b's prompt, measured in a
    for folder in (first, second):
        for name in ("heldout", "humaneval"):
            write_samples(folder / f"{name}.parquet", [secret], heldout_fraction=HELDOUT, provenance={})
    copies = [*parts[1], *parts[0][:3]]  # three samples of a are in b too
    copies = [Sample(f"self:{i}", one.input_ids, one.loss_mask, one.source) for i, one in enumerate(copies)]
    write_samples(second / "samples.parquet", copies, heldout_fraction=0.2, provenance={"tokens": 1})
    for folder in (first, second):
        augment(target, folder / "samples.parquet", variants=3, seed=5)
    facts = merge_data([first, second], tmp_path / "c")
    found = {name: read_samples(tmp_path / "c" / f"{name}.parquet") for name in ("samples", "augmented")}
    assert set(facts["files"]) == set(found) and len(facts["parts"]) == 2
    counts = facts["files"]["samples"]
    assert counts["duplicates"] == 3 and counts["prompt_held_out"] == 1
    assert counts["stored"] == len(found["samples"]) == 2 * COUNT - 1
    of_second = [name for name in found["augmented"]["id"] if name.startswith("1/")]
    assert len(of_second) > COUNT
    assert not any("self:0~" in name for name in of_second)  # neither its answer nor its turn
    assert facts["files"]["augmented"]["prompt_held_out"] > 1
    held = {
        tuple(ids) for ids in found["samples"].filter(pl.col("split") == "heldout")["input_ids"].to_list()
    }
    both = found["augmented"].filter(pl.col("split") == "heldout")["input_ids"].to_list()
    assert {tuple(ids) for ids in both} == held
    assert read_samples(tmp_path / "c" / "heldout.parquet").equals(read_samples(first / "heldout.parquet"))


def test_a_merge_names_what_is_wrong_with_its_folders(target, tmp_path):
    from quality_data import HELDOUT
    from quality_merge import merge_data

    first, second = tmp_path / "a", tmp_path / "b"
    one = write(target, first / "samples.parquet", seed=1, count=4)
    with refused(InputError):
        merge_data([first], tmp_path / "c")
    for name in ("heldout", "humaneval"):
        write_samples(first / f"{name}.parquet", one, heldout_fraction=HELDOUT, provenance={})
    with refused(InputError):
        merge_data([first, second], tmp_path / "c")
    write(target, second / "samples.parquet", seed=2, count=4)
    (tmp_path / "link").symlink_to(first)
    for again in (first, tmp_path / "a" / ".." / "a", tmp_path / "link"):
        with refused(InputError):
            merge_data([first, second, again], tmp_path / "c")
    with refused(InputError):
        merge_data([first, second], second)
    whole = (second / "samples.parquet").read_bytes()
    (second / "samples.parquet").write_bytes(whole[:-20])
    with refused(InputError):
        merge_data([first, second], tmp_path / "c")
    assert not (tmp_path / "c").exists()
