"""Finds the strategy that writes or reads a format.

A format is chosen by name, by a `(backend, version)` pair, by a manifest, or by the names of files in a
directory. It is imported at its first use. Formats of other packages are found through the entry-point
group `megackpt.strategies`; each entry point names a `Format`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from megackpt.errors import CheckpointError, DeclarationError, FormatError, MismatchError
from megackpt.formats.file_names import (
    DEEPSPEED,
    HUGGINGFACE,
    LEGACY_MEGATRON,
    NATIVE,
    NVRX,
    TORCH_DIST,
    TORCH_SAVE,
    ZARR_V1,
    ZARR_V3,
    FileNames,
)
from megackpt.formats.strategy import Format, Json, LoadStrategy, SaveStrategy
from megackpt.ground.arguments import did_you_mean
from megackpt.ground.entry_points import loaded_entry_points
from megackpt.options import LoadOptions, SaveOptions
from megackpt.storage import LocalStore, Store

if TYPE_CHECKING:
    from megackpt.formats.folder_kinds import RecognisedFolder

log = logging.getLogger(__name__)

DEFAULT_BACKEND = "megackpt"
ENTRY_POINTS = "megackpt.strategies"

SaveChoice: TypeAlias = SaveStrategy | tuple[str, int] | str | None
LoadChoice: TypeAlias = SaveStrategy | LoadStrategy | tuple[str, int] | str | None
Name: TypeAlias = tuple[str, int]

_BUILT_IN: dict[Name, tuple[str, FileNames]] = {
    ("megackpt", 1): ("megackpt.formats.native", NATIVE),
    ("torch_dist", 1): ("megackpt.formats.torch_dist", TORCH_DIST),
    ("zarr", 1): ("megackpt.formats.zarr.version_1", ZARR_V1),
    ("zarr", 3): ("megackpt.formats.zarr.version_3", ZARR_V3),
    ("huggingface", 1): ("megackpt.formats.huggingface", HUGGINGFACE),
    ("deepspeed", 1): ("megackpt.formats.foreign.deepspeed", DEEPSPEED),
    ("megatron", 1): ("megackpt.formats.foreign.legacy_megatron", LEGACY_MEGATRON),
    ("nvrx", 1): ("megackpt.formats.foreign.nvrx", NVRX),
    ("torch", 1): ("megackpt.formats.foreign.torch_save", TORCH_SAVE),
}
"""The module of each built-in format, which names it as FORMAT; and the names of its files."""

_FOREIGN: tuple[Name, ...] = (("deepspeed", 1), ("megatron", 1), ("nvrx", 1), ("torch", 1))
"""Folders and files of other tools, in the order in which they are looked for.

