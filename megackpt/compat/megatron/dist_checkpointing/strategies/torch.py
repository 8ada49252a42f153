"""The format torch_dist. Source: Megatron-Core `dist_checkpointing.strategies.torch`, for the names."""

from __future__ import annotations

from megackpt.compat.megatron.ours import DetectingLoadStrategy, FormatSaveStrategy
from megackpt.compat.megatron.refusal import refused
from megackpt.formats.torch_dist import TorchDistSaveStrategy

_PLUMBING = {
    "because": "it is how Megatron-Core hands its entities to torch.distributed.checkpoint, and they are "
    "never handed there.",
    "instead": "Use save() and load().",
}
MSC_PREFIX = "msc://"
"""Prefix of the object-store paths that Megatron-Core takes; megackpt takes a Store of its own instead."""


class TorchDistSaveShardedStrategy(FormatSaveStrategy):
    """Saves in the format of torch.distributed.checkpoint.

    thread_count is how many files each rank writes at the same time. What the others tune in Megatron-Core's
    writer is in `megackpt.SaveOptions` here, or needs no tuning: main replicas are all that is written, and
    plans are kept by a `megackpt.PlanCache`.

    Raises:
        DeclarationError: thread_count is below 1.
    """

    def __init__(
        self,
        backend: str,
        version: int,
        keep_only_main_replica: bool = True,
        thread_count: int = 2,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
    ) -> None:
        super().__init__(backend, version)
        self.keep_only_main_replica = keep_only_main_replica
        self.thread_count = thread_count
        self.cached_metadata = cached_metadata
        self.separation_hint = separation_hint
        self.choice = TorchDistSaveStrategy(thread_count=thread_count)


class TorchDistLoadShardedStrategy(DetectingLoadStrategy):
    """Loads a checkpoint of any format that can be read here, as its metadata.json says."""

    def __init__(self) -> None:
        super().__init__()


def register_default_torch_strategies() -> None:
    """Do nothing: our strategies are there without being registered."""


MCoreLoadPlanner = refused("MCoreLoadPlanner", **_PLUMBING)
MCoreMetadata = refused("MCoreMetadata", **_PLUMBING)
MCoreSavePlan = refused("MCoreSavePlan", **_PLUMBING)
MCoreSavePlanner = refused("MCoreSavePlanner", **_PLUMBING)
flatten_state_dict = refused("flatten_state_dict", **_PLUMBING)
get_reformulation_metadata = refused("get_reformulation_metadata", **_PLUMBING)
mcore_to_pyt_state_dict = refused("mcore_to_pyt_state_dict", **_PLUMBING)
sharded_tensor_to_torch_sharded_tensor = refused("sharded_tensor_to_torch_sharded_tensor", **_PLUMBING)
