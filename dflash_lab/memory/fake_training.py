"""Count the tensors of a whole training step without a device: the real drafter, the real loss, the real
optimizer.

Two steps are run on meta tensors, the second being what every later step is: optimizer state exists. The
whole drafter is built (it has few layers), so nothing is extrapolated. Labels, weights and row choices are
real, on the host.
"""

from __future__ import annotations

from typing import Any

import torch

from dflash_lab.errors import InputError
from dflash_lab.memory.account import Account
from dflash_lab.memory.allocator import replay
from dflash_lab.memory.fake import moment_of
from dflash_lab.memory.loop_account import resident_target_bytes
from dflash_lab.memory.setups import TrainingSetup
from dflash_lab.memory.shapes import TargetShape, target_shape
from dflash_lab.memory.tracker import LiveTensors, module_scopes
from dflash_lab.memory.training_account import with_chunk
from dflash_lab.memory.training_kernels import RowPassKind, cuda_training_path

STATIC = ("head and embedding", "drafter weights", "fp32 masters", "optimizer moments", "target weights")


def count_training(
    target: Any, drafter: Any, setup: TrainingSetup, *, row_pass: RowPassKind = "fused"
) -> tuple[Account, LiveTensors]:
    """Run two training steps on meta tensors; return the account of the second (kind ``fake``) and the
    tracker.

    `target` is a transformers config, `drafter` a `DrafterConfig` (its block size is replaced by the
    setup's). Only the fused loss is run; the other loss paths, and what the loop holds beside a step
    (`loop_account`), exist in the analytic account. `row_pass` "torch" counts the plain loss, as on a CPU.
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
    tracker = LiveTensors(device="meta")
    device = torch.device("meta")
    with cuda_training_path(row_pass, shape.vocab):
        model, head, row = training_parts(shape, drafter, setup, device)
        with module_scopes(tracker, _labels(model)), tracker:
            _add_given(tracker, model, head, row)
            step = TrainingStep(model, head, row, setup, tracker)
            step.run()
            start = len(tracker.trace)
            tracker.start_peak_here()
            step.run()
    terms = tracker.by_label()
    replayed = replay(tracker, static_labels=STATIC, start=start, expandable=setup.expandable)
    terms["fragmentation"] = max(0, replayed.needed - tracker.peak)
    terms["target weights"] = resident_target_bytes(shape, setup)
    account = Account(
        kind="fake",
        title=f"training {setup.anchors} x {setup.block_size}, {setup.context} context tokens",
        terms=terms,
        formulas={"fragmentation": "simulated caching allocator: needed - live at the peak"},
        moment=moment_of(tracker),
        notes=(f"Two whole steps of the real drafter ({drafter.num_layers} layers) were counted.",),
        reserved=replayed.reserved + resident_target_bytes(shape, setup),
        allocated=replayed.allocated + resident_target_bytes(shape, setup),
    )
    return account, tracker


def training_parts(
    shape: TargetShape, drafter: Any, setup: TrainingSetup, device: torch.device
) -> tuple[Any, Any, Any]:
    """Build the drafter, a head and one packed row of `setup` on `device` (values are zeros where they are
    real).
    """
    import dataclasses

    from dflash_lab.drafter.model import Drafter, RMSNorm
    from dflash_lab.target.head import TargetHead

    config = dataclasses.replace(drafter, block_size=setup.block_size)
    dtype = getattr(torch, setup.dtype)
    with device:
        model = Drafter(config).to(dtype)
        embedding = torch.zeros(shape.vocab, shape.hidden, dtype=dtype)
        weight = embedding if shape.tied else torch.zeros(shape.vocab, shape.hidden, dtype=dtype)
        norm = RMSNorm(shape.hidden, 1e-6).to(dtype).requires_grad_(False)
    model.gradient_checkpointing = setup.checkpointing == "layers"
    head = TargetHead(embedding_weight=embedding, norm=norm, weight=weight)
    return model.train(), head, packed_row(config, setup, device)


def packed_row(config: Any, setup: TrainingSetup, device: torch.device) -> Any:
    """Return a row of `setup.context` tokens with `setup.anchors` blocks in which every slot but the anchor
    counts.
    """
    from dflash_lab.drafter.attention import row_layout
    from dflash_lab.drafter.rows import Row

    context, anchors, block = setup.context, setup.anchors, setup.block_size
    if anchors > context - 1:
        raise InputError(f"{anchors} anchors need at least {anchors + 1} context tokens, not {context}.")
    places = torch.linspace(1, context - 1, anchors).round().long()
    dtype = getattr(torch, setup.dtype)
    slots = torch.arange(block)
    mask = (slots > 0).expand(anchors, block)
    row = Row(
        input_ids=torch.zeros(context, dtype=torch.long),
        taps=torch.zeros(context, len(config.tap_ids) * config.hidden_size, dtype=dtype, device=device),
        final=torch.zeros(context, config.hidden_size, dtype=dtype, device=device)
        if setup.soft_targets
        else None,
        layout=row_layout([places.tolist()], [context], block),
        block_ids=torch.zeros(anchors, block, dtype=torch.long),
        labels=torch.zeros(anchors, block, dtype=torch.long),
        slot_mask=mask,
        target_rows=(places[:, None] + slots - 1).clamp(0, context - 1),
        hashes=("",),
        tokens=context,
        blocks=anchors,
    )
    return row.to(device)


class TrainingStep:
    """One optimizer step as the training loop makes it, each phase labelled in the tracker."""

    def __init__(
        self, model: Any, head: Any, row: Any, setup: TrainingSetup, tracker: LiveTensors | None
    ) -> None:
        from dflash_lab.drafter.loss.config import LossConfig
        from dflash_lab.drafter.loss.plan import ChunkPlan
        from dflash_lab.drafter.objective import Objective
        from dflash_lab.drafter.optimizer import Optimizer, OptimizerConfig
        from dflash_lab.drafter.settings import TrainSettings

        self.model, self.row, self.tracker = model, row, tracker
        soft = 0.15 if setup.soft_targets else 0.0
        settings = TrainSettings(
            max_steps=1,
            context_tokens=setup.context,
            anchors=setup.anchors,
            loss=LossConfig(hard_weight=1.0 - soft, soft_weight=soft),
            attention="dense" if model.fc.weight.device.type == "cpu" else "flex",
        )
        self.objective = Objective(head, model.config, settings)
        self.objective.fused.plan = ChunkPlan(rows=max(setup.block_size, min(setup.chunk, setup.rows)))
        moments = "int8" if setup.optimizer == "adamw8bit" else "fp32"
        kind, offload = "muon" if setup.optimizer == "muon" else "adamw", setup.optimizer == "cpu-offload"
        config = OptimizerConfig(kind=kind, moments=moments, offload=offload)
        self.optimizer = Optimizer(model.named_parameters(), config)
        self._name_state()
        if tracker is not None:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(self._name_gradient)

    def _name_state(self) -> None:
        if self.tracker is not None:
            for name, tensor in self.optimizer.tensors().items():
                label = "fp32 masters" if name.startswith("master.") else "optimizer moments"
                self.tracker.relabel(tensor, label)

    def _name_gradient(self, parameter: torch.nn.Parameter) -> None:
        if self.tracker is not None and parameter.grad is not None:
            self.tracker.relabel(parameter.grad, "gradients")

    def run(self) -> None:
        """Run forward, loss, backward and update."""
        with self._scope("loss and block states"):
            loss = self.objective(self.model, self.model, self.row, self.row.taps, teacher=False)
        with self._scope("backward"):
            (loss.total / self.row.labels.numel()).backward()
        with self._scope("update"):
            norm = torch.nn.utils.get_total_norm(
                [p.grad for p in self.model.parameters() if p.grad is not None]
            )
            self.optimizer.step(1.0, 1.0)
            self.optimizer.zero_grad()
            del norm
            self._name_state()  # moments in int8 are new tensors every step

    def _scope(self, label: str) -> Any:
        import contextlib

        return self.tracker.scope(label) if self.tracker is not None else contextlib.nullcontext()


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


def _add_given(tracker: LiveTensors, model: Any, head: Any, row: Any) -> None:
    tracker.add(model.parameters(), "drafter weights")
    tracker.add([head.embedding_weight, head.weight, *head.norm.parameters()], "head and embedding")
    tracker.add([row.taps], "captured states")
    if row.final is not None:
        tracker.add([row.final], "target final states")
    tracker.add([row.block_ids, row.layout.anchors, row.layout.starts, row.layout.positions], "block states")
