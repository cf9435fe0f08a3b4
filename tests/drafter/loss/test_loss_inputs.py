"""Wrong input is refused before any work, with a message that says what, where and what is expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loss_reference import Case, make_case
from support.wording import refused

from dflash_lab.drafter.loss import fused_draft_loss
from dflash_lab.drafter.loss_terms import LossConfig
from dflash_lab.errors import InputError

SOFT = LossConfig(soft_weight=0.5)


def call(case: Case, config: LossConfig = SOFT, *, drop: tuple[str, ...] = (), **options: Any) -> None:
    (hidden, head, labels, weights), target = case.arguments()
    target = {name: value for name, value in target.items() if name not in drop}
    fused_draft_loss(
        hidden, head, None if "labels" in drop else labels, weights, **target, config=config, **options
    )


def live(case: Case) -> tuple[int, int]:
    anchor, slot = (case.weights != 0).nonzero()[3].tolist()
    return anchor, slot


def put(name: str, value: float) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        getattr(case, name)[live(case)] = value

    return change


def swap(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        setattr(case, name, make(getattr(case, name)))

    return change


PLACE = r"\[\d+, \d+\] = "
VALUES = {
    "label of the vocabulary's size": (put("labels", 97), "labels" + PLACE + "97.*0 <= label < 97"),
    "ignored label where the weight counts": (put("labels", -100), "labels" + PLACE + "-100"),
    "NaN weight": (put("weights", float("nan")), "weights" + PLACE + "nan.*finite"),
    "infinite weight": (put("weights", float("inf")), "weights" + PLACE + "inf"),
    "negative weight": (put("weights", -1.0), "weights" + PLACE + "-1"),
    "target row beyond the states": (put("target_rows", 11), "target_rows" + PLACE + "11.*< 11"),
    "negative target row": (put("target_rows", -1), "target_rows" + PLACE + "-1"),
    "flat hidden": (
        swap("hidden", lambda t: t.flatten(0, 1)),
        r"hidden has shape \[35, 16\].*anchors, block",
    ),
    "half precision": (swap("hidden", lambda t: t.half()), "hidden is torch.float16.*bfloat16"),
    "head of another dtype": (
        swap("head", lambda t: t.float()),
        "head is torch.float32.*torch.float64.*cast",
    ),
    "head transposed": (swap("head", lambda t: t.T), r"head has shape \[16, 97\].*\[vocabulary, 16\]"),
    "head that is trained": (
        swap("head", lambda t: t.requires_grad_()),
        r"head requires grad.*requires_grad_\(False\)",
    ),
    "labels of another shape": (swap("labels", lambda t: t[:, 1:]), r"labels has shape \[7, 4\].*\[7, 5\]"),
    "labels as floats": (swap("labels", lambda t: t.float()), "labels is torch.float32.*int64"),
    "weights as integers": (swap("weights", lambda t: t.long()), "weights is torch.int64.*floating"),
    "weights elsewhere": (swap("weights", lambda t: t.to("meta")), "weights is on meta.*CPU"),
    "head elsewhere": (swap("head", lambda t: t.to("meta")), "head is on meta but hidden on cpu"),
    "target states in blocks": (
        swap("target_hidden", lambda t: t[None]),
        "target_hidden has shape.*rows, hidden size",
    ),
    "target states of another size": (
        swap("target_hidden", lambda t: t[:, :8]),
        "target_hidden has hidden size 8",
    ),
    "target states of another dtype": (
        swap("target_hidden", lambda t: t.float()),
        "target_hidden is torch.float32",
    ),
    "target that is trained": (
        swap("target_hidden", lambda t: t.requires_grad_()),
        r"target_hidden requires.*detach",
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_wrong_tensor_is_refused(name: str) -> None:
    change, message = VALUES[name]
    case = make_case()
    change(case)
    with refused(InputError):
        call(case)


def test_missing_parts_are_named() -> None:
    with refused(InputError):
        call(make_case(), drop=("labels",))
    with refused(InputError):
        call(make_case(), drop=("target_hidden", "target_rows"))
    with refused(InputError):
        call(make_case(), drop=("target_rows",))
    with refused(InputError):
        call(make_case(), LossConfig(), drop=("target_hidden",))
    call(make_case(), LossConfig(label_source="argmax"), drop=("labels",))


def test_target_head_must_match() -> None:
    case = make_case()
    with refused(InputError):
        call(case, target_head=case.head[:50])
    with refused(InputError):
        call(case, target_head=case.head[:, :8])


def test_unknown_backend_is_refused_with_the_near_name() -> None:
    with refused(InputError):
        call(make_case(), backend="tritn")
    with refused(InputError):
        call(make_case(), backend="triton")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hard_weight": -1}, "hard_weight = -1: must be >= 0"),
        ({"soft_weight": float("nan")}, "soft_weight = nan: give a finite number"),
        ({"temperature": 0}, "temperature = 0: must be > 0"),
        ({"dpace_alpha": 1.5}, "dpace_alpha = 1.5: must be >= 0 and <= 1"),
        ({"cap_weight": "0.1"}, "cap_weight = '0.1': give a finite number"),
        ({"tv_weight": True}, "tv_weight = True"),
        ({"hard_weight": 0}, "every term has weight 0"),
        ({"weighting": "dpaec"}, "weighting = 'dpaec'.*did you mean 'dpace'"),
        ({"label_source": "target"}, "label_source = 'target': choose one of data, argmax"),
        ({"lk_weight": 1, "temperature": 2}, "lk_weight needs temperature 1"),
        ({"logit_scale": 0.0}, "logit_scale = 0.0: must be > 0"),
        ({"logit_softcap": -3}, "logit_softcap = -3"),
    ],
)
def test_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    with refused(InputError):
        LossConfig(**options)


@pytest.mark.parametrize("rows", [0, -4, 2.5, True])
def test_wrong_number_of_rows_is_refused(rows: Any) -> None:
    with refused(InputError):
        call(make_case(), chunk_rows=rows)


def test_chunk_smaller_than_a_block_is_refused() -> None:
    with refused(InputError):
        call(make_case(hole=0.0), chunk_rows=2)
