"""What a batch may cost, learnt from failures: a limit for each length bucket, lowered at once and raised
slowly.

A bucket is a power of two of the padded length. A batch that did not fit halves its bucket's limit; after
`PATIENCE` batches in a row at the limit it grows by a quarter, up to what the plan asks for, where it stops
to matter. One bad batch so costs one bucket a few splits, not the whole run its speed.
"""

from __future__ import annotations

import math

PATIENCE = 32


class BucketBudgets:
    """Limits in padded tokens (rows x longest) by length bucket; no entry means no limit was ever needed."""

    def __init__(self) -> None:
        self._limit: dict[int, int] = {}
        self._streak: dict[int, int] = {}

    @staticmethod
    def bucket(longest: int) -> int:
        """The bucket of a padded length: 64, 128, 256, ... tokens."""
        return 1 << max(6, math.ceil(math.log2(max(longest, 1))))

    def rows(self, longest: int, rows: int) -> int:
        """How many of `rows` samples padded to `longest` tokens may run together; at least one."""
        limit = self._limit.get(self.bucket(longest))
        return rows if limit is None else max(1, min(rows, limit // longest))

    def failed(self, longest: int, rows: int) -> None:
        """A batch did not fit: half of it is the limit now."""
        bucket, tokens = self.bucket(longest), rows * longest
        self._limit[bucket] = max(min(self._limit.get(bucket, tokens), tokens) // 2, 1)
        self._streak[bucket] = 0

    def fitted(self, longest: int, rows: int) -> None:
        """A batch fitted; only batches that would have been larger count towards raising the limit."""
        bucket = self.bucket(longest)
        limit = self._limit.get(bucket)
        if limit is None or (rows + 1) * longest <= limit:
            return
        self._streak[bucket] += 1
        if self._streak[bucket] >= PATIENCE:
            self._limit[bucket], self._streak[bucket] = limit + limit // 4 + 1, 0

    @property
    def limits(self) -> dict[int, int]:
        """The limits in force, by bucket."""
        return dict(self._limit)
