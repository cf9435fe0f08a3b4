"""What the fused loss promises about edges, memory, autograd and numerics; one test a promise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loss_reference import INTERPRETED, Case, make_case, reference, relative
from support.wording import refused
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dflash_lab.drafter.loss import DraftLoss, fused_draft_loss
from dflash_lab.drafter.loss_terms import LossConfig
from dflash_lab.errors import InputError

CONFIG = LossConfig(hard_weight=0.85, soft_weight=0.15, cap_weight=0.3, temperature=2)


def run(case: Case, config: LossConfig = CONFIG, rows: int = 12, **options: Any) -> DraftLoss:
    positional, target = case.arguments(target=config.needs_target)
    return fused_draft_loss(
        *positional, **target, config=config, chunk_rows=rows, **{"backend": "torch", **options}
    )


class Watch(TorchDispatchMode):
    """Remembers (operation, shape) of every tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def matmuls(self, width: int) -> list[int]:
        """Rows of every matmul whose result has `width` columns."""
        return [shape[0] for name, shape in self.seen if ".mm" in name and shape[-1] == width]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.seen += [(str(function), tuple(leaf.shape)) for leaf in leaves]
        return result


@pytest.mark.parametrize("anchors", [7, 0])
def test_no_live_row_gives_zero_loss_and_zero_gradient_even_from_nan_states(anchors: int) -> None:
    case = make_case(anchors=7)
    case.labels, case.weights = case.labels[:anchors], torch.zeros_like(case.weights)[:anchors]
    case.target_rows = case.target_rows[:anchors]
    case.hidden = torch.full_like(case.hidden, math.nan)[:anchors].requires_grad_()
    found = run(case)
    found.total.backward()
    assert found.total.item() == 0 and found.row_count.item() == 0 and found.weight_sum.item() == 0
    assert case.hidden.grad.shape == case.hidden.shape and case.hidden.grad.count_nonzero() == 0
    assert not found.rows.live.any() and found.rows.accepted()[1] == 0


def test_dead_rows_are_selected_out_so_their_nan_and_wrong_indices_do_no_harm() -> None:
    clean, dirty = make_case(), make_case()
    dead = dirty.weights == 0
    with torch.no_grad():
        dirty.hidden[dead] = math.inf
    dirty.labels[dead] = -100
    dirty.target_rows[dead] = 10**6
    run(clean).total.backward()
    found = run(dirty)
    found.total.backward()
    assert (dirty.hidden.grad == clean.hidden.grad).all() and dirty.hidden.grad[dead].count_nonzero() == 0
    assert (found.rows.rank[dead] == -1).all() and (found.rows.ce[dead] == 0).all()


def test_confident_label_keeps_its_small_gradient_in_bfloat16() -> None:
    head = torch.eye(8, dtype=torch.bfloat16)
    hidden = torch.zeros(1, 2, 8, dtype=torch.bfloat16)
    hidden[0, 1, 3] = 9.0  # p = 0.9991: rounding p before subtracting 1 would give 0
    hidden.requires_grad_()
    labels, weights = torch.full((1, 2), 3), torch.tensor([[0.0, 1.0]])
    fused_draft_loss(hidden, head, labels, weights, config=LossConfig()).total.backward()
    wanted = hidden.detach()[0, 1].double().softmax(0)[3] - 1
    assert hidden.grad[0, 1, 3].item() == pytest.approx(wanted.item(), rel=4e-3) and wanted != 0


def test_ties_count_by_first_index() -> None:
    head = torch.ones(6, 1, dtype=torch.float64)
    hidden = torch.ones(1, 3, 1, dtype=torch.float64)
    found = fused_draft_loss(
        hidden, head, torch.tensor([[0, 0, 4]]), torch.tensor([[0.0, 1.0, 1.0]]), config=LossConfig()
    )
    assert found.rows.argmax.tolist() == [[-1, 0, 0]] and found.rows.rank.tolist() == [[-1, 0, 4]]
    assert found.rows.correct.tolist() == [[False, True, False]]


def test_accepted_length_is_counted_per_block_and_pooled() -> None:
    head = torch.eye(4, dtype=torch.float64)
    tokens = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 0, 0]])
    hidden = torch.nn.functional.one_hot(tokens, 4).double() * 5
    labels = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 3], [0, 1, 2, 3], [0, 0, 0, 0]])
    weights = torch.ones(4, 4)
    weights[:, 0] = 0
    weights[2, 2] = 0  # a hole ends the run
    weights[3] = 0  # no live slot: not counted
    rows = fused_draft_loss(hidden, head, labels, weights, config=LossConfig()).rows
    total, blocks = rows.accepted()
    assert (total.item(), blocks.item()) == (3 + 1 + 1, 3)


def test_no_tensor_of_all_rows_by_vocabulary_and_no_head_gradient_ever_exists() -> None:
    case = make_case(anchors=40, block=5, vocab=97, hole=0.0)
    live = int((case.weights != 0).sum())
    with Watch() as watch:
        run(case, rows=12).total.backward()
    wide = [math.prod(shape) for _, shape in watch.seen if 97 in shape]
    assert max(wide) == 2 * 12 * 97 < live * 97  # both sides of a chunk
    assert not any(shape == case.head.shape for name, shape in watch.seen if ".mm" in name)


def test_no_grad_skips_the_gradient_matmul_and_the_forward_keeps_no_chunk() -> None:
    case, kept = make_case(anchors=40), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Watch() as with_gradient:
        run(case)
    with torch.no_grad(), Watch() as without:
        run(case)
    assert kept == [tuple(case.hidden.shape)]
    assert with_gradient.matmuls(97) == without.matmuls(97) != []
    assert with_gradient.matmuls(16) != [] and without.matmuls(16) == []


