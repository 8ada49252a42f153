"""Megatron-LM's local checkpoints (`--non-persistent-ckpt-type local`) in the tiers of a `Checkpointer`.

Megatron-LM saves them with a manager of nvidia-resiliency-ext, whose files load only at the layout that wrote
them. The manager here has the same methods, and its steps are ordinary steps of megackpt: with copies on
other nodes, and loaded at any layout. docs/megatron-compat.md says how Megatron-LM gets it.

Source: nvidia-resiliency-ext 0.4.1 `checkpointing/local/ckpt_managers/base_manager.py`, and Megatron-LM
`megatron/training/checkpointing.py`, for the names and how they are used.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from megackpt.contrib.megatron.dist_checkpointing.dict_utils import dict_list_map_outplace, merge
from megackpt.contrib.megatron.dist_checkpointing.strategies.async_utils import AsyncRequest
from megackpt.contrib.megatron.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
from megackpt.entities import ShardedStateDict, StateDict
from megackpt.errors import CommonStateError, DeclarationError, NotACheckpointError
from megackpt.plans.validation import ReturnsState, StrictHandling
from megackpt.run.checkpointer import Checkpointer

log = logging.getLogger(__name__)

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class StoredStateDict:
    """A step of a `Checkpointer`, which is read when the request is known."""

    checkpointer: Checkpointer
    step: int

    def to_state_dict(
        self,
        sharded_state_dict: ShardedStateDict | None,
        algo: str = "atomic",
        exchange_algo: str = "broadcast",
        parallelization_group: Any = None,
        strict: ReturnsState = StrictHandling.ASSUME_OK_UNEXPECTED,
    ) -> StateDict:
        """Return the loaded state dict, with all of common state. Collective, at any layout.

        Args:
            sharded_state_dict: the request, as for `megackpt.load`; None for common state alone.
            algo: no effect: the `LoadOptions` of the Checkpointer say how ranks read.
            exchange_algo: no effect.
            parallelization_group: no effect.
            strict: as for `megackpt.load`.

        Raises:
            CheckpointError: as `Checkpointer.load`.
        """
        return self.checkpointer.load(sharded_state_dict or {}, self.step, strict=strict)


class TieredCheckpointManager:
    """Has the methods of nvidia-resiliency-ext's managers, over a Checkpointer. All are collective.

    Args:
        checkpointer: with tiers, and with `SaveOptions(plain_tensors="common")`, as Megatron-LM expects all
            of common state from a load. `close` it at the end of the run.

    Raises:
        DeclarationError: the Checkpointer stores tensors of common state in another way.

    Attributes:
        checkpointer: the argument.
        latest_iteration: the result of the last `find_latest`; -1 after a save.
    """

    def __init__(self, checkpointer: Checkpointer) -> None:
        if checkpointer.save_options.plain_tensors != "common":
            raise DeclarationError(
                "The Checkpointer stores tensors of common state as arrays, and Megatron-LM does not request "
                "them. Give it save_options=SaveOptions(plain_tensors='common')."
            )
        self.checkpointer = checkpointer
        self.latest_iteration = -1

    @property
    def local_ckpt_dir(self) -> str:
        """The path of the first tier, or the root if there are no tiers. Megatron-LM prints it."""
        tiers = self.checkpointer.tiers.tiers
        return os.fspath(tiers[0].path) if tiers else str(self.checkpointer.root)

    def save(
        self, state_dict: MCoreTensorAwareStateDict, iteration: int, is_async: bool = False
    ) -> AsyncRequest | None:
        """Save a step and return None; with is_async, return a request for an `AsyncCallsQueue`.

        With is_async the state is copied when this returns, and may change. The request waits in a thread
        until the step is committed, and raises the error of the save when it is finalized.

        Where ranks differ in common state, as in the rank that Megatron-LM's arguments name, rank 0's is
        stored, and a warning says so once.

        Raises:
            DeclarationError: state_dict is not of megackpt, or is_async is given and the Checkpointer saves
                synchronously.
            CheckpointError: as `Checkpointer.save`.
        """
        if not isinstance(state_dict, MCoreTensorAwareStateDict):
            raise DeclarationError(
                f"The state is of {type(state_dict).__module__}, and has to be a MCoreTensorAwareStateDict "
                f"of megackpt. Call megackpt.contrib.megatron.install() before importing Megatron-Core."
            )
        if is_async and not self.checkpointer.async_save:
            raise DeclarationError(
                "is_async is given, and the Checkpointer of this manager saves synchronously. Create it with "
                "Checkpointer(async_save=True), or leave is_async out."
            )
        self.latest_iteration = -1
        state = dict_list_map_outplace(lambda leaf: leaf, state_dict.common)
        merge(state, dict_list_map_outplace(lambda leaf: leaf, state_dict.sharded_state_dict))
        if not self._save(iteration, state):
            log.warning("Iteration %d is not saved: no tier takes it, or its save failed.", iteration)
        if is_async:
            return AsyncRequest(self._wait_in_thread, (), [self.checkpointer.wait])
        self.checkpointer.wait()
        return None

    def _save(self, iteration: int, state: ShardedStateDict) -> bool:
        """Save a step. Where ranks differ in common state, store that of rank 0 and warn once. Collective."""
        try:
            return self.checkpointer.save(iteration, state)
        except CommonStateError as error:  # before anything was written, and on every rank
            if not dist.is_initialized() or dist.get_rank() == 0:
                log.warning("%s Rank 0's is stored, at later saves, too, as Megatron-Core does.", error)
            options = self.checkpointer.save_options
            self.checkpointer.save_options = replace(options, rank0_values=("*",))
            return self.checkpointer.save(iteration, state)

    def find_latest(self) -> int:
        """Return the newest iteration that is stored completely; -1 if there is none."""
        step = self.checkpointer.find_latest()
        self.latest_iteration = -1 if step is None else step
        return self.latest_iteration

    def load(self) -> tuple[StoredStateDict, tuple[int, int, str]]:
        """Return the newest step, which its `to_state_dict` reads, and its id: the iteration, this rank, "".

        Raises:
            NotACheckpointError: there is none.
        """
        if self.latest_iteration == -1 and self.find_latest() == -1:
            raise NotACheckpointError(f"{self.local_ckpt_dir}: no iteration is complete; start without one.")
        rank = dist.get_rank() if dist.is_initialized() else 0
        return StoredStateDict(self.checkpointer, self.latest_iteration), (self.latest_iteration, rank, "")

    def _wait_in_thread(self) -> None:
        """Return when no save is pending. Errors are raised in the thread that trains, by `wait`."""
        while self.checkpointer.is_saving:
            time.sleep(_POLL_S)
