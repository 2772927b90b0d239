"""Loss spikes: a loss far above the steps just before, or NaN or infinity."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass, field

WINDOW = 50
"""Number of steps for the usual changes."""
RECENT = 8
"""Number of steps for the median to compare with. Before that, only NaN and infinity are spikes."""
DEVIATIONS = 8.0
"""Limit in standard deviations of the change, estimated as 1.4826 times the median absolute deviation."""
FRACTION = 0.1
"""Minimum limit in parts of the median, because a settled run deviates by almost nothing."""


@dataclass
class SpikeWatch:
    """Detector. `history` may come from an earlier start."""

    history: list[float] = field(default_factory=list)
    first: int | None = None
    """First batch of the current spike, or None."""

    def limit(self) -> float:
        if len(self.history) < RECENT:
            return math.inf
        median = statistics.median(self.history[-RECENT:])
        # In a run that learns quickly, losses deviate by their trend.
        changes = [after - before for before, after in itertools.pairwise(self.history)]
        middle = statistics.median(changes)
        deviation = 1.4826 * statistics.median(abs(change - middle) for change in changes)
        return median + max(DEVIATIONS * deviation, FRACTION * abs(median))

    def is_spike(self, batch: int, loss: float) -> bool:
        """Add losses that are no spikes to the history."""
        if not math.isfinite(loss) or loss > self.limit():
            self.first = batch if self.first is None else self.first
            return True
        self.first = None
        self.history = [*self.history, loss][-WINDOW:]
        return False
