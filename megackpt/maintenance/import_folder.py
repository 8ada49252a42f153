"""`megackpt.import_deepspeed` and `megackpt.import_torch`: checkpoints from the folders of other tools.

The files are mapped, and their tensors are written part by part, as in a conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from megackpt.arguments import check_choice, check_flags, check_seconds
from megackpt.comm import Group, errors_on_all_ranks, group_or_world
from megackpt.engine.checkpoint.common_arrays import with_tensors
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.engine.data.progress import Progress
from megackpt.engine.saving.array_digests import with_array_digests
from megackpt.engine.saving.write import PlannedSave, write_and_commit
from megackpt.errors import IntegrityError, NotACheckpointError
from megackpt.formats.registry import SaveChoice, save_strategy
from megackpt.formats.strategy import ChunkParts
from megackpt.maintenance.arguments import checked_progress
from megackpt.maintenance.convert_source import as_declarations
from megackpt.maintenance.deepspeed_folder import read_deepspeed
from megackpt.maintenance.foreign_state import ForeignState, SourcePart, plan_foreign
from megackpt.maintenance.import_plan import ImportPlan, RowWindow
from megackpt.maintenance.new_checkpoint import NewCheckpoint, TargetState, check_target, prepare_target
from megackpt.maintenance.part_reading import read_parts
from megackpt.maintenance.torch_folder import read_torch
from megackpt.maintenance.windows import ByteArray, filled_windows
from megackpt.planning import SavePlan
from megackpt.planning.copy_plan import CopyPlan
from megackpt.storage import LocalStore, Location, digest_of_parts, opened_store
from megackpt.validation import check_coverage

Keys: TypeAlias = Literal["megackpt", "torch"]
Weights: TypeAlias = Literal["model", "masters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderImport:
    """The result of `megackpt.import_deepspeed` and `megackpt.import_torch`.

    Attributes:
        location: the new checkpoint.
        origin: what wrote the folder, such as "DeepSpeed 0.19.8, ZeRO-2, 8 ranks".
        left_out: what of the folder is not in the checkpoint, each with the reason.
        backend: format of the checkpoint.
        version: the version of its format.
        arrays: number of arrays.
        chunks: number of chunks.
        nbytes: bytes of all arrays.
        is_verified: whether the checkpoint was read again and is equal to what was written.
    """

    location: str
    origin: str
    left_out: tuple[str, ...]
    backend: str
    version: int
    arrays: int
    chunks: int
    nbytes: int
    is_verified: bool


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
) -> FolderImport:
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
            `integrations.torch_state`: `model.<name>`, `optimizer.state.<name>.exp_avg`, and
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

    def read(path: str, checks_bytes: bool) -> ForeignState:
        return read_deepspeed(path, checks_bytes=checks_bytes).state(keys, weights=weights, prefix=prefix)

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
) -> FolderImport:
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

    def read(path: str, checks_bytes: bool) -> ForeignState:
        return read_torch(path, prefix=prefix, checks_bytes=checks_bytes)

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


def import_state(
    source: Location,
    target: Location,
    to: SaveChoice,
    read: Callable[[str, bool], ForeignState],
    *,
    verify: bool,
    overwrite: bool,
    array_digests: bool,
    timeout_s: float,
    group: Group | None,
    progress: Progress | None,
) -> FolderImport:
    """Write what `read` returns for the path of the source. Collective."""
    check_seconds("timeout_s", timeout_s)
    check_flags(verify=verify, overwrite=overwrite, array_digests=array_digests)
    progress = checked_progress(progress)
    group = group_or_world(group, timeout_s=timeout_s)
    with ExitStack() as stack:
        with errors_on_all_ranks(group, "opening the folder"):
            strategy = save_strategy(to)
            run = _Import(
                source=stack.enter_context(opened_store(source)),
                target=stack.enter_context(opened_store(target)),
                strategy=with_array_digests(strategy) if array_digests else strategy,
                group=group,
                progress=progress,
                buffer_bytes=_BUFFER_BYTES,
            )
            # Rank 0 alone reads all bytes for the checksums.
            state = read(run.path(), verify and group.rank == 0)
            planned = run.plan(state)
            prepared = run.prepare(planned, overwrite=overwrite)
        attempt, _ = run.exchange(planned.identity())
        with run.removed_on_error(prepared, attempt):
            digests = run.write(planned, prepared, attempt)
            if verify:
                run.verify(planned, digests)
    table = planned.plan.table
    return FolderImport(
        location=run.target.location,
        origin=str(state.origin["imported_from"]),
        left_out=state.left_out,
        backend=strategy.backend,
        version=strategy.version,
        arrays=len(table.arrays),
        chunks=len(table),
        nbytes=int(table.nbytes.sum()),
        is_verified=verify,
    )


_BUFFER_BYTES = 32 * 1024 * 1024  # read at a time to verify; a chunk is at most half of that


@dataclass(frozen=True, slots=True)
class _PlannedImport:
    """What is written, the same on all ranks."""

    parts: list[SourcePart]
    copies: CopyPlan
    common: Mapping[str, Any]

    @property
    def plan(self) -> SavePlan:
        return self.copies.plan

    def identity(self) -> str:
        """Return a text that differs if ranks plan different chunks."""
        table = self.plan.table
        parts = (repr(table.arrays).encode(), table.array.tobytes(), table.nbytes.tobytes())
        return digest_of_parts([memoryview(part) for part in parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Import(NewCheckpoint):
    """The steps of an import."""

    def path(self) -> str:
        """Return the path of the source.

        Raises:
            NotACheckpointError: it is not on a file system, where files can be mapped.
        """
        if isinstance(self.source, LocalStore):
            return self.source.location
        where = self.source.location
        raise NotACheckpointError(
            f"{where} is not a local directory, and files of torch.save are read from one only. Copy the "
            f"folder to a disk first.",
            path=where,
        )

    def plan(self, state: ForeignState) -> _PlannedImport:
        """Plan the chunks, and check that each array has all of its elements once. Local."""
        parts, copies = plan_foreign(state.arrays, ranks=self.group.size)
        check_coverage(as_declarations(copies.plan))
        tree = state.common
        if not self.strategy.capabilities.refers_to_arrays:
            tree = with_tensors(tree, {})  # arrays are then loaded by their keys alone
        common = {"state_dict": tree, "content_metadata": state.origin}
        return _PlannedImport(parts, copies, common)

    def prepare(self, planned: _PlannedImport, *, overwrite: bool) -> TargetState:
        """Check and create the target on rank 0."""
        if self.group.rank > 0:
            return TargetState()
        check_target(self.target, self.source, self.strategy, overwrite=overwrite)
        self.strategy.check_common(planned.common)
        return prepare_target(self.target, self.strategy)

    def write(self, planned: _PlannedImport, state: TargetState, attempt: str) -> Mapping[int, str]:
        """Write and commit the checkpoint; return the digests of this rank's rows. Collective."""
        parts = _ImportedParts(planned, self.progress)
        self.progress.begin("writing", self._nbytes(planned))
        save = PlannedSave(
            attempt=attempt,
            plan=planned.plan,
            parts=parts,
            common=planned.common,
            strategy=self.strategy,
            leftovers=state.earlier,
        )
        write_and_commit(save, self.target, self.group)
        return parts.digests

    def verify(self, planned: _PlannedImport, digests: Mapping[int, str]) -> None:
        """Read the new checkpoint, each rank its rows, and compare digests with those written. Collective.

        Raises:
            IntegrityError: they differ.
        """
        self.progress.begin("verifying", self._nbytes(planned))
        with errors_on_all_ranks(self.group, "verifying the new checkpoint"):
            self._compare(planned, digests)

    def _compare(self, planned: _PlannedImport, digests: Mapping[int, str]) -> None:
        rows, written, where = ImportPlan(planned.plan), open_checkpoint(self.target), self.target.location

        def fill(window: RowWindow, data: ByteArray) -> None:
            read_parts(written, rows.requests(window, data), where=where)

        for window, data in filled_windows(list(rows.windows(list(digests), self.buffer_bytes)), fill):
            for row, part in rows.parts(window, data):
                if digest_of_parts([part]) != digests[row]:
                    raise _difference(planned.plan, row, where)
                self.progress.advance(len(part))

    def _nbytes(self, planned: _PlannedImport) -> int:
        """Return the size of this rank's share."""
        return int(planned.plan.table.nbytes[planned.plan.rows_of(self.group.rank)].sum())


