"""Reads what a script has saved with torch.save: one file, or a file for each rank, without running pickles.

Shards of a Hugging Face folder (`pytorch_model-00001-of-00003.bin`) are one file in several parts. Tensors
of full state dicts become whole arrays. DTensors, as FSDP2 has them, and ShardedTensors of FSDP
version 1 become the arrays that they are parts of: where each rank's part lies is in its file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megackpt.codec import ArrayReference, leaf_digests
from megackpt.entities.plain_tensors import can_be_array
from megackpt.entities.recognition import is_dtensor
from megackpt.entities.torch_sharded import declare_dtensor
from megackpt.entities.tree import Steps, dotted
from megackpt.errors import DeclarationError, FormatError, NotACheckpointError, UnsupportedError
from megackpt.formats.documents import parse_document
from megackpt.formats.file_names import TORCH_SAVE, TRAINER_ARGUMENTS, is_of_a_save
from megackpt.formats.foreign.mapped_files import load_mapped_file
from megackpt.formats.foreign.mapped_memory import in_memory
from megackpt.formats.foreign.state import (
    LEFT_OUT,
    CollectedArray,
    ForeignArray,
    ForeignState,
    SourcePart,
    check_tensor,
    have_equal_bits,
    mixed_files,
    plain_part,
)
from megackpt.formats.foreign.stored_shards import StoredShards, array_of_shards, replace_shards
from megackpt.formats.foreign.strategy import SUFFIXES, ForeignLoadStrategy, first_gap, names_of
from megackpt.formats.strategy import Format, Json
from megackpt.formats.torch_zip import is_zip_file
from megackpt.ground.wrappers import INNER_WRAPPERS, WRAPPERS, without_wrappers
from megackpt.storage import LocalStore, Store


class TorchSaveLoadStrategy(ForeignLoadStrategy):
    """Reads a file of torch.save, or a folder with a file for each rank.

    Args:
        prefix: what the keys of arrays begin with.
    """

    backend = "torch"
    file_names = TORCH_SAVE

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix

    def detect(self, store: Store) -> Json | None:
        """Recognise a file by its first bytes or its name, and files in a folder by their names.

        The files that an unfinished save has left are none, nor is a file in the root of a run.
        """
        if isinstance(store, LocalStore) and os.path.isfile(store.location) and is_zip_file(store.location):
            return self.manifest()
        # With such a manifest in a subfolder, the folder is the root of a run.
        is_ours = any(
            name.endswith(("/metadata.json", ".distcp")) or is_of_a_save(name) for name in names_of(store)
        )
        return None if is_ours else super().detect(store)

    def read(self, path: str, *, checks_bytes: bool) -> ForeignState:
        """Return what the files hold."""
        return read_torch(path, prefix=self._prefix, checks_bytes=checks_bytes)


FORMAT = Format(backend="torch", version=1, load=TorchSaveLoadStrategy)

_NUMBER = re.compile(r"(\d+)(?!.*\d)")  # the last one in a name
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
_INDEX_MAX_BYTES = 100_000_000  # one of a million tensors


def read_torch(path: str, *, prefix: str, checks_bytes: bool) -> ForeignState:
    """Read a file, or the files of a folder; arrays stay in the files, which are mapped.

    Args:
        path: a file of torch.save, or a folder of such files.
        prefix: what the keys begin with.
        checks_bytes: whether to compare checksums, for which all bytes are read.

    Raises:
        NotACheckpointError: there is no such file.
        UnsupportedError: the values are parts of tensors, and the files do not say which parts.
        FormatError: a file is damaged or missing, or files of ranks contradict each other.
    """
    groups = _files(path)
    merged = {
        name: _Merge(
            path,
            [shards[0] for shards in ranks],
            [_load(shards, checks_bytes=checks_bytes) for shards in ranks],
        )
        for name, ranks in groups.items()
    }
    steps = prefix.rstrip(".").split(".") if prefix else []
    # Common state is rank 0's, with references in place of arrays.
    nested = {
        name: merge.merged(merge.values, (*steps, name) if len(merged) > 1 else tuple(steps))
        for name, merge in merged.items()
    }
    tree: Any = nested if len(nested) > 1 else next(iter(nested.values()))
    for step in reversed(steps):
        tree = {step: tree}
    if not isinstance(tree, dict):
        left_out = next((text.strip() for merge in merged.values() for text in merge.left_out), "")
        what = left_out.strip("()") if tree is LEFT_OUT else f"a {type(tree).__name__}"
        raise FormatError(
            f"{path}: it holds {what}, and a checkpoint is a dict. Save a dict such as "
            f"{{'model': model.state_dict(), 'optimizer': ...}}.",
            path=path,
        )
    ranks = max(map(len, groups.values()))
    shards = max(len(of_rank[0]) for of_rank in groups.values())
    counted = f"{ranks} ranks" if ranks > 1 else f"{shards} shards" if shards > 1 else "1 file"
    return ForeignState(
        arrays=tuple(array for merge in merged.values() for array in merge.arrays),
        common=tree,
        origin={"imported_from": f"torch.save, {counted}"},
        left_out=(
            *(text for merge in merged.values() for text in merge.left_out),
            *([f"{TRAINER_ARGUMENTS} (no state)"] if os.path.isfile(f"{path}/{TRAINER_ARGUMENTS}") else []),
        ),
    )


def _files(path: str) -> dict[str, list[tuple[str, ...]]]:
    """Return the files of each kind, by rank: `model_0.pt` and `model_1.pt` are two ranks of `model`.

    Each rank has one file, or the shards of one.
    """
    if os.path.isfile(path):
        return {"": [(path,)]}
    names = sorted(os.listdir(path)) if os.path.isdir(path) else []
    kinds: dict[str, dict[int, str]] = {}
    shards: dict[str, list[str]] = {}
    for name in names:
        stem, suffix = os.path.splitext(name)
        if suffix not in SUFFIXES or name == TRAINER_ARGUMENTS:
            continue
        if (shard := _SHARD.fullmatch(stem)) is not None:
            shards.setdefault(shard[1], []).append(os.path.join(path, name))
            continue
        number = _NUMBER.search(stem)
        kind = _NUMBER.sub("#", stem)
        of_rank = kinds.setdefault(kind, {})
        rank = int(number[1]) if number else 0
        other = of_rank.setdefault(rank, os.path.join(path, name))
        if os.path.basename(other) != name:
            raise FormatError(
                f"{path}: {os.path.basename(other)} and {name} have one name and number, and one of them "
                f"would be left out. Name the file that you want, or move the other one away.",
                path=path,
            )
    if not kinds and not shards:
        raise NotACheckpointError(
            f"{path} has no file of torch.save ({', '.join(SUFFIXES)}). Name a file, or a folder with one "
            f"file or one for each rank.",
            path=path,
        )
    for kind, of_rank in kinds.items():
        # The number of one file may be anything, also the time of its save.
        missing = first_gap(of_rank)
        if len(of_rank) > 1 and missing is not None:
            raise FormatError(
                f"{path}: {kind.replace('#', str(missing))}, of rank {missing}, is missing. Copy the "
                f"files of all ranks into one folder; if the numbers are steps, name one file.",
                path=path,
            )
    # A kind with one file may hold what all ranks share.
    counts = {len(of_rank) for of_rank in kinds.values()} - {1}
    if len(counts) > 1:
        raise FormatError(
            f"{path}: kinds of files have different numbers of ranks: {sorted(kinds)}.", path=path
        )
    entries: list[tuple[str, list[tuple[str, ...]]]] = [
        (_name_of(kind), [(of_rank[rank],) for rank in sorted(of_rank)]) for kind, of_rank in kinds.items()
    ]
    entries += [(stem, [_checked_shards(of_stem)]) for stem, of_stem in shards.items()]
    named: dict[str, list[tuple[str, ...]]] = {}
    for name, files in entries:
        if name in named:
            first, second = (os.path.basename(of[0][0]) for of in (named[name], files))
            raise FormatError(
                f"{path}: {first:.200} and {second:.200} would both become {name!r:.200}, and one of them "
                f"would be left out. Name the file that you want, or rename one of them.",
                path=path,
            )
        named[name] = files
    return named


def _name_of(kind: str) -> str:
    """Return what the files of a kind become: its name without the number of the rank."""
    return re.sub(r"\W*#\W*|_#|#", "", kind).strip("_-.") or kind


def _checked_shards(files: Sequence[str]) -> tuple[str, ...]:
    """Return the shards of one file, of which none may be missing."""
    numbered = {}
    for file in files:
        match = _SHARD.fullmatch(os.path.splitext(os.path.basename(file))[0])
        assert match is not None
        numbered[int(match[2]), int(match[3])] = file
    counts = {count for _, count in numbered}
    count = max(counts)
    missing = next((n for n in range(1, count + 1) if (n, count) not in numbered), None)
    if len(counts) > 1 or len(numbered) < len(files) or missing is not None:
        fault = "shards of several models" if missing is None else f"no shard {missing:05d}-of-{count:05d}"
        raise FormatError(
            f"{os.path.dirname(files[0])} has {fault}. Fetch the whole folder again, into an empty one.",
            path=files[0],
        )
    return tuple(numbered[number, count] for number in range(1, count + 1))


def _load(shards: Sequence[str], *, checks_bytes: bool) -> Any:
    """Return the value of a file, or of the shards of one, whose entries are those of all."""
    values = []
    for file in shards:
        values.append(load_mapped_file(file, checks_bytes=checks_bytes))
        replace_shards(values[-1], file)
    if len(values) == 1:
        return values[0]
    whole: dict[Any, Any] = {}
    for file, value in zip(shards, values, strict=True):
        if not isinstance(value, dict) or (twice := whole.keys() & value.keys()):
            what = "no dict" if not isinstance(value, dict) else f"{min(map(str, twice))!r}, as another shard"
            raise FormatError(f"{file}: it has {what}. Fetch the whole folder again.", path=file)
        whole |= value
    _check_index(shards, whole)
    return whole


def _check_index(shards: Sequence[str], whole: Mapping[Any, Any]) -> None:
    """Check that the shards have what their index names; it may be missing, as their names have the count."""
    stem, suffix = os.path.splitext(shards[0])
    index = f"{stem.rpartition('-of-')[0].rpartition('-')[0]}{suffix}.index.json"
    if not os.path.isfile(index):
        return
    with closing(LocalStore(os.path.dirname(index))) as store:
        data = store.read(os.path.basename(index), max_bytes=_INDEX_MAX_BYTES)
    weight_map = parse_document(data, where=index).get("weight_map")
    if not isinstance(weight_map, dict) or weight_map.keys() != whole.keys():
        listed = set(weight_map) if isinstance(weight_map, dict) else set()
        other = min(map(str, listed ^ set(whole)), default="")
        raise FormatError(
            f"{index} contradicts the shards, for instance about {other!r}. Files of different models are "
            f"mixed, or one is damaged: fetch the whole folder again.",
            key=other,
            path=index,
        )


@dataclass(slots=True)
class _Merge:
    """The values of the ranks' files, as one tree whose arrays are references."""

    where: str
    files: Sequence[str]
    values: Sequence[Any]
    arrays: list[ForeignArray] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def merged(self, values: Sequence[Any], steps: Steps) -> Any:
        """Return the value at a path, from the values that the files have there."""
        first = values[0]
        if len(steps) > 100:
            raise FormatError(f"{self.where}: values are nested too deep. It is damaged.", path=self.where)
        if any(isinstance(value, StoredShards) for value in values):
            return self._array(array_of_shards(dotted(steps), values, self.files))
        # The files of all ranks must agree first, as the value of rank 0 chooses the branch.
        if isinstance(first, Tensor):
            self._check_tensors(values, steps)
        if is_dtensor(first):
            return self._array(_array_of_dtensors(dotted(steps), values, self.files))
        if isinstance(first, Tensor):
            return self._tensor(values, steps)
        if type(first).__name__ in ("dict", "OrderedDict") and isinstance(first, dict):
            self._check_keys(values, steps)
            items = {k: self.merged([v[k] for v in values], (*steps, new)) for k, new in _names(first)}
            return {new: items[k] for k, new in _names(first) if items[k] is not LEFT_OUT}
        if type(first) is list:
            self._check_keys(values, steps)
            members = [self.merged([v[i] for v in values], (*steps, i)) for i in range(len(first))]
            return [member for member in members if member is not LEFT_OUT]
        return self._plain(values, steps)

    def _check_keys(self, values: Sequence[Any], steps: Steps) -> None:
        first = values[0]
        for rank, value in enumerate(values):
            is_equal = type(value) is type(first) and (
                len(value) == len(first) if isinstance(first, list) else value.keys() == first.keys()
            )
            if not is_equal:
                fault = f"has other entries on rank {rank} than on rank 0"
                raise mixed_files(fault, self.where, dotted(steps))

    def _check_tensors(self, values: Sequence[Any], steps: Steps) -> None:
        for file, value in zip(self.files, values, strict=True):
            if not isinstance(value, Tensor) or is_dtensor(value) != is_dtensor(values[0]):
                kinds = [type(v).__name__ for v in (value, values[0])]
                fault = f"is a {kinds[0]}, and a {kinds[1]} in {self.files[0]}"
                raise mixed_files(fault, file, dotted(steps))

    def _tensor(self, values: Sequence[Tensor], steps: Steps) -> Any:
        first = values[0]
        # Before any comparison, which copies tensors that are not contiguous.
        for value in values:
            check_tensor(value, dotted(steps))
        for rank, value in enumerate(values):
            if value.shape != first.shape or value.dtype != first.dtype or not have_equal_bits(value, first):
                raise UnsupportedError(
                    f"{self.where}: the tensor {dotted(steps)!r} of rank {rank} differs from that of rank 0, "
                    f"and its file does not say which part of a whole it is. Save full state dicts "
                    f"(torch.distributed.checkpoint.state_dict.get_state_dict) or DTensors; if the numbers "
                    f"in the names are steps, name one file.",
                )
        if can_be_array(first):
            return self._array(ForeignArray.whole(dotted(steps), first))
        return in_memory(first)

    def _array(self, array: ForeignArray) -> ArrayReference:
        self.arrays.append(array)
        return ArrayReference(array.key)

    def _plain(self, values: Sequence[Any], steps: Steps) -> Any:
        kept = [
            plain_part(value, dotted(steps), self.left_out if value is values[0] else []) for value in values
        ]
        # By digests: arrays of numpy have no answer to whether they are equal.
        digests = [leaf_digests([value]) for value in kept] if len(kept) > 1 else []
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            self.left_out.append(f"{dotted(steps)} of ranks {others} (differs from that of rank 0)")
        return kept[0]


