"""AdamW equals torch's, masters carry small steps, Muon's direction is orthogonal, the schedule's shape."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from support.tiny_drafters import relative_error
from support.wording import refused
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_lab.drafter.optim import (
    Optimizer,
    OptimizerConfig,
    adam_update,
    decode_moment,
    encode_moment,
    muon_updates,
    orthogonalized,
)
from dflash_lab.drafter.train import learning_rate_factor
from dflash_lab.errors import InputError


def named(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"fc.weight": (6, 8), "layers.0.mlp.up_proj.weight": (8, 5), "norm.weight": (5,)}
    return {n: nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in shapes.items()}


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_equals_torch(decay):
    ours, theirs = named(), named()
    config = OptimizerConfig(lr=3e-3, weight_decay=decay, betas=(0.9, 0.95))
    optimizer = Optimizer(ours.items(), config)
    reference = torch.optim.AdamW(theirs.values(), lr=3e-3, weight_decay=decay, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        factor = 1.0 - step / 40
        for group in reference.param_groups:
            group["lr"] = 3e-3 * factor
        for a, b in zip(ours.values(), theirs.values(), strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad * 0.5
        optimizer.step(factor, grad_scale=0.5)
        reference.step()
    for a, b in zip(ours.values(), theirs.values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def test_masters_add_up_steps_that_bf16_cannot_take():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = Optimizer([("fc.weight", parameter)], OptimizerConfig(lr=1e-4))
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step(1.0)
    assert torch.allclose(optimizer.state["fc.weight"]["master"], torch.full((4,), 0.99), atol=1e-5)
    assert (parameter == torch.tensor(0.99).bfloat16()).all()


def test_state_goes_out_and_in(tmp_path):
    first, second = named(torch.bfloat16), named(torch.bfloat16)
    config = OptimizerConfig(kind="muon")
    a = Optimizer(first.items(), config)
    for parameter in first.values():
        parameter.grad = torch.randn(parameter.shape).bfloat16()
    a.step(1.0)
    assert set(a.tensors()) == {
        *(f"{k}.{n}" for n in ("fc.weight", "norm.weight") for k in ("master", "exp_avg", "exp_avg_sq")),
        *(f"{k}.layers.0.mlp.up_proj.weight" for k in ("master", "momentum")),
    }
    b = Optimizer(second.items(), config)
    b.load(a.tensors(), a.steps)
    assert b.steps == 1 and all(torch.equal(x, b.tensors()[n]) for n, x in a.tensors().items())
    with refused(InputError):
        Optimizer(second.items(), OptimizerConfig()).load(a.tensors(), 1)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_step_that_is_called_off_changes_nothing(kind, device):
    parameters = {n: nn.Parameter(p.detach().to(device)) for n, p in named(torch.bfloat16).items()}
    optimizer = Optimizer(parameters.items(), OptimizerConfig(kind=kind, weight_decay=0.1))
    for go, value in ((True, 0.1), (False, float("nan")), (False, 0.2)):
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, value)
        before = {n: t.clone() for n, t in [*optimizer.tensors().items(), *parameters.items()]}
        optimizer.step(1.0, torch.tensor(value, device=device), torch.tensor(go, device=device))
        after = optimizer.tensors() | parameters
        same = [bool(torch.equal(before[name], after[name])) for name in before]
        assert not any(same) if go else all(same)
    assert optimizer.steps == 1


def test_the_update_under_a_flag_is_the_same_as_without():
    """The masked operations that CUDA uses for Muon, on numbers."""
    generator = torch.Generator().manual_seed(0)
    weight, grad = torch.randn(2, 5, 7, generator=generator)
    moved = []
    for scalars in ([1.0, 0.5, 0.1, 0.03], [0.0, float("nan"), 0.1, 0.03]):
        state = {"exp_avg": torch.ones(5, 7), "exp_avg_sq": torch.ones(5, 7), "master": weight.clone()}
        adam_update(grad, weight.bfloat16(), state, torch.tensor(scalars), 1e-2, 1e-3, (0.9, 0.999), 1e-8)
        moved.append(state)
    assert torch.equal(moved[1]["master"], weight) and torch.equal(moved[1]["exp_avg_sq"], torch.ones(5, 7))
    first = 0.9 + 0.1 * 0.5 * grad
    wanted = weight * (1 - 1e-3) - 1e-2 * (first / 0.1) / (moved[0]["exp_avg_sq"].sqrt() / 0.03 + 1e-8)
    assert torch.allclose(moved[0]["master"], wanted, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 1024, 300_001])
def test_the_kernel_does_what_the_plain_operations_do(dtype, size):
    pytest.importorskip("triton")
    from dflash_lab.drafter.kernels import adam

    generator = torch.Generator("cuda").manual_seed(0)
    start = torch.randn(size, generator=generator, device="cuda")
    results = []
    for update in (adam, adam_update):
        weight = start.to(dtype)
        state = {kind: torch.zeros(size, device="cuda") for kind in ("exp_avg", "exp_avg_sq")}
        if dtype != torch.float32:
            state["master"] = start.clone()
        generator.manual_seed(1)
        for step in range(1, 6):
            grad = torch.randn(size, generator=generator, device="cuda").to(dtype)
            values = [float(step != 3), 0.5, 1 - 0.9**step, (1 - 0.999**step) ** 0.5]
            update(grad, weight, state, torch.tensor(values, device="cuda"), 1e-2, 1e-3, (0.9, 0.999), 1e-8)
        results.append({**state, "weight": weight})
    for name, found in results[0].items():
        assert relative_error(found, results[1][name]) < (1e-3 if found.dtype != torch.float32 else 2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize(
    "changes", [{}, dict(offload=True), dict(moments="int8"), dict(moments="int8", offload=True)]
)
def test_cuda_moves_like_the_cpu(kind, changes):
    """fp32 moments to rounding (Muon: to its bf16 products); int8 ones, drawn anew, to their width."""
    moved = []
    for device in ("cpu", "cuda"):
        parameters = {n: nn.Parameter(p.detach().to(device)) for n, p in named(torch.bfloat16).items()}
        optimizer = Optimizer(
            parameters.items(), OptimizerConfig(kind=kind, lr=1e-2, muon_lr=1e-2, **changes)
        )
        start = {n: p.detach().float().cpu() for n, p in parameters.items()}  # masters may be on their way
        generator = torch.Generator().manual_seed(1)
        for _ in range(6):
            for parameter in parameters.values():
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
            optimizer.step(1.0, torch.tensor(0.5, device=device), torch.tensor(True, device=device))
        tensors = optimizer.tensors()
        if changes.get("offload"):
            assert all(tensor.device.type == "cpu" for tensor in tensors.values())
        moved.append({n: tensors[f"master.{n}"].cpu() - start[n] for n in start})
    for name, wanted in moved[0].items():
        loose = 0.12 if changes.get("moments") else 0.1 if optimizer.takes_muon(name) else 1e-5
        assert relative_error(moved[1][name], wanted) < loose


def test_offloaded_state_is_given_out_after_its_copies_have_ended(monkeypatch):
    """Those of the drafter's GPU, which need not be the current one."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    for offload in (True, False):
        optimizer = Optimizer(named().items(), OptimizerConfig(offload=offload))
        optimizer.device = torch.device("cuda", 1)
        optimizer.tensors()
    assert waited == [torch.device("cuda", 1)]


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_newton_schulz_flattens_singular_values(shape):
    matrix, other = torch.randn(2, *shape, generator=torch.Generator().manual_seed(2))
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    found, *_ = (
        update / (0.2 * max(shape) ** 0.5) for update in muon_updates([matrix, other.T.contiguous()])
    )
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5 and values.max() < 1.3
    cosine = (found * (u @ vt)).sum() / (found.norm() * (u @ vt).norm())
    assert cosine > 0.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_on_many_matrices_at_once_is_muon_on_each(dtype):
    """With steps called off in between, for wide, tall and square matrices of one group."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(9, 14), (14, 9), (9, 14), (9, 9), (14, 9), (9, 9)]
    many = {
        f"layers.{i}.w.weight": nn.Parameter(torch.randn(s, generator=generator).to(dtype))
        for i, s in enumerate(shapes)
    }
    config, rate = OptimizerConfig(kind="muon", muon_lr=3e-2), 0.7 * 3e-2
    optimizer = Optimizer(many.items(), config)
    masters = {n: p.detach().float().clone() for n, p in many.items()}
    momenta = {n: torch.zeros_like(m) for n, m in masters.items()}
    for step in range(5):
        go = step != 2
        for parameter in many.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
            parameter.grad[0] = parameter.grad[0] if go else torch.nan
        optimizer.step(0.7, torch.tensor(0.3), torch.tensor(go))
        for name, parameter in many.items() if go else ():
            grad = parameter.grad.float() * 0.3
            momenta[name].lerp_(grad, 1 - config.muon_momentum)
            ahead = grad.lerp(momenta[name], config.muon_momentum)
            wide = ahead.T if ahead.shape[0] > ahead.shape[1] else ahead
            update = orthogonalized(wide[None])[0] * (0.2 * math.sqrt(wide.shape[1]))
            masters[name].mul_(1 - rate * config.muon_weight_decay)
            masters[name].sub_(update.T if wide is not ahead else update, alpha=rate)
    for name, parameter in many.items():
        assert relative_error(optimizer.state[name]["momentum"], momenta[name]) < 1e-6
        assert relative_error(parameter.detach(), masters[name]) < (1e-3 if dtype == torch.float32 else 4e-3)


def test_muon_under_a_flag_that_is_down_changes_nothing():
    """As on CUDA, where the host does not know that the step is called off."""
    parameters = named(torch.bfloat16)
    optimizer = Optimizer(parameters.items(), OptimizerConfig(kind="muon"))
    name = "layers.0.mlp.up_proj.weight"
    for scalars in ([1.0, 0.5, 0.1, 0.03], [0.0, float("nan"), 0.1, 0.03]):
        parameters[name].grad = torch.full_like(parameters[name], scalars[1])
        before = {n: t.clone() for n, t in [*optimizer.tensors().items(), (name, parameters[name])]}
        optimizer._muon([name], 1.0, torch.tensor(scalars))
        after = optimizer.tensors() | parameters
        moved = {n for n in before if not torch.equal(before[n], after[n])}
        assert moved == ({f"momentum.{name}", f"master.{name}", name} if scalars[0] else set())


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [({}, torch.float32), ({}, torch.bfloat16), (dict(moments="int8", offload=True), torch.bfloat16)],
    ids=str,
)
def test_small_parameters_side_by_side_move_as_each_alone(changes, dtype, monkeypatch):
    results = []
    for small in (1 << 14, 0):
        monkeypatch.setattr("dflash_lab.drafter.optim.SMALL", small)
        generator = torch.Generator().manual_seed(0)
        parameters = {f"{n}.norm.weight": nn.Parameter(torch.ones(8 * n, dtype=dtype)) for n in range(1, 6)}
        parameters["odd"] = nn.Parameter(torch.ones(3, 5))  # fp32 among bf16
        parameters["fixed"] = nn.Parameter(torch.ones(4, dtype=dtype))  # without a gradient
        optimizer = Optimizer(parameters.items(), OptimizerConfig(lr=1e-2, weight_decay=0.1, **changes))
        for step in range(4):
            for name, parameter in parameters.items():
                if name != "fixed":
                    parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            optimizer.step(1.0, 0.5, torch.tensor(step != 1))
        results.append({**optimizer.tensors(), **parameters})
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


class Launches(TorchDispatchMode):
    """Counts operations but views: what would start kernels on a GPU; one on a list of tensors is one."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def test_muon_starts_few_kernels_however_many_matrices_there_are():
    counts = []
    for layers in (2, 12):
        many = {f"layers.{i}.w.weight": nn.Parameter(torch.ones(6, 4 + 4 * (i % 2))) for i in range(layers)}
        optimizer = Optimizer(many.items(), OptimizerConfig(kind="muon"))
        for parameter in many.values():
            parameter.grad = torch.ones_like(parameter)
        with Launches() as launches:
            optimizer.step(1.0)
        counts.append(launches.count)
    assert counts[1] < counts[0] + 10


