"""Which strategy serves which format.

Owns the choice from a name, a `(backend, version)` pair or a manifest.
"""

from __future__ import annotations

from typing import TypeAlias

from megackpt.errors import DeclarationError, FormatError
from megackpt.formats.native import NativeLoadStrategy, NativeSaveStrategy
from megackpt.formats.strategy import Json, LoadStrategy, SaveStrategy

DEFAULT_BACKEND = "megackpt"

SaveChoice: TypeAlias = "SaveStrategy | tuple[str, int] | str | None"

_SAVE: dict[tuple[str, int], type[SaveStrategy]] = {("megackpt", 1): NativeSaveStrategy}
_LOAD: dict[tuple[str, int], type[LoadStrategy]] = {("megackpt", 1): NativeLoadStrategy}


def save_strategy(choice: SaveChoice) -> SaveStrategy:
    """Return the strategy for a strategy, a `(backend, version)` pair, a backend name or None (native).

    Raises:
        DeclarationError: no such backend or version.
    """
    if choice is None:
        choice = DEFAULT_BACKEND
    if isinstance(choice, str):
        versions = [version for backend, version in _SAVE if backend == choice]
        if not versions:
            raise DeclarationError(f"No strategy saves format {choice!r}. Known are {_known(_SAVE)}.")
        choice = (choice, max(versions))
    if isinstance(choice, tuple):
        if choice not in _SAVE:
            raise DeclarationError(f"No strategy saves format {choice}. Known are {_known(_SAVE)}.")
        return _SAVE[choice]()
    return choice


def save_strategies() -> list[SaveStrategy]:
    """Return a strategy of every known format."""
    return [strategy() for strategy in _SAVE.values()]


def load_strategy(manifest: Json, *, where: str) -> LoadStrategy:
    """Return the strategy that reads the format a manifest names.

    Raises:
        FormatError: the format or its version is not known.
    """
    found = (manifest.get("sharded_backend"), manifest.get("sharded_backend_version"))
    for known, strategy in _LOAD.items():
        if known == found:
            return strategy()
    raise FormatError(
        f"{where}: format {found[0]!r} version {found[1]!r} cannot be read here. Known are "
        f"{_known(_LOAD)}; a newer "
        f"megackpt may know it.",
        path=where,
    )


def _known(
    registry: dict[tuple[str, int], type[SaveStrategy]] | dict[tuple[str, int], type[LoadStrategy]],
) -> str:
    return ", ".join(f"{backend} version {version}" for backend, version in registry)
