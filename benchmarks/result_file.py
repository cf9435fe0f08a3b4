"""What a benchmark wrote, read back by figures, reports and `--resume`; and errors told in one line.

These scripts are started by hand with a path as their argument: the wrong file is a slip of the hand, not a
bug, and is answered with what was expected of it.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dflash_lab.errors import InputError, LabError, StoreError, naming
from dflash_lab.files import read_json

_MISSHAPEN = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, StopIteration)


def read_result(path: Path | str, script: str, **parts: type) -> dict[str, Any]:
    """Read a result of benchmarks/`script`; `InputError` unless it has `parts` (name=kind) at its top."""
    try:
        result = read_json(path)
    except StoreError as error:  # "PATH:LINE: why. Remedy."
        why = str(error).removeprefix(f"{path}:").rpartition(". ")[0]
        raise InputError(_told(path, script, f"cannot be read ({why.strip()})")) from error
    if not isinstance(result, dict):
        raise InputError(_told(path, script, f"holds a {type(result).__name__}"))
    wrong = [name for name, kind in parts.items() if not isinstance(result.get(name), kind)]
    if wrong:
        raise InputError(_told(path, script, f"has no {', '.join(wrong)}"))
    return result


@contextlib.contextmanager
def made_of(path: Path | str, script: str) -> Iterator[None]:
    """Around what is made of a result of `script`: what that lacks within is an `InputError`."""
    try:
        with naming(path):
            yield
    except LabError:
        raise
    except _MISSHAPEN as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error}, {Path(at.filename).name}:{at.lineno}"
        raise InputError(_told(path, script, f"is not whole ({why})")) from error


def _told(path: Path | str, script: str, why: str) -> str:
    return f"{path}: no result of benchmarks/{script}: it {why}. Give what that script wrote with --json."


def told(main: Callable[[], int | None]) -> int:
    """Run `main`; return its status, or 1 with one line on standard error for what a person gave wrongly."""
    try:
        return main() or 0
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
