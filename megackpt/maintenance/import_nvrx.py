"""`megackpt.import_nvrx`: a checkpoint from local checkpoints of nvidia-resiliency-ext."""

from __future__ import annotations

from megackpt.comm import Group
from megackpt.engine.data.progress import Progress
from megackpt.formats.registry import SaveChoice
from megackpt.maintenance.foreign_state import ForeignState
from megackpt.maintenance.import_folder import FolderImport, import_state
from megackpt.maintenance.nvrx_folder import read_nvrx
from megackpt.storage import Location


def import_nvrx(
    source: Location,
    target: Location,
    to: SaveChoice = "megackpt",
    *,
    verify: bool = True,
    overwrite: bool = False,
    array_digests: bool = False,
    timeout_s: float = 600.0,
    group: Group | None = None,
    progress: Progress | None = None,
) -> FolderImport:
    """Write a local checkpoint of nvidia-resiliency-ext as a checkpoint that loads at any layout.

    Its files are those of Megatron-LM's `--non-persistent-ckpt-type local`, and load only at the layout that
    saved them. Collective: every rank of the group calls it. Neither nvidia-resiliency-ext nor Megatron-Core
    is needed, and no code that the files name is run. Objects of ranks, such as random streams, are left out.

    Args:
        source: a path of the folder that the manager was given, with the files of all nodes. The newest
            iteration that has a file of every rank is taken. Replicas in several files are compared.
        target: as for `import_deepspeed`, and so are all other arguments.
        to: its format.
        verify: compare the checksums in the files, and read the new checkpoint again.
        overwrite: replace a checkpoint of the same format at the target.
        array_digests: store a digest of each array.
        timeout_s: how long a rank waits for the others at each synchronisation point, in seconds.
        group: the ranks that take part.
        progress: as in `megackpt.verify`, for this rank's share.

    Returns:
        Counts of the whole checkpoint, the same on all ranks.

    Raises:
        NotACheckpointError: there are no such files, or no iteration has those of all ranks.
        UnsupportedError: the files do not have Megatron-Core's state dict.
        CoverageError: parts of arrays are in none of the files.
        FormatError: files are damaged, or contradict each other. Nothing is written.
        DeclarationError: there is already a checkpoint at the target, or an argument is invalid.
        IntegrityError: the new checkpoint differs from what was written.

    >>> import_nvrx("/tmp/local", "run/rescued").is_verified  # doctest: +SKIP
    True
    """

    def read(path: str, checks_bytes: bool) -> ForeignState:
        return read_nvrx(path, checks_bytes=checks_bytes)

    return import_state(
        source,
        target,
        to,
        read,
        verify=verify,
        overwrite=overwrite,
        array_digests=array_digests,
        timeout_s=timeout_s,
        group=group,
        progress=progress,
    )
