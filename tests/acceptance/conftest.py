"""Tiny targets loaded once a session, and drafters trained on them."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def loaded(tiny_target):
    """Return a function that loads the tiny target of a kind on the CPU in fp32."""
    from dflash_lab.models.load import load_target

    return functools.cache(lambda kind: load_target(str(tiny_target(kind))))


@pytest.fixture(scope="session")
def sliding(tmp_path_factory):
    """A target of which every other layer slides."""
    from support.tiny_targets import build_tiny

    from dflash_lab.models.load import load_target

    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 4}
    folder = tmp_path_factory.mktemp("sliding")
    return load_target(str(build_tiny("qwen3", folder, use_sliding_window=True, sliding_window=8, **kinds)))


@pytest.fixture(scope="session")
def plain(loaded):
    """Return a function that gives PROMPT's greedy answer of 40 tokens by a target kind."""
    from drafters import PROMPT, greedy

    return functools.cache(lambda kind: greedy(loaded(kind), [PROMPT], 40)[0])


@pytest.fixture(scope="session")
def trained(loaded):
    """Return a function that gives a kind's target, a drafter trained until it is right often, not always,
    and the items (greedy answers of PROMPTS) that it was trained on.
    """
    from drafters import PROMPTS, answered, greedy, overfit, random_drafter

    @functools.cache
    def get(kind):
        target = loaded(kind)
        items = answered(target, PROMPTS, greedy(target, PROMPTS, 20))
        drafter = random_drafter(target, block_size=5, initializer_range=0.1)
        return target, overfit(target, drafter, items, steps=8), items

    return get
