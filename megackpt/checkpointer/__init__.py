"""The steps of a training run under one root: when to save, finding the newest, keeping some of them."""

from megackpt.checkpointer.checkpointer import Checkpointer
from megackpt.checkpointer.interval import SaveInterval
from megackpt.checkpointer.retention import KeepBest
from megackpt.checkpointer.step_list import StepList

__all__ = ["Checkpointer", "KeepBest", "SaveInterval", "StepList"]
