"""Proof that common state is the same on all ranks.

Owns the comparison of leaf digests. Only rank 0's common state is stored, so what differs elsewhere would be
lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megackpt.errors import MismatchError, truncated_list


def check_common_equal(per_rank: Sequence[Mapping[str, str]]) -> None:
    """Compare the digests of the leaves of every rank's common state with those of rank 0.

    Raises:
        MismatchError: naming each path that differs or is missing, and the ranks where it is.
    """
    first = per_rank[0]
    differing: dict[str, list[int]] = {}
    for rank, leaves in enumerate(per_rank[1:], start=1):
        for path in first.keys() | leaves.keys():
            if first.get(path) != leaves.get(path):
                differing.setdefault(path, []).append(rank)
    if not differing:
        return
    lines = [
        f"{path!r} on rank(s) {', '.join(map(str, ranks[:8]))}" for path, ranks in sorted(differing.items())
    ]
    raise MismatchError(
        f"Common state (what is not sharded) must be equal on all ranks, as only rank 0's is stored. It "
        f"differs from "
        f"rank 0's at:\n{truncated_list(lines)}\n"
        f"Wrap what belongs to one rank in a ShardedObject (stored for each) or a "
        f"LocalNonpersistentObject (not stored), "
        f"or remove it.",
        path=min(differing),
    )


def check_replicated_equal(per_rank: Sequence[Mapping[str, str]]) -> None:
    """Compare the digests of the replicated values that each rank holds, by key.

    Raises:
        MismatchError: naming each key of which ranks hold different values, and which ranks agree.
    """
    holders: dict[str, dict[str, list[int]]] = {}
    for rank, held in enumerate(per_rank):
        for key, digest in held.items():
            holders.setdefault(key, {}).setdefault(digest, []).append(rank)
    lines = []
    for key, versions in sorted(holders.items()):
        if len(versions) > 1:
            groups = " and ".join(f"ranks {', '.join(map(str, ranks[:8]))}" for ranks in versions.values())
            lines.append(f"{key!r}: {groups} hold different values")
    if lines:
        raise MismatchError(
            f"Replicated values differ between ranks:\n{truncated_list(lines)}\n"
            f"Make them equal before saving, or declare what belongs to one rank as PerRank.",
            key=min(key for key, versions in holders.items() if len(versions) > 1),
        )
