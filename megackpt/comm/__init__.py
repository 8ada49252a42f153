"""The door to other ranks: messages and bulk data, errors that are common, deadlines."""

from megackpt.comm.agreement import (
    MOST_NUMBERS,
    Numbers,
    ReducingGroup,
    compare,
    from_root,
    given_by_root,
    together_at_root,
)
from megackpt.comm.device_group import DeviceGroup
from megackpt.comm.group import (
    BulkGroup,
    Group,
    Parcel,
    SingleProcess,
    moves_bulk,
    together,
)
from megackpt.comm.known_groups import borrow_group, return_group, world_group
from megackpt.comm.subgroup import GivenGroup, check_subgroup, subgroup, subgroup_label, subgroup_members
from megackpt.comm.torch_group import TorchGroup

__all__ = [
    "MOST_NUMBERS",
    "BulkGroup",
    "DeviceGroup",
    "GivenGroup",
    "Group",
    "Numbers",
    "Parcel",
    "ReducingGroup",
    "SingleProcess",
    "TorchGroup",
    "borrow_group",
    "check_subgroup",
    "compare",
    "from_root",
    "given_by_root",
    "moves_bulk",
    "return_group",
    "subgroup",
    "subgroup_label",
    "subgroup_members",
    "together",
    "together_at_root",
    "world_group",
]
