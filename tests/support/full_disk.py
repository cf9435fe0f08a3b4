"""A child process that runs stages where writing fails, then where it does not, and prints what came of it.

    python full_disk.py limit|mounted <finished run> <target> <work folder>

`limit` refuses files above a size (RLIMIT_FSIZE), which needs no privilege. `mounted` works on a real file
system of a few MiB, filled up and then mounted read-only; it needs `unshare -rm`.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "notebooks"))

from test_notebooks_headless import TINY

from dflash_lab.stage_run import execute
from dflash_lab.stages import params_class

# stage -> sizes in bytes: of the largest file allowed, or of the space left. Each stage meets the end in
# several of its own files.
LIMITS = {
    "prepare": (3_000,),
    "dataset_stats": (900,),
    "extract": (100_000,),
    "train_drafter": (30_000,),
    "acceptance": (2_000,),
}
READ_ONLY = -1
LEFT = {
    "prepare": (READ_ONLY, 12_000),
    "extract": (100_000,),
    "train_drafter": (300_000, 1_500_000),  # asked for before it starts; met at the second checkpoint
}
NEEDED = ("samples.parquet", "samples.json", "store", "drafter")


def main(mode: str, finished: Path, target: Path, work: Path) -> None:
    """Print one JSON object a case: stage, size, error, message, leftovers, and whether the next start
    finishes.
    """
    logging.disable(logging.CRITICAL)
    if mode != "limit":
        work.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(work)], check=True)
    for stage, sizes in (LIMITS if mode == "limit" else LEFT).items():
        for size in sizes:
            prevent = limit if mode == "limit" else read_only if size == READ_ONLY else fill
            found = case(prevent, finished, target, work, stage, size)
            print(json.dumps({"stage": stage, "size": size, **found}))


def case(prevent: Any, finished: Path, target: Path, work: Path, stage: str, size: int) -> dict[str, Any]:
    run = work / "run"
    gc.collect()  # what is mapped still counts on the disk
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    for name in NEEDED:
        if (stage, name) not in (("extract", "store"), ("train_drafter", "drafter")):
            copy = shutil.copytree if (finished / name).is_dir() else shutil.copy
            copy(finished / name, run / name)
    given = {"run_dir": str(run), "target": str(target), "device": "cpu", "dtype": "float32", **TINY[stage]}
    given |= {"input": str(finished / "chats.jsonl")} if stage == "prepare" else {}
    given |= {"num_shards": 1} if stage == "extract" else {}
    params = params_class(stage)(**given, interactive=False)
    undo = prevent(work, size)
    try:
        execute(params)
        error: BaseException | None = None
    except BaseException as caught:
        error = caught
    undo()
    left = [str(path.relative_to(run)) for path in run.rglob("*.tmp")]
    wrong = (params.folder / "result.json").exists()
    execute(params)
    return {
        "error": type(error).__name__,
        "message": str(error),
        "left": left,
        "result_too_early": wrong,
        "finished": (params.folder / "result.json").exists(),
    }


def limit(work: Path, size: int) -> Any:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill(work: Path, size: int) -> Any:
    disk = os.statvfs(work)
    (work / "filling").write_bytes(bytes(max(0, disk.f_bavail * disk.f_frsize - size)))
    return (work / "filling").unlink


def read_only(work: Path, size: int) -> Any:
    subprocess.run(["mount", "-o", "remount,ro", str(work)], check=True)
    return lambda: subprocess.run(["mount", "-o", "remount,rw", str(work)], check=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:5]))
