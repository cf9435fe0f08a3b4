"""A live target gives the states a store would hold; training from it is training from the store."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from support.families import tiny_family
from support.tiny_drafters import ItemList, Killed, killed_at, records, relative_error, tiny_settings
from support.tiny_targets import VOCAB_SIZE
from support.wording import refused
from transformers import AttentionInterface

from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.live import ATTENTION, LiveItems, RowForward, documents_attention
from dflash_lab.drafter.model import Drafter
from dflash_lab.drafter.rows import PackedRows, padded
from dflash_lab.drafter.train import train
from dflash_lab.errors import InputError
from dflash_lab.extraction.loop import extract
from dflash_lab.extraction.store import open_store
from dflash_lab.models.hooks import Taps
from dflash_lab.models.load import load_target

TAPS = [1, 3, 5]
LENGTHS = [20, 31, 17, 44, 25, 38, 29, 33, 18, 40, 22, 27, 35, 90]
CONTEXT = 80  # the longest sample is cut
KINDS = {"llama": "packed", "qwen3": "packed", "qwen3_moe": "packed", "qwen3_5": "padded"}


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    path = tmp_path_factory.mktemp("live") / "samples.parquet"
    generator = np.random.default_rng(0)
    rows = [
        Sample(f"s{i}", generator.integers(0, 256, n), (np.arange(n) >= n // 3).astype(np.uint8), "test")
        for i, n in enumerate(LENGTHS)
    ]
    write_samples(path, rows, heldout_fraction=0.3, provenance={"test": True})
    return path


def live(samples, folder) -> LiveItems:
    return LiveItems(samples, load_target(str(folder)), tap_ids=TAPS, context_tokens=CONTEXT)


@pytest.fixture(scope="module")
def sources(samples, tiny_target, tmp_path_factory):
    """By kind of target: its live items, and those of a store in the same order."""

    @functools.cache
    def of(kind: str) -> tuple[LiveItems, ItemList]:
        items, folder = live(samples, tiny_target(kind)), tmp_path_factory.mktemp(kind)
        target = load_target(str(tiny_target(kind)))
        extract(target, samples, folder, tap_ids=TAPS, token_budget=256, max_batch=8, store_final=True)
        store = open_store(folder)
        return items, ItemList(store[store.find(name)] for name in items.hashes)

    return of


def drafter_for(target) -> Drafter:
    config = DrafterConfig.from_target(
        target.config, mask_token_id=VOCAB_SIZE - 1, num_layers=2, block_size=4, tap_ids=TAPS
    )
    return Drafter(config).initialize(torch.Generator().manual_seed(0))


SETTINGS = tiny_settings(
    max_steps=4, context_tokens=CONTEXT, anchors=24, accumulate=1, eval_rows=2, log_every=2, eval_every=2
)


@pytest.mark.parametrize("kind", KINDS)
def test_live_rows_are_the_rows_of_a_store(sources, kind):
    items, wanted = sources(kind)
    assert items.forward.path == KINDS[kind]
    config = drafter_for(items.target).config
    rows = [
        PackedRows(source, range(len(LENGTHS)), config, context_tokens=CONTEXT, anchors=24, seed=0, pad=True)
        for source in (items, wanted)
    ]
    assert rows[0].count(0) == rows[1].count(0) > 3
    for index in range(rows[0].count(0)):
        bare, full = (source.row(0, index) for source in rows)
        assert bare.taps.shape == (CONTEXT, 0)
        found = items.fill(bare, 0, index)
        assert len(found.layout.segments) > 1 or found.tokens == CONTEXT
        for name in ("taps", "final"):
            mine, theirs = getattr(found, name), getattr(full, name)
            assert mine.dtype == theirs.dtype == torch.bfloat16
            # Batches of another shape round the last bit of fp32 differently, which may flip one of bf16.
            assert relative_error(mine, theirs) < 5e-4, name
            assert not mine[found.tokens :].any()
        for name in ("input_ids", "labels", "slot_mask", "block_ids", "target_rows"):
            assert torch.equal(getattr(found, name), getattr(full, name)), name
    item, full = items[len(LENGTHS) - 1], wanted[len(LENGTHS) - 1]
    assert len(item) == CONTEXT and relative_error(item.taps, full.taps[:CONTEXT]) < 5e-4


def test_documents_do_not_see_each_other(sources):
    items, _ = sources("llama")
    bounds = [(0, 30), (30, 61)]
    ids = torch.randint(0, 256, (61,), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(30), torch.arange(31)])
    taps, final = items.forward(ids, positions, bounds)
    ids[:30] = 7
    other, other_final = items.forward(ids, positions, bounds)
    assert torch.equal(taps[30:], other[30:]) and torch.equal(final[30:], other_final[30:])
    assert not torch.equal(taps[:30], other[:30])


def test_chunks_longer_than_the_proof_run_padded(tmp_path, caplog):
    """The proof's documents are shorter than a chunk, where packed rows still look right."""
    target = tiny_family("llama4_text", tmp_path, attention_chunk_size=100)
    forward = RowForward(target, TAPS[:2], row_tokens=200, longest=200)
    assert forward.path == "padded" and "layers 0-2 (chunked_attention over 100 tokens)" in caplog.text
    ids = torch.randint(3, 60, (150,), generator=torch.Generator().manual_seed(1))
    taps, _ = forward(ids, torch.arange(150), [(0, 150)])
    with Taps(target, TAPS[:2]) as plain:
        target.body(input_ids=ids[None], use_cache=False)
        assert relative_error(taps, torch.cat(plain.take(), dim=-1)[0]) < 5e-3


