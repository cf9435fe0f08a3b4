"""What papermill loads of ours, by the entry point in pyproject.toml: an engine, and in a process that is the
`papermill` command, what its user left out on the line.

papermill loads every engine that installed packages declare while it is imported, before it reads its command
line. A script of ours named `papermill` would be overwritten whenever papermill is installed again; an entry
point belongs to this package and stays. Nothing of papermill is imported at the top: it is in the middle of
its own import when it loads this module.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from dflash_lab.errors import LabError
from dflash_lab.files import make_folder
from dflash_lab.workbench.papermill_saving import save_whole
from dflash_lab.workbench.papermill_words import filled_in
from dflash_lab.workbench.secrets import redact

ENGINE = "dflash-lab"
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
    from dflash_lab.workbench.own_kernel import OwnKernelManager

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


def fill_in_the_command_line() -> None:
    """Put what papermill's user left out into `sys.argv`; or end with one sentence on stderr, exit code 1."""
    try:
        filled = filled_in(sys.argv[1:], Path.cwd())
        if filled.output:
            make_folder(filled.output.parent)
    except (LabError, OSError) as error:
        sys.stderr.write(f"papermill: {redact(str(error))}\n")
        sys.exit(1)
    sys.argv[1:] = filled.words
    if filled.ours and not any(word.partition("=")[0] == "--engine" for word in filled.words):
        sys.argv[1:1] = ["--engine", ENGINE]
    if filled.output and filled.attempt:
        save_whole(filled.output, filled.attempt)
        until = f"; until it ends well, to {filled.attempt.name}" if filled.attempt != filled.output else ""
        sys.stderr.write(f"papermill: the executed notebook goes to {filled.output}{until}\n")


if is_papermill(sys.argv, sys.orig_argv):
    fill_in_the_command_line()
