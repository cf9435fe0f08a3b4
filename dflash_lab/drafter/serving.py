"""`serve.md` beside a drafter: the commands that serve it, with its own numbers filled in.

Both servers read the z-lab layout as it is. vLLM counts the drafted tokens (block size - 1), SGLang the whole
block.
"""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote

from dflash_lab import files
from dflash_lab.drafter.config import SLIDING, DrafterConfig


def serving_notes(config: DrafterConfig, drafter: str, target: str) -> str:
    """The text of `serve.md` for a drafter in folder `drafter`; `target` is a name or folder that servers
    load.
    """
    drafted = config.block_size - 1
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": drafted}
    kinds = ", ".join(f"{i}: {kind.removesuffix('_attention')}" for i, kind in enumerate(config.layer_types))
    mixed = len(set(config.layer_types)) > 1
    notes = [
        f"- Taps: outputs of the target's decoder layers {list(config.tap_ids)} (0-based); vLLM and "
        f"speculators call them {[tap + 1 for tap in config.tap_ids]}.",
        f"- Layers: {kinds}"
        + (f"; window {config.sliding_window} tokens." if SLIDING in config.layer_types else "."),
        f"- Masked slots hold token {config.mask_token_id}; the target's vocabulary is not resized.",
    ]
    if mixed:
        notes.append("- Mixed sliding and full layers need a vLLM whose model runner is V2.")
    return f"""# Serving this drafter

Target: `{target}`. Block size {config.block_size}: each round drafts {drafted} tokens.

vLLM:

```bash
vllm serve {quote(target)} \\
  --speculative-config {quote(json.dumps(speculative))}
```

SGLang:

```bash
python -m sglang.launch_server --model-path {quote(target)} \\
  --speculative-algorithm DFLASH \\
  --speculative-draft-model-path {quote(drafter)} \\
  --speculative-num-draft-tokens {config.block_size}
```

{chr(10).join(notes)}
"""


def write_serving_notes(folder: Path | str, config: DrafterConfig, target: str) -> None:
    """Write `serve.md` into a drafter's folder."""
    path = Path(folder)
    files.write_bytes(path / "serve.md", serving_notes(config, str(path), target).encode())
