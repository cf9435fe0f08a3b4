"""The stage `acceptance` on tiny targets: figures, equality with plain decoding, agreement with offline,
refusals.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from support.wording import check_wording, refused

sys.path.insert(0, str(Path(__file__).parents[1] / "acceptance"))

from dflash_lab.errors import InputError
from dflash_lab.files import read_json, write_json
from dflash_lab.progress import Stopped
from dflash_lab.stage_run import execute
from dflash_lab.stages.acceptance import AcceptanceParams, AcceptanceResult, run_acceptance

FAST = {"device": "cpu", "dtype": "float32", "interactive": False, "cost_repeats": 1, "budgets": [4, 16, 64]}
CHAINS = {**FAST, "decode_best": False, "decode_tree": False}  # the trained drafter and plain decoding alone


@pytest.fixture(scope="module")
def run_of(tiny_target, tmp_path_factory):
    """Return (target folder, run folder) of a kind, made once."""
    from acceptance_runs import build_run

    made = {}

    def get(kind):
        if kind not in made:
            folder = tiny_target(kind)
            made[kind] = (folder, build_run(folder, tmp_path_factory.mktemp(f"run-{kind}")))
        return made[kind]

    return get


@pytest.fixture(scope="module")
def params_of(run_of):
    """Return a function: kind, changes -> parameters that measure its run anew."""

    def params(kind, **changes) -> AcceptanceParams:
        target, run = run_of(kind)
        return AcceptanceParams(
            **{**FAST, "run_dir": str(run), "target": str(target), "force": True, **changes}
        )

    return params


@pytest.fixture(scope="module")
def llama_result(params_of):
    params = params_of("llama", diagnose="always")
    return params.changed(force=False), execute(params)


def test_states_come_from_the_target_where_the_store_is_that_of_a_trial(run_of, tmp_path, caplog):
    from dflash_lab.acceptance.offline import Answers
    from dflash_lab.extraction.loop import extract
    from dflash_lab.models.load import load_target

    folder, run = run_of("llama")
    target = load_target(str(folder))
    sizes = {"tap_ids": [1, 4], "token_budget": 512, "max_batch": 8}
    for count, source in ((3, "stored answers, states of the live target"), (8, "stored answers")):
        extract(target, run / "samples.parquet", tmp_path / "store", max_samples=count, **sizes)
        params = AcceptanceParams(run_dir=str(run), target=str(folder), store=str(tmp_path / "store"), **FAST)
        with caplog.at_level("INFO"):
            answers = Answers(params.settings(), target, (1, 4))
        assert answers.source == source and answers.has_final is (count == 3)
    assert caplog.text.count("holds 3 of 8 samples, a trial (max_samples of extract)") == 1


def test_trained_beats_untrained_and_agrees_with_offline(llama_result):
    _, result = llama_result
    figures = result.figures
    assert figures["tau_trained"] > 1.3 > figures["tau_untrained"]
    assert figures["greedy_different"] == 0
    assert figures["tau_offline"] == pytest.approx(figures["tau_trained"], rel=0.03)
    assert figures["tau_tree"] >= 1 and figures["tree_budget"] in (4, 16, 64)
    assert figures["speedup_chain"] > 0
    assert figures["tau_trained_low"] <= figures["tau_trained"] <= figures["tau_trained_high"]
    assert "they agree" in result.facts["agreement"]
    assert figures["tau_trained_low"] > figures["tau_untrained_high"]
    assert "lies above the untrained drafter's" in figures["judgement"]
    assert figures["tau_offline_gap_same_text_pct"] == pytest.approx(0, abs=0.5)
    assert figures["answers_same_text"] == figures["prompts"]
    assert result.facts["protocol"]["max_new_tokens"] == 128 and result.facts["protocol"]["thinking"] is False
    assert ("slower" in result.facts["speed"]) == (figures["speedup_chain"] < 1)


def test_tables_add_up(llama_result):
    _, result = llama_result
    per_answer = result.answers.filter(pl.col("method") == "trained")
    assert per_answer["tau"].mean() == pytest.approx(result.figures["tau_trained"], abs=1e-4)
    rounds = result.rounds.filter(pl.col("method") == "trained")
    sums = rounds.group_by("answer").agg(pl.col("produced").sum()).sort("answer")
    assert sums["produced"].to_list() == (per_answer["tokens"] - 1).to_list()
    tokens = result.tokens.filter(pl.col("method") == "trained")
    assert len(tokens) == per_answer["tokens"].sum()
    assert tokens.filter(pl.col("kind") == "first").height == per_answer.height
    rejected = rounds.filter(pl.col("rejected").is_not_null() & (pl.col("produced") > pl.col("accepted")))
    assert tokens["replaced"].count() == rejected.height
    tests = result.budgets.filter(pl.col("part") == "test").sort("budget")
    assert tests["tau"].to_list()[1:] == sorted(tests["tau"].to_list()[1:])
    assert result.points["speedup"].to_list() == sorted(result.points["speedup"], reverse=True)
    assert result.answers["asked"].str.ends_with("<|im_start|>assistant\n").all()


def test_a_selector_is_shown_with_its_streak_and_tau_and_without(run_of, llama_result, tmp_path):
    from dflash_lab.drafter.checkpoint import load_checkpoint, save_checkpoint
    from dflash_lab.drafter.model import Drafter
    from dflash_lab.views import acceptance as figures

    target, run = run_of("llama")
    trained = load_checkpoint(run / "drafter")
    second = dict(conv_kernel_size=2, conv_group_size=8, selector_rank=4, selector_top_k=4)
    drafter = Drafter(dataclasses.replace(trained.config, **second))
    drafter.initialize(torch.Generator().manual_seed(0)).load_state_dict(trained.state_dict(), strict=False)
    with torch.no_grad():  # a selector that spoils what the trained slots say, so that the two ways differ
        drafter.candidate_selector.predecessor_codebook.mul_(1000)
        drafter.candidate_selector.successor_codebook.mul_(1000)
    save_checkpoint(tmp_path / "second", drafter)
    params = AcceptanceParams(
        run_dir=str(tmp_path / "out"), target=str(target), drafter=str(tmp_path / "second"),
        samples=str(run / "samples.parquet"), store=str(run / "store"), untrained_tokens=0, num_prompts=3,
        **CHAINS,
    )  # fmt: skip
    values = execute(params).figures
    assert values["tau_no_selector"] > values["tau_trained"] and values["greedy_different"] == 0
    assert values["streak_uniform_no_selector"] > values["streak_uniform"]
    assert values["tau_offline_all_no_selector"] > values["tau_offline_all"]
    bars = {bar.name: dict(zip(bar.x, bar.y, strict=True)) for bar in figures.selector(values).data}
    assert bars["without"]["tau, decoded"] == values["tau_no_selector"]
    assert bars["with selector"]["streak, all anchors"] == values["streak_uniform"]
    assert "trained, no selector" in [bar.x[0] for bar in figures.taus(values).data]
    _, plain = llama_result
    assert not [name for name in plain.figures if "selector" in name]
    assert "no selector" not in plain.answers["method"].unique().to_list()


def test_result_is_read_back_and_not_made_again(llama_result):
    params, result = llama_result
    again = AcceptanceResult.load(params.folder)
    assert again.figures == result.figures
    assert again.answers.equals(result.answers) and again.offline.anchors.equals(result.offline.anchors)
    before = (params.folder / "result.json").stat().st_mtime_ns
    assert execute(params).figures == result.figures
    assert (params.folder / "result.json").stat().st_mtime_ns == before


def test_nothing_is_suspect_in_a_healthy_run(llama_result):
    _, result = llama_result
    assert set(result.checks["verdict"]) == {"fine"}
    assert result.checks.height == 11
    assert result.facts["cause"] == "No check found anything wrong."


def test_a_hybrid_target_is_decoded_and_its_trees_path_by_path(params_of):
    result = execute(params_of("qwen3_5", tree_mode="paths", decode_best=False, budgets=[4, 16]))
    figures = result.figures
    assert "tree_refused" not in result.facts and figures["greedy_different"] == 0
    assert figures["tau_offline"] == pytest.approx(figures["tau_trained"], rel=0.03)
    assert figures["tau_tree_decoded"] >= figures["tau_trained"] - 0.3 and figures["tau_tree"] >= 1
    assert (result.rounds.filter(pl.col("method") == "tree")["drafted"] >= figures["tree_budget"]).all()
    assert result.cost_model.replay


def test_a_windowed_target_is_decoded_one_prompt_at_a_time_and_says_why(params_of):
    result = execute(params_of("mistral", batch=3, decode_best=False, untrained_tokens=0))
    assert result.figures["greedy_different"] == 0 and result.figures["speedup_chain"] > 0
    assert result.figures["tau_offline"] == pytest.approx(result.figures["tau_trained"], rel=0.03)
    check_wording(result.facts["decoding"])
    check_wording(result.facts["tree_refused"])
    assert "tau_tree_decoded" not in result.figures and result.figures["tau_tree"] >= 1
    assert "tau_together" not in result.figures


def test_a_fault_in_decoding_is_said_and_its_cause_named(params_of, monkeypatch):
    from dflash_lab.acceptance import decode as decode_module

    params = params_of("qwen3_5", **CHAINS)
    monkeypatch.setattr(decode_module, "restore_states", lambda cache, saved: None)
    result = execute(params)
    assert result.facts["agreement"].endswith("decoding is at fault.")
    assert result.figures["greedy_different"] > result.figures["greedy_ties"]
    assert "rollback of the target" in result.facts["cause"] and "recurrent" in result.facts["cause"]
    suspects = result.checks.filter(pl.col("verdict") == "suspect")
    assert suspects["name"].to_list() == ["rollback of the target"]


def test_states_that_are_not_the_targets_are_said_and_their_cause_named(params_of, monkeypatch):
    """Decoding is right, and the offline tau is of other states."""
    from dflash_lab.acceptance.offline import Answers

    plain = Answers.items

    def spoilt(*arguments, **options):
        return [dataclasses.replace(item, taps=item.taps.flip(0)) for item in plain(*arguments, **options)]

    params = params_of("llama", **CHAINS, untrained_tokens=0)
    monkeypatch.setattr(Answers, "items", spoilt)
    result = execute(params)
    assert result.facts["agreement"].endswith("they disagree.") and result.figures["greedy_different"] == 0
    assert "stored states" in result.facts["cause"]
    silent = execute(params.changed(diagnose="never"))
    assert "cause" not in silent.facts and silent.checks.height == 0


def test_thinking_that_the_training_text_did_not_have_is_named(tmp_path):
    from acceptance_runs import build_run
    from support.tiny_targets import THINKING, build_tiny

    target = build_tiny("llama", tmp_path / "target", template=THINKING)
    run = build_run(target, tmp_path / "run", steps=2)
    prompts = tmp_path / "bench.jsonl"
    prompts.write_text('{"prompt": "What?"}\n{"prompt": "Who?"}\n')
    short = {**CHAINS, "max_new_tokens": 8, "untrained_tokens": 0}
    base = {"run_dir": str(run), "target": str(target), **short, "force": True}
    result = execute(AcceptanceParams(prompts=str(prompts), thinking=True, **base))
    assert "these prompts with thinking on" in result.facts["cause"]
    assert result.facts["protocol"]["thinking"] is True
    held = execute(AcceptanceParams(thinking=True, **base))  # held-out prompts are as prepare rendered them
    assert held.facts["protocol"]["thinking"] is False and "cause" not in held.facts
    assert set(held.breaks["source"]) == {"tiny"} and (held.breaks["entropy"] > 0).all()
    assert set(result.breaks["source"]) == {"bench"}


def test_prompts_from_a_file_with_two_turns_and_a_second_drafter(run_of, params_of, tmp_path):
    drafter = str(run_of("llama")[1] / "drafter")
    prompts = tmp_path / "bench.jsonl"
    prompts.write_text('{"question_id": 7, "turns": ["Hi", "And?"]}\n{"prompt": "What?"}\n')
    given = dict(prompts=str(prompts), drafter=drafter, other_drafter=drafter, max_new_tokens=12)
    result = execute(params_of("llama", **given, **CHAINS, untrained_tokens=0))
    plain = result.answers.filter(pl.col("method") == "plain")
    assert sorted(plain["prompt"]) == ["7", "7", "bench.jsonl:2"]
    assert result.figures["other_minus_trained"] == 0 and "cause" not in result.facts
    assert "tau_untrained" not in result.figures
    assert result.facts["offline_source"] == "answers of plain decoding"
    assert result.figures["tau_offline"] == pytest.approx(result.figures["tau_trained"], rel=0.03)


def test_several_sets_are_measured_together_and_told_apart(params_of, tmp_path):
    """Each set has the numbers that it has alone; the overall ones are those of all answers."""
    from dflash_lab.views import acceptance as views

    (tmp_path / "q.jsonl").write_text(
        '{"question": "Hi?", "answer": "1"}\n{"question": "Who?", "answer": "2"}\n'
    )
    (tmp_path / "mt.json").write_text('[{"prompt_id": 1, "category": "stem", "prompt": ["Hi", "And?"]}]')
    both = f"gsm8k={tmp_path / 'q.jsonl'},mt-bench={tmp_path / 'mt.json'}"
    short = {**CHAINS, "max_new_tokens": 12, "untrained_tokens": 4}
    result, alone = (
        execute(params_of("llama", prompts=which, **short)) for which in (both, both.split(",")[0])
    )
    assert result.figures["prompts"] == 3 and result.answers.filter(method="plain").height == 4
    assert result.figures["tau_trained"] == pytest.approx(
        result.answers.filter(method="trained")["tau"].mean(), abs=1e-4
    )
    assert {name: facts["available"] for name, facts in result.facts["sets"].items()} == {
        "gsm8k": 2,
        "mt-bench": 1,
    }
    table = AcceptanceResult.load(params_of("llama").folder).sets
    (own,) = table.filter(method="trained").rows(named=True)
    assert (own["set"], own["prompts"], own["answers"]) == ("gsm8k", 2, 2) and own["speedup"] > 0
    assert [round(own[name], 4) for name in ("tau", "low", "high", "tau_offline")] == [
        alone.figures[name] for name in ("tau_trained", "tau_trained_low", "tau_trained_high", "tau_offline")
    ]
    first, second = result.sets.filter(method="trained").rows(named=True)
    same = ("set", "prompts", "tokens", "tau", "low", "high", "tau_offline")
    assert [first[name] for name in same] == [own[name] for name in same]
    assert (second["set"], second["prompts"], second["answers"]) == ("mt-bench", 1, 2)
    bars = views.sets(result.sets)
    assert [bar.name for bar in bars.data] == ["trained", "trained, offline", "untrained"]
    assert list(bars.data[0].x) == ["gsm8k", "mt-bench"]
    assert views.sets_html(result.sets).count("<table>") == 2


def texts(result: AcceptanceResult, method: str) -> dict[str, list[str]]:
    """The pieces of each prompt's answer."""
    prompts = dict(result.answers.filter(method=method).select("answer", "prompt").iter_rows())
    found = (
        result.tokens.filter(method=method).sort("answer", "place").group_by("answer", maintain_order=True)
    )
    return {prompts[answer]: rows["text"].to_list() for (answer,), rows in found}


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 0.01}], ids=["top_k", "top_p"])
def test_filters_of_sampling_reach_every_method(params_of, llama_result, narrow):
    """Only the best token left: sampled answers are the greedy ones, and not held against plain decoding."""
    common = {"decode_best": False, "untrained_tokens": 0, "batch": 2, "num_prompts": 2}
    result = execute(params_of("llama", temperature=2.0, **narrow, **common))
    assert "greedy_different" not in result.figures and result.figures["tau_trained"] > 1
    wanted = texts(llama_result[1], "trained")
    for method in ("trained", "tree", "together"):
        found = texts(result, method)
        assert len(found) == 2 and found.items() <= wanted.items()


