"""AdamW equals torch's, masters carry small steps, Muon's direction is orthogonal, the schedule has its
shape.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from dflash_lab.drafter.moments import decode, encode
from dflash_lab.drafter.optimizer import Optimizer, OptimizerConfig, orthogonalized
from dflash_lab.drafter.schedule import learning_rate_factor
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
    with pytest.raises(InputError, match="does not fit"):
        Optimizer(second.items(), OptimizerConfig()).load(a.tensors(), 1)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_newton_schulz_flattens_singular_values(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalized(matrix)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5 and values.max() < 1.3
    cosine = (found * (u @ vt)).sum() / (found.norm() * (u @ vt).norm())
    assert cosine > 0.95


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
    rms = float((parameters["layers.0.mlp.up_proj.weight"] - before).square().mean().sqrt())
    assert 0.1e-2 < rms < 0.3e-2  # about 0.2 of the rate
    with pytest.raises(InputError, match="'adamw' or 'muon'"):
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
    decoded = torch.stack([decode(*encode(values, generator, signed=signed)) for _ in range(400)])
    one = decoded[0]
    assert one.shape == values.shape
    kept = values.abs() > values.abs().max() * 2.0 ** (-15 if signed else -31)
    assert ((one - values).abs() <= 0.0906 * values.abs())[kept].all()  # one code's width, 2^(1/8) - 1
    assert torch.allclose(decoded.mean(0)[kept], values[kept], rtol=0.03)
    assert (one.sign() == values.sign())[kept].all()
    if not signed:
        assert (one > 0).all()  # never a zero under a root while its block lives
    codes, scales = encode(torch.zeros(300), generator, signed=signed)
    assert (decode(codes, scales) == 0).all() and codes.dtype == (torch.int8 if signed else torch.uint8)


@pytest.mark.parametrize(
    "changes", [dict(moments="int8"), dict(offload=True), dict(moments="int8", offload=True)]
)
def test_smaller_state_reaches_the_same_minimum(changes):
    """Least squares with noisy gradients: distance to the solution beside that of fp32 moments."""

    def distance(config):
        generator = torch.Generator().manual_seed(1)
        solution = torch.randn(40, 30, generator=generator)
        parameter = nn.Parameter(torch.zeros(40, 30))
        optimizer = Optimizer([("fc.weight", parameter)], config)
        for step in range(400):
            noise = torch.randn(40, 30, generator=generator)
            parameter.grad = parameter.detach() - solution + 0.3 * noise
            optimizer.step(1 - step / 400)
        return float((parameter - solution).norm().detach() / solution.norm())

    reference = distance(OptimizerConfig(lr=2e-2))
    found = distance(OptimizerConfig(lr=2e-2, **changes))
    assert found == pytest.approx(reference, rel=0.2 if "moments" in changes else 1e-6) and found < 0.1


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
    with pytest.raises(InputError, match="'fp32' or 'int8'"):
        OptimizerConfig(moments="fp8")
