"""Count the tensors of a whole training step without a device: the real drafter, the real loss, the real
optimizer.

Two steps are run on meta tensors, the second being what every later step is: optimizer state exists. The
whole drafter is built (it has few layers), so nothing is extrapolated. Labels, weights and row choices are
real, on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from support.fake_memory.allocator import replay
from support.fake_memory.extraction import moment_of
from support.fake_memory.tracker import Counted, LabelledTensors, module_scopes
from support.fake_memory.training_kernels import RowPassKind, cuda_training_path

from dflash_lab.errors import InputError
from dflash_lab.memory.measure import TrainingStep, training_parts
from dflash_lab.memory.shapes import TargetShape, TrainingSetup, target_shape
from dflash_lab.memory.training import resident_target_bytes, with_chunk

STATIC = ("head and embedding", "drafter weights", "fp32 masters", "optimizer moments", "target weights")


def count_training(
    target: Any, drafter: Any, setup: TrainingSetup, *, row_pass: RowPassKind = "fused"
) -> tuple[Counted, LabelledTensors]:
    """Run two training steps on meta tensors; return the account of the second and the tracker.

    `target` is a transformers config, `drafter` a `DrafterConfig` (its block size is replaced by the
    setup's). Only the fused loss is run; the other loss paths, and what the loop holds beside a step
    exist in the analytic account. `row_pass` "torch" counts the plain loss, as on a CPU.
    """
    if setup.loss != "fused":
        raise InputError(
            f"loss {setup.loss!r} is not run here: the lab trains with 'fused'; see predict_training."
        )
    if setup.optimizer == "cpu-offload":
        raise InputError(
            "An optimizer on the CPU is not run here: meta tensors cannot be copied; see predict_training."
        )
    if setup.compiled or setup.shards > 1:
        raise InputError(
            "Compiled layers and sharded drafters are not run here: see predict_training, or give "
            "compiled=False and shards=1."
        )
    shape = target if isinstance(target, TargetShape) else target_shape(target)
    setup = with_chunk(setup, shape.vocab)
    tracker = LabelledTensors(device="meta")
    device = torch.device("meta")
    with cuda_training_path(row_pass, shape.vocab):
        model, head, row = training_parts(shape, drafter, setup, device)
        with module_scopes(tracker, _labels(model)), tracker:
            _add_given(tracker, model, head, row)
            step = CountedStep(model, head, row, setup, tracker)
            step.run()
            start = len(tracker.trace)
            tracker.start_peak_here()
            step.run()
    terms = tracker.by_label()
    replayed = replay(tracker, static_labels=STATIC, start=start, expandable=setup.expandable)
    terms["fragmentation"] = max(0, replayed.needed - tracker.peak)
    terms["target weights"] = resident_target_bytes(shape, setup)
    account = Counted(
        title=f"training {setup.anchors} x {setup.block_size}, {setup.context} context tokens",
        terms=terms,
        formulas={"fragmentation": "simulated caching allocator: needed - live at the peak"},
        moment=moment_of(tracker),
        notes=(f"Two whole steps of the real drafter ({drafter.num_layers} layers) were counted.",),
        reserved=replayed.reserved + resident_target_bytes(shape, setup),
        allocated=replayed.allocated + resident_target_bytes(shape, setup),
    )
    return account, tracker


class CountedStep(TrainingStep):
    """A training step, each phase labelled in the tracker."""

    def __init__(
        self, model: Any, head: Any, row: Any, setup: TrainingSetup, tracker: LabelledTensors
    ) -> None:
        super().__init__(model, head, row, setup)
        self.tracker = tracker
        self._name_state()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._name_gradient)

    def _name_state(self) -> None:
        for name, tensor in self.optimizer.tensors().items():
            label = "fp32 masters" if name.startswith("master.") else "optimizer moments"
            self.tracker.relabel(tensor, label)

    def _name_gradient(self, parameter: torch.nn.Parameter) -> None:
        if parameter.grad is not None:
            self.tracker.relabel(parameter.grad, "gradients")

    def loss(self) -> Any:
        with self.tracker.scope("loss and block states"):
            return super().loss()

    def backward(self, loss: Any) -> None:
        with self.tracker.scope("backward"):
            super().backward(loss)

    def update(self) -> None:
        with self.tracker.scope("update"):
            super().update()
            self._name_state()  # moments in int8 are new tensors every step


def _labels(model: Any) -> dict[torch.nn.Module, str]:
    labels: dict[torch.nn.Module, str] = {
        model.fc: "fc output and its norm",
        model.hidden_norm: "fc output and its norm",
        model.norm: "draft layers: norms",
    }
    for layer in model.layers:
        labels[layer] = "draft layers: stream"
        labels[layer.self_attn] = "draft layers: attention"
        labels[layer.mlp] = "draft layers: MLP"
        labels[layer.input_layernorm] = labels[layer.post_attention_layernorm] = "draft layers: norms"
    return labels


def _add_given(tracker: LabelledTensors, model: Any, head: Any, row: Any) -> None:
    tracker.add(model.parameters(), "drafter weights")
    tracker.add([head.embedding_weight, head.weight, *head.norm.parameters()], "head and embedding")
    tracker.add([row.taps], "captured states")
    if row.final is not None:
        tracker.add([row.final], "target final states")
    tracker.add([row.block_ids, row.layout.anchors, row.layout.starts, row.layout.positions], "block states")