def test_wrong_parameters_say_what_to_type(params_of, tmp_path):
    for wrong in ({"budgets": [0]}, {"tree_mode": "heap"}):
        with refused(InputError):
            AcceptanceParams(**wrong)
    for wrong in ({"prompts": "nothing.jsonl"}, {"drafter": str(tmp_path)}):
        with refused(InputError):
            execute(params_of("llama", **wrong))


def test_without_a_store_the_target_makes_the_states_and_prompts_go_together(run_of, params_of, tmp_path):
    """Every long step reports progress meanwhile."""
    run, bare, seen = run_of("llama")[1], tmp_path / "bare", []
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("acceptance*", "store"))
    trained = dict(steps=12, best_step=12, training_samples=4, training_tokens=131, agreement=0.43)
    write_json(bare / "train_drafter" / "figures.json", trained)
    params = params_of("llama", run_dir=str(bare), batch=3, decode_best=False)
    assert params.training() == trained
    assert params.changed(drafter=str(run / "drafter")).training() is None  # this run's does not speak of it
    result = execute(params, lambda what, *_, **__: seen.append(what))
    assert result.facts["offline_source"] == "stored answers, states of the live target"
    assert result.figures["tau_offline"] == pytest.approx(result.figures["tau_trained"], rel=0.03)
    assert result.figures["tau_together"] == result.figures["tau_trained"]
    assert result.figures["greedy_different"] == 0 and result.figures["together_tokens_per_s"] > 0
    assert "the target itself would have said 43 %" in result.figures["judgement"]
    steps = {"decode plain", "decode trained", "decode tree", "decode together", "offline"}
    assert steps | {"costs of a round"} <= set(seen) and seen.count("decode plain") > 20


