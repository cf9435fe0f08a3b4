"""A hub id without a hub: answered at once, from the cache if it is there, else with what may be meant."""

from __future__ import annotations

import shutil
import socket
import threading
import time

import pytest
from huggingface_hub import constants
from support.wording import refused

from dflash_lab import hub
from dflash_lab.errors import InputError
from dflash_lab.models.load import load_target
from dflash_lab.models.source import identify, load_config, resolve

COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch, tiny_target):
    """A cache of hub models that holds one, and no hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    folder = tmp_path / "hub" / "models--me--tiny-llama"
    shutil.copytree(tiny_target("llama"), folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    hub._answers.cache_clear()
    yield folder
    hub._answers.cache_clear()


def test_a_cached_id_is_read_without_the_hub(cache, tiny_target):
    target = load_target("me/tiny-llama")
    assert target.name == "me/tiny-llama"
    assert target.num_layers == load_config("me/tiny-llama").num_hidden_layers
    identity = identify(resolve("me/tiny-llama"))
    assert identity["revision"] == COMMIT and identity["name"] == "me/tiny-llama"
    plain = identify(resolve(str(tiny_target("llama"))))
    assert identity["weights"] == plain["weights"] and plain["revision"] == ""


@pytest.mark.parametrize("name", ["me/tiny-lama", "Qwen/Qwen3-8C", "you/tiny-llama"])
def test_an_unknown_id_is_answered_fast_with_what_may_be_meant(cache, name):
    began = time.monotonic()
    with refused(InputError):
        load_config(name)
    assert time.monotonic() - began < 2


def test_a_mistyped_folder_is_met_by_its_neighbour(cache, tmp_path, monkeypatch):
    (tmp_path / "models" / "my-target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("models/my-targt", "./models/my-targt"):
        with refused(InputError):
            resolve(name)


def test_a_hub_that_accepts_and_never_answers_costs_seconds(cache, monkeypatch):
    monkeypatch.setattr(hub, "ANSWER_S", 0.3)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        began = time.monotonic()
        with refused(InputError):
            resolve("me/nothing")
        assert time.monotonic() - began < 3


def test_a_hub_that_answers_is_asked_for_the_id(cache, monkeypatch):
    listener = socket.create_server(("127.0.0.1", 0))

    def refuse():
        connection, _ = listener.accept()
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        connection.close()

    server = threading.Thread(target=refuse, daemon=True)
    server.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert resolve("me/nothing").checkpoint == "me/nothing"
    server.join(5)
    listener.close()
