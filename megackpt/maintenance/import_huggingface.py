"""`megackpt.import_huggingface`: write a Hugging Face folder as a checkpoint in our names.

It takes bounded memory, and no model. Ranks divide the chunks of the new checkpoint, read each from the files
of the folder, and commit in one step, as in a save.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from megackpt.arguments import check_count, check_flags, check_seconds
from megackpt.comm import Group, errors_on_all_ranks, group_or_world
from megackpt.engine.checkpoint.opening import open_checkpoint, read_common
from megackpt.engine.checkpoint.viewed_contents import with_views
from megackpt.engine.data.progress import Progress
from megackpt.engine.saving.array_digests import with_array_digests
from megackpt.engine.saving.write import PlannedSave, write_and_commit
from megackpt.errors import IntegrityError
from megackpt.formats.contents import Contents
from megackpt.formats.registry import SaveChoice, save_strategy
from megackpt.formats.strategy import ChunkParts
from megackpt.maintenance.arguments import checked_progress
from megackpt.maintenance.huggingface_map import ChosenMap
from megackpt.maintenance.huggingface_model_files import (
    KEPT_FILES,
    MAX_KEPT_BYTES,
    ConfigSource,
    ModelFiles,
    kept_files,
)
from megackpt.maintenance.import_plan import (
    ImportPlan,
    RowWindow,
    new_arrays,
    with_stacked_layers_where_equal,
)
from megackpt.maintenance.mapped_reading import MappedCheckpoint, check_fits, checked_dtype
from megackpt.maintenance.new_checkpoint import NewCheckpoint, TargetState, check_target, prepare_target
from megackpt.maintenance.part_reading import check_can_be_read, read_parts
from megackpt.maintenance.windows import ByteArray, filled_windows
from megackpt.maps import MapChoice, RegionMap
from megackpt.maps.text_part import TextPart
from megackpt.metadata import ArraySpec
from megackpt.storage import Location, digest_of_parts, opened_store

log = logging.getLogger(__name__)

_BUFFERS = re.compile(r".*\.(rotary_emb\.inv_freq|attn\.(masked_)?bias)")
"""Tensors that older versions of transformers stored, and computed again when they loaded a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceImport:
    """The result of `megackpt.import_huggingface`.

    Attributes:
        location: the new checkpoint.
        map: name of the map.
        files: names of the tokenizer's and other small files that are part of the checkpoint.
        left_out: names of the tensors that are not of the text model, with `text_only`.
        backend: format of the checkpoint.
        version: the version of its format.
        arrays: number of arrays.
        chunks: number of chunks.
        nbytes: bytes of all arrays.
        is_verified: whether the checkpoint was read again and is equal to what was written.
    """

    location: str
    map: str
    files: tuple[str, ...]
    left_out: tuple[str, ...]
    backend: str
    version: int
    arrays: int
    chunks: int
    nbytes: int
    is_verified: bool


