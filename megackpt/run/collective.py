"""The public functions that all ranks of a group call: save and load.

They check and translate arguments; the engine does the work. The arguments have the names and the order of
Megatron-Core's `dist_checkpointing.serialization`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, overload

from megackpt.comm import AnyGroup, Group, group_or_world
from megackpt.engine.checkpoint.manifest import read_manifest
from megackpt.engine.loading.load import load_state
from megackpt.engine.loading.source import LoadRequest
from megackpt.engine.saving.plan_cache import PlanCache
from megackpt.engine.saving.save import save_state
from megackpt.engine.saving.save_request import save_request
from megackpt.entities import ShardedStateDict, StateDict
from megackpt.formats.registry import LoadChoice, SaveChoice, check_format
from megackpt.ground.arguments import check_kind
from megackpt.options import LoadOptions, SaveOptions
from megackpt.plans.validation import LoadReport, ReturnsKeys, ReturnsState, StrictHandling
from megackpt.storage import Location, Store, checked_path, is_url, opened_store

if TYPE_CHECKING:
    from megackpt.maps import MapChoice

Options = TypeVar("Options", SaveOptions, LoadOptions)


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: Location,
    sharded_strategy: SaveChoice = None,
    *,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: Any = None,
    options: SaveOptions | None = None,
    group: Group | None = None,
    plans: PlanCache | None = None,
    spread_group: AnyGroup | None = None,
) -> None:
    """Save a sharded state dict as one checkpoint, atomically and durably.

    Collective: every rank of the group calls it with its own part of the state. When it returns, the
    checkpoint is committed. Until then, an older checkpoint in the same directory does not change. The
    function does not change the state dict, its entities or its tensors.

    Args:
        sharded_state_dict: nested dicts and lists. Leaves are sharded entities or DTensors, which become
            global arrays under their paths, joined with dots. Any other leaf is common state, which must be
            equal on all ranks; rank 0's is stored.
        checkpoint_dir: the directory of this checkpoint, e.g. `ckpt/iter_0000100`; created if needed.
        sharded_strategy: the format: a strategy, `(backend, version)` or a backend name; None for the native
            one.
        validate_access_integrity: check before writing that every element has exactly one main replica and
            that common state is equal on all ranks. False checks nothing and exchanges no declarations: each
            rank then writes its own main replicas.
        preprocess_common_before_consistancy_check: takes the common state and returns the part that must be
            equal on all ranks.
        content_metadata: any value that describes the content; see `load_content_metadata`.
        options: options of the save.
        group: the ranks that save; None for all ranks of torch.distributed, or for this process only if
            torch.distributed is not initialised.
        plans: a cache of the plans of earlier saves. With a cache, ranks exchange digests, and declarations
            only if the structure is new. Each rank passes its own cache, and uses it with the same ranks each
            time.
        spread_group: with `SaveOptions(spread="group")`, the ranks that may write a chunk which several of
            them have; this rank is one of them. A group of megackpt or of torch. The groups of two ranks
            are equal or have no rank in common.

    Raises:
        CoverageError: an element has no main replica, or more than one.
        MismatchError: ranks have different declarations of an array, or different common state.
        UnserializableError: no codec can encode a value; the text names its path in the state dict.
        StorageError: the store raised an error (disk full, no permission, ...).
        RankFailedError: a rank died, is stuck, or raised an error of another class.
        CheckpointError: base class of these and of every other error of a save. It is raised on all ranks,
            and names the rank that failed.

    Source: Megatron-Core `dist_checkpointing.save`.
    """
    options = options_or_default(options, SaveOptions)
    check_kind("plans", plans, PlanCache, give="a PlanCache", optional=True)
    group = group_or_world(group, timeout_s=options.timeout_s)
    request = save_request(
        sharded_state_dict,
        sharded_strategy,
        validate_access_integrity=validate_access_integrity,
        preprocess_common_before_consistancy_check=preprocess_common_before_consistancy_check,
        content_metadata=content_metadata,
        options=options,
        plans=plans,
        spread_group=spread_group,
        equal_arguments={"checkpoint_dir": _comparable_location(checkpoint_dir)},
    )
    with opened_store(checkpoint_dir) as store:
        save_state(request, store, group)


@overload
def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: Location,
    sharded_strategy: LoadChoice = ...,
    *,
    strict: ReturnsKeys,
    options: LoadOptions | None = ...,
    group: Group | None = ...,
    exchange_group: AnyGroup | None = ...,
    maps: MapChoice | None = ...,
    config: Mapping[str, Any] | None = ...,
) -> tuple[StateDict, set[str], set[str]]: ...


@overload
def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: Location,
    sharded_strategy: LoadChoice = ...,
    *,
    strict: ReturnsState = ...,
    options: LoadOptions | None = ...,
    group: Group | None = ...,
    exchange_group: AnyGroup | None = ...,
    maps: MapChoice | None = ...,
    config: Mapping[str, Any] | None = ...,
) -> StateDict: ...


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: Location,
    sharded_strategy: LoadChoice = None,
    *,
    strict: StrictHandling | str = StrictHandling.ASSUME_OK_UNEXPECTED,
    options: LoadOptions | None = None,
    group: Group | None = None,
    exchange_group: AnyGroup | None = None,
    maps: MapChoice | None = None,
    config: Mapping[str, Any] | None = None,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load a checkpoint, saved at any layout, into the tensors of a sharded state dict.

    Collective: every rank of the group calls it with its own request. Tensors are filled in place. The
    result has the structure of the request. In it, each entity is replaced by its loaded tensor or object,
    and non-persistent objects by their own values. A DTensor is returned itself. The common state of the
    checkpoint is merged in.

    A plain tensor is filled with the stored array whose key is its path, joined with dots. So a model without
    DTensors loads a checkpoint that was saved from DTensors. If common state has a value of equal shape and
    dtype at its path (a buffer), the tensor is filled with this value and returned. If nothing is stored for
    its path, the path is an unexpected key, and the default mode logs a warning. Other leaves are dropped.

    Args:
        sharded_state_dict: as for `save`; an entity without data gets a new tensor.
        checkpoint_dir: the directory of a committed checkpoint; its format is detected.
        sharded_strategy: the format that the checkpoint must have: a strategy, `(backend, version)` or a
            backend name; None for any.
        strict: what to do about keys that are only in the request or only in the checkpoint. If a key that is
            not in the checkpoint (unexpected) is not an error, its entity or plain tensor is left out of the
            result.
        options: options of the load, with rules for keys and arrays that differ.
        group: as for `save`.
        exchange_group: with `LoadOptions(exchange=...)`, the ranks that read for each other; this rank is one
            of them. A group of megackpt or of torch; None for all ranks of the load. Different groups have
            no rank in common, and exchange at the same time.
        maps: for a checkpoint in another family's names, such as a Hugging Face folder: the name of the
            family ("llama"), "auto" for that of the config, a `megackpt.maps.Family` or a `RegionMap`. Then
            the request has weights and float32 masters only (see `megackpt.maps.weights_of`); floats are
            cast to the dtypes of the request (to the nearest value, ties to even), which the load report
            says; rows of the vocabulary that are padding become 0; common state is not merged in; and in the
            modes of `strict` in which an unexpected key is an error, an array of the checkpoint that no rank
            asks for is one too.
        config: the config of the other model, a parsed `config.json`; None for that of the folder.

    Returns:
        The state dict. With `RETURN_UNEXPECTED` and `RETURN_ALL` also the missing keys (in the checkpoint,
        and requested by no rank; only `RETURN_ALL` looks for them) and the unexpected keys of this rank.

    Raises:
        NotACheckpointError: there is no committed checkpoint in this directory.
        MissingKeyError: a requested key is not in the checkpoint; the text has the most similar one.
        MapError: there is no map for the checkpoint, or it lacks a requested array.
        MismatchError: the checkpoint has another format than sharded_strategy, or an array is stored with
            another dtype or global shape.
        IntegrityError: stored bytes are damaged, and no other source replaces them (see
            `LoadOptions.on_corrupt`); the text names key, file and byte range.
        CheckpointError: base class of these and of every other error of a load. It is raised on all ranks,
            and names the rank that failed.

    Source: Megatron-Core `dist_checkpointing.load`.
    """
    state, report = load_with_report(
        sharded_state_dict,
        checkpoint_dir,
        sharded_strategy,
        strict=strict,
        options=options,
        group=group,
        exchange_group=exchange_group,
        maps=maps,
        config=config,
    )
    if StrictHandling.of(strict).returns_keys:
        return state, set(report.missing), set(report.unexpected)
    return state


