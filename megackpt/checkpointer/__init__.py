"""The steps of a training run under one root: when to save, finding the newest, keeping some of them."""

from megackpt.checkpointer.checkpointer import Checkpointer
from megackpt.checkpointer.options import (
    Groups,
    KeepBest,
    LocalTier,
    MemoryTier,
    Retention,
    SaveSchedule,
    Tier,
    Tiers,
)
from megackpt.checkpointer.step_list import StepList
from megackpt.checkpointer.survey import LastLoad, PassedOver

__all__ = [
    "Checkpointer",
    "Groups",
    "KeepBest",
    "LastLoad",
    "LocalTier",
    "MemoryTier",
    "PassedOver",
    "Retention",
    "SaveSchedule",
    "StepList",
    "Tier",
    "Tiers",
]
