"""Saves a step into the storage of the nodes, in as many copies as the tier asks for.

1. Every rank writes its chunks into the directory of its node.
2. Copies of these files go to other nodes, and the index and the common state to all nodes.
3. When all nodes have all of their files, each node commits. So a commit on any node proves that every data
   file was complete and durable on the nodes that keep it.
4. When all nodes have committed, each removes the steps that it does not keep.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megackpt.comm import Group, errors_on_all_ranks, gather_step
from megackpt.engine.checkpoint import manifest
from megackpt.engine.checkpoint.origins import read_origin
from megackpt.engine.checkpoint.step_roots import LocalSteps
from megackpt.engine.checkpoint.steps import StepDirectories, step_name, step_of
from megackpt.engine.saving.planned_save import PlannedSave, WrittenChunks
from megackpt.engine.saving.write import commit_attempt, write_chunks
from megackpt.engine.tiers.transfer import (
    SizedFile,
    broadcast_files,
    broadcast_from_rank,
    copy_files,
    send_to_keepers,
)
from megackpt.formats.documents import parse_document
from megackpt.formats.registry import load_strategy
from megackpt.formats.strategy import MANIFEST, Json, SaveStrategy
from megackpt.plans.planning.redundancy import Nodes
from megackpt.storage import MemoryStore, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLocation:
    """The location of a step in a tier, as a rank sees it. All fields but root are equal on all ranks.

    Attributes:
        root: directory of the tier on this rank's node.
        step: number of the step.
        nodes: nodes of the job, and which ranks run on them.
        replication_factor: how many nodes have each byte.
        jump: how many nodes further the next copy is.
        keep_last: how many committed steps stay in the tier.
    """

    root: str
    step: int
    nodes: Nodes
    replication_factor: int
    jump: int
    keep_last: int

    def open(self) -> Store:
        """Return the store of the step's directory on this node."""
        return LocalSteps.at(self.root).open(step_name(self.step))


def save_on_nodes(planned: PlannedSave, store: Store, group: Group, location: NodeLocation) -> None:
    """Write this rank's rows, copy files between nodes, and commit on each node. Collective.

    Args:
        planned: the save, in a format that names files by attempt and writer, as the native one does.
        store: of the step's directory on this node.
        group: the ranks.
        location: of the step.

    Raises:
        CheckpointError: on all ranks. Nothing was committed, unless the commit itself failed on some nodes:
            then the checkpoint is complete over all nodes, and the other nodes have committed it.
    """
    is_leader, strategy = group.rank in location.nodes.leaders(), planned.strategy
    leftovers = manifest.LeftoverFiles()
    with errors_on_all_ranks(group, "opening the directory of its node"):
        store.create()
        if is_leader:
            # The ranks of a node share its directory, so one of them looks, commits and cleans up.
            leftovers = manifest.find_leftover_files(store, strategy)
    keepers = location.nodes.keepers(copies=location.replication_factor, jump=location.jump)
    try:
        written, files = _write_and_copy(planned, store, group, keepers)
        manifest_fields = _broadcast_index(planned, written, files, store, group, is_leader=is_leader)
    except Exception:
        if is_leader:
            manifest.discard(store, attempt=planned.attempt, strategy=strategy)
        raise
    # Outside of the block above: when one node has committed, the files of all nodes are its checkpoint, and
    # no other node may discard its files.
    with errors_on_all_ranks(group, "committing on its node"):
        if is_leader:
            manifest.commit(
                store, manifest_fields, attempt=planned.attempt, earlier=leftovers, strategy=strategy
            )


