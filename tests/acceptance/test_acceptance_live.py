"""States that the target makes on the way to the offline metrics."""

from __future__ import annotations

import pytest
import torch

from dflash_lab.acceptance import live


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_moe"])
def test_texts_that_share_a_forward_get_the_states_of_their_own(loaded, kind):
    generator = torch.Generator().manual_seed(0)
    texts = []
    for name, length in (("a", 7), ("b", 19), ("c", 12)):
        ids = torch.randint(0, 250, (length,), generator=generator)
        texts.append((name, ids, torch.ones(length, dtype=torch.uint8)))
    items = live.LiveItems(loaded(kind), (1, 2), texts)
    together = items._made(texts)
    for index, (alone, shared) in enumerate(zip(items, together, strict=True)):
        assert alone.hash == shared.hash == texts[index][0]
        assert torch.equal(alone.input_ids, shared.input_ids)
        for one, other in ((alone.taps, shared.taps), (alone.final, shared.final)):
            assert one.shape == other.shape and (one - other).norm() < 1e-4 * one.norm()
