"""The drafter itself: what a block may see, that training equals decoding, names, DFlash 2's additions."""

from __future__ import annotations

import pytest
import torch
from support.tiny_drafters import HIDDEN, SECOND, TAPS, VOCAB, relative_error, tiny_config, tiny_drafter
from support.wording import refused

from dflash_lab.drafter.attention import row_layout
from dflash_lab.drafter.config import FULL, SLIDING
from dflash_lab.drafter.model import DraftCache, Drafter, rotate
from dflash_lab.errors import InputError

LENGTHS, ANCHORS = [17, 21], [[1, 3, 12], [2, 5, 20]]

VARIANTS = {
    "mixed": {},
    "full": dict(layer_types=(FULL,) * 3),
    "window-1": dict(layer_types=(SLIDING,) * 3, sliding_window=1),
    "bidirectional-window": dict(is_causal=False, sliding_window=3),
    "causal-everywhere": dict(is_causal=True),
    "second": SECOND,
    "scaled": dict(input_embedding_scale=3.0),
}


def case(config, seed=3):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(VOCAB, HIDDEN, generator=generator)
    taps = torch.randn(sum(LENGTHS), len(TAPS) * HIDDEN, generator=generator)
    blocks = sum(map(len, ANCHORS))
    ids = torch.full((blocks, config.block_size), config.mask_token_id)
    ids[:, 0] = torch.randint(0, VOCAB, (blocks,), generator=generator)
    return table[ids], taps, row_layout(ANCHORS, LENGTHS, config.block_size)


def places():
    offsets = [0, LENGTHS[0]]
    return [(offsets[d], a) for d, anchors in enumerate(ANCHORS) for a in anchors]


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_row_equals_independent_decoding_calls(variant):
    """Which are given neither what is at or behind the anchor nor other documents and blocks."""
    config = tiny_config(**VARIANTS[variant])
    drafter = tiny_drafter(config)
    embeddings, taps, layout = case(config)
    with torch.no_grad():
        hidden = drafter(embeddings, taps, layout)
    for block, (offset, anchor) in enumerate(places()):
        cache = DraftCache(drafter, capacity_tokens=2)
        cache.extend(taps[offset : offset + anchor])
        assert relative_error(cache.block(embeddings[block]), hidden[block]) < 1e-5


def test_decoding_cache_grows_crops_and_equals_a_full_recompute():
    config = tiny_config()
    drafter = tiny_drafter(config)
    embeddings, taps, _ = case(config)
    cache = DraftCache(drafter, capacity_tokens=2)
    cache.extend(taps[:3])
    cache.block(embeddings[0])
    cache.extend(taps[3:4])
    cache.extend(taps[20:25])  # to be taken back
    cache.crop(4)
    cache.extend(taps[4:11])
    whole = DraftCache(drafter)
    whole.extend(taps[:11])
    assert cache.length == whole.length == 11
    assert relative_error(cache.block(embeddings[1]), whole.block(embeddings[1])) < 1e-5
    with refused(InputError):
        cache.crop(12)