def test_a_store_of_another_target_is_refused_at_once(run_of, params_of, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(run_of("llama")[1] / "store", store)
    identity = read_json(store / "store.json")
    identity["target"]["weights"] = "of a fine-tune"
    write_json(store / "store.json", identity)
    with refused(InputError):
        execute(params_of("llama", store=str(store)))


def test_the_whole_evaluation_at_fixed_shapes_finds_the_same(run_of, llama_result):
    from dflash_lab.acceptance.evaluate import Evaluator
    from dflash_lab.acceptance.fixed_shapes import Workspace

    params, grown = llama_result
    lab = Evaluator(params.settings())
    assert lab.methods.workspace is None and "CUDA" in grown.facts["decoding"]
    lab.methods.workspace = Workspace(lab.target)  # without graphs, as there is no CUDA device
    fixed = lab.evaluate()
    assert fixed.figures["greedy_different"] == 0
    for name in ("tau_trained", "tau_untrained", "tau_offline", "tau_tree"):
        assert fixed.figures[name] == grown.figures[name]
    assert set(fixed.costs["what"]) == {"step", "draft", "build"}
    assert set(grown.costs.select("what", "size").rows()) == set(fixed.costs.select("what", "size").rows())
    ours, theirs = (r.rounds.filter(r.rounds["method"] == "trained").drop("method") for r in (fixed, grown))
    assert ours.equals(theirs)


def test_a_stop_takes_effect_in_the_middle_of_an_answer(params_of):
    seen = []

    def progress(what, done, total, **fields):
        seen.append((what, done))
        if len(seen) == 5:
            raise Stopped("stopped (test)")

    with pytest.raises(Stopped):
        run_acceptance(params_of("llama"), progress)
    assert seen == [("decode plain", 0)] * 5


@pytest.mark.parametrize(
    ("factor", "same"),
    [([1, 1, 0.5], [True, True, False]), ([1.1] * 3, [True, True, False]), ([1.1] * 3, [False] * 3)],
    ids=["other-text", "disagree", "all-other-text"],
)
def test_answers_of_other_text_are_not_held_against_the_drafter(factor, same):
    from dflash_lab.acceptance.evaluate import Agreement

    taus = np.asarray([2.0, 3.0, 4.0])
    found = Agreement(taus, np.asarray(factor) * taus, np.asarray(same), np.arange(3))
    check_wording(f"{found.gap:.4f}, judged {found.judged_gap:.4f}: {found.sentence(0.03)}")
