"""The quality study: its recipes are parameters of the stage, its data true greedy continuations apart from
what is measured with, its rows train and are measured.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

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
from dflash_lab.stages.train_drafter import TrainDrafterParams

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
COUNT = 40
# What `quality.py` does otherwise than for the base: other samples, weights of the target, another drafter.
TRAINED = ("base", "augment-half-kl", "warm", "dflash2", "short")


@pytest.fixture(scope="module", autouse=True)
def on_path():
    """The scripts' folder is on the path for these tests alone: its files are named like folders of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield


@pytest.fixture(scope="module")
def target(tiny_target):
    return load_target(str(tiny_target("llama")))


def answered(number: int, prompt: list[int], answer: list[int]) -> Sample:
    """A sample of one turn."""
    mask = np.repeat(np.array([0, 1], np.uint8), [len(prompt), len(answer)])
    return Sample(f"self:{number}", np.asarray([*prompt, *answer]), mask, "self")


def write(target, path: Path, *, seed: int, count=COUNT, fraction=0.2) -> list[Sample]:
    """Samples of one turn with random words and greedy answers."""
    rng = np.random.default_rng(seed)
    opening, ending = user_frame(target.tokenizer)
    prompts = [
        [*opening, *rng.integers(0, 256, int(rng.integers(4, 12))).tolist(), *ending] for _ in range(count)
    ]
    samples = [*map(answered, range(count), prompts, generate(target, prompts, max_new_tokens=20))]
    write_samples(path, samples, heldout_fraction=fraction, provenance={"tokens": 1, "samples": count})
    return samples


def test_every_row_is_a_setting_of_the_stage_and_differs_from_the_base():
    from quality_recipes import ROWS, recipe

    for row in ROWS:
        values = recipe(row, {"max_steps": 3})
        values.pop("start_layers", None)
        params = TrainDrafterParams(run_dir="r", target="smollm2", **values)
        assert params.max_steps == 3 and params.source == "live" and not params.time_limit_s, row
        assert (recipe(row, {}) == recipe("base", {})) == (row == "base"), row


def test_data_is_the_targets_own_and_what_is_measured_is_apart(target, tmp_path, monkeypatch):
    import quality_data

    problems = tmp_path / "problems.jsonl"
    given = (
        {"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():", "entry_point": f"f{i}"} for i in range(3)
    )
    problems.write_text("".join(json.dumps(one) + "\n" for one in given))
    monkeypatch.setattr(quality_data, "set_file", lambda name: problems)
    monkeypatch.setattr(quality_data, "MEASURED_TOKENS", 9)
    sizes = dict(tokens=700, answer_tokens=8, temperature=2.0, heldout=3, problems=2, small_tokens=200)
    small = tmp_path / "small"
    facts = quality_data.write_data(target, tmp_path / "out", whole=True, small=small, **sizes)
    taught, whole, kept_out, code = (
        read_samples(tmp_path / "out" / f"{name}.parquet")
        for name in ("samples", "whole", "heldout", "humaneval")
    )
    assert facts["tokens"] == taught["length"].sum() <= 700 and facts["tokens"] > 400
    assert set(taught["source"]) == {"self", "code"} and facts["samples"] == len(taught)
    assert len(kept_out) <= 3 and len(code) == 2 and set(kept_out["split"]) == {"heldout"}

    def prompts(frame):
        return [ids[:start] for ids, start in zip(frame["input_ids"].to_list(), frame["response_start"])]

    asked = prompts(taught)
    assert not {tuple(ids) for ids in asked} & {tuple(ids) for ids in prompts(kept_out)}
    answers = [ids[len(prompt) :] for ids, prompt in zip(taught["input_ids"].to_list(), asked)]
    assert answers == generate(target, asked, max_new_tokens=8)
    assert whole["length"].sum() == taught["length"].sum()
    assert sum(map(sum, whole["loss_mask"].to_list())) > sum(map(sum, taught["loss_mask"].to_list()))
    few = read_samples(small / "samples.parquet")
    assert few["input_ids"].to_list() == taught["input_ids"].to_list()[: len(few)]
    assert 100 < few["length"].sum() <= 200 and (small / "humaneval.parquet").is_file()
    assert np.all(whole["response_start"].to_numpy() == whole["response_start"][0])


def test_a_study_whose_rows_fail_says_so(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    import quality
    import quality_study

    class Fails:
        returncode = 1

        def __init__(self, command, stdout, stderr):
            stdout.write("the compiler refused the kernel")

        def poll(self):
            return 1

    fake = SimpleNamespace(Popen=Fails, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(quality_study, "subprocess", fake)
    monkeypatch.setattr(quality_study, "POLL_S", 0.0)
    words = ["quality.py", "study", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--steps", "1"]
    monkeypatch.setattr(sys, "argv", [*words, "--rows", "base", "kl", "--json", str(tmp_path / "study.json")])
    assert quality.main() == 1
    found = json.loads((tmp_path / "study.json").read_text())
    assert found["rows"] == {} and found["missing"] == ["base", "kl"]
    assert "base failed (1):\nthe compiler refused the kernel" in caplog.text


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from support.tiny_targets import build_tiny

    shape = dict(hidden_size=144, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3)
    return build_tiny("llama", tmp_path_factory.mktemp("rows"), **shape)


@pytest.fixture(scope="module")
def data(tmp_path_factory, folder) -> Path:
    """What `quality.py data` leaves, of random words."""
    from quality_augment import augment
    from quality_data import HELDOUT, _write_training

    out, target, rng = tmp_path_factory.mktemp("data"), load_target(str(folder)), np.random.default_rng(0)
    opening, ending = user_frame(target.tokenizer)

    def samples(count: int) -> list[Sample]:
        prompts = [[*opening, *rng.integers(0, 256, 9), *ending] for _ in range(count)]
        return [answered(number, one, rng.integers(0, 256, 24)) for number, one in enumerate(prompts)]

    # Enough for the split of one in a hundred to hold some out.
    _write_training(out, samples(300), {"tokens": 1}, len(opening))
    augment(target, out / "samples.parquet", variants=1, seed=0)
    for name in ("heldout", "humaneval"):
        write_samples(out / f"{name}.parquet", samples(3), heldout_fraction=HELDOUT, provenance={})
    return out


@pytest.mark.slow
@pytest.mark.parametrize("row", TRAINED)
def test_a_row_trains_and_is_measured(row, folder, data, tmp_path, monkeypatch):
    import quality

    words = ["quality.py", "train", row, "--data", str(data), "--out", str(tmp_path), "--steps", "2"]
    words += ["--folders", "--target", str(folder), "--device", "cpu", "--answers", "2"]
    small = dict(context_tokens=160, slots=96, log_every=1, eval_every=1, eval_rows=1)
    words += [word for pair in small.items() for word in ("-p", *map(str, pair))]
    monkeypatch.setattr(sys, "argv", words)
    assert quality.main() == 0
    found = json.loads((tmp_path / row / "row.json").read_text())
    assert found["figures"]["steps"] == 2 and found["figures"]["skipped_steps"] == 0
    assert found["training"]["streak"] >= 1 and math.isfinite(found["training"]["loss"])
    for taus in found["tau"].values():
        assert taus["tau"] >= 1 and len(taus["per_answer"]) == taus["answers"] == 2
