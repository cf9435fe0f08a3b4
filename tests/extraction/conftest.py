"""Tiny targets for the extraction tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_targets import build_tiny

from dflash_lab.models.load import Target, load_target


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory):
    """A function: kind -> folder of a tiny checkpoint, built once a session."""
    built: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in built:
            built[kind] = build_tiny(kind, tmp_path_factory.mktemp(kind))
        return built[kind]

    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    """A function: kind -> loaded tiny target on the CPU in float32, loaded once a session."""
    loaded: dict[str, Target] = {}

    def target(kind: str) -> Target:
        if kind not in loaded:
            loaded[kind] = load_target(str(tiny_folder(kind)))
        return loaded[kind]

    return target