def test_muon_takes_matrices_of_layers_only_and_moves_them_like_adamw():
    parameters = named()
    optimizer = Optimizer(
        parameters.items(), OptimizerConfig(kind="muon", muon_lr=1e-2, muon_weight_decay=0.0)
    )
    assert [n for n in parameters if optimizer.takes_muon(n)] == ["layers.0.mlp.up_proj.weight"]
    before = parameters["layers.0.mlp.up_proj.weight"].detach().clone()
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    optimizer.step(1.0)
    rms = float((parameters["layers.0.mlp.up_proj.weight"] - before).detach().square().mean().sqrt())
    assert 0.1e-2 < rms < 0.3e-2  # about 0.2 of the rate
    with refused(InputError):
        OptimizerConfig(kind="sgd")


def test_schedule_rises_then_falls_to_its_floor():
    factors = [learning_rate_factor(step / 100, 0.1, 0.2) for step in range(101)]
    assert factors[0] == 0 and factors[5] == pytest.approx(0.5) and factors[10] == 1.0
    assert all(a >= b for a, b in pairwise(factors[10:]))
    assert factors[-1] == pytest.approx(0.2)
    assert learning_rate_factor(0.5, 0.0, 0.0) == pytest.approx(0.5 * (1 + math.cos(math.pi / 2)))
    assert learning_rate_factor(2.0, 0.1, 0.2) == pytest.approx(0.2)


