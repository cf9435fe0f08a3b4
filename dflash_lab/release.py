"""Give back the memory that a failed attempt or cell keeps alive.

After an exception IPython holds the traceback, the traceback holds the frames, and the frames hold GPU
tensors: in `sys.last_*`, in `InteractiveTB.tb` and in `last_execution_result`. All three must go before
the cache can be emptied. `forget_locals` frees the tensors at once and keeps the traceback readable;
`release` drops the rest.
"""

from __future__ import annotations

import gc
import sys
import traceback


def forget_locals(error: BaseException) -> None:
    """Clear the local variables of every finished frame that `error`, its causes and its contexts hold."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        current = queue.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        queue += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            queue += current.exceptions


def release() -> None:
    """Drop what the last error holds, collect garbage, and give cached GPU blocks back to the driver.

    Call it after the `except` block. Slow (tens of ms): once a failure, never once a batch.
    """
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    _forget_notebook_error()
    collect()


def collect() -> None:
    """Collect garbage and empty the CUDA cache, if torch is in use at all."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _forget_notebook_error() -> None:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if traceback_printer := getattr(shell, "InteractiveTB", None):  # IPython's front ends have one
        traceback_printer.tb = None
    if result := getattr(shell, "last_execution_result", None):
        result.error_in_exec = result.error_before_exec = None
