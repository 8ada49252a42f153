"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CosineSchedule:
    """Linear warm-up, then half a cosine down to a minimum.

    Attributes:
        peak: learning rate at the end of the warm-up.
        minimum: learning rate from step `steps` on.
        warmup: steps of warm-up.
        steps: steps of the whole run.
    """

    peak: float
    minimum: float
    warmup: int
    steps: int

    def at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        if step <= self.warmup:
            return self.peak * step / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.minimum + (self.peak - self.minimum) * 0.5 * (1 + math.cos(math.pi * progress))

    def state_dict(self) -> dict[str, float | int]:
        """Return the fields, to be saved; `CosineSchedule(**fields)` is the schedule again."""
        return asdict(self)
