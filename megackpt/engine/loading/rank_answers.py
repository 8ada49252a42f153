"""Comparisons between ranks before they read: the same checkpoint, with options that match.

If ranks gave different options, some of them would wait for messages that never come.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megackpt.engine.loading.prepared_load import PreparedLoad
from megackpt.engine.loading.source import LoadRequest
from megackpt.errors import MismatchError
from megackpt.ground.notices import Notices


@dataclass(frozen=True, slots=True)
class RankAnswers:
    """The messages of all ranks about their prepared loads, in rank order; see `answer_of` for the fields."""

    answers: Sequence[Mapping[str, Any]]

    def values(self, name: str) -> list[Any]:
        """Return one field of all ranks."""
        return [answer[name] for answer in self.answers]

    def union(self, name: str) -> set[str]:
        """Return the texts that any rank has in a field, which is a list."""
        return {text for texts in self.values(name) for text in texts}


def answer_of(request: LoadRequest, prepared: PreparedLoad, notices: Notices) -> bytes:
    """Return this rank's message about its prepared load, as JSON."""
    options, group, rules = request.options, request.exchange_group, prepared.rules
    by_map = prepared.plan.by_map
    members = ""
    if group is not None:
        from megackpt.comm.process_groups import subgroup_members

        members = subgroup_members(group)
    answer = {
        "checkpoint": prepared.contents.identity,
        "where": prepared.where,
        "timeout_s": float(options.timeout_s),
        # Only where they are compared: all ranks receive the keys of all.
        "requested": sorted(prepared.stored_keys) if rules.looks_for_missing_keys else [],
        "empty_containers": prepared.empty_containers,
        "missing_key_rules": [
            rules.about_missing_keys,
            dict(options.rename) if rules.looks_for_missing_keys else 0,
        ],
        "complete": options.complete,
        "maps": "" if by_map is None else by_map.map_digest,
        "idle_patterns": prepared.idle_patterns,
        "notices": notices,
        "exchange": options.exchange,
        "read_ratio": 1.0 if by_map is None else by_map.read_ratio,
        "cpu_transfer": options.cpu_transfer,
        "has_exchange_group": group is not None,
        "exchange_group": members,
    }
    return json.dumps(answer).encode()


_EQUAL_FIELDS = {
    "timeout_s": "LoadOptions.timeout_s",
    "cpu_transfer": "cpu_transfer",
    "has_exchange_group": "whether they give an exchange_group",
    "complete": "LoadOptions.complete",
    "maps": "maps and config, which make the map between names",
    "missing_key_rules": "what they do about missing keys (strict, rules and rename)",
}
"""Fields that must be equal on all ranks, and their names in error texts."""


def check_answers(messages: Sequence[bytes], where: str) -> RankAnswers:
    """Return the answers of all ranks if they fit together. All ranks come to the same result.

    Raises:
        MismatchError: ranks differ; the text names the difference and the rank.
    """
    ranks = RankAnswers([json.loads(message) for message in messages])
    _check_same_checkpoint(ranks, where)
    modes = sorted(set(ranks.values("exchange")))
    if len(modes) > 1:
        raise MismatchError(
            f"{where}: ranks load by exchange={modes[0]!r} and {modes[1]!r}. Give all of them one.",
            path=where,
        )
    for name, title in _EQUAL_FIELDS.items():
        rank = _first_different(ranks.values(name))
        if rank is not None:
            raise MismatchError(
                f"{where}: ranks 0 and {rank} differ in {title}. Give all of them the same.",
                rank=rank,
                path=where,
            )
    _check_exchange_groups(ranks, where)
    return ranks


def _check_same_checkpoint(ranks: RankAnswers, where: str) -> None:
    rank = _first_different(ranks.values("checkpoint"))
    if rank is None:
        return
    locations = ranks.values("where")
    if locations[0] == locations[rank]:
        raise MismatchError(
            f"{where} was saved anew while it was being opened: ranks see different checkpoints. Load again.",
            path=where,
        )
    raise MismatchError(
        f"Ranks load different checkpoints: {locations[0]} on rank 0 and {locations[rank]} on rank {rank}. "
        f"Name the same directory, or step, on all of them.",
        rank=rank,
        path=locations[0],
    )


def _check_exchange_groups(ranks: RankAnswers, where: str) -> None:
    """Check that as many ranks name a group as it has members."""
    groups = ranks.values("exchange_group")
    for group, count in Counter(groups).items():
        # The text of a group begins with the number of its members; see `subgroup_members`.
        if group and int(group.partition(":")[0]) != count:
            rank = groups.index(group)
            raise MismatchError(
                f"{where}: the exchange_group of rank {rank} is not that of each of its members. Groups of "
                f"different ranks have no rank in common, and each rank gives its own.",
                rank=rank,
                path=where,
            )


def _first_different(values: Sequence[Any]) -> int | None:
    """Return the first rank whose value is not that of rank 0."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)
