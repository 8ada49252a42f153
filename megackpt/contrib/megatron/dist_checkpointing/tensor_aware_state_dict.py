"""A state dict whose tensors can be taken out and put back: what local checkpoints are made of.

nvidia-resiliency-ext keeps checkpoints on the disks of the nodes that train. Its managers move tensors
between devices, processes and nodes by this interface, and store the rest as it is. A local checkpoint is for
the layout that wrote it: nothing is resharded.

Source: Megatron-Core `dist_checkpointing.tensor_aware_state_dict`, for the names.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megackpt.contrib.megatron.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    dict_list_map_outplace,
    extract_matching_values,
    merge,
    nested_values,
)
from megackpt.contrib.megatron.dist_checkpointing.exchange_utils import ShardDistribution
from megackpt.contrib.megatron.dist_checkpointing.mapping import apply_factory_merges
from megackpt.contrib.megatron.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megackpt.contrib.megatron.dist_checkpointing.utils import extract_sharded_base, zip_strict
from megackpt.entities import ShardedBase, ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from megackpt.errors import DeclarationError, MissingKeyError, truncated_list
from megackpt.options import Policy
from megackpt.plans.validation import StrictHandling

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)

ALGORITHMS = ("atomic", "fully_parallel")


def _base_class() -> Any:
    """Return nvidia-resiliency-ext's class; its managers, who ask for it, come with it."""
    try:
        module = importlib.import_module("nvidia_resiliency_ext.checkpointing.local.base_state_dict")
    except ImportError:
        return object
    return module.TensorAwareStateDict


_Base: Any = _base_class()


