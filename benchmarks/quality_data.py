"""What the quality study trains on and measures with: text that the target wrote itself.

Prompts are user turns sampled from the template's opening, a share of them from first words of programming
questions in several wordings, HumanEval's task wording among them (its problems are never used). Answers are
greedy. Held-out prompts are plain self-prompts of another seed, none of which occurs in the training file;
HumanEval's file holds its problems with the target's own greedy answers. Both are measured with, never
trained on.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from make_demo_data import BRIEFLY, FOLDER
from quality_augment import augment

from dflash_lab.acceptance.prompts import file_prompts, set_file
from dflash_lab.data.samples import Sample, read_lengths, read_provenance, write_samples
from dflash_lab.errors import InputError, StoreError
from dflash_lab.models.generate import generate, prompts_of, self_prompts
from dflash_lab.models.load import Target
from dflash_lab.models.template import render_prompt, user_frame

log = logging.getLogger("quality")
TASK = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
PROGRAMMING = (
    TASK + "def ",
    TASK + "from typing import List\n\n\ndef ",
    TASK,
    "Write a Python function that ",
    "Write a Python function to ",
    "Complete the following Python function:\n```python\ndef ",
    "Implement the following function in Python.\n\ndef ",
)
HELDOUT = 0.999999999  # share of a file that is for measuring only: all of it
MEASURED_TOKENS = 128  # of an answer, in every tau of the study


def check_data(folder: Path, names: Iterable[str]) -> None:
    """`InputError` unless `folder` holds these files of samples, whole, with what made each beside it."""
    for name in names:
        path = folder / f"{name}.parquet"
        try:
            read_provenance(path)
            read_lengths(path)
        except (InputError, StoreError) as error:
            what = str(error).rpartition(". ")[0]  # its last sentence names the stage `prepare`
            raise InputError(
                f"{what or path}. Write it with python benchmarks/quality.py data --out {folder}, or merge."
            ) from error


def write_data(
    target: Target,
    out: Path,
    *,
    tokens: int,
    seed: int = 0,
    code_share: float = 0.3,
    answer_tokens: int = 136,
    temperature: float = 0.8,
    heldout: int = 512,
    problems: int = 0,
    whole: bool = False,
    small: Path | None = None,
    small_tokens: int = 1_900_000,
    variants: int = 0,
    brief_share: float = 0.0,
) -> dict[str, Any]:
    """Write `out`/samples.parquet with about `tokens` training tokens (prompts and answers together), and
    heldout.parquet and humaneval.parquet beside it; return counts and seconds.

    whole: also whole.parquet, the same samples with blocks in the user's turns, which the target wrote too.
    small: a folder for the first `small_tokens` of it, as if no more had been written.
    brief_share: share of the prompts that ask for one or two sentences, as the demo's do.
    variants: also augmented.parquet, the same samples with so many documents made of each
    (`quality_augment.py`).
    """
    started = time.perf_counter()
    kept_out = self_prompts(target, heldout, seed=seed + 1_000_003, temperature=temperature)
    _write(target, out / "heldout.parquet", kept_out, MEASURED_TOKENS, "self")
    asked = [list(prompt.input_ids) for prompt in file_prompts(set_file("humaneval"), target.tokenizer)]
    asked = asked[: problems or None]
    _write_answers(target, out / "humaneval.parquet", asked, MEASURED_TOKENS, "humaneval")
    before = time.perf_counter()
    # Tokens of a sample: the template's opening, its turn, its answer; measured on SmolLM2.
    count = round(tokens / (0.9 * answer_tokens + 60 + 60 * code_share) * 1.15)
    code = round(code_share * count)
    plain = self_prompts(target, count - code, seed=seed, temperature=temperature)
    programs = (
        self_prompts(target, code, seed=seed, temperature=temperature, max_new_tokens=128, begin=PROGRAMMING)
        if code
        else []
    )
    prompted = time.perf_counter()
    shut = {*kept_out, *demo_questions()}
    named = [(text, "self") for text in plain if text not in shut] + [(text, "code") for text in programs]
    if brief_share:  # told by the source: a brief prompt has another system message
        brief = np.random.default_rng(seed + 1).random(len(named)) < brief_share
        named = [(text, "brief" if b else source) for (text, source), b in zip(named, brief, strict=True)]
    order = np.random.default_rng(seed).permutation(len(named))
    named = [named[i] for i in order]
    prompts = prompts_of(target, [text for text, _ in named])
    prompts = [
        brief_prompt(target, prompt) if source == "brief" else prompt
        for prompt, (_, source) in zip(prompts, named, strict=True)
    ]
    answers = generate(target, prompts, max_new_tokens=answer_tokens)
    answered = time.perf_counter()
    taken = [
        _sample(f"{source}:{number}", prompt, answer, source)
        for number, ((_, source), prompt, answer) in enumerate(zip(named, prompts, answers, strict=True))
    ]
    ends = np.cumsum([len(sample.input_ids) for sample in taken])
    taken = taken[: int(np.searchsorted(ends, tokens, side="right"))]
    facts = {
        "tokens": int(ends[len(taken) - 1]),
        "samples": len(taken),
        "code_samples": sum(sample.source == "code" for sample in taken),
        "brief_samples": sum(sample.source == "brief" for sample in taken),
        "answer_tokens_generated": sum(map(len, answers)),
        "prompts_generated": len(named),
        "prompt_seconds": round(prompted - before, 2),
        "answer_seconds": round(answered - prompted, 2),
        "answer_tokens_per_s": round(sum(map(len, answers)) / (answered - prompted)),
        "tokens_forward_per_s": round(
            sum(map(len, [*prompts, *answers])) / (answered - prompted)
        ),
        "arguments": dict(
            tokens=tokens, seed=seed, code_share=code_share, answer_tokens=answer_tokens,
            temperature=temperature, brief_share=brief_share,
        ),
    }  # fmt: skip
    opening = len(user_frame(target.tokenizer)[0]) if whole else 0
    if small is not None:
        some = taken[: int(np.searchsorted(ends, small_tokens, side="right"))]
        _write_training(small, some, {**facts, "tokens": int(ends[len(some) - 1])}, opening)
        for name in ("heldout", "humaneval"):
            for suffix in (".parquet", ".json"):
                shutil.copy(out / (name + suffix), small)
    _write_training(out, taken, facts, opening)
    if variants:
        folders = [folder for folder in (small, out) if folder is not None]
        facts["augmented"] = {
            str(folder): augment(target, folder / "samples.parquet", variants=variants, seed=seed)
            for folder in folders
        }
    facts["seconds"] = round(time.perf_counter() - started, 2)
    log.info("data: %s", facts)
    return facts


def demo_questions() -> set[str]:
    """What the demo's data asks: the user turns that no training file may hold."""
    lines = (FOLDER / "smollm2_selfprompted.jsonl").read_text().splitlines()
    messages = [message for line in lines for message in json.loads(line)["messages"]]
    return {message["content"] for message in messages if message["role"] == "user"}


