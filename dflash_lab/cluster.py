"""Every shard of a run on a cluster: one call sends the shards' notebooks to a `dask.distributed` client.

Dask, the extra `[cluster]`, knows the schedulers (Slurm and others). All machines see the same run folder.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_lab.errors import InputError, LabError
from dflash_lab.files import read_json
from dflash_lab.machine import gpus_apart
from dflash_lab.params import StageParams
from dflash_lab.results import FAILURE
from dflash_lab.run_params import Given, read_given
from dflash_lab.stages import params_class

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)
SLOT = "GPU"  # the name of the resource that a worker offers once a device
LOCK_WAIT_S = 120.0  # how long a shard's retry waits for the dead worker's notebook to be gone
_BUSY = ("is being written by", "in use by another process")  # what the locks of a shard and of a stage say
_TAIL = 4000
_LIBC = ctypes.CDLL(None)  # loaded here: after a fork nothing may be loaded any more


@dataclass(frozen=True)
class ShardOutcome:
    """How a shard ended. `code` is the command's exit code, `message` its error, `worker` where it
    ran last.
    """

    shard: int
    code: int
    seconds: float
    worker: str
    message: str


class ShardsFailed(LabError, RuntimeError):
    """Some shards did not finish; the others did. The same call retries exactly these."""


def run_shards(
    client: Client,
    run: str | Path,
    *,
    num_shards: int,
    stage: str = "extract",
    parameters: Mapping[str, Any] | None = None,
    retries: int = 3,
    poll_s: float = 2.0,
    progress: Callable[..., None] | None = None,
) -> list[ShardOutcome]:
    """Run shards 0..num_shards - 1 of `stage` with the parameter folder `run` on the workers of `client`.

    A task is one shard's notebook, run by the command that a person types, in a process of its own; it takes
    one `GPU` slot of a worker, so a worker with one device runs one shard at a time. A worker that dies takes
    its notebook with it; the shard goes to another worker and continues from its sealed parts.

    parameters: more parameters, as with `-p`. retries: how often a shard may be started again after its
    worker was lost. Returns the outcomes in order. Raises `InputError` when no worker offers a slot or a
    parameter is wrong, and `ShardsFailed` at the end when a shard failed.
    """
    given = shard_given(run, num_shards, parameters)
    first = read_given(params_class(stage), given(0))  # a mistyped parameter stops here, not on 40 machines
    slots = client.scheduler_info()["workers"]
    if not any(worker.get("resources", {}).get(SLOT, 0) >= 1 for worker in slots.values()):
        raise InputError(
            f"no worker of {client} offers a {SLOT} slot. Start each with `dask worker ... --nthreads 1 "
            f"--resources {SLOT}=1`, one a device, or use local_cluster()."
        )
    stamp = time.time_ns()
    futures = [
        client.submit(
            _run_shard,
            stage,
            ["--run", str(run), "-y", given(shard).yaml[0]],
            shard,
            os.getcwd(),
            str(read_given(params_class(stage), given(shard)).folder),
            key=f"{stage}-{shard}-of-{num_shards}-{stamp}",
            resources={SLOT: 1},
            retries=retries,
            pure=False,
        )
        for shard in range(num_shards)
    ]
    report = progress or (lambda *_args, **_fields: None)
    try:
        while pending := [future for future in futures if not future.done()]:
            time.sleep(poll_s)
            done, total = tokens_done(first)
            report(stage, done, total, shards=f"{num_shards - len(pending)}/{num_shards}")
    except BaseException:  # a stop: shards that have not begun shall not
        client.cancel(futures)
        raise
    return _collect(stage, futures)


def shard_given(
    run: str | Path, num_shards: int, parameters: Mapping[str, Any] | None
) -> Callable[[int], Given]:
    """Return a function: shard -> the parameters of its command. They travel as JSON, which YAML
    takes: lists stay lists.
    """

    def given(shard: int) -> Given:
        own = {"num_shards": num_shards, "shard": shard, "interactive": False}
        return Given(run=str(run), yaml=[json.dumps({**(parameters or {}), **own})])

    return given


def tokens_done(params: StageParams) -> tuple[int, int]:
    """Return sealed and wanted tokens of an extraction, from the manifests on the shared disk; (0,
    0) for other stages.
    """
    store, samples = getattr(params, "store_path", None), getattr(params, "samples_path", None)
    if store is None or samples is None or not samples.exists():
        return 0, 0
    import polars as pl

    from dflash_lab.extraction.manifest import parts_of

    total = int(pl.scan_parquet(samples, glob=False).select(pl.col("length").sum()).collect().item() or 0)
    return sum(part.tokens for part in parts_of(store, [])), total


def _collect(stage: str, futures: list[Any]) -> list[ShardOutcome]:
    outcomes = []
    for shard, future in enumerate(futures):
        error = future.exception()
        if error is None:
            outcomes.append(ShardOutcome(**future.result()))
        else:
            outcomes.append(ShardOutcome(shard, 1, 0.0, "", f"{type(error).__name__}: {error}"))
    failed = [one for one in outcomes if one.code]
    if failed:
        listed = "\n  ".join(
            f"shard {one.shard} on {one.worker or '?'}: {one.message[:400]}" for one in failed
        )
        raise ShardsFailed(
            f"{len(failed)} of {len(outcomes)} shards of {stage} failed; the others are finished.\n  "
            f"{listed}\nThe same call runs exactly these again."
        )
    return outcomes


def _run_shard(stage: str, words: list[str], shard: int, cwd: str, folder: str) -> dict[str, Any]:
    """On a worker: run one shard's notebook by the command and wait for it. Returns
    `ShardOutcome`'s fields.
    """
    from distributed import get_worker

    worker, began, started = get_worker(), time.monotonic(), time.time()
    command = [sys.executable, "-m", "dflash_lab.cli", stage, *words]
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        done = subprocess.run(
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            errors="replace",
            preexec_fn=_die_with_parent,
            check=False,
        )
        text = (done.stdout + done.stderr)[-_TAIL:]
        # A worker that was killed a moment ago may leave its notebook's kernel a second to live; it holds the
        # shard.
        busy = any(words in text for words in _BUSY)
        if done.returncode == 0 or not busy or time.monotonic() > deadline:
            break
        time.sleep(2.0)
    message = "" if done.returncode == 0 else _why(Path(cwd, folder), text, started)
    return {
        "shard": shard,
        "code": done.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "worker": f"{worker.name} ({worker.address})",
        "message": message,
    }


def _why(folder: Path, output: str, began: float) -> str:
    """Return the error that the stage left since `began` (seconds of the epoch), or the end of what the
    command said when it left none.
    """
    path = folder / FAILURE
    if path.exists() and path.stat().st_mtime >= began:
        record = read_json(path)
        return f"{record['error']}: {record['message']}"[:1000]
    return output.strip()[-400:]


def _die_with_parent() -> None:
    """In the child, before the command: be killed when the worker dies, so that its shard is free
    for another.
    """
    if sys.platform == "linux":
        _LIBC.prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG


def local_cluster(devices: int, **options: Any) -> Any:
    """Return a cluster on this machine with one worker process a device, each seeing its own device and
    offering one slot.

    The devices are the first of those that this process may use (`CUDA_VISIBLE_DEVICES`); `InputError` when
    they are too few. Without CUDA devices the workers share the processor, which is how the tests run.
    `options` go to `SpecCluster`.
    """
    from distributed import Nanny, Scheduler, SpecCluster

    if devices < 1:
        raise InputError(f"devices={devices}: a cluster needs at least one.")
    workers = {
        index: {
            "cls": Nanny,
            "options": {
                "nthreads": 1,
                "resources": {SLOT: 1},
                "env": environment,
                "dashboard": False,
            },
        }
        for index, environment in enumerate(gpus_apart(devices))
    }
    scheduler = {"cls": Scheduler, "options": {"dashboard": False, "host": "127.0.0.1", "port": 0}}
    return SpecCluster(workers=workers, scheduler=scheduler, name="dflash-lab", **options)
