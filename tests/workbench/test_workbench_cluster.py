"""Shards on a local Dask cluster: all of them run, a killed worker's shard goes on elsewhere, a
failing one is named.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml
from support.wording import refused

from dflash_lab.cluster import ShardsFailed, local_cluster, run_shards, shard_given, tokens_done
from dflash_lab.data.samples import Sample, write_samples
from dflash_lab.errors import InputError
from dflash_lab.run_params import read_given
from dflash_lab.runs import stage_table
from dflash_lab.stages.extract import ExtractParams

REPO = Path(__file__).resolve().parents[2]
LENGTHS = np.random.default_rng(0).integers(20, 120, 40).tolist()


@pytest.fixture
def run(tiny_target: Callable[[str], Path], tmp_path: Path) -> Path:
    """A parameter folder for a tiny target whose run folder holds prepared samples."""
    folder = tmp_path / "run"
    generator = np.random.default_rng(1)
    samples = [
        Sample(f"s{number}", generator.integers(0, 256, length), np.ones(length, np.uint8), "test")
        for number, length in enumerate(LENGTHS)
    ]
    write_samples(folder / "samples.parquet", samples, heldout_fraction=0.2, provenance={})
    common = {"run_dir": str(folder), "target": str(tiny_target("llama")), "device": "cpu"}
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "common.yaml").write_text(yaml.safe_dump(common))
    extract = {"num_taps": 3, "token_budget": 300, "max_batch": 4}
    (tmp_path / "params" / "extract.yaml").write_text(yaml.safe_dump(extract))
    return tmp_path / "params"


def read_params(run: Path) -> ExtractParams:
    return read_given(ExtractParams, shard_given(run, 2, None)(0))


@pytest.fixture(scope="module")
def client():
    """Two workers on this machine."""
    from distributed import Client

    with local_cluster(2) as cluster, Client(cluster) as client:
        client.wait_for_workers(2, timeout=120)
        yield client


@pytest.mark.slow
def test_a_failing_shard_is_named_with_its_error(run: Path, client) -> None:
    with refused(InputError):
        run_shards(client, run, num_shards=1, parameters={"token_budgte": 3})
    with refused(ShardsFailed):
        run_shards(client, run, num_shards=1, parameters={"tap_ids": [40]}, poll_s=0.2)


@pytest.mark.slow
def test_a_killed_workers_shard_goes_on_and_every_sample_is_stored_once(run: Path, client) -> None:
    """The worker is killed, with its notebook running, once the first shard has begun."""
    from dflash_lab.extraction.checks import verify
    from dflash_lab.extraction.store import open_store

    killed, seen = [], []
    store = read_params(run).store_path

    def kill_the_first_busy_worker(pids: list[int]) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not list(store.glob("shard-*/.lock")):
            time.sleep(0.02)
        busy = [
            pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).children(recursive=True)
        ]
        if busy:
            killed.append(busy[0])
            os.kill(busy[0], signal.SIGKILL)

    def told(*words, **fields) -> None:
        seen.append((words, fields))

    pids = list(client.run(os.getpid).values())
    killer = threading.Thread(target=kill_the_first_busy_worker, args=(pids,))
    killer.start()
    outcomes = run_shards(client, run, num_shards=2, poll_s=0.2, progress=told)
    killer.join()
    assert killed, "no worker was busy when it was to be killed"
    assert [(one.shard, one.code) for one in outcomes] == [(0, 0), (1, 0)]
    assert len(open_store(store)) == len(LENGTHS) and verify(store) == []
    assert seen[-1][0] == ("extract", sum(LENGTHS), sum(LENGTHS))
    assert set(stage_table(store.parents[1])["state"]) == {"finished"}
    assert (store.parent / "extract-0.ipynb").exists() and (store.parent / "extract-1.ipynb").exists()


def test_a_cluster_without_slots_is_refused(run: Path) -> None:
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
        refused(InputError),
    ):
        run_shards(client, run, num_shards=2)


def test_progress_reads_sealed_parts_only(run: Path) -> None:
    params = read_params(run)
    folder = params.store_path / "shard-00000-of-00002"
    folder.mkdir(parents=True)
    first, second = (f"part-{number:06d}.safetensors" for number in (0, 1))
    sealed = {"kind": "part", "bytes": 1, "checksum": "", "samples": 1}
    lines = [{"kind": "run"}, {**sealed, "file": first, "tokens": 5}, {**sealed, "file": second, "tokens": 7}]
    lines.append({"kind": "discard", "file": first})
    told = [*map(json.dumps, lines), '{"kind": "par', '{"kind": "part", "fi']  # broken, and torn
    (folder / "manifest.jsonl").write_text("\n".join(told))
    assert tokens_done(params) == (7, sum(LENGTHS))


def test_workers_of_a_local_cluster_get_the_gpus_that_their_caller_may_use(monkeypatch) -> None:
    import distributed
    import torch

    made = []
    monkeypatch.setattr(distributed, "SpecCluster", lambda workers, **_: made.append(workers))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-11aa,3")
    local_cluster(2)
    seen = [worker["options"]["env"] for worker in made.pop().values()]
    assert seen == [{"CUDA_VISIBLE_DEVICES": "6"}, {"CUDA_VISIBLE_DEVICES": "GPU-11aa"}]
    for devices in (4, 0):
        with refused(InputError):
            local_cluster(devices)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    local_cluster(2)
    assert [worker["options"]["env"] for worker in made.pop().values()] == [{}, {}]


def test_the_documented_slurm_cluster_asks_for_a_device_and_offers_its_slot(tmp_path: Path) -> None:
    from dask_jobqueue import SLURMCluster

    page = (REPO / "docs" / "cluster.md").read_text()
    documented = page[page.index("SLURMCluster(\n") :].partition("\n)\n")[0] + "\n)"
    here = {"dashboard": False, "host": "127.0.0.1", "port": 0}

    def made(**options):
        return SLURMCluster(**options, scheduler_options=here, log_directory=str(tmp_path))

    with eval(documented, {"SLURMCluster": made}) as cluster:
        script = cluster.job_script()
    assert "#SBATCH --gres=gpu:1" in script and "cd /shared/dflash-lab" in script
    assert script.rstrip().endswith("--resources GPU=1")
