"""What papermill loads of ours, whenever it is imported: an engine. It stays cheap to import.

A process that is the `papermill` command and means one of our notebooks goes on as `launch`.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from dflash_lab.errors import LabError
from dflash_lab.workspace import stage_notebook

ENGINE = "dflash-lab"
COMMAND = "dflash_lab.launch"
logger = logging.getLogger(__name__)

_NOT_READY = "died before replying"  # what jupyter_client says of a kernel that ended before its first word
# A kernel's start-up warnings go straight to the terminal, past every filter; the one it always gives (no
# encryption) is about a connection that never leaves this machine. Nobody asks for a history, and its
# database in a home on the network may be locked.
_KERNEL_ARGUMENTS = ("--IPKernelApp.log_level=ERROR", "--HistoryManager.enabled=False")


class KernelNotStarted(LabError, RuntimeError):
    """The kernel ended twice before it answered; nothing of the notebook ran."""


class QuietEngine:
    """papermill's own engine (`--engine dflash-lab`) with a quiet kernel without a history, which for
    `python3` is this interpreter.
    """

    @classmethod
    def execute_notebook(cls, nb: Any, kernel_name: str, **options: Any) -> Any:
        """Execute the notebook `nb`; raises what papermill's engine raises, or `KernelNotStarted`."""
        try:
            return _execute(nb, kernel_name, options)
        except RuntimeError as error:
            if _NOT_READY not in str(error):
                raise
        # Its ports were free when they were chosen, and another kernel that started then may have them now.
        logger.warning("the kernel ended before it answered, as one does whose port was taken: once more")
        try:
            return _execute(nb, kernel_name, options)
        except RuntimeError as error:
            if _NOT_READY not in str(error):
                raise
            raise KernelNotStarted(
                f"kernel {kernel_name!r} ended twice before it answered; its own words stand above. Does "
                f"`{sys.executable} -m ipykernel_launcher --version` work?"
            ) from error

    @classmethod
    def nb_kernel_name(cls, nb: Any, name: str | None = None) -> str:
        """Return the kernel to start: `name`, else the notebook's."""
        return _papermills_own().nb_kernel_name(nb, name)

    @classmethod
    def nb_language(cls, nb: Any, language: str | None = None) -> str:
        """Return the language: `language`, else the notebook's."""
        return _papermills_own().nb_language(nb, language)


def _execute(nb: Any, kernel_name: str, options: dict[str, Any]) -> Any:
    from dflash_lab.lab import OwnKernelManager

    ours = {"extra_arguments": [*_KERNEL_ARGUMENTS], "kernel_manager_class": OwnKernelManager}
    return _papermills_own().execute_notebook(nb, kernel_name, **ours, **options)


def _papermills_own() -> Any:
    from papermill.engines import NBClientEngine

    return NBClientEngine


def is_papermill(argv: list[str], original: list[str]) -> bool:
    """Say whether a process with this `sys.argv` and `sys.orig_argv` is the papermill command."""
    if argv[:1] == ["-m"]:  # Python is still looking for the module, and that imports its package
        return original[-len(argv)].removeprefix("-m") == "papermill"
    parts = Path(argv[0]).parts if argv else ()
    return parts[-1:] == ("papermill",) or parts[-2:] == ("papermill", "__main__.py")


# papermill loads the engines that installed packages declare while it is imported, before it reads its
# command line. In the middle of its own import it cannot be asked how it reads it: another process does that.
# (A script of ours named `papermill` would be overwritten whenever papermill is installed again.)
if is_papermill(sys.argv, sys.orig_argv) and any(stage_notebook(word, Path.cwd()) for word in sys.argv[1:]):
    alone = [] if sys.argv[0] == "-m" else ["-P"]  # a script's folder of modules is not the one it stands in
    os.execv(sys.executable, [sys.executable, *alone, "-m", COMMAND, *sys.argv[1:]])
