"""The measure that training runs on the side: acceptance on held-out samples, which the loss does not say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_lab.drafter.rows import Items
    from dflash_lab.workbench.stages.train_drafter import TrainDrafterParams


def tau_probe(params: TrainDrafterParams, store: Items, head: Any) -> Any:
    """Chained acceptance length on the first held-out samples, as decoding would walk them."""
    import numpy as np

    from dflash_lab.acceptance.offline import answer_segments, offline

    items = [store[int(i)] for i in np.flatnonzero(store.heldout)[: params.tau_samples]]
    items = [item for item in items if answer_segments(item.loss_mask)]  # some are cut within their prompt

    def probe(drafter: Any) -> dict[str, Any]:
        if not items:
            return {}
        report = offline(items, head, drafter, budgets=(16,), top_k=())
        return {"chained_tau": report.tau().mean, "tree16_tau": report.tau(16).mean}

    return probe