def test_a_target_whose_packed_forward_differs_runs_padded(samples, tiny_target, caplog, monkeypatch):
    """The proof, not a list of names, decides."""
    monkeypatch.setitem(
        AttentionInterface._global_mapping,
        ATTENTION,
        lambda *inputs, **options: (documents_attention(*inputs, **options)[0] + 1.0, None),
    )
    target = load_target(str(tiny_target("llama")))
    before = target.body.config._attn_implementation
    with caplog.at_level("INFO"):
        forward = RowForward(target, TAPS, row_tokens=CONTEXT, longest=40)
    assert forward.path == "padded" and "differs from plain" in caplog.text
    assert target.body.config._attn_implementation == before != ATTENTION
    ids = torch.arange(50) % 256
    taps, _ = forward(ids, torch.arange(50), [(0, 20), (20, 50)])
    plain = torch.cat(forward._plain(ids[None, 20:])[:-1], dim=-1)[0]
    assert relative_error(taps[20:], plain) < 5e-3


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_compiled_layers_are_kept_only_if_each_adds_the_same(tiny_target, monkeypatch, kind):
    """A compiler that changes one layer's output by a tenth is not trusted; one that changes nothing is."""
    forward = RowForward(load_target(str(tiny_target(kind))), TAPS, row_tokens=CONTEXT, longest=40)
    plain = [layer.forward for layer in forward.target.layers]
    made = []

    def compiler(function, dynamic):
        made.append(function)
        factor = 1.1 if len(made) == 5 else 1.0
        return lambda stream, **kwargs: function(stream, **kwargs) * factor

    monkeypatch.setattr(torch, "compile", compiler)
    with torch.no_grad():
        assert "compiled, layer 4 adds something else" in forward._compile()
    assert [layer.forward for layer in forward.target.layers] == plain
    made += [None] * 8
    with torch.no_grad():
        assert forward._compile() == ""
    assert all(layer.forward is not old for layer, old in zip(forward.target.layers, plain, strict=True))


@pytest.fixture(scope="module")
def trained(sources, tmp_path_factory):
    """A drafter of the live llama, its report and its folder."""
    items, folder = sources("llama")[0], tmp_path_factory.mktemp("trained")
    drafter = drafter_for(items.target)
    return (
        drafter,
        train(items, items.target.head, drafter, SETTINGS, folder=folder, source=items.source()),
        folder,
    )


