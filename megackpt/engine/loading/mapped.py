"""The view of a checkpoint by a map between families of names, for a load into tensors with our names.

The request has our names, the checkpoint has others. Each tensor of the request becomes views of its
memory, and each view is a box of an array of the other family. So each rank reads only the elements of its
own tensors, at any layout, and no array is assembled first.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megackpt.comm import Group
from megackpt.engine.checkpoint.opening import check_readable, read_common
from megackpt.engine.checkpoint.views import with_renamed_keys, with_views
from megackpt.engine.data.chunk_bytes import have_equal_bytes
from megackpt.engine.loading.common_request import CommonRequest
from megackpt.engine.loading.mapped_report import check_casts, report_mapped_arrays
from megackpt.engine.loading.prepare import AllKeysBut, CheckpointView, matches_any
from megackpt.engine.loading.prepared_load import FlattenedRequest, MappedParts, ReadPlan, RequestedKeys
from megackpt.engine.loading.source import LoadRequest, Source
from megackpt.entities import ShardedObject, ShardedStateDict, ShardedTensor
from megackpt.entities.describe import describe, torch_dtype
from megackpt.entities.flatten import FlattenedState, flatten_state
from megackpt.errors import DeclarationError, MapError, MismatchError, MissingKeyError, truncated_list
from megackpt.formats.contents import Chunks, Contents
from megackpt.maps import RegionMap, bound_to
from megackpt.maps.family import OUTPUT, chosen_map
from megackpt.maps.requests import EMBEDDING, MappedTensor, is_weight, mapped_tensors, parameter_key
from megackpt.options import Policy
from megackpt.plans.metadata import OBJECT, ArraySpec
from megackpt.plans.planning import Copies, plan_load
from megackpt.plans.planning.load_plan import read_ratio
from megackpt.plans.validation import LoadReport, LoadRules, globs_for
from megackpt.storage import digest_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedView(CheckpointView):
    """A checkpoint seen under our names by a map. Its contents have the names of the other family.

    Attributes:
        stored: the arrays in the shapes of the files; `contents` has them in the shapes of the map.
        made: the map, with a key for each of our layers.
        ours_by_theirs: our keys of each array of the other family, as text: the same on all ranks, whatever a
            rank stacks.
    """

    stored: Contents
    made: RegionMap
    ours_by_theirs: Mapping[str, str]

    @classmethod
    def from_request(cls, request: LoadRequest, source: Source, rules: LoadRules) -> MappedView:
        """Choose the map of a request for a checkpoint. Local.

        Raises:
            MapError: there is no map for the checkpoint.
            DeclarationError, MismatchError: a pattern of `LoadOptions.rename` is invalid, or gives two keys
                one name.
        """
        assert request.maps is not None
        where = source.location
        stored = with_renamed_keys(source.contents, request.options.rename)[0]
        config = _config_of(request, stored, where)
        made = chosen_map(request.maps, config, stored.arrays, where=where)
        made = _with_stored_padding(made, stored.arrays)
        ours: dict[str, dict[str, None]] = {}
        for pair in made.pairs:
            ours.setdefault(pair.right.key, {})[pair.left.key] = None
        return cls(
            where=where,
            source=source,
            contents=_viewed(stored, made, rules, where),
            options=request.options,
            rules=rules,
            stored_keys=source.contents.arrays,
            stored=stored,
            made=made,
            ours_by_theirs={key: ", ".join(map(repr, names)) for key, names in ours.items()},
        )

    def loadable(self) -> list[str]:
        """Return nothing: an empty dict of the request asks for no array of another family."""
        return []

    def flatten(self, state: ShardedStateDict, group: Group) -> FlattenedRequest:
        """Declare all tensors of a request; from another family nothing but weights is loaded."""
        flattened = flatten_state(
            state,
            rank=group.rank,
            ranks=group.size,
            stored=AllKeysBut(frozenset()),
            in_host_memory=not self.options.load_on_device,
        )
        keys = {tensor.key for tensor in flattened.tensors} - self._excluded(flattened)
        bound = bound_to(self.made, {parameter_key(key) for key in keys})
        no_common_state = CommonRequest({}, {}, {}, {}, frozenset())
        return FlattenedRequest(flattened, no_common_state, {}, {}, frozenset(), bound)

    def check_keys(self, request: FlattenedRequest, group: Group) -> RequestedKeys:
        """Check that the map has all requested arrays, and that the checkpoint has those of the map.

        Raises:
            DeclarationError: the request has more than weights.
            MapError: the map lacks an array of the request.
            MissingKeyError, MismatchError: the checkpoint lacks an array that the map names, or holds it with
                another shape; or the model has another shape than the map, or an output layer that the
                config ties to the embedding is another one.
        """
        assert request.map is not None
        flattened, excluded = request.flattened, self._excluded(request.flattened)
        _check_only_weights(flattened, excluded, self.where)
        requested = frozenset(tensor.key for tensor in flattened.tensors)
        self._check_known(requested - excluded, request.map)
        self._check_stored(requested - excluded, request.map)
        tensors = [tensor for tensor in flattened.tensors if tensor.key not in excluded]
        _check_shapes(tensors, request.map, self.where)
        if group.rank == 0:  # it compares for all ranks, which then raise its error
            for key in _tied_outputs(self.stored, self.made, self.rules):
                self._check_tied(key)
        return RequestedKeys(requested, excluded, frozenset())

    def plan_reads(
        self,
        request: FlattenedRequest,
        tensors: Sequence[ShardedTensor],
        objects: Sequence[ShardedObject],
        group: Group,
    ) -> ReadPlan:
        """Find the elements of the tensors in the other family's arrays, and plan the copies from chunks."""
        made, arrays = request.map, self.contents.arrays
        assert made is not None
        parts = [[*mapped_tensors(tensor, parameter_key(tensor.key), made)] for tensor in tensors]
        check_casts(tensors, parts, arrays, self.rules, where=self.where)
        views = [part.theirs for of_tensor in parts for part in of_tensor]
        # A parameter and its master may ask for one array with different dtypes: it is declared as stored.
        declared = [replace(view, data=None, dtype=torch_dtype(arrays[view.key].dtype)) for view in views]
        requested = describe(declared, rank=group.rank)
        chunks = self.contents.chunks_for([requested.table])
        copies = plan_load(requested, chunks.table, where=self.where)
        ratio = _read_ratio(copies, chunks, tensors, parts)
        by_map = MappedParts(tensors, parts, self.ours_by_theirs, _digest(self.made), ratio)
        return ReadPlan(requested, views, chunks, copies, [], {}, {}, by_map)

    def report(
        self,
        request: FlattenedRequest,
        keys: RequestedKeys,
        plans: Sequence[ReadPlan],
        objects: Sequence[ShardedObject],
    ) -> LoadReport:
        """Report how each array of the request is loaded, under our keys."""
        (plan,) = plans
        assert request.map is not None
        assert plan.by_map is not None
        return LoadReport(
            arrays=report_mapped_arrays(
                plan.by_map.tensors, plan.by_map.parts, self.contents.arrays, request.map
            ),
            excluded=keys.excluded,
            transformed=request.flattened.transformed(keys.excluded),
        )

    def _excluded(self, flattened: FlattenedState) -> frozenset[str]:
        """Return the keys of tensors that `LoadOptions.exclude` names."""
        return frozenset(t.key for t in flattened.tensors if matches_any(t.key, self.options.exclude))

    def _check_known(self, requested: frozenset[str], made: RegionMap) -> None:
        """Check that the map has all requested arrays.

        Raises:
            MapError: it lacks some; all are listed, each with the most similar array of the map.
        """
        unknown = sorted({parameter_key(key) for key in requested} - set(made.left))
        if not unknown:
            return
        lines: list[str] = []
        for key in unknown:
            # The error shows ten lines, and each search takes long in a large map.
            close = difflib.get_close_matches(key, made.left, n=1) if len(lines) < 10 else []
            lines.append(repr(key) + (f" (the map has {close[0]!r})" if close else ""))
        tied = "output_layer.weight" in unknown and "output_layer.weight" not in made.left
        hint = (
            "The config ties the output layer to the embedding, so there is no output_layer.weight: tie them "
            "in the model too. "
            if tied
            else ""
        )
        globs = globs_for([key for key in requested if parameter_key(key) in unknown])
        raise MapError(
            f"{self.where}: the map has no array of the other model for {len(unknown)} of the requested "
            f"keys:\n{truncated_list(lines)}\n{hint}Build the model of the same config, give a map that has "
            f"them, or keep them as they are with LoadOptions(exclude={tuple(globs)!r}).",
            key=unknown[0],
            path=self.where,
        )

    def _check_stored(self, requested: frozenset[str], made: RegionMap) -> None:
        """Check that the arrays that the map names are stored, with the shapes that it names.

        Raises:
            MissingKeyError, MismatchError: one is not; the text has both names of all such arrays.
            FormatError: one is stored in a form that cannot be loaded.
        """
        ours = {parameter_key(key) for key in requested}
        wanted = dict.fromkeys(pair.right.key for pair in made.pairs if pair.left.key in ours)
        check_readable(wanted, self.stored.unreadable, where=self.where)
        missing = [key for key in wanted if key not in self.stored.arrays]
        if missing:
            lines = [f"{key!r} (ours: {self.ours_by_theirs[key]})" for key in missing]
            raise MissingKeyError(
                f"{self.where} lacks {len(missing)} of the arrays that the map names:\n"
                f"{truncated_list(lines)}\nFetch the whole folder, or give the config that the weights "
                f"were saved with.",
                key=missing[0],
                path=self.where,
            )
        faults: dict[str, str] = {}
        for key in wanted:
            spec, array = self.stored.arrays[key], made.right[key]
            if spec.dtype == OBJECT or spec.global_shape != array.stored:
                faults[key] = (
                    f"{key!r} (ours: {self.ours_by_theirs[key]}): stored as {spec.dtype} "
                    f"{spec.global_shape}, and {array.stored} by the config"
                )
        if faults:
            raise MismatchError(
                f"{self.where} holds other shapes than its map:\n{truncated_list(list(faults.values()))}\n"
                f"Give the config that the weights were saved with.",
                key=next(iter(faults)),
                path=self.where,
            )

    def _check_tied(self, key: str) -> None:
        """Check that an output layer has the bytes of the embedding.

        Raises:
            MismatchError: it has others.
        """
        embeddings = {pair.right.key for pair in self.made.pairs if pair.left.key == EMBEDDING}
        embedding = embeddings.pop() if len(embeddings) == 1 else ""
        if embedding in self.stored.arrays and have_equal_bytes(
            self.stored, key, embedding, where=self.where
        ):
            return
        raise MismatchError(
            f"{self.where}: the map has no output layer, as the config ties it to the embedding, and {key!r} "
            f"has other bytes than {embedding or 'the embedding'!r}. Untie both: "
            f"config={{**config, 'tie_word_embeddings': False}}, and a model with an output layer of its "
            f"own. To leave it, give a rule: KeyRule(keys={key!r}, missing=Policy.IGNORE).",
            key=key,
            path=self.where,
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


def _viewed(stored: Contents, made: RegionMap, rules: LoadRules, where: str) -> Contents:
    """Return the arrays in the shapes of a map, without those that repeat others or are computed."""
    known = {key: made.right[key].viewed for key in made.right}
    tied = _tied_outputs(stored, made, rules)
    views = {
        key: known.get(key, spec.global_shape)
        for key, spec in stored.arrays.items()
        # Old folders hold the rotary frequencies, which the model computes.
        if key in known or not (key in tied or key.endswith((".rotary_emb.inv_freq", ".attn.masked_bias")))
    }
    return with_views(stored, views, where=where)


def _tied_outputs(stored: Contents, made: RegionMap, rules: LoadRules) -> list[str]:
    """Return the output layers of a folder whose config ties it to the embedding: they should repeat that.

    A rule or mode that tolerates arrays that nobody asks for decides about an output layer, too.
    """
    others = stored.arrays.keys() - made.right.keys()
    return sorted(key for key in others if key.endswith(OUTPUT) and rules.on_missing(key) is Policy.ERROR)


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


def _check_shapes(tensors: Sequence[ShardedTensor], made: RegionMap, where: str) -> None:
    """Check that tensors have the global shapes of a map, where a padded array may have more rows.

    Raises:
        MismatchError: a tensor has another global shape; all of these are listed.
    """
    faults = {}
    for tensor in tensors:
        array = made.left[parameter_key(tensor.key)]
        is_taller = array.is_padded and tensor.global_shape[:1] >= array.stored[:1]
        expected = (*tensor.global_shape[:1], *array.stored[1:]) if is_taller else array.stored
        if tensor.global_shape != expected:
            faults[tensor.key] = (
                f"{tensor.key!r}: asked for as {tensor.global_shape}, and {array.stored} by the config"
            )
    if faults:
        raise MismatchError(
            f"{where}: the model has other shapes than the config says:\n"
            f"{truncated_list(list(faults.values()))}\nBuild the model of the config of the weights.",
            key=next(iter(faults)),
            path=where,
        )


def _read_ratio(
    copies: Copies,
    chunks: Chunks,
    tensors: Sequence[ShardedTensor],
    parts: Sequence[Sequence[MappedTensor]],
) -> float:
    """Return how many times the bytes that this rank needs it would read by itself."""
    is_master = [
        tensor.key != parameter_key(tensor.key)
        for tensor, of_tensor in zip(tensors, parts, strict=True)
        for _ in of_tensor
    ]
    kinds = np.array(is_master, np.int64)
    return read_ratio(copies, chunks.table, block_bytes=chunks.block_bytes, kinds=kinds)


def _digest(made: RegionMap) -> str:
    """Return a digest of the arrays of a map, by which ranks compare theirs."""
    return digest_of(repr((sorted(made.left.items()), sorted(made.right.items()))).encode())
