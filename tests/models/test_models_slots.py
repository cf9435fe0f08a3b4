"""Generation in slots gives what plain generation gives, whatever the number of slots."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F
from support.draws import assert_follows
from support.tiny_targets import build_tiny

from dflash_lab.models.generate import few_kernels, generate, generate_in_slots, takes_slots
from dflash_lab.models.load import load_target

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
LENGTHS = (5, 30, 9, 66, 5, 1, 24, 25)


def prompts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


def in_slots(target, asked, count, slots, stop=(), temperature=0.0, seed=0, **options):
    return generate_in_slots(
        target,
        asked,
        max_new_tokens=count,
        temperature=temperature,
        generator=torch.Generator(target.device).manual_seed(seed),
        stop=torch.tensor(list(stop), dtype=torch.long, device=target.device),
        slots=slots,
        **options,
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_slots_equal_plain_generation(tiny_target, kind):
    target = load_target(str(tiny_target(kind)))
    free = generate(target, prompts(), max_new_tokens=14, stop_ids=[])
    stop = sorted({new[i] for i, new in zip((3, 7, 0, 13), free)})
    expected = generate(target, prompts(), max_new_tokens=14, stop_ids=stop)
    assert len({len(new) for new in expected}) > 2  # some stop early, some at once, some never
    for slots in (1, 4, 50) if kind == "llama" else (4,):
        assert in_slots(target, prompts(), 14, slots, stop) == expected
    if kind == "llama":
        assert in_slots(target, prompts(), 14, 3) == free
        assert in_slots(target, prompts(), 1, 3) == [new[:1] for new in free]


def test_a_slot_forgets_who_had_it_before(tiny_target):
    target = load_target(str(tiny_target("llama")))
    long, short = prompts((60,))[0], prompts((4,))[0]
    alone = in_slots(target, [short], 20, 1)
    assert in_slots(target, [long, short, short], 20, 1)[1:] == alone * 2
    assert target.body.config._attn_implementation == "sdpa"


def test_draws_in_slots_are_seeded_and_follow_the_distribution(tiny_target):
    target = load_target(str(tiny_target("qwen3")))
    prompt = prompts((8,))[0]
    first = in_slots(target, [prompt] * 90, 1, 40, temperature=1.5, seed=1)
    assert first == in_slots(target, [prompt] * 90, 1, 40, temperature=1.5, seed=1)
    assert first != in_slots(target, [prompt] * 90, 1, 40, temperature=1.5, seed=2)
    drawn = in_slots(target, [prompt] * 4000, 1, 2000, temperature=1.5, seed=1)
    assert_follows(target, prompt, [token for (token,) in drawn], 1.5)


NORMS = {  # of each family, and whether its forward is Llama's
    "llama.LlamaRMSNorm": True,
    "qwen2.Qwen2RMSNorm": True,
    "qwen3.Qwen3RMSNorm": True,
    "mistral.MistralRMSNorm": True,
    "olmo2.Olmo2RMSNorm": False,  # rounds after the weight
    "gemma2.Gemma2RMSNorm": False,  # 1 + w
    "qwen3_5.Qwen3_5RMSNorm": False,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_in_few_kernels_gives_the_family_s_own_numbers(name, dtype):
    family, kind = name.split(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    norm = getattr(module, kind)(96, eps=1e-5).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight += torch.randn(96, generator=generator).to(dtype)
    hidden = (3 * torch.randn(50, 1, 96, generator=generator)).to(dtype)
    expected = norm(hidden)
    with few_kernels(norm) as replaced:
        found = norm(hidden)
    assert replaced == (NORMS[name] and dtype == torch.bfloat16)
    assert torch.equal(found, expected) and "forward" not in vars(norm)


def test_a_module_whose_weight_is_no_tensor_stays_as_it_is():
    class Packed(torch.nn.Module):  # as quantised layers are: the weight is asked for by a call
        def weight(self):
            return torch.zeros(1)

        def forward(self, x):
            return x

    with few_kernels(torch.nn.Sequential(Packed())) as replaced:
        assert not replaced


@pytest.mark.gpu
def test_a_norm_on_a_gpu_is_two_kernels_that_differ_by_the_order_of_a_sum():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(576).to("cuda", torch.bfloat16)
    hidden = torch.randn(4096, 1, 576, generator=torch.Generator().manual_seed(0)).to(norm.weight)
    with torch.no_grad():
        expected = norm(hidden).float()
        with few_kernels(norm), torch.profiler.profile() as profiler:
            found = norm(hidden).float()
            torch.cuda.synchronize()
    kernels = [event.name for event in profiler.events() if event.name.startswith("void at::native")]
    assert len(kernels) <= 3  # and the copy to float32
    assert (found == expected).float().mean() > 0.99
    assert (found - expected).norm() < 1e-3 * expected.norm()


def test_bf16_slots_start_fewer_kernels_for_the_same_tokens(tmp_path, monkeypatch):
    target = load_target(str(build_tiny("qwen3", tmp_path, num_hidden_layers=2)), dtype="bfloat16")

    def run():
        """Tokens, and the roots that are drawn outside of a norm that is one kernel on a GPU."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            new = in_slots(target, prompts((5, 5)), 8, 2)
        roots = [event for event in profiler.events() if event.name == "aten::rsqrt"]
        return new, sum(not inside(event, "aten::rms_norm") for event in roots)

    new, roots = run()
    monkeypatch.setattr("dflash_lab.models.generate.few_kernels", lambda body: contextlib.nullcontext())
    plain, before = run()
    assert new == plain
    forwards = 32 + 1  # steps to the host's first look, and one that tells the cache its shapes
    assert roots == 0 and before == forwards * (4 * 2 + 1)


