"""The live-tensor count against sums done by hand, and the allocator's rules."""

import pytest
import torch
from support.fake_memory.allocator import CachingAllocator, replay
from support.fake_memory.tracker import LabelledTensors, module_scopes

from dflash_lab.memory.shapes import MIB


def test_bytes_are_counted_once_and_given_back():
    with LabelledTensors() as live:
        x = torch.zeros(256, 4)  # 4096 bytes
        view = x.view(4, 256)[1:]
        y = x + 1
        del x
        assert live.current == 8192  # the view holds x
        del view
        z = torch.cat([y, y])
        assert live.current == 4096 + 8192
        del y, z
    assert live.current == 0
    assert live.peak == 4096 + 8192
    assert max(live.blocks[number].size for number in live.live_at_peak()) == 8192


def test_what_autograd_saves_is_held_until_the_backward():
    x = torch.randn(64, 64, requires_grad=True)
    with LabelledTensors() as live:
        y = x.exp()
        loss = y.sum()
        held = live.current
        del y
        assert live.current == held  # saved for the backward
        loss.backward()
        del loss
        assert live.current == x.numel() * 4  # only the gradient is left
    assert x.grad is not None


def test_labels_name_what_made_the_bytes():
    layer = torch.nn.Linear(8, 16, bias=False)
    live = LabelledTensors()
    with module_scopes(live, {layer: "projection"}), live, torch.no_grad():
        live.add(layer.parameters(), "weights")
        given = torch.zeros(4, 8)
        out = layer(given)
        extra = torch.zeros(8)
        live.relabel(extra, "extra")
    assert live.by_label() == {"weights": 512, "projection": 256, "activations": 128, "extra": 32}
    assert out.shape == (4, 16)


def test_a_later_peak_is_found_when_asked_for():
    with LabelledTensors() as live:
        torch.zeros(1000)
        live.start_peak_here()
        kept = torch.zeros(10)
    assert live.peak == 40 and kept.numel() == 10


def test_segments_follow_the_documented_sizes():
    allocator = CachingAllocator()
    small = allocator.allocate(700)
    assert (allocator.allocated, allocator.reserved) == (1024, 2 * MIB)
    allocator.allocate(MIB + 1)
    assert allocator.reserved == 22 * MIB  # 1-10 MiB requests share 20 MiB segments
    allocator.allocate(4 * MIB)
    assert allocator.reserved == 22 * MIB
    allocator.allocate(16 * MIB)
    assert allocator.reserved == 38 * MIB  # a segment of its own, rounded to 2 MiB
    allocator.release(small)
    allocator.empty_cache()
    assert allocator.reserved == 36 * MIB


def test_free_neighbours_merge_and_are_used_again():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for block in blocks:
        allocator.release(block)
    allocator.allocate(20 * MIB)
    assert allocator.reserved == 20 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_growing_sizes_fragment_unless_segments_expand(expandable):
    allocator = CachingAllocator(expandable=expandable)
    for step in range(1, 9):
        held = [allocator.allocate(step * 16 * MIB) for _ in range(2)]
        for block in held:
            allocator.release(block)
    needed = 2 * 8 * 16 * MIB
    assert allocator.peak_allocated == needed
    assert (allocator.reserved <= needed + 20 * MIB) == expandable


def test_a_limit_flushes_the_cache_before_it_gives_up():
    allocator = CachingAllocator(limit=64 * MIB)
    allocator.release(allocator.allocate(40 * MIB))
    assert allocator.allocate(60 * MIB).size == 60 * MIB
    assert allocator.reserved == 60 * MIB and allocator.flushes == 1
    with pytest.raises(MemoryError):
        allocator.allocate(8 * MIB)


def test_the_replay_repeats_the_count():
    with LabelledTensors() as live:
        x = torch.zeros(4 * MIB)
        y = x + x
        del x
        z = y * 2
        del y, z
    replayed = replay(live)
    assert replayed.allocated == live.peak == 32 * MIB
    assert replayed.reserved == 32 * MIB
    assert replayed.needed == 32 * MIB