def load_with_report(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: Location,
    sharded_strategy: LoadChoice = None,
    *,
    strict: StrictHandling | str = StrictHandling.ASSUME_OK_UNEXPECTED,
    options: LoadOptions | None = None,
    group: Group | None = None,
    exchange_group: AnyGroup | None = None,
    maps: MapChoice | None = None,
    config: Mapping[str, Any] | None = None,
) -> tuple[StateDict, LoadReport]:
    """Load as `load` does, and return the state dict and a report on this rank's load. Collective.

    The arguments and errors are those of `load`.

    Returns:
        The state dict, in every mode, and the report: print it, or use its fields. It lists missing keys if
        the mode or a rule looks for them.
    """
    options = options_or_default(options, LoadOptions)
    group = group_or_world(group, timeout_s=options.timeout_s)
    request = LoadRequest(
        state=sharded_state_dict,
        # Opened in the first step of the load, whose errors are raised on all ranks.
        open_store=lambda: _opened_in_format(checkpoint_dir, sharded_strategy),
        options=options,
        strict=strict,
        exchange_group=exchange_group,
        maps=maps,
        config=config,
    )
    return load_state(request, group)


@contextmanager
def _opened_in_format(location: Location, choice: LoadChoice) -> Iterator[Store]:
    """Open the store of a checkpoint, and check that it has the chosen format."""
    with opened_store(location) as store:
        if choice is not None:
            check_format(choice, read_manifest(store), where=store.location)
        yield store


def _comparable_location(location: Location) -> str | None:
    """Return the location that must be equal on all ranks; None for a store, whose name may differ."""
    if not isinstance(location, (str, os.PathLike)):
        return None
    text = checked_path(location)
    return text if is_url(text) else os.path.abspath(text)


def options_or_default(options: Options | None, kind: type[Options]) -> Options:
    """Return the options, or the default options for None."""
    check_kind("options", options, kind, give=f"{kind.__name__}(...)", optional=True)
    return kind() if options is None else options
