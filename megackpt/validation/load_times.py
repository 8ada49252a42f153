"""How long the phases of a load took.

Owns the record and its text; taking the times is the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds that one rank spent in the phases of a load; they overlap.

    Attributes:
        read: with reads from storage under way.
        exchange: sending to other ranks and receiving from them, waiting for them included.
        copy: copying from buffers into tensors what came from others.
    """

    read: float = 0.0
    exchange: float = 0.0
    copy: float = 0.0


@dataclass(frozen=True, slots=True)
class OverRanks:
    """One phase over all ranks, in seconds."""

    min: float
    mean: float
    max: float

    def __str__(self) -> str:
        return f"min {self.min:.3f} s, mean {self.mean:.3f} s, max {self.max:.3f} s"


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """The phases of a load over all ranks.

    Attributes:
        read, exchange, copy: as `PhaseTimes` says.
    """

    read: OverRanks
    exchange: OverRanks
    copy: OverRanks

    @classmethod
    def over(cls, ranks: Sequence[PhaseTimes]) -> LoadTimes:
        """Summarise the times of all ranks; at least one."""

        def summary(phase: str) -> OverRanks:
            times = [getattr(times, phase) for times in ranks]
            return OverRanks(min(times), sum(times) / len(times), max(times))

        return cls(summary("read"), summary("exchange"), summary("copy"))

    def __str__(self) -> str:
        return "; ".join(f"{field.name}: {getattr(self, field.name)}" for field in fields(self))
