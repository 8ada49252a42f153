"""The steps of a training run under one root: when to save, finding the newest, keeping some of them."""

from megackpt.checkpointer.checkpointer import Checkpointer
from megackpt.checkpointer.interval import SaveInterval
from megackpt.checkpointer.retention import KeepBest
from megackpt.checkpointer.step_list import StepList
from megackpt.checkpointer.survey import LastLoad, PassedOver
from megackpt.checkpointer.tiers import LocalTier, MemoryTier, Tier

__all__ = [
    "Checkpointer",
    "KeepBest",
    "LastLoad",
    "LocalTier",
    "MemoryTier",
    "PassedOver",
    "SaveInterval",
    "StepList",
    "Tier",
]
