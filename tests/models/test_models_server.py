"""A server asked over HTTP, in vLLM's form, in SGLang's and as text: the same tokens as in this process, and
every fault told by name.
"""

from __future__ import annotations

import functools
import json
import socket

import pytest
from support.model_server import ModelServer, hurry
from support.wording import check_wording, refused

from dflash_lab.data.records import BadRecord
from dflash_lab.data.samples import read_provenance, read_samples
from dflash_lab.errors import InputError
from dflash_lab.models import server as module
from dflash_lab.models.generate import generate
from dflash_lab.models.load import load_target
from dflash_lab.models.server import Server, ServerError
from dflash_lab.stage_run import execute
from dflash_lab.stages.prepare import PrepareParams

FORMS = ("vllm", "sglang", "text", "strict")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    hurry(monkeypatch)


@pytest.fixture(scope="module")
def target(tiny_target):
    return load_target(str(tiny_target("qwen3")))


@pytest.fixture(scope="module")
def serve(target):
    """Return a function: form -> a server of the tiny target; text is spelled, since
    bytes at random are none.
    """

    @functools.cache
    def said(prompt, limit):
        (ids,) = generate(target, [prompt], max_new_tokens=limit)
        return ids, [1] * ((len(ids) - 1) // 2)

    def say(prompt, limit):
        return said(tuple(prompt), limit)

    def spell(prompt, limit):
        return [*target.tokenizer.encode(f"n{len(prompt)}", add_special_tokens=False), 258][:limit], []

    def make(form="vllm"):
        how = say if form in ("vllm", "sglang") else spell
        text_of = lambda ids: target.tokenizer.decode(ids, skip_special_tokens=True)  # noqa: E731
        return ModelServer(how, text_of, target.stop_ids, form)

    return make


@pytest.fixture
def params(tmp_path, target):
    """Return a function: server, changes -> parameters of a stage that asks it."""
    rows = [
        {"messages": [{"role": "user", "content": "ab" * n}, {"role": "assistant", "content": "x"}]}
        for n in range(1, 9)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def make(server=None, **changes):
        given = {
            "run_dir": str(tmp_path / "run"), "target": target.name, "input": str(tmp_path / "in.jsonl"),
            "regenerate": "greedy", "max_new_tokens": 8, "device": "cpu", "interactive": False,
            "server": getattr(server, "url", server or ""), "server_requests": 2, "server_timeout_s": 5,
        }  # fmt: skip
        return PrepareParams(**{**given, **changes})

    return make


def opened(server, target, **options):
    return Server(server.url, target.name, **options)


@pytest.mark.parametrize("form", ("vllm", "sglang"))
@pytest.mark.parametrize("stream", (False, True))
def test_served_answers_are_those_of_this_process_token_for_token(serve, target, form, stream):
    prompts = [[257, *range(40, 40 + n)] for n in range(3, 9)]
    ours = generate(target, prompts, max_new_tokens=12, batch=1)
    with serve(form).running() as running, opened(running, target) as server:
        found = dict(server.answer_all(prompts, 12, requests=3, stream=stream))
        assert server.form == {"vllm": "ids", "sglang": "native"}[form] and server.model == "tiny"
    assert [found[number].tokens for number in range(6)] == ours
    assert [found[number].closed for number in range(6)] == [ids[-1] in target.stop_ids for ids in ours]
    assert all((answer.first_seconds <= answer.seconds) is stream for answer in found.values())


@pytest.mark.parametrize("form", ("text", "strict"))
def test_text_is_taken_only_if_it_is_the_same_text_again(serve, target, form, caplog):
    with serve(form).running() as running, opened(running, target) as server:
        answer = server.answer([257, 65, 66], 12)
        assert server.form == "text" and "gives text, no token ids" in caplog.text
        assert target.tokenizer.decode(answer.tokens) == "n3<|im_end|>" and answer.closed
        running.text_of = lambda ids: "\ufffd"
        with refused(BadRecord):
            server.answer([257, 65], 12)
    assert ("return_token_ids" in running.bodies[-1]) is False


def test_sampling_is_passed_on_and_defaults_of_the_server_are_not_left_to_it(serve, target):
    how = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3}
    for form in ("vllm", "sglang"):
        with serve(form).running() as running, opened(running, target) as server:
            server.answer([257, 65], 4, **how)
            server.answer([257, 65], 4)
        sent, greedy = (body.get("sampling_params", body) for body in running.bodies[-2:])
        assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.7, 0.9, 5)
        assert (greedy["temperature"], greedy["top_k"], greedy["repetition_penalty"]) == (0, -1, 1)
        assert greedy["stop_token_ids"] == target.stop_ids and "seed" not in greedy
        assert ("seed" in sent) is (form == "vllm")


