"""Tiny targets loaded once a session."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def loaded(tiny_target):
    """Return a function that loads the tiny target of a kind on the CPU in fp32."""
    from dflash_lab.models.load import load_target

    targets = {}

    def get(kind):
        if kind not in targets:
            targets[kind] = load_target(str(tiny_target(kind)))
        return targets[kind]

    return get
