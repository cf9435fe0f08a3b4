"""On a CUDA device: fused kernels against their references, fused layers against plain ones, OOM recovery,
the pipeline.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.sample_files import make_samples
from support.tiny_targets import build_tiny

from dflash_lab.extraction import fused_reference
from dflash_lab.extraction.checks import rel_l2, verify
from dflash_lab.extraction.fused_layers import FusedLayer, reference_ops, skip_tuning, speed_up, triton_ops
from dflash_lab.extraction.loop import extract
from dflash_lab.extraction.store import open_store
from dflash_lab.models.hooks import Taps
from dflash_lab.models.load import load_target

pytestmark = pytest.mark.gpu

BATCH, LENGTH, HIDDEN = 3, 131, 320
KEY_HEADS, VALUE_HEADS, WIDTH = 2, 4, 128  # of the tiny hybrid targets below: a kernel compiles for each
COLUMNS = 2 * KEY_HEADS * WIDTH + 2 * VALUE_HEADS * WIDTH + 128
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 3e-3}  # one rounding of bf16 is 1.7e-3
WIDE = {  # head widths that the real kernels take; the scale keeps states of a size like the tiny targets'
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2,
    "initializer_range": 0.08,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def untuned() -> None:
    skip_tuning()


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def draw(request: pytest.FixtureRequest):
    """A function: shape -> random CUDA tensor of the parameter's dtype."""
    generator = torch.Generator("cuda").manual_seed(0)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(request.param)

    make.limit = LIMIT[request.param]
    return make


def delta_gates(*args):
    from dflash_lab.extraction import kernels

    return kernels.delta_gates(*args)


def both(name: str, *args, limit: float) -> None:
    found, wanted = getattr(triton_ops(), name)(*args), getattr(fused_reference, name)(*args)
    for one, other in zip(
        found if isinstance(found, tuple) else [found], wanted if isinstance(wanted, tuple) else [wanted]
    ):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert rel_l2(one, other) <= limit


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_equal_their_reference(draw, offset: float) -> None:
    x, y, weight = draw(BATCH * LENGTH, HIDDEN), draw(BATCH * LENGTH, HIDDEN), draw(HIDDEN)
    both("rms_norm", x, weight, 1e-6, offset, limit=draw.limit)
    both("add_rms_norm", x, y, weight, 1e-6, offset, limit=draw.limit)


def test_swiglu_equals_its_reference(draw) -> None:
    both("swiglu", draw(BATCH * LENGTH, 2 * 1088), limit=draw.limit)
    both("swiglu", draw(BATCH * LENGTH, 1024)[:, : 2 * 96], limit=draw.limit)


@pytest.mark.parametrize("normalise", [True, False])
def test_convolution_equals_its_reference(draw, normalise: bool) -> None:
    rows, weight = draw(BATCH * LENGTH, COLUMNS), draw(KEY_HEADS * WIDTH, 4)
    both("conv_silu", rows, 256, weight, BATCH, KEY_HEADS, WIDTH, normalise, limit=draw.limit)


def test_gates_equal_their_reference(draw) -> None:
    rows = draw(BATCH * LENGTH, COLUMNS)
    gates = fused_reference.Gates(7, 31, draw(VALUE_HEADS).float(), 20 * draw(VALUE_HEADS).float())
    for chunk in (1, 64):
        found = delta_gates(rows, gates, BATCH, chunk)
        for one, other in zip(found, fused_reference.delta_gates(rows, gates, BATCH, chunk)):
            assert rel_l2(one, other) <= 1e-5
    mixed = draw(BATCH, LENGTH, VALUE_HEADS, WIDTH)
    both("gated_rms_norm", mixed, rows, 128, draw(WIDTH), 1e-6, limit=draw.limit)
    both("sigmoid_gate", mixed, rows, 3, WIDTH, limit=draw.limit)


@pytest.mark.parametrize("rotary", [32, WIDTH])
def test_head_norm_with_rotary_angles_equals_its_reference(draw, rotary: int) -> None:
    rows, weight = draw(BATCH * LENGTH, COLUMNS), draw(WIDTH)
    cos, sin = draw(1, LENGTH, rotary).expand(BATCH, -1, -1), draw(1, LENGTH, rotary).expand(BATCH, -1, -1)
    for gain in (weight, None):
        both("norm_rope", rows, WIDTH, 2 * WIDTH, 4, WIDTH, cos, sin, gain, 1e-6, 1.0, limit=draw.limit)


def test_delta_rule_equals_the_step_by_step_one() -> None:
    for length in (1, 63, 64, 65, 200):
        delta_rule_equals(length)


