"""The stages of an asynchronous save in torch's own format, around `FileSystemWriterAsync`.

Source: Megatron-Core `dist_checkpointing.strategies.state_dict_saver`, for the names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from megackpt.contrib.megatron.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megackpt.contrib.megatron.errors import unsupported_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: Any = None,
    cached_ckpt_structure: Any = None,
    loaded_all_plans: Any = None,
    enable_cache: bool = False,
    metadata_cache: Any = None,
) -> tuple[FileSystemWriterAsync, Any, Any]:
    """Plan a save and copy what this rank writes; return what `save_state_dict_async_finalize` is given.

    Collective. The last four arguments have no effect: every save is planned.

    Raises:
        torch.distributed.checkpoint.CheckpointException: planning failed on a rank; on every rank.
    """
    ranks = _DistWrapper(process_group, dist.is_available() and dist.is_initialized(), coordinator_rank)
    planner = DefaultSavePlanner() if planner is None else planner
    metadata: Any = None

    def plan_here() -> Any:
        planner.set_up_planner(state_dict, is_coordinator=ranks.is_coordinator)
        storage_writer.set_up_storage_writer(ranks.is_coordinator)
        return storage_writer.prepare_local_plan(planner.create_local_plan())

    def plan_for_all(plans: list[Any]) -> list[Any]:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        return storage_writer.prepare_global_plan(plans)

    plan = planner.finish_plan(ranks.reduce_scatter("plan", plan_here, plan_for_all))
    storage_writer.prepare_write_data(plan, planner)
    return storage_writer, metadata, ranks


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync, global_metadata: Any, dist_wrapper: Any
) -> None:
    """Commit what all ranks have written. Collective.

    Raises:
        torch.distributed.checkpoint.CheckpointException: writing failed on a rank; on every rank, and nothing
            is committed.
    """
    dist_wrapper.all_reduce(
        "write",
        storage_writer.retrieve_write_results,
        lambda results: storage_writer.finish(metadata=global_metadata, results=results),
    )


verify_global_md_reuse = unsupported_name(
    "verify_global_md_reuse",
    because="plans of earlier saves are kept by the strategies of megackpt, and compared by them.",
    instead="Use save() with use_cached_ckpt_structure set on the strategy.",
)
