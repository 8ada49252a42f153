"""Reading parts of stored arrays into tensors that declare them."""

from __future__ import annotations

from collections.abc import Sequence

from megackpt.engine.checkpoint.manifest import check_arrays_complete, check_readable
from megackpt.engine.data.read import read_tensors
from megackpt.entities import ShardedTensor
from megackpt.entities.describe import describe
from megackpt.formats.contents import Contents
from megackpt.options import LoadOptions
from megackpt.plans.planning import plan_load
from megackpt.storage import Store

READ_OPTIONS = LoadOptions(threads=4)


def read_parts(contents: Contents, tensors: Sequence[ShardedTensor], *, where: str) -> None:
    """Fill tensors that declare parts of stored arrays. Local.

    Raises:
        IntegrityError, FormatError, StorageError: the bytes are damaged, or cannot be read.
    """
    requested = describe(tensors, rank=0)
    chunks = contents.chunks_for([requested.table])
    copies = plan_load(requested, chunks.table, where=where)
    read_tensors(chunks, copies, tensors, READ_OPTIONS)


def check_can_be_read(contents: Contents, keys: Sequence[str], store: Store) -> None:
    """Check that the files of a checkpoint hold every element of some arrays. Local; no chunk is read.

    Raises:
        FormatError: an element is in no file, or an array cannot be loaded.
    """
    check_readable(keys, contents.unreadable, where=store.location)
    check_arrays_complete(store, contents.chunks(sorted(keys)), sorted(keys))
