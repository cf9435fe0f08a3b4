"""The measure that training runs on the side: acceptance on held-out samples, which the loss does not say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_lab.drafter.rows import Items
    from dflash_lab.workbench.stages.train_drafter import TrainDrafterParams

BUDGETS = (16, 64)  # of draft trees, in nodes


def tau_probe(params: TrainDrafterParams, store: Items, head: Any) -> Any:
    """Acceptance length on the first held-out samples, as decoding would walk them: chained, and of draft
    trees.
    """
    import numpy as np

    from dflash_lab.acceptance.offline import answer_segments, offline

    items = [store[int(i)] for i in np.flatnonzero(store.heldout)[: params.tau_samples]]
    items = [item for item in items if answer_segments(item.loss_mask)]  # some are cut within their prompt

    def probe(drafter: Any) -> dict[str, Any]:
        if not items:
            return {}
        report = offline(items, head, drafter, budgets=BUDGETS, top_k=())
        trees = {f"tree{budget}_tau": report.tau(budget).mean for budget in BUDGETS}
        return {"chained_tau": report.tau().mean, **trees}

    return probe