def test_names_and_count_are_the_released_ones():
    config = tiny_config(num_layers=5)
    names = set(Drafter(config).state_dict())
    assert len(names) == 58
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} < names
    assert {
        f"layers.4.self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    } < names
    second = set(Drafter(tiny_config(num_layers=1, **SECOND)).state_dict()) - names
    assert second == {
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
        "candidate_selector.hidden_projection.weight",
        *(
            f"layers.0.{c}_conv.{n}"
            for c in ("attention", "mlp")
            for n in ("base_kernel", "kernel_projection.weight")
        ),
    }


def test_second_starts_as_the_first():
    generator = torch.Generator().manual_seed(0)
    second = Drafter(tiny_config(**SECOND)).initialize(generator)
    first = Drafter(tiny_config())
    first.load_state_dict(second.state_dict(), strict=False)
    embeddings, taps, layout = case(first.config)
    with torch.no_grad():
        assert torch.equal(second(embeddings, taps, layout), first(embeddings, taps, layout))


def test_selector_walks_left_to_right_over_its_candidates():
    drafter = tiny_drafter(tiny_config(**SECOND))
    selector = drafter.candidate_selector
    generator = torch.Generator().manual_seed(5)
    hidden, logits = (
        torch.randn(2, 3, HIDDEN, generator=generator),
        torch.randn(2, 3, VOCAB, generator=generator),
    )
    anchor = torch.tensor([5, 9])
    with torch.no_grad():
        tokens, candidates, scores = selector.select(hidden, logits, anchor)
    for block in range(2):
        previous = int(anchor[block])
        for slot in range(3):
            allowed = logits[block, slot].topk(4).indices
            query = selector.predecessor_codebook[previous] * selector.hidden_projection(hidden[block, slot])
            wanted = logits[block, slot, allowed] + selector.successor_codebook[allowed] @ query
            assert set(candidates[block, slot].tolist()) == set(allowed.tolist())
            assert torch.allclose(scores[block, slot], wanted, atol=1e-5)
            previous = int(allowed[wanted.argmax()])
            assert int(tokens[block, slot]) == previous


def test_rotation_is_relative():
    drafter = tiny_drafter()
    generator = torch.Generator().manual_seed(6)
    q, k = torch.randn(2, 16, generator=generator), torch.randn(2, 16, generator=generator)

    def score(i, j):
        angles = drafter.angles(torch.tensor([i, j]), torch.float32)
        left, right = rotate(q[:1], (angles[0][0], angles[1][0])), rotate(k[:1], (angles[0][1], angles[1][1]))
        return float((left * right).sum())

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)
    assert abs(score(5, 2) - score(5, 4)) > 1e-3


def test_gradient_checkpointing_changes_nothing():
    gradients, forwards = [], []
    for recompute in (False, True):
        drafter = tiny_drafter().train()
        drafter.gradient_checkpointing = recompute
        embeddings, taps, layout = case(drafter.config)
        counted: list[int] = []
        drafter.layers[1].self_attn.q_proj.register_forward_hook(lambda *_, c=counted: c.append(1))
        drafter(embeddings, taps, layout).square().sum().backward()
        forwards.append(len(counted))
        gradients.append(torch.cat([p.grad.flatten() for p in drafter.parameters()]))
    assert torch.equal(*gradients) and forwards == [1, 2]


def test_logits_are_scaled_then_capped():
    drafter = tiny_drafter(tiny_config(output_multiplier=2.0, final_logit_softcapping=5.0))
    hidden, head = torch.randn(3, HIDDEN), torch.randn(VOCAB, HIDDEN)
    assert torch.allclose(drafter.logits(hidden, head), 5 * torch.tanh(2 * (hidden @ head.T) / 5), atol=1e-5)


def test_compiled_layers_give_the_same_states_and_gradients():
    results = []
    for compiled in (False, True):
        drafter = tiny_drafter(tiny_config(num_layers=1, **SECOND)).train()
        if compiled:
            drafter.compile_layers(backend="eager")
        embeddings, taps, layout = case(drafter.config)
        hidden = drafter(embeddings, taps, layout)
        hidden.square().sum().backward()
        results.append([hidden.detach(), *(p.grad for p in drafter.parameters() if p.grad is not None)])
        assert "layers.0.self_attn.q_proj.weight" in drafter.state_dict()
    assert len(results[0]) == len(results[1]) > 10
    for plain, fused in zip(*results, strict=True):
        assert relative_error(fused, plain) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_on_cuda_is_close_to_fp32_on_cpu(compiled):
    config = tiny_config()
    drafter = tiny_drafter(config)
    embeddings, taps, layout = case(config)
    with torch.no_grad():
        wanted = drafter(embeddings, taps, layout)
    drafter = drafter.to("cuda", torch.bfloat16)
    if compiled:
        drafter.compile_layers()
    moved = layout.map(lambda index: index.cuda())
    for path in ("dense", "flex"):
        hidden = drafter(embeddings.cuda().bfloat16(), taps.cuda().bfloat16(), moved, path)
        hidden.float().square().sum().backward()
        assert relative_error(hidden.detach().float().cpu(), wanted) < 0.05


@pytest.mark.parametrize("scale", [0.02, 3.0])
def test_logits_start_with_a_spread_of_one_whatever_the_head(scale):
    config = tiny_config()
    drafter = Drafter(config).initialize(torch.Generator().manual_seed(0))
    head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1)) * scale
    embeddings, taps, layout = case(config)
    with torch.no_grad():
        logits = drafter.fit_to_head(head).logits(drafter(embeddings, taps, layout), head)
    assert float(logits.std()) == pytest.approx(1.0, rel=0.2)