def inside(event, name):
    """Whether a profiler's event is part of a call of `name`."""
    parent = event.cpu_parent
    return parent is not None and (parent.name == name or inside(parent, name))


def test_progress_ends_with_all_prompts(tiny_target):
    target, seen = load_target(str(tiny_target("llama"))), []
    in_slots(target, prompts((4,) * 5), 40, 2, progress=lambda *a: seen.append(a))
    assert seen[0] == ("generate", 0, 5) and seen[-1] == ("generate", 5, 5)
    assert [a[1] for a in seen] == sorted(a[1] for a in seen)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5", "qwen3_moe"])
def test_targets_with_state_or_experts_are_left_to_the_plain_way(tiny_target, kind):
    assert takes_slots(load_target(str(tiny_target(kind)))) == (kind in ("llama", "qwen3"))


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs triton, TRITON_INTERPRET=1")
        ),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("heads, key_heads", [(9, 3), (4, 4), (32, 1)])
def test_the_kernel_reads_what_each_row_has(device, heads, key_heads):
    from dflash_lab.models.slot_kernels import attend_slots

    generator = torch.Generator().manual_seed(0)
    query = torch.randn(5, heads, 32, generator=generator).to(device)
    keys, values = torch.randn(2, 5, key_heads, 150, 32, generator=generator).to(device)
    positions = torch.tensor([0, 1, 63, 64, 149], device=device)
    out = attend_slots(query, keys, values, positions, 0.3)
    for row, position in enumerate(positions.tolist()):
        k, v = (t[row, :, : position + 1].repeat_interleave(heads // key_heads, 0) for t in (keys, values))
        expected = F.scaled_dot_product_attention(query[row, :, None], k, v, scale=0.3)[:, 0]
        assert (out[row] - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.gpu
def test_recorded_slots_equal_plain_generation(tiny_target):
    target = load_target(str(tiny_target("llama")), device="cuda", dtype="float32")
    cpu = load_target(str(tiny_target("llama")))
    expected = generate(cpu, prompts(), max_new_tokens=14, stop_ids=[65, 66])
    assert generate(target, prompts(), max_new_tokens=40, stop_ids=[65, 66], batch=4) == generate(
        cpu, prompts(), max_new_tokens=40, stop_ids=[65, 66]
    )
    assert in_slots(target, prompts(), 14, 50, [65, 66]) == expected
