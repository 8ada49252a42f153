"""What the ranks of a load must agree on before they read, and the ranks that exchange.

Owns the comparison of what each rank says in the first message of a load: options of one rank that others do
not have would leave these waiting for messages that never come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from megackpt.comm import AnyGroup, Group, check_group_argument, subgroup
from megackpt.comm.device_group import DeviceGroup
from megackpt.engine.loading.exchange import ExchangeRanks
from megackpt.errors import DeclarationError, MismatchError
from megackpt.options import LoadOptions


def check_alike(answers: Sequence[Mapping[str, Any]], where: str) -> None:
    """Check what ranks must have in common before they read; all of them come to the same result.

    Raises:
        MismatchError: naming what differs, and on which rank.
    """
    differs = next((r for r, a in enumerate(answers) if a["opened"] != answers[0]["opened"]), None)
    if differs is not None:
        places = answers[0]["where"], answers[differs]["where"]
        if places[0] != places[1]:
            raise MismatchError(
                f"Ranks load different checkpoints: {places[0]} on rank 0 and {places[1]} on rank {differs}. "
                f"Name the same directory, or step, on all of them.",
                rank=differs,
                path=places[0],
            )
        raise MismatchError(
            f"{where} was saved anew while it was being opened: ranks see different checkpoints. Load again.",
            path=where,
        )
    ways = sorted({answer["exchange"] for answer in answers})
    if len(ways) > 1:
        raise MismatchError(
            f"{where}: ranks load by exchange={ways[0]!r} and {ways[1]!r}. Give all of them one.", path=where
        )
    for name, said in _SAID_ALIKE.items():
        if any(answer[name] != answers[0][name] for answer in answers):
            other = next(rank for rank, answer in enumerate(answers) if answer[name] != answers[0][name])
            raise MismatchError(
                f"{where}: ranks 0 and {other} differ in {said}. Give all of them the same.",
                rank=other,
                path=where,
            )
    for members, count in Counter(answer["members"] for answer in answers).items():
        if members and int(members.partition(":")[0]) != count:
            rank = next(rank for rank, answer in enumerate(answers) if answer["members"] == members)
            raise MismatchError(
                f"{where}: the exchange_group of rank {rank} is not that of each of its members. Groups of "
                f"different ranks have no rank in common, and each rank gives its own.",
                rank=rank,
                path=where,
            )


_SAID_ALIKE = {
    "timeout_s": "LoadOptions.timeout_s",
    "cpu_transfer": "cpu_transfer",
    "has_exchange_group": "whether they give an exchange_group",
    "missing": "what they do about missing keys (strict, rules and rename)",
}


def check_exchange(options: LoadOptions, exchange_group: AnyGroup | None) -> None:
    """Check what can be known about the ranks that exchange before they meet.

    Raises:
        DeclarationError: the options and the group do not fit each other.
    """
    if options.exchange != "direct":
        if exchange_group is not None:
            check_group_argument("exchange_group", exchange_group)
        if not options.cpu_transfer:
            DeviceGroup(exchange_group)
    elif exchange_group is not None:
        raise DeclarationError(
            "exchange_group is given, and LoadOptions.exchange is 'direct': every rank reads by itself, and "
            "no group is needed. Choose how to exchange, 'all_to_all' for instance, or leave the group out."
        )


def exchange_ranks(options: LoadOptions, group: Group, exchange_group: AnyGroup | None) -> ExchangeRanks:
    """Connect the ranks that exchange. Collective over them at the first call.

    Raises:
        RankFailedError: they could not be connected.
    """
    devices = None if options.cpu_transfer else DeviceGroup(exchange_group)
    given = group if exchange_group is None else exchange_group
    return ExchangeRanks(subgroup(given, timeout_s=options.timeout_s), devices)
