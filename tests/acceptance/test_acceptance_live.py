"""States that the target makes on the way to the offline metrics."""

from __future__ import annotations

import pytest
import torch

from dflash_lab.acceptance import offline as live


@pytest.mark.parametrize("most", [0, 7, 20, 64, 10**6])
def test_passes_hold_every_text_once_in_order_and_are_as_long_as_they_may(most):
    lengths = [3, 9, 1, 1, 1, 20, 2, 2, 30, 1]
    runs = list(live.passes(lengths, most))
    assert [i for start, end in runs for i in range(start, end)] == list(range(len(lengths)))
    for start, end in runs:
        padded = max(lengths[start:end]) * (end - start)
        assert padded <= most or end == start + 1
        one_more = lengths[start : end + 1]
        assert end == len(lengths) or max(one_more) * len(one_more) > most
    assert list(live.passes([], most)) == []


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_moe"])
def test_texts_that_share_a_forward_get_the_states_of_their_own(loaded, kind):
    generator = torch.Generator().manual_seed(0)
    texts = []
    for name, length in (("a", 7), ("b", 19), ("c", 12)):
        ids = torch.randint(0, 250, (length,), generator=generator)
        texts.append((name, ids, torch.ones(length, dtype=torch.uint8)))
    items = live.TextItems(loaded(kind), (1, 2), texts)
    together = items._made(texts)
    for index, (alone, shared) in enumerate(zip(items, together, strict=True)):
        assert alone.hash == shared.hash == texts[index][0]
        assert torch.equal(alone.input_ids, shared.input_ids)
        for one, other in ((alone.taps, shared.taps), (alone.final, shared.final)):
            assert one.shape == other.shape and (one - other).norm() < 1e-4 * one.norm()