def import_huggingface(
    source: Location,
    target: Location,
    to: SaveChoice = "megackpt",
    *,
    map: MapChoice = "auto",
    config: ConfigSource = None,
    dtype: torch.dtype | str | None = None,
    stacked: bool = True,
    text_only: bool = False,
    prefix: str = "",
    verify: bool = True,
    overwrite: bool = False,
    array_digests: bool = False,
    buffer_bytes: int = 32 * 1024 * 1024,
    timeout_s: float = 600.0,
    group: Group | None = None,
    progress: Progress | None = None,
) -> HuggingFaceImport:
    """Write a Hugging Face folder as a checkpoint with our names, from which a model of any layout loads.

    Collective: every rank of the group calls it. It needs no GPU and no model. The target becomes a
    checkpoint in one step; if anything fails, there is none. Its content metadata has the config as
    `huggingface_config`, and the tokenizer and other small files (`*.json`, `*.txt`, `*.model`, `*.jinja`,
    `*.tiktoken`; 64 MiB at most) as `huggingface_files`, so that `export_huggingface` gives the folder back,
    bit for bit.

    Args:
        source: a path, a URL or an open store of the folder.
        target: the location of the new checkpoint; created if it does not exist.
        to: its format, as for `megackpt.convert`.
        map: as for `export_huggingface`.
        config: as for `export_huggingface`; None: the config.json of the folder.
        dtype: as for `export_huggingface`.
        stacked: store each array of the layers once, with an axis over layers, if all layers have the same
            arrays, as models of equal layers do; else each layer has keys of its own.
        text_only: import the text model of a multimodal one, whose config is `text_config`, and leave out
            all other tensors.
        prefix: what the keys of the new checkpoint begin with.
        verify: read the new checkpoint again, and compare digests with what was written.
        overwrite: replace a checkpoint of the same format at the target.
        array_digests: store a digest of each array, as `SaveOptions(array_digests=True)` does.
        buffer_bytes: bytes that are read and written at a time; there are two such buffers.
        timeout_s: how long a rank waits for the others at each synchronisation point, in seconds.
        group: the ranks that take part; None for all ranks of torch.distributed, or this process alone.
        progress: as in `megackpt.verify`, for this rank's share.

    Returns:
        Counts of the whole checkpoint, the same on all ranks.

    Raises:
        NotACheckpointError: there is no folder with weights at the source.
        MapError: there is no such map, the config contradicts itself, or the folder has missing or additional
            tensors or other shapes. Nothing is written.
        DeclarationError: there is already a checkpoint at the target, no config, or an argument is invalid.
        FormatError, IntegrityError: the folder is damaged, or the new checkpoint differs from it.
        CheckpointError: each of these, and every other error; the same on all ranks.

    >>> import_huggingface("folder", "run/imported").is_verified  # doctest: +SKIP
    True
    """
    check_seconds("timeout_s", timeout_s)
    check_count("buffer_bytes", buffer_bytes)
    check_flags(stacked=stacked, text_only=text_only, verify=verify)
    check_flags(overwrite=overwrite, array_digests=array_digests)
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
                buffer_bytes=buffer_bytes,
            )
            choice = ChosenMap(map, prefix)
            planned = run.plan(choice, config, checked_dtype(dtype), stacked=stacked, text_only=text_only)
            state = run.prepare(planned, overwrite=overwrite)
        attempt, _ = run.exchange(planned.source.contents.identity)
        with run.removed_on_error(state, attempt):
            digests = run.write(planned, state, attempt)
            if verify:
                run.verify(planned, digests)
    table = planned.rows.plan.table
    return HuggingFaceImport(
        location=run.target.location,
        map=planned.map,
        files=planned.files,
        left_out=planned.left_out,
        backend=strategy.backend,
        version=strategy.version,
        arrays=len(table.arrays),
        chunks=len(table),
        nbytes=int(table.nbytes.sum()),
        is_verified=verify,
    )


