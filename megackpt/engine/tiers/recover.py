"""What nodes have of the steps in a tier, and what is done before a step is loaded from several of them.

Owns listing, describing, sharing and checking; which step is loaded, and from where, is decided by
`checkpointer`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megackpt.comm import Group, run_on_all_ranks
from megackpt.engine.checkpoint.manifest import read_manifest
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.engine.checkpoint.steps import StepDirectories, step_of
from megackpt.engine.data.progress import NoProgress
from megackpt.engine.tiers.transfer import broadcast_files
from megackpt.engine.verification.verify import verify_checkpoint
from megackpt.errors import CheckpointError, FormatError
from megackpt.formats.documents import parse_document
from megackpt.formats.registry import load_strategy, save_strategy
from megackpt.formats.strategy import MANIFEST, MANIFEST_MAX_BYTES, Json
from megackpt.options import VerifyOptions
from megackpt.storage import Store, digest_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStep:
    """What one node has of one step.

    Attributes:
        name: its directory.
        commit: digest of metadata.json; empty where there is none, or it cannot be read.
        files: all files with their sizes in bytes.
        is_described: whether all small files that the commit names are here.
    """

    name: str
    commit: str
    files: Mapping[str, int]
    is_described: bool

    def to_json(self) -> list[object]:
        """Return it as plain values."""
        return [self.name, self.commit, dict(self.files), self.is_described]

    @classmethod
    def from_json(cls, said: Sequence[object]) -> NodeStep:
        """Return what `to_json` was made of."""
        name, commit, files, is_described = said
        assert isinstance(name, str)
        assert isinstance(commit, str)
        assert isinstance(files, dict)
        return cls(name=name, commit=commit, files=files, is_described=bool(is_described))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFiles:
    """What a committed step consists of, with sizes in bytes.

    Attributes:
        commit: metadata.json, as it is.
        small: index and common state, which every node needs.
        data: files of chunks, and how long each must be at least.
    """

    commit: str
    small: Mapping[str, int]
    data: Mapping[str, int]

    def to_bytes(self) -> bytes:
        """Return it as it is sent to other ranks."""
        return json.dumps([self.commit, dict(self.small), dict(self.data)]).encode()

    @classmethod
    def from_bytes(cls, said: bytes) -> StepFiles:
        """Return what `to_bytes` was made of."""
        commit, small, data = json.loads(said)
        return cls(commit=commit, small=small, data=data)


def list_node_steps(places: StepDirectories) -> Iterator[NodeStep]:
    """Yield what there is of each step below a root. Local. What goes meanwhile is passed over."""
    for name in places.names():
        if step_of(name) is None:
            continue
        with contextlib.suppress(OSError), contextlib.closing(places.open(name)) as store:
            files = {file: store.size(file) for file in store.names()}
            commit, small = "", None
            with contextlib.suppress(CheckpointError):
                commit, small = _commit_in(store)
            described = small is not None and small <= files.keys()
            yield NodeStep(name=name, commit=commit, files=files, is_described=described)


def _commit_in(store: Store) -> tuple[str, set[str] | None]:
    """Return the digest of metadata.json and the small files it names; nothing where there is none."""
    if not store.exists(MANIFEST):
        return "", None
    data = store.read(MANIFEST, max_bytes=MANIFEST_MAX_BYTES)
    said = parse_document(data, where=f"{store.location}/{MANIFEST}")
    return digest_of(data), set(_small_files(store, said))


def _small_files(store: Store, said: Json) -> list[str]:
    """Return the small files that a commit names.

    Raises:
        FormatError: it is not what a save of ours commits.
    """
    try:
        strategy = save_strategy((said["sharded_backend"], said["sharded_backend_version"]))
        return [str(name) for name in strategy.files_of(said)]
    except (CheckpointError, KeyError, TypeError) as error:
        where = f"{store.location}/{MANIFEST}"
        raise FormatError(
            f"{where}: it names no files of a known format. It is damaged.", path=where
        ) from error


def describe_step(store: Store) -> StepFiles:
    """Return what a committed step consists of, from its index. Local.

    Raises:
        NotACheckpointError, FormatError, IntegrityError: there is none, or its commit or index is damaged.
    """
    said = read_manifest(store)
    contents = open_checkpoint(store)
    chunks = contents.chunks(sorted(contents.arrays))
    ranges = chunks.file_ranges()
    if ranges is None:
        raise FormatError(
            f"{store.location}: its format does not say in which files its chunks lie, so it cannot lie on "
            f"several nodes. A Checkpointer saves the native format into tiers.",
            path=store.location,
        )
    until = np.zeros(len(ranges.files), np.int64)
    np.maximum.at(until, ranges.file, ranges.stop)
    data = store.read(MANIFEST, max_bytes=MANIFEST_MAX_BYTES)
    return StepFiles(
        commit=data.decode(),
        small={name: store.size(name) for name in _small_files(store, said)},
        data=dict(zip(ranges.files, until.tolist(), strict=True)),
    )


def share_step(
    group: Group, store: Store, needs: StepFiles, *, source: int, takes: Sequence[str], commits: bool
) -> None:
    """Give what every node needs of a step to the nodes that lack it. Collective.

    takes are the small files that this rank writes, and commits whether it writes metadata.json, which a
    leader of a node does that lacks them; the source is a rank of a node that has all.

    Raises:
        CheckpointError: the same on all ranks.
    """
    doing = "giving its node the index of a step"

    def begin() -> bytes:
        if takes or commits:
            store.create()
        return json.dumps([list(takes), commits]).encode()

    told = [json.loads(said) for said in run_on_all_ranks(group, begin, doing=doing)]
    lacking = {name for names, _ in told for name in names}
    files = sorted((name, nbytes) for name, nbytes in needs.small.items() if name in lacking)
    if not files and not any(is_lacking for _, is_lacking in told):
        return
    broadcast_files(
        group, files, source=source, read_from=store, write_to=store, takes=set(takes), doing=doing
    )

    def commit() -> bytes:
        if commits:
            store.replace(MANIFEST, needs.commit.encode())
        return b""

    run_on_all_ranks(group, commit, doing=doing)


def damaged_files(store: Store) -> list[tuple[str, bool]]:
    """Read all that a node has of a step; return the files that are not what was saved. Local.

    The second of a pair says whether it is a file of chunks.
    """
    held = set(store.names())
    try:
        strategy = load_strategy(read_manifest(store), where=store.location)
        found = verify_checkpoint(store, VerifyOptions(deep=True), NoProgress())
    except CheckpointError:
        return [(MANIFEST, False)] if held else []
    names = sorted({damage.file for damage in found.damages} & held)
    return [(name, strategy.writer_of(name) is not None) for name in names]
