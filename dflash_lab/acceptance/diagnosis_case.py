"""What the diagnosis looks at: live states of a few items, and drafts in any variant of drafting."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dflash_lab.acceptance.offline import Context, answer_segments
from dflash_lab.acceptance.target_run import TargetRun
from dflash_lab.data.items import FeatureItem
from dflash_lab.drafter.model import Drafter
from dflash_lab.target.model import Target


class Case:
    """What the checks look at: live states of each item from one forward, and drafts of any variant."""

    def __init__(self, target: Target, drafter: Drafter, items: list[FeatureItem]) -> None:
        self.target, self.drafter, self.items = target, drafter, items
        self.head = target.head
        self.ids = [item.input_ids.long().to(target.device) for item in items]
        self.segments = [answer_segments(item.loss_mask) for item in items]
        tap_ids = drafter.config.tap_ids
        self.shifted = {s: tuple(t + s for t in tap_ids) for s in (-1, 1)}
        self.shifted = {
            s: ids for s, ids in self.shifted.items() if min(ids) >= 0 and max(ids) < target.num_layers
        }
        wanted = sorted({*tap_ids, *(t for ids in self.shifted.values() for t in ids), target.num_layers - 1})
        self.layers: list[dict[int, torch.Tensor]] = []
        self.normed: list[torch.Tensor] = []
        for ids in self.ids:
            with TargetRun(target, tuple(wanted)) as run:
                step = run.step(ids, certain=True)
            assert step.taps is not None
            self.layers.append(dict(zip(wanted, step.taps.chunk(len(wanted), dim=-1))))
            self.normed.append(step.normed)

    def live_taps(self, index: int, shift: int = 0) -> torch.Tensor:
        ids = self.shifted[shift] if shift else self.drafter.config.tap_ids
        return torch.cat([self.layers[index][t] for t in ids], dim=-1)

    def accuracy(
        self,
        *,
        taps: Callable[[int], torch.Tensor] | None = None,
        mask: int | None = None,
        context_shift: int = 0,
        label_shift: int = 0,
        anchors: int = 48,
    ) -> float:
        """Return how often slot 1's best token is the answer's, in one variant of drafting (the default is
        ours).

        context_shift: keep that many more (or fewer) context positions than those before the anchor.
        """
        config = self.drafter.config
        hits = total = 0
        for index, (ids, segments) in enumerate(zip(self.ids, self.segments)):
            states = self.live_taps(index) if taps is None else taps(index)
            context = Context(self.drafter, states)
            places = [a for start, stop in segments for a in range(max(start, 1), stop - 1 - label_shift)][
                :anchors
            ]
            if not places:
                continue
            block = torch.full(
                (len(places), config.block_size), config.mask_token_id if mask is None else mask
            )
            block = block.to(ids.device)
            block[:, 0] = ids[places]
            hidden = context.blocks(places, self.head.embed(block), visible_shift=context_shift)[:, 1]
            best = self.drafter.logits(hidden.to(self.head.weight.dtype), self.head.weight).argmax(-1)
            hits += int((best == ids[[a + 1 + label_shift for a in places]]).sum())
            total += len(places)
        return hits / max(1, total)
