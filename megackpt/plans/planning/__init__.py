"""Plans: which rank writes or reads which bytes, computed from declarations. Pure, over columns."""

from megackpt.plans.planning.copies import CompactCopies, Copies, Reads, StridedCopy, group_reads, plan_reads
from megackpt.plans.planning.load_plan import plan_load
from megackpt.plans.planning.save_plan import (
    SavePlan,
    as_declarations,
    first_of_equal_chunks,
    pack_rows,
    plan_main_replicas,
    plan_merged_save,
    plan_save,
    unpack_rows,
    with_object_sizes,
    with_sizes,
)

__all__ = [
    "CompactCopies",
    "Copies",
    "Reads",
    "SavePlan",
    "StridedCopy",
    "as_declarations",
    "first_of_equal_chunks",
    "group_reads",
    "pack_rows",
    "plan_load",
    "plan_main_replicas",
    "plan_merged_save",
    "plan_reads",
    "plan_save",
    "unpack_rows",
    "with_object_sizes",
    "with_sizes",
]
