"""The answers that offline metrics look at, with the target's states: where they come from.

Held-out samples have stored answers; their states are read from the feature store, or made by the target now
where nothing was extracted. Prompts without an answer take what plain decoding has just said.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_lab.acceptance.live import answered_items, sample_items, stored_items, text_hash
from dflash_lab.acceptance.prompts import Prompt
from dflash_lab.acceptance.study import Study
from dflash_lab.data.items import FeatureItem
from dflash_lab.data.samples import provenance_path, read_provenance, scan_samples
from dflash_lab.errors import InputError
from dflash_lab.extraction.manifest import trial_of
from dflash_lab.extraction.store import FeatureStore, open_store
from dflash_lab.target.model import Target

log = logging.getLogger(__name__)


class Answers:
    """Answers of an evaluation with the stage's `params`, for a drafter with taps `tap_ids`.

    `stored`: whether the prompts have answers in the samples file. `has_final`: whether the items will have
    final states. Raises `InputError` for a store of another target or of other taps; one of a trial has not
    all that prompts are drawn from, and is left aside.
    """

    def __init__(self, params: Any, target: Target, tap_ids: tuple[int, ...]) -> None:
        self._params, self._target, self._tap_ids = params, target, tap_ids
        self.stored = params.prompts == "heldout"
        self._store = self._open() if self.stored and (params.store or params.store_path.exists()) else None
        self.has_final = self._store is None or self._store.has_final

    @property
    def source(self) -> str:
        """Where answers and states come from, for the report."""
        if not self.stored:
            return "answers of plain decoding"
        return "stored answers" if self._store is not None else "stored answers, states of the live target"

    def _open(self) -> FeatureStore | None:
        params = self._params
        store = open_store(params.store_path)
        store.check_made_by(params.target, self._target.identity["weights"], self._target.hidden_size)
        if tuple(store.tap_ids) != self._tap_ids:
            raise InputError(
                f"{params.store_path} holds taps {list(store.tap_ids)}, the drafter was made for "
                f"{list(self._tap_ids)}: give the store that it was trained from."
            )
        if total := trial_of(params.store_path):
            log.info(
                "%s holds %d of %d samples, a trial (max_samples of extract): the live target makes the "
                "states of the answers", params.store_path, len(store), total,
            )  # fmt: skip
            return None
        return store

    def items(self, prompts: Sequence[Prompt], plain: Study, *, extra: int = 0) -> Sequence[FeatureItem]:
        """Return the answers of `prompts`, then up to `extra` more held-out ones."""
        if not self.stored:
            return answered_items(self._target, self._tap_ids, plain)
        hashes = [prompt.hash for prompt in prompts]
        if self._store is not None:
            return stored_items(self._store, hashes, extra=extra)
        return sample_items(self._target, self._tap_ids, self._params.samples_path, hashes, extra=extra)

    def texts(self, prompts: Sequence[Prompt], plain: Study) -> tuple[list[str], list[Sequence[int]]]:
        """Return hash and answer tokens of what `items` holds of each decoded answer."""
        if self.stored:
            return [prompt.hash for prompt in prompts], [prompt.answer for prompt in prompts]
        names = [text_hash([*asked, *a.tokens]) for asked, a in zip(plain.asked, plain.answers)]
        return names, [answer.tokens for answer in plain.answers]

    def made_by(self) -> tuple[Path | None, bool | None]:
        """Return the samples file that says how training text was rendered, if there is one, and whether the
        prompts were rendered with thinking on (None: they are that file's own).
        """
        samples = Path(self._params.samples_path)
        if self.stored:
            return samples, None
        return samples if provenance_path(samples).exists() else None, self._params.thinking

    def thinking(self) -> bool:
        """Return whether the prompts were rendered with thinking on."""
        _, given = self.made_by()
        return bool(read_provenance(self._params.samples_path).get("thinking")) if given is None else given

    def sources(self, prompts: Sequence[Prompt], plain: Study) -> dict[str, str]:
        """Return the source of each sample that `items` holds, by its hash."""
        if not self.stored:
            names, _ = self.texts(prompts, plain)
            return {name: prompts[number].source for name, number in zip(names, plain.prompt, strict=True)}
        known = scan_samples(self._params.samples_path).select("content_hash", "source").collect()
        return dict(known.iter_rows())

    def date(self) -> str:
        """Return the day that the samples' template printed as today; empty if none is recorded."""
        samples = self._params.samples_path
        return str(read_provenance(samples).get("date", "")) if provenance_path(samples).exists() else ""
