"""What cannot be compiled on this machine: the run goes on and says so, or is told what to give."""

from __future__ import annotations

import logging

import pytest
import torch
from support.tiny_drafters import learner, tiny_head, tiny_items, tiny_settings
from support.wording import check_wording, refused
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError

from dflash_lab.drafter import loss as fused
from dflash_lab.drafter import model as model_module
from dflash_lab.drafter.loss import load_backend
from dflash_lab.drafter.loss_rows import TorchRows
from dflash_lab.drafter.loss_terms import LossConfig
from dflash_lab.drafter.train import Trainer
from dflash_lab.errors import LabError
from dflash_lab.models.compiled import NotCompiled, compiling, why_not_compiled

SHARED = "No valid triton configs. OutOfMemoryError: out of resource: Required: 147456 Hardware limit:101376"


def refuse(*arguments, **options):
    """What flex attention of 256 wide heads says on a card with 99 KiB of shared memory."""
    raise InductorError(RuntimeError(SHARED), None)


@pytest.fixture
def run(tmp_path):
    """Make a training run that is yet to begin."""

    def made(attention="auto", compiler=None) -> Trainer:
        torch.compiler.reset()
        drafter = learner(num_layers=1)
        if compiler is not None:
            drafter.compile_layers(backend=compiler)
        return Trainer(
            tiny_items(), tiny_head(), drafter, tiny_settings(max_steps=1, attention=attention), tmp_path
        )

    yield made
    torch.compiler.reset()


def test_a_compilers_error_is_told_from_others():
    assert why_not_compiled(InductorError(RuntimeError(SHARED), None)).endswith(SHARED)
    assert "cc1plus" in why_not_compiled(BackendCompilerFailed("x", RuntimeError("cc1plus: not found"), None))
    wrapped = RuntimeError("in a layer")
    wrapped.__cause__ = InductorError(RuntimeError(SHARED), None)
    assert SHARED in why_not_compiled(wrapped)
    assert why_not_compiled(InductorError(torch.OutOfMemoryError("CUDA out of memory"), None)) == ""
    assert why_not_compiled(ValueError("torch._inductor is a word here")) == ""
    with pytest.raises(ValueError, match="as it is"), compiling("x", "y"):
        raise ValueError("as it is")
    with refused(NotCompiled), compiling("x", "Give y."):
        refuse()
    assert issubclass(NotCompiled, LabError)


def test_where_attention_does_not_compile_the_run_goes_on_dense(run, monkeypatch, caplog):
    real = model_module.make_attends
    monkeypatch.setattr(
        model_module, "make_attends", lambda layout, path: refuse() if path == "auto" else real(layout, path)
    )
    trainer = run()
    before = [parameter.detach().clone() for parameter in trainer.drafter.parameters()]
    with caplog.at_level(logging.WARNING):
        trainer.try_row()
    assert trainer.objective.attention == "dense" and trainer.settings.attention == "auto"
    check_wording("\n".join(caplog.messages))
    assert all(parameter.grad is None for parameter in trainer.drafter.parameters())
    assert all(map(torch.equal, before, trainer.drafter.parameters()))
    assert trainer.run().steps == 1


def forward_only(graph, inputs):
    """A compiler that fails for the backward pass alone, at its first call."""
    return aot_autograd(fw_compiler=lambda made, _: made.forward, bw_compiler=refuse)(graph, inputs)


@pytest.mark.parametrize("compiler", [refuse, forward_only], ids=["forward", "backward"])
def test_where_layers_do_not_compile_they_run_as_they_are(run, caplog, compiler):
    trainer = run(compiler=compiler)
    with caplog.at_level(logging.WARNING):
        trainer.try_row()
    check_wording("\n".join(caplog.messages))
    assert not trainer.drafter.compiled
    assert all(parameter.grad is None for parameter in trainer.drafter.parameters())
    assert trainer.run().steps == 1


def test_what_was_asked_for_by_name_is_refused_with_what_to_give(run, monkeypatch):
    monkeypatch.setattr(model_module, "make_attends", lambda layout, path: refuse())
    with refused(NotCompiled):
        run(attention="flex").try_row()


def test_processes_that_share_a_step_are_told_not_changed_one_by_one(run, monkeypatch):
    trainer = run(compiler=refuse)
    monkeypatch.setattr(trainer.group, "world", 2, raising=False)
    monkeypatch.setattr(type(trainer.group), "world", 2, raising=False)
    with refused(NotCompiled):
        trainer.try_row()
    assert trainer.objective.attention == "auto" and trainer.drafter.compiled


def test_another_error_of_the_first_step_stays_what_it_is(run, monkeypatch):
    monkeypatch.setattr(model_module, "make_attends", lambda layout, path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run().try_row()


@pytest.fixture
def loss_call(monkeypatch):
    """Call the loss on a small case; the row pass `broken` cannot be compiled."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 4, 8, generator=generator, requires_grad=True)
    head, labels = torch.randn(11, 8, generator=generator), torch.arange(12).view(3, 4) % 11
    broken = TorchRows()
    for name in ("drafter_sums", "gradient"):
        monkeypatch.setattr(broken, name, refuse)
    monkeypatch.setattr(fused, "_not_compiled", set())

    def call(backend):
        monkeypatch.setattr(
            fused, "load_backend", lambda name: broken if name == "triton" else load_backend(name)
        )
        hidden.grad = None
        loss = fused.fused_draft_loss(
            hidden, head, labels, torch.ones(3, 4), config=LossConfig(), chunk_rows=8, backend=backend
        )
        loss.total.backward()
        return loss.total.detach(), hidden.grad

    return call


def test_a_row_pass_asked_for_by_name_is_refused_with_what_to_give(loss_call, monkeypatch):
    monkeypatch.setattr(fused, "choose_backend", lambda name, *_: name)
    with refused(NotCompiled):
        loss_call("triton")


def test_a_row_pass_that_auto_chose_gives_way_to_plain_torch_once(loss_call, monkeypatch, caplog):
    wanted = loss_call("torch")
    monkeypatch.setattr(fused, "choose_backend", lambda name, *_: "triton" if name == "auto" else name)
    with caplog.at_level(logging.WARNING):
        found = [loss_call("auto") for _ in range(2)]
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, wanted, strict=True))
    (line,) = caplog.messages  # the second call does not try again
    check_wording(line)


def test_layers_of_a_live_target_that_do_not_compile_stay_as_they_are(tiny_target, monkeypatch):
    from dflash_lab.drafter.live import RowForward
    from dflash_lab.models.load import load_target

    target = load_target(str(tiny_target("llama")), device="cpu", dtype="float32")
    forward = RowForward(target, tap_ids=(1, 3), row_tokens=64, longest=32)
    before = [layer.forward for layer in target.layers]
    monkeypatch.setattr(torch, "compile", lambda *_, **__: refuse)
    with torch.no_grad():
        assert "do not compile on this machine" in forward._compile()
    assert [layer.forward for layer in target.layers] == before
