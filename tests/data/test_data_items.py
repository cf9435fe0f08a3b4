"""The feature item: lengths must agree, and light modules of the room import no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflash_lab import data
from dflash_lab.data.samples import FeatureItem


def item(**changes):
    fields = {
        "hash": "0" * 32,
        "input_ids": torch.zeros(3, dtype=torch.int32),
        "loss_mask": torch.ones(3, dtype=torch.uint8),
        "taps": torch.zeros(3, 10),
        "final": None,
        "heldout": False,
    }
    return FeatureItem(**{**fields, **changes})


def test_length_is_that_of_the_tokens():
    assert len(item()) == 3
    assert len(item(final=torch.zeros(3, 5))) == 3


@pytest.mark.parametrize("name", ["loss_mask", "taps", "final"])
def test_rows_must_agree(name):
    with pytest.raises(ValueError, match=f"{name} has 2 rows for 3 tokens"):
        item(**{name: torch.zeros(2, 5)})


def test_the_room_imports_without_torch():
    modules = [path.stem for path in Path(data.__file__).parent.glob("*.py")]
    code = ";".join(f"import dflash_lab.data.{name}" for name in modules)
    code += ";import sys;assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