@dataclass
class MCoreTensorAwareStateDict(_Base):  # type: ignore[misc]
    """One rank's part of a state dict, with the tensors or without them.

    Both algorithms of Megatron-Core are taken and do the same: each rank keeps all that it holds. There
    `fully_parallel` keeps every replica once and exchanges them at the load.

    An object that Megatron-Core's own class has pickled becomes one of this class.

    Attributes:
        common: what is not sharded. Each rank keeps its own.
        sharded_state_dict: the entities, factories built.
    """

    common: StateDict
    sharded_state_dict: ShardedStateDict
    _is_hollow: bool = False
    _devices: dict[int, str] = field(default_factory=dict)  # where tensors were, by position
    _on_other_ranks: set[str] = field(default_factory=set)  # keys of shards that Megatron-Core left out here

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "_devices" in state:
            return
        # Pickled by Megatron-Core's class. It notes on each tensor where it was, and with fully_parallel it
        # leaves the entity without a tensor where another rank keeps that replica.
        self._devices, self._on_other_ranks = {}, set()
        tensors = self._entities()
        kept = [entity for entity in tensors if entity.data is not None or hasattr(entity, "orig_device")]
        self._on_other_ranks = {entity.key for entity in tensors} - {entity.key for entity in kept}
        kept_ids = {id(entity) for entity in kept}
        self.sharded_state_dict, _ = extract_matching_values(
            self.sharded_state_dict,
            lambda leaf: not isinstance(leaf, ShardedTensor) or id(leaf) in kept_ids,
        )
        for number, entity in enumerate(self._entities()):
            if hasattr(entity, "orig_device"):
                self._devices[number] = entity.orig_device
                del entity.orig_device

    @classmethod
    def from_state_dict(
        cls,
        sharded_state_dict: ShardedStateDict,
        algo: str = "fully_parallel",
        parallelization_group: ProcessGroup | None = None,
        cached_metadata: ShardDistribution | None = None,
    ) -> tuple[MCoreTensorAwareStateDict, ShardDistribution]:
        """Return a state dict's own form, and what to give as cached_metadata the next time.

        The tensors are shared with the given state dict, whose entities stay as they are. Collective without
        cached_metadata: then coverage is proved, as by `save`. Common state may differ between ranks, as
        each rank keeps its own: the arguments of Megatron-LM name the rank.

        Raises:
            DeclarationError: there is no such algorithm.
            CoverageError, MismatchError: the proof failed; on every rank.
        """
        _check_algorithm(algo)
        sharded, common = save_preprocess(
            sharded_state_dict,
            validate_access_integrity=cached_metadata is None,
            preprocess_common_before_consistancy_check=lambda common: {},
        )
        sharded = dict_list_map_outplace(copy.copy, sharded)
        return cls(common, sharded), cached_metadata or ShardDistribution({}, set(), {})

    def to_state_dict(
        self,
        sharded_state_dict: ShardedStateDict,
        algo: str = "atomic",
        exchange_algo: str = "broadcast",
        validate_access_integrity: bool = True,
        parallelization_group: ProcessGroup | None = None,
        strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
        return_mismatch_keys: bool = False,
    ) -> Any:
        """Return a state dict with the tensors and objects that are asked for, common state included. Local.

        With return_mismatch_keys also the keys that this rank has not asked for, and those that it has not
        saved, as far as strict looks for them. Nothing is loaded for the latter.

        Raises:
            DeclarationError: the tensors were taken out, or there is no such algorithm.
            MissingKeyError: there are such keys, and strict makes them an error.
        """
        _check_algorithm(algo)
        self._check_hollow(False)
        state = dict_list_map_outplace(lambda leaf: leaf, self.common)
        if not sharded_state_dict:
            return state
        wanted, local, factories = load_preprocess(sharded_state_dict)
        merge(state, local)
        wanted, _ = extract_sharded_base(wanted)
        stored = {_identity(entity): entity.data for entity in nested_values(self.sharded_state_dict)}
        asked = list(nested_values(wanted))
        mode = StrictHandling.of(strict)
        unexpected = {entity.key for entity in asked if _identity(entity) not in stored}
        missing = {identity[0] for identity in stored} - {entity.key for entity in asked}
        self._report_keys(unexpected, missing if mode.looks_for_missing_keys else set(), mode)
        wanted, _ = extract_matching_values(wanted, lambda entity: _identity(entity) in stored)
        wanted = dict_list_map_inplace(lambda entity: stored[_identity(entity)], wanted)
        merge(state, apply_factory_merges(wanted, factories))
        if not return_mismatch_keys:
            return state
        is_reported = mode is not StrictHandling.IGNORE_ALL
        return state, missing if mode.looks_for_missing_keys else set(), unexpected if is_reported else set()

    @property
    def is_hollow(self) -> bool:
        """Whether the tensors have been taken out."""
        return self._is_hollow

    @property
    def common_state_dict(self) -> StateDict:
        """What is not sharded."""
        return self.common

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors, in the order of `pop_tensors`.

        Raises:
            DeclarationError: they were taken out.
        """
        self._check_hollow(False)
        return (tensor for _, _, tensor in self._filled())

    def pop_tensors(self) -> list[torch.Tensor]:
        """Take the tensors out; what remains knows their shapes, dtypes and devices.

        Raises:
            DeclarationError: they were taken out already.
        """
        self._check_hollow(False)
        filled = self._filled()
        for number, entity, tensor in filled:
            self._devices.setdefault(number, tensor.device.type)
            entity.data = None
        self._is_hollow = True
        return [tensor for _, _, tensor in filled]

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors in the places of those that were taken out, in their order; on any device.

        Raises:
            DeclarationError: none were taken out, or there is another number of tensors.
        """
        self._check_hollow(True)
        for entity, tensor in zip_strict(self._entities(), tensor_data):
            entity.data = tensor
        self._is_hollow = False

    def init_tensors(self) -> None:
        """Put empty tensors in the places of those that were taken out, on the devices where those were.

        Raises:
            DeclarationError: none were taken out.
        """
        self._check_hollow(True)
        for number, entity in enumerate(self._entities()):
            entity.init_data(device=self._devices.pop(number, "cpu"))
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace the tensors by copies in host memory; tensors that are such copies already stay.

        Raises:
            DeclarationError: they were taken out.
        """
        self._check_hollow(False)
        for number, entity, tensor in self._filled():
            if number not in self._devices:
                self._devices[number] = tensor.device.type
                entity.data = tensor.detach().to("cpu", non_blocking=non_blocking, copy=True)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move the tensors to the devices where they were.

        Raises:
            DeclarationError: they were taken out.
        """
        self._check_hollow(False)
        for number, entity, tensor in self._filled():
            device = self._devices.pop(number, tensor.device.type)
            entity.data = tensor.to(device, non_blocking=non_blocking)

    def _entities(self) -> list[ShardedTensor]:
        return [leaf for leaf in nested_values(self.sharded_state_dict) if isinstance(leaf, ShardedTensor)]

    def _filled(self) -> list[tuple[int, ShardedTensor, torch.Tensor]]:
        tensors = [(n, entity, entity.data) for n, entity in enumerate(self._entities())]
        lost = [entity.key for _, entity, tensor in tensors if tensor is None]
        if lost:
            raise DeclarationError(
                f"{lost[0]!r} is declared without data, so it cannot be kept. Declare it with its tensor.",
                key=lost[0],
            )
        return [(n, entity, tensor) for n, entity, tensor in tensors if tensor is not None]

    def _report_keys(self, unexpected: set[str], missing: set[str], mode: StrictHandling) -> None:
        """Log keys that only the request or only this rank's part has, or raise them, as the mode says."""
        policies = {mode.on_unexpected} if unexpected else set()
        policies |= {mode.on_missing} if missing else set()
        error = _mismatch(unexpected, missing, on_other_ranks=self._on_other_ranks)
        if Policy.ERROR in policies:
            raise error
        if Policy.WARN in policies:
            log.warning("%s", error.message)

    def _check_hollow(self, expected: bool) -> None:
        if self._is_hollow != expected:
            fault = (
                "The tensors of this state dict were taken out. Put them back with insert_tensors() first."
                if self._is_hollow
                else "The tensors of this state dict are in it. Take them out with pop_tensors() first."
            )
            raise DeclarationError(fault)


