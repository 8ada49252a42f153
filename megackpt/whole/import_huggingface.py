"""`megackpt.import_huggingface`: write a Hugging Face folder as a checkpoint in our names.

The folder is opened as a checkpoint with our names: the map says which stored tensors each array is made of.
It is then copied as any other checkpoint, in bounded memory and without a model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megackpt.comm import Group, group_or_world
from megackpt.engine.checkpoint.opening import open_checkpoint, read_common
from megackpt.engine.checkpoint.views import with_views
from megackpt.engine.data.progress import Progress
from megackpt.formats.contents import Contents
from megackpt.formats.registry import SaveChoice
from megackpt.ground.arguments import check_flags, check_seconds
from megackpt.maps import MapChoice, RegionMap
from megackpt.maps.family import TextPart
from megackpt.plans.metadata import ArraySpec
from megackpt.storage import Location, Store
from megackpt.whole.copy import CopyReport, copy_checkpoint
from megackpt.whole.huggingface_map import ChosenMap, with_stacked_layers_where_equal
from megackpt.whole.huggingface_model_files import (
    KEPT_FILES,
    MAX_KEPT_BYTES,
    ConfigSource,
    ModelFiles,
    kept_files,
)
from megackpt.whole.mapped_reading import MappedCheckpoint, check_fits, checked_dtype, mapped_contents
from megackpt.whole.windows import check_can_be_read

log = logging.getLogger(__name__)

_BUFFERS = re.compile(r".*\.(rotary_emb\.inv_freq|attn\.(masked_)?bias)")
"""Tensors that older versions of transformers stored, and computed again when they loaded a model."""


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
) -> CopyReport:
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
    check_flags(stacked=stacked, text_only=text_only)
    check_seconds("timeout_s", timeout_s)
    group = group_or_world(group, timeout_s=timeout_s)
    folder = _Folder(
        ChosenMap(map, prefix), config, dtype, stacked=stacked, text_only=text_only, warns=group.rank == 0
    )
    report = copy_checkpoint(
        source,
        target,
        to,
        open_source=folder.open,
        verify=verify,
        overwrite=overwrite,
        array_digests=array_digests,
        buffer_bytes=buffer_bytes,
        timeout_s=timeout_s,
        group=group,
        progress=progress,
    )
    return replace(report, map=folder.map, files=folder.files)


@dataclass(slots=True)
class _Folder:
    """A Hugging Face folder as a checkpoint with our names; for the fields see `import_huggingface`.

    Attributes:
        warns: whether files that are left out are logged.
        map: the name of the map, once the folder is open.
        files: names of the small files that become part of the checkpoint, once the folder is open.
    """

    choice: ChosenMap
    config: ConfigSource
    dtype: torch.dtype | str | None
    stacked: bool
    text_only: bool
    warns: bool
    map: str = ""
    files: tuple[str, ...] = ()

    def open(self, store: Store) -> Contents:
        """Open the folder, and check that the map fits. Local."""
        where, choice = store.location, self.choice
        contents = open_checkpoint(store)
        _, content = read_common(contents, where=where)
        files = ModelFiles.of(self.config, content, where=where)
        kept, long = kept_files(store, {} if self.config is None else files.others)
        if long and self.warns:
            _warn_of_long_files(long, where)
        config, arrays = files.config, contents.arrays
        if self.text_only:
            text = TextPart.of(config, arrays)
            config, arrays = text.config, {key: arrays[key] for key in text.stored.values()}
            made = choice.of_folder(config, text.stored).inverse().with_left_keys(text.stored).inverse()
        else:
            made = choice.of_folder(config, arrays)
        if self.stacked:
            made = with_stacked_layers_where_equal(made)
        made = made.with_left_keys({key: choice.prefix + key for key in made.left})
        self.map, self.files = choice.name(config), tuple(sorted(kept))
        _check_folder(arrays, made, config, name=self.map, where=where)
        check_can_be_read(contents, list(made.right), store)
        views = {key: array.viewed for key, array in made.right.items()}
        source = MappedCheckpoint(with_views(contents, views, where=where), made, where)
        metadata = {**content, "huggingface_config": config, KEPT_FILES: kept}
        mapped = mapped_contents(source, checked_dtype(self.dtype), metadata=metadata)
        return replace(mapped, left_out=tuple(sorted(contents.arrays.keys() - arrays)))


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