def _names(table: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each key, and the same without what wrappers of modules have put into it.

    `module.` is left out where all keys begin with it, as it may be a name of the model, too. The others are
    names that nobody gives a layer, and a wrapper may be inside of a model.
    """
    keys = list(table)
    names = keys
    if keys and all(isinstance(key, str) for key in keys):
        prefixes = [f"{wrapper}." for wrapper in WRAPPERS]
        while prefix := next((p for p in prefixes if all(name.startswith(p) for name in names)), ""):
            names = [name.removeprefix(prefix) for name in names]
        inner = [without_wrappers(name, INNER_WRAPPERS) for name in names]
        names = inner if len(set(inner)) == len(inner) else names
    yield from zip(keys, names, strict=True)


def _array_of_dtensors(key: str, dtensors: Sequence[Any], files: Sequence[str]) -> ForeignArray:
    """Return the array that DTensors of several ranks are parts of."""
    array = CollectedArray(key, dtensors[0].dtype, tuple(dtensors[0].shape), files[0])
    for dtensor, file in zip(dtensors, files, strict=True):
        array.check(dtensor.dtype, tuple(dtensor.shape), file)
        try:
            chunks = declare_dtensor(key, dtensor).chunks
        except DeclarationError as error:
            raise FormatError(str(error), key=key) from error
        for chunk in chunks:
            # A rank may have no elements of a DTensor whose dim is shorter than the mesh.
            if chunk.data is not None and chunk.data.numel():
                start, shape = tuple(chunk.global_offset), tuple(chunk.local_shape)
                array.add(SourcePart(chunk.data, start, shape), file)
    return array.whole()
