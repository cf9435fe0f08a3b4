"""What the head and the loss hold, by the way the logits are made: all at once, in chunks, or finished inside
a chunk.
"""

from __future__ import annotations

from dflash_lab.memory.extraction_account import Live
from dflash_lab.memory.setups import TrainingSetup
from dflash_lab.memory.shapes import dtype_bytes


def loss_terms(vocab: int, hidden: int, setup: TrainingSetup) -> Live:
    """Return what the head and the loss hold at their worst.

    A side (drafter, and the target with soft targets) costs N V s for its logits and N V 4 for what its
    softmax saves; the gradient is N V 4. A loop over chunks, or chunks put back together, changes when
    these are made and not what is kept for the backward; only recomputing (checkpoint) or finishing the
    gradient inside the chunk (fused) does.
    """
    size, sides = dtype_bytes(setup.dtype), 1 + setup.soft_targets
    vocab = -(-vocab // setup.vocabulary_shards)
    here = sides - (1 if setup.soft_targets and setup.target_logits_elsewhere else 0)
    whole = setup.rows * vocab
    drafted = setup.block_size - 1  # slot 0 takes no part; a chunk holds whole blocks
    chunk = min(max(1, setup.chunk // drafted), setup.anchors) * drafted * vocab
    if setup.loss in ("naive", "concat"):
        return {
            "logits": (here * whole * size, f"{here} sides x N V s"),
            "softmax and its gradient": (whole * 4 * (sides + 1), f"N V 4 x ({sides} sides + gradient)"),
        }
    if setup.loss == "loop":
        return {
            "logits": (sides * whole * size, f"{sides} sides x N V s: kept by autograd for every chunk"),
            "softmax and its gradient": (
                whole * size + chunk * 4 * (sides + 1),
                "N V s kept + c V 4 x (sides + gradient)",
            ),
        }
    if setup.loss == "checkpoint":
        work = chunk * ((size + 4) * sides + 4)
        return {
            "logits of one chunk": (chunk * size * here, "c V s a side"),
            "softmax and its gradient": (work - chunk * size * sides, "c V 4 x (sides + gradient)"),
            "loss inputs": (setup.rows * hidden * size, "N H s: all that checkpointing the head keeps"),
        }
    return {
        "logits of one chunk": (chunk * 4 * sides, f"{sides} sides x c V 4 (fp32)"),
        "softmax and its gradient": (chunk * size, "c V s: the logit gradient"),
        "loss inputs": (
            chunk // vocab * hidden * (size + 8),
            "c H (s + 8): one chunk's states and their gradient",
        ),
    }
