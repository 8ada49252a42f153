"""One rank's load before it reads: the request is flattened, checked against the checkpoint, and planned.

Everything that can fail without reading a tensor fails here, and before memory is allocated for what the
files could not fill.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import numpy as np
import torch

from megackpt.comm import Group
from megackpt.engine.checkpoint.opening import (
    check_arrays_complete,
    check_readable,
    read_common_and_references,
)
from megackpt.engine.data.tensor_bytes import check_target
from megackpt.engine.loading.common_request import CommonRequest, match_common_state
from megackpt.engine.loading.load_request import Source
from megackpt.engine.loading.shared_targets import SharedTargets
from megackpt.errors import MismatchError, MissingKeyError
from megackpt.formats.contents import Chunks, Contents
from megackpt.mapping import PerRankValue, ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from megackpt.mapping.describe import describe
from megackpt.mapping.flatten import FlattenedState, flatten_state
from megackpt.mapping.tree import Steps, dotted, empty_containers, keys_by_container
from megackpt.metadata import OBJECT, ArraySpec, DeclaredChunks
from megackpt.notices import notice
from megackpt.options import LoadOptions
from megackpt.planning import Copies, plan_load
from megackpt.validation import (
    LoadReport,
    LoadRules,
    PhaseTimes,
    check_dtypes_and_shapes,
    check_resharding,
    check_unexpected_keys,
    report_arrays,
)

log = logging.getLogger(__name__)

LOAD_ON_META = (
    "Give it memory first (to_empty), or load with LoadOptions(load_on_device=False): the state dict that "
    "load returns then holds tensors in host memory, for load_state_dict(..., assign=True). DTensors need "
    "memory."
)


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of a reader when it has filled the tensors of a load.

    Attributes:
        object_bytes: the bytes of each object.
        times: how long the phases took on this rank.
    """

    object_bytes: Sequence[bytes]
    times: PhaseTimes


