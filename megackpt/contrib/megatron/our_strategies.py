"""Our formats as strategies of Megatron-Core's kind.

A strategy of Megatron-Core's kind moves the sharded part of a state dict. In megackpt a format moves bytes
and the engine does the rest. So these strategies stand for a choice of format, and their methods do a whole
save or load. This module translates a strategy, a `(backend, version)` pair or None into what
`megackpt.save` takes.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any, ClassVar, TypeAlias

import torch.distributed as dist

from megackpt.comm import Group
from megackpt.contrib.megatron.deferred_save import DeferredSave, take_common
from megackpt.contrib.megatron.dist_checkpointing.dict_utils import dict_list_map_outplace, merge
from megackpt.contrib.megatron.dist_checkpointing.strategies.async_utils import AsyncRequest
from megackpt.contrib.megatron.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    StrategyAction,
    resolve_strategy,
    set_megackpt_strategy,
)
from megackpt.contrib.megatron.errors import also_of_torch, naming_install
from megackpt.contrib.megatron.settings import OPTIONS, KnownSettings
from megackpt.contrib.megatron.stored_metadata import stored_metadata, stored_tensors
from megackpt.engine.saving.plan_cache import PlanCache
from megackpt.engine.saving.save_request import SaveRequest, save_request
from megackpt.entities import ShardedStateDict, StateDict
from megackpt.entities.plain_tensors import is_plain_tensor
from megackpt.entities.tree import ABSENT, map_leaves
from megackpt.errors import CommonStateError, DeclarationError
from megackpt.formats.registry import DEFAULT_BACKEND, SaveChoice, check_known, save_strategy
from megackpt.options import KeyRule, Policy, SaveOptions
from megackpt.plans.validation import StrictHandling
from megackpt.run import collective, local

log = logging.getLogger(__name__)

NATIVE = (DEFAULT_BACKEND, 1)
_PACKAGE = "megackpt.contrib.megatron."
_PREPROCESS = "preprocess_common_before_consistancy_check"

SaveArguments: TypeAlias = dict[str, Any]
"""Keyword arguments of `megackpt.save`."""
LoadArguments: TypeAlias = dict[str, Any]
"""Keyword arguments of `megackpt.load`."""


class FormatSaveStrategy(KnownSettings, AsyncSaveShardedStrategy):
    """Saves in one of our formats.

    Attributes:
        backend, version: the format.
        use_cached_ckpt_structure: keep the plan of each structure that this strategy saves. A later save of
            the same structure takes it: ranks compare digests of it, and gather no declarations.

    Raises:
        DeclarationError: there is no such format, or it is only read.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ("backend", "version", "use_cached_ckpt_structure")

    def __init__(self, backend: str, version: int) -> None:
        check_known((backend, version), to_save=True)
        super().__init__(backend, version)
        self.use_cached_ckpt_structure = False
        self._plans = PlanCache()

    @property
    def choice(self) -> SaveChoice:
        """The strategy argument of `megackpt.save`."""
        return (self.backend, self.version)

    @property
    def save_arguments(self) -> SaveArguments:
        """The other arguments of `megackpt.save` that the current settings of this strategy give."""
        return {"plans": self._plans} if self.use_cached_ckpt_structure else {}

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save a whole checkpoint; leaves that are not sharded become its common state. Collective."""
        save_by(self, sharded_state_dict, checkpoint_dir)

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> AsyncRequest:
        """Return a request that saves a whole checkpoint when it is scheduled or executed. Local."""
        return request_by(self, sharded_state_dict, checkpoint_dir)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: every format of ours stores objects."""
        return True


class DetectingLoadStrategy(KnownSettings, LoadShardedStrategy):
    """Loads a checkpoint of any format that megackpt reads; metadata.json names the format.

    Attributes:
        cached_global_metadata: always None; a save here does not use metadata that a load has read.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ("cached_global_metadata",)
    cached_global_metadata: Any = None  # torch.distributed.checkpoint's, in Megatron-Core

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> StateDict:
        """Return the loaded state dict, common state included. Collective."""
        loaded: StateDict = load_by(self, sharded_state_dict, checkpoint_dir)
        return loaded

    def load_tensors_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
        """Return the global arrays without data, by key. Local."""
        return stored_tensors(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
        """Return global arrays and objects without data. Local."""
        return dict(stored_metadata(checkpoint_dir))

    def remove_sharded_tensors(self, checkpoint_dir: str | os.PathLike[str], key_prefix: str) -> None:
        """Remove every array and object whose key begins with key_prefix from a checkpoint. Local."""
        local.remove_sharded_tensors(checkpoint_dir, key_prefix)

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Do nothing: opening a format that cannot be read raises the error."""

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Do nothing: opening a version that cannot be read raises the error."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: every format of ours stores objects."""
        return True


