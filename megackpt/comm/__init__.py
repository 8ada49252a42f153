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
    check_group,
    encode_error,
    moves_bulk,
    together,
)
from megackpt.comm.known_groups import world_group
from megackpt.comm.linked_group import LinkedGroup
from megackpt.comm.starting import child_environment, without_current_directory
from megackpt.comm.store_group import (
    StoreAddress,
    StoreGroup,
    StoreHost,
    connect_store,
    decode_error,
    host_store,
)
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
    "DeviceGroup",
    "GivenGroup",
    "Group",
    "LinkedGroup",
    "Numbers",
    "Parcel",
    "ReducingGroup",
    "SingleProcess",
    "StoreAddress",
    "StoreGroup",
    "StoreHost",
    "TorchGroup",
    "check_given_group",
    "check_group",
    "check_subgroup",
    "child_environment",
    "compare",
    "connect_store",
    "decode_error",
    "encode_error",
    "from_root",
    "given_by_root",
    "host_store",
    "moves_bulk",
    "subgroup",
    "subgroup_label",
    "subgroup_members",
    "together",
    "together_at_root",
    "without_current_directory",
    "world_group",
]
