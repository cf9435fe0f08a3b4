"""Make data/demo/smollm2_selfprompted.jsonl again: the embedded target wrote every answer and most questions.

Prompts: the questions of data/demo/seed_questions.txt, then user turns that SmolLM2 samples from its own
template. Answers: greedy, float32. A conversation is kept only if it can be reproduced exactly: the answer
ends with its end-of-turn token, the text tokenises back to the generated ids, and a single teacher-forced
forward chooses the same token everywhere by a clear margin. Acceptance measured offline on stored answers can
equal acceptance measured by decoding only on such data.

    python benchmarks/make_demo_data.py

It took 62 minutes with one thread on a machine busy with other work and kept 365 of 1005 conversations (615
did not end within 128 tokens, 17 were too close to a tie, 6 tokenised differently, 2 others).
"""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter
from pathlib import Path

import torch

from dflash_lab import files
from dflash_lab.models.generate import generate, self_prompts
from dflash_lab.models.load import Target, load_target
from dflash_lab.models.template import render, render_prompt

FOLDER = Path(__file__).resolve().parents[1] / "data" / "demo"
# SmolLM2 seldom ends an answer within the limit unless it is asked to; sampled turns get this system message.
BRIEFLY = {"role": "system", "content": "Answer in one or two short sentences."}
MARGIN = 1e-3  # logits; batching and another BLAS move them by about 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--self-prompts", type=int, default=800, help="user turns to sample")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-bytes", type=int, default=500_000, help="stop before the file is larger")
    parser.add_argument("--out", type=Path, default=FOLDER / "smollm2_selfprompted.jsonl")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    target = load_target("smollm2", dtype="float32")
    asked = dict.fromkeys((FOLDER / "seed_questions.txt").read_text().splitlines(), "seed")
    sampled = self_prompts(target, args.self_prompts, seed=args.seed, batch=64, progress=report)
    asked |= dict.fromkeys((text for text in sampled if text not in asked), "self")
    conversations = [
        [*([BRIEFLY] if origin == "self" else []), {"role": "user", "content": text}]
        for text, origin in asked.items()
    ]
    prompts = [render_prompt(target.tokenizer, messages) for messages in conversations]
    answers = generate(target, prompts, max_new_tokens=args.max_new_tokens, batch=64, progress=report)

    fates: Counter[str] = Counter()
    lines, size, seen = [], 0, set()
    for messages, source, prompt, answer in zip(conversations, asked.values(), prompts, answers, strict=True):
        messages = [*messages, {"role": "assistant", "content": target.tokenizer.decode(answer[:-1])}]
        line = json.dumps({"messages": messages, "source": f"smollm2-{source}"}, ensure_ascii=False)
        fate = judge(target, messages, prompt, answer)
        if fate == "kept" and messages[-1]["content"] in seen:
            fate = "repeats an answer"
        if fate == "kept" and size + len(line.encode()) + 1 > args.limit_bytes:
            fate = "over the size limit"
        fates[fate] += 1
        if fate == "kept":
            seen.add(messages[-1]["content"])
            lines.append(line)
            size += len(line.encode()) + 1
    files.write_bytes(args.out, "".join(line + "\n" for line in lines).encode())
    print(json.dumps({"asked": len(asked), **fates, "bytes": size, "file": str(args.out)}, indent=2))


@torch.inference_mode()
def judge(target: Target, messages: list[dict[str, str]], prompt: list[int], answer: list[int]) -> str:
    """Return "kept", or why the conversation cannot be reproduced token by token."""
    if answer[-1] not in target.stop_ids:
        return "not ended"
    if len(answer) < 4:
        return "shorter than four tokens"
    rendered = render(target.tokenizer, messages)
    taught = [token for token, live in zip(rendered.input_ids, rendered.loss_mask, strict=True) if live]
    if taught != answer or rendered.input_ids[: len(prompt) + len(answer)] != prompt + answer:
        return "other tokens when rendered again"
    states = target.body(input_ids=torch.tensor([prompt + answer]), use_cache=False).last_hidden_state[0]
    best = target.head.logits(states[len(prompt) - 1 : -1]).topk(2)  # [answer, 2]
    if best.indices[:, 0].tolist() != answer:
        return "other tokens when decoded alone"
    return "kept" if float((best.values[:, 0] - best.values[:, 1]).min()) > MARGIN else "too close to a tie"


def report(what: str, done: int, total: int) -> None:
    logging.info("%s %d / %d", what, done, total)


if __name__ == "__main__":
    main()
