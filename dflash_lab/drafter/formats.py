"""Drafters for other programs: the speculators layout, and what a server must be told."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from shlex import quote
from typing import Any

from dflash_lab import files
from dflash_lab.drafter.checkpoint import WEIGHTS, check_tensors, read_config, read_tensors, write_checkpoint
from dflash_lab.drafter.config import MOST_LAYERS, SLIDING, DrafterConfig, Fields, shown
from dflash_lab.drafter.model import Drafter
from dflash_lab.errors import InputError, UnsupportedTarget

logger = logging.getLogger(__name__)

# The speculators layout: the same tensors under another `config.json` ---------------------------------------
# Speculators and vLLM name a tapped state by Hugging Face's index, the output of layer k being k + 1, so ids
# gain one on the way out and lose it on the way in. Weights are copied as they are.


# What lies beside the body in some files: the target's own matrices and the maps of a cut vocabulary.
_BORROWED = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
_OUTER = (
    "architectures",
    "auto_map",
    "block_size",
    "dflash_config",
    "num_target_layers",
    "is_causal",
    "dtype",
)


def export_speculators(
    drafter: Drafter, folder: Path | str, *, target: str, target_architecture: str = ""
) -> None:
    """Write `drafter` in the speculators layout; `target` is the name or path its users load the target by.

    Raises `UnsupportedTarget`, before anything is written, for what the layout cannot say: DFlash 2, scaled
    logits, causal full layers, causal sliding layers beside full ones.
    """
    values = speculators_json(drafter.config, _dtype(drafter), target, target_architecture)
    write_checkpoint(folder, drafter.state_dict(), values)  # the weights file is the same


def speculators_json(
    config: DrafterConfig, dtype: str, target: str, target_architecture: str = ""
) -> dict[str, Any]:
    """The layout's `config.json` as plain values."""
    if config.is_dflash2:
        raise UnsupportedTarget(
            "export to speculators: DFlash 2 drafters have no place in its dflash layout."
        )
    odd = (config.input_embedding_scale, config.output_multiplier, config.final_logit_softcapping)
    if odd != (1.0, 1.0, 0.0):
        raise UnsupportedTarget(
            "export to speculators: its dflash layout has no input_embedding_scale, output_multiplier or "
            "final_logit_softcapping."
        )
    inner = {name: value for name, value in config.to_json(dtype).items() if name not in _OUTER}
    drafted = config.block_size - 1
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": drafted,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {
                "name_or_path": target,
                "architectures": [target_architecture] if target_architecture else [],
            },
        },
        "transformer_layer_config": inner,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.tap_ids],
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        "sample_from_anchor": False,
        "sliding_window_non_causal": not _causal(config),
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def import_speculators(folder: Path | str, *, num_target_layers: int = 0) -> Drafter:
    """Load a drafter from the speculators layout, single-file weights, dtype as stored.

    The layout does not say how deep the target is; a file of ours does, for others give `num_target_layers`.
    Raises `UnsupportedTarget` for a cut vocabulary or slots that predict the next position.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{path} is missing; give the folder of a speculators checkpoint.")
    config = read_speculators_json(
        files.read_json(path, "Give the folder of a drafter whose config.json is whole."),
        num_target_layers,
        str(path),
    )
    if not (folder / WEIGHTS).is_file():
        raise InputError(f"no weights at {folder / WEIGHTS}; only a single {WEIGHTS} is read.")
    tensors = read_tensors(folder / WEIGHTS)
    size = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else config.vocab_size
    if "d2t" in tensors and size != config.vocab_size:
        raise UnsupportedTarget(
            f"{folder}: its vocabulary is cut to {size} of {config.vocab_size}; only full ones are read."
        )
    tensors = {name: tensor for name, tensor in tensors.items() if name not in _BORROWED}
    drafter = Drafter(config)
    check_tensors(folder / WEIGHTS, drafter, tensors)
    drafter.load_state_dict(tensors, assign=True)
    return drafter


def read_speculators_json(
    values: Any, num_target_layers: int = 0, where: str = "speculators config.json"
) -> DrafterConfig:
    """The z-lab meaning of a speculators `config.json`; every error begins with `where`."""
    if not isinstance(values, dict):
        raise InputError(f"{where}: not a JSON object; is this a speculators checkpoint?")
    fields = Fields(where, values)
    if values.get("speculators_model_type") != "dflash":
        kind = values.get("speculators_model_type")
        ours = " This is the z-lab layout, which every stage reads as it is: no import is needed."
        raise UnsupportedTarget(
            f"{where}: speculators_model_type is {shown(kind)}; only 'dflash' can be read."
            + (ours if "dflash_config" in values else "")
        )
    if fields.flag("sample_from_anchor", False):
        raise UnsupportedTarget(
            f"{where}: sample_from_anchor is true: its slots predict the next position, which is not DFlash."
        )
    inner = fields.part("transformer_layer_config")
    size = Fields(where, inner).whole("vocab_size")
    if (cut := fields.whole("draft_vocab_size", size)) != size:
        raise UnsupportedTarget(f"{where}: draft_vocab_size {cut} is not the target's {size}.")
    depth = num_target_layers or fields.whole("num_target_layers", 0, low=0, high=MOST_LAYERS)
    aux = fields.wholes("aux_hidden_state_layer_ids", low=1, high=depth or MOST_LAYERS)
    if not depth:
        raise InputError(
            f"{where}: does not say how many layers the target has (taps {aux}); give num_target_layers "
            "(--layers in the shell)."
        )
    own = {
        "block_size": fields.whole("block_size", low=2),
        "mask_token_id": fields.whole("mask_token_id", low=0),
        "target_layer_ids": [layer - 1 for layer in aux],
    }
    # Nothing to say where no layer slides: full layers are bidirectional under either value.
    slides = SLIDING in Fields(where, inner).words("layer_types")
    causal = {"is_causal": False} if fields.flag("sliding_window_non_causal", False) and slides else {}
    outer = {**inner, "dflash_config": own, "num_target_layers": depth, **causal}
    return DrafterConfig.from_json(outer, where)


def _causal(config: DrafterConfig) -> bool:
    """Whether the layers are causal inside the block; `UnsupportedTarget` where one flag cannot say it.

    Speculators asks `sliding_window_non_causal` for sliding layers alone and keeps full ones bidirectional;
    vLLM takes it for every layer. So only masks that both read alike are written: all layers bidirectional
    (true), or all of them sliding and causal (false).
    """
    if not any(config.layer_mask(layer).causal for layer in range(config.num_layers)):
        return False
    if set(config.layer_types) == {SLIDING}:
        return True
    full = "causal full layers" if config.is_causal else "full layers beside causal sliding ones"
    raise UnsupportedTarget(
        f"export to speculators: its dflash layout cannot say {full} (layer_types "
        f"{list(config.layer_types)}): speculators reads its one flag for sliding layers, vLLM for all. "
        "Serve the drafter's own folder, z-lab's layout, which z-lab, vLLM and SGLang read as it is."
    )


def _dtype(drafter: Drafter) -> str:
    return str(drafter.fc.weight.dtype).removeprefix("torch.")


# `serve.md` beside a drafter: the commands that serve it, with its own numbers ------------------------------
# Both servers read the z-lab layout as it is. vLLM counts the drafted tokens (block size - 1), SGLang the
# whole block.


def serving_notes(config: DrafterConfig, drafter: str, target: str, dtype: str) -> str:
    """The text of `serve.md` for a drafter in folder `drafter`; `target` is a name or folder that servers
    load, `dtype` the type of its weights while the drafter was trained.
    """
    drafted = config.block_size - 1
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": drafted}
    kinds = ", ".join(f"{i}: {kind.removesuffix('_attention')}" for i, kind in enumerate(config.layer_types))
    notes = [
        f"- Taps: outputs of the target's decoder layers {list(config.tap_ids)} (0-based); vLLM and "
        f"speculators call them {[tap + 1 for tap in config.tap_ids]}.",
        f"- Layers: {kinds}"
        + (f"; window {config.sliding_window} tokens." if SLIDING in config.layer_types else "."),
        f"- Masked slots hold token {config.mask_token_id}; the target's vocabulary is not resized.",
        f"- Keep `--dtype {dtype}`, the target's type while this drafter was trained: without it vLLM takes "
        "bfloat16 for a float32 target, and the answers are not those of before.",
        f"- vLLM takes a `num_speculative_tokens` above {drafted} without a word, and drafts at positions "
        "that this drafter was never trained for. Fewer is fine.",
        "- The paths are those of the machine that trained: after a move give the new ones."
        if Path(drafter).is_absolute()
        else f"- `{drafter}` is relative to the folder in which the command is typed.",
    ]
    if needs_v2_runner(config):
        notes.append(
            "- DFlash 2, and sliding beside full layers, run in vLLM's V2 model runner alone: "
            "`VLLM_USE_V2_MODEL_RUNNER=1` asks for it."
        )
    if ignored := ignored_by_vllm(config):
        notes.append(
            f"- vLLM ignores {ignored} of a plain DFlash drafter: there it drafts other tokens than here, of "
            "which fewer are accepted."
        )
    return f"""# Serving this drafter

