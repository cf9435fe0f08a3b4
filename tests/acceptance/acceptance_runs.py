"""A whole run folder for tests: greedy answers of a tiny target, their store, a drafter trained on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from drafters import greedy, overfit, random_drafter

from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.drafter.checkpoint import save_checkpoint
from dflash_lab.extraction.loop import extract
from dflash_lab.extraction.store import open_store
from dflash_lab.models.load import load_target
from dflash_lab.models.source import template_hash, tokenizer_hash
from dflash_lab.models.template import render_prompt

QUESTIONS = ("Hi", "What?", "Tell me", "Why not", "Go on", "Ten", "A b c", "Who")


def build_run(
    target_folder: Path, run: Path, *, block_size: int = 5, answer_tokens: int = 20, steps: int = 12
) -> Path:
    """Write samples.parquet, store/ and drafter/ into `run`; about half of the samples are held out."""
    target, path = load_target(str(target_folder)), run / "samples.parquet"
    samples, pad = [], target.body.config.pad_token_id
    for question in QUESTIONS:
        prompt = render_prompt(target.tokenizer, [{"role": "user", "content": question}])
        (answer,) = greedy(target, [prompt], answer_tokens, stop_ids=None)
        if pad in answer:  # its embedding row is zero, and so is a hybrid's state there
            answer = answer[: answer.index(pad)]
        mask = [0] * len(prompt) + [1] * len(answer)
        samples.append(Sample(question, np.asarray(prompt + answer), np.asarray(mask), "tiny"))
    made = {hash_of.__name__: hash_of(target.tokenizer) for hash_of in (tokenizer_hash, template_hash)}
    write_samples(path, samples, heldout_fraction=0.5, provenance={**made, "thinking": False})
    sizes = {"tap_ids": [1, 4], "token_budget": 512, "max_batch": 8}
    extract(target, path, run / "store", store_final=True, **sizes)
    store = open_store(run / "store")
    drafter = random_drafter(target, block_size=block_size, initializer_range=0.1)
    overfit(target, drafter, [store[i] for i in range(len(store))], steps=steps)
    save_checkpoint(run / "drafter", drafter)
    return run
