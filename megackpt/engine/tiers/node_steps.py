"""Steps of a tier on this node: which files there are, which of them a load needs, and which are damaged.

`run.checkpointer` decides which step is loaded, and from which nodes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megackpt.comm import Group, errors_on_all_ranks, gather_step
from megackpt.engine.checkpoint.manifest import read_manifest
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.engine.checkpoint.origins import FIELD, StepOrigin
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
        name: of its directory.
        commit: digest of metadata.json; empty if there is none or it cannot be read.
        files: all files with their sizes in bytes.
        is_described: whether the node has all small files that metadata.json names.
        origin: what the step records; that of a step without a record, if it is damaged.
    """

    name: str
    commit: str
    files: Mapping[str, int]
    is_described: bool
    origin: StepOrigin = field(default_factory=StepOrigin)

    def to_json(self) -> list[object]:
        """Return the step as values of JSON."""
        return [self.name, self.commit, dict(self.files), self.is_described, self.origin.to_json()]

    @classmethod
    def from_json(cls, row: Sequence[object]) -> NodeStep:
        """Return the step from the row that `to_json` returned."""
        name, commit, files, is_described, origin = row
        assert isinstance(name, str)
        assert isinstance(commit, str)
        assert isinstance(files, dict)
        return cls(
            name=name,
            commit=commit,
            files=files,
            is_described=bool(is_described),
            origin=StepOrigin.from_json(origin),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFiles:
    """The files of a committed step, with sizes in bytes.

    Attributes:
        commit: content of metadata.json.
        small: files of the index and the common state, which every node needs.
        data: files of chunks, and the least size of each.
    """

    commit: str
    small: Mapping[str, int]
    data: Mapping[str, int]

    def to_bytes(self) -> bytes:
        """Return the files as bytes, for other ranks."""
        return json.dumps([self.commit, dict(self.small), dict(self.data)]).encode()

    @classmethod
    def from_bytes(cls, encoded: bytes) -> StepFiles:
        """Return the files from the bytes that `to_bytes` returned."""
        commit, small, data = json.loads(encoded)
        return cls(commit=commit, small=small, data=data)


def list_node_steps(directories: StepDirectories) -> Iterator[NodeStep]:
    """Yield what this node has of each step below a root; leave out steps that disappear meanwhile. Local."""
    for name in directories.names():
        if step_of(name) is None:
            continue
        with contextlib.suppress(OSError), contextlib.closing(directories.open(name)) as store:
            files = {file: store.size(file) for file in store.names()}
            commit, small, origin = "", None, StepOrigin()
            # A damaged commit counts as none: another node may have the step undamaged.
            with contextlib.suppress(CheckpointError):
                commit, small, origin = _commit_in(store)
            described = small is not None and small <= files.keys()
            yield NodeStep(name=name, commit=commit, files=files, is_described=described, origin=origin)


def _commit_in(store: Store) -> tuple[str, set[str] | None, StepOrigin]:
    """Return the digest of metadata.json, the small files that it names, and what it records of the run.

    Without metadata.json return "", None and the origin of a step without a record.
    """
    if not store.exists(MANIFEST):
        return "", None, StepOrigin()
    data = store.read(MANIFEST, max_bytes=MANIFEST_MAX_BYTES)
    document = parse_document(data, where=f"{store.location}/{MANIFEST}")
    origin = StepOrigin.from_json(document.get(FIELD))
    return digest_of(data), set(_small_files(store, document)), origin


def _small_files(store: Store, document: Json) -> list[str]:
    """Return the small files that a metadata.json names.

    Raises:
        FormatError: the document is not one of a save into a tier.
    """
    try:
        strategy = save_strategy((document["sharded_backend"], document["sharded_backend_version"]))
        return [str(name) for name in strategy.files_of(document)]
    except (CheckpointError, KeyError, TypeError) as error:
        where = f"{store.location}/{MANIFEST}"
        raise FormatError(f"{where} is damaged: it names no files of a known format.", path=where) from error


def describe_step(store: Store) -> StepFiles:
    """Return the files of a committed step, as its index lists them. Local.

    Raises:
        NotACheckpointError: the directory has no metadata.json.
        FormatError, IntegrityError: metadata.json or the index is damaged.
    """
    manifest = read_manifest(store)
    contents = open_checkpoint(store)
    chunks = contents.chunks(sorted(contents.arrays))
    ranges = chunks.file_ranges()
    if ranges is None:
        raise FormatError(
            f"{store.location}: its format does not say which files have its chunks, so it cannot be on "
            f"several nodes. A Checkpointer saves the native format into tiers.",
            path=store.location,
        )
    # A data file must be as long as its last chunk needs.
    nbytes = np.zeros(len(ranges.files), np.int64)
    np.maximum.at(nbytes, ranges.file, ranges.stop)
    # The bytes as they are stored: nodes recognise the same commit by a digest of them.
    data = store.read(MANIFEST, max_bytes=MANIFEST_MAX_BYTES)
    return StepFiles(
        commit=data.decode(),
        small={name: store.size(name) for name in _small_files(store, manifest)},
        data=dict(zip(ranges.files, nbytes.tolist(), strict=True)),
    )


def share_step(
    group: Group, store: Store, step: StepFiles, *, source: int, takes: Sequence[str], commits: bool
) -> None:
    """Send the small files of a step to the nodes that lack them. Collective.

    Args:
        group: the ranks.
        store: of the step's directory on this node.
        step: the files of the step.
        source: a rank of a node that has all small files.
        takes: names of the small files that this rank writes.
        commits: whether this rank writes metadata.json, as the leader of a node that lacks it.

    Raises:
        CheckpointError: on all ranks.
    """
    doing = "giving its node the index of a step"

    with gather_step(group, doing, on_all_ranks=True) as asking:
        if takes or commits:
            store.create()
        asking.data = json.dumps([list(takes), commits]).encode()
    needs = [json.loads(encoded) for encoded in asking.results]
    missing = {name for names, _ in needs for name in names}
    files = sorted((name, nbytes) for name, nbytes in step.small.items() if name in missing)
    # All ranks know what all of them lack, so all return here or none does.
    if not files and not any(lacks_commit for _, lacks_commit in needs):
        return
    broadcast_files(
        group, files, source=source, read_from=store, write_to=store, takes=set(takes), doing=doing
    )
    # Last, since metadata.json proves that the other files are there.
    with errors_on_all_ranks(group, doing):
        if commits:
            store.replace(MANIFEST, step.commit.encode())


def damaged_files(store: Store) -> list[tuple[str, bool]]:
    """Read all files that this node has of a step, and return those that are damaged. Local.

    Returns:
        The name of each damaged file, and whether it is a file of chunks.
    """
    names = set(store.names())
    try:
        strategy = load_strategy(read_manifest(store), where=store.location)
        report = verify_checkpoint(store, VerifyOptions(deep=True), NoProgress())
    except CheckpointError:
        # Without a readable index no file can be checked, so the commit stands for the whole step.
        return [(MANIFEST, False)] if names else []
    damaged = sorted({damage.file for damage in report.damages} & names)
    return [(name, strategy.writer_of(name) is not None) for name in damaged]
