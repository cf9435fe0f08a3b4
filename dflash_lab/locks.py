"""Locks of the kernel (flock): the holder's death, however it comes, drops them, so none is left behind.

Some network file systems have no locks. There everyone gets one, with a warning.
"""

from __future__ import annotations

import errno
import fcntl
import logging
from typing import IO

logger = logging.getLogger(__name__)


def try_lock(file: IO, *, shared: bool = False) -> bool:
    """Take the lock of an open file until it is closed; False when another process has it."""
    return _flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def wait_for_lock(file: IO) -> None:
    """Take the lock of an open file until it is closed, waiting for other processes to be done."""
    _flock(file, fcntl.LOCK_EX)


def _flock(file: IO, how: int) -> bool:
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if how & fcntl.LOCK_NB and error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise
        logger.warning("%s: no locks on this file system; never start the same work twice", file.name)
    return True
