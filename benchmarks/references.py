"""What this program computes, to the bit: written before its code is moved, compared after.

    python benchmarks/references.py --json FILE
    python benchmarks/references.py --against benchmarks/results/cpu/references.json

Tiny targets on the CPU in fp32: losses and weights of trainings, tokens and accepted lengths of every way of
decoding, the bytes of stores and checkpoints. Only the same machine with the same torch gives the same bits;
`--against` says so where they differ.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from result_file import read_result, told
from safetensors.torch import load_file

# All that the package is asked for: the only lines to change when its modules move.
from dflash_lab import files, provenance
from dflash_lab.acceptance.batch import decode_batch
from dflash_lab.acceptance.decode import Decoded, decode, plain_decode
from dflash_lab.acceptance.fixed_shapes import StaticDecoder, Workspace
from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.drafter.checkpoint import save_checkpoint
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.formats import export_speculators
from dflash_lab.drafter.journal import read_journal
from dflash_lab.drafter.live import LiveItems
from dflash_lab.drafter.loss_terms import LossConfig
from dflash_lab.drafter.model import Drafter
from dflash_lab.drafter.objective import TrainSettings
from dflash_lab.drafter.optim import OptimizerConfig
from dflash_lab.drafter.train import train
from dflash_lab.errors import UnsupportedTarget
from dflash_lab.extraction.loop import extract
from dflash_lab.extraction.store import open_store
from dflash_lab.models.generate import generate
from dflash_lab.models.load import Target, TargetHead, load_target

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "tests"))

from support.tiny_targets import VOCAB_SIZE, build_tiny  # noqa: E402

KINDS = ("llama", "qwen3", "qwen3_5")  # the last is a hybrid: attention and gated delta nets
TAPS = [1, 3, 5]
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
BLOCK, CONTEXT, TOKENS = 5, 96, 40
PROMPTS = [np.random.default_rng(n).integers(0, 256, 5 + 2 * n).tolist() for n in range(10)]
# When, where and with what a file was written, and what depends on it: no part of what was computed.
PASSING = {
    *("time", "commit", "source_tree", "versions", "device", "argv0", "notes"),
    *("seconds", "extract_tokens_per_s", "write_gb_per_s", "limited_by"),
}


# Training ---------------------------------------------------------------------------------------------------


def optimizers() -> dict[str, OptimizerConfig]:
    """Return the optimizers compared, by name."""
    return {
        "adamw": OptimizerConfig(lr=4e-3, weight_decay=0.01),
        "adamw-int8": OptimizerConfig(lr=4e-3, moments="int8"),
        "muon": OptimizerConfig(kind="muon", lr=4e-3, muon_lr=0.02),
    }


def losses() -> dict[str, LossConfig]:
    """Return the losses compared, by name: together they have every term."""
    return {
        "hard-soft": LossConfig(hard_weight=0.85, soft_weight=0.15, temperature=1.5, cap_weight=0.05),
        "dpace-lk": LossConfig(weighting="dpace", tv_weight=0.2, lk_weight=0.3, label_source="argmax"),
        "length": LossConfig(hard_weight=0.5, length_weight=0.5, acceptance="overlap"),
    }


def drafter_of(target: Target, dtype: torch.dtype = torch.float32, **more: Any) -> Drafter:
    """Return an untrained drafter for a target, with a sliding and a full layer; `more` are config fields."""
    config = DrafterConfig.from_target(
        target.config, mask_token_id=VOCAB_SIZE - 1, num_layers=2, block_size=BLOCK, tap_ids=TAPS,
        sliding_layers=1, sliding_window=16, **more,
    )  # fmt: skip
    return Drafter(config).initialize(torch.Generator().manual_seed(0)).to(dtype)


def trained(items: Any, head: TargetHead, drafter: Drafter, name: str, steps: int = 12, **more: Any) -> Any:
    """Train `drafter` in place; return losses and norms in hex, and hashes of the last checkpoint."""
    values: dict[str, Any] = {"loss": losses()["hard-soft"], "optimizer": optimizers()["muon"], **more}
    settings = TrainSettings(
        max_steps=steps, context_tokens=CONTEXT, anchors=24, accumulate=2, gamma=4.0, noise_std=0.02,
        log_every=4, eval_every=6, eval_rows=1, checkpoint_every=6, **values,
    )  # fmt: skip
    train(items, head, drafter, settings, folder=Path("runs") / name)
    lines = [one for one in read_journal(Path("runs") / name) if one["kind"] == "step"]
    last = Path("runs") / name / "checkpoints" / f"step-{steps:08d}"
    return {
        "losses": [one["loss"].hex() for one in lines],
        "norms": [one["grad_norm"].hex() for one in lines],
        "weights": tensors_hash(last / "model.safetensors"),
        "state": tensors_hash(last / "trainer" / "state.safetensors"),
    }


def trainings(folder: str) -> dict[str, Any]:
    """Train a few steps of every kind: from a store and from the live target, DFlash and DFlash 2."""
    found, items, samples = {}, open_store(f"{folder}-bf16"), f"{folder}.parquet"
    for name, optimizer in optimizers().items():
        dtype = torch.bfloat16 if name == "adamw-int8" else torch.float32
        target = load_target(folder, dtype=dtype)
        for kind, more in (("dflash", {}), ("dflash2", DFLASH2)):
            drafter = drafter_of(target, dtype, **more)
            run = f"{kind}-{name}"
            found[run] = trained(items, target.head, drafter, run, optimizer=optimizer)
        live = LiveItems(samples, load_target(folder, dtype=dtype), tap_ids=TAPS, context_tokens=CONTEXT)
        run = f"live-{name}"
        found[run] = trained(live, target.head, drafter_of(target, dtype), run, optimizer=optimizer)
    target = load_target(folder)
    for name, loss in losses().items():
        found[f"loss-{name}"] = trained(items, target.head, drafter_of(target), f"loss-{name}", loss=loss)
    return found


# Decoding ---------------------------------------------------------------------------------------------------


def decodings(folder: str) -> dict[str, Any]:
    """Decode two prompts in every way, with drafters that have learned the target's answers."""
    target, items, found = load_target(folder), open_store(f"{folder}-bf16"), {}
    drafters = {"dflash": drafter_of(target)} | ({"dflash2": drafter_of(target, **DFLASH2)})
    options = {"max_new_tokens": TOKENS, "stop_ids": ()}
    found["generate"] = attempt(lambda: generate(target, PROMPTS[:3], **options))
    found["plain"] = attempt(lambda: plain_decode(target, PROMPTS[2], **options))
    found["plain, sampled"] = attempt(lambda: plain_decode(target, PROMPTS[2], **options, **sampled()))
    found["plain, fixed"] = attempt(lambda: StaticDecoder(Workspace(target))(PROMPTS[2], **options))
    for name, drafter in drafters.items():
        trained(items, target.head, drafter, f"{folder}-{name}", steps=60)
        drafter.eval().requires_grad_(False)
        for way, tree in (("chain", {}), ("tree", {"tree_budget": 8}),
                          ("paths", {"tree_budget": 8, "tree_mode": "paths"})):  # fmt: skip
            for prompt in (0, 2):
                ids = PROMPTS[prompt]
                for kind, choice in (("greedy", dict), ("sampled", sampled)):
                    found[f"{name}, {way}, {kind}, prompt {prompt}"] = attempt(
                        lambda: decode(target, drafter, ids, **options, **tree, **choice())  # noqa: B023
                    )
        for kind, choice in (("greedy", dict), ("sampled", sampled)):
            found[f"{name}, batch, {kind}"] = attempt(
                lambda: decode_batch(target, drafter, PROMPTS[:4], **options, **choice())  # noqa: B023
            )
        for budget in (0, 8):
            found[f"{name}, fixed, budget {budget}"] = attempt(
                lambda: StaticDecoder(Workspace(target), drafter, budget=budget)(PROMPTS[0], **options)  # noqa: B023
            )
    return found


