"""What Triton asks of a kernel's signature, read from the source: it must hold where Triton is not installed.

Triton 3.6 refuses, at a kernel's first launch, a `constexpr` parameter whose name stands in one of the
`do_not_specialize` lists.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dflash_lab

ROOT = Path(dflash_lab.__file__).parent


def unspecialized() -> Iterator[tuple[str, list[ast.arg], set[str]]]:
    """(name, parameters, names listed) of every kernel with a `do_not_specialize` list."""
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
        constants = {ast.unparse(node.targets[0]): node.value for node in assigned}
        for node in ast.walk(tree):
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                for word in decorator.keywords if isinstance(decorator, ast.Call) else ():
                    if (word.arg or "").startswith("do_not_specialize"):
                        listed = constants.get(ast.unparse(word.value), word.value)
                        yield f"{path.stem}.{node.name}", node.args.args, set(ast.literal_eval(listed))


KERNELS = list(unspecialized())


@pytest.mark.parametrize(("parameters", "listed"), [k[1:] for k in KERNELS], ids=[k[0] for k in KERNELS])
def test_no_flag_is_listed_among_the_pointers_of_rows(parameters: list[ast.arg], listed: set[str]) -> None:
    flags = {
        p.arg for p in parameters if p.annotation is not None and "constexpr" in ast.unparse(p.annotation)
    }
    assert flags and listed & {p.arg for p in parameters}
    assert not flags & listed


def test_every_pointer_listed_is_one_of_some_kernel() -> None:
    given = {p.arg for _, parameters, _ in KERNELS for p in parameters}
    assert KERNELS and set().union(*(listed for _, _, listed in KERNELS)) <= given
