"""`megackpt.convert`: write a checkpoint in another format, chunk by chunk, in bounded memory."""

from __future__ import annotations

from megackpt.comm import Group
from megackpt.engine.data.progress import Progress
from megackpt.formats.registry import SaveChoice
from megackpt.storage import Location
from megackpt.whole.copy import CopyReport, copy_checkpoint


def convert(
    source: Location,
    target: Location,
    to: SaveChoice,
    *,
    verify: bool = True,
    overwrite: bool = False,
    array_digests: bool = False,
    allow_unsafe_pickle: bool = False,
    buffer_bytes: int = 4 * 1024 * 1024,
    timeout_s: float = 600.0,
    group: Group | None = None,
    progress: Progress | None = None,
) -> CopyReport:
    """Write a copy of a checkpoint of any known format, in another format or in the same one.

    Collective: every rank of the group calls it. The group may have another size than the job that saved the
    source, and needs no GPU and no model. The target becomes a checkpoint in one step; if anything fails,
    there is none. Values of classes that this process does not know are copied unchanged.

    Args:
        source: a path, a URL or an open store of one checkpoint (not the root of a run).
        target: the location of the new checkpoint; created if it does not exist.
        to: the new format: a backend name (`"megackpt"`, `"torch_dist"`, `"zarr"`), `(backend, version)`,
            or a strategy.
        verify: read the new checkpoint again, and compare every byte with the source.
        overwrite: replace a checkpoint of the same format at the target.
        array_digests: store a digest of each array, as `SaveOptions(array_digests=True)` does.
        allow_unsafe_pickle: as in `megackpt.verify`.
        buffer_bytes: how many bytes of a chunk are in memory at a time, if its format can be read in parts.
        timeout_s: how long a rank waits for the others at each synchronisation point, in seconds.
        group: the ranks that take part; None for all ranks of torch.distributed, or this process alone.
        progress: as in `megackpt.verify`, for this rank's share.

    Returns:
        Counts of the whole checkpoint, the same on all ranks.

    Raises:
        NotACheckpointError: there is no committed checkpoint at the source.
        DeclarationError: there is already a checkpoint at the target, the format is unknown or can only be
            read, or an argument is invalid.
        IntegrityError: the source is damaged, or the new checkpoint differs from it.
        UnserializableError: the new format cannot store an object or the common state.
        UnsupportedError, MissingExtraError: the format has no digests of arrays, or needs an extra that is
            not installed.
        CheckpointError: each of these, and every other error; the same on all ranks.

    >>> convert("run/iter_0000100", "for_analysis", "zarr").is_verified  # doctest: +SKIP
    True
    """
    return copy_checkpoint(
        source,
        target,
        to,
        verify=verify,
        overwrite=overwrite,
        array_digests=array_digests,
        allow_unsafe_pickle=allow_unsafe_pickle,
        buffer_bytes=buffer_bytes,
        timeout_s=timeout_s,
        group=group,
        progress=progress,
    )
