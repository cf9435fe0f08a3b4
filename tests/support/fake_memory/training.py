"""Count the tensors of a whole training step without a device: the real drafter, loss and optimizer on meta
tensors; labels, weights and row choices are real, on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from support.fake_memory.tracker import LabelledTensors, module_scopes
from support.fake_memory.training_kernels import RowPassKind, cuda_training_path

from dflash_lab.memory.account import Account
from dflash_lab.memory.measure import TrainingStep, training_parts
from dflash_lab.memory.shapes import TargetShape, TrainingSetup, target_shape
from dflash_lab.memory.training import resident_target_bytes, with_chunk


def count_training(
    target: Any, drafter: Any, setup: TrainingSetup, *, row_pass: RowPassKind = "fused"
) -> Account:
    """Run two training steps on meta tensors; return the account of the second.

    Two are run because optimizer state exists from the second on. What is not run here (other losses,
    compiled layers, shards, an optimizer on the host) exists in the analytic account alone.
    """
    assert setup.loss == "fused" and setup.optimizer != "cpu-offload"
    assert not setup.compiled and setup.shards == 1
    shape = target if isinstance(target, TargetShape) else target_shape(target)
    setup = with_chunk(setup, shape.vocab)
    tracker = LabelledTensors(device="meta")
    with cuda_training_path(row_pass, shape.vocab):
        model, head, row = training_parts(shape, drafter, setup, torch.device("meta"))
        with module_scopes(tracker, _labels(model)), tracker:
            _add_given(tracker, model, head, row)
            step = CountedStep(model, head, row, setup, tracker)
            step.run()
            tracker.start_peak_here()
            step.run()
    terms = tracker.by_label() | {"target weights": resident_target_bytes(shape, setup)}
    return Account(f"training {setup.anchors} x {setup.block_size}", terms, moment=tracker.moment())


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
