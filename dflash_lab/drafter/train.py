"""Train a drafter on collected target states: the one call that the stage, scripts and tests make."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_lab.drafter.model import Drafter
from dflash_lab.drafter.parallel import Single
from dflash_lab.drafter.rows import Items
from dflash_lab.drafter.settings import TrainSettings
from dflash_lab.drafter.trainer import Probe, Progress, Trainer, TrainReport

if TYPE_CHECKING:
    from dflash_lab.target.head import TargetHead


def train(
    items: Items,
    head: TargetHead,
    drafter: Drafter,
    settings: TrainSettings,
    *,
    folder: Path | str,
    probe: Probe | None = None,
    on_progress: Progress | None = None,
    group: Single | None = None,
    source: dict[str, Any] | None = None,
) -> TrainReport:
    """Train `drafter` in place on the items that are not held out, writing everything below `folder`.

    A run found there goes on from its last checkpoint; `InputError` if it was another setup, of which
    `source` (plain values: where states and first weights come from) is a part. `head` is the target's, on
    the drafter's device and in its dtype. Raises `Diverged` after too many bad steps in a row.
    """
    return Trainer(
        items, head, drafter, settings, Path(folder), probe, on_progress, group or Single(), source or {}
    ).run()
