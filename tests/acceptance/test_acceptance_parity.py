"""The public `dflash` 0.1.0 loop as an external client: same checkpoint, same prompts, same lengths.

It lies in the folder `clients` of the virtual environment (`make install-test` puts it there) or in the one
that DFLASH_CLIENTS names; without it these tests skip.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest
import torch
from drafters import PROMPTS, answered, greedy, overfit, random_drafter, second_drafter

from dflash_lab.acceptance.decode import decode
from dflash_lab.drafter.checkpoint import load_checkpoint, save_checkpoint

ASKED = PROMPTS[:3]
CLIENTS = os.environ.get("DFLASH_CLIENTS", str(Path(sys.prefix) / "clients"))


@pytest.fixture(scope="module")
def client():
    """The client's model module, or a skip."""
    sys.path.append(CLIENTS)
    module = pytest.importorskip("dflash.model", reason=f"no package dflash 0.1.0 in {CLIENTS}")
    found = [d.version for d in importlib.metadata.distributions(name="dflash")]
    if found != ["0.1.0"]:
        pytest.skip(f"dflash {found} is not the 0.1.0 these numbers are compared with")
    module._cuda_time = lambda: 0.0  # it waits for a CUDA device when asked for statistics
    return module


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("shape", ["full", "sliding", "second"])
def test_acceptance_lengths_and_tokens_equal_the_clients(client, loaded, tiny_target, tmp_path, kind, shape):
    from transformers import AutoModelForCausalLM

    target = loaded(kind)
    answers = greedy(target, ASKED, 24)
    options = {"block_size": 6, "initializer_range": 0.1}
    if shape == "second":
        drafter = second_drafter(target, is_causal=False, **options)
    else:
        window = {"sliding_layers": 1, "sliding_window": 8} if shape == "sliding" else {}
        drafter = random_drafter(target, **window, **options)
    overfit(target, drafter, answered(target, ASKED, answers), steps=12)
    save_checkpoint(tmp_path, drafter)
    ours = load_checkpoint(tmp_path).eval()
    build = client.DFlash2DraftModel if shape == "second" else client.DFlashDraftModel
    theirs = build.from_pretrained(tmp_path, dtype=torch.float32).eval()
    whole = AutoModelForCausalLM.from_pretrained(tiny_target(kind), dtype=torch.float32).eval()
    lengths = []
    for prompt, plain in zip(ASKED, answers):
        for block_size in (6, 3):
            stops = [plain[-1]] if block_size == 3 else None
            sizes = {"max_new_tokens": 24, "block_size": block_size}
            answer = client.dflash_generate(
                theirs, whole, torch.tensor([prompt]), stop_token_ids=stops, return_stats=True, **sizes
            )
            fast = decode(target, ours, prompt, stop_ids=stops or (), last_block="shrink", **sizes)
            assert fast.tokens == answer.output_ids[0, len(prompt) :].tolist()
            assert fast.produced == answer.acceptance_lengths
            lengths += fast.produced
    assert len(set(lengths)) > 2  # neither always nothing nor always all
