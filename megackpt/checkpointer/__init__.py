"""The steps of a training run under one root: saving them, finding the newest, keeping some of them."""

from megackpt.checkpointer.checkpointer import Checkpointer, StepList

__all__ = ["Checkpointer", "StepList"]
