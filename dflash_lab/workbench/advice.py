"""What `failure.json` says beside the error: what the exception itself knows, or what its kind tells."""

from __future__ import annotations

from typing import Any

from dflash_lab.errors import carried, chain
from dflash_lab.workbench.params import StageParams

_SIZES = ("batch", "block", "tokens", "anchors", "length", "layers", "taps", "budget", "size", "samples")


def details_of(error: BaseException) -> dict[str, Any]:
    """Return the plain facts (batch, lengths, memory) that the error or its cause carries as `details`."""
    return {str(name): value for name, value in (carried(error, "details", dict) or {}).items()}


def advice_for(error: BaseException, params: StageParams) -> str:
    """Return what to do: the error's own `advice`, else what helps against a lack of memory, else nothing."""
    if own := carried(error, "advice"):
        return str(own)
    from dflash_lab.extraction.oom import classify

    return _memory(error, params) if classify(error).kind == "memory" else ""


def _memory(error: BaseException, params: StageParams) -> str:
    from dflash_lab.memory.crash import explain_crash, requested_bytes

    general = "Run memory_sweep with these parameters for the largest sizes that fit."
    asking = next((str(link) for link in chain(error) if requested_bytes(str(link))), "")
    if not asking:
        return general
    values = {name: value for name, value in params.as_dict().items() if any(word in name for word in _SIZES)}
    sizes = {name: value for name, value in values.items() if isinstance(value, int) and value > 1}
    return f"{explain_crash(asking, dimensions=sizes).explain()} {general}"
