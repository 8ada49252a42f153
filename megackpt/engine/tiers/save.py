"""A save whose files lie on the ranks' own nodes, in as many copies as asked for.

Owns the order: every rank writes into its node's directory, copies go to other nodes, index and common state
to all; when all nodes have all of it, each commits. So a commit on any node says that every data file was
complete, and durable, on the nodes that keep it. When all have committed, each removes what it does not keep.
What is written and by whom was decided by the plan.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megackpt.comm import Group, errors_on_all_ranks, gather_step
from megackpt.engine.checkpoint import manifest
from megackpt.engine.checkpoint.step_roots import LocalSteps
from megackpt.engine.checkpoint.steps import step_name, step_of
from megackpt.engine.saving.write import PlannedSave, commit_attempt, write_chunks
from megackpt.engine.tiers.transfer import SizedFile, broadcast_files, copy_files, from_rank, send_to_keepers
from megackpt.formats.documents import parse_document
from megackpt.formats.registry import load_strategy
from megackpt.formats.strategy import MANIFEST, Json, SaveStrategy
from megackpt.planning.redundancy import Nodes
from megackpt.storage import MemoryStore, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLocation:
    """Where a step lies in a tier, as a rank sees it; all but root is equal on all ranks.

    Attributes:
        root: directory of the tier on this rank's node.
        step: the step.
        nodes: of the job.
        replication_factor: how many nodes have each byte.
        jump: how many nodes further the next copy is.
        keep_last: how many steps stay.
    """

    root: str
    step: int
    nodes: Nodes
    replication_factor: int
    jump: int
    keep_last: int

    def open(self) -> Store:
        """Return the store of this node's part."""
        return LocalSteps.at(self.root).open(step_name(self.step))


def save_on_nodes(planned: PlannedSave, store: Store, group: Group, place: NodeLocation) -> None:
    """Write this rank's part into store, the place opened; when all have theirs, commit on each node.

    Collective over the group. The format must name files by attempt and writer, as the native one does.

    Raises:
        CheckpointError: the same on every rank. Nothing was committed, unless committing itself failed on
            some nodes: then the checkpoint is whole over all nodes, and those that have the commit say so.
    """
    is_leader, strategy = group.rank in place.nodes.leaders(), planned.strategy
    leftovers = manifest.LeftoverFiles()
    with errors_on_all_ranks(group, "opening the directory of its node"):
        store.create()
        if is_leader:
            leftovers = manifest.find_leftover_files(store, strategy)
    keepers = place.nodes.keepers(copies=place.replication_factor, jump=place.jump)
    try:
        manifest_fields = _write_and_copy(planned, store, group, keepers, is_leader=is_leader)
    except Exception:
        if is_leader:
            manifest.discard(store, attempt=planned.attempt, strategy=strategy)
        raise
    with errors_on_all_ranks(group, "committing on its node"):
        if is_leader:
            manifest.commit(
                store, manifest_fields, attempt=planned.attempt, earlier=leftovers, strategy=strategy
            )


def clean_node(place: NodeLocation, *, rank: int) -> None:
    """Remove torn steps up to this one and committed ones that are too many, as far as that is possible.

    Local, by one rank of each node, when all nodes have committed the step.
    """
    if rank not in place.nodes.leaders():
        return
    places = LocalSteps.at(place.root)
    with contextlib.suppress(OSError):
        steps = {name: step for name in places.names() if (step := step_of(name)) is not None}
        committed = sorted(places.committed(steps), key=steps.__getitem__)
        surplus = [name for name in committed[: -place.keep_last] if steps[name] != place.step]
        older = [name for name, step in steps.items() if step <= place.step and name not in committed]
        for name in [*surplus, *(name for name in older if places.is_leftover(name))]:
            with contextlib.suppress(OSError):
                places.remove(name)


def _write_and_copy(
    planned: PlannedSave,
    store: Store,
    group: Group,
    keepers: Sequence[Sequence[int]],
    *,
    is_leader: bool,
) -> Json:
    """Put all files where they belong; return what the commit is to hold. Collective."""
    strategy = planned.strategy
    written = write_chunks(planned, store, group)
    with gather_step(group, "listing what it has written") as step:
        own_files = json.dumps(_written_files(store, strategy, planned.attempt, group.rank)).encode()
        step.data = own_files
    listed_by_rank = {group.rank: own_files, **send_to_keepers(group, own_files, keepers)}
    files = {rank: _sized(listed) for rank, listed in listed_by_rank.items()}
    copy_files(group, files, keepers, store, doing="copying its data to another node")

    # In memory first: rank 0 may have no data file of the attempt but its own, and every node gets the same.
    names = [name for listed in step.results for name, _ in _sized(listed)]
    drafts = MemoryStore(store.location, files=dict.fromkeys(names, b""))

    def write_index() -> bytes:
        draft = replace(planned, leftovers=manifest.LeftoverFiles(), hooks=())
        commit_attempt(draft, written, drafts, world_size=group.size)
        document = drafts.read(MANIFEST, max_bytes=1 << 62)
        named = strategy.files_of(parse_document(document, where=drafts.location))
        return json.dumps([[(name, drafts.size(name)) for name in named], document.decode()]).encode()

    listed, document = json.loads(from_rank(group, write_index, source=0, doing="writing the index"))
    small: list[SizedFile] = [(name, nbytes) for name, nbytes in listed]
    takes = {name for name, _ in small} if is_leader else set()
    broadcast_files(
        group, small, source=0, read_from=drafts, write_to=store, takes=takes, doing="writing the index"
    )
    return parse_document(document.encode(), where=f"{store.location}/{MANIFEST}")


def _sized(listed: bytes) -> list[SizedFile]:
    return [(name, nbytes) for name, nbytes in json.loads(listed)]


def _written_files(store: Store, strategy: SaveStrategy, attempt: str, rank: int) -> list[SizedFile]:
    """Return the data files that a rank has written in an attempt."""
    named = {"sharded_backend": strategy.backend, "sharded_backend_version": strategy.version}
    reader = load_strategy(named, where=store.location)
    mine = [
        name
        for name in store.names()
        if strategy.file_names.attempt_of(name) == attempt and reader.writer_of(name) == rank
    ]
    return [(name, store.size(name)) for name in mine]
