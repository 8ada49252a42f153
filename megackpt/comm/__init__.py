"""Communication between ranks: messages, bulk bytes, errors that are raised on all ranks, deadlines.

`TorchGroup`, which only jobs of several ranks need, is imported at its first use. `subgroups` has groups of
some of the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megackpt.comm.collectives import (
    CompareStep,
    broadcast_from_rank_0,
    compare_step,
    errors_on_all_ranks,
    gather_step,
    rank_0_errors_on_all_ranks,
    scatter_step,
)
from megackpt.comm.group import (
    SUMMAND_BITS,
    Group,
    PeerBuffer,
    SingleProcess,
    check_group,
    encode_error,
    join_fields,
    split_fields,
)
from megackpt.comm.process_groups import AnyGroup, group_or_world, world_group
from megackpt.ground.lazy_names import lazy_names

if TYPE_CHECKING:
    from megackpt.comm.torch_group import TorchGroup
else:  # type checkers would accept any name
    __getattr__ = lazy_names(__name__, {"megackpt.comm.torch_group": ("TorchGroup",)})

__all__ = [
    "SUMMAND_BITS",
    "AnyGroup",
    "CompareStep",
    "Group",
    "PeerBuffer",
    "SingleProcess",
    "TorchGroup",
    "broadcast_from_rank_0",
    "check_group",
    "compare_step",
    "encode_error",
    "errors_on_all_ranks",
    "gather_step",
    "group_or_world",
    "join_fields",
    "rank_0_errors_on_all_ranks",
    "scatter_step",
    "split_fields",
    "world_group",
]
