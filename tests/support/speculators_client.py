"""`speculators_client.py FOLDER`, with speculators 0.9 on its path: does its own loader take our export, with
its weights? Its clients of servers and data sets are not needed for that; absent ones are stood in for.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import sys
from unittest.mock import MagicMock

ABSENT = {name for name in ("openai", "datasets", "aiohttp") if importlib.util.find_spec(name) is None}


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the absent packages and everything below them."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module):
        """Nothing to run."""


def main(folder: str) -> None:
    from safetensors.torch import load_file
    from speculators import SpeculatorModel

    model = SpeculatorModel.from_pretrained(folder)
    loaded, stored = model.state_dict(), load_file(f"{folder}/model.safetensors")
    same = [name for name, tensor in stored.items() if name in loaded and (loaded[name] == tensor).all()]
    found = {
        "class": type(model).__name__,
        "equal": len(same),
        "stored": len(stored),
        "taps": list(model.target_layer_ids),
        "block_size": model.config.block_size,
        "sliding": model.sliding_window_indices,
        "mask_token_id": model.config.mask_token_id,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    sys.meta_path.append(StandIn())
    main(sys.argv[1])
