"""Plans: declarations in, who writes or reads what out. Pure, over columns."""

from megackpt.planning.assign import assign_writers
from megackpt.planning.blocks import BlockCopy, Blocks
from megackpt.planning.copies import Copies
from megackpt.planning.exchange import ExchangePlan, plan_exchange
from megackpt.planning.load_plan import plan_load
from megackpt.planning.nodes import Nodes
from megackpt.planning.own_rows import pack_rows, unpack_rows
from megackpt.planning.parity import parity_groups, parity_writer
from megackpt.planning.read_plan import Reads, group_reads, needed_ranges, plan_reads
from megackpt.planning.readers import Readers
from megackpt.planning.save_plan import (
    CopyPlan,
    SavePlan,
    first_of_equal_chunks,
    object_sizes,
    plan_copy,
    plan_merged_save,
    plan_own,
    plan_save,
    with_object_sizes,
    with_sizes,
)

__all__ = [
    "BlockCopy",
    "Blocks",
    "Copies",
    "CopyPlan",
    "ExchangePlan",
    "Nodes",
    "Readers",
    "Reads",
    "SavePlan",
    "assign_writers",
    "first_of_equal_chunks",
    "group_reads",
    "needed_ranges",
    "object_sizes",
    "pack_rows",
    "parity_groups",
    "parity_writer",
    "plan_copy",
    "plan_exchange",
    "plan_load",
    "plan_merged_save",
    "plan_own",
    "plan_reads",
    "plan_save",
    "unpack_rows",
    "with_object_sizes",
    "with_sizes",
]