@dataclass(frozen=True, slots=True)
class _PlannedImport:
    """What is written, the same on all ranks."""

    source: MappedCheckpoint
    rows: ImportPlan
    common: Mapping[str, Any]
    map: str
    files: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Import(NewCheckpoint):
    """The steps of an import; for the fields see the arguments of `import_huggingface`."""

    def plan(
        self,
        choice: ChosenMap,
        config: ConfigSource,
        dtype: str | None,
        *,
        stacked: bool,
        text_only: bool,
    ) -> _PlannedImport:
        """Open the folder, check that the map fits, and plan the chunks. Local; nothing is written."""
        where = self.source.location
        contents = open_checkpoint(self.source)
        _, content = read_common(contents, where=where)
        files = ModelFiles.of(config, content, where=where)
        kept, long = kept_files(self.source, {} if config is None else files.others)
        if long and self.group.rank == 0:
            _warn_of_long_files(long, where)
        config, arrays = files.config, contents.arrays
        if text_only:
            text = TextPart.of(config, arrays)
            config, arrays = text.config, {key: arrays[key] for key in text.stored.values()}
            made = choice.of_folder(config, text.stored).inverse().with_left_keys(text.stored).inverse()
        else:
            made = choice.of_folder(config, arrays)
        if stacked:
            made = with_stacked_layers_where_equal(made)
        made = made.with_left_keys({key: choice.prefix + key for key in made.left})
        _check_folder(arrays, made, config, name=choice.name(config), where=where)
        check_can_be_read(contents, list(made.right), self.source)
        views = {key: array.viewed for key, array in made.right.items()}
        source = MappedCheckpoint(with_views(contents, views, where=where), made, where)
        metadata = {**content, "huggingface_config": config, KEPT_FILES: kept}
        return _PlannedImport(
            source=source,
            rows=ImportPlan.of(new_arrays(made, source.dtypes(dtype)), ranks=self.group.size),
            common={"state_dict": {}, "content_metadata": metadata},
            map=choice.name(config),
            files=tuple(sorted(kept)),
            left_out=tuple(sorted(contents.arrays.keys() - arrays)),
        )

    def prepare(self, planned: _PlannedImport, *, overwrite: bool) -> TargetState:
        """Check and create the target on rank 0."""
        if self.group.rank > 0:
            return TargetState()
        check_target(self.target, self.source, self.strategy, overwrite=overwrite)
        self.strategy.check_common(planned.common)
        return prepare_target(self.target, self.strategy)

    def write(self, planned: _PlannedImport, state: TargetState, attempt: str) -> Mapping[int, str]:
        """Write and commit the checkpoint; return the digests of this rank's rows. Collective."""
        parts = _ImportedParts(planned, self)
        self.progress.begin("writing", planned.rows.nbytes_of(planned.rows.plan.rows_of(self.group.rank)))
        save = PlannedSave(
            attempt=attempt,
            plan=planned.rows.plan,
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
        self.progress.begin("verifying", planned.rows.nbytes_of(planned.rows.plan.rows_of(self.group.rank)))
        with errors_on_all_ranks(self.group, "verifying the new checkpoint"):
            self._compare(planned, digests)

    def _compare(self, planned: _PlannedImport, digests: Mapping[int, str]) -> None:
        reread = _WrittenRows(open_checkpoint(self.target), planned.rows, self.target.location)
        windows = list(planned.rows.windows(list(digests), self.buffer_bytes))
        for window, data in filled_windows(windows, reread.fill):
            for row, part in planned.rows.parts(window, data):
                if digest_of_parts([part]) != digests[row]:
                    raise _difference(planned, row, self.target.location)
                self.progress.advance(len(part))


class _ImportedParts(ChunkParts):
    """The bytes of this rank's rows, read from the folder. Keeps their digests, and reports progress."""

    def __init__(self, planned: _PlannedImport, run: _Import) -> None:
        self._planned, self._buffer_bytes, self._progress = planned, run.buffer_bytes, run.progress
        self.digests: dict[int, str] = {}

    def __call__(self, row: int) -> Iterator[memoryview]:
        """Yield the bytes of a row."""
        for parts in self.in_order([row]):
            yield from parts

    def in_order(self, rows: Sequence[int]) -> Iterator[Iterator[memoryview]]:
        """Yield the bytes of each row; the next rows are read meanwhile."""
        windows = list(self._planned.rows.windows(rows, self._buffer_bytes))
        for window, data in filled_windows(windows, self._fill):
            for row, part in self._planned.rows.parts(window, data):
                self.digests[row] = digest_of_parts([part])
                self._progress.advance(len(part))
                yield iter([part])

    def _fill(self, window: RowWindow, data: ByteArray) -> None:
        self._planned.source.read(self._planned.rows.requests(window, data))


@dataclass(frozen=True, slots=True)
class _WrittenRows:
    """Rows of the new checkpoint."""

    contents: Contents
    rows: ImportPlan
    where: str

    def fill(self, window: RowWindow, data: ByteArray) -> None:
        """Read the rows of a window."""
        read_parts(self.contents, self.rows.requests(window, data), where=self.where)


def _warn_of_long_files(names: Sequence[str], where: str) -> None:
    log.warning(
        "%s: these files do not become part of the checkpoint, which has room for %s bytes of them: "
        "%s. Give the folder again as config when you export it.",
        where,
        f"{MAX_KEPT_BYTES:,}",
        ", ".join(names),
    )


def _check_folder(
    arrays: Mapping[str, ArraySpec], made: RegionMap, config: Mapping[str, Any], *, name: str, where: str
) -> None:
    """Check that a map has exactly some tensors of a folder.

    Raises:
        MapError: it has not.
    """
    stored = {key: spec for key, spec in arrays.items() if not _is_computed(key, made, config)}
    check_fits(made.right, stored, name=name, where=where)


def _is_computed(key: str, made: RegionMap, config: Mapping[str, Any]) -> bool:
    """Return whether a tensor is one that models compute again, or that is tied to another one."""
    if key in made.right:
        return False
    return _BUFFERS.fullmatch(key) is not None or (
        key == "lm_head.weight" and config.get("tie_word_embeddings") is True
    )


def _difference(planned: _PlannedImport, row: int, where: str) -> IntegrityError:
    table = planned.rows.plan.table
    key = table.arrays[int(table.array[row])].key
    return IntegrityError(
        f"{key!r} {table.describe(row)}: {where} has other bytes than were written. Suspect the storage.",
        key=key,
        path=where,
    )
