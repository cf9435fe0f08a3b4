"""Run the drafter's CUDA path on meta tensors: stand-ins that allocate what the CUDA kernels allocate, in
place of the CPU path that code takes for a tensor that is not on CUDA.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

RowPassKind = Literal["fused", "torch"]
_STRIP = 1 << 24  # elements a strip of the torch row pass on CUDA


class _Flex(torch.autograd.Function):
    """Attention that saves what flex_attention saves: query, keys, values, output, log-sum-exp (fp32)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        sums = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v, _out, sums = ctx.saved_tensors
        delta = torch.empty_like(sums)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        del delta
        return grads


def flex_attend(layout: Any) -> Any:
    """Stand in for the drafter's `flex_attend`: the same concatenations and views around `_Flex`."""

    def attend(q: Tensor, kb: Tensor, vb: Tensor, kc: Tensor, vc: Tensor) -> Tensor:
        k = torch.cat([kc, kb.flatten(0, 1)]).transpose(0, 1)[None]
        v = torch.cat([vc, vb.flatten(0, 1)]).transpose(0, 1)[None]
        out = _Flex.apply(q.flatten(0, 1).transpose(0, 1)[None], k, v)
        return out[0].transpose(0, 1).unflatten(0, q.shape[:2])

    return lambda mask: attend


def _project(states: Tensor, head: Tensor, out: Tensor, **_options: Any) -> Tensor:
    return out


def _project_back(grad: Tensor, head: Tensor, out: Tensor) -> Tensor:
    return out


def _update(*_arguments: Any) -> None:
    """AdamW is one kernel a parameter: it allocates nothing."""


class FusedRowPass:
    """The torch row pass on eight columns of the vocabulary: what it returns a row is the same, its
    temporaries vanish.

    A fused kernel keeps a row's logits in registers, so beside the [n] results it allocates nothing.
    """

    def __init__(self, inner: Any, vocab: int) -> None:
        self.inner, self.vocab = inner, vocab

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.inner, name)
        if not callable(function):
            return function

        def narrow(*args: Any, **kwargs: Any) -> Any:
            return function(*map(self._cut, args), **{key: self._cut(value) for key, value in kwargs.items()})

        return narrow

    def _cut(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[:, :8] if value.ndim == 2 and value.shape[1] == self.vocab else value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            cut = {name: self._cut(item) for name, item in fields.items()}
            changed = {name: item for name, item in cut.items() if item is not fields[name]}
            return dataclasses.replace(value, **changed) if changed else value
        return value


@contextlib.contextmanager
def cuda_training_path(row_pass: RowPassKind, vocab: int) -> Iterator[None]:
    """Let the drafter and its loss run on meta tensors as they do on CUDA, with a fused or a plain row pass.

    `vocab` is the width of the logits.
    """
    from dflash_lab.drafter import attention, loss, loss_rows, optim

    plain = loss.load_backend("torch")
    chosen = FusedRowPass(plain, vocab) if row_pass == "fused" else plain
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(attention, "flex_attend", flex_attend))
        stack.enter_context(mock.patch.object(loss, "project", _project))
        stack.enter_context(mock.patch.object(loss, "project_back", _project_back))
        stack.enter_context(mock.patch.object(loss, "load_backend", lambda name: chosen))
        # Autocast has no notion of meta tensors; the loss only ever switches it off.
        stack.enter_context(mock.patch.object(torch, "autocast", lambda *_, **__: contextlib.nullcontext()))
        stack.enter_context(mock.patch.object(optim, "adam_update", _update))
        # Nor are there values, such as the number of steps, or generators of random numbers.
        stack.enter_context(mock.patch.object(optim.Optimizer, "steps", 1))
        stack.enter_context(mock.patch.object(torch, "Generator", mock.Mock()))
        encode = optim.encode_moment  # without a generator: fake tensors draw nothing
        stack.enter_context(
            mock.patch.object(optim, "encode_moment", lambda x, _, **how: encode(x, None, **how))
        )
        stack.enter_context(mock.patch.dict(loss_rows.STRIP_ELEMENTS, {"meta": _STRIP}))
        yield
