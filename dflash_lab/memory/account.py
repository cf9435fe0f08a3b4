"""An account of memory: named terms in bytes, the formula each came from, and how the numbers were come by.

Four kinds are kept apart and always said: `analytic` (formulas), `fake` (tensors counted in a run on fake
tensors), `measured` (a device or a counted real run) and `calibrated` (a prediction whose coefficients were
fitted on measurements). Terms are what is live at ONE moment, the moment of the peak, so they add up to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from dflash_lab.errors import InputError
from dflash_lab.memory.shapes import GIB

Kind = Literal["analytic", "fake", "measured", "calibrated"]
KINDS: tuple[Kind, ...] = ("analytic", "fake", "measured", "calibrated")

# What is there before the first batch and stays: a change of batch or length does not move these.
STATIC_TERMS = frozenset(
    (
        "target weights",
        "head and embedding",
        "drafter weights",
        "fp32 masters",
        "optimizer moments",
        "workspace",
        "outside torch",
    )
)

# What the allocator holds beside live tensors.
NOT_LIVE = ("fragmentation", "recorded forward's pool")
BEYOND = "beyond the formulas"  # what a calibration puts on top of them


@dataclass(frozen=True)
class Account:
    """Bytes by term at the peak. `formulas` says how each term was made; `moment` names when the peak
    happens.
    """

    kind: Kind
    title: str
    terms: Mapping[str, int]
    formulas: Mapping[str, str] = field(default_factory=dict)
    moment: str = ""
    notes: tuple[str, ...] = ()
    reserved: int = 0  # what the allocator would hold with room to spare; 0: not known
    allocated: int = 0  # live tensors in whole blocks, as the allocator counts them; 0: not known

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"kind {self.kind!r} is none of {', '.join(KINDS)}.")
        kept = {name: int(size) for name, size in self.terms.items() if size}
        if negative := [name for name, size in kept.items() if size < 0]:
            raise InputError(f"negative terms in an account of memory: {', '.join(negative)}")
        object.__setattr__(self, "terms", kept)

    @property
    def peak(self) -> int:
        """Bytes at the peak: the sum of the terms."""
        return sum(self.terms.values())

    @property
    def peak_gib(self) -> float:
        return self.peak / GIB

    @property
    def static(self) -> int:
        """Bytes that are there whatever the batch."""
        return sum(size for name, size in self.terms.items() if name in STATIC_TERMS)

    @property
    def moving(self) -> int:
        """Bytes that the batch brings."""
        return self.peak - self.static

    @property
    def live(self) -> int:
        """Bytes of live tensors: the peak without fragments and without what only a recorded graph may
        use.
        """
        return self.peak - sum(self.terms.get(name, 0) for name in NOT_LIVE)

    def largest(self, count: int = 3) -> list[tuple[str, int]]:
        """Return the `count` largest terms, largest first."""
        return sorted(self.terms.items(), key=lambda item: -item[1])[:count]

    def fragmented(self, share: float) -> Account:
        """Return the account with fragments worth `share` of what the batch brings."""
        size = int(share * (self.live - self.static))
        formula = f"{100 * share:.0f}% of what the batch brings: typical of a replayed allocator"
        return replace(
            self,
            terms={**self.terms, "fragmentation": size},
            formulas={**self.formulas, "fragmentation": formula},
        )

    def explain(self) -> str:
        """Say in one paragraph what fills the memory and when."""
        shares = ", ".join(
            f"{name} {size / GIB:.2f} GiB ({100 * size / max(1, self.peak):.0f}%)"
            for name, size in self.largest(4)
        )
        when = f" The peak comes in {self.moment}." if self.moment else ""
        notes = "".join(f" {note}" for note in self.notes)
        head = f"{self.title} ({self.kind}): {self.peak_gib:.2f} GiB at the peak."
        return f"{head} Largest: {shares}.{when}{notes}"


@dataclass(frozen=True)
class Moment:
    """Terms live at one point of a pass, as ``name -> (bytes, formula)``."""

    name: str
    live: Mapping[str, tuple[int, str]]

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.live.values())


def account_of(kind: Kind, title: str, moments: list[Moment], notes: tuple[str, ...] = ()) -> Account:
    """Return the account of the largest of `moments`."""
    peak = max(moments, key=lambda moment: moment.size)
    return Account(
        kind=kind,
        title=title,
        terms={name: size for name, (size, _) in peak.live.items()},
        formulas={name: formula for name, (_, formula) in peak.live.items()},
        moment=peak.name,
        notes=notes,
    )
