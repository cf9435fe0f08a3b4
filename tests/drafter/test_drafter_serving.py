"""What the serving benchmark counts as equal, and when it says that a server does not fit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.tiny_drafters import tiny_config, tiny_drafter
from support.tiny_targets import VOCAB_SIZE
from support.wording import check_wording

from dflash_lab.acceptance.decode import decode, plain_decode
from dflash_lab.drafter.config import FULL
from dflash_lab.models.load import load_target

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import serving

MINE = [{"plain": [1, 2, 3], "tokens": [1, 2, 3], "accepted": [0, 1], "drafts": [[1, [9, 9]], [2, [3, 9]]]}]
SAME = [{"tokens": [1, 2, 3], "accepted": [0, 1], "drafts": [*MINE[0]["drafts"], [3, [7, 7]]]}]


def test_the_same_is_equal_though_a_server_drafts_once_more():
    found = serving.compare(MINE, SAME)
    assert found["answers_like_plain"] == [1, 1] and found["rounds"] == [2, 2] and found["blocks"] == [2, 2]
    assert found["tau_ours"] == found["tau_theirs"] == 1.5
    assert not serving.differs(found | {"layers_equal": True, "layers": [{}, {}]})


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [1, 2, 4]},
        {"accepted": [0, 2]},
        {"accepted": [0]},
        {"drafts": [[1, [9, 9]], [2, [3, 8]]]},
        {"drafts": [[1, [9, 9]]]},
    ],
    ids=str,
)
def test_whatever_is_another_is_a_difference(change):
    assert serving.differs(serving.compare(MINE, [SAME[0] | change]))


def test_a_mask_or_a_tau_that_is_another_is_a_difference():
    over_http = serving.compare(MINE, [{"tokens": [1, 2, 3]}])
    assert not serving.differs(over_http | {"tau_theirs": 1.5})
    assert serving.differs(over_http | {"tau_theirs": 1.25})
    assert serving.differs(serving.compare(MINE, SAME) | {"layers_equal": False})


def test_our_side_is_the_decoding_of_the_project(tiny_target):
    target = load_target(str(tiny_target("llama")))
    shape = dict(vocab_size=VOCAB_SIZE, mask_token_id=280, num_target_layers=8, layer_types=(FULL,) * 3)
    drafter, prompt = tiny_drafter(tiny_config(**shape)), [5, 99, 104, 7]
    found = serving.ours(target, drafter, prompt, 8, stops=False)
    answer = decode(target, drafter, prompt, max_new_tokens=8, stop_ids=())
    assert found["tokens"] == answer.tokens
    assert found["plain"] == plain_decode(target, prompt, max_new_tokens=8, stop_ids=()).tokens
    assert found["accepted"] == [one.accepted for one in answer.rounds]
    for block, one in zip(found["drafts"], answer.rounds, strict=True):
        assert len(block[1]) == one.drafted
    assert found["drafts"][0][0] == answer.tokens[0]


@pytest.mark.parametrize("machine", ["arm", "old"])
def test_a_machine_that_the_wheel_does_not_fit_is_told_so(monkeypatch, machine):
    with monkeypatch.context() as there:
        there.setattr(serving.platform, "system", lambda: "Linux")
        there.setattr(serving.platform, "machine", lambda: "aarch64" if machine == "arm" else "x86_64")
        there.setattr(serving.Path, "read_text", lambda path: "flags\t: fpu sse2 avx\n")
        reason = serving.why_not()
    check_wording(reason)