class _ImportedParts(ChunkParts):
    """The bytes of this rank's rows. Keeps their digests, and reports progress."""

    def __init__(self, planned: _PlannedImport, progress: Progress) -> None:
        self._planned, self._progress = planned, progress
        self._flat: tuple[int, Tensor] = (-1, torch.empty(0))
        self.digests: dict[int, str] = {}

    def __call__(self, row: int) -> Iterator[memoryview]:
        """Yield the bytes of a row as one part."""
        table = self._planned.plan.table
        dtype = getattr(torch, table.arrays[int(table.array[row])].dtype)
        first = int(self._planned.copies.start[row]) // dtype.itemsize
        count = int(table.nbytes[row]) // dtype.itemsize
        elements = self._flattened(int(self._planned.plan.entity[row]))[first : first + count]
        part = elements.to(dtype).view(torch.uint8).numpy().data
        self.digests[row] = digest_of_parts([part])
        self._progress.advance(len(part))
        yield part

    def _flattened(self, number: int) -> Tensor:
        """Return the elements of a part; a tensor that is not contiguous is copied once for all rows."""
        kept, elements = self._flat
        if kept != number:
            elements = self._planned.parts[number].data.detach().reshape(-1)
            # Another thread may put another tensor here at once, so the attribute is not read again.
            self._flat = number, elements
        return elements


def _difference(plan: SavePlan, row: int, where: str) -> IntegrityError:
    key = plan.table.arrays[int(plan.table.array[row])].key
    return IntegrityError(
        f"{key!r} {plan.table.describe(row)}: {where} has other bytes than were written. Suspect the "
        f"storage.",
        key=key,
        path=where,
    )
