"""The Hugging Face hub: whether it can be asked, and what an id means when it cannot, settled in seconds.

Left to itself the hub's client asks an unreachable server six times for every file, half a minute in all.
"""

from __future__ import annotations

import functools
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from dflash_lab.errors import InputError, near

ANSWER_S = 3.0  # how long the hub may take to answer
_ASKED_AGAIN_S = 60.0  # an answer is believed this long, so that a kernel notices when the network returns


def out_of_reach() -> str:
    """Return why the hub cannot be asked, in words; an empty string when it can."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if _answers(constants.ENDPOINT, int(time.monotonic() / _ASKED_AGAIN_S)):
        return ""
    return f"{constants.ENDPOINT} does not answer"


@functools.lru_cache(maxsize=4)
def _answers(endpoint: str, minute: int) -> bool:
    """Say whether a server answers, whatever it answers; the name's look-up may hang, so a thread asks."""
    found: list[bool] = []

    def ask() -> None:
        request = urllib.request.Request(endpoint, method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=ANSWER_S).close()
        except urllib.error.HTTPError:
            found.append(True)
        except OSError as error:
            # A certificate that urllib cannot check belongs to a server that answers.
            found.append("CERTIFICATE" in str(error))
        else:
            found.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_S + 1.0)
    return bool(found and found[0])


def checkpoint_of(target: str, known: Iterable[str]) -> str:
    """Return what to load a hub id from: the id itself, or its snapshot in the cache when the hub is out of
    reach.

    known: names that may have been meant. Raises `InputError` when there is neither.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if not (why := out_of_reach()):
        return target
    try:
        return snapshot_download(target, cache_dir=constants.HF_HUB_CACHE, local_files_only=True)
    except LocalEntryNotFoundError as error:
        options = [*known, *cached_ids(), *folders_beside(target)]
        short = {option.removeprefix("random:").split("/")[-1].lower(): option for option in options}
        if not (meant := near(target, options)):  # by last names, told as what they belong to
            meant = near(target.split("/")[-1].lower(), short)
            for name, option in short.items():
                meant = meant.replace(repr(name), repr(option))
        raise InputError(
            f"target {target!r}: {why}, and it is neither in this machine's cache of hub models nor a "
            f"folder{meant}. Give a local folder, or smollm2, or random:<shape>; or connect to the hub."
        ) from error


def cached_ids() -> list[str]:
    """Return the ids of the models in this machine's cache."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    names = sorted(path.name for path in folder.glob("models--*")) if folder.is_dir() else []
    return [name.removeprefix("models--").replace("--", "/", 1) for name in names]


def folders_beside(target: str) -> list[str]:
    """Return the folders that stand where a mistyped path would have its own."""
    parent = Path(target).expanduser().parent
    try:
        return [str(path) for path in sorted(parent.iterdir()) if path.is_dir()][:1000]
    except OSError:  # no such parent, or not ours to read: nothing there can have been meant
        return []
