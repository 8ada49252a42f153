"""Finds what is wrong with the files of a torch_dist checkpoint of ours, apart from the bytes of its chunks.

Our note and index are compared with the files that other libraries read instead: `.metadata`, common.pt, and
the zip records around each tensor. Checkpoints of other libraries contain nothing twice, so nothing is
compared.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

import numpy as np

from megackpt.errors import CheckpointError, FormatError
from megackpt.formats.damage import Damage, damage_of, size_of
from megackpt.formats.documents import file_entry, manifest_of_megatron, read_document, read_manifest_file
from megackpt.formats.index_file import read_index
from megackpt.formats.strategy import MANIFEST, Json
from megackpt.formats.torch_dist import names
from megackpt.formats.torch_dist.item import Frame, frame_of
from megackpt.plans.metadata import OBJECT, StoredChunks
from megackpt.storage import Store, digest_of

# Files with fixed names, and the note that a save of ours writes about its `.metadata`.
#
# The note names the files that belong to the `.metadata` with a certain digest. If another library has
# replaced `.metadata` since, no note belongs to it.

METADATA_MAX_BYTES = 2 << 30
COMMON_MAX_BYTES = 4 << 30
"""Limits of the two files, which are read as a whole."""

MANIFEST_CONTENT = manifest_of_megatron(names.BACKEND, names.VERSION)


def read_metadata(store: Store) -> bytes:
    """Return the bytes of `.metadata`.

    Raises:
        FormatError: it is missing, or too large.
    """
    if not store.exists(names.METADATA):
        raise FormatError(
            f"{store.location} has no {names.METADATA}, which every checkpoint of format torch_dist has. The "
            f"checkpoint is incomplete; load another one.",
            path=store.location,
        )
    return store.read(names.METADATA, max_bytes=METADATA_MAX_BYTES)


def find_note(store: Store, metadata_digest: str) -> tuple[Json, str] | None:
    """Return the note about the `.metadata` with this digest, and its name; None if there is none."""
    for name in store.names("megackpt-"):
        # Any other note is about a `.metadata` that another save has replaced.
        attempt_and_digest = names.note_of(name)
        if attempt_and_digest is None or attempt_and_digest[1] != metadata_digest:
            continue
        return read_document(store, name), name
    return None


_CRC = struct.Struct("<4sI")  # follows the bytes of a tensor: a signature, and their CRC-32


def check_files(store: Store, manifest: Json) -> Iterator[Damage]:
    """Yield what is wrong with files; see `LoadStrategy.check_files`. manifest may be one of `detect`."""
    notes = [name for name in store.names("megackpt-") if names.note_of(name) is not None]
    try:
        if not notes or not store.exists(names.METADATA):
            return
        note = find_note(store, digest_of(read_metadata(store)))
        if note is None:
            yield Damage(
                file=names.METADATA,
                what=f"it is not the one that {notes[0]} was written for. It is damaged, or another program "
                f"has saved here since; then remove the files that begin with 'megackpt-'",
            )
            return
        yield from _check_fixed_names(store, *note)
        yield from _check_items(store, read_index(store, note[0], document_name=note[1]))
    except CheckpointError as error:
        yield damage_of(error, location=store.location)


def _check_fixed_names(store: Store, note: Json, note_name: str) -> Iterator[Damage]:
    if store.exists(MANIFEST) and read_manifest_file(store) != MANIFEST_CONTENT:
        yield Damage(file=MANIFEST, what="it has other entries than a save of this format writes")
    common, _ = file_entry(store, note, "common", document_name=note_name)
    expected = [(common["file"], common), (names.COMMON, common)]
    for entry in names.VALUES_ENTRIES:
        if entry in note:
            copies, _ = file_entry(store, note, entry, document_name=note_name)
            expected.append((copies["file"], copies))
    for name, named in expected:
        if not store.exists(name):
            yield Damage(file=name, what="it is missing")
            continue
        data = store.read(name, max_bytes=COMMON_MAX_BYTES)
        if len(data) != named["nbytes"] or digest_of(data) != named["xxh3_128"]:
            yield Damage(file=name, what="its bytes are not those that were saved (their digest differs)")


def _check_items(store: Store, stored: StoredChunks) -> Iterator[Damage]:
    """Compare the bytes around each tensor with those that a save writes, and check the ends of files."""
    table = stored.table
    ends = np.zeros(len(stored.files), np.int64)
    # In the order of files, so that each is read from front to back.
    for row in np.lexsort((stored.offset_bytes, stored.file)).tolist():
        spec, raw = table.arrays[int(table.array[row])], int(stored.offset_bytes[row])
        number = int(stored.file[row])
        name = stored.files[number]
        end = raw + int(table.nbytes[row])
        # The digests of an object cover its whole item, so nothing around it is left to compare.
        if spec.dtype != OBJECT:
            frame = frame_of(spec.dtype, tuple(table.shape[row, : len(spec.global_shape)].tolist()))
            end = raw - len(frame.head) + frame.length
            fault = None
            with contextlib.suppress(CheckpointError):  # the caller reports files that are missing or short
                fault = _fault_of(store, name, frame, raw)
            if fault:
                what, start, stop = fault
                box = table.describe(row)
                yield Damage(file=name, key=spec.key, box=box, what=what, start=start, stop=stop)
        ends[number] = max(ends[number], end)
    for name, expected in zip(stored.files, ends.tolist(), strict=True):
        nbytes = size_of(store, name)
        if nbytes is not None and nbytes < expected:
            yield Damage(file=name, what=f"it has {nbytes:,} bytes instead of {expected:,}")


def _fault_of(store: Store, name: str, frame: Frame, raw: int) -> tuple[str, int, int] | None:
    """Return what is wrong around a tensor whose bytes begin at raw, and the byte range; None if nothing."""
    head = bytearray(len(frame.head))
    if raw < len(head):
        return "the tensor begins where no room is for the zip records before it", 0, raw
    store.read_into(name, raw - len(head), memoryview(head))
    if head != frame.head:
        return "the zip records before the tensor are not those that were saved", raw - len(head), raw
    begin = raw + frame.nbytes
    tail = bytearray(frame.length - len(head) - frame.nbytes)
    store.read_into(name, begin, memoryview(tail))
    # The checksum is there twice, so a changed one is found without reading the tensor's bytes.
    if tail != frame.tail(_CRC.unpack_from(tail)[1]):
        return "the zip records behind the tensor are not those that were saved", begin, begin + len(tail)
    return None
