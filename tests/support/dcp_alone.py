"""torch.distributed.checkpoint in a process without ranks, with each version of torch."""

from __future__ import annotations

import inspect

import torch.distributed.checkpoint as dcp

ALONE: dict[str, bool] = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}
"""For `dcp.save` and `dcp.load`. Older versions lack the argument, and find out by themselves."""
