"""Finding the arrays and objects of a zarr checkpoint, whoever wrote it. `chunks` reads their elements."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megackpt.errors import FormatError
from megackpt.formats.contents import Contents
from megackpt.formats.documents import damaged, parse_document, read_document
from megackpt.formats.file_names import ZARR_V3
from megackpt.formats.zarr import names
from megackpt.formats.zarr.array_documents import (
    V2_ATTRIBUTES,
    V2_FILE,
    V3_FILE,
    ZarrArray,
    parse_v2,
    parse_v3,
)
from megackpt.formats.zarr.chunks import StoredObjects, ZarrChunks
from megackpt.plans.metadata import OBJECT, ArraySpec
from megackpt.storage import Store, digest_of

_LOCKS = ".sync/"
"""End of the names of directories with empty lock files of Megatron-Core, named like the files they lock."""

_IDENTIFYING = (f"/{V2_FILE}", f"/{V3_FILE}", ".pt", ".bin")
"""Ends of the names of files without which a reader would not know that there is an array, or an object."""


class Shard(NamedTuple):
    """One object: its offset in the array of objects, that array's shape by the file's name, and the file."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    name: str


def find_arrays_v2(store: Store, listed: Iterable[str]) -> list[ZarrArray]:
    """Return every zarr v2 array among the listed names; its key is its path.

    Raises:
        FormatError: a document does not describe an array that can be loaded.
    """
    arrays = []
    files = set(listed)
    for name in sorted(files):
        path = name.removesuffix(V2_FILE)
        if path == name or not path.endswith("/") or name.startswith(names.STAGING):
            continue
        # Below a directory of locks, an empty file of this name locks a document and is none.
        if path.endswith(_LOCKS) and not store.size(name):
            continue
        where = f"{store.location}/{name}"
        document = read_document(store, name)
        attributes = read_document(store, path + V2_ATTRIBUTES) if path + V2_ATTRIBUTES in files else {}
        arrays.append(parse_v2(document, attributes, key=path.rstrip("/"), path=path, where=where))
    return arrays


def find_arrays_v3(store: Store, listed: Iterable[str], *, directory: str) -> list[ZarrArray]:
    """Return every zarr v3 array below a directory.

    Raises:
        FormatError: a document does not describe an array that can be loaded, or two have the same key.
    """
    arrays: dict[str, ZarrArray] = {}
    for name in listed:
        path = name.removesuffix(V3_FILE)
        # Left out: files that are no documents, and the document of the directory's own group.
        if path in (name, directory) or not name.startswith(directory) or not path.endswith("/"):
            continue
        # In a directory of others, arrays of our attempts are what saves without a commit have left.
        if not directory and ZARR_V3.attempt_of(name) is not None:
            continue
        array = _read_array(store, name, key=path.removeprefix(directory).rstrip("/"))
        if array is None:
            continue
        other = arrays.setdefault(array.spec.key, array)
        if other is not array:
            where, key = f"{store.location}/{name}", array.spec.key
            raise damaged(f"the key {key!r} is also that of {other.path!r}", where, key=key)
    return list(arrays.values())


def _read_array(store: Store, name: str, *, key: str) -> ZarrArray | None:
    """Return the array that a document describes, of this key unless it says another; None for a group."""
    where = f"{store.location}/{name}"
    document = read_document(store, name)
    if document.get("node_type") == "group":
        return None
    if document.get("node_type") != "array":
        raise damaged("it describes neither an array nor a group", where)
    return parse_v3(document, name=key, path=name.removesuffix(V3_FILE), where=where)


def find_objects(
    listed: Iterable[str],
    *,
    directory: str,
    key_of: Callable[[str], str],
    suffix: str,
    is_checked: bool = False,
) -> dict[str, StoredObjects]:
    """Return the objects in a directory, by key; is_checked says whether each has a digest.

    Raises:
        FormatError: files of one key disagree about the shape of their array, or an object lies outside.
    """
    # By names alone: each object is a file, and no file is opened before a load asks for the object.
    shards: dict[str, list[Shard]] = {}
    for name in listed:
        parent, _, leaf = name.removeprefix(directory).rpartition("/")
        location = names.parse_shard(leaf) if name.startswith(directory) and leaf.endswith(suffix) else None
        if location is not None and parent and not name.startswith(names.STAGING):
            shards.setdefault(key_of(parent), []).append(Shard(*location, name))
    return {key: replace(_objects(key, of_key), is_checked=is_checked) for key, of_key in shards.items()}


