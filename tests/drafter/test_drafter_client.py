"""Our files in the released packages, z-lab's `dflash` and `speculators`, in processes of their own. They are
installed apart, for their pins would rule ours: `make install-test` puts them into the folder
`clients` of the virtual environment; DFLASH_CLIENTS names another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_drafters import HIDDEN, SECOND, VOCAB, relative_error, tiny_config, tiny_drafter

from dflash_lab.acceptance.decode import decode
from dflash_lab.drafter.checkpoint import save_checkpoint
from dflash_lab.drafter.config import FULL, SLIDING, DrafterConfig
from dflash_lab.drafter.formats import export_speculators
from dflash_lab.drafter.model import DraftCache, Drafter
from dflash_lab.models.load import load_target

CLIENTS = Path(os.environ.get("DFLASH_CLIENTS", Path(sys.prefix) / "clients"))
SUPPORT = Path(__file__).parent.parent / "support"
needs_dflash, needs_speculators = (
    pytest.mark.skipif(not (CLIENTS / name).is_dir(), reason=f"no {name} in {CLIENTS}: make install-test")
    for name in ("dflash", "speculators")
)


def client(script: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(CLIENTS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SUPPORT / script), *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


VARIANTS = {
    "full": dict(layer_types=(FULL,) * 3),
    "mixed": {},
    "bidirectional-window": dict(is_causal=False),
    "causal": dict(is_causal=True),
    "second": dict(**SECOND, is_causal=False),
    "of-its-own-shape": dict(intermediate_size=112, num_kv_heads=4, tap_ids=(0, 2, 5)),
}


def a_target_and_its_drafter(folder):
    target = load_target(str(folder))
    shape = dict(num_layers=2, block_size=4, tap_ids=(1, 3, 5), sliding_layers=1, sliding_window=9)
    config = DrafterConfig.from_target(target.config, mask_token_id=280, initializer_range=0.3, **shape)
    assert config.layer_types == (SLIDING, FULL)
    return target, Drafter(config).initialize(torch.Generator().manual_seed(0))


@needs_dflash
def test_hidden_states_and_the_tokens_of_its_own_loop_are_the_same(tmp_path, tiny_target):
    ours, root = {}, tmp_path / "single"
    for name, changes in VARIANTS.items():
        drafter = tiny_drafter(tiny_config(**changes))
        save_checkpoint(root / name, drafter)
        generator = torch.Generator().manual_seed(4)
        head = torch.randn(VOCAB, HIDDEN, generator=generator)
        inputs: dict[str, torch.Tensor] = {"head": head}
        for length in (1, 5, 23):
            taps = torch.randn(length, len(drafter.config.tap_ids) * HIDDEN, generator=generator)
            embeddings = torch.randn(4, HIDDEN, generator=generator)
            inputs |= {f"{length}.taps": taps, f"{length}.embeddings": embeddings}
            cache = DraftCache(drafter)
            cache.extend(taps)
            ours[name, f"{length}"] = cache.block(embeddings)
            if drafter.candidate_selector is not None:
                anchor = inputs[f"{length}.anchor"] = torch.tensor([length])
                hidden = ours[name, f"{length}"][None, 1:]
                with torch.no_grad():
                    tokens, _, _ = drafter.candidate_selector.select(
                        hidden, drafter.logits(hidden, head), anchor
                    )
                ours[name, f"{length}.tokens"] = tokens[0]
        save_file(inputs, root / name / "inputs.safetensors")
    target, drafter = a_target_and_its_drafter(tiny_target("llama"))
    save_checkpoint(tmp_path / "drafter", drafter)
    prompt = [5, 99, 104, 7, 61, 33]
    tokens = decode(target, drafter, prompt, max_new_tokens=20, stop_ids=[]).tokens
    folders = [str(folder) for folder in (root, tmp_path / "drafter", tiny_target("llama"))]
    said = client("zlab_client.py", *folders, ",".join(map(str, prompt)), "20")
    assert json.loads(said.splitlines()[-1])["tokens"] == list(tokens)
    theirs = {(n, k): t for n in VARIANTS for k, t in load_file(root / n / "outputs.safetensors").items()}
    assert theirs.keys() == ours.keys()
    for key, wanted in theirs.items():
        if key[1].endswith("tokens"):
            assert torch.equal(ours[key], wanted)
        else:
            assert float((ours[key] - wanted).abs().max()) <= 1e-5
            assert relative_error(ours[key], wanted) < 1e-5


@needs_speculators
def test_speculators_loads_our_export(tmp_path, tiny_target):
    config = tiny_config(vocab_size=288, mask_token_id=280, num_target_layers=8, is_causal=False)
    drafter = tiny_drafter(config)
    export_speculators(
        drafter, tmp_path, target=str(tiny_target("llama")), target_architecture="LlamaForCausalLM"
    )
    found = json.loads(client("speculators_client.py", str(tmp_path)).splitlines()[-1])
    assert found == {
        "class": "DFlashDraftModel",
        "equal": len(drafter.state_dict()),
        "stored": len(drafter.state_dict()),
        "taps": [tap + 1 for tap in drafter.config.tap_ids],
        "block_size": 4,
        "sliding": [0, 2],
        "mask_token_id": 280,
    }
