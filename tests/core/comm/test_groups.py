"""Groups of ranks: collectives, errors that all ranks raise, and notices of all ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megackpt import (
    Checkpointer,
    CoverageError,
    DeclarationError,
    KeyRule,
    LoadOptions,
    PerRankValue,
    Policy,
    RankFailedError,
    ShardedTensor,
    StorageError,
    save,
)
from megackpt.comm import (
    Group,
    broadcast_from_rank_0,
    compare_step,
    encode_error,
    errors_on_all_ranks,
    scatter_step,
    store_group,
)
from megackpt.comm.store_group import PART_BYTES, StoreGroup
from megackpt.comm.store_host import StoreAddress, StoreHost, connect_store
from megackpt.comm.transport import LostPeerError, PairTransport
from megackpt.ground.notices import collected_notices, log_notices, notice
from megackpt.testing.world import SimulatedWorld
from tests.support.groups import MessagesOnly, compared, gathered, on_clients, scattered, shared
from tests.support.states import sharded
from tests.support.worlds import error_of_all, loading

KINDS: dict[str, Callable[[Group], Group]] = {"reducing": lambda group: group, "plain": MessagesOnly}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_learn_what_is_equal_and_what_is_largest(kind: str, ranks: int) -> None:
    def run(group: Group) -> tuple[list[bool], list[int]]:
        return compared(KINDS[kind](group), (7, 5 + (group.rank == 1), 0), (group.rank, 2**61))

    for result in SimulatedWorld(ranks).run(run):
        assert result == ([True, ranks == 1, True], [ranks - 1, 2**61])


@kinds
def test_a_failure_of_one_rank_is_that_of_all(kind: str) -> None:
    def run(group: Group) -> None:
        with compare_step(KINDS[kind](group), "comparing", equal=("a number",)) as step:
            if group.rank == 2:
                raise StorageError("no space", path="p")
            step.equal["a number"] = 1

    error = error_of_all(3, run, StorageError)
    assert (error.rank, error.path) == (2, "p")
    assert "Rank 2 failed while comparing: no space" in str(error)


@kinds
@pytest.mark.parametrize("other", ["gather", "compare"])
def test_ranks_that_compare_while_others_do_something_else_raise_an_error(kind: str, other: str) -> None:
    def run(simulated: Group) -> object:
        group = KINDS[kind](simulated)
        if group.rank == 1 and other == "gather":
            return shared(group, b"x", doing="reading")
        return compared(group, (1,), doing="reading" if group.rank == 1 else "comparing")

    for rank, error in enumerate(SimulatedWorld(2).outcomes(run)):
        assert isinstance(error, RankFailedError)
        assert f"rank(s) {1 - rank} sent what belongs to {('reading', 'comparing')[rank]!r}" in str(error)


@kinds
@pytest.mark.parametrize("ranks", [1, 3])
def test_rank_0_gives_each_rank_its_part_and_gathers_what_they_have(kind: str, ranks: int) -> None:
    def run(simulated: Group) -> tuple[bytes, bytes, list[bytes]]:
        group = KINDS[kind](simulated)
        part = scattered(group, [bytes([r] * r) for r in range(ranks)])
        of_rank_0 = broadcast_from_rank_0(group, b"abc" if group.rank == 0 else b"", doing="sharing")
        return part, of_rank_0, gathered(group, part)

    parts = [bytes([r] * r) for r in range(ranks)]
    for rank, results in enumerate(SimulatedWorld(ranks).run(run)):
        assert results == (parts[rank], b"abc", parts if rank == 0 else [])


@kinds
def test_what_rank_0_finds_wrong_with_others_is_reported_unchanged_and_its_mistake_is_called_so(
    kind: str,
) -> None:
    def run(group: Group, own: Exception) -> None:
        with scatter_step(KINDS[kind](group), "planning"):
            if group.rank == 0:
                raise own

    wrong = CoverageError("nobody saves 'w'", key="w", rank=2)
    of_others = error_of_all(3, lambda group: run(group, wrong), CoverageError)
    assert (of_others.message, of_others.key, of_others.rank) == ("nobody saves 'w'", "w", 2)
    error = error_of_all(3, lambda group: run(group, ZeroDivisionError("oh")), RankFailedError)
    assert error.rank == 0
    assert "Rank 0 failed while planning: ZeroDivisionError: oh" in str(error)


@kinds
@pytest.mark.parametrize("collective", [compare_step, errors_on_all_ranks, scatter_step])
def test_what_failed_here_is_not_forgotten_when_another_rank_is_gone(kind: str, collective: Any) -> None:
    def run(group: Group, own: Exception) -> None:
        if group.rank == 1:
            return  # does not come
        with collective(KINDS[kind](group), "comparing"):
            raise own

    mistake = ZeroDivisionError("oh")
    error = SimulatedWorld(2).outcomes(lambda group: run(group, mistake))[0]
    assert isinstance(error, RankFailedError)
    assert error.__cause__ is mistake
    first = RankFailedError("rank 1 was lost in the step", rank=1)
    assert SimulatedWorld(2).outcomes(lambda group: run(group, first))[0] is first


RANKS = 3


def on_ranks(server: Any, act: Callable[[StoreGroup], Any], *, timeout_s: float = 10) -> list[Any]:
    """Run on every rank, each with a client of its own; return results or errors."""
    group = partial(StoreGroup, prefix="job", size=RANKS, timeout_s=timeout_s)
    return on_clients(server, RANKS, lambda client, rank: act(group(client, rank=rank)))


@pytest.mark.parametrize("nbytes", [0, 3, PART_BYTES + 5])
def test_messages_arrive_and_nothing_of_them_stays(server: Any, nbytes: int) -> None:
    parts = [bytes([65 + rank]) * (nbytes * rank) for rank in range(RANKS)]

    def meet(group: StoreGroup) -> None:
        own_parts = parts[group.rank]
        assert shared(group, own_parts) == parts
        assert gathered(group, own_parts) == ([] if group.rank else parts)
        assert scattered(group, parts) == own_parts
        assert compared(group, (1, group.rank), (group.rank,)) == ([True, False], [RANKS - 1])
        group.leave()

    before = server.num_keys()
    assert on_ranks(server, meet) == [None] * RANKS
    assert server.num_keys() == before


def test_a_rank_that_does_not_come_is_named_to_all(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(group: StoreGroup) -> None:
        group._while_waiting = lambda: beats.append(group.rank)
        if group.rank != 1:
            shared(group, b"", doing="waiting")

    beats: list[int] = []  # of those who wait: they are not stuck
    monkeypatch.setattr(store_group, "LOOK_EVERY_S", 0.1)
    first, _, last = on_ranks(server, meet, timeout_s=6)
    assert set(beats) == {0, 2}
    for error in (first, last):
        assert isinstance(error, RankFailedError)
        assert error.rank == 1
        assert "No answer from the writer process of rank(s) 1 within 6 s" in str(error)


def test_those_who_wait_learn_that_a_rank_has_given_up(server: Any) -> None:
    host = StoreHost(server, StoreAddress("localhost", server.port))
    assert not host.is_aborted("job")

    def meet(group: StoreGroup) -> None:
        if group.rank == 1:
            host.abort("job", encode_error(RankFailedError("the writer was killed", rank=1)))
            return
        shared(group, b"", doing="waiting")

    first, _, last = on_ranks(server, meet, timeout_s=60)
    assert str(first) == str(last) == "the writer was killed"
    assert first.rank == last.rank == 1
    assert host.is_aborted("job")


def test_a_store_that_goes_away_is_an_error_that_names_it() -> None:
    owned = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)]
    client = connect_store(StoreAddress("localhost", owned[0].port), timeout_s=30)
    group = StoreGroup(client, prefix="job", rank=1, size=2, timeout_s=30)
    threading.Timer(0.3, owned.clear).start()
    with pytest.raises(RankFailedError, match="Rank 0 hosts it") as raised:
        shared(group, b"", doing="waiting")
    assert raised.value.rank == 0


def test_a_store_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(RankFailedError, match=r"at localhost:1 cannot be reached.*coordinator_host"):
        connect_store(StoreAddress("localhost", 1), timeout_s=0.3)


def test_of_several_that_give_up_at_once_all_learn_of_the_first(server: Any) -> None:
    address = StoreAddress("localhost", server.port)
    together_now = threading.Barrier(RANKS)

    def give_up(group: StoreGroup) -> list[bytes]:
        host = StoreHost(connect_store(address, timeout_s=30), address)
        encoded = encode_error(RankFailedError("gone", rank=group.rank))
        message = []
        for number in range(200):
            together_now.wait()
            message.append(host.abort(f"job-{number}", encoded))
        return message

    first, *others = on_ranks(server, give_up)
    assert all(message == first for message in others)


READERS = 4
log = logging.getLogger("megackpt.tests")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def load_on_ranks(directory: Path, state: Any, **arguments: Any) -> None:
    """Load on all ranks; state gives what a rank asks for."""
    SimulatedWorld(READERS).run(loading(state, directory, **arguments))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save({"a": sharded("a", torch.ones(4)), "b": sharded("b", torch.ones(2))}, tmp_path / "c", "torch_dist")
    return tmp_path / "c"


def test_each_warning_of_a_load_is_logged_once(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    rules = (KeyRule(keys="a", cast=Policy.WARN),)
    options = LoadOptions(rules=rules, allow_unsafe_pickle=True)

    def state(rank: int) -> dict[str, ShardedTensor]:
        asked = {"a": torch.zeros(4, dtype=torch.bfloat16), "new": torch.zeros(1)}
        return {key: sharded(key, data, replica_id=rank) for key, data in asked.items()}

    load_on_ranks(directory, state, strict="log_all", options=options)
    message = warnings_of(caplog)
    assert len(message) == len(set(message)) == 4
    for part in ("allow_unsafe_pickle", "'new'", "'b'", "stored as float32"):
        assert len([text for text in message if part in text]) == 1, message


def test_what_only_some_ranks_see_names_one_of_them(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def state(rank: int) -> dict[str, ShardedTensor]:
        return {"new": sharded("new", torch.zeros(1))} if rank > 1 else {"a": sharded("a", torch.zeros(4))}

    load_on_ranks(directory, state, strict="log_unexpected")
    (message,) = warnings_of(caplog)
    assert message.startswith("Rank 2 and 1 more: ")


def test_values_that_every_rank_keeps_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save({"r": PerRankValue("r", 1)}, tmp_path / "c")
    load_on_ranks(tmp_path / "c", lambda rank: {"r": PerRankValue("r", rank, elsewhere="keep")})
    assert len(warnings_of(caplog)) == 1


def test_going_back_to_an_older_step_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"a": sharded("a", torch.ones(4))})
    next((tmp_path / "iter_0000002" / "data").iterdir()).unlink()

    def load_rank(group: Group) -> None:
        options = LoadOptions(on_corrupt="fallback")
        Checkpointer(tmp_path, group=group, load_options=options).load({"a": sharded("a", torch.zeros(4))})

    SimulatedWorld(READERS).run(load_rank)
    assert len([text for text in warnings_of(caplog) if "going back to step 1" in text]) == 1


def test_warnings_of_a_block_that_fails_are_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError), collected_notices():  # noqa: PT012
        notice(log, "first")
        raise KeyError("stop")
    notice(log, "at once")
    with collected_notices() as owned:
        notice(log, "later")
    assert warnings_of(caplog) == ["first", "at once"]
    log_notices([owned, owned])
    log_notices([[], owned])
    assert warnings_of(caplog)[2:] == ["later", "Rank 1: later"]


class NoConnection(PairTransport):
    """A transport whose peers cannot be connected: gloo raises a ValueError for some addresses."""

    def __init__(self) -> None:  # without a store and devices
        self._peers, self.attempts = {}, list[int]()

    def _connect(self, peer: int, deadline: float) -> tuple[Any, int]:
        self.attempts.append(peer)
        raise ValueError("no such device")


def test_an_error_of_any_class_is_that_of_the_peer_and_the_next_transfer_connects_again() -> None:
    transport = NoConnection()
    for _ in range(2):
        transfer = transport.begin([(1, memoryview(bytearray(8)))], [], timeout_s=30)
        with pytest.raises(LostPeerError) as raised:
            transfer.wait(20)  # returns False if the thread has died
        assert raised.value.rank == 1
        assert isinstance(raised.value.why, ValueError)
    assert transport.attempts == [1, 1]
    transport._peers[1].close()


def test_the_error_of_a_rank_comes_before_those_of_ranks_that_wait_for_it(tmp_path: Path) -> None:
    def on_rank(group: Group) -> None:
        if group.rank == 1:
            raise KeyError("of the user")
        save({}, tmp_path, group=group)

    with pytest.raises(KeyError, match="of the user"):
        SimulatedWorld(3).run(on_rank)

    def declares(group: Group) -> None:
        cut = (0, group.rank + 1, 2)
        save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4), cut)}, tmp_path, group=group)

    with pytest.raises(DeclarationError, match="invalid rank offset"):
        SimulatedWorld(2).run(declares)


def test_a_rank_that_has_ended_early_is_named_at_once() -> None:
    def on_rank(group: Group) -> None:
        if group.rank == 0:
            group.all_gather(b"")

    with pytest.raises(RankFailedError, match=r"rank\(s\) \[1\] ended without this step"):
        SimulatedWorld(2).run(on_rank)
