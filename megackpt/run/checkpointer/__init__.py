"""The steps of a training run under one root: when to save, finding the newest, keeping some of them."""

from megackpt.run.checkpointer.checkpointer import Checkpointer
from megackpt.run.checkpointer.loading import LastLoad, SkippedStep
from megackpt.run.checkpointer.options import (
    Groups,
    KeepBest,
    LocalTier,
    MemoryTier,
    Retention,
    SaveSchedule,
    Tier,
    Tiers,
)
from megackpt.run.checkpointer.root import StepList

__all__ = [
    "Checkpointer",
    "Groups",
    "KeepBest",
    "LastLoad",
    "LocalTier",
    "MemoryTier",
    "Retention",
    "SaveSchedule",
    "SkippedStep",
    "StepList",
    "Tier",
    "Tiers",
]