set_megackpt_strategy(StrategyAction.LOAD_SHARDED, lambda backend, version: DetectingLoadStrategy())


def save_choice(strategy: Any) -> SaveChoice:
    """Return what `megackpt.save` takes for a strategy that leaves the work to it: see `is_saved_by_us`.

    Raises:
        DeclarationError: no such format, or a setting is out of range.
    """
    strategy = resolve_strategy(StrategyAction.SAVE_SHARDED, strategy)
    if strategy is None or hasattr(strategy, "write_chunks"):  # a strategy of our own core is taken as it is
        return strategy  # type: ignore[no-any-return]
    choice: SaveChoice = strategy.choice
    return choice


def is_saved_by_us(strategy: Any) -> bool:
    """Return whether a strategy given to `save` stands for a format of ours, and does nothing by itself.

    A subclass of one of ours that has a `save` or `async_save` of its own is a user's strategy.

    Raises:
        DeclarationError: it is no save strategy at all.
    """
    if strategy is None or hasattr(strategy, "write_chunks"):
        return True
    _check_has(strategy, "save", "a save strategy: derive it from SaveShardedStrategy")
    return _is_of_ours(strategy, "choice", ("save", "async_save")) and is_saved_by_us(
        getattr(strategy, "base_strategy", None)
    )


def is_loaded_by_us(strategy: Any) -> bool:
    """Return whether a strategy given to `load` leaves the work to `megackpt.load`, see `is_saved_by_us`.

    Raises:
        DeclarationError: it is no load strategy at all.
    """
    if strategy is None:
        return True
    _check_has(strategy, "load", "a load strategy: derive it from LoadShardedStrategy")
    is_ours = isinstance(strategy, DetectingLoadStrategy) or hasattr(type(strategy), "load_arguments")
    return (
        is_ours
        and _is_of_ours(strategy, "load", ("load",))
        and not has_own_steps(strategy)
        and is_loaded_by_us(getattr(strategy, "base_strategy", None))
    )


def has_own_steps(strategy: Any) -> bool:
    """Return whether a subclass has replaced steps of a load, which `megackpt.load` would not take."""
    return not _is_of_ours(strategy, "load", getattr(type(strategy), "STEPS", ()))


def _check_has(strategy: Any, method: str, what: str) -> None:
    if not callable(getattr(strategy, method, None)):
        raise DeclarationError(
            f"{strategy!r} is not {what}: it has no method {method}(). Give an object of a class with that "
            f"method, or the name of a format."
        )


def _is_of_ours(strategy: Any, attribute: str, methods: tuple[str, ...]) -> bool:
    """Return whether the class has an attribute, and methods that all are defined in this package."""
    cls = type(strategy)
    defined_in = [getattr(getattr(cls, name, None), "__module__", "") for name in methods]
    return hasattr(cls, attribute) and all(name.startswith(_PACKAGE) for name in defined_in)


def save_by(
    strategy: Any,
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    **arguments: Any,
) -> None:
    """Save with `megackpt.save` as a strategy says: its format, and who writes what several ranks hold.

    Collective. Inside of a save by a user's strategy the common state of that is saved as well.
    """
    strategy = resolve_strategy(StrategyAction.SAVE_SHARDED, strategy)
    choice = save_choice(strategy)
    sharded_state_dict, arguments = _enclosed(sharded_state_dict, checkpoint_dir, arguments)
    with naming_install():
        collective.save(
            sharded_state_dict, checkpoint_dir, sharded_strategy=choice, **_all_of(strategy, arguments)
        )


def save_as_rank_0(
    strategy: Any,
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    **arguments: Any,
) -> None:
    """Save as `save_by`; where ranks disagree about common state, store that of rank 0 and warn. Collective.

    So Megatron-Core does: its optimizers of 0.12 have it so with pipeline parallelism.
    """
    try:
        save_by(strategy, sharded_state_dict, checkpoint_dir, **arguments)
    except CommonStateError as error:  # before anything was written, and on every rank
        if not dist.is_initialized() or dist.get_rank() == 0:
            log.warning("%s Rank 0's is stored, as Megatron-Core does.", error)
        arguments[_PREPROCESS] = _nothing_of
        save_by(strategy, sharded_state_dict, checkpoint_dir, **arguments)


