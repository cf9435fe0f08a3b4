"""Live tensors counted, against sums done by hand."""

import torch

from dflash_lab.memory.measure import LiveTensors


def test_bytes_are_counted_once_and_given_back():
    with LiveTensors() as live:
        x = torch.zeros(256, 4)  # 4096 bytes
        view = x.view(4, 256)[1:]
        y = x + 1
        del x
        assert live.current == 8192  # the view holds x
        del view
        z = torch.cat([y, y])
        assert live.current == 4096 + 8192
        del y, z
    assert live.current == 0 and live.peak == 4096 + 8192


def test_what_autograd_saves_is_held_until_the_backward():
    x = torch.randn(64, 64, requires_grad=True)
    with LiveTensors() as live:
        y = x.exp()
        loss = y.sum()
        held = live.current
        del y
        assert live.current == held  # saved for the backward
        loss.backward()
        del loss
        assert live.current == x.numel() * 4  # only the gradient is left
        torch.zeros(1000)
        live.start_peak_here()
    assert x.grad is not None and live.peak == live.current
