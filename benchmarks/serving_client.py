"""Serves drafters with vLLM's CPU build in this process; `serving.py` runs it in an environment of its own.

python benchmarks/serving_client.py JOBS.json OUT.json [v2]     offline, with its first or V2 model runner
python benchmarks/serving_client.py http SERVER_ARGUMENTS...     its OpenAI server, with the same mend
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import runpy
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)


def interpret_triton() -> None:
    """Let Triton's interpreter run the V2 runner's kernels: it asks for a Triton that compiles for CPUs."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from triton import backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime.interpreter import InterpreterBuilder

    class Driver:
        utils = None

        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_device(self) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cpu", 0, 1)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_device_interface(self) -> types.ModuleType:
            return torch.cpu

    backends.backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def masked(mask: Any) -> Any:
        # The interpreter of Triton 3.9 makes int32 of `mask & mask`, then refuses it as a mask.
        return dataclasses.replace(mask, data=mask.data.astype(bool))

    InterpreterBuilder.create_masked_load = lambda self, pointers, mask, *more: load(
        self, pointers, masked(mask), *more
    )
    InterpreterBuilder.create_masked_store = lambda self, pointers, value, mask, *more: store(
        self, pointers, value, masked(mask), *more
    )


def norm_context_keys(mended: bool) -> None:
    """Norm context keys by each layer's own weights, or as released, by the first layer's."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model as Model

    def each_layer(self: Any, keys: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(keys)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(out[layer], keys[layer], weight, self._rms_norm_eps)
        return out

    Model.released_norm = getattr(Model, "released_norm", Model._normalize_context_k)
    Model._normalize_context_k = each_layer if mended else Model.released_norm


@contextlib.contextmanager
def watched(v2: bool, seen: dict[str, Any]) -> Iterator[None]:
    """Write every drafted block into `seen`, with the token that it follows, and how each layer attends."""
    if v2:
        from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator as Proposer
    else:
        from vllm.v1.spec_decode.dflash import DFlashProposer as Proposer
    propose = Proposer.propose

    def wrapped(self: Any, *given: Any, **named: Any) -> Any:
        drafts = propose(self, *given, **named)
        if named.get("dummy_run"):
            return drafts
        if v2:
            batch = named["input_batch"] if "input_batch" in named else given[0]
            last = named["last_sampled"] if "last_sampled" in named else given[7]
            anchors = last[batch.idx_mapping[: batch.num_reqs].long()].flatten()
        else:
            anchors = named["next_token_ids"]
        seen["drafts"] += [[int(a), row] for a, row in zip(anchors.tolist(), drafts.tolist())]
        attentions = [layer.self_attn for layer in self.model.model.layers]
        seen["layers"] = [{"causal": bool(one.causal), "window": one.sliding_window} for one in attentions]
        return drafts

    Proposer.propose = wrapped
    try:
        yield
    finally:
        Proposer.propose = propose


def serve(job: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
    """Answers to the prompts of a job, `batch` at a time."""
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    norm_context_keys(job["mended"])
    llm = None
    try:
        llm = LLM(
            model=job["target"],
            skip_tokenizer_init=True,
            dtype=job["dtype"],
            max_model_len=job["max_model_len"],
            max_num_seqs=job["batch"],
            enforce_eager=True,
            enable_prefix_caching=False,
            disable_log_stats=False,
            distributed_executor_backend="uni",
            per_request_spec_decode_metrics="detailed",
            speculative_config={
                "method": "dflash",
                "model": job["drafter"],
                "num_speculative_tokens": job["drafted"],
            },
        )
        ask = SamplingParams(temperature=0, max_tokens=job["max_new_tokens"], ignore_eos=job["ignore_eos"])
        answers = []
        for start in range(0, len(job["prompts"]), job["batch"]):
            seen["drafts"] = []
            part = [{"prompt_token_ids": ids} for ids in job["prompts"][start : start + job["batch"]]]
            for one in llm.generate(part, ask, use_tqdm=False):
                accepted = one.outputs[0].spec_decode_metrics.per_step_accepted
                answers.append({"tokens": list(one.outputs[0].token_ids), "accepted": list(accepted)})
            if job["batch"] == 1:
                answers[-1]["drafts"] = seen["drafts"]
        counts = {one.name: getattr(one, "value", 0) for one in llm.get_metrics()}
        drafts = counts["vllm:spec_decode_num_drafts"]
        tau = 1 + counts["vllm:spec_decode_num_accepted_tokens"] / drafts if drafts else None
        return {"answers": answers, "layers": seen["layers"], "tau_of_its_metrics": tau}
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def main(jobs: str, out: str, runner: str = "v1") -> None:
    """Do every job; one that vLLM refuses leaves the refusal as its result."""
    v2 = runner == "v2"
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="1" if v2 else "0")
    if v2:
        interpret_triton()
    results = []
    seen: dict[str, Any] = {}
    with watched(v2, seen):
        for job in json.loads(Path(jobs).read_text()):
            try:
                results.append(serve(job, seen))
            except Exception as error:  # whatever it is, it is this server's answer to the job
                results.append({"refused": f"{type(error).__name__}: {error}"})
            print(job["name"], str(results[-1])[:300], file=sys.stderr, flush=True)
            Path(out).write_text(json.dumps(results))


if __name__ == "__mp_main__":  # the HTTP server's engine, a process that imports its parent's file anew
    norm_context_keys(mended=True)
if __name__ == "__main__":
    if sys.argv[1] == "http":
        del sys.argv[1]
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
    else:
        main(*sys.argv[1:])
