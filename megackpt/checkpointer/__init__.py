"""The steps of a training run under one root: saving them, finding the newest, keeping some of them."""

from megackpt.checkpointer.checkpointer import Checkpointer, StepList
from megackpt.checkpointer.survey import LastLoad, PassedOver
from megackpt.checkpointer.tiers import LocalTier, MemoryTier, Tier

__all__ = ["Checkpointer", "LastLoad", "LocalTier", "MemoryTier", "PassedOver", "StepList", "Tier"]
