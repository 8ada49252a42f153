"""One data-parallel replica reads, and broadcasts what it has read.

`load` leaves this to the engine's exchange plan. The steps of Megatron-Core, which move one chunk after the
other, can be called by themselves, and a subclass may replace some of them: then `load` takes these steps.

Source: Megatron-Core up to 0.15, `dist_checkpointing.strategies.two_stage`, for names and signatures.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from megackpt.comm import Group, SingleProcess, errors_on_all_ranks, gather_step, world_group
from megackpt.comm.process_groups import subgroup
from megackpt.contrib.megatron.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    nested_values,
)
from megackpt.contrib.megatron.our_strategies import (
    DetectingLoadStrategy,
    LoadArguments,
    has_own_steps,
    load_by,
)
from megackpt.contrib.megatron.settings import OPTIONS
from megackpt.entities import ShardedBase, ShardedStateDict, ShardedTensor, StateDict
from megackpt.plans.validation import LoadTimes
from megackpt.run import collective

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)
timers: defaultdict[str, list[float]] = defaultdict(list)
"""Seconds that each call of a `timed` function took on this rank, by its name."""

_TIMEOUT_S = 600.0  # as in LoadOptions


def timed(verbose: bool = True) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that adds the time of each call that returns to `timers`; verbose logs it too."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            took = time.perf_counter() - start
            timers[function.__name__].append(took)
            if verbose:
                logger.debug("%s took %.4f s", function.__name__, took)
            return result

        return call

    return decorate


@dataclass
class _ShardedTensorMetadata:
    """A tensor that a rank asks for.

    Attributes:
        global_rank: the rank, among all.
        sharded_tensor_no_data: the tensor without data.
        dist_group_rank: the rank in its data-parallel group.
        dist_group_ranks: the ranks of that group, among all.
        data_size: size of the chunk, in bytes; None if nobody needs to know it.
    """

    global_rank: int
    sharded_tensor_no_data: ShardedTensor
    dist_group_rank: int
    dist_group_ranks: tuple[int, ...]
    data_size: int | None = None


def sharded_tensor_chunk_id(sharded_tensor: ShardedTensor) -> tuple[str, tuple[int, ...]]:
    """Return what tells chunks apart: the key and the offset."""
    return (sharded_tensor.key, tuple(sharded_tensor.global_offset))


class TwoStageDataParallelLoadShardedStrategy(DetectingLoadStrategy):
    """Loads any format: the first rank of the data-parallel group reads and broadcasts to the others.

    In addition to the state, a rank needs memory for at most two tensors, and never more than
    `LoadOptions.exchange_bytes`; one tensor where a subclass has steps of its own. cpu_transfer=False
    broadcasts between devices by the group's own backend, where all ranks load to devices.

    Attributes:
        data_parallel_group: the group; None for all ranks.
        cpu_transfer: whether what is broadcast goes through host memory.
        times: how long the phases of the last load took on all ranks; None before the first one, and where a
            subclass has steps of its own, see `timers`.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ("data_parallel_group", "cpu_transfer", "times")
    STEPS: ClassVar[tuple[str, ...]] = (
        "maybe_init_gloo_group",
        "load_tensor_from_storage",
        "deduplicate_chunks",
        "_build_load_plan",
        "_exchange_loaded_tensors",
        "_distribute_data_to_state_dict",
    )

    def __init__(self, data_parallel_group: ProcessGroup | None, cpu_transfer: bool = True) -> None:
        super().__init__()
        self.data_parallel_group = data_parallel_group
        self.cpu_transfer = cpu_transfer
        self.times: LoadTimes | None = None

    @property
    def global_rank(self) -> int:
        """The number of this rank, among all."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def dp_group_ranks(self) -> tuple[int, ...]:
        """The ranks of the data-parallel group, ascending."""
        return (
            tuple(sorted(dist.get_process_group_ranks(self.data_parallel_group)))
            if dist.is_initialized()
            else (0,)
        )

    @property
    def dp_group_rank(self) -> int:
        """The position of this rank among these."""
        return self.dp_group_ranks.index(self.global_rank)

    @timed()
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> StateDict:
        """Return the loaded state dict, common state included. Collective.

        With steps of its own a subclass loads what is sharded only, and the dict becomes the result, as in
        Megatron-Core.
        """
        if has_own_steps(self):
            self.maybe_init_gloo_group()
            plan = self._build_load_plan(sharded_state_dict)
            self._exchange_loaded_tensors(plan, sharded_state_dict, checkpoint_dir)
            return self._with_objects(sharded_state_dict, checkpoint_dir)
        loaded: StateDict = load_by(self, sharded_state_dict, checkpoint_dir)
        return loaded

    @property
    def load_arguments(self) -> LoadArguments:
        """The arguments of `megackpt.load` that the current settings of this strategy give."""
        return {
            "options": replace(OPTIONS.load_options, exchange="two_stage", cpu_transfer=self.cpu_transfer),
            "exchange_group": self.data_parallel_group,
        }

    def summarize_load_times(self) -> None:
        """Log the times of the last load, over all ranks, and on rank 0 those in `timers`. Collective."""
        logger.info("two-stage load: %s", "nothing was loaded yet" if self.times is None else self.times)
        group = world_group(timeout_s=_TIMEOUT_S)
        own = {name: sum(times) for name, times in timers.items()}
        with gather_step(group, "summarising load times") as step:
            step.data = json.dumps(own).encode()
        ranks: list[dict[str, float]] = [json.loads(answer) for answer in step.results]
        if group.rank == 0:
            for name in sorted({name for times in ranks for name in times}):
                times = [rank.get(name, 0.0) for rank in ranks]
                logger.info("%s: max %.4f s, avg %.4f s", name, max(times), sum(times) / len(times))

    @timed()
    def maybe_init_gloo_group(self) -> None:
        """Connect the ranks of the group. Collective over it; what needs a connection makes it by itself."""
        self._connected()

    @timed(verbose=False)
    def load_tensor_from_storage(
        self, checkpoint_dir: str | os.PathLike[str], ten_meta: _ShardedTensorMetadata
    ) -> torch.Tensor:
        """Return the whole chunk that a tensor is, or is a flat range of, in host memory. Local.

        Raises:
            CheckpointError: as `megackpt.load`.
        """
        asked = ten_meta.sharded_tensor_no_data
        chunk = replace(asked, data=None, replica_id=0, flattened_range=None)
        loaded = collective.load({"chunk": chunk}, checkpoint_dir, group=SingleProcess())
        tensor: torch.Tensor = loaded["chunk"]
        return tensor

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Do nothing: opening a format that cannot be read raises the error."""

    @timed()
    def deduplicate_chunks(self, ten_metas: list[_ShardedTensorMetadata]) -> list[_ShardedTensorMetadata]:
        """Return each chunk once, sorted, for the lowest rank of the group that asks for it. Pure."""
        chosen: dict[Any, _ShardedTensorMetadata] = {}
        for meta in sorted(ten_metas, key=lambda meta: meta.dist_group_rank):
            chosen.setdefault(_chunk_of(meta.sharded_tensor_no_data), meta)
        return [chosen[chunk] for chunk in sorted(chosen)]

    @timed()
    def _build_load_plan(self, sharded_state_dict: ShardedStateDict) -> list[_ShardedTensorMetadata]:
        """Return which rank reads which chunk for the group. Collective over the group."""
        own = [
            _ShardedTensorMetadata(
                self.global_rank,
                tensor.without_data(),
                self.dp_group_rank,
                self.dp_group_ranks,
                math.prod(tensor.local_shape) * tensor.dtype.itemsize,
            )
            for tensor in nested_values(sharded_state_dict)
            if isinstance(tensor, ShardedTensor)
        ]
        gathered: list[Any] = [own]
        if len(self.dp_group_ranks) > 1:
            gathered = [None] * len(self.dp_group_ranks)
            dist.all_gather_object(gathered, own, group=self.data_parallel_group)
        return self.deduplicate_chunks([meta for metas in gathered for meta in metas])

    @timed()
    def _exchange_loaded_tensors(
        self,
        ten_metas: list[_ShardedTensorMetadata],
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: str | os.PathLike[str],
    ) -> None:
        """Read and broadcast one chunk after the other, and fill the state dict. Collective over the group.

        Raises:
            CheckpointError: a rank could not read; on all ranks of the group.
        """
        group = self._connected()
        for meta in ten_metas:
            asked = meta.sharded_tensor_no_data
            with errors_on_all_ranks(group, f"reading {asked.key!r}"):
                if meta.dist_group_rank == self.dp_group_rank:
                    chunk = self.load_tensor_from_storage(checkpoint_dir, meta).contiguous()
                else:
                    chunk = torch.empty(asked.local_shape, dtype=asked.dtype)
            if group.size > 1 and chunk.numel():
                chunk = self._broadcast(chunk, meta, group)
            self._distribute_data_to_state_dict(meta, chunk, sharded_state_dict)

    @timed(verbose=False)
    def _distribute_data_to_state_dict(
        self, ten_meta: _ShardedTensorMetadata, loaded_ten: torch.Tensor, sharded_state_dict: ShardedStateDict
    ) -> None:
        """Fill every tensor of the state dict that is this chunk, or a flat range of it, in place. Local."""

        def filled(leaf: Any) -> Any:
            chunk = _chunk_of(ten_meta.sharded_tensor_no_data)
            if not isinstance(leaf, ShardedTensor) or _chunk_of(leaf) != chunk:
                return leaf
            leaf.init_data()
            assert leaf.data is not None
            flat = leaf.flattened_range
            source = loaded_ten if flat is None else loaded_ten.reshape(-1)[flat]
            leaf.data.detach().copy_(source.reshape(leaf.data.shape))
            return leaf.data

        dict_list_map_inplace(filled, sharded_state_dict)

    def _broadcast(self, chunk: torch.Tensor, meta: _ShardedTensorMetadata, group: Group) -> torch.Tensor:
        if self.cpu_transfer:
            raw: Any = chunk.reshape(-1).view(torch.uint8).numpy()
            group.broadcast(memoryview(raw), root=meta.dist_group_rank)
            return chunk
        on_device = chunk.to(torch.accelerator.current_accelerator() or "cpu")
        root = self.dp_group_ranks[meta.dist_group_rank]
        dist.broadcast(on_device, src=root, group=self.data_parallel_group)
        return on_device

    def _with_objects(self, state: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> StateDict:
        """Return a state dict whose tensors are filled, with its objects loaded, in place. Local."""

        def loaded(leaf: Any) -> Any:
            if not isinstance(leaf, ShardedBase):
                return leaf
            return collective.load({"object": leaf}, checkpoint_dir, group=SingleProcess())["object"]

        filled: StateDict = dict_list_map_inplace(loaded, state)
        return filled

    def _connected(self) -> Group:
        if len(self.dp_group_ranks) == 1:
            return SingleProcess()
        pg = self.data_parallel_group or dist.group.WORLD
        assert pg is not None
        return subgroup(pg, timeout_s=_TIMEOUT_S)


def _chunk_of(tensor: ShardedTensor) -> tuple[Any, ...]:
    """Return what is equal for tensors that the same chunk fills: ranks may cut an array differently."""
    return (*sharded_tensor_chunk_id(tensor), tuple(tensor.local_shape))