@dataclass(frozen=True, slots=True)
class RequestedKeys:
    """Keys that one rank requests, by the way they are handled.

    Attributes:
        requested: all of them.
        excluded: keys that are not loaded because an option or a declaration says so.
        unexpected: keys that the checkpoint lacks.
    """

    requested: frozenset[str]
    excluded: frozenset[str]
    unexpected: frozenset[str]

    @property
    def left_out(self) -> frozenset[str]:
        """Keys for which nothing is loaded."""
        return self.excluded | self.unexpected


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The reads of one rank.

    Attributes:
        requested: declarations of the tensors, then of the objects.
        tensors: what is read into.
        chunks: the stored chunks that hold them.
        copies: from these chunks into the tensors.
        object_rows: row of `chunks.table` of each object.
    """

    requested: DeclaredChunks
    tensors: Sequence[ShardedTensor]
    chunks: Chunks
    copies: Copies
    object_rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class Addition:
    """A number to add to loaded values, which another family stores with another zero.

    Attributes:
        values: what is read into.
        added: the number.
    """

    values: torch.Tensor
    added: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedLoad:
    """One rank's load when everything is known that can be known before a tensor's bytes are read.

    Attributes:
        where: location of the checkpoint, for errors.
        source: where the bytes come from.
        contents: the opened checkpoint, its keys under the names that the request uses.
        rules: what to do about differences.
        flattened: the request, flattened.
        common: the part of the request for common state.
        common_arrays: arrays that common state refers to, those that are left out as well, by steps.
        keys: the requested keys.
        loadable: stored keys that `LoadOptions.exclude` does not name.
        empty_containers: names of empty dicts and lists of the request for which something is stored.
        filled: tensors that are filled with stored values of common state, by the steps of the value.
        targets: memory that is filled.
        objects: the objects that are loaded.
        plan: what is read.
        report: how each array is loaded.
        additions: numbers to add to what was read.
        our_names: the names in the request of stored keys, as text; empty if they are the same.
        map_digest: of the map between the names; empty without one.
        read_ratio: with a map, how many times the bytes that this rank needs it would read by itself.
    """

    where: str
    source: Source
    contents: Contents
    rules: LoadRules
    flattened: FlattenedState
    common: CommonRequest
    common_arrays: Mapping[Steps, ShardedTensor]
    keys: RequestedKeys
    loadable: Sequence[str]
    empty_containers: Sequence[str]
    filled: Mapping[Steps, torch.Tensor]
    targets: SharedTargets
    objects: Sequence[ShardedObject]
    plan: ReadPlan
    report: LoadReport
    additions: Sequence[Addition] = ()
    our_names: Mapping[str, str] = field(default_factory=dict)
    map_digest: str = ""
    read_ratio: float = 1.0

    def clear_padding(self) -> None:
        """Set the tensors of which not every element is stored to 0."""
        padded = {array.key for array in self.report.arrays if array.padded_nbytes}
        for tensor in self.targets.tensors:
            if tensor.key in padded and tensor.data is not None:
                tensor.data.detach().zero_()

    def finish(self, object_bytes: Sequence[bytes]) -> StateDict:
        """Return the loaded state dict, when the tensors are read.

        Args:
            object_bytes: bytes of each object.

        Raises:
            MismatchError: two keys were loaded into the same memory, and are stored with different values.
            FormatError: an object cannot be decoded.
        """
        with torch.no_grad():
            for addition in self.additions:
                addition.values.detach().add_(addition.added)
        self.targets.copy_to_shared()
        for entity, data in zip(self.objects, object_bytes, strict=True):
            entity.data = self.contents.decode_object(data, f"{self.where}: object {entity.unique_key!r}")
        left_out, targets = self.keys.left_out, self.common.targets
        # An excluded array does not change the plain tensor that it would fill.
        arrays = {
            steps: targets[steps] if array.key in left_out else array.data
            for steps, array in self.common_arrays.items()
            if array.key not in left_out or steps in targets
        }
        common = self.common.loaded(self.filled, arrays)
        shared = {steps for steps in self.filled if self.targets.is_shared(dotted(steps))}
        values = self.common.values_of(shared, self.filled) if shared else {}
        self.targets.check(self.where, values)
        state: StateDict = self.flattened.unflatten(common, self.keys.unexpected)
        return state


def prepare_load(
    state: ShardedStateDict, source: Source, options: LoadOptions, rules: LoadRules, group: Group
) -> PreparedLoad:
    """Flatten the request of this rank, check it against the checkpoint, allocate targets and plan. Local.

    Raises:
        MissingKeyError, MismatchError: the checkpoint lacks a key, or holds it with another shape or dtype.
        DeclarationError: the request contradicts itself, or a target cannot be filled in place.
        FormatError: a requested array is stored in a form that cannot be loaded.
    """
    where = source.location
    contents, unrenamed = with_options_renamed(source.contents, options)
    arrays = contents.arrays
    objects = {key for key, spec in arrays.items() if spec.dtype == OBJECT}
    common = match_common_state(
        state, read_common_and_references(contents, where=where)[0], arrays, unrenamed
    )
    flattened = flatten_state(
        state,
        rank=group.rank,
        ranks=group.size,
        stored=_AllKeysBut(objects),
        common=common.steps,
        in_host_memory=not options.load_on_device,
    )
    common_arrays = common.arrays({e.key for e in flattened.entities}, arrays, options)
    plain_keys = common.unanswered - objects
    keys = _check_keys(flattened, common_arrays.values(), plain_keys, contents, options, rules, group, where)
    filled = common.filled_targets(options)
    loadable = [key for key in arrays if not _matches(key, options.exclude)]
    containers = {dotted(steps) for steps in empty_containers(state)} - {""}

    tensors = _allocate_targets(flattened, common, common_arrays, keys, source, contents)
    values = {dotted(steps): t for steps, t in filled.items() if steps not in common.references}
    targets = SharedTargets.of(tensors, values)
    loaded_objects = [o for o in flattened.objects if o.key not in keys.left_out]

    plan = _plan_reads(targets.tensors, loaded_objects, contents, rules, group, where)
    read_tensors = plan.requested.take(np.arange(len(tensors)))
    reports = report_arrays(read_tensors, arrays, plan.chunks.table, plan.copies)
    check_resharding(reports, rules, where=where)
    return PreparedLoad(
        where=where,
        source=source,
        contents=contents,
        rules=rules,
        flattened=flattened,
        common=common,
        common_arrays=common_arrays,
        keys=keys,
        loadable=loadable,
        empty_containers=sorted(keys_by_container(loadable, containers, keys.requested)),
        filled=filled,
        targets=targets,
        objects=loaded_objects,
        plan=plan,
        report=LoadReport(
            arrays=reports,
            objects=tuple(o.unique_key for o in loaded_objects),
            unexpected=keys.unexpected,
            excluded=keys.excluded,
            transformed=flattened.transformed(keys.left_out),
        ),
    )


def with_options_renamed(stored: Contents, options: LoadOptions) -> tuple[Contents, Container[str]]:
    """Return contents with keys renamed as `LoadOptions.rename` says, and the keys that keep their names."""
    if not options.rename:
        return stored, stored.arrays
    from megackpt.engine.checkpoint.renamed_contents import with_renamed_keys

    return with_renamed_keys(stored, options.rename)


def _check_keys(
    flattened: FlattenedState,
    common_arrays: Iterable[ShardedTensor],
    plain_keys: Set[str],
    contents: Contents,
    options: LoadOptions,
    rules: LoadRules,
    group: Group,
    where: str,
) -> RequestedKeys:
    """Compare the requested keys with the stored ones; plain_keys are names of plain tensors."""
    keys_of_entities = [entity.key for entity in flattened.entities]
    requested = frozenset(keys_of_entities) | {array.key for array in common_arrays}
    excluded = {key for key in requested if _matches(key, options.exclude)}
    check_readable(requested - excluded, contents.unreadable, where=where)
    excluded |= _kept_per_rank_values(flattened.per_rank, contents.arrays, group.size, where)
    excluded |= _kept_objects(flattened.objects, contents.arrays)
    excluded |= {t.key for t in flattened.tensors if t.if_missing == "keep" and t.key not in contents.arrays}
    # A missing plain tensor is judged less strictly, unless an entity requests the same key.
    counts = Counter(keys_of_entities)
    unexpected = check_unexpected_keys(
        requested - excluded,
        contents.arrays,
        rules,
        where=where,
        plain={key for key in plain_keys if counts[key] == 1},
    )
    return RequestedKeys(requested, frozenset(excluded), unexpected)


def _allocate_targets(
    flattened: FlattenedState,
    common: CommonRequest,
    common_arrays: Mapping[Steps, ShardedTensor],
    keys: RequestedKeys,
    source: Source,
    contents: Contents,
) -> list[ShardedTensor]:
    """Return the tensors to fill, each with memory of its own or that of the request.

    Raises:
        FormatError: an array that common state refers to could not be filled by its file.
        DeclarationError: a tensor cannot be filled in place.
    """
    loaded = {steps: array for steps, array in common_arrays.items() if array.key not in keys.left_out}
    plain_targets = common.targets  # a property that makes a dict each time
    allocated = {array.key for steps, array in loaded.items() if steps not in plain_targets}
    if allocated and source.only_store is not None:
        check_arrays_complete(source.only_store, contents.chunks(sorted(allocated)), sorted(allocated))
    tensors = [t for t in flattened.tensors if t.key not in keys.left_out]
    tensors += loaded.values()
    for tensor in tensors:
        tensor.init_data()
        check_target(tensor, on_meta=LOAD_ON_META)
    return tensors


def _plan_reads(
    tensors: Sequence[ShardedTensor],
    objects: Sequence[ShardedObject],
    contents: Contents,
    rules: LoadRules,
    group: Group,
    where: str,
) -> ReadPlan:
    """Compare shapes and dtypes with the stored arrays, and plan the copies from stored chunks."""
    requested = describe([*tensors, *objects], rank=group.rank)
    resized = check_dtypes_and_shapes(requested, contents.arrays, rules, where=where)
    # A row may be resized if its entity allows it, or if a rule allows it for its array.
    may_resize = np.array([a.key in resized for a in requested.table.arrays], np.bool_)
    requested = replace(requested, resizable=requested.resizable | may_resize[requested.table.array])
    chunks = contents.chunks_for([requested.table])
    copies = plan_load(requested.take(np.arange(len(tensors))), chunks.table, where=where)
    return ReadPlan(requested, tensors, chunks, copies, _object_rows(objects, chunks, where))


@dataclass(frozen=True, slots=True)
class _AllKeysBut(Container[str]):
    """All keys but some."""

    others: Set[str]

    def __contains__(self, key: object) -> bool:
        return key not in self.others


def _matches(key: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(key, glob) for glob in globs)


def _kept_per_rank_values(
    per_rank: Mapping[str, PerRankValue], stored: Mapping[str, ArraySpec], ranks: int, where: str
) -> set[str]:
    """Return the keys of per-rank values that were stored by another number of ranks and are kept.

    Raises:
        MismatchError: a value must not be kept.
    """
    kept = set()
    for key, value in per_rank.items():
        if key not in stored or stored[key].global_shape == (ranks,):
            continue
        before = stored[key].global_shape
        difference = f"{where}: {key!r} was stored for each of {before} ranks and this job has {ranks}"
        if value.elsewhere == "error":
            raise MismatchError(
                f"{difference}. A value of one rank belongs to no other: load on as many ranks, leave the "
                f'key out, or declare it with elsewhere="keep" and set it anew.',
                key=key,
                path=where,
            )
        notice(log, f"{difference}: every rank keeps its own value.")
        kept.add(key)
    return kept


def _kept_objects(objects: Iterable[ShardedObject], stored: Mapping[str, ArraySpec]) -> set[str]:
    """Return the keys of objects that were stored in an array of another shape and are kept."""
    return {
        o.key
        for o in objects
        if o.elsewhere == "keep" and o.key in stored and stored[o.key].global_shape != o.global_shape
    }


def _object_rows(objects: Sequence[ShardedObject], chunks: Chunks, where: str) -> list[int]:
    """Return the row of each object in the table of the chunks.

    Raises:
        MissingKeyError: no object is stored at an offset.
    """
    if not objects:
        return []
    rows = chunks.object_rows()
    missing = [o.unique_key for o in objects if (o.key, o.global_offset) not in rows]
    if missing:
        raise MissingKeyError(
            f"{where} has no object {missing[0]!r} ({len(missing)} are missing). Ask for the offsets that "
            f"were saved; megackpt.load_sharded_metadata() lists them.",
            key=missing[0],
            path=where,
        )
    return [rows[o.key, o.global_offset] for o in objects]
