"""Who takes part in a command: this process alone, or all that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megackpt.comm import Group, SingleProcess, world_group


@contextmanager
def taking_part(*, timeout_s: float) -> Iterator[Group]:
    """Give the group of all ranks that the environment tells of, and let go of it at the end."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield SingleProcess()
        return
    dist.init_process_group("gloo")
    try:
        group = world_group(timeout_s=timeout_s)
        yield group
        group.all_gather(b"")  # nobody goes while another still needs the connections
    finally:
        dist.destroy_process_group()
