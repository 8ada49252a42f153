"""A new checkpoint that is made of another one or of a folder, and the files that were there before.

`convert` and `import_huggingface` share these steps: the check of the target, the comparison of what the
ranks have opened, and the removal of a failed attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megackpt.comm import Group, gather_step
from megackpt.engine.checkpoint import manifest
from megackpt.engine.checkpoint.removal import withdraw
from megackpt.engine.data.progress import Progress
from megackpt.errors import CheckpointError, DeclarationError, MismatchError
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCheckpoint:
    """A checkpoint that the ranks of a group make of a source, and commit in one step.

    Attributes:
        source: the store of what it is made of.
        target: the store that it is written to.
        strategy: its format.
        group: the ranks that write it.
        progress: takes reports on this rank's share.
        buffer_bytes: bytes that are read and written at a time.
    """

    source: Store
    target: Store
    strategy: SaveStrategy
    group: Group
    progress: Progress
    buffer_bytes: int

    def exchange(self, identity: str, sizes: Mapping[int, int] | None = None) -> tuple[str, dict[int, int]]:
        """Compare what the ranks have opened, and exchange sizes of objects. Collective.

        Args:
            identity: of the opened source, and of what this rank will do with it.
            sizes: in bytes, of the objects that this rank has encoded, by row of the plan.

        Returns:
            Rank 0's attempt id, and the sizes of all ranks.

        Raises:
            MismatchError: ranks have opened different sources.
        """
        with gather_step(self.group, "comparing the opened source", on_all_ranks=True) as step:
            step.data = json.dumps([identity, manifest.new_attempt(), list((sizes or {}).items())]).encode()
        messages = [json.loads(data) for data in step.results]
        if any(identity != messages[0][0] for identity, _, _ in messages):
            where = self.source.location
            raise MismatchError(
                f"{where} changed while it was opened: ranks see different content. Start again.", path=where
            )
        return messages[0][1], {row: size for _, _, sizes in messages for row, size in sizes}

    @contextlib.contextmanager
    def removed_on_error(self, state: TargetState, attempt: str) -> Iterator[None]:
        """Remove the new checkpoint if the block fails: rank 0 removes it, with the state from before."""
        try:
            yield
        except Exception:
            if self.group.rank == 0:
                remove_attempt(self.target, state, attempt=attempt, strategy=self.strategy)
            raise


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
            f"{target.location} has a checkpoint already. Name another directory, or set overwrite "
            f"(--overwrite).",
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
        withdraw(target, attempt=attempt, strategy=strategy)
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
