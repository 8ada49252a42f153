"""`megackpt.import_huggingface`: write a Hugging Face folder as a checkpoint in our names.

The folder is opened as a checkpoint with our names: the map says which stored tensors each array is made of.
It is then copied as any other checkpoint, in bounded memory and without a model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch

from megackpt.comm import Group, group_or_world
from megackpt.engine.checkpoint.opening import check_readable, open_checkpoint, read_common
from megackpt.engine.checkpoint.views import with_views
from megackpt.engine.data.chunk_bytes import have_equal_bytes
from megackpt.engine.data.progress import Progress
from megackpt.errors import MapError
from megackpt.formats.contents import Contents
from megackpt.formats.registry import SaveChoice
from megackpt.ground.arguments import check_choice, check_flags, check_seconds
from megackpt.maps import MapChoice, RegionMap
from megackpt.maps.family import OUTPUT, TextPart
from megackpt.maps.requests import EMBEDDING
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

TiedOutput: TypeAlias = Literal["equal", "untie", "drop"]
"""What to do about an output layer that is stored although the config ties it to the embedding."""

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
    tied_output: TiedOutput = "equal",
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
        tied_output: of a folder whose config ties the output layer to the embedding, and that stores both:
            `"equal"` leaves the output layer out if its bytes are those of the embedding, and else raises an
            error; `"untie"` imports it, and the config of the checkpoint says that it is not tied; `"drop"`
            leaves it out in any case.
        prefix: what the keys of the new checkpoint begin with.
        verify: read the new checkpoint again, and compare digests with what was written.
        overwrite: replace a checkpoint of the same format at the target.
        array_digests: store a digest of each array, as `SaveOptions(array_digests=True)` does.
        buffer_bytes: bytes that are read and written at a time; there are two such buffers.
        timeout_s: how long a rank waits for the others at each synchronisation point, in seconds.
        group: the ranks that take part; None for all ranks of torch.distributed, or this process alone.
        progress: as in `megackpt.verify`, for this rank's share.

    Returns:
        Counts of the whole checkpoint, the same on all ranks. `left_out` has the tensors of the folder that
        are not in it: those that models compute, a tied output layer, and other parts of a multimodal model.

    Raises:
        NotACheckpointError: there is no folder with weights at the source.
        MapError: there is no such map, the config contradicts itself, or the folder has missing or additional
            tensors or other shapes, or a tied output layer that is not the embedding. Nothing is written.
        DeclarationError: there is already a checkpoint at the target, no config, or an argument is invalid.
        FormatError, IntegrityError: the folder is damaged, or the new checkpoint differs from it.
        CheckpointError: each of these, and every other error; the same on all ranks.

    >>> import_huggingface("folder", "run/imported").is_verified  # doctest: +SKIP
    True
    """
    check_flags(stacked=stacked, text_only=text_only)
    check_choice("tied_output", tied_output, get_args(TiedOutput))
    check_seconds("timeout_s", timeout_s)
    group = group_or_world(group, timeout_s=timeout_s)
    folder = _Folder(
        ChosenMap(map, prefix),
        config,
        dtype,
        stacked=stacked,
        text_only=text_only,
        tied_output=tied_output,
        is_first=group.rank == 0,
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
        is_first: whether this rank logs files that are left out, and compares tied arrays for all ranks.
        map: the name of the map, once the folder is open.
        files: names of the small files that become part of the checkpoint, once the folder is open.
    """

    choice: ChosenMap
    config: ConfigSource
    dtype: torch.dtype | str | None
    stacked: bool
    text_only: bool
    tied_output: TiedOutput
    is_first: bool
    map: str = ""
    files: tuple[str, ...] = ()

    def open(self, store: Store) -> Contents:
        """Open the folder, and check that the map fits. Local."""
        where, choice = store.location, self.choice
        contents = open_checkpoint(store)
        _, content = read_common(contents, where=where)
        files = ModelFiles.of(self.config, content, where=where)
        kept, long = kept_files(store, {} if self.config is None else files.others)
        if long and self.is_first:
            _warn_of_long_files(long, where)
        config, keys = files.config, {*contents.arrays, *contents.unreadable}
        if self.tied_output == "untie":
            config = {**config, "tie_word_embeddings": False}
        tied = OUTPUT if config.get("tie_word_embeddings") is True else ""
        if self.text_only:
            text = TextPart.of(config, keys)
            config, keys, tied = text.config, set(text.stored.values()), text.tied
            made = choice.of_folder(config, text.stored).inverse().with_left_keys(text.stored).inverse()
        else:
            made = choice.of_folder(config, keys)
        left_out = dict.fromkeys(contents.arrays.keys() - keys, "")  # of other parts of the model
        left_out |= {
            key: " (which models compute)" for key in keys - made.right.keys() if _BUFFERS.fullmatch(key)
        }
        if tied in contents.arrays and tied not in made.right:
            left_out[tied] = f" ({self._reason_to_drop(contents, tied, made, where)})"
        keys -= left_out.keys()
        check_readable(keys, contents.unreadable, where=where)
        arrays = {key: contents.arrays[key] for key in keys}
        if self.stacked:
            made = with_stacked_layers_where_equal(made)
        made = made.with_left_keys({key: choice.prefix + key for key in made.left})
        self.map, self.files = choice.name(config), tuple(sorted(kept))
        check_fits(made.right, arrays, name=self.map, where=where)
        check_can_be_read(contents, list(made.right), store)
        views = {key: array.viewed for key, array in made.right.items()}
        source = MappedCheckpoint(with_views(contents, views, where=where), made, where)
        metadata = {**content, "huggingface_config": config, KEPT_FILES: kept}
        mapped = mapped_contents(source, checked_dtype(self.dtype), metadata=metadata)
        return replace(mapped, left_out=tuple(key + left_out[key] for key in sorted(left_out)))

    def _reason_to_drop(self, contents: Contents, tied: str, made: RegionMap, where: str) -> str:
        """Return why an output layer is left out that the config ties to the embedding.

        Raises:
            MapError: its bytes are not those of the embedding, and the caller has not chosen to drop it.
        """
        if self.tied_output == "drop":
            return "dropped as chosen: the config ties it to the embedding"
        embeddings = {pair.right.key for pair in made.pairs if pair.left.key == EMBEDDING}
        embedding = embeddings.pop() if len(embeddings) == 1 else ""
        # One rank compares: its error is raised on all.
        if not self.is_first or (
            embedding in contents.arrays and have_equal_bytes(contents, tied, embedding, where=where)
        ):
            return f"equal to {embedding}, to which the config ties it"
        raise MapError(
            f"{where}: the config ties the output layer to the embedding (tie_word_embeddings), and {tied!r} "
            f"has other bytes than {embedding or 'the embedding'!r}. Keep both with tied_output='untie' "
            f"(--tied-output untie), or leave the output layer out with tied_output='drop'.",
            key=tied,
            path=where,
        )


def _warn_of_long_files(names: Sequence[str], where: str) -> None:
    log.warning(
        "%s: these files do not become part of the checkpoint, which has room for %s bytes of them: "
        "%s. Give the folder again as config when you export it.",
        where,
        f"{MAX_KEPT_BYTES:,}",
        ", ".join(names),
    )
