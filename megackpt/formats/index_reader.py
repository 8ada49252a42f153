"""Opens an index: a small one, or one that was written without a head, is read as a whole, in one request."""

from __future__ import annotations

from megackpt.formats.documents import file_entry
from megackpt.formats.index_file import StoredIndex, WholeIndex, read_index
from megackpt.formats.strategy import MANIFEST, Json
from megackpt.storage import Store

WHOLE_BYTES = 1024 * 1024
"""An index of no more than this is read as a whole."""


def open_index(
    store: Store, document: Json, *, document_name: str = MANIFEST, whole_bytes: int = WHOLE_BYTES
) -> StoredIndex:
    """Open the index that the entry `index` of a document names.

    document is the content of the file called document_name. An index of no more than whole_bytes is read as
    a whole.

    Raises:
        FormatError, IntegrityError: the index is not what the format, or the entry, says.
    """
    entry, where = file_entry(store, document, "index", document_name=document_name)
    if "head" not in entry or entry["nbytes"] <= whole_bytes:
        return WholeIndex(read_index(store, document, document_name=document_name))
    from megackpt.formats.partial_index import PartialIndex

    return PartialIndex.open(store, entry, where)