def brief_prompt(target: Target, prompt: list[int]) -> list[int]:
    """A prompt of one user turn whose system message is the demo's."""
    plain, brief = (
        render_prompt(target.tokenizer, [*system, {"role": "user", "content": ""}])
        for system in ([], [BRIEFLY])
    )
    ending = len(user_frame(target.tokenizer)[1])
    if prompt[: len(plain) - ending] != plain[:-ending]:
        raise InputError("a prompt does not begin as the template begins one of a single user turn")
    return [*brief[:-ending], *prompt[len(plain) - ending :]]


def _write_training(out: Path, samples: list[Sample], facts: dict[str, Any], opening: int) -> None:
    """Write samples.parquet, and whole.parquet if user turns begin at token `opening`."""
    write_samples(out / "samples.parquet", samples, heldout_fraction=0.01, provenance=facts)
    if opening:
        everywhere = [dataclasses.replace(one, loss_mask=one.loss_mask.copy()) for one in samples]
        for one in everywhere:
            one.loss_mask[opening:] = 1
        write_samples(out / "whole.parquet", everywhere, heldout_fraction=0.01, provenance=facts)


def _sample(name: str, prompt: list[int], answer: list[int], source: str) -> Sample:
    mask = np.zeros(len(prompt) + len(answer), np.uint8)
    mask[len(prompt) :] = 1
    return Sample(name, np.asarray([*prompt, *answer]), mask, source)


def _write(target: Target, path: Path, texts: list[str], answer_tokens: int, source: str) -> None:
    _write_answers(target, path, prompts_of(target, texts), answer_tokens, source)


def _write_answers(
    target: Target, path: Path, prompts: list[list[int]], answer_tokens: int, source: str
) -> None:
    """Prompts with greedy answers as a file that is only measured with."""
    answers = generate(target, prompts, max_new_tokens=answer_tokens)
    samples = [
        _sample(f"{source}:{i}", prompt, answer, source)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        if len(answer) > 1
    ]
    write_samples(path, samples, heldout_fraction=HELDOUT, provenance={"source": source})
