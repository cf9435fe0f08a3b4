"""Wrong input is refused before any work, with words that say what, where and what is expected."""

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


VALUES = {
    "label of the vocabulary's size": put("labels", 97),
    "ignored label where the weight counts": put("labels", -100),
    "NaN weight": put("weights", float("nan")),
    "infinite weight": put("weights", float("inf")),
    "negative weight": put("weights", -1.0),
    "target row beyond the states": put("target_rows", 11),
    "negative target row": put("target_rows", -1),
    "flat hidden": swap("hidden", lambda t: t.flatten(0, 1)),
    "half precision": swap("hidden", lambda t: t.half()),
    "head of another dtype": swap("head", lambda t: t.float()),
    "head transposed": swap("head", lambda t: t.T),
    "head that is trained": swap("head", lambda t: t.requires_grad_()),
    "labels of another shape": swap("labels", lambda t: t[:, 1:]),
    "labels as floats": swap("labels", lambda t: t.float()),
    "weights as integers": swap("weights", lambda t: t.long()),
    "weights elsewhere": swap("weights", lambda t: t.to("meta")),
    "head elsewhere": swap("head", lambda t: t.to("meta")),
    "target states in blocks": swap("target_hidden", lambda t: t[None]),
    "target states of another size": swap("target_hidden", lambda t: t[:, :8]),
    "target states of another dtype": swap("target_hidden", lambda t: t.float()),
    "hidden that is no tensor": swap("hidden", lambda t: t.tolist()),
    "no weights": swap("weights", lambda t: None),
    "labels that are no tensor": swap("labels", lambda t: t.tolist()),
    "target that is trained": swap("target_hidden", lambda t: t.requires_grad_()),
}


@pytest.mark.parametrize("name", VALUES)
def test_wrong_tensor_is_refused(name: str) -> None:
    case = make_case()
    VALUES[name](case)
    with refused(InputError):
        call(case)


@pytest.mark.parametrize(
    ("drop", "config"),
    [
        (("labels",), SOFT),
        (("target_hidden", "target_rows"), SOFT),
        (("target_rows",), SOFT),
        (("target_hidden",), LossConfig()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_missing_parts_are_named(drop: tuple[str, ...], config: LossConfig) -> None:
    with refused(InputError):
        call(make_case(), config, drop=drop)


def test_labels_may_be_missing_where_the_target_gives_them() -> None:
    call(make_case(), LossConfig(label_source="argmax"), drop=("labels",))


@pytest.mark.parametrize(
    "options",
    [
        dict(target_head=make_case().head[:50]),
        dict(target_head=make_case().head[:, :8]),
        dict(backend="tritn"),
        dict(backend="triton"),
        dict(config={"hard_weight": 1.0}),
        *(dict(chunk_rows=rows) for rows in (0, -4, 2.5, True, 2)),
    ],
    ids=lambda options: " ".join(
        f"{k} {list(v.shape) if isinstance(v, torch.Tensor) else v}" for k, v in options.items()
    ),
)
def test_a_wrong_argument_is_refused(options: dict[str, Any]) -> None:
    with refused(InputError):
        call(make_case(hole=0.0), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"hard_weight": -1},
        {"soft_weight": float("nan")},
        {"temperature": 0},
        {"dpace_alpha": 1.5},
        {"cap_weight": "0.1"},
        {"tv_weight": True},
        {"hard_weight": 0},
        {"weighting": "dpaec"},
        {"label_source": "target"},
        {"lk_weight": 1, "temperature": 2},
        {"logit_scale": 0.0},
        {"logit_softcap": -3},
    ],
    ids=str,
)
def test_wrong_option_is_refused(options: dict[str, Any]) -> None:
    with refused(InputError):
        LossConfig(**options)
