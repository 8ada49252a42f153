"""Proofs by digests that values and replicas are equal on all ranks that share them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megackpt.errors import CommonStateError, MismatchError, rank_list, truncated_list
from megackpt.ground.notices import notice

log = logging.getLogger(__name__)

# Proof that values which ranks share are equal on all of them, by digests of their leaves.
#
# Only rank 0's common state and one copy of a replicated value are stored, so other values would be lost.

_SAVED = (
    "Common state (what is not sharded) must be equal on all ranks, as only rank 0's is stored.",
    "Wrap what belongs to one rank in a ShardedObject (stored for each) or a LocalNonpersistentObject (not "
    "stored), or remove it. To store rank 0's value although others differ, as for the buffers of a "
    "BatchNorm, save with SaveOptions(rank0_values={globs}).",
)
_RANK_0S = (
    "Running statistics of norms differ between ranks, and rank 0's are stored:\n{paths}\n"
    "Make them equal (SyncBatchNorm, or a broadcast before the save), wrap them in a PerRankValue to store "
    "those of each rank, or save without this warning by SaveOptions(rank0_values={globs})."
)
_REQUESTED = (
    "LoadOptions(complete=True) loads only if the common state in the request is equal on all ranks.",
    "Give all ranks the same (a stage table, for example), leave out what belongs to one rank, or load with "
    "LoadOptions(complete=False).",
)
"""What is wrong, and what to do, where common state differs between ranks."""

_PATHS_SHOWN = 10
# A name, then names after dots, or names and numbers in brackets; a path of other texts is no glob of itself.
_SIMPLE_STEP = re.compile(r"\['?([\w.]+)'?\]")
_SIMPLE_PATH = re.compile(r"\w+(\.\w+|\['[\w.]+'\]|\[\d+\])*")


def check_common_equal(
    per_rank: Sequence[Mapping[str, str]], *, requested: bool = False, may_differ: Set[str] = frozenset()
) -> None:
    """Compare the digests of the leaves of every rank's common state with those of rank 0.

    Args:
        per_rank: digests by path, of each rank.
        requested: whether it is the common state of a load request, and not of a save; for the error's text.
        may_differ: paths whose values may differ between ranks, with a warning that rank 0's are stored.

    Raises:
        CommonStateError: lists each path that differs, is missing or is extra, and the ranks where it does.
    """
    # Faults are collected by path, so that one that many ranks share is one line.
    first = per_rank[0]
    faults: dict[tuple[str, str], list[int]] = {}  # (path, note) -> ranks
    for rank, leaves in enumerate(per_rank[1:], start=1):
        if leaves == first:
            continue
        for path in first.keys() | leaves.keys():
            if path not in leaves:
                faults.setdefault((path, " (missing there)"), []).append(rank)
            elif path not in first:
                faults.setdefault((path, " (missing on rank 0)"), []).append(rank)
            elif first[path] != leaves[path]:
                faults.setdefault((path, ""), []).append(rank)
    differing = {(path, note) for path, note in faults if path in may_differ and not note}
    if differing:
        paths = {path for path, _ in differing}
        text = truncated_list([repr(path) for path in sorted(paths)])
        notice(log, _RANK_0S.format(paths=text, globs=_globs_for(paths)))
    faults = {fault: ranks for fault, ranks in faults.items() if fault not in differing}
    if not faults:
        return
    lines = [
        f"{path!r} on rank(s) {rank_list(ranks)}{note}" for (path, note), ranks in sorted(faults.items())
    ]
    what, remedy = _REQUESTED if requested else _SAVED
    remedy = remedy.format(globs=_globs_for({path for path, _ in faults}))
    raise CommonStateError(
        f"{what} It differs from rank 0's at:\n{truncated_list(lines)}\n{remedy}",
        path=min(path for path, _ in faults),
        rank=min(min(ranks) for ranks in faults.values()),
    )


def absent_parts(parents_of_ranks: Sequence[Mapping[str, str]]) -> dict[str, int]:
    """Return the parts of common state that some ranks lack, with the lowest rank that has each. Pure.

    A part that is inside of another one goes with that one.

    Args:
        parents_of_ranks: for each rank, the paths of its parts, each with the path around it.
    """
    owners: dict[str, list[int]] = {}
    parents: dict[str, str] = {}
    for rank, of_rank in enumerate(parents_of_ranks):
        parents.update(of_rank)
        for path in of_rank:
            owners.setdefault(path, []).append(rank)
    absent = {path for path, ranks in owners.items() if len(ranks) < len(parents_of_ranks)}
    return {path: owners[path][0] for path in sorted(absent) if parents[path] not in absent}


def fill_absent_parts(
    per_rank: Sequence[Mapping[str, str]], absent: Mapping[str, int]
) -> list[dict[str, str]]:
    """Return digests by path of each rank, with those of a part that it lacks taken from another rank. Pure.

    So ranks without a part agree with it, and the ranks that have it are compared.

    Args:
        per_rank: digests by path, of each rank.
        absent: what `absent_parts` has returned.
    """
    filled = [dict(digests) for digests in per_rank]
    for part, owner in absent.items():
        inside = (f"{part}.", f"{part}[")
        of_owner = {path: digest for path, digest in per_rank[owner].items() if path.startswith(inside)}
        for digests in filled:
            if not any(path.startswith(inside) for path in digests):
                digests.update(of_owner)
    return filled


def _globs_for(paths: Set[str]) -> tuple[str, ...]:
    """Return globs that match some paths: where many have simple names, one for each last name."""
    if len(paths) <= _PATHS_SHOWN:
        return tuple(sorted(paths))
    simple = {
        path: _SIMPLE_STEP.sub(r".\1", path).split(".") for path in paths if _SIMPLE_PATH.fullmatch(path)
    }
    globs = {f"{names[0]}.*{names[-1]}" if len(names) > 1 else names[0] for names in simple.values()}
    return tuple(sorted(globs | (paths - simple.keys())))


def check_replicated_equal(per_rank: Sequence[Mapping[str, str]]) -> None:
    """Compare the digests of the replicated values of each rank, by key.

    Raises:
        MismatchError: lists each key with different values, and which ranks have equal ones.
    """
    differing = _differing(per_rank)
    if differing:
        raise MismatchError(
            f"Replicated values differ between ranks:\n{truncated_list(list(differing.values()))}\n"
            f"Make them equal before saving, or declare what belongs to one rank as a PerRankValue.",
            key=min(differing),
        )


def check_copies_equal(per_rank: Sequence[Mapping[str, str]]) -> None:
    """Compare the digests of chunks that ranks of different meshes declare as main replicas, by chunk.

    Raises:
        MismatchError: lists each chunk with different values, and which ranks have equal ones.
    """
    differing = _differing(per_rank)
    if differing:
        raise MismatchError(
            f"DTensors on several meshes, or torch's ShardedTensors of several process groups, have one key. "
            f"So they are copies of one array, but they differ:\n"
            f"{truncated_list(list(differing.values()))}\n"
            f"If they are parts of different arrays (stages of a pipeline), give each a key of its own; if "
            f"they should be equal, make them so, or save with validate_access_integrity=False to keep those "
            f"of the lowest rank.",
            key=min(differing).rpartition("[")[0],
        )


def _differing(per_rank: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return a line of text for each name that has several digests: which ranks have equal ones."""
    ranks_of_digest: dict[str, dict[str, list[int]]] = {}
    for rank, digests in enumerate(per_rank):
        for key, digest in digests.items():
            ranks_of_digest.setdefault(key, {}).setdefault(digest, []).append(rank)
    # A name that only some ranks have is no fault, if these agree.
    lines = {}
    for key, versions in sorted(ranks_of_digest.items()):
        if len(versions) > 1:
            groups = " and ".join(f"ranks {rank_list(ranks)}" for ranks in versions.values())
            lines[key] = f"{key!r}: {groups} hold different values"
    return lines


