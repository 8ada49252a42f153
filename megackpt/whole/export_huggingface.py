"""`megackpt.export_huggingface`: write a checkpoint as a Hugging Face folder.

It takes bounded memory, and no model.

The map says which elements of the checkpoint each tensor of the folder has. Files are planned first. Ranks
and threads then write whole files, and rank 0 writes the index when all files are there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias, get_args

import torch

from megackpt.comm import Group, errors_on_all_ranks, gather_step, group_or_world
from megackpt.engine.checkpoint.common_reading import stored_references
from megackpt.engine.checkpoint.opening import (
    check_readable,
    open_checkpoint,
    read_common_and_references,
)
from megackpt.engine.data.progress import Progress
from megackpt.engine.data.workers import run_jobs
from megackpt.errors import DeclarationError, MapError, MismatchError
from megackpt.formats.contents import Contents
from megackpt.formats.huggingface.names import INDEX
from megackpt.ground.arguments import check_choice, check_count, check_flags, check_seconds
from megackpt.maps import MapChoice, RegionMap
from megackpt.maps.requests import MASTER, OPTIMIZER
from megackpt.plans.metadata import ArraySpec
from megackpt.storage import Location, Store, digest_of, opened_store
from megackpt.whole.adapter_arrays import is_of_adapter
from megackpt.whole.arguments import checked_progress
from megackpt.whole.copy_source import check_unchanged
from megackpt.whole.huggingface_map import ChosenMap
from megackpt.whole.huggingface_model_files import ConfigSource, ModelFiles
from megackpt.whole.huggingface_plan import (
    PlannedFile,
    PlannedTensor,
    index_text,
    plan_digest,
    plan_files,
    position_in_model,
)
from megackpt.whole.huggingface_writing import Digests, ExportTarget, FileExport, written_small_files
from megackpt.whole.mapped_reading import (
    MappedCheckpoint,
    check_fits,
    checked_dtype,
    is_floating,
    mapped_contents,
)
from megackpt.whole.new_checkpoint import is_same_location
from megackpt.whole.stored_adapters import StoredAdapters
from megackpt.whole.windows import check_can_be_read

WeightsChoice: TypeAlias = Literal["model", "masters"]
"""The weights of the model, or the master weights of its optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceExport:
    """The result of `megackpt.export_huggingface`.

    Attributes:
        location: the folder.
        map: name of the map.
        dtype: the dtype of most of its bytes, which config.json names.
        tensors: number of tensors.
        files: number of files with tensors.
        kept_files: how many of them an interrupted export had finished before.
        nbytes: bytes of all tensors.
        is_verified: whether all files were read again and are equal to what was written.
        merged_adapters: names of the adapters that were merged into the weights.
    """

    location: str
    map: str
    dtype: str
    tensors: int
    files: int
    kept_files: int
    nbytes: int
    is_verified: bool
    merged_adapters: tuple[str, ...] = ()


