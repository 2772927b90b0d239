"""Spikes of the loss: far above the steps just before, or no number at all."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass, field

WINDOW = 50
"""Steps whose changes say what is usual."""
RECENT = 8
"""Steps whose median a loss is held against; before there are as many, only what is no number is a spike."""
DEVIATIONS = 8.0
"""How many of the usual deviations of a change (1.4826 times the median absolute one, as in a normal distribution)."""
FRACTION = 0.1
"""And at least this part of the median: a run that has settled deviates by nearly nothing."""


@dataclass
class SpikeWatch:
    """Remembers the losses that were none; `history` of an earlier start may be handed in."""

    history: list[float] = field(default_factory=list)
    first: int | None = None
    """The first batch of the spike that is on; None when none is."""

    def limit(self) -> float:
        """The largest loss that is no spike."""
        if len(self.history) < RECENT:
            return math.inf
        median = statistics.median(self.history[-RECENT:])
        # Changes and not losses: those of a run that learns quickly deviate by what it learns.
        changes = [after - before for before, after in itertools.pairwise(self.history)]
        middle = statistics.median(changes)
        deviation = 1.4826 * statistics.median(abs(change - middle) for change in changes)
        return median + max(DEVIATIONS * deviation, FRACTION * abs(median))

    def is_spike(self, batch: int, loss: float) -> bool:
        """Whether the loss of a batch is a spike; what is none is remembered."""
        if not math.isfinite(loss) or loss > self.limit():
            self.first = batch if self.first is None else self.first
            return True
        self.first = None
        self.history = [*self.history, loss][-WINDOW:]
        return False