Target: `{target}`. Block size {config.block_size}: each round drafts {drafted} tokens.

vLLM:

```bash
{"VLLM_USE_V2_MODEL_RUNNER=1 " if needs_v2_runner(config) else ""}vllm serve {quote(target)} \\
  --dtype {dtype} \\
  --speculative-config {quote(json.dumps(speculative))}
```

SGLang:

```bash
python -m sglang.launch_server --model-path {quote(target)} \\
  --dtype {dtype} \\
  --speculative-algorithm DFLASH \\
  --speculative-draft-model-path {quote(drafter)} \\
  --speculative-num-draft-tokens {config.block_size}
```

{chr(10).join(notes)}
"""


def needs_v2_runner(config: DrafterConfig) -> bool:
    """Whether vLLM's first model runner refuses this drafter."""
    return config.is_dflash2 or len(set(config.layer_types)) > 1


def ignored_by_vllm(config: DrafterConfig) -> str:
    """What this drafter computes and vLLM leaves out of a plain DFlash, as "name value, ..."; its DFlash 2
    reads all three.
    """
    plain = dict(input_embedding_scale=1.0, output_multiplier=1.0, final_logit_softcapping=0.0)
    found = {name: getattr(config, name) for name in plain}
    odd = [f"{name} {value:g}" for name, value in found.items() if value != plain[name]]
    return "" if config.is_dflash2 else ", ".join(odd)


def write_serving_notes(folder: Path, target: str, dtype: str, *, place: Path) -> None:
    """Write `serve.md` into a drafter's `folder`, for the `place` that the folder will be moved to, with
    absolute paths.
    """
    config = read_config(folder)
    if ignored := ignored_by_vllm(config):
        logger.warning("%s: vLLM ignores %s; it drafts other tokens there than here", place, ignored)
    target = str(Path(target).expanduser().absolute()) if Path(target).expanduser().is_dir() else target
    files.write_bytes(
        folder / "serve.md", serving_notes(config, str(place.absolute()), target, dtype).encode()
    )
