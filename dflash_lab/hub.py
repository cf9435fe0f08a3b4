"""Whether the Hugging Face hub can be asked, settled in seconds.

Left to itself the hub's client asks an unreachable server six times for every file, half a minute in all.
"""

from __future__ import annotations

import functools
import threading
import time
import urllib.error
import urllib.request

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