def _objects(key: str, shards: Sequence[Shard]) -> StoredObjects:
    # Older versions of Megatron-Core cut off the last number in names of arrays with two dims or more.
    shapes = {s.shape for s in shards}
    if all(len(s.shape) == len(s.offset) - 1 for s in shards):
        last = max(s.offset[-1] for s in shards) + 1
        shapes = {(*s.shape, last) for s in shards}
    inside = len(shapes) == 1 and all(
        len(s.offset) == len(shape) and all(a < n for a, n in zip(s.offset, shape, strict=True))
        for shape in shapes
        for s in shards
    )
    if not inside:
        raise FormatError(
            f"{key!r}: the files {shards[0].name!r} and others ({len(shards)} in all) name objects that do "
            f"not lie in one array of objects. Files of two checkpoints may be mixed here.",
            key=key,
            path=shards[0].name,
        )
    files = {s.offset: s.name for s in shards}
    return StoredObjects(ArraySpec(key, OBJECT, shapes.pop()), dict(sorted(files.items())))


def open_contents(
    store: Store,
    *,
    arrays: Sequence[ZarrArray],
    objects: Mapping[str, StoredObjects],
    listed: Sequence[str],
    common: Callable[[], Any],  # as in Contents
    decode_object: Callable[[bytes, str], Any],
    identity: str,
    names_save: bool,
) -> Contents:
    """Return the contents of a checkpoint with these arrays and objects.

    Raises:
        FormatError: an array and objects have the same key.
    """
    by_key = {a.spec.key: a for a in arrays}
    both = sorted(set(by_key) & set(objects))
    if both:
        raise FormatError(
            f"{store.location}: {both[0]!r} is both an array and an array of objects. The checkpoint is "
            f"damaged.",
            key=both[0],
            path=store.location,
        )
    # Listed once: to ask the store for each file of a chunk would be a request each.
    files = frozenset(listed)

    def chunks(keys: Iterable[str]) -> ZarrChunks:
        wanted = set(keys)
        chosen = [by_key[key] for key in sorted(wanted & set(by_key))]
        return ZarrChunks(store, chosen, [objects[key] for key in sorted(wanted & set(objects))], files)

    specs = {key: a.spec for key, a in by_key.items()} | {key: o.spec for key, o in objects.items()}
    return Contents(
        arrays=dict(sorted(specs.items())),
        chunks=chunks,
        common=common,
        decode_object=decode_object,
        identity=identity,
        names_save=names_save,
    )


def check_listed(
    files: Sequence[str],
    listed: Sequence[str],
    *,
    location: str,
    list_name: str,
    key_of: Callable[[str], str],
) -> None:
    """Check that no document of an array, and no object, is missing.

    files are those that a save has listed in the file list_name. Chunks are checked when their array is
    opened.

    Raises:
        FormatError: one is missing.
    """
    missing = sorted(n for n in set(files) - set(listed) if n.endswith(_IDENTIFYING))
    if missing:
        key = key_of(missing[0].rpartition("/")[0])
        raise FormatError(
            f"{key!r}: {location}/{missing[0]} is missing, which {list_name} names ({len(missing)} such "
            f"files). The checkpoint is incomplete: restore it, or load another one.",
            key=key,
            path=f"{location}/{missing[0]}",
        )


def parse_files(data: bytes, entry: str, *, where: str) -> list[str]:
    """Return a list of file names from a JSON document.

    Raises:
        FormatError: the document has no list under this name.
    """
    files = parse_document(data, where=where).get(entry)
    if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        raise damaged(f"{entry!r} is no list of files", where)
    return files


def identity_of(arrays: Sequence[ZarrArray], listed: Sequence[str]) -> str:
    """Return a digest that differs between checkpoints which do not name their attempt."""
    # Documents and names are known by now; the content of chunks would have to be read.
    documents = {a.path: a.document for a in arrays}
    return digest_of(json.dumps([documents, sorted(listed)], sort_keys=True).encode())