def sampled() -> dict[str, Any]:
    """Return options of sampling, with a generator that begins anew."""
    return {"temperature": 0.4, "top_p": 0.95, "generator": torch.Generator().manual_seed(7)}


def attempt(way: Callable[[], Any]) -> Any:
    """Return what a way of decoding gives, or that it is refused."""
    try:
        return plain(way())
    except UnsupportedTarget:
        return "refused"


def plain(answer: Any) -> Any:
    if isinstance(answer, Decoded):
        return {"tokens": plain(answer.tokens), "lengths": plain(answer.lengths)}
    if answer and isinstance(answer[0], int):
        return " ".join(map(str, answer))
    return [plain(one) for one in answer]


# Files ------------------------------------------------------------------------------------------------------


def tensors_hash(path: Path) -> str:
    """Hash names, dtypes, shapes and bytes of a safetensors file."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def folder_hashes(folder: Path) -> dict[str, str]:
    """Hash every file of a folder by its name, but for `PASSING`, and for the order of a safetensors header's
    notes, which the library draws at random.
    """
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(content(path)).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def content(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        end = 8 + int.from_bytes(data[:8], "little")
        return json.dumps(json.loads(data[8:end]), sort_keys=True).encode() + data[end:]
    if path.suffix in (".json", ".jsonl"):
        texts = data.decode().splitlines() if path.suffix == ".jsonl" else [data.decode()]
        return json.dumps([without_passing(json.loads(text)) for text in texts]).encode()
    return data


def without_passing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_passing(one) for key, one in value.items() if key not in PASSING}
    return [without_passing(one) for one in value] if isinstance(value, list) else value


def written(folder: str) -> dict[str, Any]:
    """Hash stores of every codec, and checkpoints in both layouts."""
    target, found = load_target(folder), {}
    for storage in ("bf16", "fp8", "int8"):
        found[f"store, {storage}"] = folder_hashes(Path(f"{folder}-{storage}"))
    for name, more in (("dflash", {}), ("dflash2", DFLASH2)):
        save_checkpoint(name, drafter_of(target, **more))
        found[f"checkpoint, {name}"] = folder_hashes(Path(name))
    drafter = drafter_of(target, layer_types=("full_attention",) * 2)
    export_speculators(drafter, "speculators", target="owner/name")
    found["checkpoint, speculators"] = folder_hashes(Path("speculators"))
    return found


# All of it --------------------------------------------------------------------------------------------------


def prepare(kind: str) -> None:
    """Make a tiny target, samples that it answered itself, and a store of its states in each codec."""
    target = load_target(str(build_tiny(kind, kind, pad_token_id=VOCAB_SIZE - 8)))  # padding has no states
    rows = []
    for number, ids in enumerate(PROMPTS):
        answer = plain_decode(target, ids, max_new_tokens=TOKENS, stop_ids=()).tokens
        mask = np.arange(len(ids) + len(answer)) >= len(ids)
        rows.append(Sample(f"s{number}", np.array(ids + answer), mask.astype(np.uint8), "own"))
    write_samples(Path(f"{kind}.parquet"), rows, heldout_fraction=0.3, provenance={})
    for storage in ("bf16", "fp8", "int8"):
        extract(
            target, f"{kind}.parquet", f"{kind}-{storage}", tap_ids=TAPS, token_budget=128, max_batch=4,
            store_final=True, storage=storage,
        )  # fmt: skip


def references() -> dict[str, Any]:
    """Compute everything in a folder of its own, which is gone afterwards."""
    found: dict[str, Any] = {"decoding": {}}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for kind in KINDS:
            prepare(kind)
            found["decoding"][kind] = decodings(kind)
        return found | {"training": trainings("llama"), "files": written("llama")}


def machine() -> dict[str, str]:
    """Say on what the bits depend."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {"machine": platform.machine(), "capability": capability, "threads": str(torch.get_num_threads())}


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Yield every leaf in which two results differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            yield from differences(old.get(name), new.get(name), f"{where}{name}: ")
    elif old != new:
        yield f"{where}{str(old)[:200]} -> {str(new)[:200]}"


def main() -> int:
    """Compute; write with --json, compare with --against: 1 where anything differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--against", type=Path, help="a file that was written before")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts = {"references": dict, "machine": dict, "versions": dict}
    old = read_result(arguments.against, "references.py", **parts) if arguments.against else None
    target = arguments.json and Path(os.path.abspath(arguments.json))
    found = {"references": references(), "machine": machine(), **provenance.provenance()}
    if target:
        files.write_json(target, found)
    if old is None:
        return 0
    told_of = list(differences(old["references"], json.loads(json.dumps(found["references"]))))
    other = [*differences(old["machine"], machine()), *differences(old["versions"], provenance.versions())]
    print("\n".join([*told_of, f"{len(told_of)} differences from {arguments.against}"]))
    if told_of and other:
        print("Other bits may come of another machine:", *other, sep="\n  ")
    return bool(told_of)


if __name__ == "__main__":
    sys.exit(told(main))