# Replicas that should be equal and are not: which ranks have which bits.
#
# Ranks send a name and a digest for each of their chunks. Chunks with equal names are replicas of each other.

REPLICA_DIGEST = np.dtype([("name", "V16"), ("digest", "V16")])
"""What a rank sends for one chunk: a hash of its key and box, and a digest of its bits."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Replicas of one chunk that differ.

    Attributes:
        name: hash of the key and box of the chunk.
        groups: the ranks that have equal bits; the group of most ranks first, then of the lowest rank.
    """

    name: bytes
    groups: tuple[tuple[int, ...], ...]

    @property
    def majority(self) -> tuple[int, ...] | None:
        """The ranks with the bits of more than half of all replicas; None if there are no such bits."""
        largest = self.groups[0]
        return largest if 2 * len(largest) > sum(map(len, self.groups)) else None

    def __str__(self) -> str:
        if self.majority is None:
            return f"no majority: {' | '.join(map(_ranks, self.groups))} hold different bits"
        others = " | ".join(map(_ranks, self.groups[1:]))
        is_one = sum(map(len, self.groups[1:])) == 1
        return f"{others} differ{'s' if is_one else ''} from the majority, {_ranks(self.majority)}"


def find_divergences(digests: Sequence[npt.NDArray[np.void]]) -> list[Divergence]:
    """Return the chunks whose replicas differ, sorted by name. Pure.

    Args:
        digests: an array of REPLICA_DIGEST for each rank, `[chunks]`. Names and digests may be shorter than
            in REPLICA_DIGEST, if they are so on all ranks.
    """
    if not digests:
        return []
    sent = np.concatenate(digests)
    rank = np.repeat(np.arange(len(digests)), [len(of_rank) for of_rank in digests])
    # Small numbers in place of names and digests are compared and sorted faster.
    _, name = np.unique(sent["name"], return_inverse=True)
    _, digest = np.unique(sent["digest"], return_inverse=True)
    name, digest = name.reshape(-1), digest.reshape(-1)
    # A name has different digests if its lowest and its highest number of a digest differ.
    lowest = np.full(int(name.max(initial=-1)) + 1, len(sent), np.int64)
    highest = np.full_like(lowest, -1)
    np.minimum.at(lowest, name, digest)
    np.maximum.at(highest, name, digest)
    rows = np.flatnonzero(lowest[name] != highest[name])
    rows = rows[np.lexsort((rank[rows], digest[rows], name[rows]))]
    # Rows are sorted by name, digest and rank, so groups and the ranks in them come in that order.
    ranks_of: dict[int, dict[int, list[int]]] = {}  # name -> digest -> ranks
    for row in rows.tolist():
        ranks_of.setdefault(int(name[row]), {}).setdefault(int(digest[row]), []).append(int(rank[row]))
    first = dict(zip(name[rows].tolist(), rows.tolist(), strict=True))
    return [
        Divergence(
            sent["name"][first[number]].tobytes(),
            tuple(sorted((tuple(ranks) for ranks in groups.values()), key=lambda g: (-len(g), g))),
        )
        for number, groups in ranks_of.items()
    ]


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_list(ranks)}"