def test_a_key_is_sent_and_told_nowhere(serve, target, monkeypatch):
    monkeypatch.setenv("DFLASH_LAB_SERVER_KEY", "a-very-secret-value")
    with serve().running() as running:
        with opened(running, target):
            assert running.headers[-1]["Authorization"] == "Bearer a-very-secret-value"
        running.statuses = [(401, {})]
        with refused(ServerError):
            opened(running, target)


def test_busy_and_broken_servers_are_asked_again(serve, target):
    faults = [(429, {"Retry-After": "0"}), (500, {}), "reset", (503, {"Retry-After": "0.01"})]
    with serve().running() as running, opened(running, target) as server:
        running.statuses = list(faults)
        assert len(server.answer([257, 65], 4).tokens) == 4
        assert len(running.bodies) == 1 + len(faults) + 1
        running.statuses = [(500, {})] * module.TRIES
        with refused(BadRecord):
            server.answer([257, 65], 4)


def test_retry_after_is_a_number_or_a_date_and_no_longer_than_minutes():
    assert module._pause("3") == 3 and module._pause("") is None and module._pause("soon") is None
    assert module._pause("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert module._pause("Wed, 21 Oct 2099 07:28:00 GMT") == 600


@pytest.mark.parametrize(
    "fault",
    ("down", "wrong model", "several models", "page", "no v1", "https", "other tokenizer", "tokens beyond",
     "other words", "slow", "no finish", "sends on"),
)  # fmt: skip
def test_what_is_wrong_with_a_server_is_told_when_it_is_opened(serve, target, fault):
    server, model, timeout = serve(), "", 5.0
    if fault == "down":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            server.url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        with refused(ServerError):
            opened(server, target)
        return
    with server.running():
        match fault:
            case "wrong model":
                model = "tiney"
            case "several models":
                server.models = ["tiny", "large"]
            case "page":
                server.page = True
            case "no v1":
                server.url = server.url.removesuffix("/v1")
            case "https":
                server.url = server.url.replace("http:", "https:")
            case "other tokenizer":
                server.prompt_tokens = 1
            case "tokens beyond":
                server.say = lambda prompt, limit: ([5000], [])
            case "other words":
                server.say, server.text_of = lambda prompt, limit: ([40], []), lambda ids: "zzz"
            case "slow":
                server.slow_s, timeout = 2.0, 0.5
            case "no finish":
                server.finish = None
            case "sends on":
                server.statuses = [(307, {"Location": "http://elsewhere/v1"})]
        with refused(ServerError):
            opened(server, target, model=model, timeout_s=timeout)


def test_answers_that_were_cut_are_failures(serve, target):
    with serve().running() as running, opened(running, target) as server:
        running.finish = "abort"
        with refused(BadRecord):
            server.answer([257, 65], 4)
        running.finish, running.say = "length", lambda prompt, limit: ([40, 41], [])
        with refused(BadRecord):
            server.answer([257, 65], 4)
        running.finish, running.say = "stop", lambda prompt, limit: ([40, 41], [])
        with refused(BadRecord):
            server.answer([257, 65], 4)


# ---- prepare ----


@pytest.mark.parametrize("form", FORMS)
def test_prepare_asks_a_server_and_the_samples_are_those_of_the_loaded_target(serve, params, tmp_path, form):
    with serve(form).running() as running:
        result = execute(params(running))
    figures = result.figures
    as_text = form in ("text", "strict")
    assert (figures["answers_as_ids"], figures["answers_as_text"]) == ((0, 8) if as_text else (8, 0))
    made = read_provenance(tmp_path / "run" / "samples.parquet")["answers_by"]
    assert made["model"] == "tiny" and made["server"] == running.url
    rows = read_samples(tmp_path / "run" / "samples.parquet")
    if not as_text:
        execute(params(run_dir=str(tmp_path / "loaded"), batch_size=1))
        assert rows.equals(read_samples(tmp_path / "loaded" / "samples.parquet"))


def test_a_killed_run_goes_on_and_nothing_is_asked_twice(serve, params):
    def stop(description, done, total, **fields):
        if description == "answers" and done >= 3:
            raise KeyboardInterrupt

    with serve().running() as running:
        given = params(running, server_requests=1)
        with pytest.raises(KeyboardInterrupt):
            execute(given, stop)
        result = execute(given)
    assert result.figures["answers_reused"] >= 3 and result.figures["samples_stored"] == 8
    prompts = [tuple(prompt) for prompt in running.asked if len(prompt) > 5]
    assert len(set(prompts)) == 8 and len(prompts) <= 9  # one may have been under way


def test_a_server_that_dies_ends_the_run_and_what_it_answered_is_kept(serve, params, monkeypatch):
    monkeypatch.setattr(module, "IN_A_ROW", 2)
    with serve().running() as running:
        given = params(running, server_requests=1)
        running.dies_after = 4  # the first of them when the server is opened
        with refused(ServerError):
            execute(given)
        running.dies_after = 10**9
        result = execute(given)
    assert result.figures["answers_reused"] == 3 and result.figures["answers_generated"] == 5


@pytest.mark.parametrize("address", ("localhost:8000", "http://me:pw@host/v1", "ftp://host"))
def test_addresses_are_checked_before_anything_is_asked(params, address):
    with refused(InputError):
        params(address)


def test_a_server_needs_answers_to_ask_for(params):
    for wrong in ({"regenerate": "off"}, {"self_prompts": 3}):
        with refused(InputError):
            params("http://localhost:8000/v1", **wrong)


def test_failed_records_are_named_and_the_others_are_stored(serve, params):
    with serve().running() as running:
        said = running.say
        running.say = lambda prompt, limit: said(prompt, min(limit, 3) if len(prompt) % 4 == 1 else limit)
        result = execute(params(running))
    lost = result.problems.filter(result.problems["kind"] == "server cut")
    assert 0 < lost.height == result.figures["lost_server_cut"] < 8
    check_wording(lost["reason"][0])


def test_prompts_that_the_server_refuses_end_no_run_that_has_answers(serve, params, monkeypatch):
    """The longest come last, so all that are too long for it fail in a row, in a second run too."""
    monkeypatch.setattr(module, "IN_A_ROW", 2)
    with serve().running() as running:
        running.longest = 25
        for _ in range(2):
            result = execute(params(running, force=True))
            assert result.figures["lost_server_refused"] == 5 and result.figures["samples_stored"] == 3
    assert result.figures["answers_reused"] == 3
    check_wording(result.problems["reason"][0])


def test_nothing_but_failures_end_a_run_with_a_message(serve, params, monkeypatch):
    monkeypatch.setattr(module, "IN_A_ROW", 4)
    with serve().running() as running:
        server = params(running)
        said = running.say
        running.say = lambda prompt, limit: said(prompt, min(limit, 2))
        with refused(ServerError):
            execute(server)
