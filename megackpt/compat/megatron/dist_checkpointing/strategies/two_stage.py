"""One data-parallel replica reads, and broadcasts what it has read.

Source: Megatron-Core up to 0.15, `dist_checkpointing.strategies.two_stage`, for the names.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from megackpt.compat.megatron.ours import DetectingLoadStrategy, LoadArguments, load_by
from megackpt.compat.megatron.refusal import refuse, refused
from megackpt.mapping import ShardedStateDict, ShardedTensor, StateDict
from megackpt.options import LoadOptions
from megackpt.validation import LoadTimes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

_PLANNED = {
    "because": "a plan says which bytes are read and sent when, and the engine carries it out.",
    "instead": "Use load() of the strategy; LoadReport.times says how long its phases took.",
}


class TwoStageDataParallelLoadShardedStrategy(DetectingLoadStrategy):
    """Loads any format: the first rank of the data-parallel group reads and broadcasts to the others.

    A rank needs memory for two tensors at most beside the state, and never more than
    `LoadOptions.exchange_bytes`. cpu_transfer=False broadcasts between devices by the group's own backend,
    where all ranks load to devices.

    Attributes:
        times: how long the phases of the last load took on all ranks; None before the first one.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ("data_parallel_group", "cpu_transfer", "times")

    def __init__(self, data_parallel_group: ProcessGroup | None, cpu_transfer: bool = True) -> None:
        super().__init__()
        self.data_parallel_group = data_parallel_group
        self.cpu_transfer = cpu_transfer
        self.times: LoadTimes | None = None

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> StateDict:
        """Return the loaded state dict, common state included. Collective."""
        loaded: StateDict = load_by(self, sharded_state_dict, checkpoint_dir)
        return loaded

    @property
    def load_arguments(self) -> LoadArguments:
        """What of `megackpt.load`'s arguments this strategy stands for."""
        return {
            "options": LoadOptions(exchange="two_stage", cpu_transfer=self.cpu_transfer),
            "exchange_group": self.data_parallel_group,
        }

    def summarize_load_times(self) -> None:
        """Log how long the phases of the last load took: least, mean and most over all ranks. Local."""
        logger.info("two-stage load: %s", "nothing was loaded yet" if self.times is None else self.times)

    def maybe_init_gloo_group(self) -> None:
        """Do nothing: a load makes the group it needs."""

    def load_tensor_from_storage(self, checkpoint_dir: str | os.PathLike[str], ten_meta: Any) -> NoReturn:
        """Refuse: single tensors are not read by themselves.

        Raises:
            UnsupportedError: always.
        """
        refuse("TwoStageDataParallelLoadShardedStrategy.load_tensor_from_storage", **_PLANNED)

    def deduplicate_chunks(self, ten_metas: list[Any]) -> NoReturn:
        """Refuse: what ranks ask for twice is read once as it is.

        Raises:
            UnsupportedError: always.
        """
        refuse("TwoStageDataParallelLoadShardedStrategy.deduplicate_chunks", **_PLANNED)


def sharded_tensor_chunk_id(sharded_tensor: ShardedTensor) -> tuple[str, tuple[int, ...]]:
    """Return what tells chunks apart: the key and the offset."""
    return (sharded_tensor.key, tuple(sharded_tensor.global_offset))


timed = refused("timed", **_PLANNED)
