"""Run in a process of its own with the released `dflash` package on its path: what does it make of our files?

python zlab_client.py <folder of drafters with inputs> <drafter> <target> <prompt ids, by commas> <new tokens>
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
from dflash import DFlash2DraftModel, DFlashDraftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def load(folder: str) -> DFlashDraftModel:
    """Their class, by the architecture that config.json names."""
    with open(f"{folder}/config.json") as file:
        second = json.load(file)["architectures"] == ["DFlash2DraftModel"]
    kind = DFlash2DraftModel if second else DFlashDraftModel
    model, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


@torch.inference_mode()
def forward(root: str) -> None:
    """Hidden states of single blocks, each over its own context, into outputs.safetensors beside the
    inputs.
    """
    for folder in sorted(path for path in Path(root).iterdir() if path.is_dir()):
        model, given = load(str(folder)), load_file(folder / "inputs.safetensors")
        found = {}
        for name in (n.removesuffix(".taps") for n in given if n.endswith(".taps")):
            taps, embeddings = given[f"{name}.taps"][None], given[f"{name}.embeddings"][None]
            positions = torch.arange(taps.shape[1] + embeddings.shape[1])[None]
            hidden = model(target_hidden=taps, noise_embedding=embeddings, position_ids=positions)
            found[name] = hidden[0].contiguous()
            if f"{name}.anchor" in given:
                head = partial(torch.nn.functional.linear, weight=given["head"])
                tokens, _, _ = model.propose(hidden[:, 1:], given[f"{name}.anchor"], head, temperature=0.0)
                found[f"{name}.tokens"] = tokens[0].contiguous()
        save_file(found, folder / "outputs.safetensors")


def generate(folder: str, target: str, prompt: str, count: str) -> None:
    """Tokens and acceptance lengths of its own loop, greedy."""
    from dflash import model as released

    released._cuda_time = lambda: 0.0  # the package times with CUDA events; here is none
    body = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ids = torch.tensor([[int(token) for token in prompt.split(",")]])
    result = released.dflash_generate(load(folder), body, ids, int(count), None, return_stats=True)
    tokens = result.output_ids[0, ids.shape[1] :].tolist()
    print(json.dumps({"tokens": tokens, "accepted": result.acceptance_lengths}))


if __name__ == "__main__":
    forward(sys.argv[1])
    generate(*sys.argv[2:])