Their names do not show whether a save has finished. So a place with such files is read as a checkpoint, but
is free for a save, and is no step of a run.
"""

_READ_ONLY: frozenset[Name] = frozenset({("zarr", 1), ("huggingface", 1), *_FOREIGN})
"""Built-in formats without a save strategy, known without importing them."""


def save_strategy(choice: SaveChoice) -> SaveStrategy:
    """Return the strategy that a user has chosen: by name, by a `(backend, version)` pair, or itself.

    None stands for the native format, and a name without a version for its newest version.

    Raises:
        DeclarationError: there is no such format, or it can only be read; or the object is not a strategy.
    """
    if choice is None:
        choice = DEFAULT_BACKEND
    if not isinstance(choice, (str, tuple)):
        if not isinstance(choice, SaveStrategy):
            raise DeclarationError(
                f"{_shown(choice)} is not a save strategy: its class does not derive from "
                f"megackpt.formats.strategy.SaveStrategy. Give the name of a format, a pair as ('zarr', 3), "
                f"or an object of such a class.{_meant_as_options(choice)}"
            )
        return choice
    for name in _chosen(choice):  # the newest that can be saved is taken
        save = _format(name).save
        if save is not None:
            return save()
    raise _unknown(choice)


def not_imported(choice: SaveChoice) -> Name | None:
    """Return the name of the format that `save_strategy` has yet to import; None if it is imported.

    An import can take seconds if a format needs large packages. Nothing is imported here. The native format
    counts as imported, as it needs no package of its own. For a choice that `save_strategy` rejects, None is
    returned as well.
    """
    if not isinstance(choice, (str, tuple)):
        return None
    for name in _chosen(choice):
        if name not in _BUILT_IN:
            # The entry point of another package is imported when it is looked up.
            if _format(name).save is not None:
                return None
        elif name in _READ_ONLY:
            continue
        elif name[0] == DEFAULT_BACKEND or _BUILT_IN[name][0] in sys.modules:
            return None
        else:
            return name
    return None


def check_known(choice: str | Name, *, to_save: bool = False) -> None:
    """Check that a name stands for a format; nothing is imported.

    Raises:
        DeclarationError: there is no such backend or version; or, with to_save, the format is a built-in one
            that can only be read.
    """
    known = _chosen(choice)
    if not known or (to_save and _READ_ONLY.issuperset(known)):
        raise _unknown(choice)


def _chosen(choice: str | Name) -> list[Name]:
    """Return the formats that a choice stands for, newest first: a name stands for all of its versions."""
    return sorted((name for name in _names() if choice in (name, name[0])), reverse=True)


def _unknown(choice: str | Name) -> DeclarationError:
    """Return the error for a format that cannot be saved."""
    hint = " (it is only read)" if _chosen(choice) else ""
    name = choice[0] if isinstance(choice, tuple) and choice else choice
    backends = {backend for backend, _ in _names()}
    meant = "" if name in backends else did_you_mean(name, sorted(backends))
    return DeclarationError(
        f"No strategy saves format {choice!r}{hint}. Known are {_list_of_names()}.{meant}"
    )


def check_format(choice: SaveStrategy | LoadStrategy | Name | str, manifest: Json, *, where: str) -> None:
    """Check that a checkpoint is in the format that the user asks for.

    Raises:
        DeclarationError: there is no such format, or the object is not a strategy.
        MismatchError: the manifest names another format.
    """
    if isinstance(choice, (str, tuple)):
        check_known(choice)
        requested = choice
    elif isinstance(choice, SaveStrategy | LoadStrategy):
        requested = (choice.backend, choice.version)
    else:
        raise DeclarationError(
            f"sharded_strategy is {_shown(choice)}; give the name of a format, a pair as ('zarr', 3), a "
            f"strategy of megackpt.formats, or None to take the format that the checkpoint is in."
            f"{_meant_as_options(choice)}"
        )
    stored = (manifest.get("sharded_backend"), manifest.get("sharded_backend_version"))
    if requested not in (stored, stored[0]):
        raise MismatchError(
            f"{where}: the checkpoint is in format {stored[0]!r} version {stored[1]!r}, but sharded_strategy "
            f"asks for {requested!r}. Leave sharded_strategy out, and the format is detected.",
            path=where,
        )


def save_strategies() -> Iterator[SaveStrategy]:
    """Yield a strategy of every format that can be saved with the packages that are installed."""
    for name in _names():
        try:
            save = _format(name).save
        except ImportError:
            continue
        if save is not None:
            yield save()


def load_strategy(manifest: Json, *, where: str) -> LoadStrategy:
    """Return the strategy that reads the format of a manifest.

    Raises:
        FormatError: the format or its version is not known, or can only be written.
    """
    stored = (manifest.get("sharded_backend"), manifest.get("sharded_backend_version"))
    # Compared one by one: a damaged manifest may name a list or an object, which no dict can look up.
    for name in _names():
        if name == stored:
            load = _format(name).load
            if load is not None:
                return load()
    known = [name[1] for name in _names() if name[0] == stored[0]]
    is_older = isinstance(stored[1], int) and known and stored[1] < min(known)
    advice = (
        "it is too old: convert it with `megackpt convert` of a version that reads it"
        if is_older
        else "a newer megackpt, or a package that adds the format, may know it"
    )
    raise FormatError(
        f"{where}: format {stored[0]!r} version {stored[1]!r} cannot be read here. Known are "
        f"{_list_of_names()}; {advice}.",
        path=where,
    )


def detect(store: Store) -> Json | None:
    """Return a manifest for a checkpoint without metadata.json, as other libraries write them.

    None if no format recognises the files.
    """
    listed = store.names()  # once for all formats: in an object store this is many requests
    return _detect(store, listed, [name for name in _names() if name not in _FOREIGN])


def detect_foreign(store: Store) -> Json | None:
    """Return a manifest for a folder or a file of another tool; None if no format recognises it."""
    if not isinstance(store, LocalStore) or not os.path.isfile(store.location):
        return _detect(store, store.names(), _FOREIGN)
    load = _format(("torch", 1)).load  # whose files may have any name
    return load().detect(store) if load is not None else None


def recognise(store: Store) -> RecognisedFolder | None:
    """Return what a folder or file without metadata.json is, and the next step; None if that is not known.

    No file is read, except by a format that has to look into one to recognise it.
    """
    from megackpt.formats.folder_kinds import RecognisedFolder, recognise_names  # for errors only

    is_file = isinstance(store, LocalStore) and os.path.isfile(store.location)
    names = [os.path.basename(store.location)] if is_file else store.names()
    if any(map(attempt_of, names)):
        return None  # what a save of ours has left
    seen = recognise_names(names, where=store.location)
    manifest = detect(store) if seen is None and not is_file else None
    if manifest is None:
        return seen
    name = f"a checkpoint in the format {manifest.get('sharded_backend')}"
    return RecognisedFolder(name, f"Look into it with `megackpt inspect {shlex.quote(store.location)}`.")


def is_foreign(backend: str) -> bool:
    """Return whether a format is that of another tool's files."""
    return any(backend == name for name, _ in _FOREIGN)