def test_second_backward_gives_the_same_gradient_scaled_and_nothing_given_is_written_to() -> None:
    case = make_case()
    before = [tensor.detach().clone() for tensor in vars(case).values()]
    found = run(case)
    (once,) = torch.autograd.grad(found.total, case.hidden, retain_graph=True)
    (twice,) = torch.autograd.grad(3 * found.total, case.hidden)
    assert torch.allclose(twice, 3 * once, rtol=1e-14)
    assert all(torch.equal(old, new.detach()) for old, new in zip(before, vars(case).values()))
    tensors = [found.weight_sum, found.row_count, *found.sums.values(), *vars(found.rows).values()]
    assert not any(tensor.requires_grad for tensor in tensors if tensor is not None)


@pytest.mark.parametrize("power", [1, 2], ids=["plain", "squared"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_second_derivative_is_refused(backend: str, power: int) -> None:
    if backend == "triton" and not INTERPRETED:
        pytest.skip("on a CPU it needs triton and TRITON_INTERPRET=1")
    case = make_case(dtype=torch.float32)
    total = run(case, backend=backend).total ** power  # and a penalty on the gradient beside it
    with refused(InputError):
        (grad,) = torch.autograd.grad(total, case.hidden, create_graph=True)
        (total + grad.square().sum()).backward()
    assert case.hidden.grad is None


def test_scale_of_a_bfloat16_gradient_is_not_rounded_first() -> None:
    case = make_case(dtype=torch.bfloat16, anchors=30)
    total = run(case).total
    (plain,) = torch.autograd.grad(total, case.hidden, retain_graph=True)
    (scaled,) = torch.autograd.grad(total / 3, case.hidden)
    assert torch.equal(scaled, (plain.float() * torch.tensor(1 / 3)).bfloat16())


@pytest.mark.parametrize("config", [CONFIG, LossConfig(weighting="dpace"), LossConfig(lk_weight=1)])
def test_scale_given_beforehand_equals_scaling_outside(config: LossConfig) -> None:
    case = make_case()
    (wanted,) = torch.autograd.grad(run(case, config).total / 7, case.hidden)
    found = run(case, config, scale=torch.tensor(1 / 7, dtype=torch.float64))
    (grad,) = torch.autograd.grad(found.total, case.hidden)
    assert relative(grad, wanted) < 1e-14 and torch.allclose(
        found.total, run(case, config).total / 7, rtol=1e-14
    )
    assert torch.equal(found.sums["ce"], run(case, config).sums["ce"])


def test_works_inside_activation_checkpointing_at_the_price_of_a_second_sweep() -> None:
    case = make_case()
    run(case).total.backward()
    wanted, case.hidden.grad = case.hidden.grad.clone(), None
    positional, target = case.arguments()

    def total(hidden: torch.Tensor) -> torch.Tensor:
        return fused_draft_loss(hidden, *positional[1:], **target, config=CONFIG, chunk_rows=12).total

    checkpoint(total, case.hidden, use_reentrant=False).backward()
    assert torch.equal(case.hidden.grad, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_around_the_call_changes_nothing(dtype: torch.dtype) -> None:
    grads, totals = [], []
    for enabled in (False, True):
        case = make_case(dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = run(case)
        loss.total.backward()
        grads.append(case.hidden.grad)
        totals.append(loss.total.detach())
    assert torch.equal(*grads) and torch.equal(*totals)


def test_compiled_caller_breaks_the_graph_once_and_gets_the_same_gradient() -> None:
    case = make_case()
    positional, target = case.arguments()

    def step(hidden: torch.Tensor) -> torch.Tensor:
        loss = fused_draft_loss(2 * hidden, *positional[1:], **target, config=CONFIG, chunk_rows=12)
        return loss.total / 7

    compiled = torch.compile(step, backend="eager")
    (wanted,) = torch.autograd.grad(step(case.hidden), case.hidden)
    (found,) = torch.autograd.grad(compiled(case.hidden), case.hidden)
    assert torch.equal(found, wanted)
    assert torch._dynamo.explain(step)(case.hidden).graph_break_count == 1


def test_any_strides_are_accepted() -> None:
    case = make_case()
    _, wanted, _ = reference(case, CONFIG)
    anchors, block, size = case.hidden.shape
    wide = torch.randn(anchors, block + 1, 2 * size, dtype=torch.float64)
    wide[:, 1:, ::2] = case.hidden.detach()
    wide.requires_grad_()
    labels = case.labels.T.contiguous().T
    rows = case.target_rows.to(torch.int32).T.contiguous().T
    found = fused_draft_loss(
        wide[:, 1:, ::2], case.head.T.contiguous().T, labels, case.weights.double()[:, :, None].expand(-1,
        -1, 2)[..., 0],
        target_hidden=case.target_hidden.T.contiguous().T, target_rows=rows, config=CONFIG,
        chunk_rows=12,
    )  # fmt: skip
    found.total.backward()
    assert not labels.is_contiguous() and not wide[:, 1:, ::2].is_contiguous()
    assert relative(wide.grad[:, 1:, ::2], wanted) < 1e-10 and wide.grad[:, 0].count_nonzero() == 0


def test_sharded_head_parameter_is_gathered_once(tmp_path: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        case = make_case()
        plain = run(case)
        case.head = distribute_tensor(case.head, init_device_mesh("cpu", (1,)), [Shard(0)])
        assert torch.equal(run(case).total, plain.total)
    finally:
        torch.distributed.destroy_process_group()
