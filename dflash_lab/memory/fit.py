"""Fit what was measured: non-negative least squares on the terms that are known to cost memory.

Every coefficient is bytes of something, so none may be negative; with that constraint a fit on few points
cannot trade one wrong term against another. Residuals are relative, since a gigabyte matters more at 2 than
at 80. Points are split before fitting, and the error reported is that of the points left out.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dflash_lab import files
from dflash_lab.errors import InputError, LabError
from dflash_lab.file_errors import FileError, naming
from dflash_lab.memory.account import BEYOND, NOT_LIVE, STATIC_TERMS, Account
from dflash_lab.memory.setups import ExtractionSetup, TrainingSetup
from dflash_lab.memory.shapes import CHUNK

SCHEMA = 2
LARGEST_BYTES = 1 << 20
CALIBRATED = "calibrated on"  # so begin the words of a prediction that was corrected
_ERRORS = ("median_error_pct", "worst_error_pct", "formulas_median_error_pct", "formulas_worst_error_pct")
Setup = ExtractionSetup | TrainingSetup
S = TypeVar("S", ExtractionSetup, TrainingSetup)
SIZES = ("batch", "length", "anchors", "context", "block_size")  # what a fit's points differ in


def nnls(matrix: np.ndarray, target: np.ndarray, *, tolerance: float = 1e-10) -> np.ndarray:
    """Return x >= 0 that minimises ``|matrix @ x - target|``; matrix [n, k], target [n], x [k].

    Active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23).
    """
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    a = matrix / scale
    x = np.zeros(a.shape[1])
    passive = np.zeros(a.shape[1], dtype=bool)
    gradient = a.T @ (target - a @ x)
    for _ in range(10 * a.shape[1]):
        if passive.all() or gradient[~passive].max() <= tolerance * max(1.0, np.abs(a.T @ target).max()):
            break
        passive[np.argmax(np.where(passive, -np.inf, gradient))] = True
        while True:
            step = np.zeros_like(x)
            step[passive] = np.linalg.lstsq(a[:, passive], target, rcond=None)[0]
            if step[passive].min() > 0:
                x = step
                break
            falling = passive & (step <= 0)
            ratio = np.min(x[falling] / np.maximum(x[falling] - step[falling], 1e-300))
            x = x + ratio * (step - x)
            passive &= x > 1e-15
            x[~passive] = 0.0
        gradient = a.T @ (target - a @ x)
    return x / scale


@dataclass(frozen=True)
class Point:
    """A setup, what was predicted for what the batch brings (bytes), and what was measured for it."""

    setup: Setup
    predicted: int
    measured: int


def features(setup: Setup, predicted: int) -> dict[str, float]:
    """Return the regressors of one point; the prediction is one, so that a fit only has to correct it."""
    if isinstance(setup, ExtractionSetup):
        padded = setup.batch * CHUNK * -(-setup.length // CHUNK)
        squares = setup.batch * setup.length**2 if setup.mask else 0
        found = {"tokens": setup.tokens, "padded tokens": padded, "mask": squares, "rows": setup.batch}
    else:
        found = {"positions": setup.rows, "context tokens": setup.context, "anchors": setup.anchors}
    return {"prediction": float(predicted), **{name: float(x) for name, x in found.items()}, "constant": 1.0}


@dataclass(frozen=True)
class Calibration:
    """Bytes an item of each feature, and the errors (percent) on points that took no part in the fit.

    `formulas_*`: errors of the bare predictions on the same points. `setup`: the fields of the setups that
    were measured (all but `SIZES`), as JSON values. `scope`: what the measurements hold for, in words
    (`calibrated.py`).
    """

    coefficients: Mapping[str, float]
    fitted_points: int
    heldout_points: int
    median_error_pct: float
    worst_error_pct: float
    formulas_median_error_pct: float = 0.0
    formulas_worst_error_pct: float = 0.0
    setup: Mapping[str, Any] = field(default_factory=dict)
    scope: Mapping[str, str] = field(default_factory=dict)
    heldout: tuple[float, ...] = field(default=(), repr=False)  # signed errors, percent

    @property
    def words(self) -> str:
        """Where it comes from and how far off it was."""
        return (
            f"{CALIBRATED} {self.fitted_points} points of {self.scope.get('device', 'this device')}; "
            f"{self.heldout_points} held out: median error {self.median_error_pct:.1f}%, worst "
            f"{self.worst_error_pct:.1f}%"
        )

    def measured(self, setup: S) -> S:
        """Return the setup that was measured, in the size of `setup`."""
        fields: dict[str, Any] = dict(self.setup)
        fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return replace(setup, **fields)

    def predict(self, setup: Setup, predicted: int) -> int:
        """Return the calibrated bytes that a batch of `setup` brings, from its prediction."""
        found = features(setup, predicted)
        return round(sum(self.coefficients.get(name, 0.0) * value for name, value in found.items()))

    def account(self, account: Account, setup: S, base: Account) -> Account:
        """Return `account` as a calibrated one; `base` is the account of `measured(setup)`.

        What the measurements say beyond `base` becomes a term of its own; if they say less, moving terms
        shrink in that ratio. So a change that was not measured keeps the gain that its formulas give.
        """
        had = base.live - base.static
        wanted = self.predict(self.measured(setup), had)
        terms, formulas = dict(account.terms), dict(account.formulas)
        if wanted >= had:
            terms[BEYOND] = wanted - had
            formulas[BEYOND] = "measured: non-negative least squares on size and prediction"
        else:
            still = STATIC_TERMS | set(NOT_LIVE)
            terms = {n: size if n in still else size * wanted // max(had, 1) for n, size in terms.items()}
        words = self.words[0].upper() + self.words[1:] + "."
        return replace(
            account, kind="calibrated", terms=terms, formulas=formulas, notes=(*account.notes, words)
        )

    def save(self, path: Path | str) -> None:
        """Write the calibration as JSON, closed with a checksum."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
        files.write_json(path, files.sealed({"schema": SCHEMA, **plain}))

    @classmethod
    def load(cls, path: Path | str) -> Calibration:
        """Read a calibration; `InputError` if it is none, damaged, or of another schema."""
        path = Path(path)
        if path.exists() and not path.is_file():  # a pipe never ends
            raise FileError(errno.EINVAL, path)
        with naming(path), open(path, "rb") as file:
            data = file.read(LARGEST_BYTES + 1)
        if len(data) > LARGEST_BYTES:
            raise _no_calibration(path, f"more than {LARGEST_BYTES:,} bytes")
        try:
            values = files.unsealed(data)
            if values is None:
                raise ValueError("its bytes are not those that were written")
            if values.pop("schema") != SCHEMA:
                raise _no_calibration(path, "of another version")
            fitted, heldout = (int(_amount(n, values[n])) for n in ("fitted_points", "heldout_points"))
            return cls(
                fitted_points=fitted,
                heldout_points=heldout,
                coefficients={name: _amount(name, one) for name, one in values["coefficients"].items()},
                heldout=tuple(_finite("heldout", one) for one in values["heldout"]),
                setup=_checked(dict(values["setup"])),
                scope={str(name): str(word) for name, word in dict(values["scope"]).items()},
                **{name: _amount(name, values[name]) for name in _ERRORS},
            )
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            if isinstance(error, LabError):
                raise
            raise _no_calibration(path, f"damaged, {type(error).__name__}: {str(error)[:200]}") from error


