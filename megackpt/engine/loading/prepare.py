"""One rank's load before it reads: the request is flattened, checked against the checkpoint, and planned.

Everything that can fail without reading a tensor fails here, and before memory is allocated for what the
files could not fill.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
import torch

from megackpt.comm import Group
from megackpt.engine.checkpoint.inline_arrays import inline_chunks, with_inline_arrays
from megackpt.engine.checkpoint.opening import (
    check_arrays_complete,
    check_readable,
    read_common_and_references,
)
from megackpt.engine.checkpoint.views import matches_rename, with_renamed_keys
from megackpt.engine.data.tensor_bytes import check_target
from megackpt.engine.loading.common_request import match_common_state
from megackpt.engine.loading.optimizer_names import ordered_as_requested
from megackpt.engine.loading.prepared_load import (
    FlattenedRequest,
    KeptElements,
    PreparedLoad,
    ReadPlan,
    RequestedKeys,
)
from megackpt.engine.loading.shared_targets import SharedTargets
from megackpt.engine.loading.source import Source
from megackpt.entities import PerRankValue, ShardedObject, ShardedStateDict, ShardedTensor
from megackpt.entities.describe import describe
from megackpt.entities.flatten import flatten_state
from megackpt.entities.tree import Steps, dotted, empty_containers, keys_by_container
from megackpt.errors import MismatchError, MissingKeyError, truncated_list
from megackpt.formats.contents import Chunks, Contents
from megackpt.ground.notices import notice
from megackpt.options import LoadOptions
from megackpt.plans.metadata import DTYPES, OBJECT, ArraySpec
from megackpt.plans.planning import plan_load
from megackpt.plans.validation import (
    ArrayReport,
    LoadReport,
    LoadRules,
    UnpaddedShapes,
    check_dtypes_and_shapes,
    check_resharding,
    check_unexpected_keys,
    report_arrays,
)

log = logging.getLogger(__name__)

LOAD_ON_META = (
    "Give it memory first (to_empty), as DTensors need it. Or let load return tensors in host memory, for "
    "load_state_dict(..., assign=True), with LoadOptions(load_on_device=False)."
)


def prepare_load(view: CheckpointView, state: ShardedStateDict, group: Group) -> PreparedLoad:
    """Flatten the request of this rank, check it against the checkpoint, allocate targets and plan. Local.

    Args:
        view: the checkpoint, under the names of the request.
        state: the request.
        group: the ranks.

    Raises:
        MissingKeyError, MismatchError: the checkpoint lacks a key, or holds it with another shape or dtype.
        DeclarationError: the request contradicts itself, or a target cannot be filled in place.
        FormatError: a requested array is stored in a form that cannot be loaded.
        MapError: the map of the view lacks an array of the request.
    """
    request = view.flatten(state, group)
    keys = view.check_keys(request, group)
    loadable = view.loadable()
    containers = {dotted(steps) for steps in empty_containers(state)} - {""}

    targets = SharedTargets.of(view.allocate_targets(request, keys))
    objects = [o for o in request.flattened.objects if o.key not in keys.left_out]

    inline_keys = view.contents.inline
    of_chunks = [t for t in targets.tensors if t.key not in inline_keys]
    of_common = [t for t in targets.tensors if t.key in inline_keys]
    plan = view.plan_reads(request, of_chunks, objects, group)
    inline = view.plan_reads(request, of_common, (), group) if of_common else None
    return PreparedLoad(
        where=view.where,
        source=view.source,
        contents=view.contents,
        rules=view.rules,
        request=request,
        keys=keys,
        idle_patterns=_idle_patterns(
            view.options, view.stored_keys, {*view.contents.arrays, *keys.requested}
        ),
        loadable=loadable,
        empty_containers=sorted(keys_by_container(loadable, containers, keys.requested)),
        targets=targets,
        objects=objects,
        plan=plan,
        inline=inline,
        report=view.report(request, keys, [plan] if inline is None else [plan, inline], objects),
        kept=_kept_elements(targets, plan),
    )


def _kept_elements(targets: SharedTargets, plan: ReadPlan) -> list[KeptElements]:
    """Return the elements of targets that do not become what is read."""
    if not plan.grown and not plan.shrunk:
        return []
    from megackpt.engine.loading.kept_elements import kept_elements

    return kept_elements(targets, plan.grown, plan.shrunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """An opened checkpoint under the names of a request, with the steps of a load before it reads.

    Attributes:
        where: its location, for errors.
        source: where the bytes come from.
        contents: its arrays, under the names that the request uses.
        options: options of the load.
        rules: what to do about differences.
        stored_keys: keys of its arrays, under the names that they are stored with.
        referable: keys to which references of common state are valid.
        absent: steps to plain tensors of the request that the checkpoint has nothing for.
    """

    where: str
    source: Source
    contents: Contents
    options: LoadOptions
    rules: LoadRules
    stored_keys: Collection[str]
    referable: Container[str] = ()
    absent: Set[Steps] = frozenset()

    @classmethod
    def from_source(
        cls, source: Source, state: ShardedStateDict, options: LoadOptions, rules: LoadRules
    ) -> CheckpointView:
        """View a checkpoint by the names that `LoadOptions.rename` and a request's optimizers give. Local.

        Raises:
            FormatError: the common state is damaged.
            DeclarationError, MismatchError: a pattern is invalid, or gives two keys one name.
        """
        stored = with_inline_arrays(source.contents, where=source.location)
        contents, unrenamed = with_renamed_keys(stored, options.rename)
        contents, renumbered, absent = ordered_as_requested(contents, state, where=source.location)
        return cls(
            where=source.location,
            source=source,
            contents=contents,
            options=options,
            rules=rules,
            stored_keys=stored.arrays,
            referable={renumbered.get(key, key) for key in unrenamed},
            absent=absent,
        )

    def loadable(self) -> list[str]:
        """Return the stored keys that `LoadOptions.exclude` does not name."""
        return [key for key in self.contents.arrays if not matches_any(key, self.options.exclude)]

    def flatten(self, state: ShardedStateDict, group: Group) -> FlattenedRequest:
        """Split a request into entities and common state."""
        arrays = self.contents.arrays
        stored_common = read_common_and_references(self.contents, where=self.where)[0]
        common = match_common_state(state, stored_common, arrays, self.referable)
        if others := common.stored_as_other_values:
            lines = [f"{name!r}: stored as {kind}" for name, kind in sorted(others.items())]
            notice(
                log,
                f"{self.where}: the checkpoint has no tensor where the request has one:\n"
                f"{truncated_list(lines)}\nThe state that load returns has the stored values; the tensors of "
                f"the request keep theirs.",
            )
        objects = {key for key, spec in arrays.items() if spec.dtype == OBJECT}
        flattened = flatten_state(
            state,
            rank=group.rank,
            ranks=group.size,
            # An object cannot fill a plain tensor.
            stored=AllKeysBut(objects),
            common=common.steps | self.absent,
            in_host_memory=not self.options.load_on_device,
        )
        requested = {entity.key for entity in flattened.entities}
        return FlattenedRequest(
            flattened,
            common,
            common.arrays(requested, self.contents, self.options),
            common.inline_values(requested, self.contents.inline),
            common.unanswered - objects,
        )

    def check_keys(self, request: FlattenedRequest, group: Group) -> RequestedKeys:
        """Compare the requested keys with the stored ones."""
        flattened, arrays = request.flattened, self.contents.arrays
        keys_of_entities = [entity.key for entity in flattened.entities]
        common_steps = {*request.common_arrays, *request.inline_values}
        requested = frozenset(keys_of_entities) | {request.common.references[s] for s in common_steps}
        excluded = {key for key in requested if matches_any(key, self.options.exclude)}
        check_readable(requested - excluded, self.contents.unreadable, where=self.where)
        excluded |= _kept_per_rank_values(flattened.per_rank, arrays, group.size, self.where)
        # Objects that were stored in an array of another shape.
        others = [o for o in flattened.objects if arrays.get(o.key, o).global_shape != o.global_shape]
        excluded |= {o.key for o in others if o.elsewhere == "keep"}
        excluded |= {t.key for t in flattened.tensors if t.if_missing == "keep" and t.key not in arrays}
        # A missing plain tensor is judged less strictly, unless an entity requests the same key.
        counts = Counter(keys_of_entities)
        # Of the arrays of common state, only those that a plain tensor of the request asks for.
        asked = {request.common.references[steps] for steps in request.common.targets.keys() & common_steps}
        unexpected = check_unexpected_keys(
            (asked | set(keys_of_entities)) - excluded,
            arrays,
            self.rules,
            where=self.where,
            plain={key for key in request.plain_keys if counts[key] == 1},
            advice=flattened.advice(),
        )
        return RequestedKeys(requested, frozenset(excluded), unexpected)

    def allocate_targets(self, request: FlattenedRequest, keys: RequestedKeys) -> list[ShardedTensor]:
        """Return the tensors to fill, each with memory of its own or that of the request.

        Raises:
            FormatError: an array that common state refers to could not be filled by its file.
            DeclarationError: a tensor cannot be filled in place.
        """
        loaded = {s: array for s, array in request.common_arrays.items() if array.key not in keys.left_out}
        plain_targets = request.common.targets  # a property that makes a dict each time
        allocated = sorted(
            {array.key for steps, array in loaded.items() if steps not in plain_targets}
            - self.contents.inline.keys()
        )
        # With replacements the bytes come from several stores, and files of the first one need not be
        # complete.
        if allocated and self.source.only_store is not None:
            check_arrays_complete(self.source.only_store, self.contents.chunks(allocated), allocated)
        tensors = [t for t in request.flattened.tensors if t.key not in keys.left_out]
        tensors += loaded.values()
        for tensor in tensors:
            # Rows of new tokens may stay as they are, and in memory that a load allocates they are 0.
            tensor.init_data(init_fn=torch.empty if tensor.unpadded_shape is None else torch.zeros)
            check_target(tensor, on_meta=LOAD_ON_META)
        return tensors

    def plan_reads(
        self,
        request: FlattenedRequest,
        tensors: Sequence[ShardedTensor],
        objects: Sequence[ShardedObject],
        group: Group,
    ) -> ReadPlan:
        """Compare shapes and dtypes with the stored arrays, and plan the copies from stored chunks.

        The tensors are all inline, or none is.
        """
        requested = describe([*tensors, *objects], rank=group.rank)
        unpadded = {t.key: t.unpadded_shape for t in tensors if t.unpadded_shape is not None}
        allowed = check_dtypes_and_shapes(
            requested,
            self.contents.arrays,
            self.rules,
            where=self.where,
            advice=request.flattened.advice(),
            unpadded=UnpaddedShapes(unpadded, self.contents.unpadded),
        )
        # A row may be resized if its entity allows it, or if a rule allows it for its array.
        may_resize = np.array([a.key in allowed.resized for a in requested.table.arrays], np.bool_)
        requested = replace(requested, resizable=requested.resizable | may_resize[requested.table.array])
        is_inline = bool(tensors) and tensors[0].key in self.contents.inline
        chunks = (
            inline_chunks(self.contents, [t.key for t in tensors], where=self.where)
            if is_inline
            else self.contents.chunks_for([requested.table])
        )
        # Tensors are the first rows. Objects are read as a whole, each from the row of its offset.
        copies = plan_load(requested.take(np.arange(len(tensors))), chunks.table, where=self.where)
        object_rows = _object_rows(objects, chunks, self.where)
        return ReadPlan(requested, tensors, chunks, copies, object_rows, allowed.grown, allowed.shrunk)

    def report(
        self,
        request: FlattenedRequest,
        keys: RequestedKeys,
        plans: Sequence[ReadPlan],
        objects: Sequence[ShardedObject],
    ) -> LoadReport:
        """Report how each array is loaded.

        Raises:
            MismatchError: an array would be resharded, and a rule forbids it.
        """
        reports: tuple[ArrayReport, ...] = ()
        for plan in plans:
            read = plan.requested.take(np.arange(len(plan.tensors)))
            arrays = report_arrays(read, self.contents.arrays, plan.chunks.table, plan.copies)
            reports += tuple(_with_kept(array, plan) for array in arrays) if plan.grown else arrays
        check_resharding(reports, self.rules, where=self.where)
        return LoadReport(
            arrays=reports,
            objects=tuple(o.unique_key for o in objects),
            unexpected=keys.unexpected,
            excluded=keys.excluded,
            transformed=request.flattened.transformed(keys.left_out),
        )


def _with_kept(array: ArrayReport, plan: ReadPlan) -> ArrayReport:
    """Return the report of an array, with the bytes that stay as they are."""
    if array.key not in plan.grown:
        return array
    from megackpt.engine.loading.kept_elements import count_outside

    kept = sum(count_outside(t, plan.grown[t.key]) for t in plan.tensors if t.key == array.key)
    width = DTYPES[array.dtype].itemsize
    return replace(array, padded_nbytes=0, kept_nbytes=kept * width)


@dataclass(frozen=True, slots=True)
class AllKeysBut(Container[str]):
    """All keys but some."""

    others: Set[str]

    def __contains__(self, key: object) -> bool:
        return key not in self.others


def matches_any(key: str, globs: Iterable[str]) -> bool:
    """Return whether a key matches one of the patterns of an option."""
    return any(fnmatchcase(key, glob) for glob in globs)


def _idle_patterns(options: LoadOptions, stored: Collection[str], named: Collection[str]) -> list[str]:
    """Return the patterns of the options that match nothing, as text.

    Args:
        options: with `rename` and `exclude`.
        stored: keys of the checkpoint, under the names that they are stored with.
        named: these keys under the names of the request, and the keys of the request.
    """
    rename = [p for p in options.rename if not any(matches_rename(key, p) for key in stored)]
    exclude = [glob for glob in options.exclude if not any(fnmatchcase(key, glob) for key in named)]
    return [f"rename {{{pattern!r}: ...}}" for pattern in rename] + [f"exclude {glob!r}" for glob in exclude]


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
