"""Prepares one rank's load from a checkpoint with the names of another family, before it reads.

The request has our names, the checkpoint has others. Each tensor of the request becomes views of its
memory, and each view is a box of an array of the other family. So each rank reads only the elements of its
own tensors, at any layout, and no array is assembled first.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from megackpt.comm import Group
from megackpt.engine.checkpoint.opening import check_readable, read_common
from megackpt.engine.checkpoint.views import with_views
from megackpt.engine.data.tensor_bytes import check_target
from megackpt.engine.loading.common_request import CommonRequest
from megackpt.engine.loading.mapped_report import check_casts, report_mapped_arrays
from megackpt.engine.loading.prepare import LOAD_ON_META, with_options_renamed
from megackpt.engine.loading.prepared_load import Addition, PreparedLoad, ReadPlan, RequestedKeys
from megackpt.engine.loading.shared_targets import SharedTargets
from megackpt.engine.loading.source import LoadRequest, Source
from megackpt.entities import ShardedTensor
from megackpt.entities.describe import describe, torch_dtype
from megackpt.entities.flatten import FlattenedState, flatten_state
from megackpt.errors import DeclarationError, MapError, MismatchError, MissingKeyError, truncated_list
from megackpt.formats.contents import Contents
from megackpt.maps import RegionMap, bound_to
from megackpt.maps.family import chosen_map
from megackpt.maps.requests import MappedTensor, is_weight, mapped_tensors, parameter_key
from megackpt.plans.metadata import OBJECT, ArraySpec
from megackpt.plans.planning import plan_load
from megackpt.plans.planning.read_sizes import read_ratio
from megackpt.plans.validation import LoadReport, LoadRules
from megackpt.storage import digest_of


def prepare_mapped_load(request: LoadRequest, source: Source, rules: LoadRules, group: Group) -> PreparedLoad:
    """Flatten the request of this rank, find its elements in the other family's arrays, and plan. Local.

    Raises:
        MapError: there is no map for the checkpoint, or it lacks an array of the request.
        DeclarationError: the request has more than weights, or a target cannot be filled in place.
        MissingKeyError, MismatchError: the checkpoint lacks an array that the map names, or holds it with
            another shape; or the model has another shape than the map.
    """
    where, options = source.location, request.options
    contents = with_options_renamed(source.contents, options)[0]
    assert request.maps is not None
    config = _config_of(request, contents, where)
    made = _with_stored_padding(
        chosen_map(request.maps, config, contents.arrays, where=where), contents.arrays
    )
    flattened = flatten_state(
        request.state,
        rank=group.rank,
        ranks=group.size,
        stored=_EveryKey(),
        in_host_memory=not options.load_on_device,
    )
    requested = frozenset(tensor.key for tensor in flattened.tensors)
    excluded = frozenset(k for k in requested if any(fnmatchcase(k, glob) for glob in options.exclude))
    _check_only_weights(flattened, excluded, where)

    names = _Names.of(made, {parameter_key(key) for key in requested - excluded}, where)
    _check_known(requested - excluded, names)
    _check_stored(requested - excluded, contents, names)
    # After the check of shapes: a view can only split dims of the stored shape that the map expects.
    contents = names.viewed(contents)
    targets = _targets(flattened, excluded, names)

    parts = [[*mapped_tensors(tensor, parameter_key(tensor.key), names.made)] for tensor in targets.tensors]
    views = [part.theirs for of_tensor in parts for part in of_tensor]
    check_casts(targets.tensors, parts, contents.arrays, rules, where=where)
    plan = _plan_reads(views, contents, group, where)
    return PreparedLoad(
        where=where,
        source=source,
        contents=contents,
        rules=rules,
        flattened=flattened,
        # From another family nothing but weights is loaded.
        common=CommonRequest({}, {}, {}, {}, frozenset()),
        common_arrays={},
        inline=None,
        # By the names of the other family, as missing keys are looked for among the stored ones.
        keys=RequestedKeys(frozenset(view.key for view in views), excluded, frozenset()),
        loadable=(),
        empty_containers=(),
        targets=targets,
        objects=(),
        plan=plan,
        report=LoadReport(
            arrays=report_mapped_arrays(targets.tensors, parts, contents.arrays, names.made),
            excluded=excluded,
            transformed=flattened.transformed(excluded),
        ),
        additions=[
            Addition(part.theirs.data, part.added)
            for of_tensor in parts
            for part in of_tensor
            if part.added and part.theirs.data is not None
        ],
        our_names=names.ours_by_theirs,
        map_digest=_digest(made),
        read_ratio=_read_ratio(plan, targets.tensors, parts),
    )


def _config_of(request: LoadRequest, contents: Contents, where: str) -> Mapping[str, object] | None:
    """Return the config of the other model: that of the request, or that of a Hugging Face folder."""
    if request.config is not None or isinstance(request.maps, RegionMap):
        return request.config
    content = read_common(contents, where=where)[1]
    return content.get("huggingface_config") if isinstance(content, dict) else None


def _with_stored_padding(made: RegionMap, stored: Mapping[str, ArraySpec]) -> RegionMap:
    """Return the map with the padded rows that arrays of the other family have in this checkpoint."""
    right = dict(made.right)
    for key, array in made.right.items():
        shape = stored[key].global_shape if key in stored else ()
        # An array that is not stored has the shape (), which is never greater.
        if array.is_padded and shape[:1] > array.stored[:1] and array.stored == array.viewed:
            padded = (shape[0], *array.stored[1:])
            right[key] = array._replace(stored=padded, viewed=padded)
    return replace(made, right=right)


@dataclass(frozen=True, slots=True)
class _Names:
    """A map bound to the keys of a request, with texts for errors.

    Attributes:
        made: the map.
        ours_by_theirs: our keys of each array of the other family, with those of layers one by one: the same
            on all ranks, whatever a rank stacks.
        where: the checkpoint, for errors.
    """

    made: RegionMap
    ours_by_theirs: Mapping[str, str]
    where: str

    @classmethod
    def of(cls, made: RegionMap, keys: Collection[str], where: str) -> _Names:
        """Bind a map to the keys of this rank's request."""
        ours: dict[str, dict[str, None]] = {}
        for pair in made.pairs:
            ours.setdefault(pair.right.key, {})[pair.left.key] = None
        by_theirs = {key: ", ".join(map(repr, names)) for key, names in ours.items()}
        return cls(bound_to(made, keys), by_theirs, where)

    def viewed(self, contents: Contents) -> Contents:
        """Return the arrays in the shapes of the map, without those that repeat others or are computed."""
        known = {key: self.made.right[key].viewed for key in self.made.right}
        views = {
            key: known.get(key, spec.global_shape)
            for key, spec in contents.arrays.items()
            if key in known or not self._is_derived(key)
        }
        return with_views(contents, views, where=self.where)

    def _is_derived(self, key: str) -> bool:
        """Return whether an array that the map lacks holds nothing of its own.

        A folder with tied embeddings may hold them twice, and old ones hold the rotary frequencies.
        """
        return key.endswith("lm_head.weight") or key.endswith((".rotary_emb.inv_freq", ".attn.masked_bias"))