def _no_calibration(path: Path, fault: str) -> InputError:
    return InputError(f"{path}: no calibration of this version ({fault}); measure again and fit.")


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {str(value)[:40]}, no finite number")
    return float(value)


def _amount(name: str, value: Any) -> float:
    found = _finite(name, value)
    if found < 0:
        raise ValueError(f"{name} is {found:g}, less than nothing")
    return found


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a measured setup, each of its own kind; `ValueError` where one is not."""
    blanks = (
        ExtractionSetup(batch=1, length=1, tap_ids=(0,)),
        TrainingSetup(anchors=1, context=1, block_size=1),
    )
    plain: list[dict[str, Any]] = [as_plain(blank) for blank in blanks]
    known = next((one for one in plain if set(values) <= set(one) - set(SIZES)), None)
    if known is None:
        raise ValueError(f"its setup has {', '.join(sorted(set(values) - set(plain[1])))}, no such field")
    for name, value in values.items():
        odd = type(value) is not type(known[name])
        if odd or (isinstance(value, list) and any(type(one) is not int for one in value)):
            raise ValueError(f"{name} of its setup is {str(value)[:40]}")
    return values


def fit(points: Sequence[Point], *, every: int = 3, scope: Mapping[str, str] | None = None) -> Calibration:
    """Fit on one point of `every` (by size, smallest and largest included) and judge on all others.

    The points' setups differ in `SIZES` only. Raises `InputError` with fewer than six points, or if none
    would be left to judge by.
    """
    if len(points) < 6 or every < 2:
        raise InputError(
            f"{len(points)} measured points, every={every}: a fit needs at least six and every >= 2."
        )
    order = sorted(points, key=lambda point: point.measured)
    chosen = {*range(0, len(order), every), len(order) - 1}
    fitted = [point for place, point in enumerate(order) if place in chosen]
    heldout = [point for place, point in enumerate(order) if place not in chosen]
    names = list(features(fitted[0].setup, fitted[0].predicted))
    rows = np.array([[features(p.setup, p.predicted)[name] for name in names] for p in fitted])
    wanted = np.array([float(p.measured) for p in fitted])
    x = nnls(rows / wanted[:, None], np.ones(len(fitted)))
    draft = Calibration(dict(zip(names, x.tolist())), len(fitted), len(heldout), 0.0, 0.0)
    errors = [100.0 * (draft.predict(p.setup, p.predicted) / p.measured - 1) for p in heldout]
    bare = [100.0 * (p.predicted / p.measured - 1) for p in heldout]
    return Calibration(
        draft.coefficients,
        len(fitted),
        len(heldout),
        *error_figures(errors),
        *error_figures(bare),
        setup={name: value for name, value in as_plain(points[0].setup).items() if name not in SIZES},
        scope=dict(scope or {}),
        heldout=tuple(errors),
    )


def error_figures(errors: Sequence[float]) -> tuple[float, float]:
    """Return (median, worst) of the absolute values, in the errors' unit."""
    sizes = np.abs(np.asarray(errors, dtype=float))
    return (float(np.median(sizes)), float(sizes.max())) if len(sizes) else (0.0, 0.0)


def as_plain(setup: Setup) -> dict[str, Any]:
    """Return a setup as JSON values."""
    values = {name: getattr(setup, name) for name in setup.__dataclass_fields__}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
