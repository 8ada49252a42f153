"""`megackpt.verify`: all damage of a checkpoint."""

from __future__ import annotations

from megackpt.engine.data.progress import Progress
from megackpt.engine.verification.verify import VerifyReport, verify_checkpoint
from megackpt.options import VerifyOptions
from megackpt.storage import Location, opened_store
from megackpt.whole.arguments import checked_progress


def verify(
    checkpoint_dir: Location,
    *,
    deep: bool = False,
    threads: int = 4,
    allow_unsafe_pickle: bool = False,
    progress: Progress | None = None,
) -> VerifyReport:
    """Find all damage of a checkpoint of any known format. Local; nothing is changed.

    Without `deep` the structure is checked: the commit, the index and its digest, that every file exists
    with the right length, that every chunk is inside its file, and that chunks cover every array
    exactly once. No bytes of arrays are read.

    Args:
        checkpoint_dir: a path, a URL or an open store of one checkpoint (not the root of a run).
        deep: also read every byte and compare it with its digest, decode objects and common state, and
            compare stored digests of whole arrays.
        threads: number of concurrent reads; each has a buffer of 4 MiB.
        allow_unsafe_pickle: load any class that pickles of other formats name. Unpickling runs code that
            the file chooses: set it only for a checkpoint you trust.
        progress: an object with the methods `begin(doing, nbytes)`, called when a phase begins, and
            `advance(nbytes)`, called by several threads as bytes are read.

    Returns:
        A report with all damage, in the order of files. Damage is returned, not raised.

    Raises:
        NotACheckpointError: there is no committed checkpoint at this location.
        FormatError: the checkpoint has an unknown format.
        StorageError: the store cannot be read: no permission, no connection.
        DeclarationError: an argument is invalid.

    >>> verify("run/iter_0000100", deep=True).is_whole  # doctest: +SKIP
    True
    """
    options = VerifyOptions(deep=deep, threads=threads, allow_unsafe_pickle=allow_unsafe_pickle)
    progress = checked_progress(progress)
    with opened_store(checkpoint_dir) as store:
        return verify_checkpoint(store, options, progress)
