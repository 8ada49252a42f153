"""The target of a conversion: the files that were there before, and the removal of a failed conversion."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field

from megackpt.engine.checkpoint import manifest
from megackpt.errors import CheckpointError, DeclarationError
from megackpt.formats.strategy import MANIFEST, SaveStrategy
from megackpt.storage import LocalStore, ObjectStore, Store


@dataclass(frozen=True, slots=True)
class TargetState:
    """The files at the target before the conversion began to write; only rank 0 has this.

    Attributes:
        earlier: leftovers of earlier saves.
        names: all files that were there; None if they are a committed checkpoint.
    """

    earlier: manifest.LeftoverFiles = field(default_factory=manifest.LeftoverFiles)
    names: frozenset[str] | None = None


def prepare_target(target: Store, strategy: SaveStrategy) -> TargetState:
    """Create the target and return its files. Rank 0 calls it before any rank writes."""
    target.create()
    earlier = manifest.find_leftover_files(target, strategy)
    names = None if manifest.is_committed(target) else frozenset(target.names())
    return TargetState(earlier, names)


def check_target(target: Store, source: Store, strategy: SaveStrategy, *, overwrite: bool) -> None:
    """Check that no checkpoint would be lost.

    Raises:
        DeclarationError: there is a checkpoint that must not be replaced, or cannot be replaced in one step.
    """
    if is_same_location(target, source):
        raise DeclarationError(
            f"{target.location} cannot be converted into itself. Name another directory.",
            path=target.location,
        )
    if not manifest.is_committed(target):
        return
    if not overwrite:
        raise DeclarationError(
            f"{target.location} has a checkpoint already. Name another directory, or set overwrite.",
            path=target.location,
        )
    commit = manifest.read_manifest(target)
    backend, version = commit.get("sharded_backend"), commit.get("sharded_backend_version")
    if (backend, version) != (strategy.backend, strategy.version):
        raise DeclarationError(
            f"{target.location} has a checkpoint of format {backend!r} version {version!r}, which a "
            f"checkpoint of another format cannot replace in one step. Name another directory, or remove it "
            f"first.",
            path=target.location,
        )


def remove_attempt(target: Store, state: TargetState, *, attempt: str, strategy: SaveStrategy) -> None:
    """Remove the files of a failed conversion, as far as possible, the commit first. Rank 0 calls it.

    If there was no checkpoint before, all new files are removed, because not all formats put the attempt id
    into the names of their files.
    """
    if state.names is None:
        manifest.withdraw(target, attempt=attempt, strategy=strategy)
        return
    with contextlib.suppress(CheckpointError):
        if MANIFEST not in state.names:
            target.delete([MANIFEST])
            target.sync()
        target.delete([name for name in target.names() if name not in state.names])
        target.sync()


def is_same_location(first: Store, second: Store) -> bool:
    """Return whether two stores are one directory, one prefix of a bucket, or one object."""
    if isinstance(first, LocalStore) and isinstance(second, LocalStore):
        return os.path.realpath(first.location) == os.path.realpath(second.location)
    if isinstance(first, ObjectStore) and isinstance(second, ObjectStore):
        return first.location == second.location
    return first is second