def delta_rule_equals(length: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    q, k = (
        torch.nn.functional.normalize(make(2, length, KEY_HEADS, WIDTH), dim=-1).bfloat16() for _ in range(2)
    )
    v, rows = make(2, length, VALUE_HEADS, WIDTH).bfloat16(), make(2 * length, 2 * VALUE_HEADS).bfloat16()
    gates = fused_reference.Gates(0, VALUE_HEADS, make(VALUE_HEADS), make(VALUE_HEADS))
    found, wanted = (
        triton_ops().delta_rule(q, k, v, rows, gates),
        fused_reference.delta_rule(q, k, v, rows, gates),
    )
    assert rel_l2(found, wanted) <= 1e-2
    from dflash_lab.extraction.kernels import _by_entry_point

    assert rel_l2(_by_entry_point(q, k, v, rows, gates), wanted) <= 1e-2


def states_of(target, ids: torch.Tensor, taps: list[int]) -> list[torch.Tensor]:
    with torch.inference_mode(), Taps(target, taps) as caught:
        target.body(input_ids=ids.to(target.device), use_cache=False)
        return [state.float().cpu() for state in caught.take()]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5", "qwen3_5_moe"])
def test_fused_and_batched_states_are_as_close_to_fp32_as_single_ones(kind: str, tmp_path: Path) -> None:
    """In bf16 the error of batched, fused states against fp32 is at most 1.1 x that of the plain
    single run.
    """
    hybrid = {
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": WIDTH,
        "linear_value_head_dim": WIDTH,
    }
    folder = build_tiny(kind, tmp_path / kind, head_dim=128, **WIDE, **(hybrid if "qwen3_5" in kind else {}))
    taps = [1, 4, 7]
    exact = load_target(str(folder), device="cuda", dtype="float32", with_head=False)
    for layer in exact.layers:  # step by step in float32: no library's kernel
        layer.forward = FusedLayer(layer, reference_ops())
        layer.forward.prepare()
    target = load_target(str(folder), device="cuda", dtype="bfloat16", with_head=False)
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(256, (length,), generator=generator) for length in (200, 65, 64, 63, 1)]
    batch = torch.stack([torch.nn.functional.pad(row, (0, 200 - len(row))) for row in rows])
    wanted = [states_of(exact, row[None], taps) for row in rows]
    single = [states_of(target, row[None], taps) for row in rows]
    path = speed_up(target, "on")
    assert path.ops == "triton" and not path.plain
    batched = states_of(target, batch, taps)
    for tap in range(len(taps)):
        truth = torch.cat([state[tap][0] for state in wanted])
        plain = rel_l2(torch.cat([state[tap][0] for state in single]), truth)
        fused = rel_l2(
            torch.cat([batched[tap][number, : len(row)] for number, row in enumerate(rows)]), truth
        )
        assert fused <= 1.1 * plain, f"tap {taps[tap]}: fused {fused:.4g}, plain single {plain:.4g}"


def test_out_of_memory_is_split_and_everything_is_stored(tmp_path: Path) -> None:
    """With a small share of the device's memory real allocator errors occur; nothing is lost and nothing
    stays allocated.
    """
    folder = build_tiny("qwen3", tmp_path / "m", head_dim=128, **{**WIDE, "intermediate_size": 8192})
    target = load_target(str(folder), device="cuda", dtype="bfloat16", with_head=False)
    samples = make_samples(tmp_path / "s.parquet", [1500 - number for number in range(64)])
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 30)) / total)
    try:
        report = extract(
            target, samples, tmp_path / "store", tap_ids=[1, 3], token_budget=100_000, max_batch=64
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert report.failures and all("memory" in failure for failure in report.failures)
    assert report.samples_stored == 64 and not report.quarantined
    assert len(open_store(tmp_path / "store")) == 64 and verify(tmp_path / "store") == []


def test_the_cuda_pipeline_stores_what_the_cpu_stores(tmp_path: Path) -> None:
    folder = build_tiny("qwen3", tmp_path / "m")
    samples = make_samples(tmp_path / "s.parquet", [1, 63, 64, 65, 300, *range(20, 60)])
    for device in ("cpu", "cuda"):
        target = load_target(str(folder), device=device, dtype="float32", with_head=False)
        extract(
            target,
            samples,
            tmp_path / device,
            tap_ids=[1, 5],
            token_budget=600,
            max_batch=8,
            store_final=True,
        )
    one, other = open_store(tmp_path / "cpu"), open_store(tmp_path / "cuda")
    for index in range(len(one)):
        a, b = one[index], other[other.find(one[index].hash)]
        assert torch.equal(a.input_ids, b.input_ids)
        assert rel_l2(b.taps, a.taps) <= 6e-3 and rel_l2(b.final, a.final) <= 6e-3  # both rounded to bf16