def _mismatch(
    unexpected: Collection[str], missing: Collection[str], *, on_other_ranks: Collection[str]
) -> MissingKeyError:
    """Return the error for keys that only the request has, and for those that only the checkpoint has."""
    key = min([*unexpected, *missing], default="")
    text = ""
    if missing:
        text = (
            f"Missing keys: this rank's local checkpoint has {len(missing)} that it does not ask for:\n"
            f"{truncated_list(sorted(missing))}\nAsk for them, or leave them by a mode of strict=.\n"
        )
    if not unexpected:
        return MissingKeyError(text.rstrip(), key=key)
    key = min(unexpected)
    fault = f"{len(unexpected)} keys are asked for in shards that this rank's local checkpoint does not have"
    cure = "A local checkpoint loads only at the layout that wrote it: load a global one instead."
    if key in on_other_ranks:
        cure = (
            "Megatron-Core wrote it with fully_parallel, so these shards are in the files of other ranks. "
            "Copy the files of all ranks into one folder, and load that with megackpt.load(state, folder)."
        )
    names = f"Unexpected keys (for this rank):\n{truncated_list(sorted(unexpected))}"
    return MissingKeyError(f"{text}{fault}, {key!r} among them. {cure} {names}", key=key)


def _check_algorithm(algo: str) -> None:
    if algo not in ALGORITHMS:
        raise DeclarationError(f"algo={algo!r} is not known. Give one of {', '.join(ALGORITHMS)}.")


def _identity(entity: ShardedBase) -> tuple[Any, ...]:
    """Return what tells shards of a rank apart."""
    if isinstance(entity, ShardedObject):
        return (entity.key, tuple(entity.global_shape), tuple(entity.global_offset))
    assert isinstance(entity, ShardedTensor)
    flat = entity.flattened_range
    shard = (flat.start, flat.stop) if flat is not None else None
    return (
        entity.key,
        tuple(entity.global_shape),
        tuple(entity.global_offset),
        tuple(entity.local_shape),
        shard,
    )
