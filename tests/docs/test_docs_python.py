"""What the package offers by name from Python: each name is there, importing is cheap, the examples run."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys

import documents
import pytest

import dflash_lab

PACKAGE = documents.REPO / "dflash_lab"
PAGE = documents.REPO / "docs" / "python.md"


def test_every_name_resolves_and_is_documented_and_a_type_checker_sees_the_same():
    names = {name: getattr(dflash_lab, name) for name in dflash_lab._PLACES}
    assert set(names) <= set(dir(dflash_lab))
    for name, found in names.items():
        assert inspect.getdoc(found) and found.__module__ == dflash_lab._PLACES[name], name
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    seen = {alias.name: node.module for node in imports for alias in node.names if node.module != "typing"}
    assert seen == dflash_lab._PLACES
    with pytest.raises(AttributeError, match="no attribute 'lode_target'"):
        dflash_lab.lode_target  # noqa: B018


def test_importing_it_is_quick_and_brings_neither_torch_nor_polars():
    code = (
        "import time; start = time.perf_counter(); import dflash_lab, sys; dir(dflash_lab)\n"
        "print(time.perf_counter() - start, {'torch', 'transformers', 'polars', 'numpy'} & {*sys.modules})\n"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(3)]
    assert all(done.stdout.endswith("set()\n") for done in runs), runs
    assert min(float(done.stdout.split()[0]) for done in runs) < 0.3


def test_the_package_itself_never_goes_through_its_own_front():
    """Else the rule of whom a room may import could be walked around."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "dflash_lab":
                assert not {alias.name for alias in node.names} & {*dflash_lab._PLACES}, path


def test_the_pages_examples_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "example"}
    for block in documents.blocks(PAGE):
        exec(compile("\n" * block.line + block.text, str(PAGE), "exec"), namespace)
    said = capsys.readouterr().out
    assert namespace["tap_ids"] == [1, 3, 5] and "after ['" in said and "tokens a round" in said
    assert len(namespace["store"]) == 40 and "40 samples in batches of {1, 2, 3, 4}" in said
    assert namespace["report"].last["ce"] < namespace["report"].first["ce"]