@pytest.mark.parametrize("signed", [True, False])
def test_byte_codes_keep_the_mean_and_the_size(signed):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 500, generator=generator) * torch.logspace(-4, 0, 500)
    values = values if signed else values.square()
    decoded = torch.stack(
        [decode_moment(*encode_moment(values, generator, signed=signed)) for _ in range(200)]
    )
    one = decoded[0]
    assert one.shape == values.shape
    kept = values.abs() > values.abs().max() * 2.0 ** (-15 if signed else -31)
    assert ((one - values).abs() <= 0.0906 * values.abs())[kept].all()  # one code's width, 2^(1/8) - 1
    assert torch.allclose(decoded.mean(0)[kept], values[kept], rtol=0.03)
    assert (one.sign() == values.sign())[kept].all()
    if not signed:
        assert (one > 0).all()  # never a zero under a root while its block lives
    codes, scales = encode_moment(torch.zeros(300), generator, signed=signed)
    assert (decode_moment(codes, scales) == 0).all() and codes.dtype == (
        torch.int8 if signed else torch.uint8
    )


def test_smaller_state_reaches_the_same_minimum():
    """Least squares with noisy gradients: distance to the solution beside that of fp32 moments."""

    def distance(**changes):
        generator = torch.Generator().manual_seed(1)
        solution = torch.randn(20, 30, generator=generator)
        parameter = nn.Parameter(torch.zeros(20, 30))
        optimizer = Optimizer([("fc.weight", parameter)], OptimizerConfig(lr=2e-2, **changes))
        for step in range(300):
            noise = torch.randn(20, 30, generator=generator)
            parameter.grad = parameter.detach() - solution + 0.3 * noise
            optimizer.step(1 - step / 300)
        return float((parameter - solution).norm().detach() / solution.norm())

    whole = distance()
    assert whole < 0.1 and distance(offload=True) == pytest.approx(whole, rel=1e-6)
    assert distance(moments="int8", offload=True) == pytest.approx(whole, rel=0.2)


def test_byte_moments_take_a_quarter_and_resume_exactly():
    runs = []
    for cut in (False, True):
        parameters = named(torch.bfloat16)
        optimizer = Optimizer(parameters.items(), OptimizerConfig(moments="int8"))
        for step in range(4):
            if cut and step == 2:
                saved = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
                optimizer = Optimizer(parameters.items(), OptimizerConfig(moments="int8"))
                optimizer.load(saved, 2)
            for parameter in parameters.values():
                parameter.grad = torch.full_like(parameter, 0.1 * (step + 1))
            optimizer.step(1.0)
        runs.append(optimizer.tensors())
    assert all(torch.equal(tensor, runs[1][name]) for name, tensor in runs[0].items())
    assert runs[0]["exp_avg.fc.weight"].dtype == torch.int8
    with refused(InputError):
        OptimizerConfig(moments="fp8")