def _check_only_weights(flattened: FlattenedState, excluded: frozenset[str], where: str) -> None:
    """Check that the request has nothing that only a training state has.

    Raises:
        DeclarationError: it has optimizer state other than masters, or objects.
    """
    others = {t.key for t in flattened.tensors if not is_weight(t.key)} | {o.key for o in flattened.objects}
    others -= excluded
    if others:
        raise DeclarationError(
            f"{where} has weights only, by the names of another family. It has nothing for {len(others)} "
            f"keys of the request:\n{truncated_list([repr(key) for key in sorted(others)])}\nAsk for weights "
            f"and float32 masters only: megackpt.maps.weights_of(state) returns that part of a state dict.",
            key=min(others),
            path=where,
        )


def _check_known(requested: frozenset[str], names: _Names) -> None:
    """Check that the map has all requested arrays.

    Raises:
        MapError: it lacks some; all are listed, each with the most similar array of the map.
    """
    unknown = sorted({parameter_key(key) for key in requested} - set(names.made.left))
    if not unknown:
        return
    lines: list[str] = []
    for key in unknown:
        # The error shows ten lines, and each search takes long in a large map.
        close = difflib.get_close_matches(key, names.made.left, n=1) if len(lines) < 10 else []
        lines.append(repr(key) + (f" (the map has {close[0]!r})" if close else ""))
    tied = "output_layer.weight" in unknown and "output_layer.weight" not in names.made.left
    hint = (
        "The config ties the output layer to the embedding, so there is no output_layer.weight: tie them in "
        "the model too. "
        if tied
        else ""
    )
    raise MapError(
        f"{names.where}: the map has no array of the other model for {len(unknown)} of the requested keys:\n"
        f"{truncated_list(lines)}\n{hint}Build the model of the same config, keep them as they are with "
        f"LoadOptions(exclude=...), or give a map that has them.",
        key=unknown[0],
        path=names.where,
    )


