"""Which options of exchanges raise an error, and what a report has about exchanges."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megackpt import DeclarationError, LoadOptions, ShardedTensor, load, load_with_report, save
from megackpt.comm import Group, SingleProcess
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedRank, SimulatedWorld


class MessagesOnly(Group):
    """A group of a user, with only the two methods that a group must implement."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self._group = group.rank, group.size, group

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._group.all_gather(data)

    def gather(self, data: bytes) -> list[bytes]:
        return self._group.gather(data)


def state(replica: int = 0) -> dict[str, ShardedTensor]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.arange(1000.0), replica_id=replica)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exchange": "pigeons"}, "exchange='pigeons' is not known. Give one of auto, direct, all_to_all"),
        ({"exchange_bytes": 0}, "exchange_bytes is 0"),
        ({"cpu_transfer": False}, "cpu_transfer=False has no meaning with exchange='auto'"),
        ({"cpu_transfer": False, "exchange": "all_to_all"}, "only 'broadcast' and 'two_stage'"),
    ],
)
def test_options_that_make_no_sense_raise_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        LoadOptions(**options)


def test_groups_that_make_no_sense_raise_an_error() -> None:
    store = MemoryStore()
    save(state(), store)
    with pytest.raises(
        DeclarationError, match=r"exchange_group is given, but with LoadOptions\.exchange='auto' every rank"
    ):
        load(state(), store, exchange_group=SingleProcess())
    with pytest.raises(DeclarationError, match=r"which is not a megackpt\.comm\.Group"):
        load(state(), store, options=LoadOptions(exchange="all_to_all"), group=object())  # type: ignore[call-overload]
    with pytest.raises(DeclarationError, match="cpu_transfer=False broadcasts between devices"):
        load(state(), store, options=LoadOptions(exchange="broadcast", cpu_transfer=False))


@pytest.mark.parametrize("exchange", ["all_to_all", "broadcast", "gather_rounds", "gather_object"])
def test_a_group_of_a_user_needs_two_methods_to_exchange(exchange: str) -> None:
    store = MemoryStore()

    def run(group: SimulatedRank) -> list[float]:
        save(state(group.rank), store, group=group)
        wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(1000), replica_id=group.rank)}
        load(wanted, store, options=LoadOptions(exchange=exchange), group=MessagesOnly(group))  # type: ignore[arg-type]
        return wanted["w"].data.tolist()  # type: ignore[union-attr]

    assert SimulatedWorld(3).run(run) == [torch.arange(1000.0).tolist()] * 3


def test_one_process_alone_exchanges_with_nobody() -> None:
    store = MemoryStore()
    save(state(), store)
    wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(1000))}
    load(wanted, store, options=LoadOptions(exchange="two_stage"))
    assert torch.equal(wanted["w"].data, torch.arange(1000.0))  # type: ignore[arg-type]


def test_a_report_has_the_times_of_all_ranks() -> None:
    store = MemoryStore()

    def run(group: SimulatedRank) -> Any:
        save(state(group.rank), store, group=group)
        _, report = load_with_report(
            state(group.rank), store, options=LoadOptions(exchange="two_stage"), group=group
        )
        return report.times

    times = SimulatedWorld(3).run(run)
    assert times[0] == times[1] == times[2]
    assert times[0].read.min == 0.0
    assert 0.0 < times[0].read.mean < times[0].read.max
    assert times[0].exchange.min > 0.0
    assert str(times[0]).startswith("read: min 0.000 s, mean ")
