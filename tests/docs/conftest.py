"""A fresh checkout in miniature, in which the documentation's commands are run as they stand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkout import Checkout

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def checkout(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Callable[[str], Path], preloaded: dict[str, str]
) -> Checkout:
    """One miniature checkout for all pages: what the README's commands leave, later pages use."""
    return Checkout(tmp_path_factory.mktemp("checkout"), tiny_target("llama"), preloaded)