def _check_stored(requested: frozenset[str], contents: Contents, names: _Names) -> None:
    """Check that the arrays that the map names are stored, with the shapes that it names.

    Raises:
        MissingKeyError, MismatchError: one is not; the text has both names of all such arrays.
        FormatError: one is stored in a form that cannot be loaded.
    """
    ours = {parameter_key(key) for key in requested}
    wanted = dict.fromkeys(pair.right.key for pair in names.made.pairs if pair.left.key in ours)
    check_readable(wanted, contents.unreadable, where=names.where)
    missing = [key for key in wanted if key not in contents.arrays]
    if missing:
        lines = [f"{key!r} (ours: {names.ours_by_theirs[key]})" for key in missing]
        raise MissingKeyError(
            f"{names.where} lacks {len(missing)} of the arrays that the map names:\n{truncated_list(lines)}\n"
            f"Fetch the whole folder, or give the config that the weights were saved with.",
            key=missing[0],
            path=names.where,
        )
    faults: dict[str, str] = {}
    for key in wanted:
        spec, array = contents.arrays[key], names.made.right[key]
        if spec.dtype == OBJECT or spec.global_shape != array.stored:
            faults[key] = (
                f"{key!r} (ours: {names.ours_by_theirs[key]}): stored as {spec.dtype} "
                f"{spec.global_shape}, and {array.stored} by the config"
            )
    if faults:
        raise MismatchError(
            f"{names.where} holds other shapes than its map:\n{truncated_list(list(faults.values()))}\n"
            f"Give the config that the weights were saved with.",
            key=next(iter(faults)),
            path=names.where,
        )


def _targets(flattened: FlattenedState, excluded: frozenset[str], names: _Names) -> SharedTargets:
    """Return the tensors to fill, with memory.

    Raises:
        MismatchError: a tensor has another global shape than the map; all of these are listed.
        DeclarationError: a tensor cannot be filled in place.
    """
    tensors = [tensor for tensor in flattened.tensors if tensor.key not in excluded]
    faults = {}
    for tensor in tensors:
        array = names.made.left[parameter_key(tensor.key)]
        is_taller = array.is_padded and tensor.global_shape[:1] >= array.stored[:1]
        expected = (*tensor.global_shape[:1], *array.stored[1:]) if is_taller else array.stored
        if tensor.global_shape != expected:
            faults[tensor.key] = (
                f"{tensor.key!r}: asked for as {tensor.global_shape}, and {array.stored} by the config"
            )
    if faults:
        raise MismatchError(
            f"{names.where}: the model has other shapes than the config says:\n"
            f"{truncated_list(list(faults.values()))}\nBuild the model of the config of the weights.",
            key=next(iter(faults)),
            path=names.where,
        )
    for tensor in tensors:
        tensor.init_data()
        check_target(tensor, on_meta=LOAD_ON_META)
    return SharedTargets.of(tensors)


def _plan_reads(views: Sequence[ShardedTensor], contents: Contents, group: Group, where: str) -> ReadPlan:
    """Plan the copies from stored chunks into views."""
    # A parameter and its master may ask for one array with different dtypes: it is declared as stored.
    declared = [
        replace(view, data=None, dtype=torch_dtype(contents.arrays[view.key].dtype)) for view in views
    ]
    requested = describe(declared, rank=group.rank)
    chunks = contents.chunks_for([requested.table])
    return ReadPlan(requested, views, chunks, plan_load(requested, chunks.table, where=where), [])


def _read_ratio(
    plan: ReadPlan, tensors: Sequence[ShardedTensor], parts: Sequence[Sequence[MappedTensor]]
) -> float:
    """Return how many times the bytes that this rank needs it would read by itself."""
    is_master = [
        tensor.key != parameter_key(tensor.key)
        for tensor, of_tensor in zip(tensors, parts, strict=True)
        for _ in of_tensor
    ]
    chunks, kinds = plan.chunks, np.array(is_master, np.int64)
    return read_ratio(plan.copies, chunks.table, block_bytes=chunks.block_bytes, kinds=kinds)


def _digest(made: RegionMap) -> str:
    """Return a digest of the arrays of a map, by which ranks compare theirs."""
    return digest_of(repr((sorted(made.left.items()), sorted(made.right.items()))).encode())


class _EveryKey:
    """All keys: each plain tensor of the request is declared under its path."""

    def __contains__(self, key: object) -> bool:
        return True
