"""A prepared load: what one rank knows before it reads tensors, and the steps after it has read them.

`prepare` makes one. A reader fills the targets; then `PreparedLoad.finish` makes the state dict.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megackpt.engine.checkpoint.common_arrays import with_tensors
from megackpt.engine.data.read import read_tensors
from megackpt.engine.loading.common_request import CommonRequest
from megackpt.engine.loading.shared_targets import SharedTargets
from megackpt.engine.loading.source import Source
from megackpt.entities import ShardedObject, ShardedTensor, StateDict
from megackpt.entities.flatten import FlattenedState
from megackpt.entities.tree import Steps
from megackpt.formats.contents import Chunks, Contents
from megackpt.options import LoadOptions
from megackpt.plans.metadata import DeclaredChunks
from megackpt.plans.planning import Copies
from megackpt.plans.validation import LoadReport, LoadRules, PhaseTimes

if TYPE_CHECKING:
    from megackpt.maps import RegionMap
    from megackpt.maps.requests import MappedTensor


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
class FlattenedRequest:
    """The request of one rank, flattened.

    Attributes:
        flattened: its entities and other leaves.
        common: the part for common state.
        common_arrays: arrays that common state refers to and that are read, by steps.
        inline_values: tensors of inline arrays that nothing asks for, by steps.
        plain_keys: names of plain tensors for which common state has no value.
        map: the map to the names of the checkpoint, with our keys as the request has them; None without one.
    """

    flattened: FlattenedState
    common: CommonRequest
    common_arrays: Mapping[Steps, ShardedTensor]
    inline_values: Mapping[Steps, torch.Tensor]
    plain_keys: Set[str]
    map: RegionMap | None = None


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
        """Keys that are not loaded."""
        return self.excluded | self.unexpected


@dataclass(frozen=True, slots=True)
class MappedParts:
    """The tensors of a request as parts of arrays with the names of another family.

    Attributes:
        tensors: the tensors of the request.
        parts: of each tensor, its parts.
        our_names: the names in the request of stored keys, as text.
        map_digest: of the map between the names, equal on all ranks that have the same.
        read_ratio: how many times the bytes that this rank needs it would read by itself.
    """

    tensors: Sequence[ShardedTensor]
    parts: Sequence[Sequence[MappedTensor]]
    our_names: Mapping[str, str]
    map_digest: str
    read_ratio: float

    def add(self) -> None:
        """Add to the loaded values what another family stores with another zero."""
        with torch.no_grad():
            for part in itertools.chain.from_iterable(self.parts):
                if part.added and part.theirs.data is not None:
                    part.theirs.data.detach().add_(part.added)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The reads of one rank.

    Attributes:
        requested: declarations of the tensors, then of the objects.
        tensors: what is read into: with a map, views of the tensors of the request.
        chunks: the stored chunks that hold them.
        copies: from these chunks into the tensors.
        object_rows: row of `chunks.table` of each object.
        by_map: the tensors of the request as parts of stored arrays; None if the names are the same.
        grown, shrunk: shapes by key; see `AllowedDifferences`.
    """

    requested: DeclaredChunks
    tensors: Sequence[ShardedTensor]
    chunks: Chunks
    copies: Copies
    object_rows: Sequence[int]
    grown: Mapping[str, tuple[int, ...]]
    shrunk: Mapping[str, tuple[int, ...]]
    by_map: MappedParts | None = None


@dataclass(frozen=True, slots=True)
class KeptElements:
    """Elements of a target that do not become what is read, such as the rows of new tokens.

    Attributes:
        target: a view of them in the memory that is read into.
        values: what they become instead: a copy of them from before the load, or 0 for padding.
    """

    target: torch.Tensor
    values: torch.Tensor

    def put_back(self) -> None:
        """Set the elements to their values."""
        self.target.copy_(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedLoad:
    """One rank's load when everything is known that can be known before a tensor's bytes are read.

    Attributes:
        where: location of the checkpoint, for errors.
        source: where the bytes come from.
        contents: the opened checkpoint, its keys under the names that the request uses, or those of its map.
        rules: what to do about differences.
        request: the request, flattened, with what is left out of the load.
        keys: the requested keys.
        loadable: stored keys that `LoadOptions.exclude` does not name.
        empty_containers: names of empty dicts and lists of the request for which something is stored.
        targets: memory that is filled.
        objects: the objects that are loaded.
        plan: what is read.
        inline: what is copied from tensors of common state; None for nothing.
        report: how each array is loaded.
        idle_patterns: of `LoadOptions.rename` and `exclude`, those that match no stored and no requested key.
        kept: elements that stored ones may be read over, and what they become.
    """

    where: str
    source: Source
    contents: Contents
    rules: LoadRules
    request: FlattenedRequest
    keys: RequestedKeys
    loadable: Sequence[str]
    empty_containers: Sequence[str]
    targets: SharedTargets
    objects: Sequence[ShardedObject]
    plan: ReadPlan
    inline: ReadPlan | None
    report: LoadReport
    idle_patterns: Sequence[str]
    kept: Sequence[KeptElements]

    @property
    def stored_keys(self) -> frozenset[str]:
        """The requested keys, by the names that the checkpoint has for them."""
        by_map = self.plan.by_map
        if by_map is None:
            return self.keys.requested
        return frozenset(part.theirs.key for part in itertools.chain.from_iterable(by_map.parts))

    def clear_padding(self) -> None:
        """Set to 0 the tensors that the checkpoint stores only in part."""
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
        if self.inline is not None:
            read_tensors(self.inline.chunks, self.inline.copies, self.inline.tensors, LoadOptions())
        # Before the copies to shared targets: these change the memory that was read into.
        with torch.no_grad():
            for kept in self.kept:
                kept.put_back()
        if self.plan.by_map is not None:
            self.plan.by_map.add()
        self.targets.copy_to_shared()
        for entity, data in zip(self.objects, object_bytes, strict=True):
            entity.data = self.contents.decode_object(data, f"{self.where}: object {entity.unique_key!r}")
        request, left_out = self.request, self.keys.left_out
        targets = request.common.targets
        # An excluded array does not change the plain tensor that it would fill.
        arrays: dict[Steps, torch.Tensor | None] = {
            steps: targets[steps] if array.key in left_out else array.data
            for steps, array in request.common_arrays.items()
            if array.key not in left_out or steps in targets
        }
        arrays |= {
            steps: tensor
            for steps, tensor in request.inline_values.items()
            if request.common.references[steps] not in left_out
        }
        # A reference without a tensor is left out.
        common = with_tensors(request.common.stored, arrays)
        self.targets.check(self.where)
        state: StateDict = request.flattened.unflatten(common, self.keys.unexpected)
        return state