def export_huggingface(
    source: Location,
    target: Location,
    *,
    map: MapChoice = "auto",
    config: ConfigSource = None,
    dtype: torch.dtype | str | None = None,
    weights: WeightsChoice = "model",
    merge_adapters: Sequence[str] = (),
    adapters_from: Location | None = None,
    max_file_bytes: int = 5_000_000_000,
    buffer_bytes: int = 16 * 1024 * 1024,
    workers: int = 2,
    verify: bool = True,
    overwrite: bool = False,
    prefix: str = "",
    norm_added: int = 0,
    allow_unsafe_pickle: bool = False,
    timeout_s: float = 600.0,
    group: Group | None = None,
    progress: Progress | None = None,
) -> HuggingFaceExport:
    """Write the weights of a checkpoint as a folder that `from_pretrained` of transformers loads.

    Collective: every rank of the group calls it. It needs no GPU and no model. Ranks divide whole files among
    themselves. If it is interrupted, the next call with the same arguments keeps the finished files. The
    index, or the only file, comes last; until then the folder is no model.

    Args:
        source: a path, a URL or an open store of one checkpoint of any format (not the root of a run).
        target: the folder; created if it does not exist.
        map: from our names to those of the folder: the name of a family, `"auto"` for that of the config's
            `model_type`, a family, or a map.
        config: a parsed config.json, the path of one, or a folder that has one. Of a folder, the generation
            config and the files of the tokenizer are copied as well. None: those in the content metadata of
            the checkpoint, `huggingface_config` and what an import has kept.
        dtype: dtype of floating-point tensors, rounded to the nearest value, ties to even; None keeps that of
            the checkpoint. Some stay in the dtype of the checkpoint: `e_score_correction_bias`,
            and `A_log`, `D` and `dt_bias` of Mamba-2 and gated delta nets.
        weights: `"masters"` takes the float32 master weights of the optimizer where there are any.
        merge_adapters: names of adapters (`megackpt.training.parallel.add_adapters`) that are merged into the
            weights, in this order. Sums are computed in float32 and rounded once, to the dtype that is
            written. Other adapters are left out.
        adapters_from: the checkpoint that has them, saved with `adapter_metadata(model)`; None: the source.
        max_file_bytes: limit of the tensors in one file.
        buffer_bytes: bytes that are read and written at a time; each worker has two such buffers.
        workers: number of files that this rank writes at a time.
        verify: read each file again, and compare a digest of each tensor with what was written.
        overwrite: replace a model that is at the target.
        prefix: what the keys of the model begin with in the checkpoint, such as `"model."`.
        norm_added: 1 for a checkpoint of Megatron-Core whose norms are zero-centred
            (`layernorm_zero_centered_gamma`) and those of the folder are not.
        allow_unsafe_pickle: as in `megackpt.verify`.
        timeout_s: how long a rank waits for the others at each synchronisation point, in seconds.
        group: the ranks that take part; None for all ranks of torch.distributed, or this process alone.
        progress: as in `megackpt.verify`, for this rank's share.

    Returns:
        Counts of the whole folder, the same on all ranks.

    Raises:
        NotACheckpointError: there is no committed checkpoint at the source.
        MapError: there is no such map, the config contradicts itself, or the checkpoint has missing or
            additional tensors or other shapes; so have adapters, or none are to be merged. Nothing is
            written.
        DeclarationError: there is a model at the target, no config, no such adapter, or an argument is
            invalid.
        IntegrityError, FormatError: the source is damaged, or a written file differs from it.
        StorageError: a file cannot be written. Finished files stay, and no index.
        CheckpointError: each of these, and every other error; the same on all ranks.

    >>> export_huggingface("run/iter_0000100", "folder", config="original_folder").files  # doctest: +SKIP
    3
    """
    check_seconds("timeout_s", timeout_s)
    check_count("buffer_bytes", buffer_bytes)
    check_count("max_file_bytes", max_file_bytes)
    check_count("workers", workers)
    check_count("norm_added", norm_added, least=0, most=1)
    check_flags(verify=verify, overwrite=overwrite, allow_unsafe_pickle=allow_unsafe_pickle)
    check_choice("weights", weights, get_args(WeightsChoice))
    merged = _checked_names(merge_adapters, adapters_from)
    progress = checked_progress(progress)
    group = group_or_world(group, timeout_s=timeout_s)
    with ExitStack() as stack:
        with errors_on_all_ranks(group, "planning the export"):
            stored = stack.enter_context(opened_store(source))
            changed = stored.watch()
            opened = _OpenedSource.open(stored, config, allow_unsafe_pickle=allow_unsafe_pickle)
            choice = ChosenMap(map, prefix, norm_added)
            made = _map_of(opened, choice, weights, merges_adapters=bool(merged))
            name = choice.name(opened.files.config)
            mapped = MappedCheckpoint(opened.contents, made.inverse(), opened.store.location)
            if merged:
                at = (
                    opened.store
                    if adapters_from is None
                    else stack.enter_context(opened_store(adapters_from))
                )
                mapped = replace(mapped, adapters=_adapters(merged, at, mapped, allow_unsafe_pickle))
            planned = _plan(opened, mapped, checked_dtype(dtype), name=name, max_file_bytes=max_file_bytes)
            store = stack.enter_context(opened_store(target))
            if is_same_location(store, opened.store):
                raise DeclarationError(
                    f"{store.location} is the source. Name another directory for the target."
                )
            folder = ExportTarget(store, planned.digest, planned.files)
            if group.rank == 0:
                folder.check(overwrite=overwrite)
        finished = _begin(folder, planned.model_files, group)
        chunks = planned.contents.chunks(planned.contents.arrays)
        export = FileExport(chunks, folder, buffer_bytes, verify, progress)
        with errors_on_all_ranks(group, "writing files"):
            _write_share(export, finished, group, workers=workers)
            if opened.contents.check_unchanged is not None:
                opened.contents.check_unchanged()
            check_unchanged(changed, stored)
        with errors_on_all_ranks(group, "writing the index"):
            if group.rank == 0:
                _end(folder)
    return HuggingFaceExport(
        location=store.location,
        map=name,
        dtype=planned.dtype,
        tensors=sum(len(file.tensors) for file in planned.files),
        files=len(planned.files),
        kept_files=len(finished),
        nbytes=sum(tensor.nbytes for file in planned.files for tensor in file.tensors),
        is_verified=verify,
        merged_adapters=merged,
    )


