"""Acceptance lengths by the public client: the package `dflash` 0.1.0, transformers, and nothing of this lab.

    python benchmarks/quality_client.py --drafter DIR --target FOLDER --prompts FILE --out FILE

FILE holds {"prompts": [[ids]], "stop_ids": [...], "max_new_tokens": n}; the output {"lengths": [[...]]} in
the same order. With `--part i/n` only every n-th prompt from i on is decoded.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from pathlib import Path

import torch
from dflash import model as client
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("drafter", "target", "prompts", "out"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--block-size", type=int, default=0, help="0: the drafter's")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    config = json.loads((args.drafter / "config.json").read_text())
    build = client.DFlash2DraftModel if "DFlash2" in config["architectures"][0] else client.DFlashDraftModel
    drafter = build.from_pretrained(args.drafter, dtype=dtype).to(args.device).eval()
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(args.device).eval()
    if args.device == "cpu":
        client._cuda_time = time.perf_counter  # its clock waits for a CUDA device
    asked = json.loads(args.prompts.read_text())
    first, step = (int(number) for number in args.part.split("/"))
    lengths = []
    for prompt in asked["prompts"][first::step]:
        answer = client.dflash_generate(
            drafter,
            target,
            torch.tensor([prompt], device=args.device),
            max_new_tokens=asked["max_new_tokens"],
            stop_token_ids=asked["stop_ids"],
            block_size=args.block_size or None,
            return_stats=True,
        )
        lengths.append(answer.acceptance_lengths)
    version = importlib.metadata.version("dflash")
    args.out.write_text(json.dumps({"lengths": lengths, "dflash": version, "dtype": args.dtype}))


if __name__ == "__main__":
    main()
