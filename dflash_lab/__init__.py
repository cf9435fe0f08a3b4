"""DFlash Lab: train, measure and understand DFlash drafters.

What people use from Python is offered here by name and imported when it is asked for: no torch until then.
"""

import os
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Threads that wait for each other sleep after microseconds instead of spinning on: as fast on an idle
# machine, many times as fast where another program takes the core that the awaited thread needs. torch's
# OpenMP library reads this once, when it is loaded: hence here, before anything imports torch. A person's
# own value wins.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_MODULES = {  # where each name is
    "models.load": ("Target", "TargetHead", "load_target"),
    "models.hooks": ("Taps", "default_tap_ids"),
    "models.template": ("render", "render_prompt"),
    "models.generate": ("generate",),
    "models.server": ("Server",),
    "data.samples": ("FeatureItem", "Sample", "write_samples"),
    "data.batching": ("plan_batches",),
    "extraction.loop": ("extract",),
    "extraction.oom": ("halving",),
    "extraction.store": ("FeatureStore", "open_store"),
    "drafter.config": ("DrafterConfig",),
    "drafter.model": ("Drafter",),
    "drafter.loss_terms": ("LossConfig",),
    "drafter.loss": ("fused_draft_loss",),
    "drafter.objective": ("TrainSettings",),
    "drafter.train": ("train",),
    "drafter.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "drafter.formats": ("export_speculators", "import_speculators"),
    "acceptance.decode": ("decode", "plain_decode"),
    "acceptance.offline": ("offline",),
    "memory.shapes": ("ExtractionSetup", "TrainingSetup", "target_shape"),
    "memory.account": ("predict_extraction",),
    "memory.training": ("predict_training",),
    "memory.advice": ("advise",),
}
_PLACES = {name: f"dflash_lab.{module}" for module, names in _MODULES.items() for name in names}

# ruff: noqa: F401
if TYPE_CHECKING:  # the same for a type checker
    from dflash_lab.acceptance.decode import decode, plain_decode
    from dflash_lab.acceptance.offline import offline
    from dflash_lab.data.batching import plan_batches
    from dflash_lab.data.samples import FeatureItem, Sample, write_samples
    from dflash_lab.drafter.checkpoint import load_checkpoint, save_checkpoint
    from dflash_lab.drafter.config import DrafterConfig
    from dflash_lab.drafter.formats import export_speculators, import_speculators
    from dflash_lab.drafter.loss import fused_draft_loss
    from dflash_lab.drafter.loss_terms import LossConfig
    from dflash_lab.drafter.model import Drafter
    from dflash_lab.drafter.objective import TrainSettings
    from dflash_lab.drafter.train import train
    from dflash_lab.extraction.loop import extract
    from dflash_lab.extraction.oom import halving
    from dflash_lab.extraction.store import FeatureStore, open_store
    from dflash_lab.memory.account import predict_extraction
    from dflash_lab.memory.advice import advise
    from dflash_lab.memory.shapes import ExtractionSetup, TrainingSetup, target_shape
    from dflash_lab.memory.training import predict_training
    from dflash_lab.models.generate import generate
    from dflash_lab.models.hooks import Taps, default_tap_ids
    from dflash_lab.models.load import Target, TargetHead, load_target
    from dflash_lab.models.server import Server
    from dflash_lab.models.template import render, render_prompt
else:

    def __getattr__(name: str) -> object:
        if name not in _PLACES:
            raise AttributeError(f"module 'dflash_lab' has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(_PLACES[name]), name)

    def __dir__() -> list[str]:
        return sorted([*globals(), *_PLACES])