def _checked_names(names: Sequence[str], adapters_from: Location | None) -> tuple[str, ...]:
    """Return the names of adapters, or raise a DeclarationError for other values."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise DeclarationError(f"merge_adapters is {names!r}. Give a sequence of names, ['default'].")
    if len(set(names)) < len(names):
        raise DeclarationError(f"merge_adapters is {names!r}. Name each adapter once.")
    if adapters_from is not None and not names:
        raise DeclarationError("adapters_from is given, and no adapter. Name some with merge_adapters.")
    return tuple(names)


@dataclass(frozen=True, slots=True)
class _OpenedSource:
    """A checkpoint on one rank, and the files of the folder that hold no weights."""

    store: Store
    contents: Contents
    files: ModelFiles
    references: frozenset[str]

    @classmethod
    def open(cls, store: Store, config: ConfigSource, *, allow_unsafe_pickle: bool) -> _OpenedSource:
        contents = open_checkpoint(store, allow_unsafe_pickle=allow_unsafe_pickle)
        common, content = read_common_and_references(contents, where=store.location)
        references = frozenset(stored_references(common, contents).values())
        return cls(store, contents, ModelFiles.of(config, content, where=store.location), references)

    def weights(self, prefix: str, *, merges_adapters: bool) -> dict[str, ArraySpec]:
        """Return the arrays that a model with this prefix has, by key.

        Raises:
            MapError: there are adapters, and none are to be merged.
            FormatError: an array cannot be loaded, so that the export would be without it.
        """
        unreadable = self.contents.unreadable
        own = [key for key in unreadable if key.startswith(prefix) and not key.startswith(OPTIMIZER)]
        check_readable(own, unreadable, where=self.store.location)
        weights = {
            key: spec
            for key, spec in self.contents.arrays.items()
            if key.startswith(prefix)
            and is_floating(spec.dtype)
            and not key.startswith(OPTIMIZER)
            and key not in self.references
        }
        adapters = sorted(filter(is_of_adapter, weights))
        if adapters and not merges_adapters:
            raise MapError(
                f"{self.store.location} has adapters, as {adapters[0]!r}. Name those that are to be merged "
                f"into the weights with merge_adapters= (--merge-adapter NAME).",
                key=adapters[0],
                path=self.store.location,
            )
        return {key: spec for key, spec in weights.items() if not is_of_adapter(key)}


@dataclass(frozen=True, slots=True)
class _PlannedExport:
    """The files to write and their contents, the same on all ranks."""

    contents: Contents
    files: tuple[PlannedFile, ...]
    model_files: Mapping[str, bytes]
    dtype: str
    digest: str


def _map_of(opened: _OpenedSource, choice: ChosenMap, weights: str, *, merges_adapters: bool) -> RegionMap:
    """Return the map from the arrays of a checkpoint to the folder, and check that it fits. Local.

    Raises:
        MapError: it does not, or there are no master weights.
    """
    config, where, arrays = opened.files.config, opened.store.location, opened.contents.arrays
    stored = opened.weights(choice.prefix, merges_adapters=merges_adapters)
    made = choice.of_checkpoint(config, stored)
    if weights == "masters":
        masters = {key: MASTER + key for key in made.left if MASTER + key in arrays}
        if not masters:
            raise MapError(
                f"{where} has no master weights ({MASTER}...). Export the weights of the model.", path=where
            )
        made = made.with_left_keys(masters)
        stored = {masters.get(key, key): arrays[masters.get(key, key)] for key in stored}
    check_fits(made.left, stored, name=choice.name(config), where=where)
    return made


def _adapters(
    names: Sequence[str], store: Store, source: MappedCheckpoint, allow_unsafe_pickle: bool
) -> StoredAdapters:
    """Open the adapters that are merged into the weights of a source. Local."""
    return StoredAdapters.open(
        names,
        store,
        source.contents,
        list(source.map.right),
        where_weights=source.where,
        allow_unsafe_pickle=allow_unsafe_pickle,
    )


def _plan(
    opened: _OpenedSource, source: MappedCheckpoint, dtype: str | None, *, name: str, max_file_bytes: int
) -> _PlannedExport:
    """Check that the checkpoint can be read, and plan the files. Local; nothing is written."""
    check_can_be_read(opened.contents, list(source.map.right), opened.store)
    mapped = mapped_contents(source, dtype)
    files = plan_files(_tensors(source.map, mapped), max_file_bytes=max_file_bytes)
    written = Counter[str]()
    for file in files:
        for tensor in file.tensors:
            written[tensor.dtype] += tensor.nbytes
    main = dtype or written.most_common(1)[0][0]
    model_files = opened.files.files(main)
    stored = opened.contents
    about = {
        # Some formats do not name a save, so that another one may have the same identity.
        "source": [stored.identity, "" if stored.names_save else opened.store.location],
        "map": [name, digest_of(repr(source.map.pairs).encode())],
        "config": opened.files.config,
        "adapters": [] if source.adapters is None else source.adapters.description(),
    }
    return _PlannedExport(mapped, files, model_files, main, plan_digest(files, json.loads(json.dumps(about))))


def _tensors(made: RegionMap, mapped: Contents) -> list[PlannedTensor]:
    """Return the tensors of the folder, in the order of the model."""
    position: dict[str, tuple[int, int]] = {}
    for pair in made.pairs:
        start = pair.right.box.start
        at = position_in_model(pair.right.key, start[0] if start else 0)
        position[pair.left.key] = min(at, position.get(pair.left.key, at))
    names = sorted(made.left, key=position.__getitem__)
    return [
        PlannedTensor(name, mapped.arrays[name].dtype, mapped.arrays[name].global_shape) for name in names
    ]


def _begin(folder: ExportTarget, model_files: Mapping[str, bytes], group: Group) -> dict[str, Digests]:
    """Make the folder ready on rank 0; return the files that are finished already. Collective.

    Raises:
        MismatchError: ranks have opened different checkpoints.
    """
    with gather_step(group, "preparing the target", on_all_ranks=True) as step:
        finished = {}
        if group.rank == 0:
            finished = folder.begin()
            written_small_files(folder.store, dict(model_files))
        step.data = json.dumps([folder.plan, finished]).encode()
    messages = [json.loads(data) for data in step.results]
    if any(plan != messages[0][0] for plan, _ in messages):
        raise MismatchError("Ranks see different checkpoints, or have other arguments. Export again.")
    return dict(messages[0][1])


def _write_share(export: FileExport, finished: Mapping[str, Digests], group: Group, *, workers: int) -> None:
    """Write the files of this rank, or check those that are finished."""
    share = export.target.files[group.rank :: group.size]
    times = 2 if export.verify else 1
    nbytes = sum(sum(t.nbytes for t in f.tensors) * (1 if f.name in finished else times) for f in share)
    export.progress.begin("writing and verifying" if export.verify else "writing", nbytes)
    run_jobs(_jobs(export, share, finished), threads=workers, name="megackpt-export")


def _jobs(
    export: FileExport, share: Sequence[PlannedFile], finished: Mapping[str, Digests]
) -> list[Callable[[], None]]:
    jobs: list[Callable[[], None]] = []
    for file in share:
        if file.name not in finished:
            jobs.append(partial(export.write, file))
        elif export.verify:
            jobs.append(partial(export.check, file, file.name, finished[file.name]))
    return jobs


def _end(folder: ExportTarget) -> None:
    if len(folder.files) > 1:
        folder.store.replace(INDEX, index_text(folder.files).encode())
    folder.store.sync()
    folder.end()
