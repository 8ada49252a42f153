"""`convert`, `import_deepspeed`, `import_torch` and `import_nvrx`: write a checkpoint in another format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from megackpt.comm import Group
from megackpt.engine.data.progress import Progress
from megackpt.formats.contents import Contents
from megackpt.formats.foreign.deepspeed import DeepSpeedLoadStrategy
from megackpt.formats.foreign.legacy_megatron import LegacyMegatronLoadStrategy
from megackpt.formats.foreign.nvrx import NvrxLoadStrategy
from megackpt.formats.foreign.strategy import ForeignLoadStrategy, local_path
from megackpt.formats.foreign.torch_save import TorchSaveLoadStrategy
from megackpt.formats.registry import SaveChoice
from megackpt.ground.arguments import check_choice
from megackpt.storage import Location, Store
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


# `megackpt.import_deepspeed`, `import_torch` and `import_nvrx`: checkpoints from files of other tools.
#
# Each is `megackpt.convert` of a source that is read by one format, with the options of that format.

Keys: TypeAlias = Literal["megackpt", "torch"]
Weights: TypeAlias = Literal["model", "masters"]


def import_deepspeed(
    source: Location,
    target: Location,
    to: SaveChoice = "megackpt",
    *,
    keys: Keys = "megackpt",
    weights: Weights = "model",
    prefix: str = "",
    verify: bool = True,
    overwrite: bool = False,
    array_digests: bool = False,
    timeout_s: float = 600.0,
    group: Group | None = None,
    progress: Progress | None = None,
) -> CopyReport:
    """Write a ZeRO-1, 2 or 3 folder of DeepSpeed as a checkpoint that loads at any layout.

    Collective: every rank of the group calls it. DeepSpeed is not needed, and no code that the files name is
    run. The files are mapped and checked, and arrays are written part by part, so that memory is bounded.
    The target becomes a checkpoint in one step; if anything fails, there is none.

    Args:
        source: a path of the folder that was given to `save_checkpoint`, of which the latest step is taken,
            or of one step in it.
        target: the location of the new checkpoint; created if it does not exist.
        to: its format, as for `megackpt.convert`.
        keys: "megackpt" for the names of our layers and wrappers of optimizers: `<name>`,
            `optimizer.state.fp32_param.<name>`, `optimizer.state.exp_avg.<name>`; "torch" for those of
            `contrib.torch_state`: `model.<name>`, `optimizer.state.<name>.exp_avg`, and
            `masters.<name>`.
        weights: "model" to store all weights in the precision of the model, "masters" in that of the
            optimizer.
        prefix: with the keys of megackpt, what each parameter's name begins with.
        verify: compare the checksums in the files, and read the new checkpoint again to compare digests with
            what was written.
        overwrite: replace a checkpoint of the same format at the target.
        array_digests: store a digest of each array, as `SaveOptions(array_digests=True)` does.
        timeout_s: how long a rank waits for the others at each synchronisation point, in seconds.
        group: the ranks that take part; None for all ranks of torch.distributed, or this process alone.
        progress: as in `megackpt.verify`, for this rank's share.

    Returns:
        Counts of the whole checkpoint, the same on all ranks.

    Raises:
        NotACheckpointError: there is no such folder at the source.
        UnsupportedError: the folder has model parallelism, or experts of DeepSpeed.
        FormatError: files are missing, damaged, or contradict each other. Nothing is written.
        DeclarationError: there is already a checkpoint at the target, or an argument is invalid.
        IntegrityError: the new checkpoint differs from what was written.

    >>> import_deepspeed("run/deepspeed", "run/imported").is_verified  # doctest: +SKIP
    True
    """
    check_choice("keys", keys, ("megackpt", "torch"))
    check_choice("weights", weights, ("model", "masters"))
    return import_files(
        "deepspeed",
        source,
        target,
        to,
        settings={"keys": keys, "weights": weights, "prefix": prefix},
        verify=verify,
        overwrite=overwrite,
        array_digests=array_digests,
        timeout_s=timeout_s,
        group=group,
        progress=progress,
    )


def import_torch(
    source: Location,
    target: Location,
    to: SaveChoice = "megackpt",
    *,
    prefix: str = "",
    verify: bool = True,
    overwrite: bool = False,
    array_digests: bool = False,
    timeout_s: float = 600.0,
    group: Group | None = None,
    progress: Progress | None = None,
) -> CopyReport:
    """Write what a script has saved with torch.save, of DDP or FSDP, as a checkpoint.

    Collective: every rank of the group calls it. No code that the files name is run. The new checkpoint has
    the tree of the file: `model.state_dict()` under "model" has the keys `model.<name>`, and a load fills
    plain tensors, DTensors and `ShardedTensor`s of these keys, at any layout. The prefix `module.` of
    DistributedDataParallel is left out, where all keys of a dict have it.

    Args:
        source: a path of a file of torch.save with a full state dict, or of a folder with one such file for
            each rank, whose tensors are equal on all ranks, DTensors (FSDP2) or ShardedTensors (FSDP version
            1, `StateDictType.SHARDED_STATE_DICT`). Copies of a part, as under HSDP, are compared.
        target: the location of the new checkpoint; created if it does not exist.
        to: its format, as for `megackpt.convert`.
        prefix: what the keys begin with: "model." for a file that is a model's state dict.
        verify: compare the checksums in the files, and read the new checkpoint again to compare digests with
            what was written.
        overwrite: replace a checkpoint of the same format at the target.
        array_digests: store a digest of each array, as `SaveOptions(array_digests=True)` does.
        timeout_s: how long a rank waits for the others at each synchronisation point, in seconds.
        group: the ranks that take part; None for all ranks of torch.distributed, or this process alone.
        progress: as in `megackpt.verify`, for this rank's share.

    Returns:
        Counts of the whole checkpoint, the same on all ranks.

    Raises:
        NotACheckpointError: there is no file of torch.save at the source.
        UnsupportedError: ranks have parts of tensors, and the files do not say which parts, as with flat
            parameters of FSDP version 1.
        FormatError, CoverageError: files are missing, damaged, or contradict each other. Nothing is written.
        DeclarationError: there is already a checkpoint at the target, or an argument is invalid.
        IntegrityError: the new checkpoint differs from what was written.

    >>> import_torch("run/step_10.pt", "run/imported").is_verified  # doctest: +SKIP
    True
    """
    return import_files(
        "torch",
        source,
        target,
        to,
        settings={"prefix": prefix},
        verify=verify,
        overwrite=overwrite,
        array_digests=array_digests,
        timeout_s=timeout_s,
        group=group,
        progress=progress,
    )


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
) -> CopyReport:
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
    return import_files(
        "nvrx",
        source,
        target,
        to,
        settings={},
        verify=verify,
        overwrite=overwrite,
        array_digests=array_digests,
        timeout_s=timeout_s,
        group=group,
        progress=progress,
    )


_BUFFER_BYTES = 16 * 1024 * 1024  # as long as the longest chunk that a copy writes
_STRATEGIES: dict[str, type[ForeignLoadStrategy]] = {
    strategy.backend: strategy
    for strategy in (
        DeepSpeedLoadStrategy,
        LegacyMegatronLoadStrategy,
        NvrxLoadStrategy,
        TorchSaveLoadStrategy,
    )
}


def import_files(
    backend: str,
    source: Location,
    target: Location,
    to: SaveChoice,
    *,
    settings: Mapping[str, str],
    **options: Any,
) -> CopyReport:
    """Copy the files of another tool, which are read as one format. Collective.

    Args:
        backend: name of the format.
        source: the files.
        target: the new checkpoint.
        to: its format.
        settings: arguments of the format's strategy.
        options: as for `copy_checkpoint`.

    Raises:
        CheckpointError: as `import_deepspeed`; the same on all ranks.
    """
    strategy = _STRATEGIES[backend](**settings)

    def open_source(store: Store) -> Contents:
        return strategy.open_path(local_path(store))

    return copy_checkpoint(source, target, to, open_source=open_source, buffer_bytes=_BUFFER_BYTES, **options)
