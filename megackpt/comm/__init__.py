"""The door to other ranks: small messages, errors that are common, deadlines."""

from megackpt.comm.group import Group, SingleProcess, together, together_at_root
from megackpt.comm.torch_group import TorchGroup, independent_group, world_group

__all__ = [
    "Group",
    "SingleProcess",
    "TorchGroup",
    "independent_group",
    "together",
    "together_at_root",
    "world_group",
]
