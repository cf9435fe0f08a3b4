"""An answer that leaves plain decoding: a tie of the target's logits is told from a fault."""

from __future__ import annotations

import copy

import pytest
import torch

from dflash_lab.acceptance.decode import Study, plain_decode
from dflash_lab.acceptance.evaluate import differences
from dflash_lab.models.load import load_target

PROMPT = [257, 84, 104, 105, 115, 32, 105, 115, 32, 97]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tie_is_told_from_a_fault(tiny_target, dtype):
    target = load_target(str(tiny_target("llama")), device="cpu", dtype=dtype)
    plain = plain_decode(target, PROMPT, max_new_tokens=12, stop_ids=())
    place = 6
    ids = torch.tensor([[*PROMPT, *plain.tokens[:place]]])
    with torch.no_grad():
        logits = target.head.logits(target.body(input_ids=ids, use_cache=False).last_hidden_state[0, -1:])[0]
    order = logits.float().argsort(descending=True).tolist()
    assert order[0] == plain.tokens[place]
    studies = {}
    for name, token in (("runner-up", order[1]), ("last", order[-1])):
        answer = copy.deepcopy(plain)
        answer.tokens[place:] = [token] * (len(answer.tokens) - place)
        studies[name] = Study(name, [answer], [tuple(PROMPT)])
    base = Study("plain", [plain], [tuple(PROMPT)])
    assert differences(target, base, base) == []
    (fault,) = differences(target, base, studies["last"])
    gap = float(logits.float()[order[0]] - logits.float()[order[-1]])
    assert (fault.answer, fault.place, fault.tie) == (0, place, False)
    assert fault.margin == pytest.approx(gap, rel=0.02)
    with torch.no_grad():  # now both tokens have the same row, so the same logit
        target.head.weight[order[1]] = target.head.weight[order[0]]
    (tie,) = differences(target, base, studies["runner-up"])
    assert tie.place == place and tie.tie and tie.margin == 0
