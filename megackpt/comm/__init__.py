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
from megackpt.comm.group import (
    BulkGroup,
    Group,
    Parcel,
    SingleProcess,
    check_group,
    encode_error,
    moves_bulk,
    together,
)
from megackpt.comm.known_groups import world_group
from megackpt.comm.subgroup import (
    GivenGroup,
    check_given_group,
    check_subgroup,
    subgroup,
    subgroup_label,
    subgroup_members,
)
from megackpt.comm.torch_group import TorchGroup

__all__ = [
    "MOST_NUMBERS",
    "BulkGroup",
    "GivenGroup",
    "Group",
    "Numbers",
    "Parcel",
    "ReducingGroup",
    "SingleProcess",
    "TorchGroup",
    "check_given_group",
    "check_group",
    "check_subgroup",
    "compare",
    "encode_error",
    "from_root",
    "given_by_root",
    "moves_bulk",
    "subgroup",
    "subgroup_label",
    "subgroup_members",
    "together",
    "together_at_root",
    "world_group",
]
