"""Tokens that were made elsewhere: `input_ids` with their `loss_mask`, taken as they are where a drafter can
be trained on them, and named by their fault where it cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_lab.data.problems import BadRecord

KEYS = ("input_ids", "loss_mask")

Tokens = tuple[list[int], list[int]]  # ids [L]; mask [L], 1 on what the target is to have said


def holds_tokens(record: Any) -> bool:
    """Whether a record has tokens of its own."""
    return isinstance(record, Mapping) and all(record.get(key) is not None for key in KEYS)


def read_tokens(record: Mapping[str, Any]) -> Tokens:
    """Return ids [L] and mask [L] of a record that has them; `BadRecord` where they are not what they must
    be: whole numbers, a mark of 0 or 1 (false or true) for each, none at the first position, one at least.
    """
    ids, mask = (_numbers(record[key], key) for key in KEYS)
    if len(ids) != len(mask):
        reason = f"{len(ids):,} input_ids and {len(mask):,} values of loss_mask: one is needed for each"
        raise BadRecord("other length", reason)
    if not ids:
        raise BadRecord("no tokens", "input_ids is empty")
    for place, mark in enumerate(mask):
        if mark not in (0, 1):
            raise BadRecord("wrong mask", f"loss_mask[{place}] is {mark}, neither 0 nor 1")
    if not any(mask):
        raise BadRecord("no answer", "loss_mask is 0 everywhere: nothing is to be learned from these tokens")
    if mask[0]:
        reason = "loss_mask[0] is 1, and nothing stands before the first token to foretell it from: make it 0"
        raise BadRecord("wrong mask", reason)
    return ids, mask


def check_vocabulary(ids: list[int], size: int) -> None:
    """Raise a `BadRecord` for the first of `ids` [L] that is no token of a target with `size` of them."""
    if min(ids) >= 0 and max(ids) < size:
        return
    place, token = next((at, one) for at, one in enumerate(ids) if not 0 <= one < size)
    raise BadRecord(
        "not in the vocabulary",
        f"input_ids[{place}] is {str(token)[:40]}, the target has tokens 0 to {size - 1:,}: they were made "
        "with another tokenizer",
    )


def _numbers(value: Any, name: str) -> list[int]:
    if not isinstance(value, list):
        raise BadRecord("wrong type", f"{name} is {type(value).__name__}, not a list of whole numbers")
    allowed = {int, bool} if name == "loss_mask" else {int}
    if {*map(type, value)} <= allowed:
        return [int(one) for one in value]
    place, one = next((at, one) for at, one in enumerate(value) if type(one) not in allowed)
    raise BadRecord("wrong type", f"{name}[{place}] is {str(one)[:40]!r}, not a whole number")
