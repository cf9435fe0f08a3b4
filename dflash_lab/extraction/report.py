"""The account of an extraction: headline figures, one record a batch, the quarantined samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dflash_lab.errors import LabError


@dataclass(frozen=True)
class BatchRecord:
    """One batch as it ran. `seconds`: of the device on CUDA, of the host elsewhere."""

    samples: int
    longest: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Quarantined:
    """A sample that is not in the store, and why. The next run tries it again."""

    id: str
    hash: str
    length: int
    reason: str


class QuarantineError(LabError, RuntimeError):
    """Samples were quarantined: everything else is sealed, but the store is not all that was asked for."""


@dataclass
class ExtractionReport:
    """What one shard's run did; the loop and the writer fill it as they go. At the end
    ``samples_in == stored_before + samples_stored + len(quarantined)``.
    """

    samples_in: int
    stored_before: int
    tokens_before: int  # of the samples stored before
    duplicates: int
    token_budget: int  # of the batches as planned
    token_budget_lowered: str  # why it is less than was given, if it is
    samples_stored: int = 0
    tokens_stored: int = 0
    quarantined: list[Quarantined] = field(default_factory=list)
    batches: list[BatchRecord] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # attempts that did not fit
    parts: int = 0
    bytes_written: int = 0
    write_seconds: float = 0.0
    seconds: float = 0.0
    forward_seconds: float = 0.0  # from the first forward's begin to the last one's end; CUDA's clock alone
    gpu_idle_pct: float = 0.0
    selftest: dict[str, Any] = field(default_factory=dict)

    @property
    def waste_pct(self) -> float:
        """Padding among the computed tokens, as the batches really ran, in percent."""
        tokens = sum(batch.tokens for batch in self.batches)
        padded = sum(batch.samples * batch.longest for batch in self.batches)
        return 100 * (1 - tokens / padded) if padded else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Real tokens a second of the run, self-test excluded; 0 when there was nothing to do."""
        return sum(batch.tokens for batch in self.batches) / self.seconds if self.seconds else 0.0

    @property
    def limited_by(self) -> str:
        """What the run waited for: the writer when it was busy most of the time, else the model."""
        return "disk" if self.seconds and self.write_seconds > 0.8 * self.seconds else "model"

    def figures(self) -> dict[str, float | int | str]:
        """Return the flat headline numbers; those of the device's clock only where there was one (CUDA)."""
        clock = {
            "forward_seconds": round(self.forward_seconds, 3),
            "gpu_idle_pct": round(self.gpu_idle_pct, 3),
        }
        return {
            "samples_in": self.samples_in,
            "samples_stored_before": self.stored_before,
            "samples_stored": self.samples_stored,
            "samples_quarantined": len(self.quarantined),
            "duplicates": self.duplicates,
            "tokens_stored_before": self.tokens_before,
            "tokens_stored": self.tokens_stored,
            "extract_tokens_per_s": round(self.tokens_per_s, 2),
            "padding_waste_pct": round(self.waste_pct, 3),
            "seconds": round(self.seconds, 3),
            "batches": len(self.batches),
            "memory_failures": len(self.failures),
            "bytes_written": self.bytes_written,
            "write_gb_per_s": round(self.bytes_written / self.seconds / 1e9, 4) if self.seconds else 0.0,
            "limited_by": self.limited_by,
            "token_budget": self.token_budget,
            **({"token_budget_lowered": self.token_budget_lowered} if self.token_budget_lowered else {}),
            **(clock if self.forward_seconds else {}),
        }

    def raise_for_quarantine(self, allowed: int = 0) -> None:
        """Raise `QuarantineError` listing id, length and reason when more than `allowed` samples were
        quarantined.
        """
        if len(self.quarantined) <= allowed:
            return
        shown = "\n  ".join(f"{one.id} ({one.length} tokens): {one.reason}" for one in self.quarantined[:50])
        more = len(self.quarantined) - 50
        raise QuarantineError(
            f"{len(self.quarantined)} of {self.samples_in} samples could not be stored; everything "
            f"else is sealed.\n  {shown}"
            + (f"\n  and {more} more, all in the shard's manifest" if more > 0 else "")
            + "\nRun again to retry them, or accept them with max_quarantined."
        )
