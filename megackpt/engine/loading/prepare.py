"""One rank's side of a load: what is asked of a checkpoint, held against what is stored, and planned.

Owns everything that can be known before a tensor's bytes are read, and the reading itself, by this rank alone
or by an exchange. In which order ranks meet is up to `load`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from megackpt.codec import ArrayReference
from megackpt.comm import Group
from megackpt.engine.checkpoint.common_arrays import array_references, map_common, with_tensors
from megackpt.engine.checkpoint.opening import (
    check_arrays_complete,
    check_readable,
    read_common_and_references,
)
from megackpt.engine.checkpoint.renamed_contents import with_renamed_keys
from megackpt.engine.data.read import probe_chunk, read_chunk, read_tensors
from megackpt.engine.data.tensor_bytes import check_target
from megackpt.engine.loading.exchange import ExchangeRanks, RankRequest, load_by_exchange
from megackpt.engine.loading.fallback import Fallback
from megackpt.engine.loading.shared_targets import SharedTargets
from megackpt.engine.state.flatten import FlattenedState, flatten_state
from megackpt.errors import MismatchError, MissingKeyError
from megackpt.formats.contents import Chunks, Contents
from megackpt.mapping import PerRankValue, ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from megackpt.mapping.describe import describe
from megackpt.mapping.plain_tensors import (
    can_be_filled,
    fill_in_place,
    is_plain_tensor,
    match_common_leaves,
    plain_tensors,
)
from megackpt.mapping.tree import (
    ABSENT,
    Steps,
    add_step,
    dotted,
    empty_containers,
    iter_leaves,
    keys_by_container,
    same_name_error,
)
from megackpt.metadata import OBJECT, ArraySpec
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
    rename_keys,
    report_arrays,
)

log = logging.getLogger(__name__)

_LOAD_ON_META = (
    "Give it memory first (to_empty), or load with LoadOptions(load_on_device=False): the state dict that "
    "load returns then holds tensors in host memory, for load_state_dict(..., assign=True). DTensors need "
    "memory."
)


class PreparedLoad:
    """One rank's load with everything known that can be known before a tensor's bytes are read."""

    def __init__(
        self,
        state: ShardedStateDict,
        fallback: Fallback,
        options: LoadOptions,
        rules: LoadRules,
        group: Group,
    ) -> None:
        where = fallback.location
        self.where = where
        self.rules = rules
        self.fallback = fallback
        stored = fallback.open()
        self.contents = with_renamed_keys(stored, options.rename)
        common = read_common_and_references(self.contents, where=where)[0]
        self.common, references = _referring(common, stored, options.rename)
        plain = plain_tensors(state)
        places = _places(self.common) if plain else frozenset()
        matched = _matched(plain, self.common, self.contents.arrays) if plain else {}
        _refuse_same_names(plain, matched, references)
        objects = {key for key, spec in self.contents.arrays.items() if spec.dtype == OBJECT}
        self.flattened: FlattenedState = flatten_state(
            state,
            rank=group.rank,
            ranks=group.size,
            stored=_AllBut(objects),
            common=places | matched.keys(),
            in_host_memory=not options.load_on_device,
        )
        entities = {e.key for e in self.flattened.entities}
        given = {leaf: plain[steps] for steps, leaf in matched.items()}
        whole = {
            place: _whole(self.contents.arrays[key], given.get(place), options)
            for place, key in references.items()
            if place in given or key not in entities
        }
        self.asked = sorted(entities | {tensor.key for tensor in whole.values()})
        excluded = {k for k in self.asked if any(fnmatchcase(k, glob) for glob in options.exclude)}
        check_readable(set(self.asked) - excluded, self.contents.unreadable, where=where)
        arrays = self.contents.arrays
        excluded |= _kept_elsewhere(self.flattened.per_rank, arrays, group.size, where)
        excluded |= _kept_objects(self.flattened.objects, arrays)
        self.unexpected = check_unexpected_keys(
            set(self.asked) - excluded,
            arrays,
            rules,
            where=where,
            plain=_plain_only(
                self.flattened, {dotted(p) for p in plain.keys() - places - matched.keys()} - objects
            ),
        )
        self.plain = {
            leaf: plain[steps]
            for steps, leaf in matched.items()
            if _is_filled(dotted(steps), plain[steps], options)
        }
        self._may_load = [k for k in arrays if not any(fnmatchcase(k, glob) for glob in options.exclude)]
        empty = {dotted(steps) for steps in empty_containers(state)} - {""}
        self.empty = sorted(keys_by_container(self._may_load, empty, set(self.asked)))
        left_out = self.unexpected | excluded
        self.tensors = [t for t in self.flattened.tensors if t.key not in left_out]
        self.whole = {place: t for place, t in whole.items() if t.key not in left_out}
        self.kept = {place: t for place, t in given.items() if place in whole and place not in self.whole}
        self._check_claims(tensor.key for place, tensor in self.whole.items() if place not in given)
        self.tensors += self.whole.values()
        for tensor in self.tensors:
            tensor.init_data()
            check_target(tensor, on_meta=_LOAD_ON_META)
        by_value = {dotted(leaf): t for leaf, t in self.plain.items() if leaf not in references}
        self.shared = SharedTargets(self.tensors, by_value)
        self.tensors = self.shared.tensors
        self.objects = [o for o in self.flattened.objects if o.key not in left_out]
        requested = describe([*self.tensors, *self.objects], rank=group.rank)
        resized = check_dtypes_and_shapes(requested, arrays, rules, where=where)
        may_resize = np.array([a.key in resized for a in requested.table.arrays], np.bool_)
        requested = replace(requested, resizable=requested.resizable | may_resize[requested.table.array])
        self.requested = requested
        self.object_bytes: list[bytes] = []
        self.blobs: list[torch.Tensor] = []
        self.chunks: Chunks = self.contents.chunks_for([requested.table])
        tensors = requested.take(np.arange(len(self.tensors)))
        self.copies: Copies = plan_load(tensors, self.chunks.table, where=where)
        self.object_rows = _object_rows(self.objects, self.chunks, where)
        reports = report_arrays(tensors, arrays, self.chunks.table, self.copies)
        check_resharding(reports, rules, where=where)
        self.report = LoadReport(
            arrays=reports,
            objects=tuple(o.unique_key for o in self.objects),
            unexpected=self.unexpected,
            excluded=frozenset(excluded),
        )

    def _check_claims(self, keys: Iterable[str]) -> None:
        """Refuse arrays that no file could fill, before memory is taken for them.

        Raises:
            FormatError: there are such.
        """
        taken, store = sorted(set(keys)), self.fallback.only_store
        if taken and store is not None:
            check_arrays_complete(store, self.contents.chunks(taken), taken)

    def unasked_below(self, names: Set[str], asked: Set[str]) -> dict[str, list[str]]:
        """Return the stored keys below these names that are not among those asked for, by name."""
        return keys_by_container(self._may_load, names, asked)

    def asked_below(self, names: Set[str]) -> list[str]:
        """Return the keys below these names that this rank asks for."""
        return [key for keys in keys_by_container(self.asked, names).values() for key in keys]

    def make_room(self, exchange: ExchangeRanks) -> None:
        """Take memory for the objects that an exchange brings, before it begins: others wait in it.

        Raises:
            FormatError: an object is longer than its file.
        """
        if exchange.group.size == 1:
            return
        if exchange.holders is None:  # else files may be with other ranks, and have been looked at there
            for row in self.object_rows:
                probe_chunk(self.chunks, row)
        lengths = self.chunks.table.nbytes[self.object_rows].tolist()
        self.blobs = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in lengths]

    def read(self, options: LoadOptions, exchange: ExchangeRanks | None) -> PhaseTimes | None:
        """Fill the tensors and the bytes of objects; None if another rank that this one needs has failed."""
        padded = {a.key for a in self.report.arrays if a.padded_nbytes}
        for tensor in self.tensors:
            if tensor.key in padded and tensor.data is not None:
                tensor.data.detach().zero_()
        if exchange is not None and exchange.group.size > 1:
            wanted = RankRequest(self.requested, self.tensors, self.blobs)
            times = load_by_exchange(self.contents, wanted, exchange, options, where=self.where)
            self.object_bytes = [blob.numpy().tobytes() for blob in self.blobs]
            self.shared.put()
            return times
        began = time.perf_counter()
        read_tensors(self.chunks, self.copies, self.tensors, options)
        self.object_bytes = [read_chunk(self.chunks, row) for row in self.object_rows]
        self.shared.put()
        return PhaseTimes(read=time.perf_counter() - began)

    def finish(self) -> StateDict:
        """Decode the objects, and return the loaded state dict."""
        for entity, data in zip(self.objects, self.object_bytes, strict=True):
            where = f"{self.where}: object {entity.unique_key!r}"
            entity.data = self.contents.decode_object(data, where)
        common = fill_in_place(self.common, self.plain)
        common = with_tensors(common, self.kept | {place: t.data for place, t in self.whole.items()})
        self.shared.check(self.where, self._shared_values())
        loaded: StateDict = self.flattened.finish(common, self.unexpected)
        return loaded

    def _shared_values(self) -> dict[str, torch.Tensor]:
        """Return what common state has for the plain tensors that share memory with other targets."""
        wanted = {leaf for leaf in self.plain if self.shared.shares(dotted(leaf))}
        if not wanted:
            return {}
        return {
            dotted(steps): leaf
            for steps, leaf in iter_leaves(self.common, (), step=add_step)
            if steps in wanted and is_plain_tensor(leaf) and can_be_filled(self.plain[steps], leaf)
        }


def _referring(common: Any, stored: Contents, rename: Mapping[str, str]) -> tuple[Any, dict[Steps, str]]:
    """Return common state without references to arrays that are gone, or have another name; and the others.

    Arrays are gone where `remove_sharded_tensors` has removed them.
    """
    names = rename_keys(stored.arrays, rename)
    references = {
        place: key
        for place, key in array_references(common).items()
        if names.get(key) == key and stored.arrays[key].dtype != OBJECT
    }

    def kept(steps: Steps, leaf: Any) -> Any:
        return leaf if steps in references or not isinstance(leaf, ArrayReference) else ABSENT

    remaining = map_common(kept, common)
    return {} if remaining is ABSENT else remaining, references


def _refuse_same_names(
    plain: Iterable[Steps], matched: Mapping[Steps, Steps], references: Mapping[Steps, str]
) -> None:
    """Check that an array that common state refers to is not asked for by its name at another place as well.

    Raises:
        DeclarationError: it is.
    """
    asked = {references[leaf]: steps for steps, leaf in matched.items() if leaf in references}
    for steps in plain if asked else ():
        if steps not in matched and (name := dotted(steps)) in asked:
            raise same_name_error(name, [steps, asked[name]])


def _whole(spec: ArraySpec, given: torch.Tensor | None, options: LoadOptions) -> ShardedTensor:
    """Declare all of an array: in the given tensor, where that can be filled in place, or in a new one."""
    shape, dtype = spec.global_shape, getattr(torch, spec.dtype)
    is_filled = (
        given is not None
        and _is_filled(spec.key, given, replace(options, exclude=()))
        and can_be_filled(given, torch.empty(shape, dtype=dtype, device="meta"))
    )
    return ShardedTensor(spec.key, given if is_filled else None, dtype, shape, shape, (0,) * len(shape))


@dataclass(frozen=True, slots=True)
class _AllBut(Container[str]):
    """All keys but some."""

    others: Set[str]

    def __contains__(self, key: object) -> bool:
        return key not in self.others


def _places(common: Any) -> frozenset[Steps]:
    """Return the steps to the leaves of common state, and to the dicts and lists on the way."""
    found: set[Steps] = set()
    if isinstance(common, (dict, list)):
        for steps, _ in iter_leaves(common, (), step=add_step):
            while steps and steps not in found:
                found.add(steps)
                steps = steps[:-1]
    return frozenset(found)


def _matched(plain: Iterable[Steps], common: Any, arrays: Mapping[str, ArraySpec]) -> dict[Steps, Steps]:
    """Return which leaf of common state answers each plain tensor, by the steps to both."""
    if not isinstance(common, (dict, list)):
        return {}
    known = {key for key, spec in arrays.items() if spec.dtype != OBJECT}
    return match_common_leaves(plain, (steps for steps, _ in iter_leaves(common, (), step=add_step)), known)


def _plain_only(flattened: FlattenedState, plain: Iterable[str]) -> set[str]:
    """Return the paths of plain tensors that are asked for, and no entity besides asks for the same key."""
    asked = Counter(entity.key for entity in flattened.entities)
    return {path for path in plain if asked[path] == 1}


def _is_filled(path: str, tensor: torch.Tensor, options: LoadOptions) -> bool:
    """Say whether a plain tensor for which there is common state is filled with it in place."""
    is_here = options.load_on_device or tensor.device.type == "cpu"
    return is_here and not any(fnmatchcase(path, glob) for glob in options.exclude)


def _kept_elsewhere(
    per_rank: Mapping[str, PerRankValue], stored: Mapping[str, ArraySpec], ranks: int, where: str
) -> set[str]:
    """Return the keys of per-rank values that were stored by another number of ranks and may be kept.

    Raises:
        MismatchError: one of them may not.
    """
    kept = set()
    for key, value in per_rank.items():
        if key not in stored or stored[key].global_shape == (ranks,):
            continue
        before = stored[key].global_shape
        said = f"{where}: {key!r} was stored for each of {before} ranks and this job has {ranks}"
        if value.elsewhere == "error":
            raise MismatchError(
                f"{said}. A value of one rank belongs to no other: load on as many ranks, leave the key "
                f"out, or "
                f'declare it with elsewhere="keep" and set it anew.',
                key=key,
                path=where,
            )
        notice(log, f"{said}: every rank keeps its own value.")
        kept.add(key)
    return kept


def _kept_objects(objects: Iterable[ShardedObject], stored: Mapping[str, ArraySpec]) -> set[str]:
    """Return the keys of objects that were stored in an array of another shape and may be kept."""
    return {
        o.key
        for o in objects
        if o.elsewhere == "keep" and o.key in stored and stored[o.key].global_shape != o.global_shape
    }


def _object_rows(objects: Sequence[ShardedObject], chunks: Chunks, where: str) -> list[int]:
    """Return the stored row of each object."""
    if not objects:
        return []
    rows = _rows_by_place(chunks)
    absent = [o.unique_key for o in objects if (o.key, o.global_offset) not in rows]
    if absent:
        raise MissingKeyError(
            f"{where} has no object {absent[0]!r} ({len(absent)} are missing). Ask for the offsets that "
            f"were saved; "
            f"megackpt.load_sharded_metadata() lists them.",
            key=absent[0],
            path=where,
        )
    return [rows[o.key, o.global_offset] for o in objects]


def _rows_by_place(chunks: Chunks) -> Mapping[tuple[str, tuple[int, ...]], int]:
    """Return the rows of objects by their keys and offsets."""
    table = chunks.table
    is_object = np.array([a.dtype == OBJECT for a in table.arrays], np.bool_)
    places = {}
    for row in np.flatnonzero(is_object[table.array]).tolist():
        spec = table.arrays[int(table.array[row])]
        places[spec.key, tuple(table.start[row, : len(spec.global_shape)].tolist())] = row
    return places