def request_by(
    strategy: Any,
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    **arguments: Any,
) -> AsyncRequest:
    """Return a request for what `save_as_rank_0` does with these arguments. Local.

    Tensors are not copied yet. The format is chosen here, so that an unknown one is an error at once.
    """
    strategy = resolve_strategy(StrategyAction.SAVE_SHARDED, strategy)
    choice = save_choice(strategy)
    save_strategy(choice)
    sharded_state_dict, arguments = _enclosed(sharded_state_dict, checkpoint_dir, arguments)
    all_arguments = _all_of(strategy, arguments)

    def request(may_differ: bool) -> SaveRequest:
        compared = {_PREPROCESS: _nothing_of} if may_differ else {}
        return save_request(sharded_state_dict, choice, **(all_arguments | compared))

    deferred = DeferredSave(
        now=lambda: save_as_rank_0(strategy, sharded_state_dict, checkpoint_dir, **arguments),
        request=request,
        options=all_arguments["options"],
        checkpoint_dir=os.fspath(checkpoint_dir),
    )
    return AsyncRequest(deferred, (), [])


def _enclosed(
    state: ShardedStateDict, checkpoint_dir: str | os.PathLike[str], arguments: SaveArguments
) -> tuple[ShardedStateDict, SaveArguments]:
    """Add the common state of a save around this one, which was compared between ranks there."""
    common = take_common(checkpoint_dir)
    if common is None:
        return state, arguments
    whole = dict_list_map_outplace(lambda leaf: leaf, common)
    described = {"content_metadata": whole.pop("content_metadata", None), _PREPROCESS: _nothing_of}
    return merge(whole, state), {**arguments, **described}


def _all_of(strategy: Any, arguments: SaveArguments) -> SaveArguments:
    """Return the arguments of a save, with those that a strategy stands for.

    Tensors of common state are stored there, as by Megatron-Core, and copies that differ are treated as
    `install` says.

    Megatron-LM saves a constant structure with `validate_access_integrity=False` from the second time on.
    Where the plan of an earlier save is kept, the proof is the comparison of digests by which that plan is
    taken, and without it the save would not be spread over ranks. So only common state is left uncompared.
    """
    merged = {**getattr(strategy, "save_arguments", {}), **arguments}
    plans = merged.get("plans")
    if not merged.get("validate_access_integrity", True) and plans is not None and plans.names:
        merged |= {"validate_access_integrity": True, _PREPROCESS: _nothing_of}
    options = merged.get("options") or OPTIONS.save_options
    if options.plain_tensors == "auto":
        options = dataclasses.replace(options, plain_tensors="common")
    if options.sample_replicas is SaveOptions().sample_replicas:
        options = dataclasses.replace(options, sample_replicas=OPTIONS.replica_policy)
    return merged | {"options": options}


def _nothing_of(common: StateDict) -> StateDict:
    """Return the part of common state that must be equal on all ranks: none of it."""
    return {}


def load_by(
    strategy: Any,
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    strict: StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    group: Group | None = None,
) -> Any:
    """Load with `megackpt.load`, and with the exchange that a strategy is set to. Collective.

    Returns the result of `megackpt.load`. If the strategy has an attribute `times`, it gets the times of the
    load.
    """
    strategy = resolve_strategy(StrategyAction.LOAD_SHARDED, strategy)
    arguments = _load_arguments(strategy)
    with also_of_torch(), naming_install():
        loaded, report = collective.load_with_report(
            _without_plain_tensors(sharded_state_dict),
            checkpoint_dir,
            strict=strict,
            group=group,
            **arguments,
        )
    if hasattr(strategy, "times"):
        strategy.times = report.times
    if strict.returns_keys:
        return loaded, set(report.missing), set(report.unexpected)
    return loaded


def _without_plain_tensors(sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """Return a request without its plain tensors: Megatron-Core returns what is stored for them.

    `megackpt.load` would fill them in place, and raise an error where dtypes or shapes differ.
    """
    rest = map_leaves(lambda _, leaf: ABSENT if is_plain_tensor(leaf) else leaf, sharded_state_dict)
    return {} if rest is ABSENT else rest


def _load_arguments(strategy: Any) -> dict[str, Any]:
    """Return the arguments of a load that a strategy stands for, and those of `install`."""
    arguments = {"options": OPTIONS.load_options, **getattr(strategy, "load_arguments", {})}
    if OPTIONS.silent_cast:
        options = arguments["options"]
        converts = KeyRule(keys="*", cast=Policy.IGNORE)
        arguments["options"] = dataclasses.replace(options, rules=(*options.rules, converts))
    return arguments
