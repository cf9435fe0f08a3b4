"""A running server measured beside decoding: its own counts give the tau that decoding gives here, and each
fault is named by the setting it lies in.
"""

from __future__ import annotations

import functools

import pytest
from acceptance_runs import build_run
from support.model_server import ModelServer, hurry
from support.wording import check_wording, refused

from dflash_lab.acceptance.decode import decode
from dflash_lab.drafter.checkpoint import load_checkpoint
from dflash_lab.errors import InputError
from dflash_lab.models.load import load_target
from dflash_lab.stage_run import execute
from dflash_lab.stages.acceptance import AcceptanceParams
from dflash_lab.views import acceptance as figures


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    hurry(monkeypatch)


@pytest.fixture(scope="module")
def run(tiny_target, tmp_path_factory):
    folder = tiny_target("llama")
    return folder, build_run(folder, tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def serve(run):
    """Return a function: form -> a server that decodes with the run's own drafter."""
    folder, made = run
    target, drafter = load_target(str(folder)), load_checkpoint(made / "drafter").eval()

    @functools.cache
    def said(prompt, limit):
        found = decode(target, drafter, list(prompt), max_new_tokens=limit)
        return found.tokens, [r.accepted for r in found.rounds]

    def make(form="vllm"):
        return ModelServer(
            lambda prompt, limit: said(tuple(prompt), limit),
            lambda ids: target.tokenizer.decode(ids, skip_special_tokens=True),
            target.stop_ids,
            form,
        )

    return make


@pytest.fixture
def measured(run, tmp_path):
    """Return a function: server, changes -> the result of the stage that measures it."""
    folder, made = run

    def measure(server, **changes):
        given = {
            "run_dir": str(made), "target": str(folder), "device": "cpu", "dtype": "float32", "force": True,
            "interactive": False, "cost_repeats": 1, "budgets": [4], "decode_best": False,
            "decode_tree": False, "untrained_tokens": 0, "offline_samples": 0, "server": server.url,
            "server_concurrency": [1, 3], "server_timeout_s": 20,
        }  # fmt: skip
        return execute(AcceptanceParams(**{**given, **changes}))

    return measure


def suspects(result):
    return dict(result.checks.filter(result.checks["verdict"] == "suspect").select("name", "detail").rows())


@pytest.mark.parametrize(("form", "per_request"), (("vllm", False), ("vllm", True), ("sglang", False)))
def test_a_server_with_the_same_drafter_counts_the_same_tau(serve, measured, form, per_request):
    with serve(form).running() as running:
        running.per_request = per_request
        result = measured(running, diagnose="always")
    values, (one, three) = result.figures, result.facts["served"]["rows"]
    assert values["tau_served"] == pytest.approx(values["tau_trained_counted"], abs=1e-4)
    assert values["tau_served_at_3"] == values["tau_served_at_1"] > 1.3
    assert values["served_tokens_per_s_at_3"] > 0 and "they agree" in result.facts["served"]["said"]
    assert (one["failed"], one["different"], one["tokens_of_others"]) == (0, 0, 0)
    assert one["counted"] == ("counters" if (form, per_request) == ("vllm", False) else "each request")
    assert one["rounds"] == three["rounds"] and one["latency_p95_ms"] >= one["latency_p50_ms"]
    assert one["first_token_ms"] > 0 and not suspects(result)
    assert {"served drafting", "served draft tokens", "served answers"} <= set(result.checks["name"])
    assert len(figures.served([one, three], values).data) == 2
    assert figures.served_table([one, three]).height == 2


@pytest.mark.parametrize("fault", ("no drafter", "draft tokens", "answers", "others"))
def test_what_parts_served_from_decoded_tau_is_named(serve, measured, fault):
    server = serve("vllm")
    said = server.say
    if fault == "no drafter":
        server.draft_tokens = 0
    elif fault == "draft tokens":
        server.draft_tokens = 2
        server.say = lambda prompt, limit: (said(prompt, limit)[0], [2] * len(said(prompt, limit)[1]))
    elif fault == "answers":  # as another dtype would have it, from the fifth token on
        server.say = lambda prompt, limit: (
            [*said(prompt, limit)[0][:4], *[42] * (len(said(prompt, limit)[0]) - 4)],
            [0] * (limit - 1),
        )
    elif fault == "others":
        server.others = 50
        server.say = lambda prompt, limit: (said(prompt, limit)[0], [0] * 50)
    with server.running():
        result = measured(server, server_concurrency=[1])
    (name,) = {
        "no drafter": ["served drafting"], "draft tokens": ["served draft tokens"],
        "answers": ["served answers"], "others": ["requests of others"],
    }[fault]  # fmt: skip
    assert list(suspects(result)) == [name] and suspects(result)[name] in result.facts["cause"]
    check_wording(result.facts["cause"])


def test_sampling_is_passed_on_and_not_judged(serve, measured):
    with serve().running() as running:
        result = measured(running, temperature=0.7, top_p=0.9, server_concurrency=[2])
    assert (running.bodies[-1]["temperature"], running.bodies[-1]["top_p"]) == (0.7, 0.9)
    assert "not judged" in result.facts["served"]["said"]


def test_a_server_that_is_down_is_told_before_the_target_is_loaded(serve, measured, monkeypatch):
    monkeypatch.setattr("dflash_lab.acceptance.evaluate.load_target", None)
    server = serve()
    with server.running():
        pass
    with refused(InputError):
        measured(server)