def test_training_live_equals_training_from_a_store(sources, trained, tmp_path):
    items, wanted = sources("llama")
    drafter, report, folder = trained
    other = drafter_for(items.target)
    told = train(wanted, items.target.head, other, SETTINGS, folder=tmp_path)
    for mine, theirs in zip(drafter.parameters(), other.parameters(), strict=True):
        assert relative_error(mine.data, theirs.data) < 2e-3
    assert report.context_tokens == told.context_tokens
    assert report.last["agreement"] == pytest.approx(told.last["agreement"], abs=0.02)
    losses = [[record["loss"] for record in records(run, "step")] for run in (folder, tmp_path)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and len(losses[0]) == 4


def test_killed_and_resumed_live_run_repeats_the_whole_one(sources, trained, tmp_path):
    items, _ = sources("llama")
    options = dict(settings=SETTINGS, folder=tmp_path, source=items.source())
    with pytest.raises(Killed):
        train(items, items.target.head, drafter_for(items.target), on_progress=killed_at(3), **options)
    resumed = drafter_for(items.target)
    train(items, items.target.head, resumed, **options)
    assert all(torch.equal(a, b) for a, b in zip(trained[0].parameters(), resumed.parameters(), strict=True))


def test_a_run_of_other_samples_or_weights_is_not_gone_on_with(samples, sources, tiny_target):
    items = live(samples, tiny_target("llama"))
    source = items.source()
    items.heldout = ~items.heldout
    assert items.source() != source
    assert sources("qwen3")[0].source()["target"] != source["target"]


def test_tokens_outside_the_vocabulary_are_refused(tiny_target, tmp_path):
    path = tmp_path / "samples.parquet"
    sample = Sample("a", np.array([1, 2, 900]), np.array([0, 1, 1]), "t")
    write_samples(path, [sample], heldout_fraction=0.0, provenance={})
    with refused(InputError):
        live(path, tiny_target("llama"))


def test_padding_a_bare_row_keeps_it_bare(sources):
    items, _ = sources("llama")
    config = drafter_for(items.target).config
    row = PackedRows(items, [0, 1], config, context_tokens=CONTEXT, anchors=4, seed=0).row(0, 0)
    padding = padded(row, CONTEXT, 8, config)
    assert padding.taps.shape == (CONTEXT, 0) and padding.final is None


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_packed_rows_on_cuda_equal_plain_forwards(samples, tiny_target, kind, compile):
    """Recorded or not, compiled or not, a row repeats itself and equals its documents run alone."""
    target = load_target(str(tiny_target(kind)), device="cuda", dtype="bfloat16")
    items = LiveItems(samples, target, tap_ids=TAPS, context_tokens=128, compile=compile)
    assert items.forward.path == "packed" and items.forward.compiled == compile
    config = drafter_for(target).config
    short = PackedRows(items, [0], config, context_tokens=128, anchors=4, seed=0, pad=True)
    items.fill(short.row(0, 0).to("cuda"), 0, 0)
    assert bool(items.forward._graphs) == (kind != "qwen3_moe")
    source = PackedRows(items, range(13), config, context_tokens=128, anchors=24, seed=0, pad=True)
    alone = load_target(str(tiny_target(kind)), device="cuda", dtype="float32")
    plain = RowForward(alone, TAPS, row_tokens=128, longest=128)
    assert plain.path == "padded"
    for index in range(source.count(0)):
        row = source.row(0, index).to("cuda")
        found, again = items.fill(row, 0, index), items.fill(row, 0, index)
        assert torch.equal(found.taps, again.taps) and torch.equal(found.final, again.final)
        bounds = [(p.context_start, p.context_stop) for p in row.layout.segments if p.context_stop]
        taps, _ = plain(row.input_ids, row.layout.positions, bounds)
        joined, _ = plain(row.input_ids, row.layout.positions, [(0, bounds[-1][1])])
        if kind != "qwen3_moe":  # whose routing a rounding may change
            # bf16 through eight layers of large random weights: 0.03 to 0.11 on a CPU too.
            assert relative_error(found.taps, taps) < 0.15
            assert len(bounds) == 1 or relative_error(found.taps, joined) > 0.3, "one document, not several"
        assert not found.taps[found.tokens :].any() and torch.isfinite(found.taps).all()
