"""Parity files of a save: which rank writes which, their list, and what removing arrays leaves of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from megackpt.formats.documents import write_small_file
from megackpt.formats.native import names
from megackpt.formats.native.parity import ParityGroup, list_of, read_groups, write_parity_file
from megackpt.formats.strategy import Json
from megackpt.plans.planning.redundancy import parity_groups, parity_writer
from megackpt.storage import Store


def parity_work(sizes: Mapping[int, int], *, attempt: str, ranks: int, most: int) -> list[bytes]:
    """Return the parity files that each rank writes, with the data files that they protect, as JSON.

    Args:
        sizes: bytes of the data file of each rank that has one.
        attempt: id of the attempt.
        ranks: number of ranks.
        most: data files in a group, at most.
    """
    work: list[list[Any]] = [[] for _ in range(ranks)]
    for number, group in enumerate(parity_groups(np.array(list(sizes), np.int64), most=most)):
        members = [[names.data_file(attempt, rank), sizes[rank]] for rank in group.tolist()]
        work[parity_writer(group, number)].append([number, members])
    return [json.dumps(rank_work).encode() for rank_work in work]


def write_parity_files(store: Store, *, attempt: str, work: bytes) -> bytes:
    """Write the parity files of a rank, one after the other; return a receipt for `write_parity_list`."""
    written = []
    for number, members in json.loads(work):
        sizes = [(name, nbytes) for name, nbytes in members]
        written.append(write_parity_file(store, attempt=attempt, number=number, members=sizes).to_json())
    return json.dumps(written).encode()


def write_parity_list(store: Store, *, attempt: str, receipts: list[bytes]) -> Json:
    """Write the list of all ranks' parity files, if there are any; return its entry for metadata.json."""
    entries = [entry for receipt in receipts for entry in json.loads(receipt)]
    where = "receipts of parity files"
    # With the checks of a load, so that no list is committed that a load rejects.
    groups = [ParityGroup.from_json(entry, where=where, location=store.location) for entry in entries]
    if not groups:
        return {}
    groups.sort(key=lambda group: group.parity.name)
    return {"parity": write_small_file(store, names.parity_list(attempt), list_of(groups))}


def reduced_parity(store: Store, manifest: Json, kept: Set[str]) -> tuple[Json, set[str], set[str]]:
    """Keep the parity groups that protect at least one of some files; write their list if others go.

    Returns:
        The entry for metadata.json, if any group is kept; the files that these groups need; and those that
        nothing needs any more.
    """
    groups = read_groups(store, manifest)
    remaining = [group for group in groups if any(member.name in kept for member in group.members)]
    needed = {file.name for group in remaining for file in group.files}
    # The committed list stays valid; a new revision would have the same content.
    if len(remaining) == len(groups):
        return {"parity": manifest["parity"]}, needed, set()
    old = manifest["parity"]["file"]
    unneeded = {file.name for group in groups for file in group.files} - needed | {old}
    if not remaining:
        return {}, needed, unneeded
    new = names.parity_list(manifest["attempt"], revision=names.revision_of(old) + 1)
    return {"parity": write_small_file(store, new, list_of(remaining))}, needed, unneeded
