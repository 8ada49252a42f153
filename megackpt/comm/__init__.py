"""The door to other ranks: messages and bulk data, errors that are common, deadlines."""

from megackpt.comm.device_group import DeviceGroup
from megackpt.comm.group import (
    BulkGroup,
    Group,
    Parcel,
    SingleProcess,
    moves_bulk,
    together,
    together_at_root,
)
from megackpt.comm.subgroup import GivenGroup, check_subgroup, subgroup, subgroup_label, subgroup_members
from megackpt.comm.torch_group import TorchGroup, borrow_group, return_group, world_group

__all__ = [
    "BulkGroup",
    "DeviceGroup",
    "GivenGroup",
    "Group",
    "Parcel",
    "SingleProcess",
    "TorchGroup",
    "borrow_group",
    "check_subgroup",
    "moves_bulk",
    "return_group",
    "subgroup",
    "subgroup_label",
    "subgroup_members",
    "together",
    "together_at_root",
    "world_group",
]