def _detect(store: Store, listed: Sequence[str], names: Iterable[Name]) -> Json | None:
    for name in names:
        file_names = _file_names(name)
        if file_names is not None and not any(map(file_names.is_foreign, listed)):
            continue  # so a format with large packages is imported only for directories that may be its own
        try:
            load = _format(name).load
        except ImportError:
            continue
        manifest = load().detect(store) if load is not None else None
        if manifest is not None:
            return manifest
    return None


def attempt_of(name: str) -> str | None:
    """Return the attempt in a file name of any registered format; None for any other name."""
    for format_name in _names():
        file_names = _file_names(format_name)
        attempt = file_names.attempt_of(name) if file_names is not None else None
        if attempt is not None:
            return attempt
    return None


def fixed_names(store: Store, listed: Sequence[str], *, without: Name | None = None) -> list[str]:
    """Return files of registered formats' saves whose names carry no attempt; see `SaveStrategy.fixed_names`.

    listed are the names in the store. A format is imported only if one of its markers is among them. The
    format called without is left out. Files of a format that cannot be imported or read are not found.
    """
    fixed = []
    for name in _names():
        file_names = _file_names(name)
        if name == without or file_names is None or not any(map(file_names.is_marker, listed)):
            continue
        with contextlib.suppress(ImportError, CheckpointError):
            save = _format(name).save
            fixed += save().fixed_names(store) if save is not None else []
    return fixed


def _file_names(name: Name) -> FileNames | None:
    return _BUILT_IN[name][1] if name in _BUILT_IN else _third_parties()[name].file_names


def _names() -> Iterable[Name]:
    # Another package can add formats, but not replace a built-in one.
    return [*_BUILT_IN, *(name for name in _third_parties() if name not in _BUILT_IN)]


@cache
def _format(name: Name) -> Format:
    if name in _BUILT_IN:
        built_in: Format = importlib.import_module(_BUILT_IN[name][0]).FORMAT
        return built_in
    return _third_parties()[name]


@cache
def _third_parties() -> dict[Name, Format]:
    """Return the formats of other packages. One that cannot be imported is left out, with a warning."""
    added = loaded_entry_points(ENTRY_POINTS, Format, what="Format", log=log)
    return {(added_format.backend, added_format.version): added_format for added_format in added}


def _list_of_names() -> str:
    """Return the formats that a manifest or a user may name, for an error."""
    return ", ".join(
        f"{backend} version {version}" for backend, version in _names() if (backend, version) not in _FOREIGN
    )


def _shown(choice: object) -> str:
    """Return what a user gave for a strategy, in a line."""
    text = repr(choice)
    return text if len(text) <= 60 else f"an object of {type(choice).__name__}"


def _meant_as_options(choice: object) -> str:
    if not isinstance(choice, SaveOptions | LoadOptions):
        return ""
    return f" Options are given by name: options={type(choice).__name__}(...)."