def clean_node(location: NodeLocation, *, rank: int) -> None:
    """Remove incomplete steps up to this one, and the oldest committed ones beyond `keep_last`.

    Errors of the file system are ignored. Local; only one rank of each node acts. To be called when all nodes
    have committed the step.
    """
    if rank not in location.nodes.leaders():
        return
    directories = LocalSteps.at(location.root)
    with contextlib.suppress(OSError):
        steps = {name: step for name in directories.names() if (step := step_of(name)) is not None}
        committed = _by_branch({name: steps[name] for name in directories.committed(steps)}, directories)
        # Another job may have saved newer steps.
        surplus = [name for name in committed[: -location.keep_last] if steps[name] != location.step]
        # A newer step without a commit may be one that is being saved.
        older = [name for name, step in steps.items() if step <= location.step and name not in committed]
        for name in [*surplus, *(name for name in older if directories.is_leftover(name))]:
            with contextlib.suppress(OSError):
                directories.remove(name)


def _by_branch(steps: Mapping[str, int], directories: StepDirectories) -> list[str]:
    """Return the names of committed steps: those of older branches first, then by step."""
    branches: dict[str, int] = {}
    for name in steps:
        with contextlib.closing(directories.open(name)) as store:
            origin = read_origin(store)
        branches[name] = 0 if origin is None else origin.branch
    return sorted(steps, key=lambda name: (branches[name], steps[name]))


def _write_and_copy(
    planned: PlannedSave, store: Store, group: Group, keepers: Sequence[Sequence[int]]
) -> tuple[WrittenChunks, list[str]]:
    """Write this rank's chunks and copy them to other nodes; return also the data files of all ranks.

    Collective. Rank 0 alone is told of the files of other ranks.
    """
    written = write_chunks(planned, store, group)
    with gather_step(group, "listing what it has written") as step:
        own_files = json.dumps(_written_files(store, planned.strategy, planned.attempt, group.rank)).encode()
        step.data = own_files
    listed_by_rank = {group.rank: own_files, **send_to_keepers(group, own_files, keepers)}
    files = {rank: _sized(listed) for rank, listed in listed_by_rank.items()}
    copy_files(group, files, keepers, store, doing="copying its data to another node")
    return written, [name for listed in step.results for name, _ in _sized(listed)]


def _broadcast_index(
    planned: PlannedSave,
    written: WrittenChunks,
    files: Sequence[str],
    store: Store,
    group: Group,
    *,
    is_leader: bool,
) -> Json:
    """Write common state and index on every node, and return the fields of metadata.json. Collective.

    Rank 0 makes the files in memory, since it may have no data file but its own. There the data files of all
    ranks are empty.
    """
    drafts = MemoryStore(store.location, files=dict.fromkeys(files, b""))

    def write_index() -> bytes:
        # In this store nothing is left over. No hook has written files, so there are no receipts for
        # `index_fields`.
        draft = replace(planned, leftovers=manifest.LeftoverFiles(), hooks=())
        commit_attempt(draft, written, drafts, world_size=group.size)
        document = drafts.read(MANIFEST, max_bytes=1 << 62)
        named = planned.strategy.files_of(parse_document(document, where=drafts.location))
        return json.dumps([[(name, drafts.size(name)) for name in named], document.decode()]).encode()

    doing = "writing the index"
    listed, document = json.loads(broadcast_from_rank(group, write_index, source=0, doing=doing))
    small: list[SizedFile] = [(name, nbytes) for name, nbytes in listed]
    takes = {name for name, _ in small} if is_leader else set()
    broadcast_files(group, small, source=0, read_from=drafts, write_to=store, takes=takes, doing=doing)
    return parse_document(document.encode(), where=f"{store.location}/{MANIFEST}")


def _sized(listed: bytes) -> list[SizedFile]:
    """Return the files that a rank has listed as JSON."""
    return [(name, nbytes) for name, nbytes in json.loads(listed)]


def _written_files(store: Store, strategy: SaveStrategy, attempt: str, rank: int) -> list[SizedFile]:
    """Return the data files that a rank has written in an attempt."""
    named = {"sharded_backend": strategy.backend, "sharded_backend_version": strategy.version}
    reader = load_strategy(named, where=store.location)
    # The ranks of a node write into one directory. Each lists the files that it has written itself.
    own_names = [
        name
        for name in store.names()
        if strategy.file_names.attempt_of(name) == attempt and reader.writer_of(name) == rank
    ]
    return [(name, store.size(name)) for name in own_names]
